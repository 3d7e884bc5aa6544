"""Admit clamps of sums of squares and of roots.

A lower bound of zero or less does not change a sum of squares, and a root with a lower bound above zero is positive.

**Lemma.** Let t(x) ≥ 0 for every real input x and c ≤ 0. Then max(t, c) = t.

**Premise.** One of two conditions shows t ≥ 0. Either the structure shows it (squares, their sums and products,
non-negative constants). Or t = r·V or t = r·(V + ε) holds in the field with r > 0. Here V is the sum of squares of a
norm after the rewrite. For example, E[x²] − E[x]² is such a t. A Clip with an upper bound is refused, because a
variance has no upper bound.

**Lemma.** Clip(t, c) with one number c > 0 is a function of t that is positive everywhere. So a Clip of a root t is
admitted as an opaque function, if the nodes after the rewrite contain the same Clip: the same c and the same t
(`congruence`). A division by its result never divides by zero. `tests/proof/test_lemmas.py` has three counterexamples:
a clamp at 1e-12, an upper bound, and a t that may be negative.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import NEGATIVE, NOT_NEGATIVE, POSITIVE, Value
from .congruence import apply_unknown


def is_nonnegative(m: ProofInterpreter, t: Value) -> bool:
    """Return True if t ≥ 0 at every real input.

    Returns:
        False if that is not shown.
    """
    if t.sign >= NOT_NEGATIVE:
        return True
    for radicand in m.radicands:
        if radicand.epsilon is None:
            sums = [radicand.w]
        else:
            sums = [radicand.w, m.sub(radicand.w, radicand.epsilon)]
        for v in sums:
            ratio = m.positive_ratio(t, v)
            if ratio is not None and ratio[1] > 0:
                return True
    return False


def clamp_below(m: ProofInterpreter, op: str, t: Value, low: Value) -> Value:
    """Evaluate max(t, low) if it equals t, or if t is a root and ``low`` is a positive number.

    Returns:
        the result.

    Raises:
        NotProved: neither condition is shown.
    """
    if (
        op == "Clip"
        and t.roots is not None
        and not low.data
        and not low.sized
        and low.f.size == 1
        and (low.f > 0).all()
    ):
        c = float(low.f.reshape(-1)[0])
        made = apply_unknown(m, f"{op} from {c!r}", t, lambda x: np.maximum(x, c))
        made.sign = POSITIVE
        made.nonzero = True
        return made
    if m.gf is not None and (low.data or low.sized or not (low.f <= 0).all() or not is_nonnegative(m, t)):
        raise NotProved(ProofFailure.OP, f"{op} is not algebraic and may change its input", op)
    return replace(t, f=np.maximum(t.f, low.f.reshape(-1)[0]), sign=max(t.sign, NOT_NEGATIVE), below=NEGATIVE)


def _relu(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    return clamp_below(m, "Relu", lift_input(m, inputs[0]), m.number(0))


def _max(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    values = [lift_input(m, x) for x in inputs]
    if len(values) == 1:
        return values[0]
    if len(values) == 2 and (larger := _larger_number(*values)) is not None:
        return larger
    if len(values) != 2 or values[0].data == values[1].data:
        raise NotProved(ProofFailure.OP, "Max is not algebraic", "Max")
    t, low = values if values[0].data else reversed(values)
    if len(low.axes) > len(t.axes) or any(low.axes):
        raise NotProved(ProofFailure.OP, "Max with a bound that is not a single number", "Max")
    return clamp_below(m, "Max", t, low)


def _larger_number(a: Value, b: Value) -> Value | None:
    """Return the one of two numbers made of sizes that is larger at every size; None if neither is."""
    if a.size is None or b.size is None or a.data or b.data or any(a.axes) or any(b.axes):
        return None
    more = a.size - b.size
    if more.is_positive or more == 0:
        return a
    if (-more).is_positive:
        return b
    return None


def _clip(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    given: list[Any]
    if opset < 11:
        given = [attrs.get("min"), attrs.get("max")]
    else:
        given = [*inputs[1:], None, None][:2]
    low, high = given
    if high is not None:
        raise NotProved(ProofFailure.OP, "Clip with an upper bound is not algebraic", "Clip")
    t = lift_input(m, inputs[0])
    if low is None:
        return t
    return clamp_below(m, "Clip", t, lift_input(m, np.asarray(low) if isinstance(low, float) else low))


TABLE: dict[str, Op] = {"Relu": _relu, "Max": _max, "Clip": _clip}
