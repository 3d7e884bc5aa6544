"""The race of a model, files and engines, or of the forms of norms."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..arguments import Loading, called_with
from ..errors import InputError
from ..results import several
from ..runtimes.trt import is_engine
from ..types import PathLike
from ..verbs.bench.bench import Race, race_files
from ..verbs.bench.norms import race_norms
from ..verbs.bench.options import BenchCall
from ..verbs.bench.peers import check_peers, written
from ..verbs.sources import is_onnx, loaded_as_recorded, remembered
from .common import Stages

if TYPE_CHECKING:
    from ..verbs.sources import Source


@called_with(BenchCall, onnx="sources")
def bench(call: BenchCall) -> Race:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns (``normdeploy.verbs.bench.bench``), or
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
        norm_impl: race the norms of the one ONNX file given, each in these forms (``normdeploy.verbs.bench.norms``);
        ["all"]: in all.
        norms: race usual norms of this kind, or "all"; no file is needed then.
        against: what others write of the same model, raced too: "plain", "onnxslim", "onnxsim", "ort-transformers"
        (``verbs.bench.peers``).
        runners: runtimes that installed packages bring (`normdeploy.runtimes.guests`), by name, in which ONNX files are
            run too.
        progress: called with (stage, done, total); total is 0 where it is not known.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer is no error but a result that is false.
    """
    peers = several(call.against)
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
    _require_no_loading(call.loading)
    return race_norms(
        cast("Sequence[PathLike]", call.sources), several(call.norm_impl), call.norms, call, call.progress
    )


def _race_files(call: BenchCall, peers: Sequence[str]) -> Race:
    """Race a model, files and what others write of them."""
    contestants = cast("Sequence[Source]", call.sources)
    paths = [s for s in contestants if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in contestants if s not in files]
    if len(models) > 1:
        raise InputError(
            f"{len(models)} of {len(contestants)} sources are models; give one, and the others as ONNX files"
        )
    onnx_files = [file for file in files if is_onnx(file)]
    model, notes = None, list[str]()
    if models:
        with Stages(call.progress)("load"):
            followed = call.loading
            if onnx_files:
                followed, notes = remembered(models[0], onnx_files[0], call.loading)
            model = loaded_as_recorded(models[0], call.args, call.kwargs, followed, call.loading)
    else:
        _require_no_loading(call.loading)
    with tempfile.TemporaryDirectory() as folder:
        theirs, failed = written(peers, model, onnx_files, Path(folder)) if peers else ([], [])
        race = race_files(model, [*files, *theirs], call, call.progress)
    return replace(race, not_run=(*failed, *race.not_run), notes=(*notes, *race.notes))


def _require_no_loading(loading: Loading) -> None:
    """
    Raises:
        InputError: options say how a model is loaded, and there is none.
    """
    if flags := sorted(name for name, value in loading.items() if value):
        raise InputError(f"{', '.join(flags)}: for the model, and none was given; leave it out, or give the model too")
