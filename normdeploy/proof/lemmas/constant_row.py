"""Admit Where: a centered value is zero on a constant row, so Flax's guard changes nothing.

**Lemma.** Let c(x) imply min x = max x over some axes, and d = r·(x − mean x) over these axes. Then Where(c, 0, d) = d
at every real x.

**Proof.** If c is false, Where returns d. If c is true, the row is constant, so x − mean x and d are zero. Further
conditions joined by And keep the lemma true. `tests/proof/test_lemmas.py` has four counterexamples: a number other than
0, other axes, Or instead of And, and another condition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...graphs.symbolic_sizes import Size
from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, axes_of, broadcast_to_sizes, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import Array, Value

Row = tuple[Value, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Extremum:
    """Smallest or largest element of each row of ``x`` over ``axes``.

    Attributes:
        of: ``min`` or ``max``.
        row: x and the axes that form its rows.
        value: the elements, in floats only.
    """

    of: str
    row: Row
    value: Value


@dataclass(frozen=True, eq=False)
class RowCondition:
    """Condition that implies that each of ``rows`` is constant.

    Attributes:
        value: zeros and ones, in floats only.
        rows: for each constant row, x and the axes that form the row.
    """

    value: Value
    rows: tuple[Row, ...]


def _extremum_op(of: str, reduce: Any) -> Op:
    def run(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Extremum:
        x = lift_input(m, inputs[0])
        if len(inputs) < 2 or inputs[1] is None:
            given = attrs.get("axes")
        else:
            given = np.asarray(inputs[1]).reshape(-1).tolist()
        axes = tuple(axes_of(x, given))
        slots = tuple(s for i in axes for s in x.array_axes(i))
        kept = tuple(() if i in axes else axis for i, axis in enumerate(x.axes))
        f = reduce(x.f, axis=slots)
        if not attrs.get("keepdims", 1):
            kept = tuple(axis for i, axis in enumerate(kept) if i not in axes)
        return Extremum(of, (x, axes), Value(kept, None, f, x.data))

    return run


def _as_floats(m: ProofInterpreter, x: Any) -> Value:
    if isinstance(x, (Extremum, RowCondition)):
        v = x.value
    else:
        v = lift_input(m, x)
    return Value(v.axes, None, v.f, v.data)


def _make_condition(m: ProofInterpreter, f: Any, *inputs: Any, rows: tuple[Row, ...] = ()) -> RowCondition:
    values = [_as_floats(m, x) for x in inputs]
    axes, arrays = m.broadcast_values(*values)
    with np.errstate(all="ignore"):
        truth: Array = np.asarray(f(*(g for _, g in arrays)), dtype=np.float64)
    return RowCondition(Value(axes, None, truth, any(v.data for v in values)), rows)


def _equal(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> RowCondition:
    a, b = inputs
    rows: tuple[Row, ...] = ()
    if (
        isinstance(a, Extremum)
        and isinstance(b, Extremum)
        and a.of != b.of
        and a.row[0] is b.row[0]
        and a.row[1] == b.row[1]
    ):
        # Without keepdims, an extremum may broadcast over rows that it was not computed from.
        kept = all(len(e.value.axes) == len(e.row[0].axes) for e in (a, b))
        if kept:
            rows = (a.row,)
        else:
            rows = ()
    return _make_condition(m, np.equal, a, b, rows=rows)


def _and(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> RowCondition:
    rows = tuple(row for x in inputs if isinstance(x, RowCondition) for row in x.rows)
    return _make_condition(m, lambda a, b: (a != 0) & (b != 0), *inputs, rows=rows)


def _where(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    condition = inputs[0]
    chosen = inputs[1]
    d = lift_input(m, inputs[2])
    zero = lift_input(m, chosen)
    # The condition is a constant of the file.
    if isinstance(condition, np.ndarray) and condition.dtype == bool and condition.size == 1:
        taken, other = (zero, d) if condition.all() else (d, zero)
        return broadcast_to_sizes(
            m, broadcast_to_sizes(m, taken, other.shape), [Size.from_int(n) for n in condition.shape]
        )
    if not isinstance(condition, RowCondition) or zero.data or zero.sized or zero.f.size != 1 or (zero.f != 0).any():
        raise NotProved(ProofFailure.OP, "Where is not algebraic", "Where")
    if m.gf is not None and not any(_is_centered(m, d, x, axes) for x, axes in condition.rows):
        raise NotProved(ProofFailure.OP, "Where is not algebraic and may change its input", "Where")
    axes, ((_, c), (_, f), _) = m.broadcast_values(condition.value, d, zero)
    if axes != d.axes:
        raise NotProved(ProofFailure.OP, "Where broadcasts", "Where")
    return replace(d, f=np.where(c != 0, 0.0, f))


def _is_centered(m: ProofInterpreter, d: Value, x: Value, axes: tuple[int, ...]) -> bool:
    """Return True if d = r·(x − mean x), axis by axis."""
    c = m.sub(x, m.mean(x, axes))
    return len(d.axes) == len(c.axes) and d.f.shape[1:] == c.f.shape[1:] and m.constant_ratio(d, c) is not None


TABLE: dict[str, Op] = {
    "ReduceMax": _extremum_op("max", np.max),
    "ReduceMin": _extremum_op("min", np.min),
    "Equal": _equal,
    "And": _and,
    "Where": _where,
}
