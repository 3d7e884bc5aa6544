"""Prove that two functions of the same leaves are equal, at every real input and every size.

docs/explanation/certificates.md has the theorem. A proof has three steps. First, both sides are evaluated at random
points of a random prime field. Second, they run in floats on inputs with NaN, Inf and constant rows. If the original
result is NaN or Inf, the rewrite must not hide it. Third, the constants that the identity requires are compared with
the constants that the rewrite stored.
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

# If several axes have the same length, and this length is at least 8, each of these axes gets its own symbol. The
# lengths may be equal only by chance.
_ALIKE = 8
# If a leaf has this number or more axes of equal length, each axis gets its own symbol, whatever the length. With one
# common symbol, k equal axes would need (d + k + 1)^k points for degree d, and as many roots.
_MANY = 3

ProofMemo = MutableMapping[object, Identity | NotProved]
"""Proofs and refusals by key; equal keys share one proof."""


def prove_identity(sides: Equivalence) -> Identity:
    """Prove that both sides are one function.

    Axes of a leaf may have equal lengths by chance, such as channels and rows of an image, or three or more axes may
    share one dim name. Then the proof is first tried with a distinct symbol for each length. An identity that holds for
    every length also holds for the lengths of the file, and distinct symbols need fewer points.

    Returns:
        the proof.

    Raises:
        NotProved: the sides differ, or their equality cannot be shown; with reason and culprit.
    """
    sides = replace(sides, named={})
    for shapes, lengths in _symbolic_shapes(sides.shapes):
        try:
            return _search_identity(replace(sides, shapes=shapes), lengths)
        except NotProved as e:
            if e.why is ProofFailure.OP:
                # The failure is due to an op, so other choices of symbols do not help. Without symbols, a clamp may be
                # shown to have no effect.
                break
    return _search_identity(sides, {})


def prove_for_any_length(sides: Equivalence) -> Identity:
    """Prove the identity with symbols instead of the lengths in ``sides.named``.

    The proof then holds for all sides that differ only in these lengths. Equal lengths of one leaf get distinct
    symbols.

    Returns:
        the proof.

    Raises:
        NotProved: the sides differ, or their equality holds only for the lengths of the file.
    """
    shapes = sides.of_any_length().shapes
    proof = None
    error = NotProved(ProofFailure.SIZE, "none of its sizes can be replaced by a symbol")
    for apart, lengths in [*_symbolic_shapes(shapes, sides.named.values())] or [(shapes, {})]:
        try:
            proof = _search_identity(replace(sides, shapes=apart), _without_numbers(lengths), sides.named)
            break
        except NotProved as e:
            error = e
    if proof is None:
        raise error
    # If a size may be zero, the model must be run at that size with the other sizes of each file. So files can't share
    # the proof.
    if proof.zeros:
        raise NotProved(ProofFailure.SIZE, "it divides by a size that may be zero")
    return proof


def _symbolic_shapes(
    shapes: Sequence[tuple[Size, ...]], named: Collection[Size] = ()
) -> Iterator[tuple[tuple[tuple[Size, ...], ...], dict[Size, Size]]]:
    """Try symbols for axes of equal sizes.

    The first try replaces all equal axes. The region may contain a Reshape with one of their lengths, such as 32 groups
    for an image of 32×32, and then this try fails. So each further try keeps the number for one axis per leaf: the
    first axis, then the last, then the axes between.

    Args:
        named: symbols that already replace lengths.

    Yields:
        the shapes, and the size that each symbol replaces.
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
    """Drop the symbols that replace a number.

    A proof for any length must not substitute a length of this file."""
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
    # Many roots reduce the security, so repeat the proof in a larger field.
    if proof.security_bits < ASKED and proof.lost_bits + ASKED <= LONGEST:
        proof = check_identity(sides, plan, read, proof.lost_bits + ASKED)
    if proof.security_bits < ASKED:
        raise NotProved(
            ProofFailure.LIMIT,
            f"it takes {proof.roots} roots of each input, too many for an error probability of 2^-{PROMISED}",
        )
    gains = nonfinite_checks.check_nonfinite(sides, plan)
    # Substitute the file's sizes for the symbols.
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
    """Check that the constants that the rewrite stored are the constants for which the identity holds.

    Raises:
        NotProved: a stored parameter is neither the exact value nor the exact value rounded once.
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
    """Call ``prove_sides`` once per key.

    Args:
        memo: earlier proofs and refusals by their keys.
        key: key of ``memo``; sides with the same proof have equal keys.

    Returns:
        the proof, or the refusal.
    """
    if key not in memo:
        try:
            memo[key] = prove_sides()
        except NotProved as error:
            # The traceback would keep all evaluated values alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            memo[key] = error
    return memo[key]


def prove(sides: Equivalence) -> Identity:
    """Run `prove_identity` and `check_stored_constants`.

    Returns:
        the proof.

    Raises:
        NotProved: the sides differ, a stored constant is wrong, or the equality cannot be shown.
    """
    proof = prove_identity(sides)
    check_stored_constants(sides, proof)
    return proof
