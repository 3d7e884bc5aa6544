"""Decide whether a node of a half-precision model has a reason to stay float32.

A reason is the node's op, a constant that half precision can't represent, or a value that calibration saw.

Softmax is converted: its exponents are at most 0, its sums are at least 1, and every runtime sums in float32. Also,
TensorRT fuses attention only if all of it is half precision. Convolutions and matrix products are converted, because
they accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np
import onnx
from onnx import TensorProto

from ..norms.norm_table import DEFAULT
from ..norms.third_party import is_managed_op
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_graphs
from .precision_view import PrecisionView
from .type_conversion import HalfFormat, initializer_values

HEADROOM = 8.0
"""How far below the type's largest number the largest value seen must stay. Calibration sees some inputs, and the
largest activations of a residual stream differ between inputs by a small factor (Sun et al., "Massive Activations in
Large Language Models", 2024: the same few channels, within one binade or two); three binades leave room for that."""
REDUCTIONS = frozenset(
    {
        *(
            "ReduceSum",
            "ReduceMean",
            "ReduceL1",
            "ReduceL2",
            "ReduceSumSquare",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceProd",
            "CumSum",
        ),
        "LpPool",
    }
)
MOVES = frozenset(
    {
        *(
            "Identity",
            "Reshape",
            "Transpose",
            "Flatten",
            "Squeeze",
            "Unsqueeze",
            "Expand",
            "Slice",
            "Split",
            "Concat",
            "Gather",
            "Tile",
        ),
        *("GatherElements", "GatherND", "Pad", "DepthToSpace", "SpaceToDepth", "Cast", "Where", "Trilu"),
    }
)
STEPS = frozenset({"Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Pow", "Max", "Min", "Clip", "Abs", "Neg", "Log"})
# Ops with bounds. A bound that overflows to infinity has no effect, and the original bound had no effect on
# half-precision values either.
_BOUNDS = frozenset({"Clip", "Min", "Max"})
# Op -> index of its bias input. Rounding a bias is harmless, because the error is small relative to the sum that it is
# added to.
_ADDED = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2}
# Ops that the parser of TensorRT-RTX 1.7 refuses in half precision
_REFUSED = {
    "fp16": frozenset({"Celu"}),
    "bf16": frozenset({"Celu", "HardSwish", "Mish"}),
}
_SAMES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# A reason: kind, tensor, text, and the largest value seen (None if not a range)
Reason = tuple[str, str, str, float | None]


def _reason_by_op(view: PrecisionView, node: onnx.NodeProto) -> Reason | None:
    """Return a reason if the node's op alone is a reason; otherwise None."""
    made = node.output[0]
    if any(attribute_graphs(a) for a in node.attribute):
        return "control flow", made, "all nodes in a body of control flow stay float32", None
    if node.op_type in DEFAULT or is_managed_op(node.domain, node.op_type):
        return "norm", node.input[0], "its statistics are float32", None
    if node.op_type in REDUCTIONS:
        return (
            "statistics",
            node.input[0],
            "it computes a sum, and runtimes accumulate half precision in different types",
            None,
        )
    if node.op_type in _REFUSED[view.form.name]:
        return "no half form", made, f"TensorRT does not support {node.op_type} in {view.form.dtype.name}", None
    if not _has_half_kernel(view, node):
        return "no half form", made, f"ONNX does not define it for {view.form.dtype.name} at opset {view.opset}", None
    return None


def _has_half_kernel(view: PrecisionView, node: onnx.NodeProto) -> bool:
    """Return True if the op's schema allows the half type for all floating-point tensors of the node."""
    if not is_standard(node):
        # The types that nonstandard ops support are unknown.
        return False
    allowed = allowed_types(node.op_type, view.opset)
    if allowed is None:
        return True
    into, out = allowed
    wanted = f"tensor({view.form.dtype.name})"
    for side, kinds in ((node.input, into), (node.output, out)):
        for k, name in enumerate(side):
            always = side is node.input and k in float32_inputs(node, view.opset, view.form)
            if name in view.floating_tensors and kinds and wanted not in kinds[min(k, len(kinds) - 1)] and not always:
                return False
    # Sequences have no type in ``view.types``.
    return all(name in view.types for name in (*node.input, *node.output) if name)


@lru_cache
def allowed_types(op: str, opset: int) -> tuple[list[frozenset[str]], list[frozenset[str]]] | None:
    """Look up the types that each input and output of an op may have.

    Returns:
        sets such as {"tensor(float)"} for inputs and for outputs; None if onnx does not know the op.
    """
    if not onnx.defs.has(op, max_inclusive_version=opset, domain=""):
        return None
    schema = onnx.defs.get_schema(op, opset)
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    return tuple(
        [kinds.get(v.type_str, frozenset({v.type_str})) for v in side] for side in (schema.inputs, schema.outputs)
    )  # type: ignore[return-value]


def float32_inputs(node: onnx.NodeProto, opset: int, form: HalfFormat) -> frozenset[int]:
    """Find the inputs that must be float32 although the first input may be half.

    These are the scales of Resize and Upsample. In bfloat16, the region of Resize is such an input too.

    Returns:
        indices of inputs.
    """
    if is_standard(node):
        allowed = allowed_types(node.op_type, opset)
    else:
        allowed = None
    wanted = f"tensor({form.dtype.name})"
    if allowed is None or not allowed[0] or wanted not in allowed[0][0]:
        return frozenset()
    return frozenset(k for k, kinds in enumerate(allowed[0]) if wanted not in kinds and "tensor(float)" in kinds)


def _reason_by_constant(view: PrecisionView, node: onnx.NodeProto) -> Reason | None:
    """Return a reason if a constant of the node overflows or becomes subnormal in half precision."""
    always = float32_inputs(node, view.opset, view.form)
    constants = [
        (k, name, initializer_values(view.constants[name]))
        for k, name in enumerate(node.input)
        if _is_float32_tensor(view, name) and k not in always
    ]
    if node.op_type == "ConstantOfShape":
        constants = [
            (0, node.output[0], initializer_values(a.t))
            for a in node.attribute
            if a.name == "value" and a.t.data_type == TensorProto.FLOAT
        ]
    form = view.form
    name_of = view.form.dtype.name
    for k, name, v in constants:
        magnitude = float(np.abs(v[np.isfinite(v)]).max(initial=0.0))
        if np.isinf(form.round_to_format(magnitude)) and node.op_type not in _BOUNDS:
            return (
                "constant",
                name,
                f"{name!r} reaches {magnitude:.3g}, but the largest {name_of} number is {form.largest:.5g}",
                magnitude,
            )
        small = magnitude
        if node.op_type == "Div" and k == 1 and v.any():
            small = float(np.abs(v[v != 0]).min())
        vector = v.size > 1 and node.op_type in ("Add", "Sub")
        if 0 < small < form.smallest and _ADDED.get(node.op_type) != k and not vector:
            becomes = float(np.abs(form.round_to_format(small)))
            return (
                "constant",
                name,
                f"{name!r} is {small:.3g}, which rounds to {becomes:.3g} in {name_of}, below its normal numbers",
                magnitude,
            )
    return None


def _is_float32_tensor(view: PrecisionView, name: str) -> bool:
    return name in view.constants and view.constants[name].data_type == TensorProto.FLOAT


def _reason_by_range(view: PrecisionView, node: onnx.NodeProto, carried: Collection[str]) -> Reason | None:
    """Return a reason if calibration saw values of an output that half precision can't represent."""
    for name in node.output:
        if name in view.floating_tensors and (why := describe_overflow(view, name, carried)):
            return "range", name, why, view.ranges[name].magnitude
    if (
        node.op_type == "Cast"
        and node.output[0] in view.floating_tensors
        and view.types.get(node.input[0]) not in (*_SAMES, TensorProto.DOUBLE)
    ):
        seen = view.ranges.get(node.output[0])
        exact = 1 / view.form.unit_roundoff
        if seen is not None and seen.magnitude > exact:
            why = f"integers; {view.form.dtype.name} represents all of them only up to {exact:.0f}"
            return "range", node.output[0], why, seen.magnitude
    return None


def describe_overflow(view: PrecisionView, name: str, carried: Collection[str] = ()) -> str | None:
    """Describe why a tensor must stay float32 because of the values that calibration saw.

    Args:
        carried: tensors that carry a mask (`normdeploy.precision.mask_constants`). Only their largest value has to fit,
            not their most negative value.

    Returns:
        the reason, or None if the tensor may be half.
    """
    seen = view.ranges.get(name)
    if seen is None:
        return None
    if name in carried:
        magnitude = seen.high
    else:
        magnitude = seen.magnitude
    kind = view.form.dtype.name
    largest = view.form.largest
    if np.isfinite(magnitude) and magnitude > largest / HEADROOM:
        return (
            f"near the largest {kind} number, {largest:.5g}: inputs beyond the samples need a margin of {HEADROOM:.0f}"
        )
    if 0 < seen.magnitude < view.form.smallest:
        return f"below the normal numbers of {kind}, which start at {view.form.smallest:.3g}"
    return None


def explicit_float32_nodes(view: PrecisionView) -> set[int]:
    """Find the nodes that a half-precision file already computes in float32, after a Cast from half precision.

    Returns:
        indices of nodes.
    """
    kept: set[int] = set()
    for i, node in enumerate(view.graph.node):
        cast = node.op_type == "Cast" and view.types.get(node.input[0]) == view.form.onnx
        if any(view.types.get(o) == TensorProto.FLOAT for o in node.output) and (
            cast
            or any(
                view.producer.get(name) in kept
                for name in view.floating_inputs(i)
                if view.types[name] == TensorProto.FLOAT
            )
        ):
            kept.add(i)
    return kept


def float32_reason(view: PrecisionView, i: int, carried: Collection[str], author: Collection[int]) -> Reason | None:
    """Find the reason why node ``i`` stays float32.

    Args:
        carried: tensors that carry a mask (`normdeploy.precision.mask_constants`). Only their largest value has to fit,
            not their most negative value.
        author: indices of the nodes that the original file already computes in float32.

    Returns:
        the reason; None if the node may be half precision.
    """
    node = view.graph.node[i]
    why = _reason_by_op(view, node) or _reason_by_constant(view, node) or _reason_by_range(view, node, carried)
    return why or (("as written", node.output[0], "the file casts to float32 before it", None) if i in author else None)
