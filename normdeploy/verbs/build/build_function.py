"""Build an engine from an ONNX file.

The library runs in a separate process. If it aborts, the user still gets an error with the reason.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from ...engines import build_failures, builder_client, norm_implementations
from ...engines import ep_context as contexts
from ...engines.ep_context import EpContext
from ...engines.norm_implementations import Implementation
from ...engines.parser_input import file_for_parser, graph_inputs, implement_requested_norms, recorded_input_specs
from ...errors import BuildError, ExtensionError, InputError, RuntimeUnavailable
from ...findings.rendering import Renderable, make_printable
from ...model import Shapes
from ...precision import half_conversion
from ...runtimes.optimization_profiles import ProfileRanges, resolve_profile
from ...runtimes.trt_runner import TITLES, describe_missing_runtime, explain_missing_gpu, installed_version
from ...storage.file_replacement import resolve_writable_path
from ...storage.onnx_files import load_onnx, replace_atomically, write_bytes
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..build.build_options import BuildCall
from . import build_request as wanted_options
from .build_request import BuildOptions
from .trtexec_words import BUILD_ARGUMENTS

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class Engine(Renderable):
    """Built engine.

    Attributes:
        path: the engine, or the ONNX file of ``ep_context``.
        runtime: "tensorrt-rtx" or "tensorrt".
        version: version of the library that built the engine.
        compute_capabilities: the requested compute capabilities. If none were requested, TensorRT-RTX builds for all
            GPUs from 8.0 on, and TensorRT builds for the GPU of this machine.
        profile: (min, opt, max) shapes of each dynamic input.
        layers: number of layers of the network as parsed.
        norms: form in which each norm was built; empty if the file was parsed unchanged.
        types: floating type -> number of layers that compute in it, as a half-precision file requests; empty if
            normdeploy did not convert the file to half precision.
        more_profiles: all optimization profiles except the first.
        capability: the library's name for the hardware that the engine runs on ("STANDARD").
        notes: abilities that the build options give the engine, and further notes.
        ep_context: the ONNX file with an EPContext node; None if ``path`` is the engine itself.
    """

    path: Path
    bytes: int
    runtime: str
    version: str
    compute_capabilities: tuple[str, ...]
    profile: dict[str, Shapes]
    layers: int
    seconds: float
    norm_impl: str = "native"
    norms: tuple[Implementation, ...] = ()
    types: dict[str, int] = field(default_factory=dict)
    more_profiles: tuple[dict[str, Shapes], ...] = ()
    options: BuildOptions = field(default_factory=BuildOptions)
    capability: str = ""
    notes: tuple[str, ...] = ()
    ep_context: EpContext | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        gpus = ", ".join(self.compute_capabilities) or "every GPU that it knows"
        size = f"{self.bytes / 1e6:.1f} MB, {self.layers} layers"
        return f"built, not run; {self.path}: {self.runtime} {self.version}, {size}, for {gpus}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the entry "proved", which says that the engine was built but not run.

        Returns:
            Field -> value, and "proved": "built only".
        """
        return {**vars(self), "proved": "built only"}

    def show(self, console: Console) -> None:
        from .build_tables import show_engine

        show_engine(console, make_printable(self))


@take_fields_as_arguments(BuildCall, onnx="onnx_path", words=BUILD_ARGUMENTS)
def build(call: BuildCall) -> Engine:
    """Build an engine from an ONNX file.

    TensorRT-RTX needs no GPU to build. TensorRT needs the GPU that the engine will run on.

    Products of float32 are computed in float32, not in TF32. The engine replaces ``engine_path`` only when it is
    complete. If the build fails, the library's log is written to ``<engine_path>.log``.

    Args:
        onnx_path: the file, a model in memory, or a result of ``export``.
        library: "tensorrt-rtx" or "tensorrt". The library builds the engine and runs it later.
        compute_capabilities: GPUs to build for, such as "8.6" and "12.0" (TensorRT-RTX only).
        profiles: ranges of dynamic inputs or dims: texts such as "ids=1x8:8x128:64x512" and "batch=1:8:64", or name ->
            (min, opt, max). Inputs and dims that are not named take the ranges that ``export`` recorded in the file.
        min_shapes, opt_shapes, max_shapes: the same ranges in trtexec's spelling, "ids:1x8,mask:1x8". ``opt_shapes``
            alone fixes the shapes.
        norm_impl: form of the norms: "native", "plugin" or "auto" (see ``normdeploy.engines.norm_implementations``).
            "native" keeps standard nodes. It changes only the group norms that this project wrote for onnxruntime, and
            nodes that this version of the library can't read. "plugin" uses our kernels, which become part of the
            engine (TensorRT only).
        more_profiles: more optimization profiles, each in the format of ``profiles``. A text may hold several ranges,
            separated by commas: "batch=16:32:64,length=1:8:64".
        timing_cache: a file with the timings of earlier builds. The build reads it, extends it and replaces it
            atomically, so concurrent builds may share it.
        workspace: maximum memory that a layer may use while it runs, in bytes or as "512M".
        optimization_level: how long the builder searches for faster kernels, from 0 on.
        hardware_compatibility: other GPUs that the engine can run on: "ampere-plus" or "same-compute-capability".
        version_compatible: newer versions of the library can load the engine.
        refit: the engine's weights can be replaced.
        weight_streaming: weights may stay in host memory while the engine runs.
        ep_context: write an ONNX file for onnxruntime's TensorRT-RTX provider. "embed" puts the engine inside an
            EPContext node, "file" puts it next to the ONNX file.
        progress: called with (stage, done, total).
        timeout: maximum duration of the build in seconds.

    Returns:
        The engine's path, size, version, profiles and forms of norms.

    Raises:
        GraphError: the file is not valid ONNX.
        InputError: a profile, a compute capability or an option is invalid, or the library does not support it.
        BuildError: the library refuses the model, or the build failed. The message has the library's reason.
        RuntimeUnavailable: the library, the GPU that it needs, or a package that our kernels need is missing.
    """
    runtime = call.library
    norm_implementations.check_norm_impl(call.norm_impl, runtime)
    # ``take_fields_as_arguments`` has saved a model in memory as a file.
    source = Path(cast(PathLike, call.onnx_path))
    target = Path(call.engine_path)
    options = wanted_options.resolve_options(call, taken={"the model": source, "the engine": target})
    if reason := describe_missing_runtime(runtime, gpu=runtime == "tensorrt"):
        raise RuntimeUnavailable(f"{TITLES[runtime]} ({source.name}): {reason}")
    if os.path.realpath(source) == os.path.realpath(target):
        raise InputError(f"the engine {str(target)!r} would replace the model it is built from; choose another name")
    wanted = _check_capabilities(call.compute_capabilities, runtime)
    proto = load_onnx(source, external_data=False)
    if not proto.graph.node:
        raise BuildError(
            f"{source.name} has no nodes and computes nothing, so its engine would have no layers; pass the"
            " model itself"
        )
    if reason := build_failures.explain_missing_fp8(proto, source.name, wanted):
        raise InputError(reason)
    shapes, *others = [
        resolve_profile(graph_inputs(proto), recorded_input_specs(proto), given)
        for given in (call.first_profile, *map(_split_ranges, call.more_profiles))
    ]
    if others and not shapes:
        raise InputError(
            f"{source.name} has no dynamic input, so {len(others) + 1} profiles would be identical; pass none"
        )
    resolve_writable_path(target)
    start = time.perf_counter()
    changed, norms = implement_requested_norms(
        source, proto, call.norm_impl, runtime, installed_version(runtime), shapes, call.progress
    )
    if changed is None and any(None in i.shape for i in graph_inputs(proto)):
        # Some exporters name every dynamic dim "?". TensorRT gives dims of the same name the same size. `load_onnx`
        # removes these names.
        changed = load_onnx(source)
    proto = changed or proto
    with (
        replace_atomically(target) as written,
        tempfile.TemporaryFile() as log,
        file_for_parser(source, changed, target) as path,
    ):
        request: dict[str, Any] = {"runtime": runtime, "onnx": str(path), "engine": str(written)}
        request |= {"capabilities": wanted, "profile": shapes, "plugins": norm_implementations.count_plugins(proto)}
        request |= {"packages": norm_implementations.list_plugin_packages(proto)}
        request |= {"more_profiles": others, "options": options.to_request()}
        request |= half_conversion.builder_request(proto)
        end = builder_client.run_worker(request, log, call.progress or (lambda stage, done, total: None), call.timeout)
        built = end.answer.get("built") if end.status == 0 else None
        if built is None:
            if "unknown" in end.answer:
                raise InputError(build_failures.describe_unknown_capability(end.answer, runtime))
            if end.answer.get("refused") == "packages":
                raise ExtensionError(end.answer["reason"])
            if end.answer.get("refused") == "option":
                raise InputError(
                    wanted_options.describe_refused_option(end.answer["option"], end.answer["reason"], runtime)
                )
            if end.answer.get("refused") == "plugins":
                raise RuntimeUnavailable(
                    f"{TITLES[runtime]} can't load the kernels: {end.answer['reason']}; pip install triton, and"
                    " use TensorRT 10.9 or newer (10.9 to 11.4 were tested)"
                )
            if "refused" in end.answer:
                why = build_failures.describe_refusal(end.answer, proto, source.name, runtime)
            else:
                why = build_failures.describe_worker_end(end, log, runtime) + _explain_refit_without_gpu(options)
            raise BuildError(why + _keep_log(log, target))
        size = written.stat().st_size
        context = None
        if options.ep_context:
            context = contexts.write_ep_context(
                written, target, proto, source.name, options.ep_context, built["targets"], built["version"]
            )
    if context:
        contexts.remove_stale_engines(Path(os.path.realpath(target)), context.file)
    # Remove the log of an earlier failure.
    _log_path(target).unlink(missing_ok=True)
    seconds = time.perf_counter() - start
    return Engine(
        target,
        size,
        runtime,
        built["version"],
        tuple(wanted),
        shapes,
        built["layers"],
        seconds,
        call.norm_impl,
        norms,
        built["types"],
        tuple(others),
        options,
        built["capability"],
        (*options.notes(runtime), *built["notes"], *_note_plan_name(target, runtime)),
        context,
    )


def _note_plan_name(target: Path, runtime: str) -> list[str]:
    """Write a note if an engine of TensorRT-RTX has the suffix .plan, which deployment tools expect of TensorRT's
    engines.
    """
    if runtime != "tensorrt-rtx" or target.suffix != ".plan":
        return []
    return [
        f"{target.name} is an engine of TensorRT-RTX: TensorRT and Triton's TensorRT backend do not load it; for them,"
        " build with --library tensorrt on the GPU that will run it"
    ]


def _split_ranges(given: ProfileRanges) -> ProfileRanges:
    """Split a text at its commas if it holds several ranges of one profile."""
    if isinstance(given, str):
        return given.split(",")
    return given


def _explain_refit_without_gpu(options: BuildOptions) -> str:
    """Explain a failed build of a refittable engine, which needs a GPU: TensorRT-RTX 1.7 fails in a CUDA call."""
    if not (options.refit and (reason := explain_missing_gpu())):
        return ""
    return f". A refittable engine needs a GPU to build, and this machine has none ({reason}); omit --refit"


def _check_capabilities(given: Sequence[str], runtime: str) -> list[str]:
    if isinstance(given, str):
        given = [given]
    if given and runtime == "tensorrt":
        raise InputError(
            f"TensorRT builds only for the GPU in this machine, not for {', '.join(given)}; use the library"
            " tensorrt-rtx"
        )
    for capability in given:
        if not re.fullmatch(r"\d+\.\d", capability):
            raise InputError(f"can't read the compute capability {capability!r}; write it as NVIDIA does, such as 8.6")
    return list(dict.fromkeys(given))


# ------------------------------------------------------------------ errors


def _keep_log(log: IO[bytes], target: Path) -> str:
    """Write the log next to the engine, and return a sentence with the path of the log."""
    if target.exists():
        before = f"; {target.name} is unchanged"
    else:
        before = ""
    log.seek(0)
    text = log.read()
    if text:
        write_bytes(_log_path(target), text)
        return f". The log is in {str(_log_path(target))!r}{before}"
    return before


def _log_path(target: Path) -> Path:
    return target.with_name(target.name + ".log")
