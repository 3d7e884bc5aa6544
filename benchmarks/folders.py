"""Test folders of model types that nobody chose: ``export`` and ``verify`` with no option besides the files.

    python -m benchmarks.folders [--count N] [--again TYPE...]

The model types are drawn at random from all types of transformers that have a class of ``AutoModel…`` and that
``benchmarks.huggingface`` does not list. For each type a small model with random weights is made automatically, saved
with ``save_pretrained``, exported and verified in separate processes. A type without a small model that runs is listed
with the reason, and another one is drawn.

Each row is stored in ``benchmarks/results/folders.json`` as soon as it is measured, and ``folders.md`` is written from
the rows, so an interrupted run continues. Needs transformers and no torchvision, as ``benchmarks.huggingface`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.architectures.catalogue.automatic import Automatic, UnmakeableError
from benchmarks.architectures.catalogue.automatic_transformers import task_of
from benchmarks.huggingface import FAMILIES, command

RESULT = Path(__file__).parent / "results" / "folders.json"
SEED = 0
HEAD = ["model type", "class", "export", "verify", "processor seconds", "why not"]
# Size of images for configs that state none.
_IMAGE = 64


@dataclass(frozen=True)
class FolderRow:
    """Results for one model type.

    Attributes:
        model: class of the model; "" if none was made.
        export: exit code of ``export``; None if it did not run.
        verify: exit code of ``verify``; None if it did not run.
        seconds: processor seconds of both commands.
        reason: why no model was made, or the first line that says what failed.
    """

    model_type: str
    model: str = ""
    export: int | None = None
    verify: int | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def passes(self) -> bool:
        """Return True if both commands passed."""
        return self.export == self.verify == 0

    def as_cells(self) -> list[str]:
        """Return the row of the table."""
        verify = "not run" if self.verify is None else str(self.verify)
        return [self.model_type, self.model, str(self.export), verify, f"{self.seconds:.0f}", self.reason]


def draw_model_types() -> Iterator[str]:
    """Yield the model types in random order, without those that ``benchmarks.huggingface`` lists."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    listed = {getattr(transformers, family.model).config_class.model_type for family in FAMILIES}
    types = sorted(t for t in CONFIG_MAPPING_NAMES if t not in listed and task_of(t) != "PART")
    yield from random.Random(SEED).sample(types, len(types))


def measure_folder(model_type: str) -> FolderRow:
    """Make a folder of a model type, then export and verify it.

    Returns:
        the row.
    """
    try:
        module: Any = Automatic("transformers", model_type).resolved().build()
    except UnmakeableError as error:
        return FolderRow(model_type, reason=str(error)[:200])
    name = type(module).__name__
    with tempfile.TemporaryDirectory() as scratch:
        folder, file = Path(scratch) / "model", Path(scratch) / "model.onnx"
        _save(module, folder)
        before = _children_seconds()
        exported, why, _ = command("export", folder, "-o", file)
        if exported:
            return FolderRow(model_type, name, exported, None, _children_seconds() - before, why[:300])
        verified, why, _ = command("verify", folder, file)
        return FolderRow(model_type, name, exported, verified, _children_seconds() - before, why[:300])


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _save(module: Any, folder: Path) -> None:
    """Save a model as its users have it: with caches switched on, and with the file of its processor."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    config = module.config
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})))
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = True
    module.save_pretrained(folder)
    settings: dict[str, Any] = {}
    if config.model_type in IMAGE_PROCESSOR_MAPPING_NAMES:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None)
        if not isinstance(size, int):
            size = _IMAGE
        settings = {"do_resize": True, "size": {"height": size, "width": size}}
    elif config.model_type in FEATURE_EXTRACTOR_MAPPING_NAMES:
        bins = next((part.num_mel_bins for part in parts if getattr(part, "num_mel_bins", None)), 1)
        settings = {"feature_size": bins, "sampling_rate": 16000}
    if settings:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def read_rows(path: Path) -> dict[str, FolderRow]:
    """Read the stored rows.

    Returns:
        model type -> row.
    """
    stored = json.loads(path.read_text()) if path.exists() else []
    return {row["model_type"]: FolderRow(**row) for row in stored}


def write_rows(path: Path, rows: dict[str, FolderRow]) -> None:
    """Write the rows and the page."""
    path.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
    made = [row for row in rows.values() if row.model]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *(r.as_cells() for r in made))]
    unmade = [f"- {row.model_type}: {row.reason}" for row in rows.values() if not row.model]
    first = (__doc__ or "").partition("\n\n")[0]
    versions = (
        f"torch {version('torch')}, transformers {version('transformers')}, onnxruntime-gpu"
        f" {version('onnxruntime-gpu')}"
    )
    text = (
        f"# Folders of model types drawn at random\n\n{first}\n\n{describe(rows)} {versions}; small configs, random"
        f" weights.\n\n{chr(10).join(lines)}\n"
    )
    if unmade:
        text += f"\nNo small model was made automatically of these types:\n\n{chr(10).join(unmade)}\n"
    path.with_suffix(".md").write_text(text)


def describe(rows: dict[str, FolderRow]) -> str:
    """Summarize the rows in one sentence."""
    made = [row for row in rows.values() if row.model]
    exported = sum(row.export == 0 for row in made)
    return f"{sum(row.passes for row in made)} of {len(made)} folders exported and verified, {exported} exported."


def main() -> int:
    """Measure folders until ``--count`` types have a row with a model.

    Returns:
        exit code: 1 if a folder failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.folders")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--again", nargs="*", default=[])
    wanted = parser.parse_args()
    rows = read_rows(RESULT)
    for model_type in draw_model_types():
        if model_type not in wanted.again and (
            model_type in rows or sum(bool(row.model) for row in rows.values()) >= wanted.count
        ):
            continue
        row = rows[model_type] = measure_folder(model_type)
        write_rows(RESULT, rows)
        print(" | ".join(row.as_cells()), flush=True)
    print(describe(rows))
    return 0 if all(row.passes for row in rows.values() if row.model) else 1


if __name__ == "__main__":
    sys.exit(main())
