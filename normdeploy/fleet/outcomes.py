"""Define the outcomes of steps, cells and runs. The driver makes them; manifests, pages and tables show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..findings.rendering import Renderable, ShortRepr
from .fleet_file import FleetJob, FleetTarget
from .step_store import StoredFile

if TYPE_CHECKING:
    from rich.console import Console

StepOutcome = Literal["ok", "wrong", "failed", "blocked", "not run", "stale", "waits"]
Status = Literal["verified", "built", "wrong", "failed", "not run", "stale"]
STATUSES: tuple[Status, ...] = ("verified", "built", "wrong", "failed", "not run", "stale")
BAD: frozenset[Status] = frozenset({"wrong", "failed"})


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Outcome of one step.

    ``outcome`` is one of these:

    - "ok";
    - "wrong": the verb did its work and found wrong numbers;
    - "failed": the step has no result, because of an error, a crash or a limit;
    - "blocked": a preceding step is wrong or failed;
    - "not run": no machine can run the step;
    - "stale": in a dry run, the step would run;
    - "waits": in a dry run, the step depends on the outputs of a stale step.

    Attributes:
        cached: True if the result was in the store.
        seconds: duration of the run that computed the result.
        peak: peak memory of the step's largest process in bytes.
        outputs: path → stored file.
        log: stored text that the step printed; None if there is none.
        measures: numbers as in `normdeploy.fleet.step_execution.extract_measures`.
    """

    step: str
    verb: str
    outcome: StepOutcome
    key: str = ""
    reason: str = ""
    cached: bool = False
    seconds: float = 0.0
    peak: int = 0
    outputs: Mapping[str, StoredFile] = field(default_factory=dict)
    log: StoredFile | None = None
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False, slots=True)
class CellOutcome(ShortRepr):
    """Outcome of one cell: a model in a variant on a target.

    ``status`` is one of these:

    - "verified": all requested steps were done, and their results are right;
    - "built": the engine was built but not run on its GPU, or no verify step was requested;
    - "wrong" or "failed": a step of the cell is wrong or failed;
    - "not run": no machine can build or run the cell;
    - "stale": in a dry run, a step would run.

    Attributes:
        reason: reason why the cell is not verified.
        step: name of the step that determines the status.
        seconds: duration of the steps that ran in this run.
        bytes: size of the deployed files: the engine, or the ONNX file with its weights.
        ran: number of steps that ran in this run.
        cached: number of steps from the store.
        measures: numbers as in `normdeploy.fleet.step_execution.extract_measures`.
        logs: (step, SHA-256 of its log).
        shared_seconds: part of ``seconds`` that was spent on steps shared with other cells of the job.
        files: (name, SHA-256) of the deployed files.
    """

    model: str
    variant: str
    target: str
    status: Status
    reason: str = ""
    step: str = ""
    seconds: float = 0.0
    bytes: int = 0
    ran: int = 0
    cached: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)
    logs: tuple[tuple[str, str], ...] = ()
    shared_seconds: float = 0.0
    files: tuple[tuple[str, str], ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.status}, {self.name}{f': {self.reason}' if self.reason else ''}"

    @property
    def name(self) -> str:
        """Return "model/variant/target"."""
        return f"{self.model}/{self.variant}/{self.target}"


@dataclass(frozen=True)
class JobEnd:
    """Finished job, with the outcome of each of its steps in the order of the steps."""

    job: FleetJob
    steps: tuple[StepEnd, ...]

    def cell_outcomes(self) -> tuple[CellOutcome, ...]:
        """Compute the outcome of the job for each target.

        Returns:
            one cell for each target, in the job's order.
        """
        shared = [s for s in self.steps if s.step.count("/") == self.job.name.count("/") + 1]
        return tuple(self._cell_outcome(target, shared) for target in self.job.targets)

    def _cell_outcome(self, target: FleetTarget, shared: Sequence[StepEnd]) -> CellOutcome:
        prefix = f"{self.job.name}/{target.name}/"
        own = [s for s in self.steps if s.step.startswith(prefix)]
        steps = [*shared, *own]
        status, said = _worst_status(steps, target)
        measures: dict[str, float] = {}
        for step in steps:
            measures |= step.measures
        made = {n: s.outputs[n] for s in steps for n in s.outputs if n == "model.engine"} or {
            n: f
            for s in steps
            if s.verb in ("export", "optimize")
            for n, f in s.outputs.items()
            if n.startswith("model")
        }
        return CellOutcome(
            self.job.model,
            self.job.variant,
            target.name,
            status,
            said.reason if said else "",
            said.step if said else "",
            sum(s.seconds for s in steps if not s.cached),
            sum(f.bytes for f in made.values()),
            sum(not s.cached and s.outcome in ("ok", "wrong", "failed") for s in steps),
            sum(s.cached for s in steps),
            measures,
            tuple((s.step, s.log.sha256) for s in steps if s.log is not None),
            sum(s.seconds for s in shared if not s.cached),
            tuple((name, file.sha256) for name, file in made.items()),
        )


def _worst_status(steps: Sequence[StepEnd], target: FleetTarget) -> tuple[Status, StepEnd | None]:
    """Return the status of a cell, and the step that determines it. The step is None if no step determines the
    status.
    """
    for outcome, status in _DECIDING:
        if (said := next((s for s in steps if s.outcome == outcome), None)) is not None:
            if outcome == "not run" and any(s.verb == "build" and s.outcome == "ok" for s in steps):
                return "built", said
            return status, said
    if not any(s.verb == "verify" for s in steps):
        return "built", None
    return "verified", None


_DECIDING: tuple[tuple[StepOutcome, Status], ...] = (
    ("wrong", "wrong"),
    ("failed", "failed"),
    ("blocked", "failed"),
    ("not run", "not run"),
    ("stale", "stale"),
    ("waits", "stale"),
)


@dataclass(frozen=True, repr=False)
class FleetRun(Renderable):
    """Result of a run. The record is true if no cell is wrong or failed.

    Cells that were not run do not count as successes, and they are reported.

    Attributes:
        ran: number of steps that ran.
        cached: number of steps from the store.
        machines: descriptions of the machines that ran steps.
        before: name of a cell → the cell in the previous run.
        trend: summaries of the last runs, oldest first.
        dry: True for a dry run, in which nothing was run or written.
        only: patterns that selected the models of this run; () if all models were selected.
        unrun: number of steps that neither ran nor were in the store.
    """

    id: str
    file: str
    store: str
    cells: tuple[CellOutcome, ...]
    ran: int
    cached: int
    seconds: float
    started: str
    machines: tuple[Mapping[str, str], ...] = ()
    before: Mapping[str, CellOutcome] = field(default_factory=dict)
    trend: tuple[Mapping[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    dry: bool = False
    only: tuple[str, ...] = ()
    unrun: int = 0

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .fleet_tables import summarize_counts

        return f"{'' if self else 'FAILED; '}{summarize_counts(self)}"

    def __bool__(self) -> bool:
        return not any(cell.status in BAD for cell in self.cells)

    @property
    def cells_not_run(self) -> tuple[CellOutcome, ...]:
        """Return the cells with a step that no machine could run.

        Returns:
            cells that were not built, and cells that were built but not run.
        """
        return tuple(c for c in self.cells if c.status == "not run" or (c.status == "built" and c.reason))

    @property
    def step_count(self) -> int:
        """Return the number of all steps, which the progress bar counts."""
        return self.ran + self.cached + self.unrun

    def count_by_status(self) -> dict[str, int]:
        """Count the cells by status.

        Returns:
            status → number of cells, without statuses that no cell has.
        """
        found = {status: sum(c.status == status for c in self.cells) for status in STATUSES}
        return {status: count for status, count in found.items() if count}

    def show(self, console: Console) -> None:
        """Print the run as tables."""
        from .fleet_tables import show_fleet_run

        show_fleet_run(console, self)
