"""Certify each rewrite by a proof (`normdeploy.proof`, docs/explanation/certificates.md).

The reference is the subgraph before the rewrite, never the recognized norm, because a misread norm would certify
itself. Norms that differ only in the elements of gamma and beta share one proof. The values that each norm stores are
checked separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding, combine_certificates
from ..graphs.dims import dim_size
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region, compile_region
from ..graphs.symbolic_sizes import Size
from ..proof.certificate import NOT_KNOWN, certificate_of
from ..proof.computed_constants import ComputedConstants
from ..proof.equivalence import Equivalence, equivalence_of_regions
from ..proof.identity_check import Identity
from ..proof.proof_errors import NotProved, ProofFailure
from ..proof.prover import ProofMemo, check_stored_constants, prove, prove_for_any_length, prove_identity, prove_once
from ..proof.region_evaluation import is_stored_as_half
from ..proof.sampler import StoredConstant, compare_contents
from .initializer_check import require_same_as_file

# Shortest axis whose length is replaced by a symbol, so that one proof covers norms of different lengths
_LONG = 4
# Maximum number of elements of a constant that is part of a region's template (`graphs.region`)
_FEW = 4
# Maximum number of integers in a constant that is searched for lengths, such as the sizes of a Reshape
_NAMED = 16
# Ops with a kernel. The places of a kernel axis are distinct taps, so its length is not replaced by a symbol.
_KERNELS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Rewrite:
    """Subgraph and its replacement, as functions of the same leaves."""

    before: Region
    after: Region


@dataclass(frozen=True)
class ResultPair:
    """Result before a rewrite, as a region, and the tensor that must be the same function of its leaves."""

    before: Region | Refusal
    after: gs.Tensor


@dataclass(frozen=True)
class ProvedRewrites:
    """Rewrites with the same leaves, and their common certificate.

    Attributes:
        identity: the proof.
        free_lengths: lengths that the proof replaced by symbols, so that it holds for any length in their place.
    """

    rewrites: tuple[Rewrite, ...]
    certificate: Certificate
    identity: Identity
    free_lengths: tuple[int, ...] = ()


def pair_of(graph: Graph, old: gs.Tensor, leaves: Sequence[gs.Tensor], new: gs.Tensor) -> ResultPair:
    """Pair ``old``, as a function of ``leaves``, with ``new``, which must be the same function.

    Returns:
        the pair; its ``before`` is a refusal if ``old`` cannot be compiled.
    """
    return ResultPair(compile_region(graph, old, leaves), new)


Failure = Refusal | Certificate
"""Reason why nothing is proved: a side cannot be compiled, or the certificate failed."""


def rewrite_of(graph: Graph, pair: ResultPair) -> Rewrite | Refusal:
    """Compile the tensor after the rewrite to a region with the same leaves as the region before the rewrite.

    Returns:
        both regions, or the refusal of the side that cannot be compiled.
    """
    if isinstance(pair.before, Refusal):
        return pair.before
    after = compile_region(graph, pair.after, pair.before.leaves)
    if isinstance(after, Refusal):
        return after
    return Rewrite(pair.before, after)


def prove_pairs(
    graph: Graph,
    memo: ProofMemo,
    pairs: Sequence[ResultPair],
    *,
    expressions: ComputedConstants | None = None,
    partly_hidden: Collection[gs.Tensor] = (),
) -> ProvedRewrites | Failure:
    """Prove that both sides of each pair are one function, as `certify_rewrites` does.

    Returns:
        the rewrites with their certificate, or the failure.
    """
    rewrites: list[Rewrite] = []
    for pair in pairs:
        rewrite = rewrite_of(graph, pair)
        if isinstance(rewrite, Refusal):
            return rewrite
        rewrites.append(rewrite)
    try:
        proof, free_lengths = _prove_rewrites(memo, rewrites, expressions, partly_hidden)
    except NotProved as e:
        return certificate_of(e)
    return ProvedRewrites(tuple(rewrites), certificate_of(proof), proof, free_lengths)


def failure_reason(failure: Failure) -> str:
    """Describe a failure for users.

    Returns:
        one sentence.
    """
    if isinstance(failure, Refusal):
        return failure.reason
    return f"it can't be proved: {failure.note}"


def certify_rewrites(
    memo: ProofMemo,
    rewrites: Sequence[Rewrite],
    expressions: ComputedConstants | None = None,
    partly_hidden: Collection[gs.Tensor] = (),
) -> Certificate:
    """Certify one rewrite, or several rewrites at once that share their leaves.

    Args:
        memo: earlier proofs in this graph.
        expressions: the computed constants of a fold.
        partly_hidden: leaves for which the caller showed that no row consists of -Inf only.

    Returns:
        the certificate; it failed if the sides differ or the proof was not possible.
    """
    try:
        proof, _ = _prove_rewrites(memo, rewrites, expressions, partly_hidden)
    except NotProved as e:
        return certificate_of(e)
    return certificate_of(proof)


def _prove_rewrites(
    memo: ProofMemo,
    rewrites: Sequence[Rewrite],
    expressions: ComputedConstants | None,
    partly_hidden: Collection[gs.Tensor],
) -> tuple[Identity, tuple[int, ...]]:
    """Prove what `certify_rewrites` certifies.

    Returns:
        the proof, and the lengths in whose place it holds for any length.

    Raises:
        NotProved: the sides differ, or the proof was not possible.
    """
    try:
        constants = list(_constant_inputs([region for r in rewrites for region in (r.before, r.after)], expressions))
        require_same_as_file(rewrites[0].before.graph, [node.inputs[i] for node, i in constants])
        sides = equivalence_of_regions([r.before for r in rewrites], [r.after for r in rewrites], expressions)
        sides = replace(sides, held=_read_constants(rewrites[0].before.graph, constants))
        hiding = {id(t) for t in partly_hidden}
        numbers = frozenset(i for i, t in enumerate(rewrites[0].before.leaves) if id(t) in hiding)
        sides = replace(sides, partly_hidden=numbers)
        read = [*rewrites[0].before.leaves, *(() if expressions is None else expressions.leaves)]
        sides = replace(sides, named=_named_lengths(rewrites[0].before.graph, read, constants, sides.held))
        told = _constants_key(rewrites[0].before.graph, constants, sides.held)
        proof: Identity | NotProved = NotProved(ProofFailure.SIZE, "")
        names: Mapping[int, Size] = {}
        general = [(sides.named, prove_for_any_length)] if sides.named else []
        for names, show in (*general, ({}, prove_identity)):
            parts = [region.template_with_names(names) for r in rewrites for region in (r.before, r.after)]
            key = (
                *parts,
                told,
                () if expressions is None else expressions.template_with_names(names),
                bool(names),
                numbers,
            )
            proof = prove_once(memo, key, partial(show, sides))
            if isinstance(proof, Identity):
                # Epsilons may depend on the elements of constants, so the proof holds for this rewrite alone.
                if proof.epsilons:
                    del memo[key]
                break
        # The stored error is not raised itself, because that would attach a traceback to the shared object.
        if isinstance(proof, NotProved):
            raise NotProved(proof.why, proof.reason, proof.culprit)
        check_stored_constants(sides, proof)
    except OverflowError as e:
        raise NotProved(ProofFailure.LIMIT, str(e)) from None
    return proof, tuple(names)


def certify_sides(sides: Callable[[], Iterable[Equivalence]]) -> Certificate:
    """Certify several proofs, run one after the other.

    Args:
        sides: returns the claims to prove; the function may raise NotProved.

    Returns:
        the combined certificate, or the certificate of the first failure.
    """
    try:
        identities = [prove(each) for each in sides()]
    except NotProved as e:
        return certificate_of(e)
    whole: Certificate | None = None
    for proved in identities:
        whole = combine_certificates(whole, certificate_of(proved))
    assert whole is not None
    return whole


def unproved_finding(finding: Finding, failure: Failure) -> Finding:
    """Turn a finding into that of a rewrite that was not made.

    Returns:
        a refused finding if the nodes before the rewrite are not algebraic or have unknown sizes, so that their value
        is not known at every input; an undone one if the sides differ.
    """
    if isinstance(failure, Refusal):
        return replace(finding, status="refused", reason=failure.reason, became="")
    finding = replace(finding, became="", certificate=failure)
    if failure.why in NOT_KNOWN:
        return replace(finding, status="refused", reason=f"it can't be proved: {failure.note}")
    return replace(finding, status="undone", reason=f"its certificate failed: {failure.note}")


def _read_constants(graph: Graph, constants: Sequence[tuple[gs.Node, int]]) -> dict[int, StoredConstant]:
    """Read the floating-point constants, by the ids of their tensors."""
    read: dict[int, StoredConstant] = {}
    for node, i in constants:
        t = node.inputs[i]
        if id(t) in read:
            parts = None
        else:
            parts = graph.value_and_remainder(t)
        if parts is not None and parts[0].dtype.kind == "f":
            read[id(t)] = StoredConstant(parts[0], is_stored_as_half(graph, t), parts[1])
    compare_contents(read.values())
    return read


def _named_lengths(
    graph: Graph,
    leaves: Sequence[gs.Tensor],
    constants: Sequence[tuple[gs.Node, int]],
    held: Mapping[int, StoredConstant],
) -> dict[int, Size]:
    """Return the lengths along leaves and constants, each with a symbol, in order of appearance.

    Lengths below `_LONG`, lengths that integers in the region may name, and numbers of taps are left out.
    """
    lengths = dict[int, None]()
    taps = set[int]()
    for t in leaves:
        lengths |= dict.fromkeys(n for n in graph.shape(t) or () if isinstance(n, int))
        taps |= {
            number
            for n in graph.shape(t) or ()
            if isinstance(n, str) and (number := dim_size(n, "").constant_value) is not None
        }
    for node, i in constants:
        constant = held.get(id(node.inputs[i]))
        if constant is None:
            # The constant holds integers: lengths that a Reshape names, or numbers that may become the size of a
            # tensor.
            known = graph.known_value(node.inputs[i])
            if known is not None:
                taps |= {*known.shape, *known.reshape(-1)[:_NAMED].tolist()}
        else:
            lengths |= dict.fromkeys(constant.array.shape)
            if node.op in _KERNELS and i == 1:
                taps |= set(constant.array.shape[2:])
    long = [n for n in lengths if n >= _LONG and n not in taps]
    return {n: Size.opaque("length", i) for i, n in enumerate(long)}


def _constants_key(
    graph: Graph, constants: Sequence[tuple[gs.Node, int]], held: Mapping[int, StoredConstant]
) -> tuple[object, ...]:
    """Build a key of all properties of constants that a proof may read, besides the regions' templates.

    It is equal for rewrites that differ only in the elements of their larger constants, if the same constants have
    equal elements in both.
    """
    classes: dict[object, int] = {}
    told: list[object] = []
    for node, i in constants:
        t = node.inputs[i]
        constant = held.get(id(t))
        if constant is None:
            continue
        computed = id(t) in graph.exact
        # The elements of a small constant are already part of the template.
        if constant.array.size <= _FEW:
            told.append((constant.half, computed))
            continue
        if constant.uniform:
            number = constant.first_element()
        else:
            number = None
        told.append((classes.setdefault(constant.content_key, len(classes)), number, constant.structure_key, computed))
    return tuple(told)


def _constant_inputs(regions: Sequence[Region], expressions: ComputedConstants | None) -> Iterator[tuple[gs.Node, int]]:
    """Yield the reads of constants: node and input index."""
    chain = () if expressions is None else expressions.nodes
    for node in (*(n for region in regions for n in region.nodes), *chain):
        for i, t in enumerate(node.inputs):
            if not t.is_empty() and regions[0].graph.is_constant(t):
                yield node, i
