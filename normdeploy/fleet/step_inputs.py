"""Resolve the inputs of a step, and look up its record in the store."""

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
    """File that a step reads.

    Attributes:
        stored: SHA-256 and size of its content.
        path: path of the file outside the store; None if the file is in the store.
        copied: True to copy a file from outside the store into the step's folder, False to link it.
    """

    stored: StoredFile
    path: Path | None = None
    copied: bool = False


@dataclass(frozen=True)
class StepTask:
    """Step with all files that it reads.

    Attributes:
        inputs: path in the step's folder → file.
        made: name → key, for the direct and indirect predecessors that the step's result names.
    """

    step: JobStep
    inputs: Mapping[str, StepInput]
    made: Mapping[str, str] = field(default_factory=dict)

    def key_on(self, machine: FleetMachine) -> tuple[str, dict[str, Any]]:
        """Compute the step's key on a machine.

        Returns:
            the key, and the content whose hash is the key.
        """
        return step_key(self.step, {path: file.stored.sha256 for path, file in self.inputs.items()}, machine)


def resolve_inputs(step: JobStep, ends: Mapping[str, StepEnd], hashes: FileHashes, store: StepStore) -> StepTask:
    """Collect the files that a step reads, with their hashes.

    Args:
        ends: name of a preceding step → its end.

    Returns:
        the task.

    Raises:
        InputError: a file can't be read, or is outside the folder that the step can read.
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
                raise InputError(f"{name!r} of {path.name!r} is outside its folder; copy it there")
            inputs[name] = StepInput(stored, file, copied=name.endswith((".onnx", ".data", ".py")))
    for folder, before in step.after.items():
        inputs |= {f"{folder}/{name}": StepInput(s) for name, s in inputs_from_step(step, ends[before]).items()}
    return StepTask(step, inputs)


def lookup_record(store: StepStore, key: str, *, void: bool) -> tuple[StepRecord | None, str]:
    """Look up the record of a key.

    Args:
        void: True removes a damaged record.

    Returns:
        the record and "". If there is no valid record, None and a note. The note is "" unless the record is damaged or
        lacks files.

    Raises:
        StoreError: the store can't be reached.
    """
    try:
        record = store.read_record(key)
    except StoreError as error:
        if not store.has_record(key):
            raise
        record = None
        note = f"{error}; rerunning the step"
    else:
        if record is None or store.has_all_outputs(record):
            return record, ""
        note = f"the store lacks files of {record.step}; rerunning it"
    if void:
        store.void_record(key)
    return None, note


def inputs_from_step(step: JobStep, before: StepEnd) -> dict[str, StoredFile]:
    """Select the outputs of a preceding step that a step reads.

    Returns:
        path → file, without the report unless the step reads reports.
    """
    return {name: file for name, file in before.outputs.items() if step.reports or name != "report.json"}
