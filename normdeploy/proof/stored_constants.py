"""What a rewrite computed, and what stands in the file: each stored number is the exact one, rounded once.

Where a rewrite computes gamma, beta or epsilon (γ·√((n−1)/n), ε·(n−1)/n, 1 + w), the field shows that before = A·after
+ B for each element, with A and B that don't depend on the input. Here the numbers are looked at: with the parameters
as they were computed, in float64, A is one and B is zero; and each element that is stored lies within half an ulp of
the computed one.
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

# of float64's evaluation of both sides; a half ulp of float32 is 2^-25 or more
_CLOSE = 2.0**-34
# of long doubles, where a parameter is stored in float64
_CLOSER = 2.0**-46
# where constants before are roundings in float32: what is measured with them is off by a few of its ulp
_READ = 2.0**-21
# of the sum of the magnitudes of what is added up: float64 loses a few ulp of that for each term
_TERMS = 2.0**-40
# of an epsilon, a quotient of differences in float64
_SOLVED = 2.0**-40
# half of the smallest subnormal
_LEAST = {
    "float64": 2.0**-1075,
    "float32": 2.0**-150,
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
}


class _FullPlan(AxisPlan):
    """A plan in which the axes along which constants vary have a point for each place."""

    laid: frozenset[Size] = frozenset()

    def point_count(self, atom: Size) -> int:
        if atom not in self.joins:
            n = atom.constant_value
        else:
            n = None
        if n is not None and atom in self.laid:
            return n
        return super().point_count(atom)


def check_stored_parameters(sides: Equivalence, plan: AxisPlan, epsilons: Mapping[int, float], read: bool) -> None:
    """Raises NotProved where a computed parameter is not what it should be.

    ``epsilons``: by place among the nodes after. ``read``: constants before stand for fractions that they are roundings
    of.
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
        # a row of zeros is the shift alone, or 0/0
        apart = np.abs(after[0] - after[2]) + np.abs(after[1] - after[2])
        apart = np.where(np.isfinite(apart), apart, np.abs(dz))
        scale = np.abs(dz - dy) <= close * apart
        shift = np.abs(old - after) <= close * (np.abs(after) + apart)
        shift[2] = np.abs(old[2] - after[2]) <= close * np.abs(after[2])
        if not (scale | ~finite[0] | ~finite[1]).all() or not (shift | ~finite).all():
            raise NotProved(ProofFailure.STORED, "its scale or shift is not the exact one", sides.culprit)


def _full_plan(plan: AxisPlan) -> _FullPlan:
    return _FullPlan(
        dict(plan.points), dict(plan.cuts), set(plan.summed), dict(plan.joins), plan.displaced, dict(plan.together)
    )


def check_fold_constants(graph: Graph, e: ComputedConstants, plan: AxisPlan, held: dict[int, StoredConstant]) -> None:
    """Raises NotProved where a constant of a fold is not the value of its expression. ``held``: constants that were
    read before."""
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
            raise NotProved(ProofFailure.STORED, f"{c.name!r} is no constant that was computed", c.name)
        shape = graph.exact.shape(id(c))
        laid = _elements_in_order(full, values[id(c)], shape)
        # whose magnitude is less than the sum of those of its terms
        if _is_near(laid, graph, c, laid):
            continue
        with evaluator.silence_numpy():
            terms = terms or e.evaluate_constants(m, graph, absolute=True)
        if not _is_near(laid, graph, c, _elements_in_order(full, terms[id(c)], shape)):
            exact = np.concatenate([part for _, part in graph.exact.exact_pieces(id(c))])
            worst = int(np.argmax(np.abs(laid - exact)))
            raise NotProved(
                ProofFailure.STORED, f"{c.name!r} holds {exact[worst]:.9g} where {laid[worst]:.9g} is right", c.name
            )


def _is_near(stored: np.ndarray, graph: Graph, c: gs.Constant, terms: np.ndarray) -> bool:
    """Whether a constant's elements are what float64 makes of sums of such magnitudes."""
    each = graph.exact.exact_pieces(id(c))
    return all((np.abs(stored[places] - exact) <= _TERMS * np.abs(terms[places])).all() for places, exact in each)


def _elements_in_order(plan: AxisPlan, v: Value, shape: tuple[int, ...]) -> np.ndarray:
    """The elements in row-major order."""
    # which fails where they are too few or many
    laid = np.broadcast_to(v.f, (1, *(plan.point_count(x) for x in v.atoms))).reshape(shape)
    return laid.reshape(-1)


def _constant_lengths(graph: Graph, e: ComputedConstants, new: list[gs.Constant]) -> set[Size]:
    """The lengths of all axes along which constants of the fold vary."""
    constants = [t for n in e.nodes for t in n.inputs if not t.is_empty() and graph.is_constant(t)]
    arrays = [v for t in constants if (v := graph.known_value(t)) is not None]
    return {Size.from_int(n) for v in (*arrays, *e.weights, *(c.values for c in new)) for n in v.shape}


def check_stored_bytes(sides: Equivalence) -> None:
    """Raises NotProved where a constant that a rewrite computed is stored as something else than itself, rounded."""
    for c in sides.after_constants():
        if sides.graph is None or id(c) not in sides.graph.exact:
            continue
        computed = sides.graph.exact.shape(id(c))
        if tuple(c.shape) != computed:
            raise NotProved(
                ProofFailure.STORED,
                f"{c.name!r} is stored in the shape {tuple(c.shape)}, computed in {computed}",
                c.name,
            )
        values = c.values.reshape(-1)
        for places, exact in sides.graph.exact.exact_pieces(id(c)):
            if not _is_rounded_once(values[places], exact):
                _require_half_ulp(widen_to_float64(values[places]), exact, np.dtype(c.dtype).name, repr(c.name))


def _is_rounded_once(stored: np.ndarray, exact: np.ndarray) -> bool:
    """Whether ``held`` is what IEEE's rounding to nearest makes of ``exact``; ml_dtypes rounds to bfloat16 in two
    steps."""
    if stored.dtype not in (np.float16, np.float32, np.float64):
        return False
    with np.errstate(all="ignore"):
        return bool((stored == exact.astype(stored.dtype)).all()) and bool(np.isfinite(stored).all())


def _require_half_ulp(stored: np.ndarray, exact: np.ndarray, dtype: str, name: str, off: float = 0.0) -> None:
    """``off``: relative error of ``exact`` itself."""
    unit = UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["float32"])
    least = _LEAST.get(dtype, 0.0)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(stored)
        # |held| lies in [2^(e−1), 2^e), where an ulp is 2·unit·2^(e−1)
        half = np.maximum(np.ldexp(unit, exponent - 1), least)
        if not (np.abs(stored - exact) <= half + off * np.abs(exact)).all():
            worst = int(np.argmax(np.abs(stored - exact).reshape(-1)))
            raise NotProved(
                ProofFailure.STORED,
                f"{name} is stored as {stored.reshape(-1)[worst]:.9g}, which is more than half an ulp from"
                f" {exact.reshape(-1)[worst]:.9g}",
            )
