"""Check whether a merge of branches hides a NaN.

A merge replaces the sum of two branches by one convolution. On an infinite input, the sum may give (+Inf) + (−Inf) =
NaN, but the merged convolution gives an infinity. A NaN and an infinity count as the same until an op turns the
infinity into a number: Relu(NaN) is NaN, and Relu(−Inf) is 0. So the ops after the sum are followed to the results of
the graph. Three statements about the elements that were NaN before the merge are tracked:

    every   each of these elements is NaN or infinite after the merge
    some    at each position, at least one channel of these elements is NaN or infinite
    plus    at each such position, at least one of these channels is NaN or +Inf

A convolution of all channels (one group) turns ``some`` into ``every``: each output reads an element that is not
finite, and 0·Inf is NaN. The convolution keeps ``plus`` if every input, at every tap, has a positive weight for some
output. This output is +Inf, or NaN because of its other inputs. After a Relu, only ``plus`` still holds. At a result of
the graph, ``every`` has to hold.

After the merged convolution, ``every`` holds. ``plus`` holds too if every input, at every tap, has a positive weight
for one output and a negative weight for another. In a depthwise convolution, only one output reads each input, so a
Relu after it hides the infinities of one sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..norms.norm_table import STANDARD, StatisticsKind
from ..recognition.anchors import VIEWS
from ..storage.onnx_domains import is_standard
from .constant_linear import constant_linear_of

# Maximum number of tensors that are followed after a sum
_FARTHEST = 512
# These ops turn −Inf into a number and keep +Inf and NaN.
_ONE_SIDED = {"Relu", "Elu", "Selu", "Celu", "Softplus"}
# These ops turn −Inf into NaN or an infinity.
_KEEPING = {"Identity", "LeakyRelu", "Gelu", "HardSwish", "Mish", "Swish", "Abs"}
# Norms that subtract the mean. If one element of a row is not finite, the mean is not finite either, and the whole row
# becomes NaN. Only ops with a scale input are listed, because no other norm follows a merge.
_CENTERED = {
    op for op, row in STANDARD.items() if row.statistics is StatisticsKind.INPUT and row.centered and row.has_scale
}
_SUMS = {"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"}
# The results of these ops are never negative.
_GATES = {"Sigmoid", "HardSigmoid", "Softmax", "Relu", "Exp"}


@dataclass(frozen=True)
class _Visibility:
    """Statements about the elements that were NaN, as defined by the module's docstring; false if none holds."""

    every: bool = False
    some: bool = False
    plus: bool = False

    def __bool__(self) -> bool:
        return self.every or self.some


def find_hiding_op(graph: Graph, y: gs.Tensor, weight: np.ndarray, groups: int) -> gs.Node | None:
    """Find the op after ``y`` that may hide a NaN that a merge has turned into an infinity.

    Args:
        y: the sum of the branches.
        weight: weight of the merged convolution, (outputs, inputs per group, *kernel).
        groups: number of groups of the merged convolution.

    Returns:
        the op, or None if each such NaN reaches the results.
    """
    by_group = weight.reshape(groups, weight.shape[0] // groups, -1)
    both = bool(((by_group > 0).any(axis=1) & (by_group < 0).any(axis=1)).all())
    known: dict[int, _Visibility] = {id(y): _Visibility(True, True, both)}
    stack = [y]
    while stack:
        t = stack.pop()
        if len(known) > _FARTHEST:
            return graph.producer(t)
        for reader in graph.all_consumers_of(t):
            if reader.op in ("Shape", "Size"):
                continue
            if reader.op in _GATES and _is_self_gating(graph, reader, t):
                # x·sigmoid(x) is not finite if x is not.
                continue
            shown = _visibility_behind(graph, reader, t, known[id(t)])
            if not shown:
                return reader
            for out in reader.outputs:
                if graph.is_output(out) and not shown.every:
                    return reader
                if id(out) not in known:
                    known[id(out)] = shown
                    stack.append(out)
    return None


def _is_self_gating(graph: Graph, gate: gs.Node, t: gs.Tensor) -> bool:
    """Return True if the result of ``gate`` is read only by products with ``t``."""
    out = gate.outputs[0]
    readers = graph.all_consumers_of(out)
    return not graph.is_output(out) and all(r.op == "Mul" and any(i is t for i in r.inputs) for r in readers)


def _visibility_behind(graph: Graph, node: gs.Node, t: gs.Tensor, before: _Visibility) -> _Visibility:
    """Return the statements that hold for the results of ``node``, which reads ``t``."""
    if not is_standard(node):
        return _Visibility()
    linear = _linear_facts(graph, node)
    if linear is not None and linear.data is t:
        mixes = linear.groups == 1 and (node.op in ("Conv", "ConvTranspose") or len(graph.shape(t) or ()) == 2)
        # The op does not mix all channels.
        if not mixes:
            return _Visibility(before.every, before.every, False)
        return _Visibility(True, True, before.plus and linear.raises)
    if node.op in _ONE_SIDED:
        return _Visibility(False, before.plus, before.plus)
    if node.op in _KEEPING:
        return before
    if node.op in _CENTERED and node.inputs[0] is t:
        return _Visibility(before.every, before.every, before.every)
    return _visibility_of_moves(graph, node, t, before)


@dataclass(frozen=True)
class _LinearFacts:
    """Facts about a linear op.

    Attributes:
        raises: True if every input, at every tap, has a positive weight for some output.
    """

    data: gs.Tensor
    groups: int
    raises: bool


def _linear_facts(graph: Graph, node: gs.Node) -> _LinearFacts | None:
    """Compute the facts of a linear op once. Many merges follow the same ops."""
    key = ("infinities", id(node))
    if key not in graph.memo:
        linear = constant_linear_of(graph, node)
        if isinstance(linear, Refusal):
            graph.memo[key] = None
        else:
            first = node.op == "Conv" or linear.is_transposed or linear.weight == 0
            if first:
                outputs = 0
            elif node.op == "ConvTranspose":
                outputs = 1
            else:
                outputs = -1
            graph.memo[key] = _LinearFacts(
                linear.data_input, linear.groups, bool((linear.w > 0).any(axis=outputs).all())
            )
    known = graph.memo[key]
    assert known is None or isinstance(known, _LinearFacts)
    return known


def _visibility_of_moves(graph: Graph, node: gs.Node, t: gs.Tensor, before: _Visibility) -> _Visibility:
    """Return the statements that hold after a sum, product, pool or view."""
    if node.op in ("Add", "Concat") or (node.op == "Sub" and node.inputs[0] is t) or node.op in _SUMS:
        return before
    if node.op in ("Neg", "Sub"):
        return replace(before, plus=False)
    if node.op == "Mul":
        factors = [graph.producer(i) for i in node.inputs if i is not t]
        if all(f is not None and f.op in _GATES for f in factors):
            return before
        return replace(before, plus=False)
    if node.op == "MaxPool":
        return _Visibility(False, before.plus, before.plus)
    if node.op in VIEWS:
        shape = graph.shape(t)
        # If all spatial axes have size 1, a view cannot separate the channels of one position.
        one_place = shape is not None and all(d == 1 for d in shape[2:])
        if one_place:
            return before
        return _Visibility(before.every, before.every, False)
    if node.op == "Split":
        return _Visibility(before.every, before.every, False)
    return _Visibility()
