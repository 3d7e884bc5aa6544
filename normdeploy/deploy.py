"""The verbs, each one function that is read top to bottom and names every stage once."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import onnx

from .engines.build import build
from .errors import InputError
from .infer import open_runner, run
from .precision import precision as half
from .precision.precision import Account
from .records import Summary
from .rewriting import rewrite
from .sources import Loading, PathLike, Progress, check_output, is_onnx, loaded, opened, remembered, remembered_by_any
from .storage.files import load_onnx, save_onnx

if TYPE_CHECKING:  # torch takes seconds to import, and what only reads ONNX needs none of it
    import torch

    from .bisection.bisect import Bisection
    from .model import Signature
    from .parity.compare import Comparison, Inputs
    from .race.bench import Race

__all__ = ["ExportResult", "bench", "bisect", "build", "export", "inspect", "open_runner", "optimize", "run", "verify"]

Calibration = Sequence[PathLike | Mapping[str, Any]]


@dataclass(frozen=True)
class ExportResult:
    """An ONNX model and the account of its making.

    ``path`` is where it was written, None where no output was asked for; ``seconds`` holds stage -> seconds, in the order run.
    ``precision`` tells what stayed float32 where half precision was asked for.
    """

    proto: onnx.ModelProto
    path: Path | None
    summary: Summary
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    precision: Account | None = None


class _Stages:
    """Names and times the stages of a verb, and tells the progress bar which one runs."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, 0, 0)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


OPSET = 21  # the first with a usable GroupNormalization; from 23 on the exporter writes Attention, which TensorRT can't build


def export(
    source: PathLike | torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    opset: int | None = None,
    runtime: str = "any",
    fuse: str = "standard",
    strict: bool = False,
    precision: str | None = None,
    calibrate: Calibration = (),
    keep_io: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> ExportResult:
    """Turn a PyTorch model into ONNX with every normalization fused, folded or named with the reason why not.

    Args:
        source: a model file or folder, or a live module, which is left untouched.
        args, kwargs: example arguments of a live module.
        output: where to write the ONNX file.
        opset: 18 to 25; None is 21. The file is raised above it only where a norm's node needs that, which a note tells.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or "tensorrt-rtx".
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        precision: "fp16" or "bf16": the file computes in it, but for what it can't hold (``normdeploy.precision.precision``).
        calibrate: inputs to see that on: .npz files, or mappings name -> array; empty: some are generated.
        keep_io: inputs and outputs of a half-precision file stay float32.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: see ``normdeploy.loading.load`` (files) and ``from_module`` (live modules).

    Raises:
        NormdeployError: one of ``normdeploy.errors``; the message says what to do.
    """
    from .exporter import record, to_onnx
    from .graphs.simplify import simplify

    stage = _Stages(progress)
    if output is not None:
        check_output(output, source)
    samples = _calibration(calibrate, precision, keep_io)
    with stage("load"):
        model = loaded(source, args, kwargs, loading)
    with stage("export"):
        proto = to_onnx(model, opset=opset or OPSET, progress=progress)
    signature = model.signature
    del model  # and its weights, of which the proto holds a copy
    gc.collect()
    with stage("norms"):
        proto, summary = rewrite.optimize(proto, runtime=runtime, fuse=fuse, strict=strict, progress=progress)
    with stage("simplify"):
        simplified = simplify(proto, _samples(signature), progress=progress)
    proto, account = simplified.proto, None
    if precision is not None:
        with stage("precision"):
            proto, account = half.converted(proto, precision, samples, inputs=signature.inputs, keep_io=keep_io, progress=progress)
        signature = replace(signature, inputs=half.recast(signature.inputs, account))
        summary = replace(summary, opset=half.opset_of(proto))
    flags = {"opset": opset, "runtime": runtime, "fuse": fuse, "strict": strict, "trust": loading.get("trust", False)}
    record(proto, signature, flags | ({"precision": precision} if precision is not None else {}))
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    notes = [simplified.note] if simplified.note else []
    if opset is not None and summary.opset > opset:
        notes.append(f"the file has opset {summary.opset}, not {opset}: the node of a norm needs it")
    summary = replace(summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto))
    return ExportResult(proto, None if output is None else Path(output), summary, tuple(notes), stage.seconds, account)


def optimize(
    source: PathLike | onnx.ModelProto,
    output: PathLike | None = None,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    strict: bool = False,
    precision: str | None = None,
    calibrate: Calibration = (),
    keep_io: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Fuse and fold the normalizations of an ONNX model from anywhere.

    Args:
        source: a file, or a model with its weights loaded; neither is changed.
        output: where to write the result.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or "tensorrt-rtx".
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        precision, calibrate, keep_io: as for ``export``. Inputs are generated from what ``export`` recorded in the file, if it did.
        progress: called with (stage, done, total); total is 0 where it is not known.

    Raises:
        GraphError: the file is broken or no ONNX.
        InputError: the inputs for calibration do not fit.
        CertificateError: with ``strict``, where a certificate failed.
        NormdeployError: ``output`` is ``source``, or can't be written.
    """
    stage = _Stages(progress)
    if output is not None:
        check_output(output, source)
    samples = _calibration(calibrate, precision, keep_io)
    with stage("load"):
        proto = source if isinstance(source, onnx.ModelProto) else load_onnx(source)
    with stage("norms"):
        proto, summary = rewrite.optimize(proto, runtime=runtime, fuse=fuse, strict=strict, progress=progress)
    account = None
    if precision is not None:
        from .storage.record import amend, recorded

        with stage("precision"):
            inputs = recorded(proto).get("inputs", ())
            proto, account = half.converted(proto, precision, samples, inputs=inputs, keep_io=keep_io, progress=progress)
        amend(proto, half.recast(inputs, account), {"precision": precision})
        ops = rewrite.op_counts(proto)
        summary = replace(summary, opset=half.opset_of(proto), nodes_after=len(proto.graph.node), ops_after=ops)
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    return ExportResult(proto, None if output is None else Path(output), summary, seconds=stage.seconds, precision=account)


def inspect(
    source: PathLike | onnx.ModelProto | torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    explain: str | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Summary:
    """What ``export`` or ``optimize`` would make of the normalizations of a model, and the runtimes of that; nothing is changed or written.

    Args:
        source: an ONNX file or model, or what ``export`` takes.
        args, kwargs, runtime, fuse, progress, loading: as for ``export``.
        explain: a tensor, a node or a module path: why it was fused or not is in the result's ``explanations``.

    Raises:
        InputError: nothing in the model is called as ``explain`` says.
        NormdeployError: the model can't be read.
    """
    from .census import census

    proto, chains = opened(source, args, kwargs, loading=loading, progress=progress)
    return census(proto, runtime=runtime, fuse=fuse, explain=explain, progress=progress, chains=chains)


def verify(
    source: PathLike | torch.nn.Module,
    files: PathLike | Sequence[PathLike],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    engines: Sequence[PathLike] = (),
    seeds: int = 3,
    feeds: Inputs | None = None,
    drift: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Comparison:
    """Compare what the runtimes make of files with the PyTorch model in float64 (the rule: ``normdeploy.parity.compare``).

    How the model is to be loaded need not be said again for a file that this user exported on this machine from this very model file.

    Args:
        source: the model file or folder, or the live module.
        files: what ``export``, ``optimize`` and ``build`` made of it, told apart by content; engines are run where a GPU is.
        args, kwargs: example arguments of a live module.
        engines: more files.
        seeds: random inputs at the usual sizes, besides those at other sizes, small ones and zeros.
        feeds: own inputs, name -> array or an .npz file, one or several; only these are run then.
        drift: also compare the inner tensors of ONNX files, one case each, with the model's; it takes two to three times as long.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A candidate that is wrong is no error but a result that is false.
    """
    from .parity import compare
    from .parity.cases import read

    stage = _Stages(progress)
    every = [*([files] if isinstance(files, str | os.PathLike) else files), *engines]
    own = None if feeds is None else read(feeds)
    with stage("load"):
        loading, notes = remembered_by_any(source, every, loading)
        model = loaded(source, args, kwargs, loading)
    with stage("verify"):
        comparison = compare.verify(model, every, seeds=seeds, inputs=own, drift=drift, progress=progress)
    return replace(comparison, notes=(*notes, *comparison.notes))


def bisect(
    source: PathLike | torch.nn.Module,
    onnx_path: PathLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    engines: Sequence[PathLike] = (),
    seeds: int = 3,
    feeds: Inputs | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Bisection:
    """Find the first tensor of a file that leaves the bound of ``verify``, the node that makes it so, and why (``bisection.bisect``).

    Args:
        output: a new or empty folder for the smallest failing model, its inputs and a script that shows the error.
        engines: compared too, at their outputs only.
        source, onnx_path, args, kwargs, seeds, feeds, progress, loading: as for ``verify``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A fault is no error but a result that is false.
    """
    from .bisection.bisect import bisect as search
    from .bisection.reproduce import vacant
    from .parity.cases import read

    stage = _Stages(progress)
    if output is not None:
        vacant(output)
    own = None if feeds is None else read(feeds)
    with stage("load"):
        loading, notes = remembered_by_any(source, [onnx_path], loading)
        model = loaded(source, args, kwargs, loading)
    with stage("bisect"):
        found = search(model, onnx_path, engines=engines, seeds=seeds, inputs=own, progress=progress)
    if output is not None:
        with stage("write"):
            if found.write(output) is None and not found:
                notes.append(f"nothing was written to {os.fspath(output)}: no nodes were found that fail by themselves")
    return replace(found, notes=(*notes, *found.notes))


def bench(
    sources: Sequence[PathLike | torch.nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    feeds: PathLike | Mapping[str, Any] | None = None,
    sizes: Sequence[str] | Mapping[str, int] = (),
    threads: int = 1,
    rounds: int = 100,
    seed: int = 0,
    norm_impl: Sequence[str] = (),
    norms: str | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Race:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns (``normdeploy.race.bench``), or the forms of norms.

    Args:
        sources: ONNX files, engines and at most one model: a file or folder, or a live module.
        args, kwargs: example arguments of a live module.
        feeds: the inputs, an .npz file or name -> array; None generates them.
        sizes: of dynamic dims of generated inputs: {"batch": 8}, or texts such as "batch=8"; the usual ones of the others.
        threads: of torch and of onnxruntime on the CPU.
        rounds: in each every contestant has its turn.
        seed: of generated inputs, and of the order in each round.
        norm_impl: race the norms of the one ONNX file given, each in these forms (``normdeploy.race.norms``); ["all"]: in all.
        norms: race usual norms of this kind, or "all"; no file is needed then.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer is no error but a result that is false.
    """
    from .infer import is_engine, sizes_of
    from .race.bench import bench as raced
    from .race.norms import race_norms
    from .storage.archive import read_npz

    if norm_impl or norms is not None:
        if feeds is not None:
            raise InputError("norms are raced on inputs of their own, and inputs were given; leave one of them out")
        _no_model(loading)
        return race_norms(sources, norm_impl, norms, sizes_of(sizes), threads=threads, rounds=rounds, seed=seed, progress=progress)
    paths = [s for s in sources if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in sources if s not in files]
    if len(models) > 1:
        raise InputError(f"{len(models)} of {len(sources)} sources are models; give one, and the others as ONNX files")
    model, notes = None, list[str]()
    if models:
        with _Stages(progress)("load"):
            for file in [f for f in files if is_onnx(f)][:1]:
                loading, notes = remembered(models[0], file, loading)
            model = loaded(models[0], args, kwargs, loading)
    else:
        _no_model(loading)
    given = read_npz(feeds) if isinstance(feeds, str | os.PathLike) else feeds
    race = raced(model, files, inputs=given, sizes=sizes_of(sizes), threads=threads, rounds=rounds, seed=seed, progress=progress)
    return replace(race, notes=(*notes, *race.notes))


def _no_model(loading: Loading) -> None:
    """What says how a model is loaded is nothing to ignore where there is none."""
    if said := sorted(name for name, value in loading.items() if value):
        raise InputError(f"{', '.join(said)}: for the model, and none was given; leave it out, or give the model too")


def _calibration(calibrate: Calibration, precision: str | None, keep_io: bool) -> Sequence[Mapping[str, Any]] | None:
    """The user's samples, None where there are none; read before any work, so that a wrong file costs no export."""
    if precision is None:
        if calibrate or keep_io:
            raise InputError("calibrate and keep_io are for half precision alone; ask for it with precision, fp16 or bf16")
        return None
    if precision not in half.FORMATS:
        raise InputError(f"there is no precision {precision!r}; choose one of {', '.join(half.FORMATS)}")
    if not calibrate:
        return None
    from .precision.calibrate import given

    return [sample for c in calibrate for sample in ([c] if isinstance(c, Mapping) else given([c]))]


def _samples(model: Signature) -> list[dict[str, Any]]:
    """Random inputs at the usual and at the smallest sizes."""
    return [model.samples(0), model.samples(1, {name: dim.min for name, dim in model.dims.items()})]
