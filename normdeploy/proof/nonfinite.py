"""Nothing is hidden: a NaN or Inf that comes out of the nodes before comes out of those after.

All ops of the language hand NaN on, so which elements a NaN reaches is a matter of structure: one in one place of each leaf shows it, as
every place of an axis is treated alike. What Inf becomes is IEEE's arithmetic (Inf − Inf, Inf/Inf, 0·Inf), looked at for one, for two of
the same and for two of both signs. Finite inputs, constant rows and zeros among them, give finite results after where they did before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ..evaluate import evaluate
from .errors import NotProved, Restart, Why
from .machine import Draws, Held, Machine
from .plan import Plan
from .sides import Sides
from .sizes import Size
from .value import Array

_SAID = {"nan": "a NaN", "inf": "an Inf", "-inf": "a -Inf"}


# a name, and (leaf, number, where) of what is put in: at the first place, at the last one, or everywhere
Pattern = tuple[str, tuple[tuple[int, float, int], ...]]


def patterns(leaves: int) -> list[Pattern]:
    """What is looked at: finite rows, and NaN and Inf."""
    bad = (np.nan, np.inf, -np.inf)
    one = [(str(b), ((leaf, b, place),)) for leaf in range(leaves) for b in bad for place in (0, 1)]
    two = [("inf", ((leaf, a, 0), (leaf, b, 1))) for leaf in range(leaves) for a in bad[1:] for b in bad[1:]]
    rows = [(name, ((leaf, number, -1),)) for leaf in range(leaves) for name, number in (("constant", 0.5), ("zero", 0.0))]
    every = [("nan", ((leaf, np.nan, -1),)) for leaf in range(leaves)]
    return [("normal", ()), *rows, *one, *two, *every]


def check(sides: Sides, plan: Plan) -> bool:
    """Whether an infinite input gives NaN where it gave a number before.

    Raises:
        NotProved: a NaN or Inf is lost, or comes from a finite input that gave none.
    """
    looked, gains = patterns(len(sides.shapes)), False
    for old, new in evaluated(sides, plan, looked):
        shown, kept = ~np.isfinite(old), ~np.isfinite(new)
        for i, (name, _) in enumerate(looked):
            lost = (shown[i] & ~kept[i]).any()
            if name in _SAID and lost:
                raise NotProved(Why.HIDDEN, f"{_SAID[name]} that the nodes show would be hidden", sides.culprit)
            if name not in _SAID and (shown[i] != kept[i]).any():
                said = f"0/0 on {name} rows would be hidden" if lost else f"NaN on {name} rows is new"
                raise NotProved(Why.HIDDEN, said, sides.culprit)
            gains = gains or bool((kept[i] & ~shown[i]).any())
    return gains


_LARGEST = 4096  # of a size at which a divisor is looked at


def _candidates(zero: Size) -> list[int]:
    """Sizes at which a divisor may be zero: small ones, and what n has to be in a·n + c."""
    constant = dict(zero.terms).get((), 0)
    found = {1, 2, 3} | {abs(c) for _, c in zero.terms}
    found |= {-constant // c for m, c in zero.terms if len(m) == 1 and constant % c == 0}
    return sorted(n for n in found if 1 <= n <= _LARGEST)


def _exist(sides: Sides, sizes: Mapping[str, int]) -> bool:
    """Whether every leaf has a place along each axis."""
    return all(size.at(sizes) >= 1 for shape in sides.shapes for size in shape)


def check_sizes(sides: Sides, zeros: Sequence[Size]) -> None:
    """Look at the sizes themselves at which something is zero that both sides divide by: their answers are finite at the same places.

    Raises:
        NotProved: they are not, or it can't be seen.
    """
    symbols = sorted({s for shape in sides.shapes for size in shape for s in size.symbols()})
    for zero in zeros:
        own = sorted(zero.symbols())
        if not set(own) <= set(symbols):
            raise NotProved(Why.SIZE, f"it divides by {zero}, which may be zero, and no input says how large that is", sides.culprit)
        looked = False
        for choice in itertools.product(_candidates(zero), repeat=len(own)):
            given = dict(zip(own, choice, strict=True))
            if zero.at(given) != 0:
                continue
            looked = True
            sizes = next((s for n in (3, 16, 128) if _exist(sides, s := dict.fromkeys(symbols, n) | given)), None)
            if sizes is None:
                continue  # a leaf of h − 2 places is there for h of 3 and more
            for number in (np.nan, 0.5, 0.0):
                found = sides.at(sizes, [number] * len(sides.shapes))
                if found is None:
                    raise NotProved(Why.SIZE, f"it divides by {zero}, and can't be seen where that is zero", sides.culprit)
                if any((np.isfinite(b) != np.isfinite(a)).any() for b, a in zip(*found, strict=True)):
                    raise NotProved(Why.HIDDEN, f"where {zero} is zero one of both is finite, the other not", sides.culprit)
        if not looked and not zero.positive and not (-zero).positive:
            raise NotProved(Why.SIZE, f"it divides by {zero}, and it is not known where that is zero", sides.culprit)


def evaluated(
    sides: Sides, plan: Plan, looked: Sequence[Pattern], real: type = np.float64, held: dict[int, Held] | None = None
) -> list[tuple[Array, Array]]:
    """Each result of both sides in floats, one draw for each pattern. ``held``: gets the constants read, else ``sides.held`` does."""
    while True:
        m = Machine(plan, Draws(random.Random(7), held=sides.held if held is None else held), None, real)
        try:
            with evaluate.quiet():
                leaves = [m.leaf(i, shape, partial(_reals, looked, i)) for i, shape in enumerate(sides.shapes)]
                pairs = [m.over_each_other(b, a)[1] for b, a in zip(sides.before(m, leaves), sides.after(m, leaves), strict=True)]
        except Restart:
            continue
        found = []
        for (_, f), (_, g) in pairs:
            shape = (len(looked), *np.broadcast_shapes(f.shape[1:], g.shape[1:]))
            found.append((np.broadcast_to(f, shape), np.broadcast_to(g, shape)))
        return found


def _reals(looked: Sequence[Pattern], leaf: int, counts: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(31 + leaf)
    x: Array = rng.uniform(0.5, 1.5, (len(looked), *counts)) * rng.choice([-1.0, 1.0], (len(looked), *counts))
    for n, (_, placed) in enumerate(looked):
        for at, number, place in placed:
            if at == leaf and place < 0:  # everywhere
                x[n] = number
            elif at == leaf:
                x[n : n + 1].reshape(-1)[-place] = number
    return x
