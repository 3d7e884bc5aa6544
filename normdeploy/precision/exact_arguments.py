"""Find arguments that must not be rounded to half precision: angles of sines and cosines, and scales of a Resize.

An angle of magnitude M that is rounded to half precision is off by up to M·u, with u the unit roundoff. Its sine and
cosine are off by the same amount. In comparison, the rounding of the sine itself has an error of only u/2. For angles
of more than one turn, the error of the angle is by far the larger of the two. At timesteps up to 1000, float16 leaves
no correct digit of the sine. So diffusers and all rotary embeddings cast to float32 before they compute angles. A graph
that was traced in float32 does not contain this cast.

If cheap ops compute the angle from other tensors, those tensors must not be rounded either. This includes inputs of the
graph. The largest value of an input is unknown, and generated calibration values do not show it.

The scales of a Resize determine the size of its result. ONNX requires float32 scales, and the nodes that compute them
must not round to half precision either.
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
    """Argument of the node at index ``place`` that must not be rounded to half precision.

    Attributes:
        place: index of the node.
        kind, reason: kind and reason of the float32 region.
        magnitude: largest value that calibration saw. None if no value was seen, or for the scales of a Resize.
        made: indices of the nodes that compute the argument and stay float32.
        inputs: inputs of the graph from which the argument is computed.
    """

    place: int
    kind: str
    reason: str
    magnitude: float | None
    made: tuple[int, ...]
    inputs: tuple[str, ...]


def find_exact_arguments(view: PrecisionView) -> Iterator[ExactArgument]:
    """Find all arguments that must not be rounded to half precision.

    Yields:
        the arguments in the graph's order.
    """
    ends = {v.name for v in view.graph.input if v.name in view.floating_tensors}
    counted = _tensors_derived_from(view, (), _CHEAP)
    plain = _tensors_derived_from(view, ends, _ELEMENTWISE)
    products = _tensors_derived_from(view, ends, _CHEAP)
    kind = view.form.dtype.name
    for i, node in enumerate(view.graph.node):
        if node.op_type in _TURNED and (read := view.floating_inputs(i)) and is_standard(node):
            seen = view.ranges.get(read[0])
            if counted.issuperset(read):
                why = (
                    f"angles computed from positions: at {1 / view.form.unit_roundoff:.0f}, adjacent "
                    f"positions round to the same {kind} number"
                )
                yield ExactArgument(i, "positions", why, None, *_upstream_nodes(view, [i]))
            elif plain.issuperset(read) or (products.issuperset(read) and (seen is None or seen.magnitude > _TURN)):
                why = (
                    f"angles computed from an input: in {kind}, an angle of 1000 would have an error of "
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
            # In this case the scales are not constant: nodes compute them, or they are an input of the graph.
            if name in view.floating_tensors and name not in view.constants:
                why = f"{node.op_type} reads float32 scales, and the size of its result depends on their exact values"
                maker = view.producer.get(name)
                made, inputs = ((), (name,)) if maker is None else _upstream_nodes(view, [maker])
                yield ExactArgument(i, "scales", why, None, made, inputs)


def _tensors_derived_from(view: PrecisionView, inputs: Collection[str], steps: Collection[str]) -> set[str]:
    """Collect the tensors that only ops in ``steps`` compute from integers and ``inputs``."""
    known = set(inputs)
    for i, node in enumerate(view.graph.node):
        whole = node.op_type == "Range" or (
            node.op_type == "Cast" and view.types.get(node.input[0]) == TensorProto.INT64
        )
        if whole or (node.op_type in steps and view.floating_inputs(i) and known.issuperset(view.floating_inputs(i))):
            known.update(view.floating_outputs(i))
    return known


def _upstream_nodes(view: PrecisionView, places: list[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Collect the nodes at ``places``, the cheap nodes before them, and the graph inputs that these nodes read."""
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
