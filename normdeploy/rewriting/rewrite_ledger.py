"""Define the options of a rewriting and its ledger.

The ledger has one entry per norm, with the steps that changed the graph for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs

from ..findings.records import Finding
from ..forms.measured_forms import best_form
from ..graphs.graph import NEWEST
from ..norms.norm_table import STANDARD
from ..option_values import ONNXRUNTIME, OPENVINO
from ..storage.heap import trim_heap
from ..storage.shared_weights import Weights
from ..types import Progress
from . import rounding_verdicts
from .rewrite_records import RewriteRecorder
from .rounding_verdicts import RoundingTrial, TrialOutcome
from .speed_rewrite_costs import describe_cost

# Statuses of findings whose rewrite is in the graph
MADE = ("fused", "folded")


@dataclass(frozen=True)
class RewriteStep:
    """One application of a transform.

    Attributes:
        place: body or function that contains the node; "" for the main graph.
        stage: stage of the transform.
        tensor: first output of the node at which the transform started.
    """

    place: str
    stage: str
    tensor: str


@dataclass(frozen=True)
class RewriteOptions:
    """Options of a rewriting.

    Attributes:
        runtime: selects among equal standard forms.
        fuse: "portable" to write normdeploy's own ops if no standard op expresses a norm, and for group norms.
        opset: opset of the result; None for the file's own opset, or a newer one that a norm's node needs.
        limit: highest opset of the result.
        avoided: standard norm ops that the target does not run. They are not written, and existing nodes of these ops
            become several nodes.
        unraised: reason why the file's opset cannot be raised.
        attentions: True if an attention may become one node when the runtime runs that faster; False before a
            conversion to half precision.
        rows: True if linear layers may become Gemm over rows; False if the layers are quantized afterwards.
        partial: True if a linear op may take a scale without its shift; False if the op's input is quantized
            afterwards.
        census: True if findings store all properties of a norm.
        progress: called with (stage, done, total).
        weights: stores new large weights, to which the result refers.
        place: body or function of the graph; "" for the main graph.
        undone: steps that must not be made again, with their findings.
        recorder: receives both sides of each rewrite, for a certificate file; None to record nothing.
    """

    runtime: str = "any"
    fuse: str = "standard"
    opset: int | None = None
    limit: int = NEWEST
    avoided: frozenset[str] = frozenset()
    unraised: str = ""
    attentions: bool = True
    rows: bool = True
    partial: bool = True
    census: bool = False
    progress: Progress | None = None
    weights: Weights | None = field(default=None, compare=False)
    place: str = ""
    undone: Mapping[RewriteStep, Finding] = field(default_factory=dict)
    recorder: RewriteRecorder | None = field(default=None, compare=False)

    def undone_at(self, stage: str, node: gs.Node) -> Finding | None:
        """Look up a step that must not be repeated.

        Returns:
            its finding; None for other steps.
        """
        return self.undone.get(RewriteStep(self.place, stage, node.outputs[0].name))

    @property
    def excluded_ops(self) -> dict[str, str]:
        """Return the standard norm ops that must not be written: ops newer than the opset limit, and avoided ops.

        Returns:
            op -> reason.
        """
        newer = {op: row.since for op, row in STANDARD.items() if row.since > self.limit}
        reasons = {
            op: f"its node needs opset {since}, but the file has opset {self.limit}" for op, since in newer.items()
        }
        return reasons | {op: f"the target does not run its node {op}" for op in self.avoided}


@dataclass(eq=False)
class LedgerEntry:
    """Finding of one norm, with the steps that led to it."""

    finding: Finding
    steps: list[RewriteStep] = field(default_factory=list)


@dataclass(frozen=True)
class _PlannedTrial:
    """Planned onnxruntime run, with the entry that it judges.

    Attributes:
        entry: entry of the norm.
        step: step to take back if the result is gross.
        for_speed: finding of a rewrite made only for speed, to report if it costs accuracy; None for other rewrites.
    """

    entry: LedgerEntry
    step: RewriteStep
    for_speed: Finding | None


class RewriteLedger:
    """Entries of one graph, in order of appearance.

    Attributes:
        entries: entries of norms.
        non_norm_entries: entries of other rewrites: computed constants, activations, attentions, linear layers.
        gross: steps whose result onnxruntime cannot run, or runs with a gross error, with their findings.
    """

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.non_norm_entries: list[LedgerEntry] = []
        self.gross: dict[RewriteStep, Finding] = {}
        self._kinds: dict[object, list[LedgerEntry]] = {}
        # Trials that have not run yet
        self._waiting: list[tuple[_PlannedTrial, RoundingTrial]] = []
        # Trials that have run, with their outcomes
        self._judged: list[tuple[_PlannedTrial, TrialOutcome]] = []
        self._behind: dict[str, Sequence[LedgerEntry]] = {}
        self._by_tensor: dict[str, LedgerEntry] = {}
        self._indexed = 0

    @property
    def findings(self) -> list[Finding]:
        """Return the findings in order."""
        return [entry.finding for entry in self.entries]

    def entry_of(self, tensor: str) -> LedgerEntry | None:
        """Look up the first entry whose finding names ``tensor``. A later change of that name is ignored.

        Returns:
            the entry; None if there is none.
        """
        for entry in self.entries[self._indexed :]:
            self._by_tensor.setdefault(entry.finding.tensor, entry)
        self._indexed = len(self.entries)
        return self._by_tensor.get(tensor)

    def entries_behind(self, tensor: str) -> Sequence[LedgerEntry]:
        """Look up the norms that one rewrite merged into ``tensor``.

        Returns:
            their entries; empty for other tensors.
        """
        return self._behind.get(tensor, ())

    def revise_findings(
        self, tensor: str, entries: Sequence[LedgerEntry], step: RewriteStep, change: Callable[[Finding], Finding]
    ) -> None:
        """Revise the findings of ``entries`` for a rewrite that computes ``tensor``.

        Args:
            change: returns the revised finding.
        """
        for entry in entries:
            entry.finding = change(entry.finding)
            entry.steps.append(step)
        self._behind[tensor] = entries

    def has_same_finding(self, finding: Finding) -> bool:
        """Return True if the same norm already has this finding.

        A norm may hold two roots (‖x‖₂ and the root of its square).
        """
        entry = self.entry_of(finding.tensor)
        return entry is not None and finding.status in ("undone", "refused") and entry.finding == finding

    def steps_taken(self) -> list[tuple[RewriteStep, Finding]]:
        """List every step that changed the graph.

        Returns:
            each step with its finding.
        """
        made = [entry for entry in self.entries if entry.finding.status in MADE]
        return [(step, entry.finding) for entry in (*made, *self.non_norm_entries) for step in entry.steps]

    # ------------------------------------------------------------------ what onnxruntime makes of both sides

    def is_one_of_many(self, kind: object, entry: LedgerEntry) -> bool:
        """Add ``entry`` to the norms of its kind.

        Returns:
            True if trials of enough norms of this kind are planned already.
        """
        likes = self._kinds.setdefault(kind, [])
        likes.append(entry)
        return len(likes) > rounding_verdicts.OF_A_KIND

    @property
    def pending_trial_count(self) -> int:
        """Return the number of trials that have not run yet."""
        return len(self._waiting)

    @property
    def verdict_count(self) -> int:
        """Return the number of trials that have run."""
        return len(self._judged)

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes held for pending trials."""
        return sum(trial.nbytes for _, trial in self._waiting)

    def plan_trial(
        self, entry: LedgerEntry, step: RewriteStep, trial: RoundingTrial, for_speed: Finding | None
    ) -> None:
        """Add a trial to the pending ones.

        Args:
            for_speed: finding of a rewrite made only for speed; None for others.
        """
        self._waiting.append((_PlannedTrial(entry, step, for_speed), trial))

    def run_trials(self) -> None:
        """Run the pending trials in onnxruntime and keep only their outcomes."""
        verdicts = rounding_verdicts.run_trials([trial for _, trial in self._waiting])
        self._judged += [(planned, v) for (planned, _), v in zip(self._waiting, verdicts, strict=True)]
        if self._waiting:
            self._waiting.clear()
            trim_heap()

    def apply_verdicts(self, runtime: str, *, decides: bool) -> None:
        """Add the outcomes to the certificates, and record gross results.

        Args:
            runtime: the target runtime.
            decides: True if a gross outcome takes a rewrite back; False for a TensorRT target.
        """
        for planned, verdict in self._judged:
            if planned.for_speed is not None:
                if decides and (why := describe_cost(verdict)):
                    self.gross[planned.step] = undone_finding(planned.for_speed, why)
                continue
            planned.entry.finding = _with_verdict(planned.entry.finding, verdict, runtime)
            if verdict.gross and decides:
                self.gross[planned.step] = undone_finding(planned.entry.finding, verdict.gross)
        for likes in self._kinds.values():
            self._apply_verdicts_to_likes(likes)

    def _apply_verdicts_to_likes(self, likes: list[LedgerEntry]) -> None:
        """Copy the outcomes to norms of the same kind that were not run."""
        ran = likes[: rounding_verdicts.OF_A_KIND]
        others = likes[rounding_verdicts.OF_A_KIND :]
        bad = next((self.gross[step] for entry in ran for step in entry.steps if step in self.gross), None)
        for entry in others:
            entry.finding = rounding_verdicts.copy_verdict(entry.finding, likes[0].finding)
            if bad is not None:
                why = f"{bad.reason} (measured on {bad.tensor!r}, which runs the same kernels)"
                self.gross |= {step: undone_finding(entry.finding, why) for step in entry.steps}


def undone_finding(finding: Finding, reason: str) -> Finding:
    """Return the finding of a rewrite that was proved, applied and taken back."""
    return replace(
        finding, status="undone", became="", reason=f"it was taken back: {reason}", nodes_left=None, written=()
    )


def _with_verdict(finding: Finding, verdict: TrialOutcome, runtime: str) -> Finding:
    """Add the outcome of an onnxruntime run to a norm's finding."""
    assert finding.certificate is not None
    certificate = rounding_verdicts.with_verdict(finding.certificate, verdict)
    notes = finding.notes
    proved = finding.proved
    if verdict.missing and verdict.missing not in notes:
        notes = (*notes, verdict.missing)
    if certificate.rounding_after is not None and "onnxruntime run" not in proved:
        proved = (*proved, "onnxruntime run")
    if certificate.is_rounding_ok is False:
        measured = certificate.rounding_after
        most = certificate.rounding_bound
        reason = f"onnxruntime's kernel is inaccurate here: error {measured:.2g}, expected at most {most:.2g}"
        better = best_form(finding.kind, "onnxruntime", finding.dtype, ("standard", "instance", "layer")) != "standard"
        if better and runtime not in (*ONNXRUNTIME, OPENVINO):
            hint = "; --runtime onnxruntime writes another form"
        else:
            hint = ""
        notes = (*notes, reason + hint)
    return replace(finding, certificate=certificate, notes=notes, proved=proved)
