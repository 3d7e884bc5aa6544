"""Define the verbs of a fleet: run it, show its status, and preview an update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, StoreError
from ..types import PathLike, Progress
from ..verbs.arguments.argument_validation import take_fields_as_arguments
from . import run_history
from .file_hashes import FileHashes
from .fleet_file import Fleet, FleetJob
from .fleet_file import filter_jobs as chosen
from .fleet_file import read_fleet as description
from .fleet_options import FleetRunOptions
from .job_steps import JobStep
from .local_pool import LocalPool
from .option_checks import check_options
from .outcomes import CellOutcome, FleetRun, StepEnd
from .ray_pool import RayPool
from .remote_backend import open_backend
from .scheduler import Scheduler, StepPool, count_steps
from .signed_store import open_signed_store, require_signer, resolve_keys
from .step_execution import remove_leftovers
from .step_keys import FleetMachine, describe_key_changes
from .step_store import StepStore

# Environment variable that names a store.
STORE = "NORMDEPLOY_STORE"


@dataclass(frozen=True)
class FleetRunCall(FleetRunOptions):
    """Arguments of ``run_fleet``; ``progress`` is called with (step, done, total)."""

    file: PathLike
    _: KW_ONLY
    progress: Progress | None = None


@take_fields_as_arguments(FleetRunCall)
def run_fleet(call: FleetRunCall) -> FleetRun:
    """Run the steps of a fleet that are not in the store, and record the run there.

    Args:
        file: fleet.toml (docs/reference/fleet.md).
        store, on, jobs, only, wait, sign, trust: see `normdeploy.fleet.fleet_options`.
        progress: called with (step, done, total).

    Returns:
        the outcome of each cell, with its changes since the previous run.

    Raises:
        InputError: the file is wrong, a source or a key can't be used, or ``jobs`` or ``wait`` does not apply to
            ``on``.
        StoreError: the store can't be reached or written.
        RuntimeUnavailable: a library that the store needs is missing.
    """
    sign, trust = resolve_keys(call.sign, call.trust)
    require_signer(sign, trust)
    pool_on = pool_factory(call.on, call.jobs, call.wait)
    fleet = read_fleet_file(call.file)
    opened = open_fleet_store(fleet, call.store, sign=sign, trust=trust)
    pool = pool_on(opened)
    try:
        return schedule_fleet(fleet, opened, pool, call.only, call.wait, call.progress)
    finally:
        pool.close()


def fleet_status(
    file: PathLike, *, store: PathLike | None = None, only: Sequence[str] = (), trust: Sequence[PathLike] = ()
) -> FleetRun:
    """Find the state of a fleet in the store, as a run on this machine would find it. Nothing is run or written.

    Args:
        trust: PEM files of public keys. A record is trusted only if one of these keys has signed it.

    Returns:
        the outcome of each cell; "stale" if a step would run.

    Raises:
        InputError, StoreError, RuntimeUnavailable: as for ``run_fleet``.
    """
    return preview_update(file, store=store, only=only, trust=trust)


def preview_update(
    file: PathLike,
    *,
    against: Mapping[str, str] | None = None,
    store: PathLike | None = None,
    only: Sequence[str] = (),
    trust: Sequence[PathLike] = (),
) -> FleetRun:
    """Find the cells that would be stale after an update. Nothing is run or written.

    Args:
        against: library → its new version, such as {"onnxruntime": "1.32.0"}; the key "driver" means the GPU driver.
        trust: as for ``fleet_status``.

    Returns:
        the outcome of each cell; "stale" if a step would run.

    Raises:
        InputError: as for ``run_fleet``, or no step depends on a name in ``against``.
        StoreError, RuntimeUnavailable: as for ``run_fleet``.
    """
    fleet = read_fleet_file(file)
    opened = open_fleet_store(fleet, store, make=False, trust=resolve_keys(None, trust)[1])
    last = run_history.find_last_run(opened, fleet.path.name)
    machines = machines_of_run(last)
    updated = [machine.with_updates(against or {}) for machine in machines]
    if unknown := [name for name in against or {} if all(m == m.with_updates({name: ""}) for m in updated)]:
        known = ", ".join(sorted(machines[0].facts))
        raise InputError(f"no step depends on {unknown[0]!r}; known names are {known}")
    return schedule_fleet(fleet, opened, DryRun(updated, stale_step_explainer(opened, last)), only)


def read_fleet_file(file: PathLike) -> Fleet:
    """Read fleet.toml and check it as a whole.

    Returns:
        the checked fleet.

    Raises:
        InputError: the file is wrong. The message names the line.
        RuntimeUnavailable: the library that checks the file is not installed.
    """
    fleet = description(file)
    check_options(fleet)
    return fleet


def machines_of_run(last: Mapping[str, Any] | None) -> list[FleetMachine]:
    """List this machine and the machines of a run.

    Args:
        last: content of the run's run.json; None if there was no run.

    Returns:
        the machines, this machine first. All have the code hash of this machine.
    """
    here = FleetMachine.this_machine()
    return [here, *(FleetMachine(facts, here.code, here.installed) for facts in (last["machines"] if last else ()))]


def open_fleet_store(
    fleet: Fleet | None,
    store: PathLike | None,
    *,
    make: bool = True,
    sign: PathLike | None = None,
    trust: Sequence[PathLike] = (),
) -> StepStore:
    """Open the store of a fleet.

    The path or URL of the store comes from the first of these that is set: ``store``, the fleet file, NORMDEPLOY_STORE.
    The default is the folder "store" next to the file.

    Args:
        make: True creates a missing folder.

    Returns:
        the store.

    Raises:
        StoreError: the store can't be used.
        InputError: the store does not exist and ``make`` is False, or a key can't be used.
        RuntimeUnavailable: a library that the store needs is missing.
    """
    if store is not None:
        told = os.fspath(store)
    else:
        told = ""
    if not told and fleet is not None and fleet.store:
        if "://" in fleet.store:
            told = fleet.store
        else:
            told = str(fleet.path.parent / fleet.store)
    told = told or os.environ.get(STORE, "") or (str(fleet.path.parent / "store") if fleet is not None else "")
    if not make and "://" not in told and not Path(told).is_dir():
        raise InputError(f"store not found: {told!r}; normdeploy fleet run creates it")
    return open_signed_store(open_backend(told), sign, trust)


def pool_factory(on: str, jobs: int | None, wait: float = 0.0) -> Callable[[StepStore], StepPool]:
    """Choose the pool on which steps run.

    Returns:
        a function that makes the pool for a store.

    Raises:
        InputError: an option does not apply to this kind of pool.
    """
    if on == "local":
        if wait > 0:
            raise InputError(
                f"--wait {wait:g} applies only to Ray clusters, but --on is 'local'; omit --wait, or pass "
                "--on ray://HEAD:10001"
            )
        return lambda store: LocalPool(store, jobs)
    if jobs is not None:
        raise InputError(
            f"--jobs applies only to local runs, but --on is {on!r}; omit --jobs, because Ray nodes "
            "report their own resources"
        )
    return lambda store: RayPool(store, on, wait=wait)


@dataclass(frozen=True)
class DryRun:
    """Arguments of a dry run, which runs nothing on a pool and only finds which steps would run.

    Attributes:
        machines: machines on which the steps would run.
        explain: function (step, key, content of the key) that returns the outcome of a step that is not in the store.
    """

    machines: Sequence[FleetMachine]
    explain: Callable[[JobStep, str, dict[str, Any]], StepEnd]


def schedule_fleet(
    fleet: Fleet,
    store: StepStore,
    where: StepPool | DryRun,
    patterns: Sequence[str] = (),
    wait: float = 0.0,
    progress: Progress | None = None,
) -> FleetRun:
    """Run a fleet on a pool and record the run. In a dry run, only find which steps would run, and write nothing.

    Args:
        where: the pool, or the arguments of a dry run.
        patterns: patterns of models or of model/variant; () for all.
        wait: seconds that a step waits for a machine.

    Returns:
        the outcome of each cell.
    """
    pool = None if isinstance(where, DryRun) else where
    planned_for = where.machines if isinstance(where, DryRun) else ()
    start = time.monotonic()
    if pool is not None:
        remove_leftovers(store)
    hashes = FileHashes.load_cache(store)
    if progress is not None:
        total = count_steps(_select_jobs(fleet, patterns))
    else:
        total = 0
    driver = Scheduler(store, pool, planned_for, wait, hashes, progress=progress, total=total)
    if isinstance(where, DryRun):
        driver.explain = where.explain
    writer = run_history.RunWriter(store)
    cells = list[CellOutcome]()
    ran = 0
    cached = 0
    every = 0
    try:
        with closing(driver.run(_select_jobs(fleet, patterns))) as ends:
            # When the generator is closed, it releases the driver's claims, even after an error.
            for end in ends:
                cells += writer.add(end)
                ran += sum(not s.cached and s.outcome in ("ok", "wrong", "failed") for s in end.steps)
                cached += sum(s.cached for s in end.steps)
                every += len(end.steps)
        if patterns and not cells:
            raise InputError(f"no model of {fleet.path.name} matches {', '.join(map(repr, patterns))}")
        before = run_history.find_last_run(store, fleet.path.name)
        done = FleetRun(
            writer.id,
            fleet.path.name,
            store.place.url,
            tuple(cells),
            ran,
            cached,
            time.monotonic() - start,
            writer.started,
            tuple(dict(m.facts) for m in where.machines),
            run_history.cells_by_name(store, before["id"]) if before else {},
            (
                *run_history.status_trend(store, fleet.path.name),
                *([] if pool is None else [run_history.trend_point(cells)]),
            ),
            tuple(dict.fromkeys((*fleet.notes, *driver.notes))),
            dry=pool is None,
            only=tuple(patterns),
            unrun=every - ran - cached,
        )
        if pool is not None:
            hashes.save()
            writer.commit_run(done)
    finally:
        writer.close()
    return done


def _select_jobs(fleet: Fleet, patterns: Sequence[str]) -> Iterator[FleetJob]:
    return chosen(fleet.iter_jobs(), patterns)


def stale_step_explainer(
    store: StepStore, last: Mapping[str, Any] | None
) -> Callable[[JobStep, str, dict[str, Any]], StepEnd]:
    """Build a function that explains steps of a dry run that are not in the store.

    Returns:
        a function for `DryRun`. Its outcome is "failed" if the step failed in the last run and nothing has changed
        since then, else "stale" with the changes.
    """
    if last:
        told = {line["step"]: line for line in run_history.iter_run_steps(store, last["id"])}
    else:
        told = {}

    def explain_stale_step(step: JobStep, key: str, depends: dict[str, Any]) -> StepEnd:
        line = told.get(step.name, {})
        if line.get("key") == key and line["outcome"] == "failed":
            return StepEnd(step.name, step.verb, "failed", key, line["reason"])
        try:
            if line.get("key"):
                record = store.read_record(line["key"])
            else:
                record = None
        except StoreError as error:
            return StepEnd(step.name, step.verb, "stale", key, str(error))
        if record:
            why = "; ".join(describe_key_changes(record.depends, depends))
        else:
            why = "it has no record in the store"
        return StepEnd(step.name, step.verb, "stale", key, why)

    return explain_stale_step
