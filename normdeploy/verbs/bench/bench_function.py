"""The race of a model, files and engines, or of the forms of norms."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...errors import InputError
from ...runtimes.trt_runner import is_engine
from ...types import PathLike
from ...verb_options import LoadKeywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import as_sequence
from ..arguments.model_source import is_onnx_file, load_as_recorded, recall_loading
from ..stage_progress import StageTimer
from .bench_options import BenchCall
from .model_benchmark import Race, race_files
from .norm_benchmark import race_norms
from .peer_optimizers import check_peers, write_peer_files

if TYPE_CHECKING:
    from ..arguments.model_source import Source


@take_fields_as_arguments(BenchCall, onnx="sources")
def bench(call: BenchCall) -> Race:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns
    (``normdeploy.verbs.bench.model_benchmark``), or
    the forms of norms.

    Args:
        sources: ONNX files, engines and at most one model: a file or folder, or a live module.
        args, kwargs: example arguments of a live module.
        feeds: the inputs, an .npz file or name -> array; None generates them.
        sizes: of dynamic dims of generated inputs: {"batch": 8}, or texts such as "batch=8"; the usual ones of the
        others.
        threads: of torch and of onnxruntime on the CPU.
        rounds: in each every contestant has its turn.
        seed: of generated inputs, and of the order in each round.
        norm_impl: race the norms of the one ONNX file given, each in these forms
        (``normdeploy.verbs.bench.norm_benchmark``);
        ["all"]: in all.
        norms: race usual norms of this kind, or "all"; no file is needed then.
        against: what others write of the same model, raced too: "plain", "onnxslim", "onnxsim", "ort-transformers"
        (``verbs.bench.peer_optimizers``).
        runners: runtimes that installed packages bring (`normdeploy.runtimes.third_party_runner`), by name, in which
        ONNX files are
            run too.
        progress: called with (stage, done, total); total is 0 where it is not known.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer is no error but a result that is false.
    """
    peers = as_sequence(call.against)
    check_peers(peers)
    if call.norm_impl or call.norms is not None:
        return _race_norms(call, peers)
    return _race_files(call, peers)


def _race_norms(call: BenchCall, peers: Sequence[str]) -> Race:
    """Race the forms of norms.

    Raises:
        InputError: an option is for races of files.
    """
    if peers:
        raise InputError("norms are raced by themselves, and others' files are of whole models; leave --against out")
    if call.runners:
        raise InputError("norms are raced by themselves, in onnxruntime; leave --runner out")
    if call.feeds is not None:
        raise InputError("norms are raced on inputs of their own, and inputs were given; leave one of them out")
    _require_no_loading(call.load_keywords)
    return race_norms(
        cast("Sequence[PathLike]", call.sources), as_sequence(call.norm_impl), call.norms, call, call.progress
    )


def _race_files(call: BenchCall, peers: Sequence[str]) -> Race:
    """Race a model, files and what others write of them."""
    contestants = cast("Sequence[Source]", call.sources)
    paths = [s for s in contestants if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx_file(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in contestants if s not in files]
    if len(models) > 1:
        raise InputError(
            f"{len(models)} of {len(contestants)} sources are models; give one, and the others as ONNX files"
        )
    onnx_files = [file for file in files if is_onnx_file(file)]
    model = None
    notes = list[str]()
    if models:
        with StageTimer(call.progress)("load"):
            followed = call.load_keywords
            if onnx_files:
                followed, notes = recall_loading(models[0], onnx_files[0], call.load_keywords)
            model = load_as_recorded(models[0], call.args, call.kwargs, followed, call.load_keywords)
    else:
        _require_no_loading(call.load_keywords)
    with tempfile.TemporaryDirectory() as folder:
        theirs, failed = write_peer_files(peers, model, onnx_files, Path(folder)) if peers else ([], [])
        race = race_files(model, [*files, *theirs], call, call.progress)
    return replace(race, not_run=(*failed, *race.not_run), notes=(*notes, *race.notes))


def _require_no_loading(loading: LoadKeywords) -> None:
    """
    Raises:
        InputError: options say how a model is loaded, and there is none.
    """
    if flags := sorted(name for name, value in loading.items() if value):
        raise InputError(f"{', '.join(flags)}: for the model, and none was given; leave it out, or give the model too")
