"""A job on its way: which of its steps have ended, which may be decided now, and what became of one means for others.

Nothing is asked or run here: that is the driver's (`normdeploy.fleet.scheduler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .fleet_file import FleetJob
from .job_steps import JobStep
from .outcomes import StepEnd, StepOutcome
from .step_inputs import StepTask, inputs_from_step
from .step_keys import FleetMachine
from .step_store import StepRecord


@dataclass
class JobState:
    """A step is in one of these by its name, or in none while one before it has not ended."""

    job: FleetJob
    steps: Sequence[JobStep]
    ends: dict[str, StepEnd] = field(default_factory=dict)
    # the store is asked for it, or it runs, here or elsewhere
    busy: set[str] = field(default_factory=set)
    # would run at once
    ready: dict[str, tuple[StepTask, FleetMachine]] = field(default_factory=dict)
    # has no machine -> since when
    waiting: dict[str, float] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return len(self.ends) == len(self.steps)

    def undecided_steps(self) -> Iterator[JobStep]:
        """The steps that can be decided, those among them that can be once the one before has been."""
        for step in self.steps:
            known = step.name in self.ends or step.name in self.busy or step.name in self.ready
            if not known and self.can_begin(step):
                yield step

    def can_begin(self, step: JobStep) -> bool:
        """Whether all steps before it have ended."""
        return all(before in self.ends for before in step.preceding_steps)

    def forget_step(self, name: str) -> None:
        """A step has to run again, and so has what came of it."""
        self.ends.pop(name, None)
        self.ready.pop(name, None)
        for step in self.steps:
            if name in step.preceding_steps and (step.name in self.ends or step.name in self.ready):
                self.forget_step(step.name)

    def is_current(self, task: StepTask) -> bool:
        """Whether what a step reads is still what the steps before it made: it may have been damaged, and made
        again."""
        return all(
            before in self.ends
            and all(
                (file := task.inputs.get(f"{folder}/{name}")) is not None and file.stored == stored
                for name, stored in inputs_from_step(task.step, self.ends[before]).items()
            )
            for folder, before in task.step.after.items()
        )

    def blocked_end(self, step: JobStep) -> StepEnd | None:
        """The end of a step that can't be begun, for what became of one before it."""
        for name in step.preceding_steps:
            before = self.ends[name]
            read = name in step.after.values()
            if before.outcome == "ok" or (before.outcome == "not run" and not read):
                continue
            outcome: StepOutcome = {"not run": "not run", "stale": "waits", "waits": "waits"}.get(
                before.outcome, "blocked"
            )  # type: ignore[assignment]
            if before.outcome in ("blocked", "not run", "waits"):
                said = before.reason
            elif before.outcome == "stale":
                said = f"{name} is stale"
            else:
                said = f"{name} {'is wrong' if before.outcome == 'wrong' else 'failed'}: {before.reason}"
            return StepEnd(step.name, step.verb, outcome, reason=said)
        return None

    def preceding_keys(self, step: JobStep) -> dict[str, str]:
        """The steps that were run before one, at any distance, and their keys."""
        found: dict[str, str] = {}
        steps = {s.name: s for s in self.steps}
        stack = list(step.preceding_steps)
        while stack:
            name = stack.pop()
            if name not in found and self.ends[name].key:
                found[name] = self.ends[name].key
                stack += steps[name].preceding_steps
        return found


def end_from_record(step: JobStep, record: StepRecord, *, cached: bool) -> StepEnd:
    """How a step with a record ended."""
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
