"""Check that no NaN or Inf is hidden: each element that is NaN or Inf before the rewrite is also NaN or Inf after it.

All ops that the prover defines propagate NaN, so the graph's structure alone determines which elements a NaN reaches.
The places of a leaf fall into classes (`normdeploy.proof.sample_points`), and one NaN in one place of each class shows
which elements it reaches. Inf follows IEEE arithmetic (Inf − Inf, Inf/Inf, 0·Inf). It is tested with one Inf, with two
Infs of the same sign, and with two Infs of opposite signs.

Finite inputs, including constant rows and zeros, must give finite results after the rewrite if they gave finite results
before.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from ..evaluate import evaluator
from ..graphs.symbolic_sizes import Size
from .axis_plan import AxisPlan
from .equivalence import Equivalence
from .interpreter import ProofInterpreter, RandomDraws, StoredConstant
from .proof_errors import NotProved, ProofFailure, RestartEvaluation
from .sample_points import representative_places
from .value import Array

_SAID = {"nan": "a NaN", "inf": "an Inf", "-inf": "a -Inf"}


# A tested input: its name, and (leaf, number, place) for each inserted number. The place is an index into
# `representative_places`; -1 means everywhere.
Pattern = tuple[str, tuple[tuple[int, float, int], ...]]


def nonfinite_patterns(places: Sequence[int], partly_hidden: Collection[int] = ()) -> list[Pattern]:
    """List the tested inputs: finite rows, and NaN and Inf at the representative places of each leaf.

    Args:
        places: number of representative places per leaf.
        partly_hidden: leaves in which no row consists of -Inf only, as in `Equivalence`.

    Returns:
        the patterns; the first has no inserted number.
    """
    bad = (np.nan, np.inf, -np.inf)
    leaves = range(len(places))
    one = [(str(b), ((leaf, b, place),)) for leaf in leaves for b in bad for place in range(places[leaf])]
    two = [
        ("inf", ((leaf, a, 0), (leaf, b, i)))
        for leaf in leaves
        for a in bad[1:]
        for b in bad[1:]
        for i in range(1, places[leaf])
    ]
    rows = [(name, ((leaf, number, -1),)) for leaf in leaves for name, number in (("constant", 0.5), ("zero", 0.0))]
    # Flax's guard treats a whole row of Inf as a constant row and returns 0, although a single Inf gives NaN.
    every = [(str(b), ((leaf, b, -1),)) for leaf in leaves for b in bad if not (b == -np.inf and leaf in partly_hidden)]
    return [("normal", ()), *rows, *one, *two, *every]


def _sample_places(sides: Equivalence, plan: AxisPlan) -> list[list[int]]:
    """Return the representative places of each leaf."""
    return [representative_places(plan, [a for size in shape for a in plan.atoms_of(size)]) for shape in sides.shapes]


def check_nonfinite(sides: Equivalence, plan: AxisPlan) -> bool:
    """Check that no NaN or Inf is hidden, and that finite inputs stay finite.

    Returns:
        True if an infinite input gives NaN after the rewrite and a number before it.

    Raises:
        NotProved: a NaN or Inf is lost, or a finite input gives a new one.
    """
    looked = list[Pattern]()
    gains = False
    arrays = list[tuple[Array, Array]]()
    read = set[object]()
    while looked != (
        wanted := nonfinite_patterns([len(places) for places in _sample_places(sides, plan)], sides.partly_hidden)
    ):
        # An evaluation may cut an axis into atoms, which changes the representative places.
        looked = wanted
        arrays = evaluate_in_floats(sides, plan, looked, read=read)
    for old, new in arrays:
        shown = ~np.isfinite(old)
        kept = ~np.isfinite(new)
        for i, (name, _) in enumerate(looked):
            lost = (shown[i] & ~kept[i]).any()
            if name in _SAID and lost:
                raise NotProved(
                    ProofFailure.HIDDEN, f"{_SAID[name]} in the original result would be hidden", sides.culprit
                )
            if name not in _SAID and (shown[i] != kept[i]).any():
                if lost:
                    message = f"NaN from 0/0 on {name} rows would be hidden"
                else:
                    message = f"{name} rows would newly give NaN"
                raise NotProved(ProofFailure.HIDDEN, message, sides.culprit)
            gains = gains or bool((kept[i] & ~shown[i]).any())
    # A NaN may reach an output through a convolution or by a path without one.
    if read and not plan.displaced:
        _check_convolution_paths(sides, plan, [p for p in looked if p[0] == "nan"], 1 if len(read) == 1 else _TURNS)
    return gains


def _check_convolution_paths(sides: Equivalence, plan: AxisPlan, looked: Sequence[Pattern], turns: int) -> None:
    """Check the paths of a NaN that lead through convolutions and the paths that do not.

    An evaluation has few places, and the taps of one convolution read all of them. So a NaN through the convolution
    reaches every output, and covers a NaN that arrives by another path. In this check, all taps of a convolution read
    one place, which is shifted from the place of the output. Convolutions with different attributes shift by different
    steps.

    Args:
        turns: number of choices of the steps to test.

    Raises:
        NotProved: a NaN is lost.
    """
    for turn in range(1, turns + 1):
        for old, new in evaluate_in_floats(sides, plan, looked, turn=turn):
            if (np.isnan(old) & np.isfinite(new)).any():
                raise NotProved(
                    ProofFailure.HIDDEN, f"{_SAID['nan']} in the original result would be hidden", sides.culprit
                )


# Number of choices of steps that are tested if there are several convolutions
_TURNS = 8
# Largest size at which a model is run to test a divisor that is zero
_LARGEST = 4096
# Largest constant term of a polynomial whose divisors are enumerated
_FACTORED = 2**40
# Maximum number of combinations of sizes that the search for zeros tries
_MOST = 2**16
# Maximum number of combinations of sizes at which both sides are run
_AT_ONCE = 256
# Sizes for the dims that appear in no divisor; the first two sizes at which all leaves exist are used
_OTHERS = (3, 16, 128, 1024)


def _zeros_of_polynomial(size: Size) -> list[dict[str, int]] | None:
    """List all sizes of 1 and more at which a polynomial is zero; None if they cannot be found.

    Integer roots of a polynomial in one symbol divide its constant (the rational root theorem). c·s₁^e₁·s₂^e₂ … + d is
    zero if the product is −d/c.
    """
    if size.terms:
        common = Counter(size.terms[0][0])
    else:
        common = Counter[str]()
    for monomial, _ in size.terms:
        common &= Counter(monomial)
    # Symbols are never zero, so the monomial that all terms share cancels.
    rest = {tuple((Counter(m) - common).elements()): c for m, c in size.terms}
    size = Size(rest)
    constant = rest.pop((), 0)
    if size.is_positive or (-size).is_positive:
        return []
    if not constant or abs(constant) > _FACTORED:
        return None
    names = sorted(size.symbols())
    if len(names) > 1 and len(rest) > 1:
        return None
    whole = abs(constant)
    divisors = [n for d in range(1, math.isqrt(whole) + 1) if whole % d == 0 for n in {d, whole // d}]
    if len(divisors) ** len(names) > _MOST:
        return None
    choices = (
        dict(zip(names, choice, strict=True)) for choice in itertools.product(sorted(divisors), repeat=len(names))
    )
    return [given for given in choices if size.evaluate(given) == 0]


def _common_zeros(zeros: Sequence[Size]) -> list[dict[str, int]] | None:
    """List all sizes at which one or several of these polynomials are zero; None if they cannot be found."""
    choices: list[dict[str, int]] = [{}]
    for zero in zeros:
        there = _zeros_of_polynomial(zero)
        if there is None:
            return None
        choices += [
            one | other for one in choices for other in there if all(one.get(s, n) == n for s, n in other.items())
        ]
        if len(choices) > _AT_ONCE:
            return None
    return choices[1:]


def _sizes_exist(sides: Equivalence, sizes: Mapping[str, int]) -> bool:
    """Return True if no axis of a leaf is empty at these sizes.

    An axis that contains a symbol without a size counts as not empty.
    """
    return all(size.evaluate(sizes) >= 1 for shape in sides.shapes for size in shape if size.symbols() <= sizes.keys())


def check_zero_sizes(sides: Equivalence, zeros: Sequence[Size]) -> None:
    """Run both sides at the sizes at which a common divisor is zero.

    Their results must be finite at the same places.

    Args:
        zeros: sizes that both sides divide by and that may be zero.

    Raises:
        NotProved: the results differ, or the sizes cannot be found or run.
    """
    symbols = sorted({s for shape in sides.shapes for size in shape for s in size.symbols()})
    for zero in zeros:
        if not zero.symbols() <= set(symbols):
            raise NotProved(
                ProofFailure.SIZE,
                f"it divides by {zero}, which may be zero and is not determined by the input sizes",
                sides.culprit,
            )
    there = _common_zeros(zeros)
    divisors = " and ".join(map(str, zeros))
    if there is None or any(n > _LARGEST for given in there for n in given.values()):
        raise NotProved(
            ProofFailure.SIZE, f"it divides by {divisors}, but it is unknown at which sizes this is zero", sides.culprit
        )
    for given in there:
        if not _sizes_exist(sides, given):
            # Skip sizes at which a leaf is empty: a leaf with an axis of size h − 2 needs h ≥ 3.
            continue
        looked = [sizes for n in _OTHERS if _sizes_exist(sides, sizes := dict.fromkeys(symbols, n) | given)][:2]
        if not looked:
            raise NotProved(
                ProofFailure.SIZE,
                f"it divides by {divisors}, but can't be evaluated at sizes that make this zero",
                sides.culprit,
            )
        for sizes, number in itertools.product(looked, (np.nan, 0.5, 0.0)):
            both = sides.at(sizes, [number] * len(sides.shapes))
            if both is None:
                raise NotProved(
                    ProofFailure.SIZE,
                    f"it divides by {divisors}, but can't be evaluated at sizes that make this zero",
                    sides.culprit,
                )
            if any((np.isfinite(b) != np.isfinite(a)).any() for b, a in zip(*both, strict=True)):
                raise NotProved(
                    ProofFailure.HIDDEN,
                    f"at sizes that make {divisors} zero, only the original or only the rewritten result is finite",
                    sides.culprit,
                )


def evaluate_in_floats(
    sides: Equivalence,
    plan: AxisPlan,
    looked: Sequence[Pattern],
    real: type = np.float64,
    held: dict[int, StoredConstant] | None = None,
    turn: int = 0,
    read: set[object] | None = None,
) -> list[tuple[Array, Array]]:
    """Evaluate both sides in floats, with one draw per pattern.

    Args:
        looked: the patterns.
        real: float type of the evaluation.
        held: receives the constants that are read; None for ``sides.held``.
        turn: as in `RandomDraws`.
        read: if not None, receives the inputs and attributes of the convolutions.

    Returns:
        (before, after) per result; the first axis of each array is the pattern.
    """
    while True:
        read_constants = sides.held if held is None else held
        m = ProofInterpreter(
            plan, RandomDraws(random.Random(7), held=read_constants, turn=turn, work=sides.work), None, real
        )
        try:
            with evaluator.silence_numpy():
                places = _sample_places(sides, plan)
                for leaf in sides.shapes:
                    m.work.count_floats(
                        len(looked) * math.prod(plan.point_count(a) for size in leaf for a in plan.atoms_of(size))
                    )
                leaves = [
                    m.make_leaf(i, shape, partial(_pattern_values, looked, i, places[i]))
                    for i, shape in enumerate(sides.shapes)
                ]
                pairs = [
                    m.broadcast_values(b, a)[1]
                    for b, a in zip(sides.before(m, leaves), sides.after(m, leaves), strict=True)
                ]
        except RestartEvaluation:
            continue
        if read is not None:
            read |= {key[2:] for key in m.gathered}
        results = []
        for (_, f), (_, g) in pairs:
            shape = (len(looked), *np.broadcast_shapes(f.shape[1:], g.shape[1:]))
            results.append((np.broadcast_to(f, shape), np.broadcast_to(g, shape)))
        return results


def _pattern_values(looked: Sequence[Pattern], leaf: int, places: Sequence[int], counts: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(31 + leaf)
    x: Array = rng.uniform(0.5, 1.5, (len(looked), *counts)) * rng.choice([-1.0, 1.0], (len(looked), *counts))
    for n, (_, placed) in enumerate(looked):
        for at, number, place in placed:
            # A negative place means that the whole leaf holds the number.
            if at == leaf and place < 0:
                x[n] = number
            elif at == leaf:
                x[n : n + 1].reshape(-1)[places[min(place, len(places) - 1)]] = number
    return x
