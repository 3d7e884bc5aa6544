"""The verbs, each one function that is read top to bottom and names every stage once."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import onnx

from . import ranges, runnable
from .arguments import Loading, Onnx, check_output, prepared
from .engines.build import build
from .errors import GraphError, InputError
from .infer import open_runner, run
from .log import log, norms
from .passes.norm_forms import CUDA
from .precision import precision as half
from .proof.reshapes import resolve_reshapes
from .records import Finding, Summary
from .results import ExportResult, Origin, several
from .rewriting import attention, rewrite, whole
from .rewriting.work import Step, Wanted
from .sources import (
    is_onnx,
    loaded,
    loaded_as_recorded,
    opened,
    original,
    remembered,
    remembered_by_any,
)
from .storage.files import filled, load_onnx, opened_sizes, save_onnx
from .storage.weights import lifted
from .types import PathLike, Progress

if TYPE_CHECKING:  # torch takes seconds to import, and what only reads ONNX needs none of it
    from .arguments import Example
    from .bisection.bisect import Bisection
    from .model import InputSpec, Model, Signature
    from .parity.compare import Comparison, Inputs
    from .parity.policy import Thresholds, Tolerances
    from .race.bench import Race
    from .sources import Source

__all__ = ["ExportResult", "bench", "bisect", "build", "export", "inspect", "open_runner", "optimize", "run", "verify"]

Calibration = Sequence[PathLike | Mapping[str, Any]]


class _Stages:
    """Names and times the stages of a verb, and tells the progress bar which one runs."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, 0, 0)
        log.info("%s ...", name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log.info("%s took %.2f s", name, self.seconds[name])


_NOT_MEASURED = "the forms for onnxruntime's CUDA provider were chosen by its documents: they were not measured"
_HEAVY = 2**26  # bytes of weights; to look for cycles takes up to half a second, a tenth of the export of a small model
OPSET = 21  # the first with a usable GroupNormalization; from 23 on the exporter writes Attention, which TensorRT can't build


@prepared()
def export(
    source: Source,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    opset: int | None = None,
    runtime: str = "any",
    provider: str = "cpu",
    fuse: str = "standard",
    strict: bool = False,
    strict_proof: bool = False,
    precision: str | None = None,
    calibrate: Calibration = (),
    keep_io: bool = False,
    compare_limit: int = whole.LIMIT,
    custom_translation_table: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> ExportResult:
    """Turn a PyTorch model into ONNX with every normalization fused, folded or named with the reason why not.

    Args:
        source: a model file or folder, a live module or an exported program, which are left untouched.
        args: example arguments of a live module: a tuple of them, one tensor, or a mapping of them by forward's parameters.
        kwargs: example keyword arguments.
        output: where to write the ONNX file.
        opset: 18 to 25; None is 21. The file is raised above it only where a norm's node needs that, which a note tells.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or "tensorrt-rtx".
        provider: of onnxruntime, "cpu" or "cuda": what runs best there (of cuda by its documents, not measured).
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        strict_proof: a rewrite is an error whose certificate is not exact, or that makes NaN of a number at an infinite input.
        precision: "fp16" or "bf16": the file computes in it, but for what it can't hold (``normdeploy.precision.precision``).
        calibrate: inputs to see that on: .npz files, or mappings name -> array; empty: some are generated.
        keep_io: inputs and outputs of a half-precision file stay float32.
        compare_limit: bytes of weights up to which the whole model before and after the rewrites is compared (`rewriting.whole`).
        custom_translation_table: operator of torch -> onnxscript function, as ``torch.onnx.export`` takes it (`normdeploy.translations`).
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: see ``normdeploy.loading.load`` (files) and ``from_module`` (live modules).

    Raises:
        NormdeployError: one of ``normdeploy.errors``; the message says what to do.
    """
    from .exporter import record, to_light
    from .graphs import simplify as cleaner
    from .storage import signing
    from .storage.record import content_of, recorded, runs_code

    stage, tidy = _Stages(progress), partial(cleaner.simplify, first=resolve_reshapes)
    if output is not None:
        check_output(output, source)
    signing.check(output)
    target = _target(runtime, provider)
    samples = _calibration(calibrate, precision, keep_io)
    with stage("load"):
        model = loaded(source, args, kwargs, loading, shared=True)
    with stage("export"):
        proto, weights = to_light(model, opset=opset or OPSET, custom_translation_table=custom_translation_table, progress=progress)
    signature = model.signature
    attentions = precision is None and (opset is None or opset >= attention.OPSET)
    wanted = Wanted(target, fuse, attentions=attentions, progress=progress, weights=weights)
    weight = whole.weight(proto)
    before = proto if weight <= compare_limit else None
    del model  # in cycles, as torch's graphs are
    if weight >= _HEAVY and isinstance(source, str | os.PathLike):
        gc.collect()
    with stage("norms"):
        proto, summary, taken = rewrite.optimized(proto, wanted, strict)
    with stage("simplify"):
        simplified = tidy(proto, _samples(signature) if before is None else (), progress=progress)
    with stage("compare"):
        made = simplified.proto, summary, taken
        (proto, summary, _), notes, ran = _compared(before, signature.inputs, wanted, made, strict, lambda plain: tidy(plain).proto)
        ran = ran or (before is None and not simplified.note)  # then cleaning up was checked by runs of both
        before = None
        if not ran:
            notes += runnable.require(
                proto, _samples(signature), runtime, lambda feeds: _eager(loaded(source, args, kwargs, loading), feeds)
            )
    if strict_proof:
        rewrite.require_exact(summary.findings)
    account = None
    if precision is not None:
        with stage("precision"):
            proto, account = half.converted(filled(proto), precision, samples, inputs=signature.inputs, keep_io=keep_io, progress=progress)
            signature = replace(signature, inputs=half.recast(signature.inputs, account))
            if ran and not runtime.startswith("tensorrt"):
                runnable.require_half(proto, _samples(signature), precision)
        summary = replace(summary, opset=half.opset_of(proto))
    flags = {"opset": opset, "runtime": runtime, "fuse": fuse, "strict": strict, "trust": loading.get("trust", False)}
    record(proto, signature, flags | ({"precision": precision} if precision is not None else {}))
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    if runs_code(recorded(proto)):
        signing.sign(content_of(proto), output)
    notes += [simplified.note] if simplified.note else []
    notes += [_NOT_MEASURED] if provider == "cuda" else []
    if signature.taken:
        taken_from = [f"{d.name}={d.min}:{d.opt}:{d.max} ({signature.taken[n]})" for n, d in signature.dims.items() if n in signature.taken]
        notes.append(f"sizes taken where none were stated: {', '.join(taken_from)}; state others with --dim")
    if opset is not None and summary.opset > opset:
        notes.append(f"the file has opset {summary.opset}, not {opset}: the node of a norm needs it")
    summary = replace(summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto))
    norms(summary, notes)
    origin = Origin(source, args, kwargs, loading)
    held, path = (filled(proto), None) if output is None else (None, Path(output))
    return ExportResult(held, path, summary, tuple(notes), stage.seconds, account, origin)


@prepared()
def optimize(
    source: Onnx,
    output: PathLike | None = None,
    *,
    runtime: str = "any",
    provider: str = "cpu",
    fuse: str = "standard",
    strict: bool = False,
    strict_proof: bool = False,
    precision: str | None = None,
    calibrate: Calibration = (),
    keep_io: bool = False,
    compare_limit: int = whole.LIMIT,
    simplify: bool = True,
    dims: Sequence[str] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Fuse and fold the normalizations of an ONNX model from anywhere, and clean up the rest.

    Args:
        source: a file, a model with its weights loaded, or what ``export`` gave; none is changed.
        output: where to write the result.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or "tensorrt-rtx".
        provider: of onnxruntime, "cpu" or "cuda": what runs best there (of cuda by its documents, not measured).
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        strict_proof: a rewrite is an error whose certificate is not exact, or that makes NaN of a number at an infinite input.
        precision, calibrate, keep_io, compare_limit: as for ``export``. Inputs are generated from what ``export`` recorded in the file,
            if it did.
        simplify: constants are computed, duplicates and dead ends removed, shapes resolved (`normdeploy.graphs.simplify`), where the
            result can be compared with the model; else norms alone are touched.
        dims: ranges of dynamic dims, ``batch=1:8:64`` (min:opt:max), which the result records for ``run``, ``bench``, ``build`` and
            ``package``; those of the others must be recorded already, or follow from a table that positions along them index.
        progress: called with (stage, done, total); total is 0 where it is not known.

    Raises:
        GraphError: the file is broken or no ONNX.
        InputError: the inputs for calibration or the dims do not fit.
        CertificateError: with ``strict``, where a certificate failed.
        NormdeployError: ``output`` is ``source``, or can't be written.
    """
    from .graphs import simplify as cleaner
    from .storage import signing
    from .storage.record import amend, content_of, recorded

    stage = _Stages(progress)
    if output is not None:
        check_output(output, source)
    signing.check(output)
    target = _target(runtime, provider)
    samples = _calibration(calibrate, precision, keep_io)
    with stage("load"):
        read = partial(opened_sizes, source) if isinstance(source, onnx.ModelProto) else partial(load_onnx, cast("PathLike", source))
        proto, weights = lifted(read())
        wanted = Wanted(target, fuse, attentions=precision is None, progress=progress, weights=weights)
        signed = _signed(proto, source)
        try:
            inputs = recorded(proto).get("inputs", ())
        except GraphError:  # a stranger's, or a newer version's: it matters to half precision and to ranges alone
            if precision is not None or dims:
                raise
            inputs = ()
        inputs, hints = ranges.described(proto, inputs, dims)
    with stage("norms"):
        before = proto if whole.weight(proto) <= compare_limit else None
        proto, summary, taken = rewrite.optimized(proto, wanted, strict)
    with stage("simplify"):
        tidy = partial(cleaner.simplify, first=resolve_reshapes) if simplify and before is not None else cleaner.Simplified
        tidied = tidy(proto)
    with stage("compare"):
        made = (tidied.proto, summary, taken)
        (tidy_proto, summary, _), notes, ran = _compared(before, inputs, wanted, made, strict, lambda plain: tidy(plain).proto)
        if ran:
            proto = tidy_proto
            notes += [tidied.note] if tidied.note else []
        else:
            notes += ["the graph was not cleaned up: nothing says that it would stay the same"] if simplify else []
            runnable.require_as_before(proto, read, runtime)
    summary = replace(summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto))
    notes = [*hints, *notes, *([_NOT_MEASURED] if provider == "cuda" else [])]
    if strict_proof:
        rewrite.require_exact(summary.findings)
    account = None
    if precision is not None:
        with stage("precision"):
            proto, account = half.converted(filled(proto), precision, samples, inputs=inputs, keep_io=keep_io, progress=progress)
            if ran and not runtime.startswith("tensorrt"):
                runnable.require_half(proto, [], precision)
        inputs = half.recast(inputs, account)
        ops = rewrite.op_counts(proto)
        summary = replace(summary, opset=half.opset_of(proto), nodes_after=len(proto.graph.node), ops_after=ops)
    if dims:
        ranges.name_dims(proto)
    if dims or (account is not None and recorded(proto)):
        amend(proto, inputs, {"precision": precision} if precision is not None else None)
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    if signed is not None:
        signing.sign(content_of(proto), output, signed)
    norms(summary, notes)
    origin = Origin(source)
    held, path = (filled(proto), None) if output is None else (None, Path(output))
    return ExportResult(held, path, summary, tuple(notes), stage.seconds, account, origin)


@prepared()
def inspect(
    source: Source | onnx.ModelProto,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    explain: str | None = None,
    custom_translation_table: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Summary:
    """What ``export`` or ``optimize`` would make of the normalizations of a model, and the runtimes of that; nothing is changed or written.

    Args:
        source: an ONNX file or model, or what ``export`` takes.
        args, kwargs, runtime, fuse, custom_translation_table, progress, loading: as for ``export``.
        explain: a tensor, a node or a module path: why it was fused or not is in the result's ``explanations``.

    Raises:
        InputError: nothing in the model is called as ``explain`` says.
        NormdeployError: the model can't be read.
    """
    from .census import census

    table = custom_translation_table
    proto, weights, chains = opened(source, args, kwargs, loading=loading, custom_translation_table=table, progress=progress)
    summary = census(proto, runtime=runtime, fuse=fuse, explain=explain, progress=progress, chains=chains)
    del weights  # which had to live until here
    norms(summary, summary.notes)
    return summary


@prepared(onnx="files")
def verify(
    source: Source | onnx.ModelProto | Any,
    files: Onnx | Sequence[Onnx] = (),
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    engines: Sequence[PathLike] = (),
    seeds: int = 3,
    feeds: Inputs | None = None,
    drift: bool = False,
    max_elements: int | None = None,
    tolerance: Tolerances | None = None,
    metric: Thresholds | None = None,
    policy: PathLike | None = None,
    also_default: bool = False,
    dataset: PathLike | None = None,
    labels: str | None = None,
    map: Sequence[str] | Mapping[str, str] = (),
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Comparison:
    """Compare what the runtimes make of files with a PyTorch model in float64, or an ONNX one (the rule: ``normdeploy.parity.compare``).

    How the model is to be loaded need not be said again where ``export`` recorded it; what may run code, only where this user or a team
    signed it for this very model file (docs/teams.md).

    Args:
        source: the model file or folder, the live module or program; or the result of ``export``, which stands for what it was made
            from, with its arguments and options, and is itself the first of the files; or an ONNX file, an onnx.ModelProto with its
            weights, or an onnxruntime.InferenceSession, whose nodes in float64 are the reference then (inputs and dims say its sizes).
        files: what ``export``, ``optimize`` and ``build`` made of it, told apart by content, and models
            in memory; engines are run where a GPU is.
        args, kwargs: example arguments of a live module.
        engines: more files.
        seeds: random inputs at the usual sizes, besides those at other sizes, small ones and zeros.
        feeds: own inputs, name -> array or an .npz file, one or several; only these are run then.
        drift: also compare the inner tensors of ONNX files, one case each, with the model's; it takes two to three times as long.
        max_elements: of the largest generated input; None: 8 times those at the usual sizes. Where the model takes larger sizes, the
            result's ``up_to`` says how far it goes.
        tolerance: "ABS:REL" for every output, {"logits": "1e-3:1e-2"} or ["logits=1e-3:1e-2"] for one: |value − reference| ≤ ABS +
            REL · |reference| for each element decides in the place of the default rule, which the result's ``standard`` says.
        metric: "cosine>=0.995" for every output, {"logits": "top1>=0.99"} or ["logits=top1>=0.99"] for one (``normdeploy.parity.metrics``).
        policy: a file of such rules (``normdeploy.parity.policy_file``); what is given here goes before what it says.
        also_default: the default rule must hold beside the rules given.
        dataset: samples that metrics are measured on: an .npz file, a folder of these, or a Hugging Face dataset on disk.
        labels: the dataset's array or column of right classes, whole numbers [samples], for "accuracy_drop<=0.01" and "accuracy5_drop".
        map: an input or output of a file -> the model's, where names differ and their order does not tell.
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A candidate that is wrong is no error but a result that is false.
    """
    from .parity import compare
    from .parity.cases import read
    from .parity.dataset import open_dataset
    from .parity.names import pairs_of
    from .parity.policy import policy_of
    from .parity.policy_file import PolicyFile, read_policy

    stage = _Stages(progress)
    every = [*cast("Sequence[PathLike]", files), *engines]  # models in memory have become files
    said = PolicyFile() if policy is None else read_policy(policy)
    rules = policy_of(tolerance, metric).over(said.policy).requiring(also_default)
    most = said.most if max_elements is None else max_elements
    own = None if feeds is None else read(feeds)
    if labels is not None and dataset is None:
        raise InputError(f"the labels {labels!r} are a part of a dataset, and none is given; give it with --dataset, or leave them out")
    column = said.labels if labels is None and rules.labelled else labels  # a file names them for whoever asks
    with stage("load"):
        model, notes = original(source, every, args, kwargs, loading)
    with stage("verify"):
        comparison = compare.verify(
            model,
            every,
            seeds=seeds,
            inputs=own,
            drift=drift,
            most=most,
            policy=rules,
            names=[*said.names.items(), *pairs_of(map)],
            dataset=() if dataset is None else open_dataset(dataset, model, column),
            progress=progress,
        )
    return replace(comparison, notes=(*notes, *comparison.notes))


@prepared(onnx="onnx_path")
def bisect(
    source: Source,
    onnx_path: Onnx = "",
    args: Example = (),
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
        source, args, kwargs, seeds, feeds, progress, loading: as for ``verify``.
        onnx_path: the file; where ``source`` is a result it need not be given.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A fault is no error but a result that is false.
    """
    from .bisection.bisect import bisect as search
    from .parity.cases import read
    from .storage.folder import vacant

    stage = _Stages(progress)
    if output is not None:
        vacant(output)
    own, file = None if feeds is None else read(feeds), cast("PathLike", onnx_path)
    if not file:
        raise InputError("no ONNX file was given to look into; give it behind the model")
    with stage("load"):
        followed, notes = remembered_by_any(source, [file], loading)
        model = loaded_as_recorded(source, args, kwargs, followed, loading)
    with stage("bisect"):
        found = search(model, file, engines=engines, seeds=seeds, inputs=own, progress=progress)
    if output is not None:
        with stage("write"):
            if found.write(output) is None and not found:
                notes.append(f"nothing was written to {os.fspath(output)}: no nodes were found that fail by themselves")
    return replace(found, notes=(*notes, *found.notes))


@prepared(onnx="sources")
def bench(
    sources: Source | Onnx | Sequence[Source | Onnx],
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    feeds: PathLike | Mapping[str, Any] | None = None,
    sizes: Sequence[str] | Mapping[str, int] = (),
    threads: int = 1,
    rounds: int = 100,
    seed: int = 0,
    norm_impl: str | Sequence[str] = (),
    norms: str | None = None,
    against: str | Sequence[str] = (),
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
        against: what others write of the same model, raced too: "plain", "onnxslim", "onnxsim", "ort-transformers" (``race.peers``).
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer is no error but a result that is false.
    """
    from .infer import is_engine, sizes_of
    from .race.bench import bench as raced
    from .race.norms import race_norms
    from .race.peers import check_peers, written
    from .storage.archive import read_npz

    peers = several(against)
    check_peers(peers)
    if norm_impl or norms is not None:
        if peers:
            raise InputError("norms are raced by themselves, and others' files are of whole models; leave --against out")
        if feeds is not None:
            raise InputError("norms are raced on inputs of their own, and inputs were given; leave one of them out")
        _no_model(loading)
        own = cast("Sequence[PathLike]", sources)
        return race_norms(own, several(norm_impl), norms, sizes_of(sizes), threads=threads, rounds=rounds, seed=seed, progress=progress)
    contestants = cast("Sequence[Source]", sources)
    paths = [s for s in contestants if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in contestants if s not in files]
    if len(models) > 1:
        raise InputError(f"{len(models)} of {len(contestants)} sources are models; give one, and the others as ONNX files")
    model, notes = None, list[str]()
    if models:
        with _Stages(progress)("load"):
            followed = loading
            for file in [f for f in files if is_onnx(f)][:1]:
                followed, notes = remembered(models[0], file, loading)
            model = loaded_as_recorded(models[0], args, kwargs, followed, loading)
    else:
        _no_model(loading)
    given = read_npz(feeds) if isinstance(feeds, str | os.PathLike) else feeds
    with tempfile.TemporaryDirectory() as folder:
        theirs, failed = written(peers, model, [f for f in files if is_onnx(f)], Path(folder)) if peers else ([], [])
        race = raced(
            model, [*files, *theirs], inputs=given, sizes=sizes_of(sizes), threads=threads, rounds=rounds, seed=seed, progress=progress
        )
    return replace(race, not_run=(*failed, *race.not_run), notes=(*notes, *race.notes))


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
    if not calibrate:
        return None
    from .precision.calibrate import given

    return [sample for c in calibrate for sample in ([c] if isinstance(c, Mapping) else given([c]))]


def _signed(proto: onnx.ModelProto, source: PathLike | onnx.ModelProto) -> dict[str, str] | None:
    """The modules that a signature of the file vouches for, where its record needs one and this user or team has signed it."""
    from .storage import signing
    from .storage.record import content_of, recorded, runs_code

    try:
        if not runs_code(recorded(proto)):
            return None
    except GraphError:  # it has no record, or one that can't be read
        return None
    return signing.vouched(content_of(proto), None if isinstance(source, onnx.ModelProto) else source)[0]


def _compared(
    before: onnx.ModelProto | None,
    inputs: Sequence[InputSpec],
    wanted: Wanted,
    made: whole.Made,
    strict: bool,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> tuple[whole.Made, list[str], bool]:
    """As `whole.settled`; ``before`` is None where it is too large to be held."""
    if before is None:
        return made, ["the whole model was not compared with the one before: its weights are beyond compare_limit"], False
    model = before

    def make(undone: Mapping[Step, Finding]) -> whole.Made:
        return rewrite.optimized(model, replace(wanted, progress=None, undone=undone))

    return whole.settled(model, inputs, make, made, tidy, strict=strict, loads=not wanted.runtime.startswith("tensorrt"))


def _eager(model: Model, feeds: Mapping[str, Any]) -> str:
    """Why PyTorch does not run the model on these inputs, "" where it does."""
    from .runtimes.eager import EagerRunner

    try:
        with EagerRunner(model) as runner:
            runner.infer(feeds)
    except Exception as error:  # whatever torch or the model raises
        return str(error) or type(error).__name__
    return ""


def _target(runtime: str, provider: str) -> str:
    """The runtime whose forms are written.

    Raises:
        InputError: a provider is chosen of another runtime than onnxruntime.
    """
    if provider != "cuda":
        return runtime
    if not runtime.startswith("onnxruntime"):
        raise InputError(f"provider 'cuda' is one of onnxruntime's, and the runtime is {runtime!r}; give runtime onnxruntime with it")
    return CUDA


def _samples(model: Signature) -> list[dict[str, Any]]:
    """Random inputs at the usual and at the smallest sizes."""
    return [model.samples(0), model.samples(1, {name: dim.min for name, dim in model.dims.items()})]
