"""Admit opaque functions: equal arguments have equal results.

**Lemma.** Let B and A be functions of x and of an unknown function σ. If B = A for every σ, then B = A for the actual
σ.

**Proof.** Specialization. In the field, σ has a random value for each argument; equal arguments get the same value. Two
arguments that are different functions have different residues. The exception has a small probability, which the error
probability of the certificate includes. So a Sigmoid is admitted if the nodes after the rewrite apply it to the same
argument. `tests/proof/test_lemmas.py` has two counterexamples: another function, and another argument.
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
    """Apply an opaque function σ of one number to each element.

    Args:
        name: identifies σ.
        real: computes σ in floats.

    Returns:
        σ(x), in the shape of ``x``.
    """
    made = None
    if m.gf is not None and x.a is not None:
        # The final comparison does not see the degree of σ's argument, so require its points here.
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
    """Compute x·sigmoid(alpha·x)."""
    x = lift_input(m, inputs[0])
    return m.mul(x, _unary_op("Sigmoid")(m, [m.mul(m.number(float(attrs.get("alpha", 1.0))), x)], {}, opset, outputs))


def quantize_value(m: ProofInterpreter, y: Value, scale: Value, kind: str) -> Value:
    """Apply QuantizeLinear to the type ``kind`` with zero point 0, as an opaque function of y / scale.

    Rounding is not algebraic, so the field uses an opaque function. The floats keep the quotient y / scale unrounded.
    The floats of the two sides may differ slightly, and rounding could turn a tie into two different numbers.

    Returns:
        the quantized value.
    """
    return apply_unknown(m, f"QuantizeLinear {kind}", m.div(y, scale), lambda quotient: quotient)


def quantize_rows(m: ProofInterpreter, y: Value, kind: str, least: float, largest: float) -> tuple[Value, Value]:
    """Quantize y with one scale per row of the last axis. Both results are opaque functions of the row.

    Two rows are equal if all their elements are equal. So an opaque function of each element represents a function of
    the whole row. The scale, one number per row, is such a function too. The floats keep y unchanged.

    Returns:
        the quantized value and its scale.
    """
    told = f"{kind} {least!r} {largest!r}"
    made = [apply_unknown(m, f"{what} {told}", y, lambda f: f) for what in ("quantized by row to", "a row's scale for")]
    return made[0], made[1]


def _quantize(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    y, scale, *zero = inputs
    if not zero or not isinstance(zero[0], np.dtype):
        raise NotProved(ProofFailure.OP, "QuantizeLinear without a constant zero point of 0")
    scale = lift_input(m, scale)
    others = {k: v for k, v in attrs.items() if (k, v) != ("saturate", 1) and k != "axis"}
    if others or scale.varying_atoms():
        raise NotProved(ProofFailure.OP, f"QuantizeLinear with {sorted(others) or 'several scales'}")
    return quantize_value(m, lift_input(m, y), scale, zero[0].name)


TABLE: dict[str, Op] = {
    **{name: _unary_op(name) for name in ("Sigmoid", "Tanh", "Erf", "Softplus", "HardSigmoid", "Gelu")},
    "Swish": _swish,
    "QuantizeLinear": _quantize,
}
