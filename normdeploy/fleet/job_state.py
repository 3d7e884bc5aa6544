"""Track the state of a job: which of its steps ended, which steps can be decided now, and how one step affects later
steps.

This module runs no steps and does not access the store. The driver does that (`normdeploy.fleet.scheduler`).
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

    A step's name is in at most one of ``ends``, ``busy``, ``ready`` and ``waiting``. Before all preceding steps have
    ended, the name is in none of them.

    Attributes:
        busy: steps that are being looked up in the store, or that this or another driver is running.
        ready: steps that could run now.
        waiting: name of a step that no machine can run → time at which the step began to wait.
        tries: retried step → number of tries.
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
        """Yield the steps that can be decided now. A decision may allow further steps to be decided."""
        for step in self.steps:
            known = step.name in self.ends or step.name in self.busy or step.name in self.ready
            if not known and self.can_begin(step):
                yield step

    def can_begin(self, step: JobStep) -> bool:
        """Return True if all steps that precede this step have ended.

        Returns:
            False until the last preceding step has ended.
        """
        return all(before in self.ends for before in step.preceding_steps)

    def forget_step(self, name: str) -> None:
        """Delete the end of a step that must run again, and the ends of all steps that depend on it."""
        self.ends.pop(name, None)
        self.ready.pop(name, None)
        for step in self.steps:
            if name in step.preceding_steps and (step.name in self.ends or step.name in self.ready):
                self.forget_step(step.name)

    def is_current(self, task: StepTask) -> bool:
        """Return True if a step would still read the current outputs of the steps before it.

        Outputs may have been damaged and computed again since ``task`` was made.

        Returns:
            False if an output differs or one of these steps has not ended.
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
        """Return the end of a step that can't start because of the result of a preceding step.

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
        """Collect the keys of all direct and indirect predecessors of a step.

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
        cached: True if the record was in the store.

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
