"""What may go from a store: what no recent run has used."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import StoreError
from ..types import PathLike
from .fleet import open_store
from .places import Entry
from .runs import runs_of, steps_of_run
from .store import Store

_GRACE = 86_400.0  # seconds: what is younger may belong to a run that has not ended


@dataclass(frozen=True)
class Collected:
    """What went, or would go: runs, records of steps, objects, bytes; and the objects that stay."""

    runs: int
    steps: int
    objects: int
    bytes: int
    kept: int


def collect(store: PathLike, *, days: float = 30.0, remove: bool = False) -> Collected:
    """Find what is old and out of reach; remove it where asked to.

    A run that ended within ``days`` keeps the records of its steps, and these the objects that they name. So does a
    record that is itself younger, such as that of a single verb with a store. Nothing goes that is younger than a day.
    Records go before the objects that they name, so that a record never names what was removed; a driver that reads one
    meanwhile runs that step again.

    Raises:
        StoreError: the store can't be reached, or a record that is to stay can't be read.
    """
    opened = open_store(None, store, make=False)
    now = time.time()
    limit = now - max(days * 86_400.0, _GRACE)
    old = {run["id"] for run in runs_of(opened) if run["written"] < limit}
    keys = _kept_keys(opened, old)
    steps = list(opened.place.entries("steps/"))
    gone = [e for e in steps if e.written < limit and _last(e) not in keys]
    kept = {digest for e in steps if e not in set(gone) for digest in _named(opened, _last(e))}
    objects = list(opened.place.entries("objects/"))
    unused = [e for e in objects if e.written < now - _GRACE and _last(e) not in kept]
    runs = [e for e in opened.place.entries("runs/") if e.name.split("/")[1] in old]
    if remove:
        for entry in (*runs, *gone, *unused):
            opened.place.delete(entry.name)
    return Collected(
        len(old), len(gone), len(unused), sum(e.bytes for e in (*runs, *gone, *unused)), len(objects) - len(unused)
    )


def _kept_keys(store: Store, old: set[str]) -> set[str]:
    keys = set[str]()
    for run in runs_of(store):
        if run["id"] not in old:
            keys |= {told["key"] for told in steps_of_run(store, run["id"])}
    return keys


def _named(store: Store, key: str) -> set[str]:
    """The objects that a record names. One that can't be read names none: it is run again anyway."""
    try:
        record = store.record(key)
    except StoreError:
        return set()
    return set() if record is None else {f.sha256 for f in (*record.outputs.values(), record.log)}


def _last(entry: Entry) -> str:
    return entry.name.rpartition("/")[2]
