"""Admit Exp of a multiple of Log: exp(q·log t) is t^q.

**Lemma.** For t > 0 and rational q, exp(q·log t) = t^q. For t = 0 both are 0 if q > 0 and +Inf if q < 0.

**Premise.** t ≥ 0 (`clamp.is_nonnegative`), because for a negative t the logarithm is NaN and the power may be a
number. q is a multiple of ½. Between Log and Exp there are only products with numbers. `tests/proof/test_lemmas.py` has
two counterexamples: the exponential of data, and an addition to the logarithm.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import Logarithm, Value
from .clamp import is_nonnegative


def _log(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Logarithm:
    t = lift_input(m, inputs[0])
    if m.gf is not None and not is_nonnegative(m, t):
        raise NotProved(ProofFailure.OP, "Log of a value that may be negative is not algebraic", "Log")
    with np.errstate(all="ignore"):
        return Logarithm(t, Fraction(1), Value(t.axes, None, np.log(t.f), t.data))


def _exp(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = inputs[0]
    if not isinstance(x, Logarithm):
        raise NotProved(ProofFailure.OP, "Exp is not algebraic", "Exp")
    y = m.power(x.t, x.q)
    with np.errstate(all="ignore"):
        y.f = np.exp(x.floats.f)
    return y


TABLE: dict[str, Op] = {"Log": _log, "Exp": _exp}
