"""Admit Abs: the square of an absolute value is the square.

**Lemma.** |x|·|x| = |x|² = x² for every real x; and |t| = t if t ≥ 0 (`clamp.is_nonnegative`).

**Proof.** |x| is x or −x. So Abs is admitted if only the square of its result is used: a product with itself, an even
power, a sum of squares. Any other use of the result is refused. `tests/proof/test_lemmas.py` has two counterexamples:
reading |x| directly, and |x|·x.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..value import NEGATIVE, NOT_NEGATIVE, Magnitude, Value
from .clamp import is_nonnegative


def _abs(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value | Magnitude:
    x = lift_input(m, inputs[0])
    if m.gf is None or is_nonnegative(m, x):
        return replace(x, f=np.abs(x.f), sign=max(x.sign, NOT_NEGATIVE), below=NEGATIVE)
    return Magnitude(m.mul(x, x), Value(x.axes, None, np.abs(x.f), x.data))


TABLE: dict[str, Op] = {"Abs": _abs}
