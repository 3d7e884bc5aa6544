"""Evaluate both sides of a proof at random points of a random prime field and compare them.

A first evaluation in floats shows how the axes must be cut into atoms. The evaluations in the field follow. Their
random elements are redrawn until every root exists in the field. The package `normdeploy.proof` defines the terms.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..evaluate import evaluator
from ..graphs.symbolic_sizes import Size
from .axis_plan import Atoms, AxisPlan
from .degree import ALL, scale_counts
from .equivalence import Equivalence
from .interpreter import DRAWS, ProofInterpreter, RandomDraws
from .prime_field import BITS, PrimeField
from .prime_field import make_field as field_number
from .proof_budget import OperationBudget
from .proof_errors import EpsilonMismatch, NewPrimeNeeded, NotProved, ProofFailure, RedrawRows, RestartEvaluation
from .resampling import redraw_elements
from .value import Value

# Maximum number of evaluations that one proof may start
_BEGINNINGS = 500
# An exact certificate is wrong with a probability of at most 2^-PROMISED
PROMISED = 80
# One identity is wrong with a probability of at most 2^-ASKED; a certificate may combine several identities
ASKED = PROMISED + 16
# Maximum length of a prime in bits
LONGEST = 4096
_PRIMES = 12
# A radicand that was a square in this number of evaluations is assumed to be a square always, and is refused
_UNSEEN = 60


@dataclass(frozen=True)
class Identity:
    """Result of a successful proof: both sides are one function.

    The identity does not depend on the elements of larger constants, so it also holds for sides that differ only in
    these elements. `check_stored_constants` compares the elements.

    Attributes:
        points: number of compared elements.
        degree: largest degree of the compared identities, as a number of places (`normdeploy.proof.degree`).
        parameters: True if the sides agree only up to a scale and shift per element. The file stores both rounded.
        epsilons: exact epsilons, keyed by the index of the node in ``Equivalence.nodes``.
        plan: layout of the axes.
        gains: True if an infinite input gives NaN after the rewrite and a number before it.
        read: constants that the proof replaced by the fractions from which they were rounded
            (`proof.rational_reconstruction`).
        roots: number of elements of the evaluation that are roots. Each root doubles the degree of the tested
            polynomial and halves the share of inputs at which all roots exist.
        zeros: sizes that both sides divide by and that may be zero.
        length: bits of the prime.
    """

    points: int
    degree: int
    parameters: bool
    epsilons: dict[int, float]
    plan: AxisPlan = field(compare=False)
    gains: bool = False
    read: tuple[tuple[float, str], ...] = ()
    roots: int = 0
    zeros: tuple[Size, ...] = ()
    length: int = BITS

    @property
    def security_bits(self) -> int:
        """Return b such that the error probability is at most 2^-b.

        The probability is at most 4^roots · (total degree)/p. The total degree includes weights, sizes and parameters.
        `lost_bits` contains a factor of 2^16. It covers the parts of the total degree that ``degree`` does not count,
        and the error probability of the random choice of p (docs/explanation/certificates.md).
        """
        return max(self.length - self.lost_bits, 0)

    @property
    def lost_bits(self) -> int:
        """Return the bits by which roots and degree reduce the security below the length of the prime."""
        return 16 + 2 * self.roots + math.ceil(math.log2(max(self.degree, 1)))


def check_identity(sides: Equivalence, plan: AxisPlan, counts: frozenset[int], length: int = BITS) -> Identity:
    """Evaluate both sides until every root exists in the field, and compare them.

    Args:
        plan: layout of the axes; it may grow.
        counts: element counts. A constant that is a rounded fraction of such counts is read as the exact fraction. If
            ``counts`` is empty, no constant is read as a fraction.
        length: bits of the prime.

    Returns:
        the identity.

    Raises:
        NotProved: the sides differ, or no points were found at which all roots exist.
    """
    number = 0
    draws = replace(_fresh_draws(counts=counts), length=length, held=sides.held, work=sides.work)
    unseen = 0
    # The search for a prime tests about length/20 candidates without small factors. Each test computes one power.
    sides.work.count_roots(length // 20, length)
    for _ in range(_BEGINNINGS):
        m = ProofInterpreter(plan, draws, field_number(number, length))
        try:
            with evaluator.silence_numpy():
                equal = evaluate_once(m, sides)
        except RestartEvaluation:
            draws = _fresh_draws(draws, epsilons=True)
            continue
        except RedrawRows as e:
            redraw_elements(draws, e, field_number(number, length).p)
            continue
        except NewPrimeNeeded:
            number = number + 1
            draws = _fresh_draws(draws)
            if number == _PRIMES:
                raise NotProved(ProofFailure.LIMIT, "no common finite field was found for its constants") from None
            continue
        except EpsilonMismatch as e:
            if e.node in draws.epsilons:
                raise NotProved(ProofFailure.DIFFERS, "no single epsilon matches all of its roots") from None
            draws.epsilons[e.node] = (e.residue, e.value)
            continue
        if all(draws.seen[i].are_independent for i in range(len(m.radicands))):
            again = _next_draws(draws, equal, bool(m.unknown))
            if again is None:
                return equal
            draws = again
            continue
        unseen += 1
        if unseen == _UNSEEN:
            raise NotProved(ProofFailure.SIGN, "it takes the root of a square")
        draws.elements = {k: v for k, v in draws.elements.items() if k[0] == "weights"}
        draws.affine = []
    raise NotProved(ProofFailure.LIMIT, "no sample points were found at which all of its roots exist")


def learn_axes(sides: Equivalence, plan: AxisPlan) -> int:
    """Evaluate in floats only, in a tenth of the time, to learn the layout of the axes.

    The evaluation shows how axes are cut, which axes are summed over, and the degree of the identity.

    Args:
        plan: receives the layout.

    Returns:
        the bits of a prime that is long enough for the number of roots (`Identity.lost_bits`).

    Raises:
        NotProved: an input has more than `LONGEST` roots, or the proof is too large.
    """
    plan.learning, rooted = True, dict[Atoms, bool]()
    for _ in range(_BEGINNINGS):
        m = ProofInterpreter(plan, replace(_fresh_draws(), held=sides.held, work=sides.work), None)
        try:
            with evaluator.silence_numpy():
                leaves = _draw_leaves(m, sides)
                for a, b in zip(sides.after(m, leaves), sides.before(m, leaves), strict=True):
                    plan.require_degree(b.degree.cross_multiply(a.degree), not any(m.rooted.values()))
        except RestartEvaluation:
            continue
        except NotProved:
            # The proof with symbols failed. It may succeed with the lengths of the file.
            if plan.named:
                raise
        rooted = m.rooted
        break
    plan.learning = False
    roots = sum(math.prod(map(plan.point_count, atoms)) for atoms in rooted)
    if roots > LONGEST:
        raise NotProved(
            ProofFailure.LIMIT,
            f"too large: it takes {roots:,} roots of each input; the limit is {LONGEST:,}",
        )
    # The last 8 bits allow a degree of up to 256.
    length = min(max(BITS, ASKED + 16 + 4 * roots + 8), LONGEST)
    # Refuse a proof that is too large before searching for a long prime. The search takes as long as the roots.
    OperationBudget(sides.work.spent).count_roots(DRAWS * roots, length)
    return length


def _next_draws(draws: RandomDraws, proof: Identity, unknown: bool) -> RandomDraws | None:
    """Prepare one more evaluation if the result needs it.

    A scale, shift or epsilon must not depend on sizes, so the next evaluation computes it again at other sizes. If
    roots of constants of large height were taken, the next evaluation takes the other sign.

    Returns:
        the draws of the next evaluation; None if no further one is needed.

    Raises:
        NotProved: a scale, shift or epsilon depends on a size.
    """
    sizes = bool(proof.parameters or proof.epsilons) and len(draws.affine) == 1
    if len(draws.affine) == 2:
        for one, other in zip(*draws.affine, strict=True):
            if (one is None) != (other is None) or (
                one is not None and any((u != v).any() for u, v in zip(one, other, strict=True))
            ):
                raise NotProved(ProofFailure.DIFFERS, "one of its scales, shifts or epsilons depends on a size")
        # This evaluation was the one at other sizes.
        draws.affine = [None]
    if sizes:
        draws.elements = {k: v for k, v in draws.elements.items() if k[0] == "constant"}
        draws.symbols = {}
        return draws
    if not unknown or draws.flipped:
        return None
    draws.flipped = True
    draws.affine = []
    return draws


def _fresh_draws(
    old: RandomDraws | None = None, epsilons: bool = False, counts: frozenset[int] = frozenset()
) -> RandomDraws:
    """Start with new random elements. The constants of the file stay. If ``epsilons`` is set, the epsilons stay too,
    because the field is the same.
    """
    draws = RandomDraws(random.Random(random.SystemRandom().getrandbits(128)), counts=counts)
    if old is not None:
        draws.held = old.held
        draws.counts = old.counts
        draws.length = old.length
        draws.work = old.work
        if epsilons:
            draws.epsilons = dict(old.epsilons)
        else:
            draws.epsilons = {}
    return draws


def _draw_leaves(m: ProofInterpreter, sides: Equivalence) -> list[Value]:
    """Draw the leaves and, for a fold, store its exact constants in ``m.given``.

    The constants come first, because computing them may require a redraw.
    """

    def drawn_leaves() -> list[Value]:
        return [m.make_leaf(i, shape, partial(_leaf_floats, i)) for i, shape in enumerate(sides.shapes)]

    if sides.expressions is not None and sides.graph is not None:
        try:
            m.given = sides.expressions.evaluate_constants(m, sides.graph)
        except NotProved:
            # Evaluate the side before the rewrite anyway: it may show how an axis is cut, and then the constants may be
            # computable.
            sides.before(m, drawn_leaves())
            raise
    return drawn_leaves()


def evaluate_once(m: ProofInterpreter, sides: Equivalence) -> Identity:
    """Evaluate both sides once and compare their results.

    Returns:
        the identity that this evaluation shows.

    Raises:
        NotProved: the sides differ, or their divisors that may be zero (sizes or deviations) differ.
        EpsilonMismatch: the radicands agree up to an epsilon.
    """
    leaves = _draw_leaves(m, sides)
    new = sides.after(m, leaves)
    zeros, m.zeros, divided, m.divided = m.zeros, [], m.divided, set()
    old = sides.before(m, leaves)
    computed = bool(m.draws.epsilons or m.draws.read) or any(
        id(c) in sides.graph.exact for c in sides.after_constants() if sides.graph
    )
    try:
        if set(zeros) != set(m.zeros):
            sizes = ", ".join(map(str, set(zeros) ^ set(m.zeros)))
            raise NotProved(
                ProofFailure.SIZE,
                f"only the original or only the rewritten nodes divide by {sizes}, which is zero at some size",
            )
        if divided != m.divided:
            raise NotProved(
                ProofFailure.HIDDEN,
                "only the original or only the rewritten nodes divide by a deviation that may be zero",
            )
        results = [_compare_values(m, b, a, computed) for b, a in zip(old, new, strict=True)]
    except NotProved as e:
        e.culprit = e.culprit or sides.culprit
        if e.why is not ProofFailure.DIFFERS or not m.others or m.draws.epsilons:
            raise
        raise m.others[-1] from None
    places = {id(n): i for i, n in enumerate(sides.nodes)}
    epsilons = {places[node]: value for node, (_, value) in m.draws.epsilons.items()}
    points, degrees, affine = zip(*results, strict=True)
    m.draws.affine.append(affine)
    roots = sum(r.root.a.size // r.root.a.shape[0] for r in m.radicands if r.root.a is not None)
    return Identity(
        sum(points),
        max(degrees),
        any(x is not None for x in affine),
        epsilons,
        m.plan,
        read=tuple(sorted(m.draws.read.items())),
        roots=roots,
        zeros=tuple(set(zeros)),
        length=m.draws.length,
    )


def _leaf_floats(leaf: int, counts: tuple[int, ...]) -> Any:
    """Draw normal samples. The last draw is all zeros: there a radicand equals its epsilon."""
    x = np.random.default_rng(41 + leaf).standard_normal((DRAWS, *counts))
    x[-1] = 0.0
    return x


def _compare_values(m: ProofInterpreter, old: Value, new: Value, computed: bool) -> tuple[int, int, Any]:
    """Compare one result of both sides.

    Args:
        computed: the rewrite stored rounded numbers, so the sides may differ by a scale and a shift.

    Returns:
        the number of compared elements, the degree, and the scale and shift of each element. Scale and shift are None
        if the results are equal.

    Raises:
        NotProved: shapes or values differ.
    """
    if old.shape != new.shape:
        raise NotProved(
            ProofFailure.SIZE,
            f"the shape {_describe_value(old)} becomes {_describe_value(new)}, which may differ",
        )
    degrees = old.degree.cross_multiply(new.degree)
    _, ((b, f), (a, g)) = m.broadcast_values(old, new)
    assert a is not None
    assert b is not None
    assert m.gf is not None
    p = m.gf.p
    same = not ((a - b) % p != 0).any()
    if not same and not computed:
        raise NotProved(ProofFailure.DIFFERS, "it computes a different function")
    if not same:
        degrees = scale_counts(degrees, 2)
    if same:
        affine = None
    else:
        affine = _affine_difference(a, b, p)
    m.plan.require_degree(degrees, not m.draws.opaque and not any(r.w.degree.has_sums for r in m.radicands))
    f, g = np.broadcast_arrays(f[: DRAWS - 1], g[: DRAWS - 1])
    if same and not np.allclose(f, g, rtol=1e-6, atol=1e-6 * (float(np.abs(f).max()) + 1e-300), equal_nan=True):
        raise NotProved(ProofFailure.DIFFERS, "the two sides agree in the finite field but differ in floating point")
    return int(np.prod(np.broadcast_shapes(a.shape, b.shape))), degrees.get(ALL, 0), affine


def _affine_difference(a: Any, b: Any, p: int) -> tuple[Any, Any]:
    """Compute A and B of before = A·after + B at each element, the same for all inputs.

    The first two draws determine A and B. The other draws test them.
    """
    a, b = np.broadcast_arrays(a, b)
    if a.shape[0] < 4:
        raise NotProved(ProofFailure.DIFFERS, "it computes a different function")
    da = (a[1:] - a[0]) % p
    db = (b[1:] - b[0]) % p
    if ((da == 0) != (db == 0)).any() or ((db[1:] * da[0] - db[0] * da[1:]) % p != 0).any():
        raise NotProved(ProofFailure.DIFFERS, "it computes a different function")
    scale = PrimeField(p).inverse(da[0]) * db[0] % p
    # If gamma is zero, the results on both sides do not depend on the input, and only the shift matters.
    scale[da[0] == 0] = 1
    return scale, (b[0] - scale * a[0]) % p


def _describe_value(v: Value) -> str:
    return "(" + ", ".join(map(str, v.shape)) + ")"
