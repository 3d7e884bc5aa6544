"""Check that each number that a rewrite computed is stored as the exact number, rounded once.

A rewrite may compute gamma, beta or epsilon (γ·√((n−1)/n), ε·(n−1)/n, 1 + w). For such parameters, the proof in the
field shows only before = A·after + B for each element, with A and B independent of the input. This module then checks
two facts. With the parameters as computed in float64, A is one and B is zero. And each stored element is within half an
ulp of the computed element.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import UNIT_ROUNDOFF
from ..evaluate import evaluator
from ..graphs.file_graph import widen_to_float64
from ..graphs.graph import Graph
from ..graphs.symbolic_sizes import Size
from .axis_plan import AxisPlan
from .computed_constants import ComputedConstants
from .equivalence import Equivalence
from .interpreter import ProofInterpreter, RandomDraws, StoredConstant
from .nonfinite_checks import Pattern, evaluate_in_floats
from .proof_errors import NotProved, ProofFailure, RestartEvaluation
from .value import Value

# Relative tolerance between the sides in float64. It is far below half an ulp of float32, which is at least 2^-25.
_CLOSE = 2.0**-34
# Relative tolerance in long doubles, used if a parameter is stored in float64
_CLOSER = 2.0**-46
# Relative tolerance if constants before the rewrite were rounded to float32: values computed from them are off by a few
# ulp
_READ = 2.0**-21
# Tolerance of a sum, relative to the sum of the magnitudes of its terms: each term costs float64 a few ulp of the
# latter sum
_TERMS = 2.0**-40
# Relative tolerance of an epsilon, which is computed as a quotient of differences in float64
_SOLVED = 2.0**-40
# Half of the smallest subnormal of each dtype: the rounding error of a number near zero
_LEAST = {
    "float64": 2.0**-1075,
    "float32": 2.0**-150,
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
}


class _FullPlan(AxisPlan):
    """Plan with one point per place along the axes in ``laid``, the axes along which constants vary."""

    laid: frozenset[Size] = frozenset()

    def point_count(self, atom: Size) -> int:
        """Count the points of an atom.

        Returns:
            the number of places for atoms in ``laid``, else as in `AxisPlan`.
        """
        if atom not in self.joins:
            n = atom.constant_value
        else:
            n = None
        if n is not None and atom in self.laid:
            return n
        return super().point_count(atom)


def check_stored_parameters(sides: Equivalence, plan: AxisPlan, epsilons: Mapping[int, float], read: bool) -> None:
    """Check that each computed parameter has the right value.

    Args:
        epsilons: exact epsilon by the index of the node in ``sides.nodes``.
        read: True if constants before the rewrite were read as the fractions of which they are the rounded values.

    Raises:
        NotProved: a parameter has another value.
    """
    full = _full_plan(plan)
    new = [c for c in sides.after_constants() if sides.graph is not None and id(c) in sides.graph.exact]
    held: dict[int, StoredConstant] = {}
    evaluate_in_floats(sides, plan, [("zero", tuple((i, 0.0, -1) for i in range(len(sides.shapes))))], held=held)
    full.laid = frozenset(
        a for h in held.values() if not h.uniform for n in h.array.shape for a in full.atoms_of(Size.from_int(n))
    )
    for place, exact in epsilons.items():
        node = sides.nodes[place]
        _require_half_ulp(
            np.array(float(node.attrs["epsilon"])), np.array(exact), "float32", f"the epsilon of {node.op}", _SOLVED
        )
    double = any(c.dtype == np.float64 for c in new)
    close = max(_CLOSER if double else _CLOSE, 2.0**-23 if epsilons else 0.0, _READ if read else 0.0)
    looked: list[Pattern] = [
        ("normal", ()),
        ("normal", ()),
        ("zero", tuple((i, 0.0, -1) for i in range(len(sides.shapes)))),
    ]
    for old, after in evaluate_in_floats(sides, full, looked, np.longdouble if double else np.float64):
        finite = np.isfinite(old) & np.isfinite(after)
        dy = old[1] - old[0]
        dz = after[1] - after[0]
        # Draw 2 is all zeros: its result is the shift, or NaN from 0/0.
        apart = np.abs(after[0] - after[2]) + np.abs(after[1] - after[2])
        apart = np.where(np.isfinite(apart), apart, np.abs(dz))
        scale = np.abs(dz - dy) <= close * apart
        shift = np.abs(old - after) <= close * (np.abs(after) + apart)
        shift[2] = np.abs(old[2] - after[2]) <= close * np.abs(after[2])
        if not (scale | ~finite[0] | ~finite[1]).all() or not (shift | ~finite).all():
            raise NotProved(ProofFailure.STORED, "its scale or shift differs from the exact one", sides.culprit)


def _full_plan(plan: AxisPlan) -> _FullPlan:
    return _FullPlan(
        dict(plan.points), dict(plan.cuts), set(plan.summed), dict(plan.joins), plan.displaced, dict(plan.together)
    )


def check_fold_constants(graph: Graph, e: ComputedConstants, plan: AxisPlan, held: dict[int, StoredConstant]) -> None:
    """Check that each constant of a fold has the value of its expression.

    Args:
        held: constants already read, by the ids of their tensors.

    Raises:
        NotProved: a constant has another value.
    """
    new = e.computed_constants()
    full = _full_plan(plan)
    while True:
        full.laid = frozenset(a for atoms in _constant_lengths(graph, e, new) for a in full.atoms_of(atoms))
        m = ProofInterpreter(full, RandomDraws(random.Random(7), held=held), None)
        try:
            with evaluator.silence_numpy():
                values = e.evaluate_constants(m, graph)
        except RestartEvaluation:
            continue
        break
    terms: dict[int, Value] = {}
    for c in new:
        if id(c) not in graph.exact:
            raise NotProved(ProofFailure.STORED, f"{c.name!r} is not a computed constant", c.name)
        shape = graph.exact.shape(id(c))
        laid = _elements_in_order(full, values[id(c)], shape)
        # First compare relative to the magnitude of the result. This is stricter, because the sum of the terms'
        # magnitudes is at least as large.
        if _is_near(laid, graph, c, laid):
            continue
        with evaluator.silence_numpy():
            terms = terms or e.evaluate_constants(m, graph, absolute=True)
        if not _is_near(laid, graph, c, _elements_in_order(full, terms[id(c)], shape)):
            exact = np.concatenate([part for _, part in graph.exact.exact_pieces(id(c))])
            worst = int(np.argmax(np.abs(laid - exact)))
            raise NotProved(
                ProofFailure.STORED, f"{c.name!r} holds {exact[worst]:.9g}, but {laid[worst]:.9g} is correct", c.name
            )


def _is_near(stored: np.ndarray, graph: Graph, c: gs.Constant, terms: np.ndarray) -> bool:
    """Return True if a constant's elements are within `_TERMS` of ``stored``, relative to the magnitudes ``terms``."""
    each = graph.exact.exact_pieces(id(c))
    return all((np.abs(stored[places] - exact) <= _TERMS * np.abs(terms[places])).all() for places, exact in each)


def _elements_in_order(plan: AxisPlan, v: Value, shape: tuple[int, ...]) -> np.ndarray:
    """Return the elements as a flat array in row-major order."""
    # The reshape fails if the number of elements differs.
    laid = np.broadcast_to(v.f, (1, *(plan.point_count(x) for x in v.atoms))).reshape(shape)
    return laid.reshape(-1)


def _constant_lengths(graph: Graph, e: ComputedConstants, new: list[gs.Constant]) -> set[Size]:
    """Collect the lengths of all axes along which constants of the fold vary."""
    constants = [t for n in e.nodes for t in n.inputs if not t.is_empty() and graph.is_constant(t)]
    arrays = [v for t in constants if (v := graph.known_value(t)) is not None]
    return {Size.from_int(n) for v in (*arrays, *e.weights, *(c.values for c in new)) for n in v.shape}


def check_stored_bytes(sides: Equivalence) -> None:
    """Check that each computed constant is stored as its exact value, rounded once.

    Raises:
        NotProved: the shape differs, or an element is more than half an ulp off.
    """
    for c in sides.after_constants():
        if sides.graph is None or id(c) not in sides.graph.exact:
            continue
        computed = sides.graph.exact.shape(id(c))
        if tuple(c.shape) != computed:
            raise NotProved(
                ProofFailure.STORED,
                f"{c.name!r} is stored with shape {tuple(c.shape)}, but computed with shape {computed}",
                c.name,
            )
        if sides.graph.exact.is_rounded_value(c):
            continue
        values = c.values.reshape(-1)
        for places, exact in sides.graph.exact.exact_pieces(id(c)):
            if not _is_rounded_once(values[places], exact):
                _require_half_ulp(widen_to_float64(values[places]), exact, np.dtype(c.dtype).name, repr(c.name))


def _is_rounded_once(stored: np.ndarray, exact: np.ndarray) -> bool:
    """Return True if ``stored`` is ``exact`` rounded to nearest, as IEEE defines it.

    ml_dtypes rounds to bfloat16 in two steps.
    """
    if stored.dtype not in (np.float16, np.float32, np.float64):
        return False
    with np.errstate(all="ignore"):
        return bool((stored == exact.astype(stored.dtype)).all()) and bool(np.isfinite(stored).all())


def _require_half_ulp(stored: np.ndarray, exact: np.ndarray, dtype: str, name: str, off: float = 0.0) -> None:
    """Require that each stored element is within half an ulp of the exact element.

    Args:
        off: relative error of ``exact`` itself.

    Raises:
        NotProved: an element is more than half an ulp off.
    """
    unit = UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["float32"])
    least = _LEAST.get(dtype, 0.0)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(stored)
        # |stored| lies in [2^(e−1), 2^e), and an ulp there is 2·unit·2^(e−1).
        half = np.maximum(np.ldexp(unit, exponent - 1), least)
        if not (np.abs(stored - exact) <= half + off * np.abs(exact)).all():
            worst = int(np.argmax(np.abs(stored - exact).reshape(-1)))
            raise NotProved(
                ProofFailure.STORED,
                f"{name} is stored as {stored.reshape(-1)[worst]:.9g}, which differs by more than half an "
                f"ulp from {exact.reshape(-1)[worst]:.9g}",
            )
