"""What is kept of each run in the store.

    runs/<id>/manifest.jsonl   a line for each step, in the fleet's order: step, outcome, key, outputs
    runs/<id>/cells.jsonl      a line for each cell: what it is, numbers, times
    runs/<id>/run.json         the file that was run, machines, counts; written last: without it a run did not end

A manifest holds nothing of when, where and how fast: the same fleet gives the same bytes wherever its steps are run, as
far as they are reproducible.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from ..errors import StoreError
from .ends import Cell, FleetRun, JobEnd
from .store import Store

RUN = "normdeploy/fleet-run/1"
_TREND = 30  # runs that a page draws


class Writer:
    """Writes a run into the store when it has ended; holds no more than a file of it until then."""

    def __init__(self, store: Store) -> None:
        now = datetime.now(UTC)
        self.id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self.started = now.isoformat(timespec="seconds")
        self._store = store
        self._manifest: IO[str] = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)  # noqa: SIM115
        self._cells: IO[str] = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)  # noqa: SIM115

    def add(self, end: JobEnd) -> tuple[Cell, ...]:
        for step in end.steps:
            outputs = {path: [file.sha256, file.bytes] for path, file in sorted(step.outputs.items())}
            told: dict[str, Any] = {"step": step.step, "outcome": step.outcome, "key": step.key, "reason": step.reason}
            if step.verb != "bench":  # times are never equal
                told["outputs"] = outputs
            self._manifest.write(json.dumps(told, sort_keys=True) + "\n")
        cells = end.cells()
        for cell in cells:
            self._cells.write(json.dumps(asdict(cell), sort_keys=True) + "\n")
        return cells

    def end(self, run: FleetRun) -> None:
        """Keep it."""
        for name, file in (("manifest.jsonl", self._manifest), ("cells.jsonl", self._cells)):
            file.close()
            self._store.place.keep(f"runs/{self.id}/{name}", Path(file.name))
        sizes = sum(cell.bytes for cell in run.cells)
        told = {
            "schema": RUN,
            "id": run.id,
            "file": run.file,
            "started": run.started,
            "seconds": run.seconds,
            "ran": run.ran,
            "cached": run.cached,
            "counts": run.counts(),
            "bytes": sizes,
            "machines": list(run.machines),
            "notes": list(run.notes),
        }
        self._store.place.create(f"runs/{self.id}/run.json", json.dumps(told, indent=1).encode())

    def close(self) -> None:
        for file in (self._manifest, self._cells):
            file.close()
            Path(file.name).unlink(missing_ok=True)


def runs_of(store: Store) -> list[dict[str, Any]]:
    """The runs that ended, the oldest first."""
    found = []
    for entry in store.place.entries("runs/"):
        if entry.name.endswith("/run.json") and (data := store.place.read(entry.name)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                told = json.loads(data)
                if told["schema"] == RUN:
                    found.append(told | {"written": entry.written})
    return sorted(found, key=lambda told: str(told["id"]))


def last_of(store: Store, file: str, before: str = "") -> dict[str, Any] | None:
    """The last run of a fleet's file, or the last before a run."""
    mine = [r for r in runs_of(store) if r["file"] == file and (not before or r["id"] < before)]
    return mine[-1] if mine else None


def trend_of(store: Store, file: str) -> tuple[Mapping[str, float], ...]:
    """Of the last runs of a file: counts of cells by status, and bytes."""
    mine = [r for r in runs_of(store) if r["file"] == file][-_TREND:]
    return tuple({**r["counts"], "bytes": r["bytes"]} for r in mine)


def point_of(cells: Sequence[Cell]) -> Mapping[str, float]:
    """Of a run that is not in the store yet, what ``trend_of`` tells of those that are."""
    return {**Counter(cell.status for cell in cells), "bytes": sum(cell.bytes for cell in cells)}


def cells_of(store: Store, run: str) -> dict[str, Cell]:
    """The cells of a run, by name."""
    cells = {}
    for told in _lines(store, f"runs/{run}/cells.jsonl"):
        cell = Cell(**{name: told[name] for name in Cell.__dataclass_fields__})
        cells[cell.name] = cell
    return cells


def steps_of_run(store: Store, run: str) -> Iterator[dict[str, Any]]:
    """The lines of a run's manifest."""
    return _lines(store, f"runs/{run}/manifest.jsonl")


def _lines(store: Store, name: str) -> Iterator[dict[str, Any]]:
    data = store.place.read(name)
    if data is None:
        raise StoreError(f"the store {store.place.url!r} has no {name}")
    for line in data.splitlines():
        try:
            told = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{name} in the store {store.place.url!r} is damaged: {error}") from error
        yield told
