"""``prover``: two functions of the same leaves are one, at every real input and at every size.

docs/certificates.md has the theorem. Both sides are evaluated at random points of a random prime field; then in floats,
on inputs with NaN, Inf and constant rows, to see that nothing is hidden; then what a rewrite computed is compared with
what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

from ..graphs.symbolic_sizes import ONE, Size
from . import nonfinite_checks, rational_reconstruction, stored_constants
from .axis_plan import AxisPlan
from .equivalence import Equivalence
from .identity_check import ASKED, LONGEST, PROMISED, Identity, check_identity, learn_axes
from .proof_errors import NotProved, ProofFailure

# places of axes that are worth telling apart
_ALIKE = 8
# Axes of one size along a leaf that are worth it however long they are: k of them take (d + k + 1)^k points, d the
# degree, and so do as many roots.
_MANY = 3

ProofMemo = MutableMapping[object, Identity | NotProved]
"""Proofs and refusals by a key; equal keys share one proof."""


def prove_identity(sides: Equivalence) -> Identity:
    """Show that both sides are one function.

    Where axes of a leaf are equally long by chance, as channels and rows of a square image, or where three or more bear
    one name, of any length first: what holds for every length holds for this one, and axes that are told apart take
    fewer points.

    Raises:
        NotProved: they are not, or it can't be shown; with the reason and the culprit.
    """
    sides = replace(sides, named={})
    for shapes, lengths in _symbolic_shapes(sides.shapes):
        try:
            return _search_identity(replace(sides, shapes=shapes), lengths)
        except NotProved as e:
            if e.why is ProofFailure.OP:
                # Other axes told apart don't help; with none, a clamp may be known to do nothing.
                break
    return _search_identity(sides, {})


def prove_for_any_length(sides: Equivalence) -> Identity:
    """`prove_identity` where lengths that a file states (``sides.named``) are symbols: it holds for all sides that
    differ in these, too. Equal ones along a leaf are told apart.

    Raises:
        NotProved: they are not, or it can't be shown without the lengths.
    """
    shapes = sides.of_any_length().shapes
    proof = None
    error = NotProved(ProofFailure.SIZE, "it has no length that may be any")
    for apart, lengths in [*_symbolic_shapes(shapes, sides.named.values())] or [(shapes, {})]:
        try:
            proof = _search_identity(replace(sides, shapes=apart), _without_numbers(lengths), sides.named)
            break
        except NotProved as e:
            error = e
    if proof is None:
        raise error
    # where that is zero can be looked at in one file alone
    if proof.zeros:
        raise NotProved(ProofFailure.SIZE, "it divides by a size that may be zero")
    return proof


def _symbolic_shapes(
    shapes: Sequence[tuple[Size, ...]], named: Collection[Size] = ()
) -> Iterator[tuple[tuple[tuple[Size, ...], ...], dict[Size, Size]]]:
    """With symbols for axes of equal sizes, all of them, or all but one of each leaf (the first, the last, then those
    between); and what sizes they stand for. All, for a Reshape may name that length as well: 32 groups of the
    channels of an image of 32×32.

    ``named``: symbols that stand for lengths already.
    """
    known: list[list[tuple[Size, ...]]] = []
    for kept in (None, 0, -1, *range(1, max(map(len, shapes), default=0) - 1)):
        made = list[tuple[Size, ...]]()
        lengths = dict[Size, Size]()
        for shape in shapes:
            alike = {n: [i for i, m in enumerate(shape) if m == n] for n in shape if n != ONE}
            alike = {
                n: places
                for n, places in alike.items()
                if len(places) >= (2 if n in named or (n.constant_value or 0) >= _ALIKE else _MANY)
            }
            free = {
                i
                for places in alike.values()
                for i in places
                if kept is None or i != places[min(kept, len(places) - 1)]
            }
            names = {i: Size.opaque("places", i - len(shape), shape[i]) for i in free}
            lengths |= {name: shape[i] for i, name in names.items()}
            made.append(tuple(names.get(i, n) for i, n in enumerate(shape)))
        if lengths and made not in known:
            known.append(made)
            yield tuple(made), lengths


def _without_numbers(lengths: Mapping[Size, Size]) -> dict[Size, Size]:
    """Those that stand for no number: a proof for any length may not know the others."""
    return {name: size for name, size in lengths.items() if size.constant_value is None}


def _search_identity(sides: Equivalence, lengths: dict[Size, Size], named: dict[int, Size] | None = None) -> Identity:
    displaced = sides.expressions is not None and sides.expressions.displaced
    plan = AxisPlan(displaced=displaced, lengths=lengths, named=named or {})
    length = learn_axes(sides, plan)
    counts = rational_reconstruction.axis_products([s.constant_value for s in shape] for shape in sides.shapes)
    read: frozenset[int] = frozenset()
    try:
        proof = check_identity(sides, plan, read, length)
    except NotProved as e:
        if e.why not in (ProofFailure.DIFFERS, ProofFailure.SIGN, ProofFailure.LIMIT) or not counts:
            raise
        read = counts
        try:
            proof = check_identity(sides, plan, read, length)
        except NotProved:
            raise e from None
        if not proof.read:
            raise
    # many roots: in a larger field
    if proof.security_bits < ASKED and proof.lost_bits + ASKED <= LONGEST:
        proof = check_identity(sides, plan, read, proof.lost_bits + ASKED)
    if proof.security_bits < ASKED:
        raise NotProved(
            ProofFailure.LIMIT,
            f"it takes {proof.roots} roots of each input, too many for an error probability of 2^-{PROMISED}",
        )
    gains = nonfinite_checks.check_nonfinite(sides, plan)
    # told apart, but what the file says
    known = {s: n for size, n in lengths.items() for s in size.symbols()}
    shapes = tuple(tuple(size.substitute(known) for size in shape) for shape in sides.shapes)
    zeros = [
        zero
        for zero in (size.substitute(known) for size in proof.zeros)
        if not zero.is_positive and not (-zero).is_positive
    ]
    nonfinite_checks.check_zero_sizes(replace(sides, shapes=shapes), zeros)
    return replace(proof, gains=gains)


def check_stored_constants(sides: Equivalence, proof: Identity) -> None:
    """Show that what the rewrite computed and stored is what the identity speaks of.

    Raises:
        NotProved: a parameter is not the exact one, or not stored as it, rounded once.
    """
    if proof.plan.named:
        plan = proof.plan.substitute_sizes(sides.named)
    else:
        plan = proof.plan
    if proof.parameters or proof.epsilons:
        stored_constants.check_stored_parameters(sides, plan, proof.epsilons, bool(proof.read))
    if sides.expressions is not None and sides.graph is not None:
        stored_constants.check_fold_constants(sides.graph, sides.expressions, plan, sides.held)
    stored_constants.check_stored_bytes(sides)


def prove_once(memo: ProofMemo, key: object, prove_sides: Callable[[], Identity]) -> Identity | NotProved:
    """Return what ``prove_sides`` proves, or why it proves nothing; it is called once for each key.

    Args:
        memo: what was proved of others, by their keys.
        key: equal where the same proof holds.
    """
    if key not in memo:
        try:
            memo[key] = prove_sides()
        except NotProved as error:
            # The frames of the attempts would hold all that was evaluated.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            memo[key] = error
    return memo[key]


def prove(sides: Equivalence) -> Identity:
    """`prove_identity` and `check_stored_constants`."""
    proof = prove_identity(sides)
    check_stored_constants(sides, proof)
    return proof
