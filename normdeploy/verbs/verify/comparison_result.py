"""Define the result of ``verify``: every verdict, the runtimes that were not run, and the limits of the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...compare.error_bounds import MOST_RATIO, MOST_RUNS
from ...compare.ulp_spacing import EAGER_MULTIPLE
from ...findings.rendering import Renderable, make_printable
from ...runtimes.ort_runner import NAMES
from ...runtimes.torch_runners import Float64Runner
from .function_proof import FunctionProof
from .generation_result import Generation
from .output_results import COLUMNS, OutputResult
from .quantization_budget import ROUNDED, UNROUNDED
from .reference_models import OWN
from .runtime_candidates import FLOATS, STEPWISE, NotRun
from .tensor_drift import DriftPoint
from .weight_origin import AuditedWeight

if TYPE_CHECKING:
    from rich.console import Console

# Maximum number of outputs or rules that the verdict names.
_NAMED = 3


@dataclass(frozen=True, repr=False)
class Comparison(Renderable):
    """Result of ``verify``; true if it passes.

    Attributes:
        cases: names of the input cases that were run.
        drift: errors of inner tensors (drift) in the order of the files, one runtime after the other; None if drift was
            not requested.
        up_to: limit on the elements of generated inputs, if the model accepts larger inputs; None if no sizes were left
            out.
        weights: weights of ONNX files that are not unchanged tensors of the model (``weight_audit``).
        reference: name of the model that the files were compared with.
        narrow: nodes of a reference file that have no float64 form, and therefore ran in their own types; "" if there
            are none.
        word: source of the inputs' sizes and values; "" if the model or the user gave them.
        limits: limits of the verdict, each a phrase that follows the word "verified".
        trace: difference between a live module and its trace; "" if there is no difference or no live module.
        generation: verdict on each generated token; None if no tokens were requested.
        proofs: for each ONNX file, whether it is proved to be the same function as an ONNX reference.
    """

    results: tuple[OutputResult, ...]
    not_run: tuple[NotRun, ...]
    cases: tuple[str, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    drift: tuple[DriftPoint, ...] | None = None
    up_to: int | None = None
    weights: tuple[AuditedWeight, ...] = ()
    reference: str = "the model"
    narrow: str = ""
    word: str = ""
    limits: tuple[str, ...] = ()
    trace: str = ""
    generation: Generation | None = None
    proofs: tuple[FunctionProof, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .verify_tables import failure_lines, summarize_verdict

        if self.outcome == "failed":
            return f"{summarize_verdict(self)}; {failure_lines(self)[0]}"
        return f"{summarize_verdict(self)}; {len(self.results)} results, {len(self.not_run)} runtimes not run"

    @property
    def ok(self) -> bool:
        """Return True if the files pass.

        At least one runtime besides eager mode must have run, and every ONNX file must have run in some runtime. All
        outputs and weights must pass. Engines that did not run, because there is no GPU, do not fail.

        A failure of eager mode itself does not count. It means that the model exceeds the range of its type (a row and
        a note say so), but files made from the model may still be right.
        """
        generates = self.generation is None or bool(self.generation)
        return any(r.runtime not in OWN for r in self.results) and not self._is_wrong and generates

    @property
    def _is_wrong(self) -> bool:
        """Return whether the files fail: in a runtime, by a weight, by the trace, by a generated token, or because an
        ONNX file runs nowhere.
        """
        made = [r for r in self.results if r.runtime not in OWN]
        ran = {r.file for r in made} | {""}
        runs_nowhere = any(m.file not in ran for m in self.not_run if m.runtime in NAMES)
        generates_wrongly = self.generation is not None and self.generation.is_wrong
        return not all(made) or not all(self.weights) or runs_nowhere or bool(self.trace) or generates_wrongly

    def __bool__(self) -> bool:
        return self.ok

    @property
    def outcome(self) -> Literal["passed", "failed", "not run"]:
        """Return "passed" if the files pass, "failed" if a file fails, and "not run" if no runtime that could decide
        was run.
        """
        if self.ok:
            return "passed"
        if self._is_wrong:
            return "failed"
        return "not run"

    @property
    def unrun(self) -> tuple[NotRun, ...]:
        """Return the engines and third-party runtimes that the user named and that did not run.

        They count neither for nor against a file. If nothing ran, all runtimes are returned. onnxruntime's CUDA
        provider and the built-in evaluators are not included, because the user does not name them.
        """
        generated = self.generation.files if self.generation is not None else ()
        tokens = tuple(NotRun(made.runtime, made.unrun, made.file) for made in generated if made.unrun)
        if self.outcome == "not run":
            return (*tokens, *self.not_run) or (NotRun("every runtime", "no input was run"),)
        unnamed = {*NAMES, STEPWISE, ROUNDED, UNROUNDED}
        return (*tokens, *(m for m in self.not_run if m.file and m.runtime not in unnamed))

    @property
    def beyond_default(self) -> tuple[OutputResult, ...]:
        """Return the results that fail the default rule, including those that pass the given rules."""
        return tuple(r for r in self.results if r.runtime not in OWN and r.by_default == "fail")

    @property
    def standard(self) -> str:
        """Describe the rules by which the files are verified.

        Returns:
            "" if the files fail or if only the default rule decided. Otherwise a phrase with the given rules. It also
            names the outputs that fail the default rule, or the rules that judged without the default rule.
        """
        if not self or not any(r.rules for r in self.results if r.runtime not in OWN):
            return ""
        if not (failing := self.beyond_default):
            alone = [r for r in self.results if r.runtime not in OWN and not r.by_default]
            if not alone:
                return f"by {self._given_rules}, and by the default rule"
            rules = [*dict.fromkeys(rule.rule for r in alone for rule in r.rules)]
            named = f"{', '.join(rules[:_NAMED])}{', …' if len(rules) > _NAMED else ''}"
            return f"by {named} alone, without the default rule,"
        some = dict.fromkeys(f"{r.output} in {r.file or r.runtime}" for r in failing)
        return (
            f"by {self._given_rules}, NOT by the default rule"
            f" ({', '.join([*some][:_NAMED])}{', …' if len(some) > _NAMED else ''})"
        )

    @property
    def _given_rules(self) -> str:
        """Name the user's rules: a tolerance by its numbers if it alone decided, otherwise "the rules given"."""
        rules = {(rule.kind, rule.rule) for r in self.results if r.runtime not in OWN for rule in r.rules}
        if [kind for kind, _ in rules] != ["tolerance"]:
            return "the rules given"
        return f"your {next(iter(rules))[1]}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the column heads of ``table``.

        There is a column "file" if there are several files, and a column "decided by" if rules were given.
        """
        decided = ("decided by",) if self._has_rules else ()
        return (*(("file",) if self._has_several_files else ()), *COLUMNS, *decided)

    @property
    def _has_rules(self) -> bool:
        return any(r.rules for r in self.results)

    @property
    def _has_several_files(self) -> bool:
        return len(({r.file for r in self.results} | {m.file for m in self.not_run}) - {""}) > 1

    def rows(self) -> list[tuple[str, ...]]:
        """Build one row for each output and runtime.

        Returns:
            cells under ``columns``.
        """
        ruled = self._has_rules
        rows = [(*r.row(), r.decided_by) if ruled else r.row() for r in self.results]
        if not self._has_several_files:
            return rows
        files = [r.file or (f"(in {FLOATS[r.precision]})" if r.precision else "") for r in self.results]
        return [(file, *row) for file, row in zip(files, rows, strict=True)]

    def table(self) -> list[tuple[str, ...]]:
        """Build ``rows``, followed by a row for each runtime that was not run.

        Returns:
            cells under ``columns``.
        """
        last = ("",) if self._has_rules else ()
        missed = [(m.file, "", m.runtime, "", "", "", f"not run: {m.reason}", "", *last) for m in self.not_run]
        return self.rows() + (missed if self._has_several_files else [row[1:] for row in missed])

    def to_json(self) -> dict[str, Any]:
        """Convert the result to JSON values.

        Returns:
            the fields, the verdict, the constants of the default rule, and the reference.
        """
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
