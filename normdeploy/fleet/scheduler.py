"""Schedule the steps of a fleet: results in the store are reused, and all other steps run on a pool.

Only a few jobs are in memory at a time, independent of the fleet's size. The ends of jobs are yielded in the fleet's
order. If a step ends without a result, the steps of the job that need this result also end. All other steps go on.

A step goes through these stages:

1. Decide. If an earlier step blocks the step, it ends. If no machine can run it, it ends as "not run". Otherwise its
   record is looked up in the store.
2. Look up. If the store has a record, the step ends with it. Otherwise the step is ready.
3. Claim. When the pool has room, the step is claimed, so that no other driver runs it. If another driver or job has the
   claim, the step is decided again later. If a record was written since the lookup, the step ends with it. Otherwise
   the pool runs the step.
4. Return. The step ends with its result. But if the step's machine vanished or one of its inputs is damaged, the step
   is decided again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import InputError
from ..types import Progress
from .file_hashes import FileHashes
from .fleet_file import FleetJob
from .fork_client import ProcessVanished
from .job_state import JobState, end_from_record
from .job_steps import JobStep, job_steps_of
from .outcomes import JobEnd, StepEnd
from .step_execution import StepFailed, StepNotRun
from .step_inputs import StepInput, StepTask, resolve_inputs
from .step_keys import FleetMachine
from .step_store import DamagedObject, StepRecord, StepStore
from .store_queries import AT_A_TIME, StoreQueries

# Maximum number of tries of a step whose machine vanishes or whose inputs are damaged.
_TRIES = 3
# Seconds between two checks of steps that other drivers run.
_POLL = 0.5


class StepPool(Protocol):
    """Pool that runs steps.

    Attributes:
        machines: descriptions of the machines that are available now.
        shares_files: True if the machines can read this machine's files. Otherwise sources are first copied to the
            store.
    """

    shares_files: bool

    @property
    def size(self) -> int:
        """Return the number of steps that the pool can run at a time."""

    @property
    def machines(self) -> Sequence[FleetMachine]: ...

    def submit(self, task: StepTask, machine: FleetMachine) -> Future[StepRecord]:
        """Run a step on a machine with this description (`normdeploy.fleet.step_execution.execute_step`).

        Returns:
            a future of its record.
        """

    def set_waiting_steps(self, steps: Sequence[JobStep]) -> None:
        """Set the steps that wait for a machine that does not exist yet."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _SubmittedStep:
    """Step that the pool is running. This driver has claimed the step's key."""

    run: JobState
    task: StepTask
    key: str


@dataclass
class Scheduler:
    """Run jobs on a pool, or plan them without a pool.

    Args:
        pool: pool that runs steps. None runs nothing, and a step that would run is "stale".
        machines: machines for which to plan; used only without a pool.
        wait: seconds that a step waits for a machine that can run it.
        explain: function (step, key, content of the key) that returns the end of a step that would run; used only
            without a pool.
        progress: called with (step, done, total).
        total: number of steps; 0 if unknown.
    """

    store: StepStore
    pool: StepPool | None
    machines: Sequence[FleetMachine] = ()
    wait: float = 0.0
    hashes: FileHashes = field(default_factory=FileHashes)
    explain: Callable[[JobStep, str, dict[str, Any]], StepEnd] = lambda step, key, depends: StepEnd(
        step.name, step.verb, "stale", key
    )
    progress: Progress | None = None
    total: int = 0
    # Names of ended steps; a step that runs again, because its outputs were damaged, counts once.
    _ended: set[str] = field(default_factory=set)
    # Number of steps whose claims are being requested.
    _claiming: int = 0
    _futures: dict[Future[StepRecord], _SubmittedStep] = field(default_factory=dict)
    _elsewhere: list[tuple[JobState, JobStep]] = field(default_factory=list)
    # Time in seconds of the last check of the steps that other drivers run.
    _polled: float = 0.0
    _uploaded: set[str] = field(default_factory=set)
    # SHA-256 of a file → lock that its upload holds.
    _uploads: dict[str, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._questions = StoreQueries(self.store, void=self.pool is not None)
        self.notes = self._questions.notes

    def run(self, jobs: Iterable[FleetJob]) -> Generator[JobEnd, None, None]:
        """Run all jobs. At the end, or when the generator is closed, all claims are released.

        Yields:
            the end of each job, in their order.

        Raises:
            StoreError: the store can't be reached or written.
            InputError: a source can't be read, or was changed during the run.
        """
        if self.pool is not None:
            window = 4 * self.pool.size + 16
        else:
            window = 1
        if not self.store.place.local:
            window = max(window, 2 * AT_A_TIME)
        coming = iter(jobs)
        active = list[JobState]()
        with closing(self._questions):
            while True:
                while len(active) < window and (job := next(coming, None)) is not None:
                    active.append(run := JobState(job, job_steps_of(job)))
                    self._decide_ready_steps(run)
                while active and active[0].is_finished:
                    first = active.pop(0)
                    yield JobEnd(first.job, tuple(first.ends[s.name] for s in first.steps))
                if active:
                    self._submit_ready_steps(active)
                    self._wait_for_progress(active)
                elif job is None:
                    return

    def _decide_ready_steps(self, run: JobState) -> None:
        """Decide all steps of a job that can be decided now."""
        ended = -1
        while ended != len(run.ends):
            ended = len(run.ends)
            for step in run.undecided_steps():
                self._decide_step(run, step)

    def _decide_step(self, run: JobState, step: JobStep) -> None:
        """End a step that can't run. Look up the record of a step that can run."""
        if (end := run.blocked_end(step)) is not None:
            self._record_end(run, end)
            return
        task = resolve_inputs(step, run.ends, self.hashes, self.store)
        if self.pool is not None:
            machines = self.pool.machines
        else:
            machines = self.machines
        fitting = [m for m in machines if not m.describe_missing(step.needs)]
        if self.pool is None:
            fitting = fitting[:1]
        if not fitting:
            since = run.waiting.setdefault(step.name, time.monotonic())
            if self.pool is None or time.monotonic() - since >= self.wait:
                lacks = "; ".join(sorted({m.describe_missing(step.needs) for m in machines}))
                self._record_end(
                    run, StepEnd(step.name, step.verb, "not run", reason=lacks or "no machine is available")
                )
            return
        run.waiting.pop(step.name, None)
        run.busy.add(step.name)
        keys = tuple(dict.fromkeys(task.key_on(machine)[0] for machine in fitting))
        self._questions.submit_query(
            run,
            lambda: self._questions.find_first_record(keys),
            lambda record: self._handle_lookup(run, task, fitting[0], record),
        )

    def _handle_lookup(self, run: JobState, task: StepTask, machine: FleetMachine, record: StepRecord | None) -> None:
        """End a step that has a record, or mark it as ready to run."""
        step = task.step
        run.busy.discard(step.name)
        if not run.can_begin(step) or not run.is_current(task):
            # The step's inputs are computed again, so its key will change.
            return
        if record is not None:
            self._record_end(run, end_from_record(step, record, cached=True))
        elif self.pool is None:
            self._record_end(run, self.explain(step, *task.key_on(machine)))
        else:
            if step.verb == "package":
                made = run.preceding_keys(step)
            else:
                made = {}
            run.ready[step.name] = replace(task, made=made), machine

    def _submit_ready_steps(self, active: Sequence[JobState]) -> None:
        """Claim as many steps as the pool has room for, in the order of the jobs. Other drivers may claim the other
        steps.
        """
        assert self.pool is not None or not any(run.ready for run in active)
        for run in active:
            for step in [s for s in run.steps if s.name in run.ready]:
                if self.pool is None or len(self._futures) + self._claiming >= 2 * self.pool.size:
                    return
                task, machine = run.ready.pop(step.name)
                run.busy.add(step.name)
                self._claiming += 1
                self._claim_step(run, task, machine, task.key_on(machine)[0])

    def _claim_step(self, run: JobState, task: StepTask, machine: FleetMachine, key: str) -> None:
        def claim_or_find_record() -> StepTask | StepRecord | None:
            """Claim a step unless another driver has claimed it.

            Returns:
                the task to run; the record if another driver wrote it since the lookup; None if another driver has the
                claim.
            """
            if not self._questions.claim(key):
                return None
            if (record := self._questions.find_first_record([key])) is not None:
                self._questions.release_now(key)
                return record
            assert self.pool is not None
            if self.pool.shares_files:
                return task
            return self._upload_inputs(task)

        self._questions.submit_query(
            run, claim_or_find_record, lambda told: self._handle_claim(run, task, machine, key, told)
        )

    def _handle_claim(
        self, run: JobState, task: StepTask, machine: FleetMachine, key: str, told: StepTask | StepRecord | None
    ) -> None:
        self._claiming -= 1
        if told is not None and not (run.can_begin(task.step) and run.is_current(task)):
            # The step's inputs are computed again, so its key will change.
            run.busy.discard(task.step.name)
            self._questions.release_later(key)
        elif told is None:
            # Another driver, or another job of this driver, is running the step.
            self._elsewhere.append((run, task.step))
        elif isinstance(told, StepRecord):
            run.busy.discard(task.step.name)
            self._record_end(run, end_from_record(task.step, told, cached=True))
            self._decide_ready_steps(run)
        else:
            assert self.pool is not None
            self._futures[self.pool.submit(told, machine)] = _SubmittedStep(run, task, key)

    def _upload_inputs(self, task: StepTask) -> StepTask:
        """Store all inputs of a task. This may run in a thread."""
        inputs = {}
        for name, file in task.inputs.items():
            if file.path is not None:
                # Tasks of several variants may store the same source at the same time.
                with self._uploads.setdefault(file.stored.sha256, threading.Lock()):
                    if file.stored.sha256 not in self._uploaded and self.store.put(file.path) != file.stored:
                        raise InputError(f"{file.path.name!r} changed while the fleet ran; run it again")
                    self._uploaded.add(file.stored.sha256)
            inputs[name] = StepInput(file.stored)
        return StepTask(task.step, inputs, task.made)

    def _wait_for_progress(self, active: Sequence[JobState]) -> None:
        """Wait until a pending step or query ends, and decide the steps that depend on it."""
        polls = bool(self._elsewhere) or any(run.waiting for run in active)
        if self.pool is not None:
            self.pool.set_waiting_steps(
                [step for run in active if run.waiting for step in run.steps if step.name in run.waiting]
            )
        under_way: set[Future[Any]] = {*self._futures, *self._questions.pending_queries}
        done, _ = wait(under_way, _POLL if polls else None, return_when=FIRST_COMPLETED)
        if not under_way and polls:
            time.sleep(_POLL)
        for run in self._questions.deliver_answers(done):
            self._decide_ready_steps(run)
        own = [f for f in self._futures if f in done]
        for future in own:
            told = self._futures.pop(future)
            told.run.busy.discard(told.task.step.name)
            try:
                self._handle_result(future, told)
            finally:
                self._questions.release_later(told.key)
            self._decide_ready_steps(told.run)
        if own or time.monotonic() - self._polled >= _POLL:
            self._polled = time.monotonic()
            elsewhere = self._elsewhere
            self._elsewhere = []
            for run, step in elsewhere:
                run.busy.discard(step.name)
                self._decide_ready_steps(run)
        for run in active:
            if run.waiting:
                self._decide_ready_steps(run)

    def _handle_result(self, future: Future[StepRecord], told: _SubmittedStep) -> None:
        """End a step that the pool ran, or mark it to be decided again."""
        run = told.run
        step = told.task.step
        try:
            record = future.result()
        except StepNotRun as error:
            self._record_end(run, StepEnd(step.name, step.verb, "not run", told.key, str(error), log=error.log))
        except StepFailed as error:
            self._record_end(run, StepEnd(step.name, step.verb, "failed", told.key, str(error), log=error.log))
        except ProcessVanished as error:
            self._retry_step(run, step, str(error))
        except DamagedObject as error:
            self.notes.append(str(error))
            made = [n for n, e in run.ends.items() if any(o.sha256 == error.digest for o in e.outputs.values())]
            self._uploaded.discard(error.digest)
            self._retry_step(run, step, str(error))
            if step.name not in run.ends:
                for name in made:
                    self.store.void_record(run.ends[name].key)
                    run.forget_step(name)
        else:
            # If a task is not current, its inputs were damaged. They are computed again, and then the step is decided
            # again.
            if run.is_current(told.task):
                self._record_end(run, end_from_record(step, record, cached=False))

    def _retry_step(self, run: JobState, step: JobStep, why: str) -> None:
        run.tries[step.name] = tries = run.tries.get(step.name, 1) + 1
        if tries > _TRIES:
            self._record_end(run, StepEnd(step.name, step.verb, "failed", reason=f"{why} ({_TRIES} times)"))

    def _record_end(self, run: JobState, end: StepEnd) -> None:
        run.ends[end.step] = end
        run.waiting.pop(end.step, None)
        self._ended.add(end.step)
        if self.progress is not None:
            self.progress(end.step, len(self._ended), self.total)


def count_steps(jobs: Iterable[FleetJob]) -> int:
    """Count the steps of all jobs.

    Returns:
        the number.
    """
    return sum(len(job_steps_of(job)) for job in jobs)
