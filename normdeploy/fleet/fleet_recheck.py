"""Recheck the bundles of a fleet's last run with the installed versions, to find regressions after an update.

A run after an update makes new bundles. Each new bundle is compared only with its own evidence, so such a run can't
show a regression. `recheck_fleet` instead runs the old bundles. It compares each bundle's outputs with the expected
answers that were stored when the bundle was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass

from ..errors import InputError
from ..types import PathLike, Progress
from ..verbs.arguments.argument_validation import take_fields_as_arguments
from . import run_history
from .fleet_commands import open_fleet_store, pool_factory, read_fleet_file
from .fleet_file import filter_jobs as chosen
from .fleet_options import RecheckOptions
from .fork_client import ProcessVanished
from .job_state import end_from_record
from .job_steps import JobStep, job_steps_of
from .outcomes import StepEnd
from .scheduler import StepPool
from .signed_store import require_signer, resolve_keys
from .step_execution import StepFailed, StepNotRun
from .step_inputs import StepInput, StepTask, lookup_record
from .step_store import StepRecord, StepStore


@dataclass(frozen=True)
class RecheckCall(RecheckOptions):
    """Arguments of ``recheck_fleet``; ``progress`` is called with (step, done, total)."""

    file: PathLike
    _: KW_ONLY
    progress: Progress | None = None


@take_fields_as_arguments(RecheckCall)
def recheck_fleet(call: RecheckCall) -> tuple[StepEnd, ...]:
    """Recheck the bundles of a fleet's last run.

    Args:
        file, store, on, jobs, only, sign, trust, progress: as for `normdeploy.fleet.fleet_commands.run_fleet`.

    Returns:
        the outcome of each bundle: "ok" if nothing is worse than before, "wrong" with the regression, "failed" or "not
        run".

    Raises:
        InputError: the file is wrong, or its last run made no bundle.
        StoreError, RuntimeUnavailable: as for ``run_fleet``.
    """
    sign, trust = resolve_keys(call.sign, call.trust)
    require_signer(sign, trust)
    pool_on = pool_factory(call.on, call.jobs)
    fleet = read_fleet_file(call.file)
    opened = open_fleet_store(fleet, call.store, make=False, sign=sign, trust=trust)
    last = run_history.find_last_run(opened, fleet.path.name)
    if last:
        keys = {t["step"]: t["key"] for t in run_history.iter_run_steps(opened, last["id"]) if t["outcome"] == "ok"}
    else:
        keys = {}
    steps = [s for job in chosen(fleet.iter_jobs(), call.only) for s in job_steps_of(job) if s.verb == "recheck"]
    mine = [s for s in steps if s.after["package"] in keys]
    if not mine:
        raise InputError(
            f"the last run of {fleet.path.name} made no matching bundle; add 'package' to steps and run it, or "
            "select other models"
        )
    pool = pool_on(opened)
    try:
        ends = {}
        for end in _recheck_ends(mine, keys, opened, pool):
            ends[end.step] = end
            if call.progress is not None:
                call.progress(end.step, len(ends), len(mine))
        return tuple(ends[s.name] for s in mine)
    finally:
        pool.close()


def _recheck_ends(
    steps: Sequence[JobStep], keys: dict[str, str], store: StepStore, pool: StepPool
) -> Iterator[StepEnd]:
    running: dict[Future[StepRecord], JobStep] = {}
    for step in steps:
        package = store.read_record(keys[step.after["package"]])
        machines = [m for m in pool.machines if not m.describe_missing(step.needs)]
        if package is None or not machines:
            lacks = "; ".join(sorted({m.describe_missing(step.needs) for m in pool.machines}))
            yield StepEnd(
                step.name, step.verb, "not run", reason=lacks if package else "its bundle is not in the store"
            )
            continue
        task = StepTask(step, {f"package/{p}": StepInput(f) for p, f in package.outputs.items() if p != "report.json"})
        record, _ = lookup_record(store, task.key_on(machines[0])[0], void=True)
        if record is not None:
            yield end_from_record(step, record, cached=True)
        else:
            running[pool.submit(task, machines[0])] = step
        while len(running) >= 2 * pool.size:
            yield from _completed_ends(running)
    while running:
        yield from _completed_ends(running)


def _completed_ends(running: dict[Future[StepRecord], JobStep]) -> Iterator[StepEnd]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        step = running.pop(future)
        try:
            record = future.result()
        except StepNotRun as error:
            yield StepEnd(step.name, step.verb, "not run", reason=str(error))
        except (StepFailed, ProcessVanished) as error:
            yield StepEnd(step.name, step.verb, "failed", reason=str(error))
        else:
            yield end_from_record(step, record, cached=False)
