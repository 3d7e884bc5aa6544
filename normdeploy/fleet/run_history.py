"""Keep the history of runs in the store.

    runs/<id>/manifest.jsonl   a line for each step, in the fleet's order: step, outcome, key, outputs
    runs/<id>/cells.jsonl      a line for each cell: name, status, numbers, times
    runs/<id>/run.json         the fleet file, machines, counts, and the hashes of the two other files; written last, so
                               a run without this file did not end

A manifest contains no times, machines or speeds. So if a fleet's steps are reproducible, the fleet gives the same
manifest on any machine.
"""

from __future__ import annotations

import hashlib
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
from ..storage.file_hash import hash_file
from .outcomes import CellOutcome, FleetRun, JobEnd
from .step_store import StepStore

RUN = "normdeploy/fleet-run/1"
# Maximum number of runs that a page plots.
_TREND = 30


class RunWriter:
    """Write a run into the store when the run has ended. Until then, the lines are kept in temporary files."""

    def __init__(self, store: StepStore) -> None:
        now = datetime.now(UTC)
        self.id = f"{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(4)}"
        self.started = now.isoformat(timespec="seconds")
        self._store = store
        self._manifest: IO[str] = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)  # noqa: SIM115
        self._cells: IO[str] = tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False)  # noqa: SIM115

    def add(self, end: JobEnd) -> tuple[CellOutcome, ...]:
        """Add the steps and cells of a job.

        Returns:
            the outcomes of the job's cells.
        """
        for step in end.steps:
            outputs = {path: [file.sha256, file.bytes] for path, file in sorted(step.outputs.items())}
            told: dict[str, Any] = {"step": step.step, "outcome": step.outcome, "key": step.key, "reason": step.reason}
            # The outputs of ``bench`` contain times, which differ from run to run, so the manifest leaves them out.
            if step.verb != "bench":
                told["outputs"] = outputs
            self._manifest.write(json.dumps(told, sort_keys=True) + "\n")
        cells = end.cell_outcomes()
        for cell in cells:
            self._cells.write(json.dumps(asdict(cell), sort_keys=True) + "\n")
        return cells

    def commit_run(self, run: FleetRun) -> None:
        """Store the run."""
        hashes = dict[str, str]()
        for name, file in (("manifest.jsonl", self._manifest), ("cells.jsonl", self._cells)):
            file.close()
            hashes[name] = hash_file(file.name)
            self._store.place.store_file(f"runs/{self.id}/{name}", Path(file.name))
        sizes = sum(cell.bytes for cell in run.cells)
        told = {
            "schema": RUN,
            "id": run.id,
            "file": run.file,
            "started": run.started,
            "seconds": run.seconds,
            "only": list(run.only),
            "ran": run.ran,
            "cached": run.cached,
            "counts": run.count_by_status(),
            "bytes": sizes,
            "machines": list(run.machines),
            "notes": list(run.notes),
            "files": hashes,
        }
        self._store.place.create(f"runs/{self.id}/run.json", self._store.seal(json.dumps(told, indent=1).encode()))

    def close(self) -> None:
        """Remove the temporary files."""
        for file in (self._manifest, self._cells):
            file.close()
            Path(file.name).unlink(missing_ok=True)


def list_runs(store: StepStore) -> list[dict[str, Any]]:
    """List the runs that ended. In a store that requires signatures, list only signed runs.

    Returns:
        the content of each run.json, oldest first, with the additional key "written": the time in seconds since 1970.
    """
    found = []
    for entry in store.place.list_entries("runs/"):
        if entry.name.endswith("/run.json"):
            with suppress(ValueError, KeyError, TypeError, StoreError):
                told = _find_run(store, entry.name.split("/")[1])
                found.append(told | {"written": entry.written})
    return sorted(found, key=lambda told: str(told["id"]))


def find_last_run(store: StepStore, file: str) -> dict[str, Any] | None:
    """Find the last run of a fleet file, preferably a run of all its models.

    Returns:
        the content of its run.json; None if the file was never run.
    """
    mine = [r for r in list_runs(store) if r["file"] == file]
    found = [r for r in mine if not r.get("only")] or mine
    if found:
        return found[-1]
    return None


def status_trend(store: StepStore, file: str) -> tuple[Mapping[str, float], ...]:
    """Summarize the last runs of all models of a file.

    Returns:
        for each run, oldest first, status → number of cells, and "bytes" → total size.
    """
    mine = [r for r in list_runs(store) if r["file"] == file and not r.get("only")][-_TREND:]
    return tuple({**r["counts"], "bytes": r["bytes"]} for r in mine)


def trend_point(cells: Sequence[CellOutcome]) -> Mapping[str, float]:
    """Summarize a run that is not in the store yet, as ``status_trend`` summarizes stored runs.

    Returns:
        status → number of cells, and "bytes" → total size.
    """
    return {**Counter(cell.status for cell in cells), "bytes": sum(cell.bytes for cell in cells)}


def cells_by_name(store: StepStore, run: str) -> dict[str, CellOutcome]:
    """Read the cells of a run.

    Returns:
        name → cell.

    Raises:
        StoreError: the run's files are missing, damaged or not trusted.
    """
    cells = {}
    for told in _read_manifest_lines(store, run, "cells.jsonl"):
        cell = CellOutcome(**{name: told[name] for name in CellOutcome.__dataclass_fields__ if name in told})
        cells[cell.name] = cell
    return cells


def iter_run_steps(store: StepStore, run: str) -> Iterator[dict[str, Any]]:
    """Read the lines of a run's manifest.

    Returns:
        an iterator over the lines.

    Raises:
        StoreError: the run's files are missing, damaged or not trusted.
    """
    return _read_manifest_lines(store, run, "manifest.jsonl")


def _find_run(store: StepStore, run: str) -> dict[str, Any]:
    """Read and check the run.json of a run.

    Raises:
        StoreError: the file is not trusted.
        ValueError, KeyError, TypeError: the file does not describe that run.
    """
    told: dict[str, Any] = json.loads(store.opened(store.place.read(f"runs/{run}/run.json") or b""))
    if told["schema"] != RUN or told["id"] != run or not isinstance(told["files"], dict):
        raise ValueError(f"its schema is {told['schema']!r} and its id {told['id']!r}")
    return told


def _read_manifest_lines(store: StepStore, run: str, file: str) -> Iterator[dict[str, Any]]:
    name = f"runs/{run}/{file}"
    data = store.place.read(name)
    stated = _find_run(store, run)["files"][file]
    if data is None:
        raise StoreError(f"the store {store.place.url!r} has no {name}")
    if (found := hashlib.sha256(data).hexdigest()) != stated:
        raise StoreError(
            f"{name} in the store {store.place.url!r} is damaged: its hash is {found}, but run.json lists "
            f"{stated}; remove runs/{run}"
        )
    for line in data.splitlines():
        try:
            told = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{name} in the store {store.place.url!r} is damaged: {error}") from error
        yield told
