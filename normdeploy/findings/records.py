"""What became of each norm: the values that travel from the passes to the report.

``Finding`` is one line of the report; ``Certificate`` is the proof that stands behind a rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

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
    """What stands behind one rewrite (docs/certificates.md).

    ``identity`` decides. ``method`` "exact": the subgraph before and the nodes after are one function at every input
    and every size, shown at ``cases`` points of a finite field; the probability that they are not is 2^-``bits`` or
    less. "float64": both were evaluated in float64 by the ops' specifications, and agree within ``bound`` (relative) on
    every input of a battery. ``rounding_*`` inform: the errors against float64 of what onnxruntime makes of both in the
    model's own type, None where it was not run. They decide only where they are gross (`rewriting.rounding_verdicts`).
    """

    identity: bool
    # worst relative difference, float64
    error: float
    bound: float
    # inputs evaluated
    cases: int
    # the battery's name of the worst input
    worst: str
    # max abs error of the original nodes in onnxruntime
    rounding_before: float | None = None
    rounding_after: float | None = None
    rounding_bound: float | None = None
    # why it failed, or what onnxruntime could not run
    note: str = ""
    method: Literal["exact", "float64"] = "float64"
    bits: int = 0
    # of the identity, in elements of tensors: it was shown at one more point of each axis, and so holds for every size
    degree: int = 0
    # an infinite input gives NaN where it gave a number before; no NaN or Inf is ever hidden
    gains: bool = False
    # the kind of a failure: a name of `normdeploy.proof.proof_errors.ProofFailure`
    why: str = ""
    # the tensor that shows it
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
        """True where the new form is as accurate in onnxruntime as allowed; None where it was not run."""
        if self.rounding_after is None or self.rounding_bound is None:
            return None
        return self.rounding_after <= self.rounding_bound

    def __bool__(self) -> bool:
        return self.identity


def combine_certificates(first: Certificate | None, then: Certificate | None) -> Certificate | None:
    """The certificate of two steps, one behind the other: the errors add up. Of rounding the later step tells that was
    run."""
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
    """One reading of a norm that was tried and given up: from which tensor to which, how far it came, and what stopped
    it."""

    start: str
    end: str
    # no function of one input; not the values of a norm; a norm that no node can hold
    stage: Literal["ends", "values", "form"]
    reason: str
    # the culprit
    tensor: str


@dataclass(frozen=True)
class NormParameter:
    """Gamma or beta of a norm, or the scale and shift that an eval BatchNorm is."""

    # computed from an input of the model; else fixed by the file
    data: bool
    # of the norm's input, along which it varies; empty: one number
    axes: tuple[int, ...]
    # of the initializer or tensor that holds it as it is
    name: str = ""
    # 1 + w (Gemma, DiT): w is what the file or the input holds
    one_plus: bool = False


@dataclass(frozen=True)
class HalfConstants:
    """What a 16-bit type makes of the constants of a norm, should the model be converted to it."""

    dtype: Literal["float16", "bfloat16"]
    # as it would be stored; None where the norm's epsilon is not known
    epsilon: float | None
    # what has become of an epsilon that is not zero; subnormal: GPUs may flush it to zero
    vanishes: Literal["", "subnormal", "zero"]
    # constants that become Inf: tensors, or attributes such as "LayerNormalization.epsilon"
    overflow: tuple[str, ...]


@dataclass(frozen=True)
class RuntimeSupport:
    """What one runtime makes of a norm.

    ``verdict``: ``kernel`` (it has one for each node), ``function`` (no kernel of the op itself: its body of primitives
    is run), ``layers`` (TensorRT's parser makes these of it), ``missing`` (refused, see ``reason``), ``unknown`` (it
    could not be asked, see ``reason``).
    """

    # "onnxruntime 1.31.1 CPU", "TensorRT-RTX 1.7.1"
    runtime: str
    # the norm as the file has it, or as ``optimize`` writes it
    form: Literal["now", "optimized"]
    # ops of that form
    nodes: tuple[str, ...]
    verdict: Verdict
    # the ops that onnxruntime runs after its own optimizations; the types of TensorRT's layers that see data
    parts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Finding(ShortRepr):
    """One normalization of the model and what became of it.

    ``status``: ``fused`` (one standard node now), ``folded`` (into a neighbour, or one scale and shift), ``kept`` (was
    already the best form), ``refused`` (left as it was, see ``reason``), ``undone`` (its certificate failed, or it was
    taken back; left as it was).
    """

    # LayerNorm, RMSNorm, GroupNorm, InstanceNorm, BatchNorm, ...
    kind: str
    status: Status
    # name of the tensor that holds its result (of the culprit where refused)
    tensor: str
    # qualified module path, "" where the file does not tell
    module: str = ""
    # where it is not in the main graph: "then_branch of If 'gate'", "function custom.Block"
    place: str = ""
    # the ops found, in the graph's order: "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul Add"
    spelling: str = ""
    remains: str = (
        # of a norm that is folded: the ops that are left of it, "BatchNormalization" or "Mul Add" or "Add"
        ""
    )
    # "LayerNormalization(axis=-1, epsilon=1e-12)", "folded into Conv 'conv1'"
    became: str = ""
    # for kept, refused and undone: why
    reason: str = ""
    axes: tuple[int, ...] = ()
    epsilon: float | None = None
    dtype: str = ""
    # "output depends on the batch", "onnxruntime's kernel is inaccurate here: ..."
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None
    # where it was seen: "identity", "onnxruntime run", "TensorRT-RTX built", ...
    proved: tuple[str, ...] = ()
    # for kept and refused: what was tried, outermost reading first
    attempts: tuple[FittingAttempt, ...] = ()
    # the tensor that is normalized
    input: str = ""
    # of the input, as the file states it
    shape: tuple[int | str | None, ...] | None = None
    ddof: int | None = (
        # 0: the variance is a mean (biased); 1: divided by n - 1; None: not known, or no variance (RMSNorm)
        None
    )
    epsilon_as_written: float | None = (
        # as it stands beside a variance of that ddof; ``epsilon`` is that of the equal biased norm
        None
    )
    # epsilon is added to the root, not under it
    outside: bool = False
    # as written beside that ddof; None: none, or not known where refused
    gamma: NormParameter | None = None
    beta: NormParameter | None = None
    statistics: str = (
        # the type in which the reductions run, "float16 and float32" where several; "constant" for BatchNorm
        ""
    )
    half: tuple[HalfConstants, ...] = ()
    # the outputs of the nodes found, shape arithmetic included
    tensors: tuple[str, ...] = ()
    # the outputs of the nodes that took their place
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
    """One node on the way through a norm."""

    # what it makes
    tensor: str
    # "ReduceMean(x, [-1])"
    text: str
    # "the root", "the culprit"
    mark: str = ""


@dataclass(frozen=True, repr=False)
class Explanation(ShortRepr):
    """Why something was fused or not (``--explain``)."""

    # as asked for
    name: str
    # None where nothing was found there that looks like a norm
    finding: Finding | None
    # the tensor at which ``way`` begins
    start: str
    # the nodes found; where refused those of the reading that came farthest
    way: tuple[ExplainedNode, ...]
    # how far recognition came, and what else was tried
    said: tuple[str, ...]

    def summarize(self) -> str:
        """Return the main facts in one line."""
        found = self.finding.summarize() if self.finding is not None else "no norm found"
        return f"{self.name!r}: {found}; {len(self.way)} nodes from {self.start!r}"


@dataclass(frozen=True, repr=False)
class QuantizedLayer(ShortRepr):
    """A linear layer or convolution of a file, and how far it is quantized.

    ``status``: "quantized" (weight and input), "weight" (alone), "activation" (the input alone), "float". What does not
    apply, or differs from channel to channel, is "" or null.
    """

    # its result, by which it is named
    tensor: str
    # Conv, ConvTranspose, Gemm, MatMul, MatMulInteger, ConvInteger
    op: str
    module: str
    # the tensor that is quantized in front of it, or that it reads
    input: str
    status: Literal["quantized", "weight", "activation", "float"] = "float"
    weight: str = ""  # type: "int8"
    # of the weight's scales: "tensor", "384 channels", "blocks of 32"
    granularity: str = ""
    # its zero points are 0
    weight_symmetric: bool = True
    activation: str = ""  # type: "uint8"
    # the input's scale is computed when it runs
    dynamic: bool = False
    # of the input
    scale: float | None = None
    zero_point: int | None = None
    # the least and the largest input that the type can say
    low: float | None = None
    high: float | None = None
    # where it is not in the main graph, as of a finding
    place: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        kinds = ", ".join(filter(None, (self.weight, self.activation)))
        return f"{self.status}, {self.op} {self.module or self.tensor!r}{f': {kinds}' if kinds else ''}"


@dataclass(frozen=True)
class DiagramBox:
    """A node in a picture, or with an ``op`` of "" a tensor at its edge, which is named; ``inputs`` are places of boxes
    before it."""

    op: str
    name: str = ""
    inputs: tuple[int, ...] = ()
    # of the norm; else a neighbour
    own: bool = False


@dataclass(frozen=True, repr=False)
class NormDiagram(ShortRepr):
    """The graph around norms that look alike, as it stands and as ``optimize`` would write it (empty where it stays, or
    is folded away)."""

    kind: str
    # of the first
    module: str
    status: Status
    # of the findings
    tensors: tuple[str, ...]
    before: tuple[DiagramBox, ...]
    after: tuple[DiagramBox, ...]

    def summarize(self) -> str:
        """Return the main facts in one line."""
        boxes = f"{len(self.before)} boxes before, {len(self.after)} after"
        return f"{self.kind} {self.module or self.tensors[0]!r}, {self.status}: {boxes}"


@dataclass(frozen=True, repr=False)
class Summary(Renderable):
    """The passes' account of one graph."""

    findings: tuple[Finding, ...]
    nodes_before: int
    nodes_after: int
    opset: int
    # stage -> seconds
    seconds: dict[str, float] = field(default_factory=dict)
    explanations: tuple[Explanation, ...] = ()
    # of ``inspect``
    pictures: tuple[NormDiagram, ...] = ()
    # of ``inspect``, where the file is quantized: its linear layers
    layers: tuple[QuantizedLayer, ...] = ()
    # of ``inspect``: which runtimes were not asked, and why
    notes: tuple[str, ...] = ()
    # op type -> nodes of the main graph
    ops_before: dict[str, int] = field(default_factory=dict)
    ops_after: dict[str, int] = field(default_factory=dict)

    def summarize(self) -> str:
        """Return the main facts in one line."""
        from .norm_tables import describe_totals

        return describe_totals(self)

    @property
    def norm_nodes(self) -> tuple[int, int]:
        """Return how many nodes compute norms before and after."""
        before = sum(f.count_nodes_before() for f in self.findings)
        return before, sum(f.count_nodes_after() for f in self.findings)

    def show(self, console: Console) -> None:
        from .norm_tables import show_summary

        show_summary(console, make_printable(self))
