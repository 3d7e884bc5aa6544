"""How steps, cells and runs ended: the values that travel from the driver to manifests, pages and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..findings.rendering import Renderable
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
    """How one step ended.

    ``outcome``: "ok", "wrong" (the verb found the numbers wrong), "failed" (no result: an error, a crash, a limit),
    "blocked" (a step before it is wrong or failed), "not run" (no machine for it); of a plan that is only looked at
    "stale" (it would run) and "waits" (whether it would hangs on what a stale one makes). ``cached``: it was in the
    store.
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


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """One model in one variant on one target.

    ``status``: "verified" (all that was asked for was done and is right), "built" (the engine is there and was not run
    on its GPU), "wrong", "failed", "not run" (no builder), "stale". ``reason`` says why it is not verified, ``step``
    which step says so. ``seconds`` are those of the steps that ran now, ``bytes`` the size of what is deployed: the
    engine, or the ONNX file with its weights. ``measures``: see `normdeploy.fleet.step_execution.extract_measures`.
    """

    model: str
    variant: str
    target: str
    status: Status
    reason: str = ""
    step: str = ""
    seconds: float = 0.0
    bytes: int = 0
    # steps
    ran: int = 0
    cached: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)
    # (step, SHA-256 of its log)
    logs: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}/{self.variant}/{self.target}"


@dataclass(frozen=True)
class JobEnd:
    """A job whose steps have all ended, in their order."""

    job: FleetJob
    steps: tuple[StepEnd, ...]

    def cell_outcomes(self) -> tuple[CellOutcome, ...]:
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
        made = [s.outputs[n] for s in steps for n in s.outputs if n == "model.engine"] or [
            f for s in steps if s.verb in ("export", "optimize") for n, f in s.outputs.items() if n.startswith("model")
        ]
        return CellOutcome(
            self.job.model,
            self.job.variant,
            target.name,
            status,
            said.reason if said else "",
            said.step if said else "",
            sum(s.seconds for s in steps if not s.cached),
            sum(f.bytes for f in made),
            sum(not s.cached and s.outcome in ("ok", "wrong", "failed") for s in steps),
            sum(s.cached for s in steps),
            measures,
            tuple((s.step, s.log.sha256) for s in steps if s.log is not None),
        )


def _worst_status(steps: Sequence[StepEnd], target: FleetTarget) -> tuple[Status, StepEnd | None]:
    """And the step that decides."""
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


@dataclass(frozen=True)
class FleetRun(Renderable):
    """What a run found. True where no cell is wrong or failed; what was not run is no success, and is told.

    ``ran`` and ``cached`` count steps; ``before`` are the cells of the run before it, by name.
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
    # patterns of the models that were run; (): all
    only: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not any(cell.status in BAD for cell in self.cells)

    @property
    def cells_not_run(self) -> tuple[CellOutcome, ...]:
        """Cells of which a step was not run for want of a machine: not built, or built and not run."""
        return tuple(c for c in self.cells if c.status == "not run" or (c.status == "built" and c.reason))

    def count_by_status(self) -> dict[str, int]:
        """Status -> number of cells, of those that there are."""
        found = {status: sum(c.status == status for c in self.cells) for status in STATUSES}
        return {status: count for status, count in found.items() if count}

    def show(self, console: Console) -> None:
        from .fleet_tables import show_fleet_run

        show_fleet_run(console, self)
