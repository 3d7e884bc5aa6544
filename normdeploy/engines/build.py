"""ONNX → engine, in a process of its own: where the library aborts, the user gets an error with its reason, not a dead
program."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import onnx

from ..arguments import Onnx, prepared
from ..choices import TENSORRT
from ..errors import BuildError, ExtensionError, GraphError, InputError, RuntimeUnavailable
from ..model import InputSpec
from ..precision import precision
from ..rewriting import rewrite
from ..runtimes.profiles import Given, GraphInput, Shapes, profile
from ..runtimes.trt import PACKAGES, TITLES, missing, version_of
from ..shown import Shown
from ..storage.atomic import writable
from ..storage.files import atomic, load_onnx, save_onnx, write_bytes
from ..storage.record import recorded
from ..types import PathLike, Progress
from . import implement, reasons, worker
from .implement import Implementation


@dataclass(frozen=True)
class Engine(Shown):
    """A built engine.

    ``compute_capabilities`` is empty where none were asked for: TensorRT-RTX then builds for all GPUs from 8.0 on,
    TensorRT for the one in this machine. ``profile`` holds (min, opt, max) shapes of each dynamic input; ``layers``
    counts the network as it was parsed. ``norms`` says in which form each norm was built; it is empty where the file
    was parsed as it is. ``types`` counts the layers of a half-precision file by floating type, all of them as the file
    says; it is empty where the file was not made half precision here.
    """

    path: Path
    bytes: int
    runtime: str  # "tensorrt-rtx" or "tensorrt"
    version: str  # of the library that built it
    compute_capabilities: tuple[str, ...]
    profile: dict[str, Shapes]
    layers: int
    seconds: float
    norm_impl: str = "native"
    norms: tuple[Implementation, ...] = ()
    types: dict[str, int] = field(default_factory=dict)


@prepared(onnx="onnx_path", runtimes=tuple(PACKAGES))
def build(
    onnx_path: Onnx,
    engine_path: str | os.PathLike[str],
    *,
    runtime: str = "tensorrt-rtx",
    compute_capabilities: Sequence[str] = (),
    profiles: Given = (),
    norm_impl: str = "native",
    progress: Progress | None = None,
    timeout: float | None = None,
) -> Engine:
    """Build an engine from an ONNX file. TensorRT-RTX needs no GPU for it; TensorRT needs the one that the engine is to
    run on.

    Products of float32 are computed in float32, not in TF32. The engine replaces ``engine_path`` only when it is whole.
    Where the build fails, the libraries' log is kept beside it as ``<engine_path>.log``.

    Args:
        onnx_path: the file, a model in memory, or what ``export`` gave.
        runtime: "tensorrt-rtx" or "tensorrt".
        compute_capabilities: GPUs to build for, such as "8.6" and "12.0" (TensorRT-RTX only).
        profiles: ranges of dynamic inputs or dims: texts such as "ids=1x8:8x128:64x512" and "batch=1:8:64", or name ->
            (min, opt, max). What is not given is taken from the ranges that the file recorded at its export.
        norm_impl: the form of the norms: "native" (standard nodes: the file as it is, but for group norms that this
            project wrote for onnxruntime and for what this version of the library can't read), "plugin" (our kernels,
            which the engine then holds; TensorRT only) or "auto" (see ``normdeploy.engines.implement``).
        progress: called with (stage, done, total).
        timeout: seconds.

    Raises:
        GraphError: the file is no valid ONNX.
        InputError: a profile or a compute capability does not fit.
        BuildError: the library refuses the model, or failed; with its reason.
        RuntimeUnavailable: the library, the GPU that it needs, or what the kernels need is not there.
    """
    implement.check(norm_impl, runtime)
    if reason := missing(runtime, gpu=runtime == "tensorrt"):
        raise RuntimeUnavailable(f"can't build with {TITLES[runtime]}: {reason}")
    source, target = Path(cast(PathLike, onnx_path)), Path(engine_path)  # a model in memory has become a file
    if os.path.realpath(source) == os.path.realpath(target):
        raise InputError(f"the engine {str(target)!r} would replace the model it is built from; give another name")
    wanted = _capabilities(compute_capabilities, runtime)
    proto = load_onnx(source, external_data=False)
    if not proto.graph.node:
        raise BuildError(
            f"{source.name} holds no nodes: it computes nothing, and an engine of 0 layers is none; give the model"
            " itself"
        )
    shapes = profile(_inputs(proto), _recorded_inputs(proto), profiles)
    writable(target)
    start = time.perf_counter()
    changed, norms = _with_norms(source, proto, norm_impl, runtime, shapes, progress)
    proto = changed or proto
    with atomic(target) as written, tempfile.TemporaryFile() as log, _parsed(source, changed, target) as path:
        request: dict[str, Any] = {"runtime": runtime, "onnx": str(path), "engine": str(written)}
        request |= {"capabilities": wanted, "profile": shapes, "plugins": implement.plugins(proto)}
        request |= {"packages": implement.packages(proto)}
        request |= precision.request(proto)
        end = worker.run(request, log, progress or (lambda stage, done, total: None), timeout)
        built = end.answer.get("built") if end.status == 0 else None
        if built is None:
            if "unknown" in end.answer:
                raise InputError(reasons.unknown(end.answer, runtime))
            if end.answer.get("refused") == "packages":
                raise ExtensionError(end.answer["reason"])
            if end.answer.get("refused") == "plugins":
                raise RuntimeUnavailable(
                    f"the kernels can't be given to {TITLES[runtime]}: {end.answer['reason']}; pip install triton, and "
                    "TensorRT 10.9 or newer (10.9 to 11.4 were tried)"
                )
            why = (
                reasons.refused(end.answer, proto, source.name, runtime)
                if "refused" in end.answer
                else reasons.ended(end, log, runtime)
            )
            raise BuildError(why + _kept(log, target))
        size = written.stat().st_size
    _log_of(target).unlink(missing_ok=True)  # of an earlier failure
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
        norm_impl,
        norms,
        built["types"],
    )


def _with_norms(
    source: Path,
    proto: onnx.ModelProto,
    norm_impl: str,
    runtime: str,
    shapes: Mapping[str, Shapes],
    progress: Progress | None,
) -> tuple[onnx.ModelProto | None, tuple[Implementation, ...]]:
    """The model with its norms in the wanted form, None where that is the file itself; and the account of them."""
    version = version_of(runtime)
    regrouped = _regrouped(proto)
    if norm_impl == "native" and not regrouped and not implement.changes(proto, runtime, version):
        return None, ()
    fuse = "portable" if implement.kernels_run(norm_impl, runtime, version) else "standard"
    usual = {
        d: n
        for i in _inputs(proto)
        if i.name in shapes
        for d, n in zip(i.dims, shapes[i.name][1], strict=True)
        if isinstance(d, str)
    }
    whole = load_onnx(source)
    if norm_impl != "native" or regrouped:
        whole, _ = rewrite.optimize(whole, runtime=runtime, fuse=fuse, progress=progress)
    return implement.implemented(whole, norm_impl=norm_impl, runtime=runtime, version=version, sizes=usual)


def _regrouped(proto: onnx.ModelProto) -> bool:
    """Whether this project wrote group norms as onnxruntime runs them best (`passes.group`); TensorRT has a layer for
    the whole norm."""
    if recorded(proto).get("export", {}).get("runtime", "tensorrt") in TENSORRT:
        return False
    reshaped = {n.output[0] for n in proto.graph.node if n.op_type == "Reshape"}
    return any(n.op_type == "InstanceNormalization" and n.input[0] in reshaped for n in proto.graph.node)


@contextlib.contextmanager
def _parsed(source: Path, changed: onnx.ModelProto | None, target: Path) -> Iterator[Path]:
    """The file for the parser: the user's own, or a changed model in a folder beside the engine, which is gone
    afterwards."""
    if changed is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        path = Path(folder) / source.name
        save_onnx(changed, path)
        yield path


def _capabilities(given: Sequence[str], runtime: str) -> list[str]:
    given = [given] if isinstance(given, str) else given
    if given and runtime == "tensorrt":
        raise InputError(
            f"TensorRT builds for the GPU in this machine alone, not for {', '.join(given)}; use the runtime"
            " tensorrt-rtx"
        )
    for capability in given:
        if not re.fullmatch(r"\d+\.\d", capability):
            raise InputError(
                f"the compute capability {capability!r} can't be read; write it as NVIDIA does, such as 8.6"
            )
    return list(dict.fromkeys(given))


def _recorded_inputs(proto: onnx.ModelProto) -> Sequence[InputSpec]:
    try:
        return recorded(proto).get("inputs", ())
    except GraphError:  # then the user's profiles must do, or are missed by name
        return ()


def _inputs(proto: onnx.ModelProto) -> list[GraphInput]:
    initializers = {t.name for t in proto.graph.initializer}

    def size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
        return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None

    inputs = [value for value in proto.graph.input if value.name not in initializers]
    return [GraphInput(value.name, tuple(size(d) for d in value.type.tensor_type.shape.dim)) for value in inputs]


# ------------------------------------------------------------------ what went wrong


def _kept(log: IO[bytes], target: Path) -> str:
    """Keep the log beside the engine, and say so."""
    before = f"; {target.name} is what it was before" if target.exists() else ""
    log.seek(0)
    text = log.read()
    if text:
        write_bytes(_log_of(target), text)
        return f". The log is in {str(_log_of(target))!r}{before}"
    return before


def _log_of(target: Path) -> Path:
    return target.with_name(target.name + ".log")
