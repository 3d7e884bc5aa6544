"""Runs the steps of a fleet in their order: what is in the store is taken from it, the rest is given to a pool.

Only a few jobs are in memory at a time, whatever the fleet's size; their ends come out in the fleet's order. A step
that has no result ends those behind it, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import InputError
from ..types import Progress
from .description import Job
from .ends import JobEnd, StepEnd, StepOutcome
from .hashes import Hashes
from .keys import Machine
from .steps import Step, steps_of
from .store import Damaged, Record, Store
from .tasks import Input, Task, found, read_of, task_of
from .work import StepFailed
from .workers import Vanished

_TRIES = 3  # of a step whose machine vanishes, or whose inputs are damaged
_QUESTIONS = 16  # steps for which a store that is far away is asked at a time
_POLL = 0.5  # seconds between two looks at what others do


class Pool(Protocol):
    """Where steps run.

    ``machines`` are the kinds that are there now; ``shares_files`` says whether they read this machine's files (else
    sources go through the store).
    """

    shares_files: bool

    @property
    def size(self) -> int:
        """Steps that it can run at a time."""

    @property
    def machines(self) -> Sequence[Machine]: ...

    def submit(self, task: Task, machine: Machine) -> Future[Record]:
        """Run it (`normdeploy.fleet.work.perform`) on a machine of that kind."""

    def want(self, steps: Sequence[Step]) -> None:
        """These, and no others, wait for a machine that is not there."""

    def close(self) -> None: ...


@dataclass
class _Run:
    """A job on its way."""

    job: Job
    steps: Sequence[Step]
    ends: dict[str, StepEnd] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    tries: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)  # step without a machine -> since when
    ready: dict[str, tuple[Task, Machine]] = field(default_factory=dict)  # steps that would run at once

    def forget(self, name: str) -> None:
        """A step has to run again, and so has what came of it."""
        self.ends.pop(name, None)
        self.ready.pop(name, None)
        for step in self.steps:
            if name in step.before and (step.name in self.ends or step.name in self.ready):
                self.forget(step.name)


@dataclass
class _Submitted:
    run: _Run
    step: Step
    task: Task
    key: str
    release: Callable[[], None]


@dataclass
class Driver:
    """Args:
    pool: None: nothing is run, and what would be is "stale".
    machines: the kinds for which a plan is looked at, where there is no pool.
    wait: seconds that a step waits for a machine that can run it.
    explain: the end of a step that would run, where there is no pool: its step, key, and what that is the hash of.
    """

    store: Store
    pool: Pool | None
    machines: Sequence[Machine] = ()
    wait: float = 0.0
    hashes: Hashes = field(default_factory=Hashes)
    explain: Callable[[Step, str, dict[str, Any]], StepEnd] = lambda step, key, depends: StepEnd(
        step.name, step.verb, "stale", key
    )
    progress: Progress | None = None
    total: int = 0
    notes: list[str] = field(default_factory=list)
    _done: int = 0
    _futures: dict[Future[Record], _Submitted] = field(default_factory=dict)
    _elsewhere: list[tuple[_Run, Step]] = field(default_factory=list)
    _polled: float = 0.0  # when those were last looked at
    _asked: dict[Future[Record | None], tuple[_Run, Step, Task, Machine]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None  # that ask a store which is far away
    _uploaded: set[str] = field(default_factory=set)

    def run(self, jobs: Iterable[Job]) -> Iterator[JobEnd]:
        """The ends of all jobs, in their order.

        Raises:
            StoreError: the store can't be reached or written.
            InputError: a source can't be read, or was changed meanwhile.
        """
        window = 4 * self.pool.size + 16 if self.pool is not None else 1
        if not self.store.place.local:
            window, self._threads = max(window, 2 * _QUESTIONS), ThreadPoolExecutor(_QUESTIONS)
        coming, active = iter(jobs), list[_Run]()
        with ExitStack() as stack:
            stack.callback(self._release_all)
            while True:
                while len(active) < window and (job := next(coming, None)) is not None:
                    active.append(run := _Run(job, steps_of(job)))
                    self._advance(run)
                while active and len(active[0].ends) == len(active[0].steps):
                    first = active.pop(0)
                    yield JobEnd(first.job, tuple(first.ends[s.name] for s in first.steps))
                if active:
                    self._submit(active)
                    self._wait(active)
                elif job is None:
                    return

    def _advance(self, run: _Run) -> None:
        """Everything that can be decided now."""
        moved = True
        while moved:
            moved = False
            for step in run.steps:
                known = step.name in run.ends or step.name in run.busy or step.name in run.ready
                if known or any(before not in run.ends for before in step.before):
                    continue
                if (end := self._decided(run, step)) is not None:
                    self._end(run, end)
                    moved = True

    def _decided(self, run: _Run, step: Step) -> StepEnd | None:
        """How the step ended, without running it; None where it is on its way."""
        if (end := _behind(run, step)) is not None:
            return end
        task = task_of(step, run.ends, self.hashes, self.store)
        machines = self.pool.machines if self.pool is not None else self.machines
        fitting = [m for m in machines if not m.lacks(step.needs)]
        fitting = fitting if self.pool is not None else fitting[:1]
        if not fitting:
            since = run.waiting.setdefault(step.name, time.monotonic())
            if self.pool is not None and time.monotonic() - since < self.wait:
                return None
            lacks = "; ".join(sorted({m.lacks(step.needs) for m in machines}))
            return StepEnd(step.name, step.verb, "not run", reason=lacks or "no machine is there")
        run.waiting.pop(step.name, None)
        keys = dict.fromkeys(task.key(machine)[0] for machine in fitting)
        if self._threads is None:
            return self._known(run, step, task, fitting[0], self._first(keys))
        self._asked[self._threads.submit(self._first, keys)] = run, step, task, fitting[0]
        run.busy.add(step.name)
        return None

    def _known(self, run: _Run, step: Step, task: Task, machine: Machine, record: Record | None) -> StepEnd | None:
        """How the step ended; None where it has no record and is to be run."""
        if record is not None:
            return _of_record(step, record, cached=True)
        if self.pool is None:
            return self.explain(step, *task.key(machine))
        run.ready[step.name] = replace(task, made=_made(run, step)) if step.verb == "package" else task, machine
        return None

    def _answered(self, answer: Future[Record | None]) -> None:
        run, step, task, machine = self._asked.pop(answer)
        run.busy.discard(step.name)
        record = answer.result()
        # what it reads may have been damaged meanwhile, and made again
        known = all(b in run.ends for b in step.before) and task_of(step, run.ends, self.hashes, self.store) == task
        if known and (end := self._known(run, step, task, machine, record)) is not None:
            self._end(run, end)
        self._advance(run)

    def _first(self, keys: Iterable[str]) -> Record | None:
        """The first record that there is; may run in a thread."""
        return next((record for key in keys if (record := self._found(key)) is not None), None)

    def _submit(self, active: Sequence[_Run]) -> None:
        """Give the pool what it can take, the first jobs' steps first. What is not given is not claimed: another driver
        may take it."""
        assert self.pool is not None or not any(run.ready for run in active)
        for run in active:
            for step in [s for s in run.steps if s.name in run.ready]:
                if self.pool is None or len(self._futures) >= 2 * self.pool.size:
                    return
                task, machine = run.ready.pop(step.name)
                key, _ = task.key(machine)
                release = self.store.place.claim(key)
                if release is None:  # another driver, or another cell of this one, is at it
                    run.busy.add(step.name)
                    self._elsewhere.append((run, step))
                elif (record := self._found(key)) is not None:  # written since it was looked for
                    release()
                    self._end(run, _of_record(step, record, cached=True))
                    self._advance(run)
                else:
                    run.busy.add(step.name)
                    future = self.pool.submit(task if self.pool.shares_files else self._upload(task), machine)
                    self._futures[future] = _Submitted(run, step, task, key, release)

    def _found(self, key: str) -> Record | None:
        record, note = found(self.store, key, void=self.pool is not None)
        self.notes += [note] if note else []
        return record

    def _upload(self, task: Task) -> Task:
        """The task with all that it reads in the store."""
        inputs = {}
        for name, file in task.inputs.items():
            if file.path is not None and file.stored.sha256 not in self._uploaded:
                if self.store.put(file.path) != file.stored:
                    raise InputError(f"{file.path.name!r} was changed while the fleet ran; run it again")
                self._uploaded.add(file.stored.sha256)
            inputs[name] = Input(file.stored)
        return Task(task.step, inputs, task.made)

    def _wait(self, active: Sequence[_Run]) -> None:
        polls = bool(self._elsewhere) or any(run.waiting for run in active)
        if self.pool is not None:
            self.pool.want([step for run in active if run.waiting for step in run.steps if step.name in run.waiting])
        under_way: set[Future[Any]] = {*self._futures, *self._asked}
        done, _ = wait(under_way, _POLL if polls else None, return_when=FIRST_COMPLETED)
        if not under_way and polls:
            time.sleep(_POLL)
        for answer in [f for f in self._asked if f in done]:
            self._answered(answer)
        own = [f for f in self._futures if f in done]
        for future in own:
            told = self._futures.pop(future)
            told.run.busy.discard(told.step.name)
            try:
                self._returned(future, told)
            finally:
                told.release()
            self._advance(told.run)
        if own or time.monotonic() - self._polled >= _POLL:
            self._polled = time.monotonic()
            elsewhere, self._elsewhere = self._elsewhere, []
            for run, step in elsewhere:
                run.busy.discard(step.name)
                self._advance(run)
        for run in active:
            if run.waiting:
                self._advance(run)

    def _returned(self, future: Future[Record], told: _Submitted) -> None:
        run, step = told.run, told.step
        try:
            record = future.result()
        except StepFailed as error:
            self._end(run, StepEnd(step.name, step.verb, "failed", told.key, str(error), log=error.log))
        except Vanished as error:
            self._again(run, step, str(error))
        except Damaged as error:
            self.notes.append(str(error))
            made = [n for n, e in run.ends.items() if any(o.sha256 == error.digest for o in e.outputs.values())]
            self._uploaded.discard(error.digest)
            self._again(run, step, str(error))
            if step.name not in run.ends:
                for name in made:
                    self.store.void(run.ends[name].key)
                    run.forget(name)
        else:
            if told.task.inputs.keys() and not self._current(run, told):
                return  # what it was made of was damaged, and has been made again
            self._end(run, _of_record(step, record, cached=False))

    def _current(self, run: _Run, told: _Submitted) -> bool:
        return all(
            before in run.ends
            and all(
                (file := told.task.inputs.get(f"{folder}/{name}")) is not None and file.stored == stored
                for name, stored in read_of(told.step, run.ends[before]).items()
            )
            for folder, before in told.step.after.items()
        )

    def _again(self, run: _Run, step: Step, why: str) -> None:
        run.tries[step.name] = tries = run.tries.get(step.name, 1) + 1
        if tries > _TRIES:
            self._end(run, StepEnd(step.name, step.verb, "failed", reason=f"{why} ({_TRIES} times)"))

    def _end(self, run: _Run, end: StepEnd) -> None:
        run.ends[end.step] = end
        run.waiting.pop(end.step, None)
        self._done += 1
        if self.progress is not None:
            self.progress(end.step, self._done, max(self.total, self._done))

    def _release_all(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for told in self._futures.values():
            told.release()
        self._futures.clear()


def _behind(run: _Run, step: Step) -> StepEnd | None:
    """The end of a step that can't be begun, for what became of one before it."""
    for name in step.before:
        before = run.ends[name]
        read = name in step.after.values()
        if before.outcome == "ok" or (before.outcome == "not run" and not read):
            continue
        outcome: StepOutcome = {"not run": "not run", "stale": "waits", "waits": "waits"}.get(before.outcome, "blocked")  # type: ignore[assignment]
        said = before.reason if before.outcome in ("blocked", "not run", "waits") else f"{name} is {before.outcome}"
        if before.outcome in ("wrong", "failed"):
            said = f"{name} {'is wrong' if before.outcome == 'wrong' else 'failed'}: {before.reason}"
        return StepEnd(step.name, step.verb, outcome, reason=said)
    return None


def _made(run: _Run, step: Step) -> dict[str, str]:
    """The steps that were run before one, at any distance, and their keys."""
    found: dict[str, str] = {}
    steps, stack = {s.name: s for s in run.steps}, list(step.before)
    while stack:
        name = stack.pop()
        if name not in found and run.ends[name].key:
            found[name] = run.ends[name].key
            stack += steps[name].before
    return found


def _of_record(step: Step, record: Record, *, cached: bool) -> StepEnd:
    return StepEnd(
        step.name,
        step.verb,
        record.outcome,
        record.key,
        record.reason,
        cached,
        record.seconds,
        record.peak,
        record.outputs,
        record.log,
        record.measures,
    )


def steps_in(jobs: Iterable[Job]) -> int:
    """The number of steps of all jobs."""
    return sum(len(steps_of(job)) for job in jobs)
