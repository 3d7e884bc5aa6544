"""Certificates: the proof that stands behind each rewrite (`normdeploy.proof`, docs/certificates.md).

The reference is the BEFORE subgraph itself, never the recognised fact: a norm that was misread would certify itself.
Norms that differ in the elements of their gammas and betas alone share one identity; what each of them stores is looked
at by itself.
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

# places of an axis whose length may be any
_LONG = 4
# elements of a constant that is part of a region's template (`graphs.region`)
_FEW = 4
# whole numbers of one constant that may be the lengths that a Reshape names
_NAMED = 16
# whose taps are told apart: their number is no length
_KERNELS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Rewrite:
    """A subgraph and what shall take its place: both are functions of the same leaves."""

    before: Region
    after: Region


@dataclass(frozen=True)
class ResultPair:
    """A result before and after: a region, and the tensor that shall be the same function of its leaves."""

    before: Region | Refusal
    after: gs.Tensor


@dataclass(frozen=True)
class ProvedRewrites:
    """Rewrites of the same leaves, and the certificate of all."""

    rewrites: tuple[Rewrite, ...]
    certificate: Certificate


def pair_of(graph: Graph, old: gs.Tensor, leaves: Sequence[gs.Tensor], new: gs.Tensor) -> ResultPair:
    """Return ``old`` as a function of ``leaves``, and ``new``, which shall be the same function of them."""
    return ResultPair(compile_region(graph, old, leaves), new)


Failure = Refusal | Certificate
"""Why nothing is proved: the sides can't be compared, or the certificate failed."""


def rewrite_of(graph: Graph, pair: ResultPair) -> Rewrite | Refusal:
    """Compile the tensor after to a region of the leaves of that before."""
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
    """Prove that each pair is one function, as `certify_rewrites`."""
    rewrites: list[Rewrite] = []
    for pair in pairs:
        rewrite = rewrite_of(graph, pair)
        if isinstance(rewrite, Refusal):
            return rewrite
        rewrites.append(rewrite)
    certificate = certify_rewrites(memo, rewrites, expressions=expressions, partly_hidden=partly_hidden)
    if certificate:
        return ProvedRewrites(tuple(rewrites), certificate)
    return certificate


def failure_reason(failure: Failure) -> str:
    """Return the reason of a failure, for people."""
    if isinstance(failure, Refusal):
        return failure.reason
    return f"it can't be proved: {failure.note}"


def certify_rewrites(
    memo: ProofMemo,
    rewrites: Sequence[Rewrite],
    expressions: ComputedConstants | None = None,
    partly_hidden: Collection[gs.Tensor] = (),
) -> Certificate:
    """The certificate of a rewrite; of several results at once where ``rewrites`` are several, of the same leaves.

    ``memo``: what was proved of others in this graph. ``expressions``: what the constants of a fold are made of.
    ``partly_hidden``: leaves of which the caller has shown that no row is -Inf throughout.
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
                # which may be made of the elements of constants: of this rewrite alone
                if proof.epsilons:
                    del memo[key]
                break
        # not raised, which would give it a frame
        if isinstance(proof, NotProved):
            return certificate_of(proof)
        check_stored_constants(sides, proof)
    except NotProved as e:
        return certificate_of(e)
    except OverflowError as e:
        return certificate_of(NotProved(ProofFailure.LIMIT, str(e)))
    return certificate_of(proof)


def certify_sides(sides: Callable[[], Iterable[Equivalence]]) -> Certificate:
    """The certificate of several proofs, one behind the other, or of the first that fails.

    Args:
        sides: gives what is proved; it may raise NotProved itself.
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
    """A finding whose rewrite is not made.

    It is refused where the nodes before are no algebra, or of unknown sizes: nobody can say what they are at every
    input. Where the two differ it is undone.
    """
    if isinstance(failure, Refusal):
        return replace(finding, status="refused", reason=failure.reason, became="")
    finding = replace(finding, became="", certificate=failure)
    if failure.why in NOT_KNOWN:
        return replace(finding, status="refused", reason=f"it can't be proved: {failure.note}")
    return replace(finding, status="undone", reason=f"its certificate failed: {failure.note}")


def _read_constants(graph: Graph, constants: Sequence[tuple[gs.Node, int]]) -> dict[int, StoredConstant]:
    """The floating constants by the ids of their tensors."""
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
    """The lengths along leaves and constants, each as a size of its own, in the order in which they are met."""
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
            # whole numbers: lengths that a Reshape names, or what may become a tensor of so many places
            known = graph.known_value(node.inputs[i])
            if known is None:
                taps |= set()
            else:
                taps |= {*known.shape, *known.reshape(-1)[:_NAMED].tolist()}
        else:
            lengths |= dict.fromkeys(constant.array.shape)
            if node.op in _KERNELS and i == 1:
                taps |= set(constant.array.shape[2:])
            else:
                taps |= set()
    long = [n for n in lengths if n >= _LONG and n not in taps]
    return {n: Size.opaque("length", i) for i, n in enumerate(long)}


def _constants_key(
    graph: Graph, constants: Sequence[tuple[gs.Node, int]], held: Mapping[int, StoredConstant]
) -> tuple[object, ...]:
    """What a proof may ask of the constants besides what the regions' templates hold: equal for rewrites that differ in
    the elements of their larger constants alone, and in these alike."""
    classes: dict[object, int] = {}
    told: list[object] = []
    for node, i in constants:
        t = node.inputs[i]
        constant = held.get(id(t))
        if constant is None:
            continue
        computed = id(t) in graph.exact
        # its elements are part of the template
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
    """Where constants are read: a node, and which of its inputs."""
    chain = () if expressions is None else expressions.nodes
    for node in (*(n for region in regions for n in region.nodes), *chain):
        for i, t in enumerate(node.inputs):
            if not t.is_empty() and regions[0].graph.is_constant(t):
                yield node, i
