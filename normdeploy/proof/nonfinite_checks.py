"""Nothing is hidden: a NaN or Inf that comes out of the nodes before comes out of those after.

All ops of the language hand NaN on, so which elements a NaN reaches is a matter of structure: one in one place of each
class of a leaf's (`normdeploy.proof.sample_points`) shows it. What Inf becomes is IEEE's arithmetic (Inf − Inf,
Inf/Inf, 0·Inf), looked at for one, for two of the same and for two of both signs. Finite inputs, constant rows and
zeros among them, give finite results after where they did before.
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


# a name, and (leaf, number, where) of what is put in: at which of the places that `representative_places` names, or,
# -1,
# everywhere
Pattern = tuple[str, tuple[tuple[int, float, int], ...]]


def nonfinite_patterns(places: Sequence[int], partly_hidden: Collection[int] = ()) -> list[Pattern]:
    """What is looked at: finite rows, and NaN and Inf, at so many places of each leaf.

    ``partly_hidden``: leaves that are never -Inf throughout, as `Equivalence` says.
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
    # A guard may find a whole row of Inf to be constant, and hide what one Inf in it shows.
    every = [(str(b), ((leaf, b, -1),)) for leaf in leaves for b in bad if not (b == -np.inf and leaf in partly_hidden)]
    return [("normal", ()), *rows, *one, *two, *every]


def _sample_places(sides: Equivalence, plan: AxisPlan) -> list[list[int]]:
    """Of each leaf, the places at which it is looked at."""
    return [representative_places(plan, [a for size in shape for a in plan.atoms_of(size)]) for shape in sides.shapes]


def check_nonfinite(sides: Equivalence, plan: AxisPlan) -> bool:
    """Whether an infinite input gives NaN where it gave a number before.

    Raises:
        NotProved: a NaN or Inf is lost, or comes from a finite input that gave none.
    """
    looked = list[Pattern]()
    gains = False
    arrays = list[tuple[Array, Array]]()
    read = set[object]()
    while looked != (
        wanted := nonfinite_patterns([len(places) for places in _sample_places(sides, plan)], sides.partly_hidden)
    ):
        # an evaluation may cut axes
        looked = wanted
        arrays = evaluate_in_floats(sides, plan, looked, read=read)
    for old, new in arrays:
        shown = ~np.isfinite(old)
        kept = ~np.isfinite(new)
        for i, (name, _) in enumerate(looked):
            lost = (shown[i] & ~kept[i]).any()
            if name in _SAID and lost:
                raise NotProved(
                    ProofFailure.HIDDEN, f"{_SAID[name]} that the nodes show would be hidden", sides.culprit
                )
            if name not in _SAID and (shown[i] != kept[i]).any():
                if lost:
                    message = f"0/0 on {name} rows would be hidden"
                else:
                    message = f"NaN on {name} rows is new"
                raise NotProved(ProofFailure.HIDDEN, message, sides.culprit)
            gains = gains or bool((kept[i] & ~shown[i]).any())
    # of one convolution: through it, or past it
    if read and not plan.displaced:
        _check_convolution_paths(sides, plan, [p for p in looked if p[0] == "nan"], 1 if len(read) == 1 else _TURNS)
    return gains


def _check_convolution_paths(sides: Equivalence, plan: AxisPlan, looked: Sequence[Pattern], turns: int) -> None:
    """A NaN comes to an output by way of convolutions or past them, and the taps of one, which reach all of few places,
    hide what comes by another way. So all taps of one read one place here: further on than that of the output, by a
    step that other convolutions don't have.
    """
    for turn in range(1, turns + 1):
        for old, new in evaluate_in_floats(sides, plan, looked, turn=turn):
            if (np.isnan(old) & np.isfinite(new)).any():
                raise NotProved(
                    ProofFailure.HIDDEN, f"{_SAID['nan']} that the nodes show would be hidden", sides.culprit
                )


# choices of these steps, where there are several convolutions
_TURNS = 8
# of a size at which a divisor is looked at
_LARGEST = 4096
# a constant whose divisors are looked for
_FACTORED = 2**40
# choices of sizes
_MOST = 2**16
# choices of sizes that are looked at
_AT_ONCE = 256
# of dims that no divisor speaks of; the first two at which all leaves are there
_OTHERS = (3, 16, 128, 1024)


def _zeros_of_polynomial(size: Size) -> list[dict[str, int]] | None:
    """All sizes of 1 and more at which a polynomial is zero; None where they can't be told.

    Whole roots of a polynomial in one symbol divide its constant (the rational root theorem); c·s₁^e₁·s₂^e₂ … + d is
    zero where the product is −d/c.
    """
    if size.terms:
        common = Counter(size.terms[0][0])
    else:
        common = Counter[str]()
    for monomial, _ in size.terms:
        common &= Counter(monomial)
    # no symbol is zero
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
    """All sizes at which one of them is zero, or several at once; None where they can't be told."""
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
    """Whether every leaf has a place along each axis; those whose sizes are not all given count as there."""
    return all(size.evaluate(sizes) >= 1 for shape in sides.shapes for size in shape if size.symbols() <= sizes.keys())


def check_zero_sizes(sides: Equivalence, zeros: Sequence[Size]) -> None:
    """Look at the sizes themselves at which something is zero that both sides divide by: their answers are finite at
    the same places.

    Raises:
        NotProved: they are not, or it can't be seen.
    """
    symbols = sorted({s for shape in sides.shapes for size in shape for s in size.symbols()})
    for zero in zeros:
        if not zero.symbols() <= set(symbols):
            raise NotProved(
                ProofFailure.SIZE,
                f"it divides by {zero}, which may be zero, and no input says how large that is",
                sides.culprit,
            )
    there = _common_zeros(zeros)
    divisors = " and ".join(map(str, zeros))
    if there is None or any(n > _LARGEST for given in there for n in given.values()):
        raise NotProved(
            ProofFailure.SIZE, f"it divides by {divisors}, and it is not known where that is zero", sides.culprit
        )
    for given in there:
        if not _sizes_exist(sides, given):
            # a leaf of h − 2 places is there for h of 3 and more
            continue
        looked = [sizes for n in _OTHERS if _sizes_exist(sides, sizes := dict.fromkeys(symbols, n) | given)][:2]
        if not looked:
            raise NotProved(
                ProofFailure.SIZE, f"it divides by {divisors}, and can't be seen where that is zero", sides.culprit
            )
        for sizes, number in itertools.product(looked, (np.nan, 0.5, 0.0)):
            both = sides.at(sizes, [number] * len(sides.shapes))
            if both is None:
                raise NotProved(
                    ProofFailure.SIZE, f"it divides by {divisors}, and can't be seen where that is zero", sides.culprit
                )
            if any((np.isfinite(b) != np.isfinite(a)).any() for b, a in zip(*both, strict=True)):
                raise NotProved(
                    ProofFailure.HIDDEN, f"where {divisors} is zero one of both is finite, the other not", sides.culprit
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
    """Each result of both sides in floats, one draw for each pattern.

    ``held``: gets the constants read, else ``sides.held`` does. ``turn``: as of `Draws`. ``read``: gets what
    convolutions read, and how.
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
            # everywhere
            if at == leaf and place < 0:
                x[n] = number
            elif at == leaf:
                x[n : n + 1].reshape(-1)[places[min(place, len(places) - 1)]] = number
    return x
