"""A float64 evaluator of ONNX ops in numpy: the reference of certificates (see `normdeploy.rewriting.certify`).

Every op is computed by its specification (https://onnx.ai/onnx/operators) in all its forms from opset 1 on. Floating
tensors are float64 throughout, whatever type the model holds: a rounding Cast is an identity. Epsilons and other
attributes are the file's float32 numbers.

    with quiet():
        (y,) = apply("ReduceMean", [x, axes], {"keepdims": 1}, opset=18)
"""

import contextlib
import math
from typing import Any

import numpy as np
import onnx

from ..norms import bodies
from ..norms.guests import own
from ..norms.op import NormOp
from . import attention, linear, pointwise, reductions, shapes
from .core import MOST, Array, Attrs, Inputs, Table, Unsupported, require_room

__all__ = ["OPS", "VIEWS", "Unsupported", "apply", "quiet", "supported"]

OPS: Table = pointwise.TABLE | shapes.TABLE | reductions.TABLE | linear.TABLE | attention.TABLE


def supported(domain: str, op: str) -> bool:
    """Whether there is a function for the op; `apply` may still refuse a form of it (training mode, a padding mode)."""
    return ("" if domain == "ai.onnx" else domain, op) in OPS or own(domain, op) is not None


def quiet() -> contextlib.AbstractContextManager[object]:
    """Silences numpy about division by zero, overflow and NaN, which are IEEE's answers here. Put it around a whole
    evaluation: it costs more than a small op."""
    return np.errstate(all="ignore")


def apply(
    op: str, inputs: Inputs, attrs: Attrs, *, opset: int, domain: str = "", outputs: int = 1
) -> tuple[Array | None, ...]:
    """The outputs of one node, at most ``outputs`` of them.

    ``inputs``: arrays, float64 if floating, None for an optional input that is left out. ``attrs``: ints, floats,
    strings or bytes, lists of these, and arrays of any type for tensors; Cast's ``to`` is ONNX's number of the type.
    ``opset``: the version of the op's domain that the model imports. ``outputs``: how many the node has. An output can
    be a view of an input and read-only: don't write into one. None stands for an output that the op never fills.

    Raises Unsupported for an op or a form that is not covered, or that makes far more elements than it is given;
    ValueError, TypeError or IndexError where the inputs don't fit the op.
    """
    function = OPS.get((domain, op)) or (OPS.get(("", op)) if domain == "ai.onnx" else None)
    if function is None and (row := own(domain, op)) is not None:
        return _by_body(row, inputs, attrs, opset, outputs)
    if function is None:
        raise Unsupported(f"no float64 evaluation of {op}" + (f" of the domain {domain}" if domain else ""))
    sizes = [i.size for i in inputs if isinstance(i, np.ndarray)]
    if op in _GROW or math.prod(sizes) > MOST:
        require_room(op, _made(op, inputs), max((i.size for i in inputs if _held(i)), default=0))
    result = function(inputs, attrs, opset, outputs)
    if type(result) is tuple:
        return tuple(value if value is None else np.asarray(value) for value in result[:outputs])
    return (np.asarray(result),)


def _by_body(row: NormOp, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> tuple[Array | None, ...]:
    """An op whose function body travels in the file, by that: what other runtimes run is what certificates judge."""
    opset = max(opset, row.since)
    function = bodies.body(row, opset)
    known: dict[str, Any] = {"": None, **dict(zip(function.input, inputs, strict=False))}
    for node in function.node:
        given = {
            a.name: attrs[a.ref_attr_name] if a.ref_attr_name else onnx.helper.get_attribute_value(a)
            for a in node.attribute
        }
        if node.op_type == "CastLike":  # rounding is an identity here
            known[node.output[0]] = known[node.input[0]]
            continue
        results = apply(node.op_type, [known[i] for i in node.input], given, opset=opset, outputs=len(node.output))
        known.update(zip(node.output, results, strict=False))
    return tuple(known[name] for name in function.output[:outputs])


_GROW = frozenset({"ConstantOfShape", "Range", "Tile", "Pad"})  # by a value, not by the sizes of their inputs
VIEWS = frozenset(
    {"Expand", "Reshape", "Shape", "Size", "Identity", "Transpose", "Squeeze", "Unsqueeze"}
)  # which make nothing


def _held(value: Any) -> bool:
    """Whether an input lies in memory as a whole: of what Expand gives nothing does."""
    return isinstance(value, np.ndarray) and 0 not in value.strides


def _made(op: str, inputs: Inputs) -> int:
    """About how many elements ``op`` makes; 0 where not more than its largest input has."""
    given = [i for i in inputs if isinstance(i, np.ndarray)]
    if op == "ConstantOfShape":
        return math.prod(map(abs, given[0].ravel().tolist()))
    if op == "Range" and len(given) == 3 and given[2].any():
        return int(min(abs(float(given[1].item()) - float(given[0].item())) / abs(float(given[2].item())), 2.0**62))
    if op == "Tile" and len(given) > 1:
        return given[0].size * math.prod(map(abs, given[1].ravel().tolist()))
    if op == "Pad" and len(given) > 1:
        pads = [max(n, 0) for n in given[1].ravel().tolist()]
        return math.prod(n + sum(pads[i :: max(given[0].ndim, 1)]) for i, n in enumerate(given[0].shape))
    if op in ("MatMul", "Gemm") and len(given) > 1 and min(given[0].ndim, given[1].ndim) > 1:
        return given[0].size // max(given[0].shape[-1], 1) * max(given[1].shape[-1], given[1].shape[-2])
    if op == "Gather" and len(given) > 1:
        return given[1].size * (given[0].size // max(given[0].shape[:1] or (1,))) if given[0].size else 0
    if op in VIEWS:
        return 0
    try:
        return math.prod(np.broadcast_shapes(*(g.shape for g in given))) if given else 0
    except ValueError:  # no op that broadcasts
        return max(g.size for g in given)
