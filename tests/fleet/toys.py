"""Toy fleets: what the tests of the fleet share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.outcomes import CellOutcome, FleetRun
from normdeploy.fleet.run_history import list_runs
from normdeploy.fleet.step_store import StepStore
from normdeploy.types import Progress

FLEET = """
[defaults]
steps = ["verify", "bench", "package"]
[variants.fp32]
[variants.fp16]
export = { precision = "fp16" }
[targets.cpu]
runtime = "onnxruntime"
[targets.ada]
runtime = "tensorrt-rtx"
compute_capability = "8.9"
[models.all]
source = "*.pt2"
"""
CPU = """
[defaults]
steps = ["verify", "package"]
[targets.cpu]
runtime = "onnxruntime"
[models.all]
source = "*.pt2"
"""
CPU_STEPS = 4  # of one model
STEPS = 2 * (2 + 3 + 3)  # of one model: export and verify; bench, package, recheck; build, package, recheck


def toy_fleet(folder: Path, text: str = FLEET, **models: str) -> Path:
    """A fleet.toml beside models of these texts."""
    for name, told in models.items():
        (folder / f"{name}.pt2").write_text(told)
    (folder / "fleet.toml").write_text(text)
    return folder / "fleet.toml"


def run_toys(
    file: Path,
    *,
    only: Sequence[str] = (),
    jobs: int = 2,
    store: StepStore | None = None,
    progress: Progress | None = None,
) -> FleetRun:
    """Run it with the stand-in for the command line."""
    told = read_fleet(file)
    opened = store or fleet_commands.open_fleet_store(told, None)
    pool = LocalPool(opened, jobs, ForkClient("tests.fleet.toy", ()))
    try:
        return fleet_commands.schedule_fleet(told, opened, pool, only, progress=progress)
    finally:
        pool.close()


def manifest(store: StepStore) -> list[dict[str, Any]]:
    """The last run's manifest."""
    data = store.place.read(f"runs/{list_runs(store)[-1]['id']}/manifest.jsonl")
    assert data is not None
    return [json.loads(line) for line in data.splitlines()]


def cells(run: FleetRun) -> dict[str, CellOutcome]:
    """By their names."""
    return {cell.name: cell for cell in run.cells}
