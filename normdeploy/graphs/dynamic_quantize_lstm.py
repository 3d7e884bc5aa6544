"""Expand onnxruntime's DynamicQuantizeLSTM into its kernel's computation: a Scan over time with a quantized state.

onnxruntime quantizes all of X at once. At each step, it quantizes the state before it multiplies the state by R
(``ComputeGemm`` in onnxruntime/core/providers/cpu/rnn/rnn_helpers.cc). W is [directions, input, 4·hidden] and R is
[directions, hidden, 4·hidden], with the gates in the order i, o, f, c. Each direction has one scale, or one per column
(onnxruntime/contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc). Threads may split the batch. Each thread then
quantizes the states of its part of the batch, whose range lies inside the range of the whole batch. So the scale of
a thread is at most the scale of the whole batch, and half a step of the whole batch bounds its rounding errors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, parser

from ..storage.proto_traversal import attribute_values, iter_subgraphs

_INPUTS = ("X", "W", "R", "B", "lengths", "H", "C", "P", "W_scale", "W_zero", "R_scale", "R_zero")
_OF_WEIGHTS = ("W", "W_scale", "W_zero", "R", "R_scale", "R_zero")
_UNKNOWN = frozenset({"lengths", "P"})
_DIRECTIONS = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
_KNOWN = frozenset({"direction", "hidden_size", "activations", "input_forget"})
_USUAL = ("sigmoid", "tanh", "tanh")

_INPUT = """
    xq, xs, xz = DynamicQuantizeLinear (X)
    x = DequantizeLinear (xq, xs, xz)
"""
# Nodes of one direction, as text. "place" is the direction's index, "n" the hidden size. Y is [time, 1, batch, n]; Y_h
# and Y_c are [1, batch, n].
_WEIGHTS = """
    w = DequantizeLinear <axis: int = 1> (W, W_scale, W_zero)
    r = DequantizeLinear <axis: int = 1> (R, R_scale, R_zero)
    product = MatMul (x, w)
"""
_BIAS = """
    both = Gather <axis: int = 0> (B, place)
    wb = Slice (both, zero, n4, zero)
    rb = Slice (both, n4, n8, zero)
    bias = Add (wb, rb)
    gates = Add (product, bias)
"""
_GIVEN = "{state} = Gather <axis: int = 0> ({given}, place)"
_ZEROS = """
    {state}_sizes = Shape (X)
    {state}_batch = Slice ({state}_sizes, one, two, zero)
    {state}_shape = Concat <axis: int = 0> ({state}_batch, n)
    {state} = ConstantOfShape ({state}_shape)
"""
_STEPS = """
    h, c, y = Scan <num_scan_inputs: int = 1,
        scan_input_directions: ints = [{reverse}], scan_output_directions: ints = [{reverse}],
        body: graph = step (float h0, float c0, float g) => (float h1, float c1, float y1) {{
          hq, hs, hz = DynamicQuantizeLinear (h0)
          hr = DequantizeLinear (hq, hs, hz)
          p = MatMul (hr, r)
          a = Add (p, g)
          ai = Slice (a, zero, n, last)
          ao = Slice (a, n, n2, last)
          af = Slice (a, n2, n3, last)
          ac = Slice (a, n3, n4, last)
          i = Sigmoid (ai)
          o = Sigmoid (ao)
          f = Sigmoid (af)
          t = Tanh (ac)
          kept = Mul (f, c0)
          new = Mul (i, t)
          c1 = Add (kept, new)
          u = Tanh (c1)
          h1 = Mul (o, u)
          y1 = Identity (h1)
        }}
    > (start_h, start_c, gates)
    Y = Reshape (y, shape_y)
    Y_h = Reshape (h, shape_h)
    Y_c = Reshape (c, shape_h)
"""


def is_plain_form(node: onnx.NodeProto) -> bool:
    """Return whether a node has the plain form.

    Returns: False with lengths, peepholes, a clip, coupled gates or unusual activations.
    """
    given = {name for name, value in zip(_INPUTS, node.input, strict=False) if value}
    attributes = attribute_values(node)
    activations = [name.decode().lower() for name in attributes.get("activations", ())]
    if any(name != _USUAL[place % len(_USUAL)] for place, name in enumerate(activations)):
        return False
    return not given & _UNKNOWN and set(attributes) <= _KNOWN and not attributes.get("input_forget", 0)


def expand_node(
    node: onnx.NodeProto,
    fresh: Callable[[str], str],
    constant: Callable[[str, np.ndarray], str],
    stored: Callable[[str], np.ndarray | None],
) -> Iterator[onnx.NodeProto]:
    """Expand a node for which `is_plain_form` holds. Each new node has the original node's name.

    Args:
        fresh: makes a tensor name that is not in use yet.
        constant: adds an initializer under an unused name and returns the name.
        stored: returns the value of an initializer; None for any other tensor.

    Yields: the new nodes in topological order.
    """
    attributes = attribute_values(node)
    n = int(attributes["hidden_size"])
    sizes = {"zero": 0, "one": 1, "two": 2, "last": -1, "n": n, "n2": 2 * n, "n3": 3 * n, "n4": 4 * n, "n8": 8 * n}
    names = {name: constant(f"{node.name}_{name}", np.array([size])) for name, size in sizes.items()}
    names["shape_y"] = constant(f"{node.name}_shape_y", np.array([0, 1, -1, n]))
    names["shape_h"] = constant(f"{node.name}_shape_h", np.array([1, -1, n]))
    names |= {name: value for name, value in zip(_INPUTS, node.input, strict=False) if value}
    names["x"] = fresh(f"{node.input[0]}_rounded")
    yield from _parse_nodes(_INPUT, node.name, names, fresh)
    ends = []
    for place, reverse in enumerate(_DIRECTIONS[attributes.get("direction", b"forward").decode()]):
        own = names | {"place": constant(f"{node.name}_place", np.array(place))}
        own |= {name: fresh(f"{node.name}_{name}") for name in ("Y", "Y_h", "Y_c")}
        for name in _OF_WEIGHTS:
            value = stored(names[name])
            if value is None:
                own[name] = fresh(names[name])
                yield helper.make_node("Gather", [names[name], own["place"]], [own[name]], node.name, axis=0)
            else:
                # Stored codes stay initializers, so that code that looks for quantized weights recognizes them.
                own[name] = constant(names[name], np.asarray(value)[place])
        ends.append(own)
        yield from _parse_nodes(_direction_text(names, reverse), node.name, own, fresh)
    for name, output, axis in zip(("Y", "Y_h", "Y_c"), node.output, (1, 0, 0), strict=False):
        if output:
            yield helper.make_node("Concat", [own[name] for own in ends], [output], node.name, axis=axis)


def _direction_text(given: dict[str, str], reverse: int) -> str:
    """Return the nodes of one direction as text. An omitted bias is skipped, and omitted initial states are zeros."""
    if "B" in given:
        bias = _BIAS
    else:
        bias = "gates = Identity (product)"
    starts = [
        (_GIVEN if name in given else _ZEROS).format(state=state, given=name)
        for state, name in (("start_h", "H"), ("start_c", "C"))
    ]
    return "\n".join((_WEIGHTS, bias, *starts, _STEPS.format(reverse=reverse)))


def _parse_nodes(text: str, name: str, names: dict[str, str], fresh: Callable[[str], str]) -> Iterator[onnx.NodeProto]:
    """Parse nodes from text and rename them.

    Each node gets the name ``name``; each tensor gets its name in ``names``, or a fresh one.
    """
    own = dict(names)

    def tensor_name(end: str) -> str:
        """Map a name of the text to the tensor's name.

        Returns: the name in ``names``, or a fresh name that stays the same for later calls.
        """
        if end not in own:
            own[end] = fresh(f"{name}_{end}")
        return own[end]

    def rename_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
        """Rename nodes and their bodies in place."""
        for node in nodes:
            node.name = name
            for ends in (node.input, node.output):
                ends[:] = [tensor_name(end) for end in ends]
            for body in iter_subgraphs(node):
                for value in (*body.input, *body.output):
                    value.name = tensor_name(value.name)
                    value.type.tensor_type.ClearField("shape")
                rename_nodes(body.node)

    nodes = list(parser.parse_graph(f"part () => () {{ {text} }}").node)
    rename_nodes(nodes)
    yield from nodes
