"""Find norms that are still decomposed.

The search looks for a root after a reduction. It does not use normdeploy's recognition.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

_REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceSumSquare", "GlobalAveragePool"}
_LOCAL = {
    *(
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Neg",
        "Abs",
        "Cast",
        "Identity",
        "Max",
        "Clip",
        "Relu",
        "Sum",
        "Sqrt",
        "Reciprocal",
    ),
    *("Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose"),
}
# Maximum number of nodes that are visited above a root. An unbiased variance over a dynamic size has about eight nodes
# between the mean and the root.
_STEPS = 12


def decomposed(proto: onnx.ModelProto) -> list[str]:
    """Find the roots (Sqrt, Pow by ±1/2, ReduceL2) of a mean or a sum.

    Returns:
        names of their outputs.
    """
    graph = proto.graph
    made = {name: node for node in graph.node for name in node.output if name}
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return [n.output[0] for n in graph.node if _is_root(n, constants) and _takes_a_mean(n, made)]


def _is_root(node: onnx.NodeProto, constants: dict[str, np.ndarray]) -> bool:
    if node.op_type == "Pow":
        power = constants.get(node.input[1])
        return power is not None and power.size == 1 and abs(power.item()) == 0.5
    return node.op_type in ("Sqrt", "ReduceL2")


def _takes_a_mean(root: onnx.NodeProto, made: dict[str, onnx.NodeProto]) -> bool:
    if root.op_type == "ReduceL2":
        return True
    stack, seen = [root.input[0]], set()
    while stack and len(seen) < _STEPS:
        node = made.get(stack.pop())
        if node is None or id(node) in seen:
            continue
        if node.op_type in _REDUCTIONS:
            return True
        seen.add(id(node))
        if node.op_type in _LOCAL:
            stack.extend(node.input)
    return False
