"""Compare the parts of a Hugging Face encoder-decoder, or of a diffusers pipeline, in one folder with the model.

`normdeploy.verbs.export.parts_export` describes the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import InputError, NormdeployError
from ...findings.rendering import Renderable
from ...loading import find_part_dims, find_part_files
from ...loading.file_kinds import PIPELINE_INDEX
from ...loading.hub import resolve_model_path
from ...loading.huggingface_tasks import ALL_PARTS
from ...loading.pipeline_index import PipelineIndex, read_pipeline_index
from ...model import LoadedModel
from ...verb_options import LoadKeywords, as_keywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..stage_progress import prefix_progress
from . import verify_options
from .comparison_result import Comparison
from .compute_budget import ComparisonBudget
from .copied_files import CopiedFiles, compare_copied_files
from .denoising_chain import make_chain
from .denoising_step import compare_step
from .policy_file import read_policy
from .reference_loading import load_judged_model
from .verify_function import verify

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class PartsComparison(Renderable):
    """Result of ``verify_parts``; true if all parts pass.

    Attributes:
        comparisons: file name -> its comparison.
        step: comparison of a pipeline's first denoising step, with all parts in a chain; None if it was not compared.
        faults: files of a pipeline, other than ONNX files, with other content than in the original folder.
        folder_limits: limits of the verdict on the folder, each a phrase after the word "verified".
    """

    comparisons: Mapping[str, Comparison]
    notes: tuple[str, ...] = ()
    step: Comparison | None = None
    faults: tuple[str, ...] = ()
    folder_limits: tuple[str, ...] = ()

    @property
    def limits(self) -> tuple[str, ...]:
        """Return the limits of the verdict on the folder and on the denoising step."""
        return (*self.folder_limits, *(self.step.limits if self.step is not None else ()))

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .verify_tables import summarize_parts

        return summarize_parts(self)

    def __bool__(self) -> bool:
        steps = (self.step,) if self.step is not None else ()
        return bool(self.comparisons) and not self.faults and all((*self.comparisons.values(), *steps))

    def show(self, console: Console) -> None:
        from .verify_tables import show_parts

        show_parts(console, self)


@take_fields_as_arguments(verify_options.VerifyPartsCall)
def verify_parts(call: verify_options.VerifyPartsCall) -> PartsComparison:
    """Compare each file of a folder that ``export_parts`` wrote with the corresponding part of the model (``verify``).

    For a diffusers pipeline, also compare the first denoising step: text encoders, UNet or transformer, the scheduler's
    step and the VAE's decoder in a chain (``normdeploy.verbs.verify.denoising_step``). The configs, the scheduler and
    the tokenizers must be equal to the originals (``normdeploy.verbs.verify.copied_files``).

    Args:
        source: the model's folder, or its name on the Hub.
        folder: folder with the file of each part. The path of a file determines its part.
        seeds, drift, max_elements, max_seconds, max_memory, tolerance, metric, policy, also_default: as for ``verify``,
            applied to each part. Rules must be for all outputs, because a single output is not in every part.
        progress: called with (part and stage, done, total).
        model, model_args, key, trust, ...: options that load the model, as for ``verify``. Options that the files
            recorded at their export need not be given again.

    Returns:
        the comparison of each file, and of the denoising step. The result is true if all pass. A note lists other ONNX
        files in the folder.

    Raises:
        InputError: a part's file is missing.
        NormdeployError: as for ``verify``; the message names the file.
    """
    place = Path(call.folder)
    files = find_part_files(os.fspath(call.source), trust=call.trust)
    missing = [name for name in files.values() if not (place / name).is_file()]
    if missing:
        raise InputError(
            f"the folder {os.fspath(call.folder)!r} has no {', '.join(missing)}, so its parts can't be verified"
            " together; export all parts again, or pass one file of the folder"
        )
    if call.part not in (None, ALL_PARTS):
        raise InputError(
            f"the part {call.part!r} was passed with a folder of all parts; omit it, or pass that part's file"
        )
    options = as_keywords(call, verify_options.ComparisonOptions, verify_options.DriftOption)
    path = resolve_model_path(os.fspath(call.source))
    keeps_models = (path / PIPELINE_INDEX).is_file()
    comparisons: dict[str, Comparison] = {}
    models: dict[str, LoadedModel] = {}
    ranges = _split_dims(path, files, call) if keeps_models and call.dims else {}
    for part, name in files.items():
        own: LoadKeywords = {**call.load_keywords, "part": part}
        if part in ranges:
            own["dims"] = ranges[part]
        progress = prefix_progress(part, call.progress)
        try:
            if not keeps_models:
                comparisons[name] = verify(call.source, place / name, progress=progress, **options, **own)
                continue
            # The denoising step needs the models again, and tracing a UNet takes long.
            model, notes = load_judged_model(call.source, [place / name], (), None, own)
            models[part] = model
            found = verify(cast("Any", model), place / name, progress=progress, **options)
            comparisons[name] = replace(found, notes=tuple(dict.fromkeys((*notes, *found.notes))))
        except NormdeployError as error:
            raise type(error)(f"{name}: {error}") from error
    others = sorted(path.relative_to(place).as_posix() for path in place.rglob("*.onnx"))
    others = [name for name in others if name not in files.values()]
    notes = [f"not verified, because no part has this name: {', '.join(others)}"] if others else []
    step: Comparison | None = None
    copied = CopiedFiles()
    limits = list[str]()
    if keeps_models:
        index = read_pipeline_index(path, trust=call.trust)
        copied = compare_copied_files(index, place)
        step, why = _compare_step(
            index, models, {part: place / name for part, name in files.items()}, comparisons, call
        )
        limits = [*copied.limits, *([f"the denoising step was not compared: {why}"] if why else [])]
    return PartsComparison(comparisons, tuple(notes), step, copied.faults, tuple(limits))


def _split_dims(path: Path, parts: Iterable[str], call: verify_options.VerifyPartsCall) -> dict[str, list[str]]:
    """Give the ranges of dims to the parts of a pipeline that have these dims, as ``export_parts`` does.

    Returns:
        part -> ranges of its own dims.

    Raises:
        InputError: a dim is not in any part.
    """
    known = find_part_dims(path, trust=call.trust, imports=call.imports)
    names = {text: text.partition("=")[0].strip() for text in call.dims}
    every = sorted(set().union(*known.values()))
    if foreign := [name for name in names.values() if name not in every]:
        raise InputError(f"the dim {foreign[0]!r} is not in any part; the parts have the dims {', '.join(every)}")
    return {part: [text for text, name in names.items() if name in known[part]] for part in parts}


def _compare_step(
    index: PipelineIndex,
    models: Mapping[str, LoadedModel],
    files: Mapping[str, Path],
    comparisons: Mapping[str, Comparison],
    call: verify_options.VerifyPartsCall,
) -> tuple[Comparison | None, str]:
    """Compare the first denoising step of a pipeline.

    Returns:
        (comparison, ""), or (None, reason) if there is no rule for these files, or the chain can't run.
    """
    if call.tolerance or call.metric or (call.policy is not None and read_policy(call.policy).policy):
        return None, "the given tolerances and metrics are for the outputs of one part, not for a chain of parts"
    for name, comparison in comparisons.items():
        if any(result.precision or result.steps is not None for result in comparison.results):
            return None, f"{name} is in half precision or quantized, and only float32 files have a rule for the step"
    if call.progress is not None:
        call.progress("denoising step", 0, 0)
    try:
        chain = make_chain(index, models)
        if chain is None:
            return None, "the pipeline has neither a UNet nor a transformer"
        return compare_step(chain, files, ComparisonBudget(call.max_seconds, call.max_memory)), ""
    except NormdeployError as error:
        # The parts have their verdicts, so an error of the chain does not end the comparison.
        return None, str(error)
