"""The bundles of a fleet's last run, run again with what is installed now: what an update made worse.

A run after an update makes new bundles, and a new bundle is as it should be by its own evidence. So the old ones are
asked: `recheck` holds each against the samples and expected answers of the day it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass

from ..arguments import called_with
from ..errors import InputError
from ..types import PathLike, Progress
from . import runs
from .description import only as chosen
from .drive import Pool
from .ends import StepEnd
from .fleet import open_store, pool_of, read
from .keys import Machine
from .options import RecheckOptions
from .sealed import keys_meant, require_signer
from .steps import Step, steps_of
from .store import Record, Store
from .tasks import Input, Task, found
from .work import StepFailed, StepNotRun
from .workers import Vanished


@dataclass(frozen=True)
class RecheckCall(RecheckOptions):
    """What ``recheck`` is called with: ``progress`` with (step, done, total)."""

    file: PathLike
    _: KW_ONLY
    progress: Progress | None = None


@called_with(RecheckCall)
def recheck(call: RecheckCall) -> tuple[StepEnd, ...]:
    """How each bundle fares now: "ok" where nothing got worse, "wrong" with what did, "failed", "not run".

    Args:
        file, store, on, jobs, only, sign, trust, progress: as `normdeploy.fleet.fleet.run` takes them.

    Raises:
        InputError: the file is wrong, or its last run made no bundle.
        StoreError, RuntimeUnavailable: as ``run``.
    """
    sign, trust = keys_meant(call.sign, call.trust)
    require_signer(sign, trust)
    pool_on = pool_of(call.on, call.jobs)
    fleet = read(call.file)
    opened = open_store(fleet, call.store, make=False, sign=sign, trust=trust)
    last = runs.last_of(opened, fleet.path.name)
    keys = {t["step"]: t["key"] for t in runs.steps_of_run(opened, last["id"]) if t["outcome"] == "ok"} if last else {}
    steps = [s for job in chosen(fleet.jobs(), call.only) for s in steps_of(job) if s.verb == "recheck"]
    mine = [s for s in steps if s.after["package"] in keys]
    if not mine:
        raise InputError(
            f"the last run of {fleet.path.name} made no bundle; put 'package' into steps and run it, or name others"
        )
    pool = pool_on(opened)
    try:
        ends = {}
        for end in _ends(mine, keys, opened, pool):
            ends[end.step] = end
            if call.progress is not None:
                call.progress(end.step, len(ends), len(mine))
        return tuple(ends[s.name] for s in mine)
    finally:
        pool.close()


def _ends(steps: Sequence[Step], keys: dict[str, str], store: Store, pool: Pool) -> Iterator[StepEnd]:
    running: dict[Future[Record], Step] = {}
    for step in steps:
        package = store.record(keys[step.after["package"]])
        machines = [m for m in pool.machines if not m.lacks(step.needs)]
        if package is None or not machines:
            lacks = "; ".join(sorted({m.lacks(step.needs) for m in pool.machines}))
            yield StepEnd(
                step.name, step.verb, "not run", reason=lacks if package else "its bundle is not in the store"
            )
            continue
        task = Task(step, {f"package/{p}": Input(f) for p, f in package.outputs.items() if p != "report.json"})
        yield from _given(step, task, machines[0], store, pool, running)
        while len(running) >= 2 * pool.size:
            yield from _done(running)
    while running:
        yield from _done(running)


def _given(
    step: Step, task: Task, machine: Machine, store: Store, pool: Pool, running: dict[Future[Record], Step]
) -> Iterator[StepEnd]:
    """From the store, or given to the pool."""
    record, _ = found(store, task.key(machine)[0], void=True)
    if record is not None:
        yield StepEnd(step.name, step.verb, record.outcome, record.key, record.reason, True)
    else:
        running[pool.submit(task, machine)] = step


def _done(running: dict[Future[Record], Step]) -> Iterator[StepEnd]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        step = running.pop(future)
        try:
            record = future.result()
        except StepNotRun as error:
            yield StepEnd(step.name, step.verb, "not run", reason=str(error))
        except (StepFailed, Vanished) as error:
            yield StepEnd(step.name, step.verb, "failed", reason=str(error))
        else:
            yield StepEnd(step.name, step.verb, record.outcome, record.key, record.reason, False, record.seconds)
