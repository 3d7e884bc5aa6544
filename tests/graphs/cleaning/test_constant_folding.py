"""Constants are folded only if no runtime overflows on the way: float64 has the range that float32 lacks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from normdeploy.graphs.cleaning.constant_folding import fold_node

OPSET = 18


def fold(op: str, *arrays: Any, **attributes: Any) -> np.ndarray | None:
    """Return the only output of an op on float32 constants; None if it is not folded."""
    inputs = [ir.val(f"c{i}", const_value=ir.tensor(np.array(a, np.float32))) for i, a in enumerate(arrays)]
    made = fold_node(ir.node(op, inputs, attributes), OPSET)
    return None if made is None else made[0]


# Each comment gives float32's result in the op's own order; then float64's.
@pytest.mark.parametrize(
    ("op", "arrays", "attributes"),
    [
        # Inf · 0 = NaN; 1
        ("ReduceProd", ([1e15, 1e15, 1e15, 1e-15, 1e-15, 1e-15],), {}),
        # 0 or subnormal; 1
        ("ReduceProd", ([1e-15, 1e-15, 1e-15, 1e15, 1e15, 1e15],), {}),
        # Inf - Inf = NaN; 0
        ("Gemm", ([[1e10]], [[1.0]], [[1e10]]), {"alpha": 1e30, "beta": -1e30}),
        # (1e-15 · 1e-15) · 1e-15 = 0, Inf · 0 = NaN; 1
        ("Gemm", ([[1e-15]], [[1e-15]]), {"alpha": 1e30}),
    ],
)
def test_numbers_that_leave_the_range_on_the_way_are_not_folded(
    op: str, arrays: tuple[Any, ...], attributes: dict[str, Any]
) -> None:
    assert fold(op, *arrays, **attributes) is None


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "value"),
    [
        ("ReduceProd", ([2.0, 0.0, 3.0],), {}, 0.0),
        ("ReduceProd", ([[0.5, 3.0], [7.0, 1.0]],), {}, 10.5),
        ("ReduceProd", ([1e30, 1e-30],), {}, math.prod([float(np.float32(1e30)), float(np.float32(1e-30))])),
        ("Gemm", ([[3.0]], [[5.0]], [[2.0]]), {"alpha": 0.5, "beta": 2.0}, 11.5),
    ],
)
def test_numbers_that_stay_in_range_are_folded(
    op: str, arrays: tuple[Any, ...], attributes: dict[str, Any], value: float
) -> None:
    folded = fold(op, *arrays, **attributes)
    assert folded is not None
    # Float32 rounds the result of float64 once.
    assert folded.reshape(()) == np.float32(value)
