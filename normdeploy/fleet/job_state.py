"""Track a job: its ended steps, the steps that can be decided now, and the effects of one step on others.

This module runs nothing and queries nothing; the driver does that (`normdeploy.fleet.scheduler`).
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
    """State of a job's steps.

    A step's name is in one of ``ends``, ``busy``, ``ready`` and ``waiting``, or in none while a step before it has not
    ended.

    Attributes:
        busy: steps that are looked up in the store, or run here or elsewhere.
        ready: steps that could run at once.
        waiting: steps without a machine → time since when.
        tries: number of tries of steps that were retried.
    """

    job: FleetJob
    steps: Sequence[JobStep]
    ends: dict[str, StepEnd] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    ready: dict[str, tuple[StepTask, FleetMachine]] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Return True if all steps have ended."""
        return len(self.ends) == len(self.steps)

    def undecided_steps(self) -> Iterator[JobStep]:
        """Yield the steps that can be decided now; a decision may allow further steps."""
        for step in self.steps:
            known = step.name in self.ends or step.name in self.busy or step.name in self.ready
            if not known and self.can_begin(step):
                yield step

    def can_begin(self, step: JobStep) -> bool:
        """Return True if all steps before this one have ended.

        Returns:
            False while one of them is missing.
        """
        return all(before in self.ends for before in step.preceding_steps)

    def forget_step(self, name: str) -> None:
        """Forget the end of a step that must run again, and the ends of all steps that come after it."""
        self.ends.pop(name, None)
        self.ready.pop(name, None)
        for step in self.steps:
            if name in step.preceding_steps and (step.name in self.ends or step.name in self.ready):
                self.forget_step(step.name)

    def is_current(self, task: StepTask) -> bool:
        """Return True if a step would still read the current outputs of the steps before it.

        Outputs may have been damaged and made again.

        Returns:
            False if an output differs or its step has not ended.
        """
        return all(
            before in self.ends
            and all(
                (file := task.inputs.get(f"{folder}/{name}")) is not None and file.stored == stored
                for name, stored in inputs_from_step(task.step, self.ends[before]).items()
            )
            for folder, before in task.step.after.items()
        )

    def blocked_end(self, step: JobStep) -> StepEnd | None:
        """Return the end of a step that can't start because of a step before it.

        Returns:
            the end; None if the step can start.
        """
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
        """Collect the keys of all steps before a step, direct or not.

        Returns:
            name → key.
        """
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
    """Build the end of a step from its record.

    Args:
        cached: the record was in the store.

    Returns:
        the end.
    """
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
