"""Replace an activation spelled in simple ops by its standard node.

The activations are GELU in both forms, SiLU, HardSwish, HardSigmoid, Tanh and Softsign.

**Match.** The normal form (`normdeploy.proof.pointwise_forms`) must equal that of the standard op's definition
(https://onnx.ai/onnx/operators), with the same exact coefficients. √½ and √(2/π) are irrational: a file's constant may
differ from them by a few roundings. If the op stores a coefficient in float32, the exact coefficient is rounded once.

**NaN and Inf.** The nodes before and after give NaN and Inf for the same inputs, including large, infinite and NaN
inputs. So e^x/(1 + e^x) is not replaced: it is NaN if e^x overflows.

**Accuracy.** onnxruntime runs the nodes before and after on inputs that cover the activation's range, and compares
their errors (`normdeploy.rewriting.activation_accuracy`).

**Availability.** The file's opset must have the op; otherwise the activation stays. onnxruntime's kernels of these ops
take at most the time of the nodes that they replace (`benchmarks.activations`). These activations are not replaced:

- Mish and Softplus, whose kernel takes five times as long as Exp, Add and Log.
- Swish, because onnxruntime already runs Sigmoid and Mul in one kernel for SiLU.
- Sigmoid alone. Its kernel returns 0 below about −18, but 1/(1 + e^−x) is positive there, and a later node may take the
  logarithm.

SiLU uses the same kernel, so it is 0 below about −18. The difference to x/(1 + e^−x) is at most 3e-7, as for every SiLU
that torch exports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.region import EvaluationFailed, Refusal, compile_region
from ..proof.pointwise_forms import ALGEBRA, ATOMS, ONE, PointwiseForm, RationalFunction, S, X, pointwise_form
from .activation_accuracy import is_activation_accurate
from .node_queries import is_standard_op, standard_producer
from .proposals import Proposal, RewriteTarget, propose_for_speed

STAGE = "activations"
# Maximum relative distance from an irrational number that the rounding of two or three float32 constants explains
_NEAR = Fraction(1, 2**22)
_HALF = Fraction(1, 2)
_SQRT_HALF = Fraction(math.sqrt(0.5))
_SQRT_2_PI = Fraction(math.sqrt(2 / math.pi))
_CUBIC = Fraction("0.044715")
# float32 represents numbers between this and its inverse with all digits
_LARGE = 2**64
_GATE = (X * (ONE + S)).scale(_HALF)
# Sigmoid of t and of −t, with s = e^t
_RISING, _FALLING = S * (ONE + S).inverse(), (ONE + S).inverse()
# Tanh of t/2
_TANH = (S + ONE.scale(Fraction(-1))) * _FALLING
# Ops that compute a whole activation; α and β come from the nodes around them
_CLAMPS = ("Clip", "Min", "HardSigmoid")
# Maximum number of candidates for x, and for y, per node
_UP, _DOWN = 8, 12
# Magnitude at which e^x and x³ overflow even in float64
_FAR = 1e200
_AT = (
    0.0,
    0.5,
    -0.5,
    1.0,
    -1.0,
    2.5,
    -2.5,
    4.0,
    -4.0,
    9.0,
    -9.0,
    800.0,
    -800.0,
    1e5,
    -1e5,
    _FAR,
    -_FAR,
    np.inf,
    -np.inf,
    np.nan,
)
# Maximum difference relative to max(|x|, 1), which the rounding of float32 constants explains
_BOUND = 1e-6


@dataclass(frozen=True)
class StandardActivation:
    """Standard op of an activation: op(times·x), multiplied by x if ``gated``.

    Attributes:
        op: type of the standard op.
        opset: lowest opset that has the op.
        attrs: attributes of the op.
        times: factor of x in the op's argument.
        gated: True if the result is multiplied by x.
    """

    op: str
    opset: int
    attrs: tuple[tuple[str, object], ...] = ()
    times: Fraction = Fraction(1)
    gated: bool = False

    @property
    def node_count(self) -> int:
        """Return the number of nodes."""
        return 1 + (self.times != 1) + self.gated


def standard_activation(form: PointwiseForm) -> StandardActivation | None:
    """Find the standard op whose definition has this normal form.

    Returns:
        the op; None if there is none.
    """
    find = {
        "Erf": _match_erf_gelu,
        "Tanh": _match_tanh_gelu,
        "Sigmoid": _match_sigmoid_gelu,
        "Exp": _match_exponential,
        "Abs": _match_softsign,
        "Clip": _match_hard_activation,
    }[form.atom]
    return find(form.argument, form.value)


def _match_erf_gelu(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match x/2·(1 + erf(x/√2))."""
    if argument.keys() != {1} or not _is_near(argument[1], _SQRT_HALF) or not value.is_same(_GATE):
        return None
    return StandardActivation("Gelu", 20)


def _match_tanh_gelu(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match x/2·(1 + tanh(√(2/π)(x + 0.044715x³)))."""
    if value.is_same(_GATE):
        return _match_cubic(argument, Fraction(1))
    return None


def _match_sigmoid_gelu(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match the tanh GELU in its sigmoid form: (1 + tanh(t))/2 = sigmoid(2t)."""
    if value.is_same(X * S):
        return _match_cubic(argument, Fraction(2))
    return None


def _match_cubic(argument: dict[int, Fraction], times: Fraction) -> StandardActivation | None:
    linear = times * _SQRT_2_PI
    if argument.keys() != {1, 3} or not _is_near(argument[1], linear) or not _is_near(argument[3], linear * _CUBIC):
        return None
    return StandardActivation("Gelu", 20, (("approximate", "tanh"),))


def _match_exponential(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match forms in s = e^(αx): x·sigmoid(αx) = x·s/(1 + s), and tanh(αx/2) = (s − 1)/(s + 1)."""
    # Most forms have no sum in the denominator; skip them early.
    if len(value.below) == 1:
        return None
    (alpha,) = argument.values()
    for sigmoid, sign in ((_RISING, 1), (_FALLING, -1)):
        if value.is_same(X * sigmoid):
            return StandardActivation("Sigmoid", 6, times=sign * alpha, gated=True)
        if value.is_same(_TANH.scale(Fraction(sign))):
            return StandardActivation("Tanh", 6, times=sign * alpha * _HALF)
    return None


def _match_softsign(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match x/(1 + |x|)."""
    if len(value.below) == 2 and value.is_same(X * _FALLING):
        return StandardActivation("Softsign", 1)
    return None


def _match_hard_activation(argument: dict[int, Fraction], value: RationalFunction) -> StandardActivation | None:
    """Match forms in s = αx + β clamped to 0 and 1: s, and x·s, which is HardSwish for α = 1/6 and β = 1/2."""
    alpha = argument.get(1, Fraction(0))
    beta = argument.get(0, Fraction(0))
    if argument.keys() - {0, 1} or not alpha:
        return None
    gated = value.is_same(X * S)
    if gated and _is_near(alpha, Fraction(1, 6)) and beta == _HALF:
        return StandardActivation("HardSwish", 14)
    if not (gated or value.is_same(S)) or not 1 / _LARGE < abs(alpha) < _LARGE or abs(beta) >= _LARGE:
        return None
    numbers = (("alpha", float(np.float32(float(alpha)))), ("beta", float(np.float32(float(beta)))))
    return StandardActivation("HardSigmoid", 6, numbers, gated=gated)


def _is_near(number: Fraction, wanted: Fraction) -> bool:
    return abs(number - wanted) <= _NEAR * abs(wanted)


# ------------------------------------------------------------------ the step


@dataclass(frozen=True)
class _ShorterActivation:
    """Nodes that may replace an activation, and the number of nodes that this saves."""

    saved: int
    y: gs.Tensor
    nodes: tuple[gs.Node, ...]
    op: str


def propose_activation(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | None:
    """Propose the standard node of the activation around ``node``.

    Returns:
        the proposal that saves most nodes; None if there is none.
    """
    if not is_standard_op(node, *ATOMS, *_CLAMPS) or graph.dtype(node.outputs[0]) != np.float32:
        return None
    best: _ShorterActivation | None = None
    for x, y, form in _candidate_forms(graph, node):
        node_form = standard_activation(form)
        if node_form is None or not _is_removable(graph, form, y) or graph.opset < node_form.opset:
            continue
        saved = len(form.nodes) - node_form.node_count
        if (
            saved > (best.saved if best else 0)
            and (nodes := _activation_nodes(graph, node_form, x, y)) is not None
            and _agrees_on_special_values(graph, x, y, nodes)
            and is_activation_accurate(graph, form, x, y, nodes)
        ):
            best = _ShorterActivation(saved, y, tuple(nodes), node_form.op)
    if best is None:
        return None
    return propose_for_speed("activation", best.y, best.nodes, best.op, graph.module(best.nodes[-1]))


def _candidate_forms(graph: Graph, node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Tensor, PointwiseForm]]:
    """Yield (x, y, y as a function of x) with ``node`` between x and y."""
    (s,) = node.outputs
    if node.op not in _CLAMPS and not _data_inputs(graph, s):
        return
    for x in _argument_candidates(graph, node):
        form = pointwise_form(graph, x, s)
        if form is None or not _is_promising(form):
            continue
        seen = {id(s)}
        queue = [s]
        # The loop appends to the queue.
        for y in queue:
            form = pointwise_form(graph, x, y)
            if form is None:
                continue
            yield x, y, form
            for t in _data_inputs(graph, y):
                if id(t) not in seen and len(seen) < _DOWN:
                    seen.add(id(t))
                    queue.append(t)


def _is_promising(form: PointwiseForm) -> bool:
    """Return True if the argument fits an activation. Most arguments do not, and this check is cheap."""
    powers = form.argument.keys()
    if form.atom == "Erf":
        return powers == {1}
    if form.atom in ("Tanh", "Sigmoid"):
        return powers == {1, 3}
    return powers <= {0, 1}


def _argument_candidates(graph: Graph, node: gs.Node) -> list[gs.Tensor]:
    """List the tensors of which the argument of ``node`` may be a function."""
    inner: dict[int, gs.Tensor] = {}
    queue = list(node.inputs[:2])
    while queue and len(inner) < _UP:
        t = queue.pop(0)
        if id(t) in inner or graph.is_constant(t):
            continue
        inner[id(t)] = t
        above = standard_producer(graph, t, *ALGEBRA, "Relu")
        if above is not None:
            queue += above.inputs
    return list(inner.values())


def _data_inputs(graph: Graph, t: gs.Tensor) -> list[gs.Tensor]:
    readers = graph.consumers(t)
    if len(readers) <= 2:
        return [n.outputs[0] for n in readers if is_standard_op(n, *ALGEBRA)]
    return []


def _is_removable(graph: Graph, form: PointwiseForm, y: gs.Tensor) -> bool:
    """Return True if nothing outside the form reads its inner tensors."""
    inside = {id(n) for n in form.nodes}
    between = [n.outputs[0] for n in form.nodes if n.outputs[0] is not y]
    return not any(
        graph.is_output(t) or any(id(reader) not in inside for reader in graph.all_consumers_of(t)) for t in between
    )


def _activation_nodes(graph: Graph, form: StandardActivation, x: gs.Tensor, y: gs.Tensor) -> list[gs.Node] | None:
    """Build the nodes; return None if float32 cannot represent a factor exactly."""
    nodes: list[gs.Node] = []
    if form.times == -1:
        nodes.append(graph.make_node("Neg", [x], y))
    elif form.times != 1:
        factor = np.float32(float(form.times))
        if Fraction(float(factor)) != form.times:
            return None
        nodes.append(
            graph.make_node("Mul", [x, graph.add_constant(f"{y.name}_factor", np.array(float(factor)), np.float32)], y)
        )
    if nodes:
        inner = nodes[-1].outputs[0]
    else:
        inner = x
    nodes.append(graph.make_node(form.op, [inner], y, dict(form.attrs)))
    if form.gated:
        nodes.append(graph.make_node("Mul", [x, nodes[-1].outputs[0]], y))
    return nodes


def _agrees_on_special_values(graph: Graph, x: gs.Tensor, y: gs.Tensor, nodes: list[gs.Node]) -> bool:
    """Return True if both sides are NaN, Inf or finite at the same inputs, and finite results agree in float64."""
    before = compile_region(graph, y, [x])
    after = Refusal("") if isinstance(before, Refusal) else compile_region(graph, nodes[-1].outputs[0], [x])
    if isinstance(before, Refusal) or isinstance(after, Refusal):
        return False
    at = np.array(_AT).reshape(-1, *(1,) * max(0, len(graph.shape(x) or ()) - 1))
    sizes = dict.fromkeys((*before.symbols, *after.symbols), 1)
    try:
        with np.errstate(all="ignore"):
            old = before.bind(sizes).run([at])
            new = after.bind(sizes).run([at])
    except EvaluationFailed:
        return False
    numbers = np.isfinite(old)
    if (
        old.shape != new.shape
        or (numbers != np.isfinite(new)).any()
        or not np.array_equal(np.isnan(old), np.isnan(new))
    ):
        return False
    differences = np.abs(old[numbers] - new[numbers]) / np.maximum(1.0, np.abs(at.reshape(old.shape)[numbers]))
    return bool((differences <= _BOUND).all())
