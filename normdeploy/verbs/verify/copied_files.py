"""Compare the files that an export copies from a pipeline's folder with those in the output folder.

A pipeline computes wrong images with a wrong ``scheduler_config.json`` or a wrong scaling factor of the VAE, although
each ONNX file is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import LoadError
from ...loading.folder_containment import read_json
from ...loading.pipeline_index import PipelineIndex
from .wording import list_some

# Characters of a value that a message shows.
_SHOWN = 60


@dataclass(frozen=True)
class CopiedFiles:
    """Comparison of the copied files.

    Attributes:
        faults: files with other content than in the pipeline.
        limits: files that were not compared, and keys that the pipeline does not state. Each limit is a phrase after
            the word "verified".
    """

    faults: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


def compare_copied_files(index: PipelineIndex, folder: Path) -> CopiedFiles:
    """Compare the configs and the files of schedulers and tokenizers in ``folder`` with those of the pipeline.

    JSON objects must be equal, except for keys that start with "_", such as ``_diffusers_version``. Other files must
    have the same bytes. Another exporter may copy fewer files, and a newer diffusers may state more keys. Missing files
    and additional keys are limits.

    Returns:
        the comparison.
    """
    faults = list[str]()
    missing = list[str]()
    more = list[str]()
    for name, source in index.copied_files.items():
        made = folder / name
        if not made.is_file():
            missing.append(name)
            continue
        wanted = _read_object(source)
        found = _read_object(made)
        if wanted is None or found is None:
            if source.read_bytes() != made.read_bytes():
                faults.append(f"{name} is not the file of the pipeline: the two files have different bytes")
            continue
        difference = next(_find_differences(wanted, found), "")
        if difference:
            faults.append(f"{name} is not the file of the pipeline: {difference}")
        elif added := [key for key in found if key not in wanted and not key.startswith("_")]:
            more.append(f"{added[0]} in {name}")
    limits = list[str]()
    if missing:
        limits.append(f"without {list_some(missing)}, which the folder does not have")
    if more:
        limits.append(f"without {list_some(more)}, which the pipeline does not state")
    return CopiedFiles(tuple(faults), tuple(limits))


def _read_object(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None for a file without an object, which is compared by its bytes."""
    try:
        return read_json(file) if file.suffix == ".json" else None
    except LoadError:
        return None


def _find_differences(wanted: Mapping[str, Any], found: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """Yield the keys of ``wanted`` that ``found`` lacks or has with another value."""
    for key, value in wanted.items():
        if key.startswith("_"):
            continue
        name = f"{inside}{key}"
        if key not in found:
            yield f"{name} is {_shorten(value)} in the pipeline, and it is missing in the folder"
        elif isinstance(value, dict) and isinstance(found[key], dict):
            yield from _find_differences(value, found[key], f"{name}.")
        elif value != found[key]:
            yield f"{name} is {_shorten(value)} in the pipeline, and {_shorten(found[key])} in the folder"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
