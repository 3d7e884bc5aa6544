"""Records of the outcome of each norm, from the passes to the report.

``Finding`` is one line of the report; ``Certificate`` is the proof of a rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from .rendering import Renderable, ShortRepr, make_printable

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["fused", "folded", "kept", "refused", "undone"]
# The word that every verb shows for a status.
STATUS_WORDS: dict[Status, str] = {
    "fused": "fused",
    "folded": "folded",
    "kept": "kept",
    "refused": "skipped",
    "undone": "skipped",
}
Verdict = Literal["kernel", "function", "layers", "missing", "unknown"]


@dataclass(frozen=True, repr=False)
class Certificate(ShortRepr):
    """Evidence for one rewrite (docs/certificates.md).

    ``identity`` decides. Method "exact": the subgraph before and the nodes after compute the same function for every
    input and size. This is shown at ``cases`` points of a finite field, and is wrong with a probability of at most
    2^-``bits``. Method "float64": both were evaluated in float64 by the ops' specifications, and agree within ``bound``
    (relative) on every input of a test set.

    ``rounding_*`` inform: errors of onnxruntime against float64, before and after, in the model's own type. They decide
    only if they are gross (`rewriting.rounding_verdicts`).

    Attributes:
        error: worst relative difference in float64.
        cases: number of inputs or points evaluated.
        worst: name of the worst input of the test set.
        rounding_before: largest absolute error of the original nodes in onnxruntime; None if it was not run.
        note: why the proof failed, or why onnxruntime could not run the nodes.
        degree: of the identity, in elements of tensors. It was shown at one more point of each axis, and so holds for
            every size.
        gains: an infinite input gives NaN instead of a number; a NaN or Inf is never hidden.
        why: kind of a failure, a name of `normdeploy.proof.proof_errors.ProofFailure`.
        culprit: tensor that shows the failure.
    """

    identity: bool
    error: float
    bound: float
    cases: int
    worst: str
    rounding_before: float | None = None
    rounding_after: float | None = None
    rounding_bound: float | None = None
    note: str = ""
    method: Literal["exact", "float64"] = "float64"
    bits: int = 0
    degree: int = 0
    gains: bool = False
    why: str = ""
    culprit: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        verdict = "proved" if self.identity else "NOT proved"
        if self.method == "exact":
            how = f"exact, {self.cases} points, error 2^-{self.bits}"
        else:
            how = f"float64, error {self.error:.1g} of {self.bound:.1g} allowed, {self.cases} inputs"
        checked = {True: "; checked in onnxruntime", False: "; inaccurate in onnxruntime", None: ""}[
            self.is_rounding_ok
        ]
        return f"{verdict}, {how}{checked}{f'; {self.note}' if self.note else ''}"

    @property
    def is_rounding_ok(self) -> bool | None:
        """Check if the new form is accurate enough in onnxruntime.

        Returns:
            true or false; None if it was not run.
        """
        if self.rounding_after is None or self.rounding_bound is None:
            return None
        return self.rounding_after <= self.rounding_bound

    def __bool__(self) -> bool:
        return self.identity


def combine_certificates(first: Certificate | None, then: Certificate | None) -> Certificate | None:
    """Combine the certificates of two consecutive steps: the errors add up, and the rounding is that of the later step
    that was run.

    Returns:
        the combined certificate; one alone if the other is None.
    """
    if first is None or then is None:
        return first or then
    if then.rounding_after is None:
        ran = first
    else:
        ran = then
    if then.error >= first.error:
        worst = then.worst
    else:
        worst = first.worst
    method: Literal["exact", "float64"]
    if first.method == then.method == "exact":
        method = "exact"
    else:
        method = "float64"
    return replace(
        ran,
        error=first.error + then.error,
        bound=first.bound + then.bound,
        cases=first.cases + then.cases,
        worst=worst,
        method=method,
        bits=max(min(first.bits, then.bits) - 1, 0),
        degree=max(first.degree, then.degree),
        gains=first.gains or then.gains,
    )


@dataclass(frozen=True)
class FittingAttempt:
    """Reading of a norm that was tried and given up.

    Attributes:
        start: tensor at which the reading begins.
        end: tensor at which it ends.
        stage: "ends": not a function of one input. "values": values that no norm has. "form": a norm that no node can
            express.
        tensor: the culprit.
    """

    start: str
    end: str
    stage: Literal["ends", "values", "form"]
    reason: str
    tensor: str


@dataclass(frozen=True)
class NormParameter:
    """Gamma or beta of a norm, or scale or shift of an eval BatchNorm.

    Attributes:
        data: computed from an input of the model; else fixed by the file.
        axes: axes of the norm's input along which it varies; empty for one number.
        name: initializer or tensor with exactly these values.
        one_plus: the value is 1 + w (Gemma, DiT), and the file or the input holds w.
    """

    data: bool
    axes: tuple[int, ...]
    name: str = ""
    one_plus: bool = False


@dataclass(frozen=True)
class HalfConstants:
    """Values of a norm's constants after a conversion to a 16-bit type.

    Attributes:
        epsilon: as it would be stored; None if the norm's epsilon is unknown.
        vanishes: fate of a nonzero epsilon; GPUs may flush a subnormal one to zero.
        overflow: constants that become Inf: tensors, or attributes such as "LayerNormalization.epsilon".
    """

    dtype: Literal["float16", "bfloat16"]
    epsilon: float | None
    vanishes: Literal["", "subnormal", "zero"]
    overflow: tuple[str, ...]


@dataclass(frozen=True)
class RuntimeSupport:
    """Support of one runtime for a norm.

    Attributes:
        runtime: "onnxruntime 1.31.1 CPU", "TensorRT-RTX 1.7.1".
        form: "now" for the norm as in the file, "optimized" for the form that ``optimize`` writes.
        nodes: ops of that form.
        verdict: ``kernel`` (a kernel for each node), ``function`` (no kernel of the op itself: its body of primitives
            runs), ``layers`` (TensorRT's parser turns it into layers), ``missing`` (refused, see ``reason``),
            ``unknown`` (the runtime could not be asked, see ``reason``).
        parts: ops that onnxruntime runs after its own optimizations, or types of TensorRT's layers that process data.
    """

    runtime: str
    form: Literal["now", "optimized"]
    nodes: tuple[str, ...]
    verdict: Verdict
    parts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Finding(ShortRepr):
    """One normalization of the model and what became of it.

    Attributes:
        kind: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, BatchNorm, ...
        status: ``fused``: now one standard node. ``folded``: into a neighbor, or to one scale and shift. ``kept``:
            already the best form. ``refused``: unchanged, see ``reason``. ``undone``: its certificate failed, or it was
            reverted; unchanged.
        tensor: the norm's result; the culprit if refused.
        module: qualified module path; "" if the file does not record it.
        place: outside the main graph: "then_branch of If 'gate'", "function custom.Block".
        spelling: ops found, in the graph's order: "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul Add".
        remains: ops left of a folded norm: "BatchNormalization", "Mul Add" or "Add".
        became: "LayerNormalization(axis=-1, epsilon=1e-12)", "folded into Conv 'conv1'".
        reason: why the norm was kept, refused or undone.
        notes: "output depends on the batch", "onnxruntime's kernel is inaccurate here: ...".
        proved: kinds of evidence: "identity", "onnxruntime run", "TensorRT-RTX built", ...
        attempts: for kept and refused norms the readings tried, the outermost first.
        input: tensor that is normalized.
        shape: of the input, as the file states it.
        ddof: 0: the variance is a mean (biased). 1: divided by n - 1. None: unknown, or no variance (RMSNorm).
        epsilon_as_written: added to a variance of that ddof; ``epsilon`` is that of the equal biased norm.
        outside: epsilon is added to the root, not under it.
        gamma: as written for that ddof; None if there is none, or if it is unknown because the norm was refused.
        beta: the same.
        statistics: type of the reductions, "float16 and float32" if there are several; "constant" for BatchNorm.
        half: effect of a conversion to each 16-bit type on the norm's constants.
        tensors: outputs of the nodes found, shape arithmetic included.
        written: outputs of the nodes that replaced them.
        runtimes: support of each runtime; filled by ``inspect``.
    """

    kind: str
    status: Status
    tensor: str
    module: str = ""
    place: str = ""
    spelling: str = ""
    remains: str = ""
    became: str = ""
    reason: str = ""
    axes: tuple[int, ...] = ()
    epsilon: float | None = None
    dtype: str = ""
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None
    proved: tuple[str, ...] = ()
    attempts: tuple[FittingAttempt, ...] = ()
    input: str = ""
    shape: tuple[int | str | None, ...] | None = None
    ddof: int | None = None
    epsilon_as_written: float | None = None
    outside: bool = False
    gamma: NormParameter | None = None
    beta: NormParameter | None = None
    statistics: str = ""
    half: tuple[HalfConstants, ...] = ()
    tensors: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    # number of nodes that took the place of those in ``spelling``, without shape arithmetic; None if these stay
    nodes_left: int | None = None
    # filled by ``inspect``
    runtimes: tuple[RuntimeSupport, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        result = "; ".join(filter(None, (self.became, self.reason)))
        return f"{self.status}, {self.kind} {self.module or self.tensor!r}{f': {result}' if result else ''}"

    def count_nodes_before(self) -> int:
        """Count the nodes that spell the norm in the file that was read.

        Returns:
            number of ops in ``spelling``, without domains in parentheses.
        """
        return sum(not word.startswith("(") for word in self.spelling.split())

    def count_nodes_after(self) -> int:
        """Count the nodes of the norm in the file that was written.

        Returns:
            ``nodes_left``, or as many as before if the nodes stay.
        """
        return self.count_nodes_before() if self.nodes_left is None else self.nodes_left


@dataclass(frozen=True)
class ExplainedNode:
    """One node on the path through a norm.

    Attributes:
        tensor: output of the node.
        text: "ReduceMean(x, [-1])".
        mark: "the root", "the culprit".
    """

    tensor: str
    text: str
    mark: str = ""


@dataclass(frozen=True, repr=False)
class Explanation(ShortRepr):
    """Why something was fused or not (``--explain``)."""

    name: str
    finding: Finding | None
    start: str
    way: tuple[ExplainedNode, ...]
    said: tuple[str, ...]

    def summarize(self) -> str:
        """Return the main facts in one line."""
        found = self.finding.summarize() if self.finding is not None else "no norm found"
        return f"{self.name!r}: {found}; {len(self.way)} nodes from {self.start!r}"


@dataclass(frozen=True, repr=False)
class QuantizedLayer(ShortRepr):
    """Linear layer or convolution of a file, and the extent of its quantization.

    Values that do not apply, or differ from channel to channel, are "" or null.

    Attributes:
        tensor: result of the layer, which names it.
        op: Conv, ConvTranspose, Gemm, MatMul, MatMulInteger or ConvInteger.
        input: tensor that is quantized before the layer, or that it reads.
        status: "quantized" (weight and input), "weight" (alone), "activation" (the input alone) or "float".
        weight: type, for example "int8".
        granularity: of the weight's scales: "tensor", "384 channels", "blocks of 32".
        weight_symmetric: the weight's zero points are 0.
        activation: type, for example "uint8".
        dynamic: the input's scale is computed at run time.
        scale: of the input.
        zero_point: of the input.
        low: smallest input that the type can represent.
        high: largest input that the type can represent.
        place: outside the main graph, as in `Finding`.
    """

    tensor: str
    op: str
    module: str
    input: str
    status: Literal["quantized", "weight", "activation", "float"] = "float"
    weight: str = ""
    granularity: str = ""
    weight_symmetric: bool = True
    activation: str = ""
    dynamic: bool = False
    scale: float | None = None
    zero_point: int | None = None
    low: float | None = None
    high: float | None = None
    place: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        kinds = ", ".join(filter(None, (self.weight, self.activation)))
        return f"{self.status}, {self.op} {self.module or self.tensor!r}{f': {kinds}' if kinds else ''}"


@dataclass(frozen=True)
class DiagramBox:
    """Node in a diagram, or a tensor at its edge if ``op`` is "".

    Attributes:
        name: of the tensor at the edge.
        inputs: indices of earlier boxes.
        own: part of the norm; else a neighbor.
    """

    op: str
    name: str = ""
    inputs: tuple[int, ...] = ()
    own: bool = False


@dataclass(frozen=True, repr=False)
class NormDiagram(ShortRepr):
    """Graph around norms that look alike, as it is and as ``optimize`` would write it.

    Attributes:
        after: empty if the norms stay or are folded away.
    """

    kind: str
    module: str
    status: Status
    tensors: tuple[str, ...]
    before: tuple[DiagramBox, ...]
    after: tuple[DiagramBox, ...]

    def summarize(self) -> str:
        """Return the main facts in one line."""
        boxes = f"{len(self.before)} boxes before, {len(self.after)} after"
        return f"{self.kind} {self.module or self.tensors[0]!r}, {self.status}: {boxes}"


@dataclass(frozen=True)
class NodeCounts:
    """Number of nodes in the file that was read, and in the file that was written; as text: "10 → 1"."""

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before} → {self.after}"

    @classmethod
    def of_findings(cls, findings: Iterable[Finding]) -> Self:
        """Count the nodes that compute norms."""
        every = list(findings)
        return cls(sum(f.count_nodes_before() for f in every), sum(f.count_nodes_after() for f in every))


@dataclass(frozen=True, repr=False)
class Summary(Renderable):
    """Account of the passes for one graph.

    Attributes:
        seconds: stage -> seconds.
        pictures: filled by ``inspect``.
        layers: linear layers of a quantized file; filled by ``inspect``.
        notes: runtimes that ``inspect`` did not ask, and why.
        ops_before: op type -> number of nodes in the main graph.
        ops_after: the same after the rewrites.
    """

    findings: tuple[Finding, ...]
    nodes_before: int
    nodes_after: int
    opset: int
    seconds: dict[str, float] = field(default_factory=dict)
    explanations: tuple[Explanation, ...] = ()
    pictures: tuple[NormDiagram, ...] = ()
    layers: tuple[QuantizedLayer, ...] = ()
    notes: tuple[str, ...] = ()
    ops_before: dict[str, int] = field(default_factory=dict)
    ops_after: dict[str, int] = field(default_factory=dict)

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .norm_tables import describe_totals

        return describe_totals(self)

    @property
    def norm_nodes(self) -> NodeCounts:
        """Return how many nodes compute norms before and after."""
        return NodeCounts.of_findings(self.findings)

    def show(self, console: Console) -> None:
        """Print the norms and totals."""
        from .norm_tables import show_summary

        show_summary(console, make_printable(self))
