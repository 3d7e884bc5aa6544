"""Admit Softmax as an opaque function of its row, and Attention as the products around it.

**Lemma.** Let B = F(softmax(x_B)) and A = G(softmax(x_A)), with F and G made of ops that the prover defines. If x_B =
x_A, and F(p) = G(p) for every array p of the same shape, then B = A, at every size.

**Proof.** Specialization to p = softmax(x_B) = softmax(x_A). In the field, each pair of a row of x and an element of
this row gets one random element of p. Equal pairs along the same atoms get the same random element. So F and G read p
as a leaf without sums and with distinct rows. Arguments that are different functions have different residues. The
exception has a small probability, which the error probability of the certificate includes. The plan requires enough
points to show x_B = x_A at every size. `congruence` does the same for functions of one number.

**Attention** is softmax(scale·q·kᵀ + mask)·v (https://onnx.ai/onnx/operators/onnx__Attention.html); each head of k and
v serves several consecutive heads of q. For a row whose mask is −Inf throughout, Attention gives zeros, and Softmax
gives NaN. The floats follow this definition. So a rewrite may write an Attention only if it knows that the mask has no
such row. A scale that a rewrite computed is exact in the field; the file stores it rounded once.
`tests/rewriting/test_attention_fusion.py` has the counterexamples: other scales, axes, masks and heads.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ...evaluate.evaluator_core import optional_input
from ...graphs.symbolic_sizes import ONE, Size
from ..degree import scale_counts
from ..interpreter import ProofInterpreter
from ..op_definitions import TABLE as OPS
from ..op_definitions import Attrs, Inputs, Op, lift_input
from ..proof_errors import NotProved, ProofFailure
from ..value import Array, Value


class RoundedFloat(float):
    """Computed float32 attribute, with its exact value.

    Attributes:
        exact: the value before rounding.
    """

    exact: Fraction

    def __new__(cls, exact: Fraction) -> RoundedFloat:
        made = super().__new__(cls, float(np.float32(float(exact))))
        made.exact = exact
        return made

    def __repr__(self) -> str:
        return f"{float(self)!r} for {self.exact}"


def softmax(m: ProofInterpreter, x: Value, axis: int) -> Value:
    """Apply Softmax along an axis: in the field as an opaque function of row and element, in floats as the real
    function.

    Args:
        axis: number of the axis, non-negative.

    Returns:
        the result, in the shape of ``x``.
    """
    slots = tuple(x.array_axes(axis))
    made = None
    if m.gf is not None and x.a is not None:
        m.plan.require_degree(scale_counts(x.degree.larger_counts(), 2))
        made = _residues_of_rows(m, np.moveaxis(x.a, slots, range(-len(slots), 0)), x.axes[axis], len(slots))
        made = np.moveaxis(made, range(-len(slots), 0), slots)
    with np.errstate(all="ignore"):
        shifted = np.exp(x.f - x.f.max(axis=slots, keepdims=True))
        below = m.sum_over(Value(x.axes, None, shifted), [axis]).f
        floats: Array = shifted / np.expand_dims(below, slots)
    degree = x.degree.with_places_in(x.varying_atoms()).of_unknown_function()
    return Value(x.axes, made, floats, x.data, degree=degree, sized=x.sized, fixed=x.fixed)


def _residues_of_rows(m: ProofInterpreter, a: Array, atoms: tuple[Size, ...], last: int) -> Array:
    """Return a residue for each element of ``a``; its ``last`` axes form a row."""
    assert m.gf is not None
    table = m.draws.opaque
    p = m.gf.p
    rows = a.reshape(-1, int(np.prod(a.shape[a.ndim - last :], dtype=int)))
    made: Array = np.empty(rows.shape, dtype=object)
    for i, row in enumerate(rows.tolist()):
        name = ("Softmax", atoms, tuple(row))
        made[i] = [table.setdefault((name, v), m.draws.rng.randrange(p)) for v in row]
    return made.reshape(a.shape)


def _softmax(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    if opset < 13 or not x.axes:
        raise NotProved(ProofFailure.OP, "Softmax over several axes (opset 12 or older)", "Softmax")
    return softmax(m, x, int(attrs.get("axis", -1)) % len(x.axes))


def _attention(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    if attrs.keys() - {"scale"} or "scale" not in attrs or outputs > 1 or any(x is not None for x in inputs[4:]):
        raise NotProved(
            ProofFailure.OP, "an Attention with inputs, outputs or attributes beyond a scale and a mask", "Attention"
        )
    q, k, v = (lift_input(m, x) for x in inputs[:3])
    if any(len(x.axes) != 4 for x in (q, k, v)):
        raise NotProved(ProofFailure.OP, "an Attention without an axis for its heads", "Attention")
    (batch, heads, rows, width), (_, shared, columns, _) = q.shape, k.shape
    each = heads.divide_exactly(shared)
    if each is None or k.shape != (batch, shared, columns, width) or v.shape[:3] != k.shape[:3]:
        raise NotProved(
            ProofFailure.SIZE, f"an Attention with incompatible shapes: {q.shape}, {k.shape} and {v.shape}", "Attention"
        )
    q = m.mul(m.number(_exact_scale(attrs["scale"])), q)
    if each != ONE:
        q = q.with_axes(m.plan.regroup_atoms(q.atoms, [batch, shared, each, rows, width]))
        k, v = (x.with_axes((*x.axes[:2], (), *x.axes[2:])) for x in (k, v))
    scores = _grouped_matmul(m, q, _swap_last_axes(m, k))
    mask = optional_input(inputs, 3)
    if mask is None:
        biased = scores
    else:
        biased = m.add(scores, lift_input(m, mask))
    if biased.shape != scores.shape:
        raise NotProved(
            ProofFailure.SIZE,
            f"an Attention whose mask broadcasts its scores from {scores.shape} to {biased.shape}",
            "Attention",
        )
    p = softmax(m, biased, 3)
    if mask is not None:
        p.f = _zero_hidden_rows(m, p, lift_input(m, mask))
    if each != ONE:
        p = p.with_axes(m.plan.regroup_atoms(p.atoms, [batch, shared, each, rows, columns]))
    return _grouped_matmul(m, p, v)


def _exact_scale(scale: float) -> Fraction:
    """Return the exact scale.

    Raises:
        NotProved: the stored scale is not the exact scale rounded once.
    """
    if not isinstance(scale, RoundedFloat):
        return Fraction(scale)
    half = Fraction(float(np.spacing(np.float32(abs(scale))))) / 2
    if abs(Fraction(float(scale)) - scale.exact) > half:
        formula = (
            f"the scale of Attention is stored as {float(scale):.9g}, which differs by more than half an ulp from "
            f"{float(scale.exact):.9g}"
        )
        raise NotProved(ProofFailure.STORED, formula, "Attention")
    return scale.exact


def _swap_last_axes(m: ProofInterpreter, x: Value) -> Value:
    perm = [*range(len(x.axes) - 2), len(x.axes) - 1, len(x.axes) - 2]
    turned: Value = OPS["Transpose"](m, [x], {"perm": perm}, 23, 1)
    return turned


def _grouped_matmul(m: ProofInterpreter, x: Value, y: Value) -> Value:
    """Multiply as MatMul, then merge the axis of groups and the axis of heads in a group into one axis."""
    made: Value = OPS["MatMul"](m, [x, y], {}, 23, 1)
    if len(made.axes) == 5:
        made = made.with_axes((made.axes[0], made.axes[1] + made.axes[2], *made.axes[3:]))
    return made


def _zero_hidden_rows(m: ProofInterpreter, p: Value, mask: Value) -> Array:
    """Return the floats of ``p``, with zeros in rows that the mask hides entirely."""
    axis = len(mask.axes) - 1
    slots = tuple(mask.array_axes(axis))
    hidden = (mask.f == -np.inf).all(axis=slots, keepdims=True).astype(np.float64)
    axes = tuple(() if i == axis else own for i, own in enumerate(mask.axes))
    flag = Value(axes, None, hidden.reshape([n for i, n in enumerate(hidden.shape) if i not in slots]))
    _, ((_, f), (_, g)) = m.broadcast_values(p, flag)
    return np.where(g != 0, 0.0, f)


TABLE: dict[str, Op] = {"Softmax": _softmax, "Attention": _attention}
