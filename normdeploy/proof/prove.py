"""``prove``: two functions of the same leaves are one, at every real input and at every size.

docs/certificates.md has the theorem. Both sides are evaluated at random points of a random prime field; then in floats,
on inputs with NaN, Inf and constant rows, to see that nothing is hidden; then what a rewrite computed is compared with
what is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ..graphs.sizes import ONE, Size
from . import nonfinite, readings, stored
from .errors import NotProved, Why
from .evaluation import ASKED, LONGEST, PROMISED, Identity, in_the_field, learn
from .plan import Plan
from .sides import Sides

_ALIKE = 8  # places of axes that are worth telling apart
# Axes of one size along a leaf that are worth it however long they are: k of them take (d + k + 1)^k points, d the
# degree, and so do as many roots.
_MANY = 3


def identity(sides: Sides) -> Identity:
    """Show that both sides are one function.

    Where axes of a leaf are equally long by chance, as channels and rows of a square image, or where three or more bear
    one name, of any length first: what holds for every length holds for this one, and axes that are told apart take
    fewer points.

    Raises:
        NotProved: they are not, or it can't be shown; with the reason and the culprit.
    """
    sides = replace(sides, named={})
    for shapes, lengths in _told_apart(sides.shapes):
        try:
            return _identity(replace(sides, shapes=shapes), lengths)
        except NotProved as e:
            if e.why is Why.OP:
                # Other axes told apart don't help; with none, a clamp may be known to do nothing.
                break
    return _identity(sides, {})


def identity_of_any_length(sides: Sides) -> Identity:
    """`identity` where lengths that a file states (``sides.named``) are symbols: it holds for all sides that differ in
    these, too. Equal ones along a leaf are told apart.

    Raises:
        NotProved: they are not, or it can't be shown without the lengths.
    """
    shapes = sides.of_any_length().shapes
    proof, error = None, NotProved(Why.SIZE, "it has no length that may be any")
    for apart, lengths in [*_told_apart(shapes, sides.named.values())] or [(shapes, {})]:
        try:
            proof = _identity(replace(sides, shapes=apart), _symbolic(lengths), sides.named)
            break
        except NotProved as e:
            error = e
    if proof is None:
        raise error
    if proof.zeros:  # where that is zero can be looked at in one file alone
        raise NotProved(Why.SIZE, "it divides by a size that may be zero")
    return proof


def _told_apart(
    shapes: Sequence[tuple[Size, ...]], named: Collection[Size] = ()
) -> Iterator[tuple[tuple[tuple[Size, ...], ...], dict[Size, Size]]]:
    """With symbols for axes of equal sizes, all of them, or all but one of each leaf (the first, the last, then those
    between); and what sizes they stand for. All, for a Reshape may name that length as well: 32 groups of the
    channels of an image of 32×32.

    ``named``: symbols that stand for lengths already.
    """
    known: list[list[tuple[Size, ...]]] = []
    for kept in (None, 0, -1, *range(1, max(map(len, shapes), default=0) - 1)):
        made, lengths = list[tuple[Size, ...]](), dict[Size, Size]()
        for shape in shapes:
            alike = {n: [i for i, m in enumerate(shape) if m == n] for n in shape if n != ONE}
            alike = {
                n: places
                for n, places in alike.items()
                if len(places) >= (2 if n in named or (n.number or 0) >= _ALIKE else _MANY)
            }
            free = {
                i
                for places in alike.values()
                for i in places
                if kept is None or i != places[min(kept, len(places) - 1)]
            }
            names = {i: Size.unknown("places", i - len(shape), shape[i]) for i in free}
            lengths |= {name: shape[i] for i, name in names.items()}
            made.append(tuple(names.get(i, n) for i, n in enumerate(shape)))
        if lengths and made not in known:
            known.append(made)
            yield tuple(made), lengths


def _symbolic(lengths: Mapping[Size, Size]) -> dict[Size, Size]:
    """Those that stand for no number: a proof for any length may not know the others."""
    return {name: size for name, size in lengths.items() if size.number is None}


def _identity(sides: Sides, lengths: dict[Size, Size], named: dict[int, Size] | None = None) -> Identity:
    displaced = sides.expressions is not None and sides.expressions.displaced
    plan = Plan(displaced=displaced, lengths=lengths, named=named or {})
    length = learn(sides, plan)
    counts = readings.counts([s.number for s in shape] for shape in sides.shapes)
    read: frozenset[int] = frozenset()
    try:
        proof = in_the_field(sides, plan, read, length)
    except NotProved as e:
        if e.why not in (Why.DIFFERS, Why.SIGN, Why.LIMIT) or not counts:
            raise
        read = counts
        try:
            proof = in_the_field(sides, plan, read, length)
        except NotProved:
            raise e from None
        if not proof.read:
            raise
    if proof.bits < ASKED and proof.lost + ASKED <= LONGEST:  # many roots: in a larger field
        proof = in_the_field(sides, plan, read, proof.lost + ASKED)
    if proof.bits < ASKED:
        raise NotProved(
            Why.LIMIT, f"it takes {proof.roots} roots of each input, too many for an error probability of 2^-{PROMISED}"
        )
    gains = nonfinite.check(sides, plan)
    known = {s: n for size, n in lengths.items() for s in size.symbols()}  # told apart, but what the file says
    shapes = tuple(tuple(size.filled(known) for size in shape) for shape in sides.shapes)
    zeros = [
        zero for zero in (size.filled(known) for size in proof.zeros) if not zero.positive and not (-zero).positive
    ]
    nonfinite.check_sizes(replace(sides, shapes=shapes), zeros)
    return replace(proof, gains=gains)


def checked(sides: Sides, proof: Identity) -> None:
    """Show that what the rewrite computed and stored is what the identity speaks of.

    Raises:
        NotProved: a parameter is not the exact one, or not stored as it, rounded once.
    """
    plan = proof.plan.at(sides.named) if proof.plan.named else proof.plan
    if proof.parameters or proof.epsilons:
        stored.check(sides, plan, proof.epsilons, bool(proof.read))
    if sides.expressions is not None and sides.graph is not None:
        stored.check_expressions(sides.graph, sides.expressions, plan, sides.held)
    stored.check_bytes(sides)


def prove(sides: Sides) -> Identity:
    """`identity` and `checked`."""
    proof = identity(sides)
    checked(sides, proof)
    return proof
