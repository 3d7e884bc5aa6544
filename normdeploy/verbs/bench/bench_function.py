"""Benchmark a model, ONNX files and engines against each other, or norms in all their forms."""

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
from ..stage_progress import StageTimer, describe_loading
from ..verify.image_references import prepare_reference
from .bench_options import BenchCall
from .model_benchmark import Race, race_files
from .norm_benchmark import race_norms
from .peer_optimizers import check_peers, write_peer_files

if TYPE_CHECKING:
    from ...model import LoadedModel
    from ..arguments.model_source import Source


@take_fields_as_arguments(BenchCall, onnx="sources")
def bench(call: BenchCall) -> Race:
    """Benchmark a model in eager mode and torch.compile, ONNX files and engines, or the forms of norms.

    The model in one mode, or one file in one runtime, is a contestant. Contestants take turns in one process
    (``normdeploy.verbs.bench.model_benchmark``).

    Args:
        sources: ONNX files, engines and at most one model: a file or folder, or a live module.
        args, kwargs: example arguments of a live module.
        feeds: the inputs, an .npz file or name -> array; None generates them.
        sizes: sizes of dynamic dims of generated inputs: {"batch": 8}, or texts such as "batch=8". Dims that are not
            named take their usual sizes.
        threads: CPU threads of torch and of onnxruntime.
        rounds: number of counted rounds; each contestant has one turn in a round.
        seed: seed of the generated inputs and of the order within each round.
        norm_impl: benchmark each norm of the one given ONNX file in these forms
            (``normdeploy.verbs.bench.norm_benchmark``); ["all"] benchmarks all forms.
        norms: benchmark built-in example norms of this kind, or of "all" kinds. No file is passed in this case.
        against: also benchmark files that other tools write for the same model: "plain", "onnxslim", "onnxsim",
            "ort-transformers" (``verbs.bench.peer_optimizers``).
        runners: names of further runtimes that also run the ONNX files, as for ``verify``.
        progress: called with (stage, done, total); total is 0 if unknown.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: as for ``export``.

    Returns:
        The times and errors of all contestants. The result is false if a contestant gave a wrong answer or if no
        contestant could run.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A wrong answer raises nothing; it makes the result false.
    """
    peers = as_sequence(call.against)
    check_peers(peers)
    if call.norm_impl or call.norms is not None:
        return _race_norms(call, peers)
    return _race_files(call, peers)


def _race_norms(call: BenchCall, peers: Sequence[str]) -> Race:
    """Benchmark the forms of norms.

    Raises:
        InputError: an option applies only to benchmarks of files.
    """
    if peers:
        raise InputError("norms are measured one by one, but files of other tools are whole models; omit --against")
    if call.runners:
        raise InputError("norms are measured one by one, in onnxruntime only; omit --runner")
    if call.feeds is not None:
        raise InputError(
            "norms are measured on generated inputs, but inputs were passed; omit the inputs, or measure the whole file"
        )
    _require_no_loading(call.load_keywords)
    return race_norms(
        cast("Sequence[PathLike]", call.sources), as_sequence(call.norm_impl), call.norms, call, call.progress
    )


def _race_files(call: BenchCall, peers: Sequence[str]) -> Race:
    """Benchmark a model, ONNX files and engines, and the files that ``peers`` write for the same model.

    Raises:
        InputError: more than one source is a model, or loading options were given without a model.
    """
    contestants = cast("Sequence[Source]", call.sources)
    paths = [s for s in contestants if isinstance(s, str | os.PathLike)]
    files = [p for p in paths if is_onnx_file(p) or (os.path.isfile(p) and is_engine(p))]
    models = [s for s in contestants if s not in files]
    if len(models) > 1:
        raise InputError(
            f"{len(models)} of {len(contestants)} sources are models; pass one model, and the others as ONNX files"
        )
    onnx_files = [file for file in files if is_onnx_file(file)]
    model = None
    notes = list[str]()
    if models:
        with StageTimer(call.progress)("load", describe_loading(models[0])):
            followed = call.load_keywords
            if onnx_files:
                followed, notes = recall_loading(models[0], onnx_files[0], call.load_keywords)
            model = load_as_recorded(models[0], call.args, call.kwargs, followed, call.load_keywords)
            prepared, more = prepare_reference(model, onnx_files)
            model, notes = cast("LoadedModel", prepared), [*notes, *more]
    else:
        _require_no_loading(call.load_keywords)
    with tempfile.TemporaryDirectory() as folder:
        theirs, failed = write_peer_files(peers, model, onnx_files, Path(folder)) if peers else ([], [])
        race = race_files(model, [*files, *theirs], call, call.progress)
    return replace(race, not_run=(*failed, *race.not_run), notes=(*notes, *race.notes))


def _require_no_loading(loading: LoadKeywords) -> None:
    """Check that no loading options were given.

    Raises:
        InputError: options say how to load a model, but no model was given.
    """
    if flags := sorted(name for name, value in loading.items() if value):
        raise InputError(
            f"{', '.join(flags)}: applies to a model, but no model was passed; omit it, or also pass the model"
        )
