"""What a step reads, and what the store has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, StoreError
from .file_hashes import FileHashes
from .job_steps import JobStep
from .outcomes import StepEnd
from .step_keys import FleetMachine, find_python_files, step_key
from .step_store import StepRecord, StepStore, StoredFile
from .store_backends import FolderBackend


@dataclass(frozen=True)
class StepInput:
    """A file that a step reads: the SHA-256 and bytes of its content, and where it is outside the store, None where it
    is in it. A file outside is used as it is (a link), unless ``copied``."""

    stored: StoredFile
    path: Path | None = None
    copied: bool = False


@dataclass(frozen=True)
class StepTask:
    """A step with all that it reads: path in its folder -> file; and the steps that were run before it, at any
    distance, of which its result says that they were: name -> key."""

    step: JobStep
    inputs: Mapping[str, StepInput]
    made: Mapping[str, str] = field(default_factory=dict)

    def key_on(self, machine: FleetMachine) -> tuple[str, dict[str, Any]]:
        return step_key(self.step, {path: file.stored.sha256 for path, file in self.inputs.items()}, machine)


def resolve_inputs(step: JobStep, ends: Mapping[str, StepEnd], hashes: FileHashes, store: StepStore) -> StepTask:
    """The step with all that it reads.

    Args:
        ends: of the steps before it.

    Raises:
        InputError: a file can't be read, or lies where the step can't see it.
    """
    inputs: dict[str, StepInput] = {}
    files = dict(step.files)
    if step.code is not None:
        if isinstance(store.place, FolderBackend):
            own = store.place.root
        else:
            own = None
        files |= find_python_files(step.code, [own] if own else [])
    for place, path in files.items():
        for name, (file, stored) in hashes.hash_path(place, path).items():
            if name.startswith(("..", "/")):
                raise InputError(f"{name!r} of {path.name!r} lies outside of its folder; copy it there")
            inputs[name] = StepInput(stored, file, copied=name.endswith((".onnx", ".data", ".py")))
    for folder, before in step.after.items():
        inputs |= {f"{folder}/{name}": StepInput(s) for name, s in inputs_from_step(step, ends[before]).items()}
    return StepTask(step, inputs)


def lookup_record(store: StepStore, key: str, *, void: bool) -> tuple[StepRecord | None, str]:
    """What the store has for a key, and what is wrong with that, in which case there is nothing.

    Args:
        void: whether a damaged record is removed.

    Raises:
        StoreError: the store can't be reached.
    """
    try:
        record = store.read_record(key)
    except StoreError as error:
        if not store.has_record(key):
            raise
        record = None
        note = f"{error}; the step is run again"
    else:
        if record is None or store.has_all_outputs(record):
            return record, ""
        note = f"the store lacks files of {record.step}; it is run again"
    if void:
        store.void_record(key)
    return None, note


def inputs_from_step(step: JobStep, before: StepEnd) -> dict[str, StoredFile]:
    """What a step reads of what one before it made."""
    return {name: file for name, file in before.outputs.items() if step.reports or name != "report.json"}
