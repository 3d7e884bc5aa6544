"""What a step reads, and what the store has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, StoreError
from .ends import StepEnd
from .hashes import Hashes
from .keys import Machine, key_of, python_files
from .places import Folder
from .steps import Step
from .store import Record, Store, Stored


@dataclass(frozen=True)
class Input:
    """A file that a step reads: the SHA-256 and bytes of its content, and where it is outside the store, None where it
    is in it. A file outside is used as it is (a link), unless ``copied``."""

    stored: Stored
    path: Path | None = None
    copied: bool = False


@dataclass(frozen=True)
class Task:
    """A step with all that it reads: path in its folder -> file; and the steps that were run before it, at any
    distance, of which its result says that they were: name -> key."""

    step: Step
    inputs: Mapping[str, Input]
    made: Mapping[str, str] = field(default_factory=dict)

    def key(self, machine: Machine) -> tuple[str, dict[str, Any]]:
        return key_of(self.step, {path: file.stored.sha256 for path, file in self.inputs.items()}, machine)


def task_of(step: Step, ends: Mapping[str, StepEnd], hashes: Hashes, store: Store) -> Task:
    """The step with all that it reads.

    Args:
        ends: of the steps before it.

    Raises:
        InputError: a file can't be read, or lies where the step can't see it.
    """
    inputs: dict[str, Input] = {}
    files = dict(step.files)
    if step.code is not None:
        own = store.place.root if isinstance(store.place, Folder) else None
        files |= python_files(step.code, [own] if own else [])
    for place, path in files.items():
        for name, (file, stored) in hashes.of(place, path).items():
            if name.startswith(("..", "/")):
                raise InputError(f"{name!r} of {path.name!r} lies outside of its folder; copy it there")
            inputs[name] = Input(stored, file, copied=name.endswith((".onnx", ".data", ".py")))
    for folder, before in step.after.items():
        inputs |= {f"{folder}/{name}": Input(s) for name, s in read_of(step, ends[before]).items()}
    return Task(step, inputs)


def found(store: Store, key: str, *, void: bool) -> tuple[Record | None, str]:
    """What the store has for a key, and what is wrong with that, in which case there is nothing.

    Args:
        void: whether a damaged record is removed.

    Raises:
        StoreError: the store can't be reached.
    """
    try:
        record = store.record(key)
    except StoreError as error:
        if not store.has(key):
            raise
        record, note = None, f"{error}; the step is run again"
    else:
        if record is None or store.complete(record):
            return record, ""
        note = f"the store lacks files of {record.step}; it is run again"
    if void:
        store.void(key)
    return None, note


def read_of(step: Step, before: StepEnd) -> dict[str, Stored]:
    """What a step reads of what one before it made."""
    return {name: file for name, file in before.outputs.items() if step.reports or name != "report.json"}
