"""Tensors whose digits show in full where they are read: the angles of sines and cosines, and the scales of a Resize.

An angle of magnitude M that is rounded to half is off by up to M·u (u the unit roundoff), and so are its sine and
cosine, which are themselves rounded by u/2 at most. Beyond one turn that is the larger part by far: at timesteps up to
1000 float16 leaves no digit of them. PyTorch's users know it: diffusers and every rotary embedding compute angles in
float32, by a cast that a graph traced in float32 does not show. Whatever an angle is computed of by cheap steps alone,
an input of the graph included, loses its digits just the same; how large an input may become is not known, and what
calibration draws for it says nothing.

The scales of a Resize say how large its result is. They are float32 in ONNX, and the nodes that compute them may not
round either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from onnx import TensorProto

from ..storage.onnx_domains import is_standard
from .float32_reasons import MOVES, STEPS, float32_inputs
from .precision_view import PrecisionView

_TURN = 2 * math.pi
_TURNED = ("Sin", "Cos", "Tan")
_ELEMENTWISE = MOVES | STEPS | {"Range", "Exp", "Floor", "Ceil", "Round", "Mod"}
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
_CHEAP = _ELEMENTWISE | _PRODUCTS


@dataclass(frozen=True)
class ExactArgument:
    """What the node at ``place`` reads and shows all digits of.

    ``kind`` and ``reason``: of the island; ``magnitude``: the largest seen, None where it does not matter or nothing
    was seen; ``made``: the places of the nodes that are kept in float32 for it; ``inputs``: those of the graph among
    what it is made of.
    """

    place: int
    kind: str
    reason: str
    magnitude: float | None
    made: tuple[int, ...]
    inputs: tuple[str, ...]


def find_exact_arguments(view: PrecisionView) -> Iterator[ExactArgument]:
    """All that there are, in the graph's order."""
    ends = {v.name for v in view.graph.input if v.name in view.floating_tensors}
    counted = _tensors_derived_from(view, (), _CHEAP)
    plain = _tensors_derived_from(view, ends, _ELEMENTWISE)
    products = _tensors_derived_from(view, ends, _CHEAP)
    kind = view.form.dtype.name
    for i, node in enumerate(view.graph.node):
        if node.op_type in _TURNED and (read := view.floating_inputs(i)) and is_standard(node):
            seen = view.ranges.get(read[0])
            if counted.issuperset(read):
                why = f"angles made of positions: at {1 / view.form.unit_roundoff:.0f} neighbours are one {kind} number"
                yield ExactArgument(i, "positions", why, None, *_upstream_nodes(view, [i]))
            elif plain.issuperset(read) or (products.issuperset(read) and (seen is None or seen.magnitude > _TURN)):
                why = (
                    f"angles made of an input: in {kind} an angle of 1000 would be off by "
                    f"{1000 * view.form.unit_roundoff:.2g}"
                )
                yield ExactArgument(
                    i, "angles", why, None if seen is None else seen.magnitude, *_upstream_nodes(view, [i])
                )
        for k in float32_inputs(node, view.opset, view.form):
            if k < len(node.input):
                name = node.input[k]
            else:
                name = ""
            # computed, or an input of the graph
            if name in view.floating_tensors and name not in view.constants:
                why = f"{node.op_type} takes its scales in float32, and the size of its result hangs on their digits"
                maker = view.producer.get(name)
                made, inputs = ((), (name,)) if maker is None else _upstream_nodes(view, [maker])
                yield ExactArgument(i, "scales", why, None, made, inputs)


def _tensors_derived_from(view: PrecisionView, inputs: Collection[str], steps: Collection[str]) -> set[str]:
    """The tensors made of whole numbers and of these inputs by such steps alone."""
    known = set(inputs)
    for i, node in enumerate(view.graph.node):
        whole = node.op_type == "Range" or (
            node.op_type == "Cast" and view.types.get(node.input[0]) == TensorProto.INT64
        )
        if whole or (node.op_type in steps and view.floating_inputs(i) and known.issuperset(view.floating_inputs(i))):
            known.update(view.floating_outputs(i))
    return known


def _upstream_nodes(view: PrecisionView, places: list[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """These nodes and the cheap ones that compute what they read; and the inputs of the graph that these end in."""
    made = dict.fromkeys(places)
    inputs = dict[str, None]()
    stack = list(places)
    while stack:
        for name in view.floating_inputs(stack.pop()):
            maker = view.producer.get(name)
            if maker is None:
                inputs[name] = None
            elif maker not in made and view.graph.node[maker].op_type in _CHEAP:
                made[maker] = None
                stack.append(maker)
    return tuple(made), tuple(inputs)
