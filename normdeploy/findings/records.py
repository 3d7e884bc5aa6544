"""Define the records of the results for each norm.

A ``Finding`` is the result for one norm, and one line of the report. A ``Certificate`` records the proof of a rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from .rendering import Renderable, ShortRepr, make_printable

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["fused", "folded", "kept", "refused", "undone"]
# Word that all verbs print for a status
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
    """Evidence for one rewrite (docs/explanation/certificates.md).

    ``identity`` decides whether the rewrite is made: True if the nodes before and after it compute the same function.
    Method "exact" shows this for every input and size, at ``cases`` points of a finite field. The probability that such
    a proof is wrong is at most 2^-``bits``. Method "float64" evaluates both in float64 by the ops' specifications.
    Their results agree within the relative error ``bound`` on every input of a test set.

    ``rounding_before`` and ``rounding_after`` are the errors of onnxruntime against float64, in the model's type. They
    are information only, unless the error is much larger than allowed (`normdeploy.rewriting.rounding_verdicts`).

    Attributes:
        error: largest relative difference in float64.
        cases: number of inputs or points that were evaluated.
        worst: name of the test input with the largest difference.
        rounding_before: largest absolute error of the original nodes in onnxruntime; None if they were not run.
        note: why the proof failed, or why onnxruntime could not run the nodes.
        degree: degree of the identity in the elements of tensors. Because enough points of each axis were tested for
            this degree, the identity holds for every size.
        gains: True if an infinite input gives NaN after the rewrite and a number before it. The reverse, a hidden NaN
            or Inf, is never allowed.
        why: kind of failure: the name of a `normdeploy.proof.proof_errors.ProofFailure`.
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
            True or False; None if the new form was not run.
        """
        if self.rounding_after is None or self.rounding_bound is None:
            return None
        return self.rounding_after <= self.rounding_bound

    def __bool__(self) -> bool:
        return self.identity


def combine_certificates(first: Certificate | None, then: Certificate | None) -> Certificate | None:
    """Combine the certificates of two consecutive steps.

    The errors add up. The rounding errors are taken from the last step that was run.

    Returns:
        the combined certificate. If one certificate is None, the other one.
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
    """Attempt to read the nodes between two tensors as a norm, with the reason why it failed.

    Attributes:
        start: tensor that was tried as the norm's input.
        end: tensor that was tried as the norm's output.
        stage: "ends": the nodes are not a function of one input. "values": their values are not the values of a norm.
            "form": no node can express the norm.
        tensor: tensor that shows the failure.
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
        data: True if the parameter is computed from an input of the model; False if it is a constant of the file.
        axes: axes of the norm's input along which the parameter varies; empty for a single number.
        name: initializer or tensor that contains exactly these values.
        one_plus: True if the parameter is computed as 1 + w (Gemma, DiT), where w is stored in the file or computed
            from an input.
    """

    data: bool
    axes: tuple[int, ...]
    name: str = ""
    one_plus: bool = False


@dataclass(frozen=True)
class HalfConstants:
    """Values of a norm's constants after a conversion to a 16-bit type.

    Attributes:
        epsilon: epsilon as the 16-bit type would store it; None if the norm's epsilon is unknown.
        vanishes: "zero" or "subnormal" if the type stores a nonzero epsilon as such a number; "" otherwise. GPUs may
            flush a subnormal number to zero.
        overflow: constants that become Inf: names of tensors, or of attributes such as "LayerNormalization.epsilon".
    """

    dtype: Literal["float16", "bfloat16"]
    epsilon: float | None
    vanishes: Literal["", "subnormal", "zero"]
    overflow: tuple[str, ...]


@dataclass(frozen=True)
class RuntimeSupport:
    """Support of one runtime for a norm.

    Attributes:
        runtime: name and version, such as "onnxruntime 1.31.1 CPU" or "TensorRT-RTX 1.7.1".
        form: "now" for the norm as in the file, "optimized" for the form that ``optimize`` writes.
        nodes: op types of the form.
        verdict: ``kernel``: the runtime has a kernel for each node. ``function``: it has no kernel for the op, and runs
            the op's function body. ``layers``: TensorRT's parser converts the nodes to layers. ``missing``: the runtime
            refuses them, see ``reason``. ``unknown``: the runtime could not be queried, see ``reason``.
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
    """One norm of the model, and the result for it.

    Attributes:
        kind: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, BatchNorm, ...
        status: ``fused``: the norm is one node now. ``folded``: it was merged into a neighbor, or reduced to a scale
            and shift. ``kept``: it already has the best form. ``refused``: it is unchanged, see ``reason``. ``undone``:
            it is unchanged, because its proof failed or its rewrite was reverted.
        tensor: the norm's result. For a refused norm, the tensor that shows the reason.
        module: qualified module path; "" if the file does not record it.
        place: body or function that contains the norm, such as "then_branch of If 'gate'" or "function custom.Block";
            "" for the main graph.
        spelling: ops of the norm in the original file, in the graph's order, such as "ReduceMean Sub Mul ReduceMean Add
            Sqrt Div Mul Add".
        remains: ops that remain of a folded norm: "BatchNormalization", "Mul Add" or "Add"; "" for none.
        became: form after the rewrite, such as "LayerNormalization(axis=-1, epsilon=1e-12)" or "folded into Conv
            'conv1'".
        reason: why the norm was kept, refused or undone.
        notes: notes such as "output depends on the batch" or "onnxruntime's kernel is inaccurate here: ...".
        proved: kinds of evidence: "identity", "onnxruntime run", "TensorRT-RTX built", ...
        attempts: for kept and refused norms, the attempts that failed, outermost first.
        input: tensor that is normalized.
        shape: shape of the input, as the file states it.
        ddof: 0 if the variance is divided by n (biased), 1 if it is divided by n - 1. None if it is unknown, or for an
            RMSNorm, which has no variance.
        epsilon_as_written: epsilon that is added to the variance with this ddof. ``epsilon`` is the epsilon of the
            equal norm with ddof 0.
        outside: True if epsilon is added to the root instead of the radicand.
        gamma: gamma for this ddof. None if the norm has no gamma, or if it is unknown because the norm was refused.
        beta: beta for this ddof. None in the same cases as ``gamma``.
        statistics: type of the reductions, such as "float32", or "float16 and float32" for several types; "constant"
            for BatchNorm.
        half: the norm's constants after a conversion to each 16-bit type.
        tensors: outputs of the original nodes, including shape arithmetic.
        written: outputs of the nodes that replaced the original nodes.
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
    # Number of nodes that replaced the nodes in ``spelling``, without shape arithmetic; None if the nodes were not
    # replaced
    nodes_left: int | None = None
    # Set only by ``inspect``
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
            ``nodes_left``, or the number of nodes before if the nodes were not replaced.
        """
        return self.count_nodes_before() if self.nodes_left is None else self.nodes_left


@dataclass(frozen=True)
class ExplainedNode:
    """One node on the path through a norm.

    Attributes:
        tensor: output of the node.
        text: node as a call, such as "ReduceMean(x, [-1])".
        mark: role of the node, such as "the root" or "the culprit"; "" for most nodes.
    """

    tensor: str
    text: str
    mark: str = ""


@dataclass(frozen=True, repr=False)
class Explanation(ShortRepr):
    """Explanation why a norm was fused or not (``--explain``)."""

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
    """Linear layer or convolution of a file, with the details of its quantization.

    Values that do not apply, or that differ between channels, are "" or None.

    Attributes:
        tensor: result of the layer; identifies the layer.
        op: Conv, ConvTranspose, Gemm, MatMul, MatMulInteger or ConvInteger.
        input: tensor that is quantized before the layer. If no tensor is quantized, the tensor that the layer reads.
        status: "quantized" (weight and input), "weight" (only the weight), "activation" (only the input) or "float".
        weight: type of the weight, for example "int8".
        granularity: granularity of the weight's scales, such as "tensor", "384 channels" or "blocks of 32".
        weight_symmetric: True if the weight's zero points are 0.
        activation: type of the input, for example "uint8".
        dynamic: True if the input's scale is computed at run time.
        scale: scale of the input.
        zero_point: zero point of the input.
        low: smallest input that the type can represent.
        high: largest input that the type can represent.
        place: body or function that contains the layer, as in `Finding`.
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
    """Node in a diagram. If ``op`` is "", an input or output tensor at the edge of the diagram.

    Attributes:
        name: name of the tensor at the edge.
        inputs: indices of earlier boxes.
        own: True if the node is part of the norm; False if it is a neighbor.
    """

    op: str
    name: str = ""
    inputs: tuple[int, ...] = ()
    own: bool = False


@dataclass(frozen=True, repr=False)
class NormDiagram(ShortRepr):
    """Diagram of a group of similar norms: the nodes now, and the nodes that ``optimize`` would write.

    Attributes:
        after: boxes after the rewrite; empty if the norms stay or are folded away.
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
    """Result of the passes for one graph.

    Attributes:
        seconds: duration of each stage in seconds.
        pictures: diagrams of the norms; set only by ``inspect``.
        layers: linear layers of a quantized file; set only by ``inspect``.
        notes: notes, such as the runtimes that ``inspect`` could not query, and why.
        ops_before: number of nodes in the main graph, by op type.
        ops_after: number of nodes after the rewrites, by op type.
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
        """Return the number of nodes that compute norms, before and after the rewrites."""
        return NodeCounts.of_findings(self.findings)

    def show(self, console: Console) -> None:
        """Print the norms and totals."""
        from .norm_tables import show_summary

        show_summary(console, make_printable(self))
