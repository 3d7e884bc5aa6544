"""What became of each norm: the values that travel from the passes to the report.

``Finding`` is one line of the report; ``Certificate`` is the proof that stands behind a rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .rendering import Renderable

Status = Literal["fused", "folded", "kept", "refused", "undone"]
Verdict = Literal["kernel", "function", "layers", "missing", "unknown"]


@dataclass(frozen=True)
class Certificate:
    """What stands behind one rewrite (docs/certificates.md).

    ``identity`` decides. ``method`` "exact": the subgraph before and the nodes after are one function at every input
    and every size, shown at ``cases`` points of a finite field; the probability that they are not is 2^-``bits`` or
    less. "float64": both were evaluated in float64 by the ops' specifications, and agree within ``bound`` (relative) on
    every input of a battery. ``rounding_*`` inform: the errors against float64 of what onnxruntime makes of both in the
    model's own type, None where it was not run. They decide only where they are gross (`rewriting.rounding`).
    """

    identity: bool
    error: float  # worst relative difference, float64
    bound: float
    cases: int  # inputs evaluated
    worst: str  # the battery's name of the worst input
    rounding_before: float | None = None  # max abs error of the original nodes in onnxruntime
    rounding_after: float | None = None
    rounding_bound: float | None = None
    note: str = ""  # why it failed, or what onnxruntime could not run
    method: Literal["exact", "float64"] = "float64"
    bits: int = 0
    # of the identity, in elements of tensors: it was shown at one more point of each axis, and so holds for every size
    degree: int = 0
    gains: bool = False  # an infinite input gives NaN where it gave a number before; no NaN or Inf is ever hidden
    why: str = ""  # the kind of a failure: a name of `normdeploy.proof.proof_errors.Why`
    culprit: str = ""  # the tensor that shows it

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
    ran = first if then.rounding_after is None else then
    worst = then.worst if then.error >= first.error else first.worst
    method: Literal["exact", "float64"] = "exact" if first.method == then.method == "exact" else "float64"
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
    stage: Literal[
        "ends", "values", "form"
    ]  # no function of one input; not the values of a norm; a norm that no node can hold
    reason: str
    tensor: str  # the culprit


@dataclass(frozen=True)
class NormParameter:
    """Gamma or beta of a norm, or the scale and shift that an eval BatchNorm is."""

    data: bool  # computed from an input of the model; else fixed by the file
    axes: tuple[int, ...]  # of the norm's input, along which it varies; empty: one number
    name: str = ""  # of the initializer or tensor that holds it as it is
    one_plus: bool = False  # 1 + w (Gemma, DiT): w is what the file or the input holds


@dataclass(frozen=True)
class HalfConstants:
    """What a 16-bit type makes of the constants of a norm, should the model be converted to it."""

    dtype: Literal["float16", "bfloat16"]
    epsilon: float | None  # as it would be stored; None where the norm's epsilon is not known
    vanishes: Literal[
        "", "subnormal", "zero"
    ]  # what has become of an epsilon that is not zero; subnormal: GPUs may flush it to zero
    overflow: tuple[str, ...]  # constants that become Inf: tensors, or attributes such as "LayerNormalization.epsilon"


@dataclass(frozen=True)
class RuntimeSupport:
    """What one runtime makes of a norm.

    ``verdict``: ``kernel`` (it has one for each node), ``function`` (no kernel of the op itself: its body of primitives
    is run), ``layers`` (TensorRT's parser makes these of it), ``missing`` (refused, see ``reason``), ``unknown`` (it
    could not be asked, see ``reason``).
    """

    runtime: str  # "onnxruntime 1.31.1 CPU", "TensorRT-RTX 1.7.1"
    form: Literal["now", "optimized"]  # the norm as the file has it, or as ``optimize`` writes it
    nodes: tuple[str, ...]  # ops of that form
    verdict: Verdict
    parts: tuple[
        str, ...
    ] = ()  # the ops that onnxruntime runs after its own optimizations; the types of TensorRT's layers that see data
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """One normalization of the model and what became of it.

    ``status``: ``fused`` (one standard node now), ``folded`` (into a neighbour, or one scale and shift), ``kept`` (was
    already the best form), ``refused`` (left as it was, see ``reason``), ``undone`` (its certificate failed, or it was
    taken back; left as it was).
    """

    kind: str  # LayerNorm, RMSNorm, GroupNorm, InstanceNorm, BatchNorm, ...
    status: Status
    tensor: str  # name of the tensor that holds its result (of the culprit where refused)
    module: str = ""  # qualified module path, "" where the file does not tell
    place: str = ""  # where it is not in the main graph: "then_branch of If 'gate'", "function custom.Block"
    spelling: str = ""  # the ops found, in the graph's order: "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul Add"
    remains: str = (
        ""  # of a norm that is folded: the ops that are left of it, "BatchNormalization" or "Mul Add" or "Add"
    )
    became: str = ""  # "LayerNormalization(axis=-1, epsilon=1e-12)", "folded into Conv 'conv1'"
    reason: str = ""  # for kept, refused and undone: why
    axes: tuple[int, ...] = ()
    epsilon: float | None = None
    dtype: str = ""
    notes: tuple[str, ...] = ()  # "output depends on the batch", "onnxruntime's kernel is inaccurate here: ..."
    certificate: Certificate | None = None
    proved: tuple[str, ...] = ()  # where it was seen: "identity", "onnxruntime run", "TensorRT-RTX built", ...
    attempts: tuple[FittingAttempt, ...] = ()  # for kept and refused: what was tried, outermost reading first
    input: str = ""  # the tensor that is normalized
    shape: tuple[int | str | None, ...] | None = None  # of the input, as the file states it
    ddof: int | None = (
        None  # 0: the variance is a mean (biased); 1: divided by n - 1; None: not known, or no variance (RMSNorm)
    )
    epsilon_as_written: float | None = (
        None  # as it stands beside a variance of that ddof; ``epsilon`` is that of the equal biased norm
    )
    outside: bool = False  # epsilon is added to the root, not under it
    gamma: NormParameter | None = None  # as written beside that ddof; None: none, or not known where refused
    beta: NormParameter | None = None
    statistics: str = (
        ""  # the type in which the reductions run, "float16 and float32" where several; "constant" for BatchNorm
    )
    half: tuple[HalfConstants, ...] = ()
    tensors: tuple[str, ...] = ()  # the outputs of the nodes found, shape arithmetic included
    written: tuple[str, ...] = ()  # the outputs of the nodes that took their place
    runtimes: tuple[RuntimeSupport, ...] = ()  # filled by ``inspect``


@dataclass(frozen=True)
class ExplainedNode:
    """One node on the way through a norm."""

    tensor: str  # what it makes
    text: str  # "ReduceMean(x, [-1])"
    mark: str = ""  # "the root", "the culprit"


@dataclass(frozen=True)
class Explanation:
    """Why something was fused or not (``--explain``)."""

    name: str  # as asked for
    finding: Finding | None  # None where nothing was found there that looks like a norm
    start: str  # the tensor at which ``way`` begins
    way: tuple[ExplainedNode, ...]  # the nodes found; where refused those of the reading that came farthest
    said: tuple[str, ...]  # how far recognition came, and what else was tried


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear layer or convolution of a file, and how far it is quantized.

    ``status``: "quantized" (weight and input), "weight" (alone), "activation" (the input alone), "float". What does not
    apply, or differs from channel to channel, is "" or null.
    """

    tensor: str  # its result, by which it is named
    op: str  # Conv, ConvTranspose, Gemm, MatMul, MatMulInteger, ConvInteger
    module: str
    input: str  # the tensor that is quantized in front of it, or that it reads
    status: Literal["quantized", "weight", "activation", "float"] = "float"
    weight: str = ""  # type: "int8"
    granularity: str = ""  # of the weight's scales: "tensor", "384 channels", "blocks of 32"
    weight_symmetric: bool = True  # its zero points are 0
    activation: str = ""  # type: "uint8"
    dynamic: bool = False  # the input's scale is computed when it runs
    scale: float | None = None  # of the input
    zero_point: int | None = None
    low: float | None = None  # the least and the largest input that the type can say
    high: float | None = None
    place: str = ""  # where it is not in the main graph, as of a finding


@dataclass(frozen=True)
class DiagramBox:
    """A node in a picture, or with an ``op`` of "" a tensor at its edge, which is named; ``inputs`` are places of boxes
    before it."""

    op: str
    name: str = ""
    inputs: tuple[int, ...] = ()
    own: bool = False  # of the norm; else a neighbour


@dataclass(frozen=True)
class NormDiagram:
    """The graph around norms that look alike, as it stands and as ``optimize`` would write it (empty where it stays, or
    is folded away)."""

    kind: str
    module: str  # of the first
    status: Status
    tensors: tuple[str, ...]  # of the findings
    before: tuple[DiagramBox, ...]
    after: tuple[DiagramBox, ...]


@dataclass(frozen=True)
class Summary(Renderable):
    """The passes' account of one graph."""

    findings: tuple[Finding, ...]
    nodes_before: int
    nodes_after: int
    opset: int
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    explanations: tuple[Explanation, ...] = ()
    pictures: tuple[NormDiagram, ...] = ()  # of ``inspect``
    layers: tuple[QuantizedLayer, ...] = ()  # of ``inspect``, where the file is quantized: its linear layers
    notes: tuple[str, ...] = ()  # of ``inspect``: which runtimes were not asked, and why
    ops_before: dict[str, int] = field(default_factory=dict)  # op type -> nodes of the main graph
    ops_after: dict[str, int] = field(default_factory=dict)
