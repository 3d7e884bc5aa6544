"""Compute logarithms, and the exponents of a softmax, as accurately as PyTorch's half-precision kernels do.

These kernels compute in float32 and round only the result. If the same functions are written as several half-precision
nodes, each intermediate result is rounded:

- log σ(x): σ(x) is 0 in float16 for x = −18, and even in float32 for x = −104. log σ(x) = −log(1 + e^−x) =
  −softplus(−x) avoids this, in float32.
- log softmax(x): softmax(x) may be 0 too. LogSoftmax is a single node, which never takes the logarithm of a number
  below 1.
- log1p(x): 1 + x loses the digits of x that are below the precision of 1. float32 loses fewer digits.
- softmax(c · x): PyTorch multiplies by a Python number c in float32 and rounds the product. A half-precision node
  rounds c itself to c(1 + δ). Then all results are off by the factor e^(δ·c·x). For c = 7.3 and logits of 100, this
  error is about ten times the error of one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..graphs.proto_queries import captured_names
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import unique_name
from .float32_reasons import MOVES
from .precision_view import PrecisionView
from .type_conversion import initializer_values

_OF_LOGITS = MOVES | {"Add", "Sub", "Mul", "Div", "Neg", "Tanh", "Min", "Max", "Clip"}


def fuse_logarithms(graph: onnx.GraphProto) -> None:
    """Write Log∘Sigmoid as −Softplus(−x) and Log∘Softmax as LogSoftmax, in place.

    If other nodes read the Sigmoid or Softmax, it stays in the graph as well.
    """
    made = {o: n for n in graph.node for o in n.output if o}
    taken = {t.name for t in (*graph.input, *graph.initializer)} | set(made)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _is_standard_op(node, "Log"):
            above = made.get(node.input[0])
        else:
            above = None
        new = []
        if above is not None and _is_standard_op(above, "Softmax"):
            new = [onnx.helper.make_node("LogSoftmax", above.input, node.output, name=node.name)]
            new[0].attribute.extend(above.attribute)
        elif above is not None and _is_standard_op(above, "Sigmoid"):
            inner = [unique_name(f"{node.output[0]}_{part}", taken) for part in ("negative", "softplus")]
            ends = [above.input[0], *inner, node.output[0]]
            steps = zip(("Neg", "Softplus", "Neg"), ends, ends[1:], strict=False)
            new = [
                onnx.helper.make_node(op, [a], [b], name=f"{node.name}_{b}" if node.name else "") for op, a, b in steps
            ]
        for part in new:
            part.metadata_props.extend(node.metadata_props)
        nodes += new or [node]
    if len(nodes) == len(graph.node) and all(a is b for a, b in zip(nodes, graph.node, strict=True)):
        return
    read = {name for n in nodes for name in (*n.input, *captured_names(n))} | {o.name for o in graph.output}
    kept = [n for n in nodes if not _is_standard_op(n, "Sigmoid", "Softmax") or not read.isdisjoint(n.output)]
    del graph.node[:]
    graph.node.extend(kept)


def find_logarithms(view: PrecisionView) -> Iterator[tuple[str, list[int]]]:
    """Find sequences of Neg, Softplus and Neg, and Logs of 1 + x.

    Yields:
        "log-sigmoid" or "log1p", and the indices of the nodes.
    """
    nodes = view.graph.node
    for i, node in enumerate(nodes):
        if _is_standard_op(node, "Softplus", "Log"):
            before = view.producer.get(node.input[0])
        else:
            before = None
        if before is None:
            continue
        after = list(view.reading_nodes(i))
        if (
            _is_standard_op(node, "Softplus")
            and len(after) == 1
            and all(_is_standard_op(nodes[j], "Neg") for j in (before, *after))
        ):
            yield "log-sigmoid", [before, i, *after]
        if (
            _is_standard_op(node, "Log")
            and _is_standard_op(nodes[before], "Add")
            and any(_constant_number(view, name) == 1 for name in nodes[before].input)
        ):
            yield "log1p", [before, i]


def find_inexact_logits(view: PrecisionView) -> dict[int, tuple[str, float]]:
    """Find the Muls and Divs by one number before a softmax, if rounding the number visibly changes the result.

    Returns:
        index of the node -> name of the number, and the largest logit seen.
    """
    # Index of a node -> largest product or quotient between this node and the softmax. Sums are ignored, because they
    # may contain a mask.
    largest: dict[int, float] = {}
    inexact: dict[int, tuple[str, float]] = {}
    for i in reversed(range(len(view.graph.node))):
        node = view.graph.node[i]
        ends = any(_is_standard_op(view.graph.node[j], "Softmax", "LogSoftmax") for j in view.reading_nodes(i))
        behind = [largest[j] for j in view.reading_nodes(i) if j in largest]
        if not _is_standard_op(node, *_OF_LOGITS) or not (ends or behind):
            continue
        if _is_standard_op(node, "Mul", "Div"):
            seen = view.ranges.get(node.output[0])
        else:
            seen = None
        largest[i] = max(0.0 if seen is None else seen.magnitude, *behind, 0.0)
        for name in node.input if seen is not None else ():
            factor = _constant_number(view, name)
            if (
                factor
                and abs(float(view.form.round_to_format(factor)) / factor - 1) * largest[i] > view.form.unit_roundoff
            ):
                # This error is larger than the rounding error of the softmax's result, which is unavoidable.
                inexact[i] = name, largest[i]
    return inexact


def _constant_number(view: PrecisionView, name: str) -> float | None:
    """Return the value of a floating constant of one element, otherwise None."""
    if name in view.floating_tensors:
        constant = view.constants.get(name)
    else:
        constant = None
    if constant is not None and initializer_values(constant).size == 1:
        return float(initializer_values(constant).item())
    return None


def _is_standard_op(node: onnx.NodeProto, *ops: str) -> bool:
    return node.op_type in ops and is_standard(node)
