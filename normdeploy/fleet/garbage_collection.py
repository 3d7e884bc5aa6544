"""Collect garbage in a store: objects that no recent run has used."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import StoreError
from ..types import PathLike
from .fleet_commands import open_fleet_store
from .run_history import iter_run_steps, list_runs
from .step_store import StepStore
from .store_backends import ObjectEntry

# Minimum age in seconds of an object that is removed. Younger objects may belong to a run that has not ended.
_GRACE = 86_400.0


@dataclass(frozen=True)
class CollectedGarbage:
    """Counts of removed, or removable, objects.

    Attributes:
        runs: number of runs.
        steps: number of step records.
        objects: number of files that steps read or wrote.
        bytes: size of all these runs, records and files in bytes.
        kept: number of objects that stay.
    """

    runs: int
    steps: int
    objects: int
    bytes: int
    kept: int


def collect_garbage(store: PathLike, *, days: float = 30.0, remove: bool = False) -> CollectedGarbage:
    """Find old entries of a store that nothing refers to, and remove them if requested.

    A run that ended within the last ``days`` keeps the records of its steps, and these records keep the objects that
    they name. A record younger than ``days`` keeps its objects even if it belongs to no run, because a single verb may
    have written it. Nothing younger than a day is removed. Records are removed before the objects that they name, so a
    record never names a removed object. If a driver has already read a record and then finds the record's objects
    removed, it runs the step again.

    Args:
        days: age in days from which runs and records are old.
        remove: True removes the entries, False only counts them.

    Returns:
        the counts.

    Raises:
        StoreError: the store can't be reached, or a record that must be kept can't be read.
    """
    opened = open_fleet_store(None, store, make=False)
    now = time.time()
    limit = now - max(days * 86_400.0, _GRACE)
    old = {run["id"] for run in list_runs(opened) if run["written"] < limit}
    keys = _find_kept_keys(opened, old)
    steps = list(opened.place.list_entries("steps/"))
    gone = [e for e in steps if e.written < limit and _last_run_time(e) not in keys]
    kept = {digest for e in steps if e not in set(gone) for digest in _list_object_digests(opened, _last_run_time(e))}
    objects = list(opened.place.list_entries("objects/"))
    unused = [e for e in objects if e.written < now - _GRACE and _last_run_time(e) not in kept]
    runs = [e for e in opened.place.list_entries("runs/") if e.name.split("/")[1] in old]
    if remove:
        for entry in (*runs, *gone, *unused):
            opened.place.delete(entry.name)
    return CollectedGarbage(
        len(old), len(gone), len(unused), sum(e.bytes for e in (*runs, *gone, *unused)), len(objects) - len(unused)
    )


def _find_kept_keys(store: StepStore, old: set[str]) -> set[str]:
    keys = set[str]()
    for run in list_runs(store):
        if run["id"] not in old:
            keys |= {told["key"] for told in iter_run_steps(store, run["id"])}
    return keys


def _list_object_digests(store: StepStore, key: str) -> set[str]:
    """List the objects that a record names; an unreadable record names no objects, because its step is run again
    anyway.
    """
    try:
        record = store.read_record(key)
    except StoreError:
        return set()
    if record is None:
        return set()
    return {f.sha256 for f in (*record.outputs.values(), record.log)}


def _last_run_time(entry: ObjectEntry) -> str:
    return entry.name.rpartition("/")[2]
