"""Evaluate If, Loop and Scan as ONNX specifies them. The caller provides the function that runs a body.

A body is a graph in an attribute of such a node. A body may read tensors of the graph around it. If a separate model is
made of the body, these tensors are inputs of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..evaluate.evaluator_core import Array, UnsupportedOp, optional_input
from ..storage.proto_traversal import attribute_graphs

OPS = frozenset({"If", "Loop", "Scan"})
# First opset in which Scan has its current form.
_SCAN_SINCE = 9
# Maximum number of iterations of a Loop. More iterations take too long, because each iteration makes one numpy call per
# node.
_MOST_ROUNDS = 100_000

# Maximum number of iterations of a Loop that replaces a node of the file as a trial. Such a Loop may never end.
MOST_TRIED = 64

# (attribute name, inputs in order) -> outputs of the body in order.
RunBody = Callable[[str, Sequence[Any]], Sequence[Any]]


def body_graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Return the graph in the attribute ``name`` of a node."""
    graph: onnx.GraphProto = next(a.g for a in node.attribute if a.name == name)
    return graph


def body_model(node: onnx.NodeProto, name: str, around: onnx.ModelProto, types: Mapping[str, Any]) -> onnx.ModelProto:
    """Make a separate model of a body. The model's inputs are the body's own inputs, then the tensors that the body
    captures.

    Args:
        around: the model that contains the node, for its opsets and functions.
        types: known dtypes of the tensors around the body. Tensors that are missing here count as float32.

    Returns:
        The body's model; captured inputs have a dtype and no shape.
    """
    model = onnx.ModelProto(ir_version=around.ir_version, opset_import=around.opset_import, functions=around.functions)
    model.graph.CopyFrom(body_graph(node, name))
    model.graph.name = model.graph.name or name
    for seen in names_captured_by(node, name):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(types.get(seen, np.float32)))
        model.graph.input.append(onnx.helper.make_tensor_value_info(seen, kind, None))
    return model


def names_captured_by(node: onnx.NodeProto, name: str) -> list[str]:
    """List the tensors that a body reads from the graphs around it, including tensors that nested bodies read.

    Returns:
        Sorted names.
    """
    return sorted(_free_names(body_graph(node, name)))


def _free_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names that a graph reads but does not compute."""
    read = {v.name for v in graph.output}
    made = {v.name for v in (*graph.input, *graph.initializer)}
    for node in graph.node:
        read.update(node.input)
        # A name that a nested body reads may be computed inside that body, so each nested body is searched separately.
        for body in (g for a in node.attribute for g in attribute_graphs(a)):
            read |= _free_names(body)
        made.update(node.output)
    return read - made - {""}


class TooManyIterations(Exception):
    """Raised if a Loop does not end within its allowed number of iterations."""


def run_control_flow(
    node: onnx.NodeProto, inputs: Sequence[Any], opset: int, run: RunBody, most: int = _MOST_ROUNDS
) -> list[Any]:
    """Compute the outputs of an If, Loop or Scan.

    Args:
        run: function that runs the body in the attribute of a given name.
        most: maximum number of iterations of a Loop.

    Returns:
        The node's outputs, in order.

    Raises:
        UnsupportedOp: a Scan has the form of opset 8, no iterations, or too many iterations; or a Loop collects outputs
            but makes no iteration.
        TooManyIterations: a Loop takes more than ``most`` iterations.
    """
    if node.op_type == "If":
        return list(run("then_branch" if bool(np.asarray(inputs[0]).all()) else "else_branch", []))
    if node.op_type == "Loop":
        return _run_loop(node, inputs, run, most)
    return _run_scan(node, inputs, opset, run)


def _run_loop(node: onnx.NodeProto, inputs: Sequence[Any], run: RunBody, most: int) -> list[Any]:
    trips = optional_input(inputs, 0)
    goes_on = optional_input(inputs, 1)
    state = list(inputs[2:])
    condition = np.asarray(True if goes_on is None else bool(np.asarray(goes_on).all()))
    collected: list[list[Array]] = [[] for _ in range(len(body_graph(node, "body").output) - 1 - len(state))]
    rounds = 0
    while condition.all() and (trips is None or rounds < int(np.asarray(trips).reshape(()))):
        if rounds >= most:
            raise TooManyIterations(f"{node.op_type} {node.name!r} runs more than {most:,} iterations")
        made = list(run("body", [np.asarray(rounds, np.int64), condition, *state]))
        condition = np.asarray(made[0])
        state = made[1 : 1 + len(state)]
        for values, value in zip(collected, made[1 + len(state) :], strict=True):
            values.append(value)
        rounds += 1
    if not rounds and collected:
        raise UnsupportedOp("Loop without iterations, whose collected outputs have no shape")
    return [*state, *(np.stack(values) for values in collected)]


def _run_scan(node: onnx.NodeProto, inputs: Sequence[Any], opset: int, run: RunBody) -> list[Any]:
    if opset < _SCAN_SINCE:
        raise UnsupportedOp("Scan of opset 8")
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name != "body"}
    scanned = int(attrs["num_scan_inputs"])
    state = list(inputs[: len(inputs) - scanned])
    sequences = list(inputs[len(inputs) - scanned :])
    axes = attrs.get("scan_input_axes", [0] * scanned)
    backward = attrs.get("scan_input_directions", [0] * scanned)
    sequences = [
        np.moveaxis(s, axis, 0)[:: -1 if back else 1] for s, axis, back in zip(sequences, axes, backward, strict=True)
    ]
    length = len(sequences[0])
    if not length or length > _MOST_ROUNDS:
        raise UnsupportedOp(f"Scan with {length:,} iterations")
    collected: list[list[Array]] = [[] for _ in range(len(node.output) - len(state))]
    for place in range(length):
        made = list(run("body", [*state, *(s[place] for s in sequences)]))
        state = made[: len(state)]
        for values, value in zip(collected, made[len(state) :], strict=False):
            values.append(value)
    out_axes = attrs.get("scan_output_axes", [0] * len(collected))
    out_backward = attrs.get("scan_output_directions", [0] * len(collected))
    stacked = [
        np.moveaxis(np.stack(values[:: -1 if back else 1]), 0, axis)
        for values, axis, back in zip(collected, out_axes, out_backward, strict=False)
    ]
    return [*state, *stacked]
