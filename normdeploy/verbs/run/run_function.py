"""Inference itself: a file opened as a runner, and the verb that runs it once on the arrays of an .npz file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from ...errors import GraphError, InputError, NormdeployError
from ...findings.rendering import Renderable
from ...inputs.array_conversion import to_numpy
from ...inputs.file_inputs import describe_file_inputs, parse_input_values
from ...model import DEFAULT_SIZES, Dim, InputSpec, ModelSignature
from ...option_values import PROVIDERS
from ...runtimes.session_runner import SessionRunner
from ...runtimes.size_search import find_runnable_sizes
from ...runtimes.third_party_runner import ThirdPartyRunner, require_runtime
from ...runtimes.trt_runner import is_engine
from ...storage.export_record import read_record
from ...storage.file_replacement import resolve_writable_path
from ...storage.npz_files import read_npz, write_npz
from ...storage.onnx_files import load_onnx, require_terminating_file
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..run.run_options import RunCall, RunnerCall

# torch takes seconds to import
if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ...model import TensorSpec
    from ...runtimes.live_runner import LiveRunner


@dataclass(frozen=True)
class Inference(Renderable):
    """What ``run`` did: the runner in the reader's words, each array with its "dtype[shape]", what is to be noted,
    stage -> seconds."""

    runner: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    arrays: dict[str, np.ndarray]
    notes: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return a description of the runs, without their arrays."""
        return {"runner": self.runner, "inputs": self.inputs, "outputs": self.outputs}

    def show(self, console: Console) -> None:
        from .run_tables import show_inference

        show_inference(console, self)


@take_fields_as_arguments(RunnerCall, onnx="path")
def open_runner(call: RunnerCall) -> LiveRunner:
    """Load an ONNX file or an engine, told apart by their content, ready to run; a context manager.

    Args:
        path: the file, an ONNX model in memory, or what ``export`` gave.
        provider: "cpu" (the default for an ONNX file) or "cuda"; engines run on a GPU only.
        device: which GPU.
        profile_index: which optimization profile of an engine; None takes the first that holds the shapes, at each
        call.
        stream: the CUDA stream to run on: a torch or cupy stream, its handle, or what speaks ``__cuda_stream__``.
        cuda_graph: record the run as a CUDA graph and replay it.
        threads: of one operator in onnxruntime on the CPU; 0 takes one for each core.
        runner: a runtime that an installed package brings (`normdeploy.runtimes.third_party_runner`), by its name,
        in the place of
            onnxruntime.
        runtime_cache: where TensorRT-RTX keeps the kernels that it compiles when an engine first runs. None reads
            ``<path>.runtime-cache`` where it is there; True writes it too, whole, when the runner is closed; a path is
            another file; False is no cache.
        weight_budget: bytes of an engine's weights that stay on the GPU, where it was built with weight streaming; None
            keeps all.

    Raises:
        InputError: there is no such file, it is neither kind, or the options do not fit it.
        GraphError: onnxruntime refuses the file, or it has no end.
        RuntimeUnavailable: a package, a GPU or a kernel is not there.
        NormdeployError: the engine is not for this GPU or version.
    """
    # A model in memory has become a file.
    path = cast(PathLike, call.path)
    if call.provider not in (None, *PROVIDERS):
        raise InputError(f"there is no provider {call.provider!r}; choose one of {', '.join(PROVIDERS)}")
    if call.device < 0:
        raise InputError(f"the device is {call.device}; GPUs are counted from 0")
    if call.runner is not None:
        return _open_third_party_runner(path, call.runner, call.only_for_others)
    if is_engine(path):
        return _open_engine(path, call)
    if call.weight_budget is not None:
        raise InputError(f"{os.fspath(path)!r} is no engine and streams no weights; leave weight_budget out")
    if call.runtime_cache:
        raise InputError(f"{os.fspath(path)!r} is no engine and has no runtime cache; leave runtime_cache out")
    if call.profile_index is not None:
        raise InputError(
            f"{os.fspath(path)!r} is no engine and has no profile {call.profile_index}; leave profile_index out"
        )
    if call.provider != "cuda" and (call.stream is not None or call.cuda_graph or call.device):
        raise InputError(
            "device, stream and cuda_graph are for a GPU, and an ONNX file runs on the CPU; add provider='cuda'"
        )
    require_terminating_file(path)
    return SessionRunner(path, call.provider or "cpu", call.device, call.stream, call.cuda_graph, call.threads)


def _open_engine(path: PathLike, call: RunnerCall) -> LiveRunner:
    if call.provider == "cpu":
        raise InputError(
            f"{os.fspath(path)!r} is an engine, which runs on a GPU and not on the provider 'cpu'; leave the provider"
            " out"
        )
    from ...runtimes.engine_runner import EngineRunner

    return EngineRunner(
        path, call.device, call.stream, call.profile_index, call.cuda_graph, call.runtime_cache, call.weight_budget
    )


def _open_third_party_runner(path: PathLike, runner: str, is_elsewhere: bool) -> LiveRunner:
    require_runtime(runner)
    if is_engine(path):
        raise InputError(f"{os.fspath(path)!r} is an engine, which TensorRT runs; leave the runner {runner!r} out")
    if is_elsewhere:
        raise InputError(
            "provider, device, stream, cuda_graph, threads, runtime_cache and weight_budget are onnxruntime's and"
            f" TensorRT's, and the runner is {runner!r}; leave them out"
        )
    require_terminating_file(path)
    return ThirdPartyRunner(runner, path)


@take_fields_as_arguments(RunCall, onnx="source")
def run(call: RunCall) -> Inference:
    """Run an ONNX file or an engine once.

    Args:
        source: the file, an ONNX model in memory, or what ``export`` gave.
        inputs: an .npz file, or name -> array; None generates them from what ``export`` recorded in the file (sizes and
            values), else from the file's own shapes, or the engine's profile at its usual sizes.
        output: an .npz file for the outputs; generated inputs go to ``<its stem>.inputs.npz`` beside it.
        provider, device, profile_index, runtime_cache, weight_budget: as for ``open_runner``.
        seed: of the generated inputs.
        runner: as for ``open_runner``.
        stated_inputs: of an ONNX file, sizes and values of generated inputs: ``ids:int64[2,8]{0:30522}``; values alone
            are ``sr=16000``, ``ids=0:30522`` or ``ids=FILE.npy``, which is given as it is.

    Raises:
        InputError: the inputs do not fit, or can't be generated.
        NormdeployError: as ``open_runner``; or ``output`` can't be written.
    """
    source = cast(PathLike, call.source)
    inputs = call.inputs
    output = call.output
    if call.stated_inputs and inputs is not None:
        raise InputError("inputs are given as arrays and described as well; leave one of the two out")
    if call.stated_inputs and is_engine(source):
        raise InputError(f"{os.fspath(source)!r} is an engine; its inputs can't be described: give arrays")
    beside = None if output is None else Path(output).with_suffix(".inputs.npz")
    for target in [t for t in (output, beside if inputs is None else None) if t is not None]:
        _require_distinct(
            resolve_writable_path(target), [p for p in (source, inputs) if isinstance(p, str | os.PathLike)]
        )
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
        if inputs is None:
            feeds, notes = _generate_feeds_for(opened, source, call)
        else:
            if isinstance(inputs, Mapping):
                feeds = dict(inputs)
            else:
                feeds = _view_bfloat16(read_npz(inputs), opened.inputs)
        ready = time.perf_counter()
        outputs = opened.infer(feeds)
        done = time.perf_counter()
    if output is not None:
        if inputs is None and beside is not None:
            write_npz(beside, feeds)
        write_npz(output, {name: _to_host(value) for name, value in outputs.items()})
    seconds = {"load": loaded - start, "run": done - ready}
    return Inference(
        opened.name, _describe_types(feeds), _describe_types(outputs), outputs, (*opened.notes, *notes), seconds
    )


def _generate_feeds_for(runner: LiveRunner, source: PathLike, call: RunCall) -> tuple[dict[str, Any], list[str]]:
    """Return inputs as the file's record and the user say them, and notes."""
    known = recorded_specs(source)
    if call.stated_inputs:
        known |= parse_input_specs(source, call.stated_inputs)
    feeds, notes = generate_feeds(
        runner.inputs, known, call.seed, call.profile_index or 0, runs=lambda tried: can_run(runner.infer, tried)
    )
    return feeds | load_arrays(call.stated_inputs, [spec.name for spec in runner.inputs]), notes


def can_run(infer: Callable[[Mapping[str, Any]], object], feeds: Mapping[str, Any]) -> bool:
    """Return whether a runner runs on inputs."""
    try:
        infer(feeds)
    except NormdeployError:
        return False
    return True


def parse_sizes(given: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Sizes of dims by name, from texts such as "batch=8" too.

    Raises:
        InputError: a text can't be read, or a size is below 1.
    """
    texts = [f"{name}={size}" for name, size in given.items()] if isinstance(given, Mapping) else given
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise InputError(f"the size {text!r} can't be read; write name=size, such as batch=8")
        if sizes.setdefault(name, int(size)) != int(size):
            raise InputError(f"the dim {name!r} is given the sizes {sizes[name]} and {size}; give it one")
    return sizes


def _require_distinct(target: Path, sources: list[PathLike]) -> None:
    for source in sources:
        if os.path.realpath(source) == os.fspath(target):
            raise InputError(
                f"the output {target.name!r} is the input {os.fspath(source)!r}, which would be lost; give another name"
                " with -o"
            )


def recorded_specs(source: PathLike) -> dict[str, Any]:
    """Name -> InputSpec as the export recorded it; none for an engine, or a file from elsewhere."""
    if is_engine(source):
        return {}
    try:
        return {spec.name: spec for spec in read_record(load_onnx(source, external_data=False)).get("inputs", ())}
    except GraphError:
        # onnxruntime runs files that onnx's checker does not know
        return {}


def parse_input_specs(source: PathLike, texts: Sequence[str]) -> dict[str, InputSpec]:
    """Read what ``texts`` say of the inputs of an ONNX file.

    Returns:
        Input name -> its sizes and values, of the inputs that ``texts`` name.

    Raises:
        GraphError: the file is broken.
        InputError: a text can't be read, or fits no input.
    """
    proto = load_onnx(source, external_data=False)
    specs = describe_file_inputs(proto, texts, (), Path(source).name).specs
    return {spec.name: spec for spec in specs if any(text.strip().startswith(spec.name) for text in texts)}


def load_arrays(texts: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the arrays that ``texts`` name as files.

    Returns:
        Input name -> array, of those inputs that are given by a file.
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
) -> tuple[dict[str, Any], list[str]]:
    """Random inputs, and notes where nothing says which sizes or values they may take.

    Args:
        known: name -> InputSpec, of some.
        profile: the engine's whose usual sizes are taken.
        sizes: of dynamic dims, by name.
        runs: whether the model runs on inputs. Sizes that nothing says are such that it does, the usual ones first.
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
        recipes[spec.name] = InputSpec(spec.name, spec.dtype, tuple(dims))
        guessed.append(spec.name)

    def generate_at_sizes(taken: Mapping[str, int]) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {name: recipe.sample(rng, {**taken, **(sizes or {})}) for name, recipe in recipes.items()}

    taken = dict.fromkeys(unsaid, DEFAULT_SIZES[1])
    if unsaid:
        model = ModelSignature(inputs=tuple(recipes.values()), outputs=(), kind="onnx")
        taken |= find_runnable_sizes(model, list(unsaid), lambda other: runs(generate_at_sizes(other)))
    notes = []
    if guessed:
        notes.append(
            f"the file does not say which values {', '.join(guessed)} may take: generated are standard normal ones,"
            " integers 0 and 1"
        )
    if unsaid:
        listed = ", ".join(f"{name}={taken[name]}" for name in unsaid)
        notes.append(f"the file does not say which sizes {', '.join(unsaid)} take: {listed} was taken")
    return generate_at_sizes(taken), notes


def _view_bfloat16(arrays: dict[str, np.ndarray], specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """numpy's files can't name bfloat16; the two bytes that they hold are what the model's type says."""
    wide = {spec.name for spec in specs if spec.dtype == "bfloat16"}
    return {n: a.view(ml_dtypes.bfloat16) if n in wide and a.dtype.str[1:] == "V2" else a for n, a in arrays.items()}


def _to_host(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):
        return value.copy()
    return to_numpy(value)


def _describe_types(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}" for name, array in arrays.items()}
