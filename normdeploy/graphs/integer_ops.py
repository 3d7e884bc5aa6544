"""Compute ops on integers, such as shapes and axes in a region, for all sizes at once.

Integers without open sizes are computed by numpy. Open sizes are polynomials: they are added, multiplied and moved, and
divided if the division is exact at every size. Min, Max, Mod, comparisons and masks on sizes are refused, because their
result varies with the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..evaluate import evaluator
from ..evaluate.evaluator_core import Attrs, Inputs
from .symbolic_sizes import NoPolynomial, Size

_MOVES = frozenset(
    {
        "Gather",
        "Slice",
        "Concat",
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Split",
        "Transpose",
        "Flatten",
        "Expand",
        "Tile",
        "Identity",
    }
)


def is_integer_value(x: Any) -> bool:
    """Return whether ``x`` is an omitted input or an array of integers, booleans or sizes."""
    return x is None or (isinstance(x, np.ndarray) and (x.dtype == object or x.dtype.kind in "iub"))


def apply_integer_op(op: str, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> tuple[Any, ...]:
    """Compute an op whose inputs are all integers or sizes.

    Returns: one array per output; dtype object if it contains open sizes.

    Raises:
        NoPolynomial: the result is not a polynomial of the sizes.
    """
    arrays = [_simplify_sizes(x) for x in inputs]
    if op in ("Expand", "Tile") and arrays[1].dtype == object:
        raise NoPolynomial(f"{op} of integers to {', '.join(map(str, arrays[1].reshape(-1).tolist()))} elements", op)
    if not any(isinstance(x, np.ndarray) and x.dtype == object for x in arrays) or op in _MOVES:
        return tuple(
            _simplify_sizes(x) for x in evaluator.evaluate_node(op, arrays, attrs, opset=opset, outputs=outputs)
        )
    if op in _ARITHMETIC:
        made = arrays[0]
        for other in arrays[1:]:
            made = np.frompyfunc(_ARITHMETIC[op], 2, 1)(made, other)
        return (_simplify_sizes(np.asarray(made, dtype=object)),)
    if op in ("ReduceProd", "ReduceSum"):
        if len(inputs) < 2:
            axes = None
        else:
            axes = inputs[1]
        if inputs[0].ndim != 1 and axes is not None:
            raise NoPolynomial(f"{op} of sizes over some axes", op)
        start: Any = Size.from_int(1 if op == "ReduceProd" else 0)
        for n in arrays[0].reshape(-1).tolist():
            if op == "ReduceProd":
                start = start * n
            else:
                start = start + n
        return (
            _simplify_sizes(
                np.array(start, dtype=object).reshape((1,) * (inputs[0].ndim if attrs.get("keepdims", 1) else 0))
            ),
        )
    if op == "Equal":
        return (np.asarray(np.frompyfunc(_sizes_equal, 2, 1)(*arrays)).astype(bool),)
    if op == "Where" and arrays[0].dtype == bool:
        return (_simplify_sizes(np.where(arrays[0], *arrays[1:])),)
    raise NoPolynomial(f"{op} of sizes: its result is not a polynomial of the sizes", op)


def _simplify_sizes(x: Any) -> Any:
    """Convert sizes to int64 if all of them are numbers."""
    if not isinstance(x, np.ndarray) or x.dtype != object:
        return x
    numbers = [n if isinstance(n, int) else n.constant_value for n in x.reshape(-1).tolist()]
    if any(n is None for n in numbers):
        return x
    return np.array(numbers, dtype=np.int64).reshape(x.shape)


def _divide_sizes(a: Any, b: Any) -> Size:
    made = Size.from_int(a).divide_exactly(Size.from_int(b))
    if made is None:
        raise NoPolynomial(f"{a} is not divisible by {b} at some sizes", "Div")
    return made


def _sizes_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal at every size.

    Raises:
        NoPolynomial: they are equal at some sizes only.
    """
    difference = Size.from_int(a) - Size.from_int(b)
    if difference == 0:
        return True
    if difference.is_positive or (-difference).is_positive:
        return False
    raise NoPolynomial(f"{a} and {b} are equal at some sizes and different at others", "Equal")


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: Size.from_int(a) + b,
    "Sub": lambda a, b: Size.from_int(a) - b,
    "Mul": lambda a, b: Size.from_int(a) * b,
    "Div": _divide_sizes,
}
