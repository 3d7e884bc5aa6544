"""What ``verify`` found: every verdict, what was not run, and what the verdict does not speak of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...compare.error_bounds import MOST_RATIO, MOST_RUNS
from ...compare.ulp_spacing import EAGER_MULTIPLE
from ...findings.rendering import Renderable, make_printable
from ...runtimes.ort_runner import NAMES
from ...runtimes.torch_runners import Float64Runner
from .output_results import COLUMNS, OutputResult
from .quantization_budget import ROUNDED, UNROUNDED
from .reference_models import OWN
from .runtime_candidates import FLOATS, STEPWISE, NotRun
from .tensor_drift import DriftPoint
from .weight_origin import AuditedWeight

if TYPE_CHECKING:
    from rich.console import Console

# outputs that the verdict names
_NAMED = 3


@dataclass(frozen=True)
class Comparison(Renderable):
    """What ``verify`` found.

    ``drift``: in the files' order, one runtime after the other; None where it was not asked for. ``up_to``: the input
    elements up to which inputs were generated, where some sizes that the model takes have more; None where none were
    left out. ``weights``: of ONNX files, those that are no tensor of the model as it stands (``weight_audit``).
    """

    results: tuple[OutputResult, ...]
    not_run: tuple[NotRun, ...]
    # that were run
    cases: tuple[str, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    drift: tuple[DriftPoint, ...] | None = None
    up_to: int | None = None
    weights: tuple[AuditedWeight, ...] = ()
    # what the files were compared with
    reference: str = "the model"
    # The nodes of a reference file that have no float64 form, "" where all have: they ran as onnxruntime runs them.
    narrow: str = ""
    # Whose word the sizes and values of the inputs are, "" where it is the model's or the user's.
    word: str = ""
    # What the verdict does not speak of, each as the end of "verified …".
    limits: tuple[str, ...] = ()
    # How a live module and its trace differ, "" where they do not, or no module was at hand.
    trace: str = ""

    @property
    def ok(self) -> bool:
        """Something besides eager was run, every ONNX file in some runtime, and all of it passes, its weights too.

        Engines are not run without a GPU. Where eager itself fails, the model leaves its type's range: its row and a
        note say so, but what was made of it may be right.
        """
        return any(r.runtime not in OWN for r in self.results) and not self._is_wrong

    @property
    def _is_wrong(self) -> bool:
        """Whether a runtime, a weight, or an ONNX file that runs nowhere speaks against the files."""
        made = [r for r in self.results if r.runtime not in OWN]
        ran = {r.file for r in made} | {""}
        runs_nowhere = any(m.file not in ran for m in self.not_run if m.runtime in NAMES)
        return not all(made) or not all(self.weights) or runs_nowhere or bool(self.trace)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def outcome(self) -> Literal["passed", "failed", "not run"]:
        """Whether the files pass, whether one fails, or whether nothing was run that could do either."""
        if self.ok:
            return "passed"
        if self._is_wrong:
            return "failed"
        return "not run"

    @property
    def unrun(self) -> tuple[NotRun, ...]:
        """Engines, and runtimes of packages, that the user named and that did not run their file; where nothing was
        run, all.

        They speak neither for it nor against it. onnxruntime's CUDA provider and our own evaluators nobody names.
        """
        if self.outcome == "not run":
            return self.not_run or (NotRun("every runtime", "no input was run"),)
        unnamed = {*NAMES, STEPWISE, ROUNDED, UNROUNDED}
        return tuple(m for m in self.not_run if m.file and m.runtime not in unnamed)

    @property
    def beyond_default(self) -> tuple[OutputResult, ...]:
        """What the default rule would not pass, whatever the rules given say of it."""
        return tuple(r for r in self.results if r.runtime not in OWN and r.by_default == "fail")

    @property
    def standard(self) -> str:
        """By which rules the files are verified, and by which not; "" where they are not, or the default rule alone
        decided."""
        if not self or not any(r.rules for r in self.results if r.runtime not in OWN):
            return ""
        if not (failing := self.beyond_default):
            judged = all(r.by_default for r in self.results if r.runtime not in OWN)
            return "by the rules given" + (
                ", and by the default rule" if judged else "; the default rule was not asked"
            )
        some = dict.fromkeys(f"{r.output} in {r.file or r.runtime}" for r in failing)
        return (
            "by the rules given, NOT by the default rule"
            f" ({', '.join([*some][:_NAMED])}{', …' if len(some) > _NAMED else ''})"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of ``table``; where there are several files, each row names its own; where rules were given, what
        decided."""
        decided = ("decided by",) if self._has_rules else ()
        return (*(("file",) if self._has_several_files else ()), *COLUMNS, *decided)

    @property
    def _has_rules(self) -> bool:
        return any(r.rules for r in self.results)

    @property
    def _has_several_files(self) -> bool:
        return len(({r.file for r in self.results} | {m.file for m in self.not_run}) - {""}) > 1

    def rows(self) -> list[tuple[str, ...]]:
        """One row for each output and runtime, under ``columns``."""
        ruled = self._has_rules
        rows = [(*r.row(), r.decided_by) if ruled else r.row() for r in self.results]
        if not self._has_several_files:
            return rows
        files = [r.file or (f"(in {FLOATS[r.precision]})" if r.precision else "") for r in self.results]
        return [(file, *row) for file, row in zip(files, rows, strict=True)]

    def table(self) -> list[tuple[str, ...]]:
        """``rows``, and the runtimes that were not run last."""
        last = ("",) if self._has_rules else ()
        missed = [(m.file, "", m.runtime, "", "", "", f"not run: {m.reason}", "", *last) for m in self.not_run]
        return self.rows() + (missed if self._has_several_files else [row[1:] for row in missed])

    def to_json(self) -> dict[str, Any]:
        """The same as values of JSON."""
        rule = {
            "multiple": EAGER_MULTIPLE,
            "most_ratio": MOST_RATIO,
            "most_runs": MOST_RUNS,
            "reference": Float64Runner.name,
        }
        results = [asdict(r) | {"decided_by": r.decided_by, "account": r.rules_summary} for r in self.results]
        return {"ok": self.ok, "rule": rule, "standard": self.standard, **asdict(self), "results": results}

    def show(self, console: Console) -> None:
        from .verify_tables import show_parity

        show_parity(console, make_printable(self))
