"""Equal arguments have equal results.

**Lemma.** If B and A are the same function of x and of unknown functions σ, whatever these are, they are the same for
the σ at hand.

**Proof.** Specialisation. In the field σ takes a random value for each argument, the same for the same argument; two
arguments that are different functions are different residues but for the error probability that is counted anyway. So a
Sigmoid may stand inside a region where it stands in the same place after the rewrite. `tests/proof/test_lemmas.py` has
another function, and another argument, after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...evaluate import evaluator
from ..degree import scale_counts
from ..interpreter import ProofInterpreter
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import Value


def apply_unknown(m: ProofInterpreter, name: str, x: Value, real: Any) -> Value:
    """σ(x) of a function of one number that is not looked into."""
    made = None
    if m.gf is not None and x.a is not None:
        # σ hides how high the degree of its argument is from what is compared in the end
        m.plan.require_degree(scale_counts(x.degree.larger_counts(), 2))
        table = m.draws.opaque
        p = m.gf.p
        made = np.empty(x.a.shape, dtype=object)
        made.reshape(-1)[:] = [table.setdefault((name, v), m.draws.rng.randrange(p)) for v in x.a.reshape(-1).tolist()]
    with np.errstate(all="ignore"):
        degree = x.degree.with_places_in(x.varying_atoms()).of_unknown_function()
        y = Value(x.axes, made, np.asarray(real(x.f)), x.data, degree=degree, sized=x.sized, sums=x.sums)
    y.fixed = x.fixed | (x.varying_axes() if x.sums else frozenset())
    return y


def _unary_op(name: str) -> Op:
    def run(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
        def real(x: Any) -> Any:
            return evaluator.evaluate_node(name, [x.astype(np.float64)], attrs, opset=opset)[0]

        return apply_unknown(m, f"{name}{sorted(attrs.items())}", lift_input(m, inputs[0]), real)

    return run


def _swish(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    """x·sigmoid(alpha·x)."""
    x = lift_input(m, inputs[0])
    return m.mul(x, _unary_op("Sigmoid")(m, [m.mul(m.number(float(attrs.get("alpha", 1.0))), x)], {}, opset, outputs))


def quantize_value(m: ProofInterpreter, y: Value, scale: Value, kind: str) -> Value:
    """QuantizeLinear to the type ``kind`` with zero point 0: a function of y / scale that is not looked into, for
    rounding is no algebra. The floats beside the field go on with the quotient: where the two sides of a proof differ
    by a rounding, one more of them may not turn a tie into another number."""
    return apply_unknown(m, f"QuantizeLinear {kind}", m.div(y, scale), lambda quotient: quotient)


def quantize_rows(m: ProofInterpreter, y: Value, kind: str, least: float, largest: float) -> tuple[Value, Value]:
    """What is quantized by a scale of its row, the last axis, and that scale: functions of the row. Rows whose elements
    are equal one by one are equal: so a function of each element stands for what is made of all, for the scale too,
    which has one place where this has a row. The floats go on with y."""
    told = f"{kind} {least!r} {largest!r}"
    made = [apply_unknown(m, f"{what} {told}", y, lambda f: f) for what in ("quantized by row to", "a row's scale for")]
    return made[0], made[1]


def _quantize(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    y, scale, *zero = inputs
    if not zero or not isinstance(zero[0], np.dtype):
        raise NotProved(ProofFailure.OP, "QuantizeLinear without a zero point of 0")
    scale = lift_input(m, scale)
    others = {k: v for k, v in attrs.items() if (k, v) != ("saturate", 1) and k != "axis"}
    if others or scale.varying_atoms():
        raise NotProved(ProofFailure.OP, f"QuantizeLinear by {sorted(others) or 'several scales'}")
    return quantize_value(m, lift_input(m, y), scale, zero[0].name)


TABLE: dict[str, Op] = {
    **{name: _unary_op(name) for name in ("Sigmoid", "Tanh", "Erf", "Softplus", "HardSigmoid", "Gelu")},
    "Swish": _swish,
    "QuantizeLinear": _quantize,
}
