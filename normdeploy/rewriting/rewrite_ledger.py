"""What is wanted of a rewriting, and what is told of it: an entry for each norm, with the steps that changed the graph
for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs

from ..findings.records import Finding
from ..forms.measured_forms import best_form
from ..graphs.graph import NEWEST
from ..option_values import ONNXRUNTIME
from ..storage.heap import trim_heap
from ..storage.shared_weights import Weights
from ..types import Progress
from . import rounding_verdicts
from .rounding_verdicts import RoundingTrial, TrialOutcome
from .speed_rewrite_costs import describe_cost

# the statuses of rewrites that are in the graph
MADE = ("fused", "folded")


@dataclass(frozen=True)
class RewriteStep:
    """One application of a transform: where it began."""

    # the body or function, "" in the main graph
    place: str
    stage: str
    # the first result of the node at which it began
    tensor: str


@dataclass(frozen=True)
class RewriteOptions:
    """What the result shall be like.

    Args:
        runtime: which of equal standard forms to write.
        fuse: "portable": this project's own ops where no standard one says a norm.
        limit: the highest opset that the result may have.
        unraised: why the file's own can't be raised.
        attentions: whether an attention may become one node, where the runtime runs that faster: not before half
            precision.
        rows: whether linear layers may become Gemm over rows: not before they compute in integers.
        partial: whether a linear op may take a scale without its shift: not before its input is quantized.
        census: whether findings shall hold all that there is to know of a norm.
        progress: called with (stage, done, total).
        weights: what keeps large weights that are made, to which the result refers.
        place: of the graph dealt with: the body or function, "" for the main graph.
        undone: steps that are not to be taken again, and what is told of them.
    """

    runtime: str = "any"
    fuse: str = "standard"
    limit: int = NEWEST
    unraised: str = ""
    attentions: bool = True
    rows: bool = True
    partial: bool = True
    census: bool = False
    progress: Progress | None = None
    weights: Weights | None = field(default=None, compare=False)
    place: str = ""
    undone: Mapping[RewriteStep, Finding] = field(default_factory=dict)

    def undone_at(self, stage: str, node: gs.Node) -> Finding | None:
        """Return what is told of a step that is not to be taken again; None of others."""
        return self.undone.get(RewriteStep(self.place, stage, node.outputs[0].name))

    @property
    def form_runtime(self) -> str:
        """The runtime whose measured forms are written; "" are single nodes, which the ops of ``--fuse portable`` are
        joined of."""
        if self.runtime == "any" and self.fuse == "portable":
            return ""
        return self.runtime


@dataclass(eq=False)
class LedgerEntry:
    """What is told of one norm, and the steps that made it so."""

    finding: Finding
    steps: list[RewriteStep] = field(default_factory=list)


@dataclass(frozen=True)
class _PlannedTrial:
    """A run of onnxruntime, and what it says something of.

    Args:
        for_speed: what is told where a rewrite that is made for speed alone costs accuracy; None of others.
    """

    entry: LedgerEntry
    step: RewriteStep
    for_speed: Finding | None


class RewriteLedger:
    """The entries of one graph, in the order in which they were met."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        # What was computed once, activations, attentions, linear layers: rewrites that are no norm's.
        self.non_norm_entries: list[LedgerEntry] = []
        # Steps whose result onnxruntime can't run, or not well enough, and what is told of them.
        self.gross: dict[RewriteStep, Finding] = {}
        self._kinds: dict[object, list[LedgerEntry]] = {}
        # Trials that are not run yet, and the verdicts of the others.
        self._waiting: list[tuple[_PlannedTrial, RoundingTrial]] = []
        self._judged: list[tuple[_PlannedTrial, TrialOutcome]] = []
        self._behind: dict[str, Sequence[LedgerEntry]] = {}
        self._by_tensor: dict[str, LedgerEntry] = {}
        self._indexed = 0

    @property
    def findings(self) -> list[Finding]:
        """What is told, in order."""
        return [entry.finding for entry in self.entries]

    def entry_of(self, tensor: str) -> LedgerEntry | None:
        """The first entry of a tensor, by the name that it had when it was first asked for."""
        for entry in self.entries[self._indexed :]:
            self._by_tensor.setdefault(entry.finding.tensor, entry)
        self._indexed = len(self.entries)
        return self._by_tensor.get(tensor)

    def entries_behind(self, tensor: str) -> Sequence[LedgerEntry]:
        """The entries of the norms that one rewrite made ``tensor`` of; none of other tensors."""
        return self._behind.get(tensor, ())

    def revise_findings(
        self, tensor: str, entries: Sequence[LedgerEntry], step: RewriteStep, change: Callable[[Finding], Finding]
    ) -> None:
        """Tell of ``entries`` what a rewrite that makes ``tensor`` changes in them."""
        for entry in entries:
            entry.finding = change(entry.finding)
            entry.steps.append(step)
        self._behind[tensor] = entries

    def has_same_finding(self, finding: Finding) -> bool:
        """Whether the same was said of the same norm: one may hold two roots (‖x‖₂ and the root of its square)."""
        entry = self.entry_of(finding.tensor)
        return entry is not None and finding.status in ("undone", "refused") and entry.finding == finding

    def steps_taken(self) -> list[tuple[RewriteStep, Finding]]:
        """Every step that changed the graph, with what is told of it."""
        made = [entry for entry in self.entries if entry.finding.status in MADE]
        return [(step, entry.finding) for entry in (*made, *self.non_norm_entries) for step in entry.steps]

    # ------------------------------------------------------------------ what onnxruntime makes of both sides

    def is_one_of_many(self, kind: object, entry: LedgerEntry) -> bool:
        """Count ``entry`` to the norms of its kind, and return whether enough of these are run already."""
        likes = self._kinds.setdefault(kind, [])
        likes.append(entry)
        return len(likes) > rounding_verdicts.OF_A_KIND

    @property
    def pending_trial_count(self) -> int:
        """The number of trials that are not run yet."""
        return len(self._waiting)

    @property
    def verdict_count(self) -> int:
        """The number of those that are."""
        return len(self._judged)

    @property
    def waiting_bytes(self) -> int:
        """The bytes that are held for trials until they are run."""
        return sum(trial.nbytes for _, trial in self._waiting)

    def plan_trial(
        self, entry: LedgerEntry, step: RewriteStep, trial: RoundingTrial, for_speed: Finding | None
    ) -> None:
        """Let a trial be run by and by."""
        self._waiting.append((_PlannedTrial(entry, step, for_speed), trial))

    def run_trials(self) -> None:
        """Let onnxruntime run the trials at hand, and keep of them the verdicts alone."""
        verdicts = rounding_verdicts.run_trials([trial for _, trial in self._waiting])
        self._judged += [(planned, v) for (planned, _), v in zip(self._waiting, verdicts, strict=True)]
        if self._waiting:
            self._waiting.clear()
            trim_heap()

    def apply_verdicts(self, runtime: str, *, decides: bool) -> None:
        """Complete the certificates by the verdicts, and note what turns out to be gross.

        Args:
            runtime: the one asked for.
            decides: whether a gross verdict takes a rewrite back: not where another runtime is asked for.
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
        """Tell of norms that were not run what was seen of those of their kind."""
        ran = likes[: rounding_verdicts.OF_A_KIND]
        others = likes[rounding_verdicts.OF_A_KIND :]
        bad = next((self.gross[step] for entry in ran for step in entry.steps if step in self.gross), None)
        for entry in others:
            entry.finding = rounding_verdicts.copy_verdict(entry.finding, likes[0].finding)
            if bad is not None:
                why = f"{bad.reason} (seen of {bad.tensor!r}, which differs in gamma and beta only)"
                self.gross |= {step: undone_finding(entry.finding, why) for step in entry.steps}


def undone_finding(finding: Finding, reason: str) -> Finding:
    """What is told of a rewrite that was made and proved and is taken back."""
    return replace(
        finding, status="undone", became="", reason=f"it was taken back: {reason}", nodes_left=None, written=()
    )


def _with_verdict(finding: Finding, verdict: TrialOutcome, runtime: str) -> Finding:
    """What is told of a norm of which onnxruntime ran both sides."""
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
        if better and runtime not in ONNXRUNTIME:
            hint = "; --runtime onnxruntime writes another form"
        else:
            hint = ""
        notes = (*notes, reason + hint)
    return replace(finding, certificate=certificate, notes=notes, proved=proved)
