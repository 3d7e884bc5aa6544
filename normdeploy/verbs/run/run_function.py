"""Open an ONNX file or an engine as a runner, or run it once on given or generated inputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from ...errors import GraphError, InputError, NormdeployError
from ...findings.rendering import Renderable
from ...inputs.array_conversion import to_numpy
from ...inputs.file_inputs import describe_file_inputs, parse_input_values
from ...inputs.token_prompts import IDS, MASK
from ...model import DEFAULT_SIZES, Dim, InputSpec, ModelSignature, require_multiples
from ...option_values import PROVIDERS
from ...runtimes.named_runners import require_named_runner
from ...runtimes.session_runner import SessionRunner
from ...runtimes.size_search import find_runnable_sizes
from ...runtimes.trt_runner import is_engine
from ...storage.export_record import read_record
from ...storage.file_replacement import resolve_writable_path
from ...storage.image_metadata import image_ranges
from ...storage.npz_files import read_npz, write_npz
from ...storage.onnx_files import load_onnx, require_terminating_file
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..run.run_options import RunCall, RunnerCall
from .token_generation import TOKENS, generate_tokens, require_token_options

# torch takes seconds to import.
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ...model import TensorSpec
    from ...runtimes.live_runner import LiveRunner


@dataclass(frozen=True, repr=False)
class Inference(Renderable):
    """Result of ``run``.

    Attributes:
        runner: name of the runner for users.
        inputs, outputs: name -> "dtype[shape]".
        arrays: output name -> array.
        seconds: stage -> seconds.
        texts: generated text of each prompt; () without a tokenizer or without ``generate``.
        lengths: number of generated tokens of each prompt, without the padding behind its end; () without ``generate``.
    """

    runner: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    arrays: dict[str, np.ndarray]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        outputs = ", ".join(f"{name} {text}" for name, text in self.outputs.items())
        return f"{self.runner}, {self.seconds['run']:.3f} s: {outputs}"

    def to_json(self) -> dict[str, Any]:
        """Describe the run without its arrays, except for generated tokens.

        Returns:
            The runner, and "dtype[shape]" of each input and output. With ``generate``, also the generated tokens and
            texts.
        """
        described: dict[str, Any] = {"runner": self.runner, "inputs": self.inputs, "outputs": self.outputs}
        if set(self.arrays) == {TOKENS}:
            rows = zip(self.arrays[TOKENS].tolist(), self.lengths, strict=True)
            described |= {"tokens": [row[:length] for row, length in rows], "texts": list(self.texts)}
        return described

    def show(self, console: Console) -> None:
        from .run_tables import show_inference

        show_inference(console, self)


@take_fields_as_arguments(RunnerCall, onnx="path")
def open_runner(call: RunnerCall) -> LiveRunner:
    """Open an ONNX file or an engine as a runner.

    The content of the file decides whether it is an ONNX file or an engine.

    Args:
        path: the file, an ONNX model in memory, or a result of ``export``.
        provider: "cpu" (the default for an ONNX file) or "cuda"; engines run only on a GPU.
        device: index of the GPU.
        profile_index: optimization profile of an engine; None uses the first profile that accepts the shapes of each
            call.
        stream: the CUDA stream to run on: a torch or cupy stream, its handle, or an object with ``__cuda_stream__``.
        cuda_graph: record the run as a CUDA graph and replay it.
        threads: threads of one operator on the CPU. 0 uses one for each core, but a single one in onnxruntime-web.
        runner: name of the runtime that runs the file instead of onnxruntime: "openvino", "openvino-bf16",
            "openvino-fp16", "onnxruntime-web", or the runtime of an installed package
            (`normdeploy.runtimes.third_party_runner`).
        runtime_cache: file for the kernels that TensorRT-RTX compiles when an engine first runs. None reads
            ``<path>.runtime-cache`` if it exists. True also replaces this file when the runner is closed. A path does
            the same with another file. False uses no cache.
        weight_budget: bytes of weights that stay on the GPU, for an engine that was built with weight streaming. None
            keeps all weights there.

    Returns:
        A runner with ``infer`` and ``prepare``; close it, or use it as a context manager.

    Raises:
        InputError: the file does not exist, is neither ONNX nor an engine, or the options do not fit it.
        GraphError: onnxruntime refuses the file, or the file contains a loop that never ends.
        RuntimeUnavailable: a package, a GPU or a kernel is missing.
        NormdeployError: the engine is for another GPU or version.
    """
    # ``take_fields_as_arguments`` has saved a model in memory as a file.
    path = cast(PathLike, call.path)
    if call.provider not in (None, *PROVIDERS):
        raise InputError(f"unknown provider {call.provider!r}; choose one of {', '.join(PROVIDERS)}")
    if call.device < 0:
        raise InputError(f"the device is {call.device}; GPUs are counted from 0")
    if call.runner is not None:
        return _open_named_runner(path, call.runner, call)
    if is_engine(path):
        return _open_engine(path, call)
    if call.weight_budget is not None:
        raise InputError(f"{os.fspath(path)!r} is not an engine and does not stream weights; omit weight_budget")
    if call.runtime_cache:
        raise InputError(f"{os.fspath(path)!r} is not an engine and has no runtime cache; omit runtime_cache")
    if call.profile_index is not None:
        raise InputError(
            f"{os.fspath(path)!r} is not an engine and has no profile {call.profile_index}; omit profile_index"
        )
    if call.provider != "cuda" and (call.stream is not None or call.cuda_graph or call.device):
        raise InputError(
            "device, stream and cuda_graph apply to a GPU, but an ONNX file runs on the CPU; add provider='cuda'"
        )
    require_terminating_file(path)
    return SessionRunner(path, call.provider or "cpu", call.device, call.stream, call.cuda_graph, call.threads)


def _open_engine(path: PathLike, call: RunnerCall) -> LiveRunner:
    if call.provider == "cpu":
        raise InputError(
            f"{os.fspath(path)!r} is an engine, which runs on a GPU and not on the provider 'cpu'; omit the provider"
        )
    from ...runtimes.engine_runner import EngineRunner

    return EngineRunner(
        path, call.device, call.stream, call.profile_index, call.cuda_graph, call.runtime_cache, call.weight_budget
    )


def _open_named_runner(path: PathLike, runner: str, call: RunnerCall) -> LiveRunner:
    further = require_named_runner(runner)
    if is_engine(path):
        raise InputError(f"{os.fspath(path)!r} is an engine, which TensorRT runs; omit the runner {runner!r}")
    if call.only_for_others or (call.threads and not further.provider):
        threads = "" if further.provider else " threads,"
        raise InputError(
            f"provider, device, stream, cuda_graph,{threads} runtime_cache and weight_budget apply to"
            f" onnxruntime and TensorRT, but the runner is {runner!r}; omit them"
        )
    require_terminating_file(path)
    return further.open(path, call.threads)


@take_fields_as_arguments(RunCall, onnx="source")
def run(call: RunCall) -> Inference:
    """Run an ONNX file or an engine once.

    Args:
        source: the file, an ONNX model in memory, a result of ``export``, or a folder with a single ONNX file.
        inputs: an .npz file, or name -> array. None generates inputs from the sizes and values that ``export`` recorded
            in the file. Without a record, the shapes of the file are used; for an engine, the opt shapes of its
            profile.
        output: an .npz file for the outputs. Generated inputs are written to ``<stem of output>.inputs.npz`` in the
            same folder.
        provider, device, profile_index, runtime_cache, weight_budget: as for ``open_runner``.
        seed: seed of the generated inputs.
        runner: as for ``open_runner``.
        stated_inputs: sizes and values of generated inputs of an ONNX file, such as ``ids:int64[2,8]{0:30522}``. Values
            without sizes are ``sr=16000``, ``ids=0:30522`` or ``ids=FILE.npy``; the array of the file is used
            unchanged.
        generate: number of tokens to generate after each prompt with a decoder file that has a cache
            (``normdeploy.runtimes.cached_decoder``). The only output is ``tokens``, int64 [prompts, generate]. With a
            tokenizer, a token that ends a text ends the answer, and the rows may be shorter. Without prompts,
            ``inputs`` gives ``input_ids`` and ``attention_mask``, or random tokens are continued.
        prompts: texts to continue.
        prompt_ids: token ids to continue: sequences of numbers, or texts such as "1,15,7".
        chat: make each prompt one message of the user in the tokenizer's chat template.
        tokenizer: folder of the tokenizer; None takes the folder of the file.

    Returns:
        The output arrays, types and shapes of inputs and outputs, notes and times.

    Raises:
        InputError: the inputs do not fit, or can't be generated.
        NormdeployError: as for ``open_runner``; or ``output`` can't be written.
    """
    call = replace(call, source=_find_file(cast(PathLike, call.source)))
    source = cast(PathLike, call.source)
    inputs = call.inputs
    output = call.output
    if call.stated_inputs and inputs is not None:
        raise InputError("inputs are passed as arrays and also described; omit one of them")
    if call.stated_inputs and is_engine(source):
        raise InputError(f"{os.fspath(source)!r} is an engine, whose inputs can't be described; pass arrays")
    beside = None if output is None else Path(output).with_suffix(".inputs.npz")
    for target in [t for t in (output, beside if inputs is None else None) if t is not None]:
        _require_distinct(
            resolve_writable_path(target), [p for p in (source, inputs) if isinstance(p, str | os.PathLike)]
        )
    require_token_options(call)
    start = time.perf_counter()
    notes = list[str]()
    opening = open_runner(
        source,
        provider=call.provider,
        device=call.device,
        profile_index=call.profile_index,
        runner=call.runner,
        runtime_cache=call.runtime_cache,
        weight_budget=call.weight_budget,
    )
    with opening as opened:
        loaded = time.perf_counter()
        if call.generate is not None:
            made = generate_tokens(opened, source, call, call.generate)
            done = time.perf_counter()
            if output is not None:
                write_npz(output, {TOKENS: made.tokens})
            arrays = {TOKENS: made.tokens}
            loading = loaded - start + made.load_seconds
            seconds = {"load": loading, "run": done - start - loading}
            return Inference(
                opened.name,
                _describe_types({IDS: made.prompts.ids, MASK: made.prompts.mask}),
                _describe_types(arrays),
                arrays,
                (*opened.notes, *made.notes),
                seconds,
                made.texts,
                made.lengths,
            )
        if inputs is None:
            feeds, notes = _generate_feeds_for(opened, source, call)
        else:
            if isinstance(inputs, Mapping):
                feeds = dict(inputs)
            else:
                feeds = _view_bfloat16(read_npz(inputs), opened.inputs)
        if inputs is not None or call.stated_inputs:
            _require_recorded_steps(source, feeds)
        ready = time.perf_counter()
        outputs = opened.infer(feeds)
        done = time.perf_counter()
    if output is not None:
        if inputs is None and beside is not None:
            write_npz(beside, feeds)
        write_npz(output, {name: copy_to_host(value) for name, value in outputs.items()})
    seconds = {"load": loaded - start, "run": done - ready}
    return Inference(
        opened.name, _describe_types(feeds), _describe_types(outputs), outputs, (*opened.notes, *notes), seconds
    )


def _find_file(source: PathLike) -> PathLike:
    """Find the only ONNX file of a folder.

    Returns:
        The file; ``source`` itself if it is not a folder.

    Raises:
        InputError: the folder has no ONNX file, or several.
    """
    if not os.path.isdir(source):
        return source
    files = sorted(Path(source).glob("*.onnx"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise InputError(
            f"the folder {os.fspath(source)!r} has no ONNX file: pass the file, or export the model into the folder"
        )
    names = ", ".join(file.name for file in files)
    raise InputError(f"the folder {os.fspath(source)!r} has {len(files)} ONNX files ({names}): pass one of them")


def _require_recorded_steps(source: PathLike, feeds: Mapping[str, Any]) -> None:
    """Refuse arrays whose sizes are not multiples of the recorded steps.

    Raises:
        InputError: a size is not a multiple; the message names the nearest multiples.
    """
    for name, spec in recorded_specs(source).items():
        for dim, size in zip(spec.shape, getattr(feeds.get(name), "shape", ()), strict=False):
            require_multiples(f"the dim {dim.name!r} of input {name!r}", [size], dim.step)


def _generate_feeds_for(runner: LiveRunner, source: PathLike, call: RunCall) -> tuple[dict[str, Any], list[str]]:
    """Generate inputs from the file's export record and the user's ``stated_inputs``.

    Returns:
        The inputs, and notes.
    """
    known = recorded_specs(source)
    if call.stated_inputs:
        known |= parse_input_specs(source, call.stated_inputs)
    feeds, notes = generate_feeds(
        runner.inputs,
        known,
        call.seed,
        call.profile_index or 0,
        runs=lambda tried: can_run(runner.infer, tried),
        pixels=recorded_pixels(source),
    )
    return feeds | load_arrays(call.stated_inputs, [spec.name for spec in runner.inputs]), notes


def can_run(infer: Callable[[Mapping[str, Any]], object], feeds: Mapping[str, Any]) -> bool:
    """Check whether a runner accepts the inputs.

    Returns:
        False if the run raises a NormdeployError.
    """
    try:
        infer(feeds)
    except NormdeployError:
        return False
    return True


def parse_sizes(given: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Parse sizes of dims from a mapping or from texts such as "batch=8".

    Returns:
        Name of a dim -> size.

    Raises:
        InputError: a text can't be read, or a size is below 1.
    """
    texts = [f"{name}={size}" for name, size in given.items()] if isinstance(given, Mapping) else given
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise InputError(f"can't read the size {text!r}; write name=size, such as batch=8")
        if sizes.setdefault(name, int(size)) != int(size):
            raise InputError(f"the dim {name!r} has two sizes, {sizes[name]} and {size}; pass one")
    return sizes


def _require_distinct(target: Path, sources: list[PathLike]) -> None:
    for source in sources:
        if os.path.realpath(source) == os.fspath(target):
            raise InputError(
                f"the output {target.name!r} would overwrite the input {os.fspath(source)!r}; choose another"
                " name with -o"
            )


def recorded_specs(source: PathLike) -> dict[str, Any]:
    """Read the inputs that ``export`` recorded in a file.

    Returns:
        Name -> InputSpec; empty for an engine, or a file without a record.
    """
    if is_engine(source):
        return {}
    try:
        return {spec.name: spec for spec in read_record(load_onnx(source, external_data=False)).get("inputs", ())}
    except GraphError:
        # onnxruntime runs files that onnx's checker rejects.
        return {}


def recorded_pixels(source: PathLike) -> dict[str, tuple[float, float]]:
    """Read the ranges of the images that a file prepares itself.

    Returns:
        Name -> range; empty for an engine, or a file that onnx can't read.
    """
    if is_engine(source):
        return {}
    try:
        return image_ranges(load_onnx(source, external_data=False))
    except GraphError:
        return {}


def parse_input_specs(source: PathLike, texts: Sequence[str]) -> dict[str, InputSpec]:
    """Parse the user's texts on sizes and values of the inputs of an ONNX file.

    Returns:
        Input name -> its sizes and values, for the inputs that ``texts`` name.

    Raises:
        GraphError: the file is broken.
        InputError: a text can't be read, or does not fit an input of the file.
    """
    proto = load_onnx(source, external_data=False)
    specs = describe_file_inputs(proto, texts, (), Path(source).name).specs
    return {spec.name: spec for spec in specs if any(text.strip().startswith(spec.name) for text in texts)}


def load_arrays(texts: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Load the files of arrays that ``texts`` name, such as ``ids=FILE.npy``.

    Returns:
        Input name -> array, for each input that has a file.
    """
    values, _ = parse_input_values(texts, names)
    return {name: value.array for name, value in values.items() if value.array is not None}


def generate_feeds(
    specs: tuple[TensorSpec, ...],
    known: Mapping[str, Any],
    seed: int,
    profile: int,
    sizes: Mapping[str, int] | None = None,
    runs: Callable[[Mapping[str, Any]], bool] = lambda feeds: True,
    pixels: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Generate random inputs for a model. Notes say which sizes and values had to be guessed.

    Args:
        specs: inputs of the model.
        known: name -> InputSpec of the inputs whose sizes and values are known.
        profile: index of the engine's profile whose opt shapes are used.
        sizes: name of a dynamic dim -> size.
        runs: function that returns whether the model runs on given inputs. Unknown sizes are chosen so that the model
            runs; the usual sizes are tried first.
        pixels: name -> range of the images that the model prepares itself.

    Returns:
        Input name -> array, and notes.
    """
    guessed = list[str]()
    recipes: dict[str, InputSpec] = {}
    unsaid: dict[str, None] = {}
    for spec in specs:
        recipe = known.get(spec.name)
        if recipe is not None and recipe.dtype == spec.dtype and len(recipe.shape) == len(spec.shape):
            recipes[spec.name] = recipe
            continue
        shape = (
            spec.profiles[profile][1]
            if spec.profiles
            else [(sizes or {}).get(d, d) if isinstance(d, str) else d for d in spec.shape]
        )
        dims = [
            Dim.from_size(n) if isinstance(n, int) else Dim(n or f"{spec.name}.{i}", *DEFAULT_SIZES)
            for i, n in enumerate(shape)
        ]
        unsaid |= dict.fromkeys(dim.name for dim in dims if dim.name is not None)
        values = (pixels or {}).get(spec.name)
        recipes[spec.name] = InputSpec(spec.name, spec.dtype, tuple(dims), values)
        if values is None:
            guessed.append(spec.name)

    def generate_at_sizes(taken: Mapping[str, int]) -> dict[str, Any]:
        """Generate the inputs at the given sizes of the unknown dims.

        Returns:
            Input name -> array. Calls with equal sizes return equal arrays.
        """
        rng = np.random.default_rng(seed)
        return {name: recipe.sample(rng, {**taken, **(sizes or {})}) for name, recipe in recipes.items()}

    taken = dict.fromkeys(unsaid, DEFAULT_SIZES[1])
    if unsaid:
        model = ModelSignature(inputs=tuple(recipes.values()), outputs=(), kind="onnx")
        taken |= find_runnable_sizes(model, list(unsaid), lambda other: runs(generate_at_sizes(other)))
    notes = []
    if guessed:
        notes.append(
            f"the file does not state the values of {', '.join(guessed)}: generated values are standard normal,"
            " integers 0 and 1"
        )
    if unsaid:
        listed = ", ".join(f"{name}={taken[name]}" for name in unsaid)
        notes.append(f"the file does not state the sizes of {', '.join(unsaid)}: {listed} was used")
    return generate_at_sizes(taken), notes


def _view_bfloat16(arrays: dict[str, np.ndarray], specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """View two-byte arrays as bfloat16 where the model's input is bfloat16, because .npz files can't name this type."""
    wide = {spec.name for spec in specs if spec.dtype == "bfloat16"}
    return {n: a.view(ml_dtypes.bfloat16) if n in wide and a.dtype.str[1:] == "V2" else a for n, a in arrays.items()}


def copy_to_host(value: Any) -> Any:
    """Copy an array or a tensor of any device into an array of the same dtype on the CPU."""
    if hasattr(value, "__array_interface__"):
        return value.copy()
    return to_numpy(value)


def _describe_types(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}" for name, array in arrays.items()}
