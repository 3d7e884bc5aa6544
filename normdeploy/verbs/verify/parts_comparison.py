"""Compare the parts of a Hugging Face encoder-decoder in one folder with the model.

`normdeploy.verbs.export.parts_export` describes the folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError, NormdeployError
from ...findings.rendering import Renderable
from ...loading.huggingface_tasks import ALL_PARTS, PART_FILES
from ...verb_options import LoadKeywords, as_keywords
from ..arguments.argument_validation import take_fields_as_arguments
from ..stage_progress import prefix_progress
from . import verify_options
from .comparison_result import Comparison
from .verify_function import verify

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class PartsComparison(Renderable):
    """Result of ``verify_parts``; true if all parts pass.

    Attributes:
        comparisons: file name -> its comparison.
    """

    comparisons: Mapping[str, Comparison]
    notes: tuple[str, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .verify_tables import summarize_parts

        return summarize_parts(self)

    def __bool__(self) -> bool:
        return bool(self.comparisons) and all(self.comparisons.values())

    def show(self, console: Console) -> None:
        from .verify_tables import show_parts

        show_parts(console, self)


@take_fields_as_arguments(verify_options.VerifyPartsCall)
def verify_parts(call: verify_options.VerifyPartsCall) -> PartsComparison:
    """Compare each file of a folder that ``export_parts`` wrote with the corresponding part of the model (``verify``).

    Args:
        source: the model's folder, or its name on the Hub.
        folder: folder with the three files. The name of a file determines its part.
        seeds, drift, max_elements, max_seconds, max_memory, tolerance, metric, policy, also_default: as for ``verify``,
            applied to each part. Rules must be for all outputs, because a single output is not in every part.
        progress: called with (part and stage, done, total).
        model, model_args, key, trust, ...: options that load the model, as for ``verify``. Options that the files
            recorded at their export need not be given again.

    Returns:
        the comparison of each file. The result is true if all pass. A note lists other ONNX files in the folder.

    Raises:
        InputError: a part's file is missing.
        NormdeployError: as for ``verify``; the message names the file.
    """
    place = Path(call.folder)
    missing = [name for name in PART_FILES.values() if not (place / name).is_file()]
    if missing:
        raise InputError(
            f"the folder {os.fspath(call.folder)!r} has no {', '.join(missing)}, so its parts can't be verified"
            " together; export them again with --part all, or pass one file of the folder"
        )
    if call.part not in (None, ALL_PARTS):
        raise InputError(
            f"the part {call.part!r} was passed with a folder of all parts; omit it, or pass that part's file"
        )
    options = as_keywords(call, verify_options.ComparisonOptions, verify_options.DriftOption)
    comparisons: dict[str, Comparison] = {}
    for part, name in PART_FILES.items():
        own: LoadKeywords = {**call.load_keywords, "part": part}
        try:
            comparisons[name] = verify(
                call.source, place / name, progress=prefix_progress(part, call.progress), **options, **own
            )
        except NormdeployError as error:
            raise type(error)(f"{name}: {error}") from error
    others = sorted(path.name for path in place.glob("*.onnx") if path.name not in PART_FILES.values())
    return PartsComparison(
        comparisons, (f"not verified, because no part has this name: {', '.join(others)}",) if others else ()
    )
