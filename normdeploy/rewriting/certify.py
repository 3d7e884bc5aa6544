"""Certificates: the proof that stands behind each rewrite (`normdeploy.proof`, docs/certificates.md).

The reference is the BEFORE subgraph itself, never the recognised fact: a norm that was misread would certify itself.
Norms that differ in the elements of their gammas and betas alone share one identity; what each of them stores is looked
at by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from ..graphs.dims import dim_size
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region, compile_region
from ..graphs.sizes import Size
from ..proof.certificate import NOT_KNOWN, certificate_of
from ..proof.computed import Computed
from ..proof.errors import NotProved, Why
from ..proof.evaluation import Identity
from ..proof.prove import checked, identity, identity_of_any_length, prove
from ..proof.run import half
from ..proof.sampler import Held, told_apart
from ..proof.sides import Sides, of_regions
from ..records import Certificate, Finding, both
from .file_bytes import require_as_in_file

_LONG = 4  # places of an axis whose length may be any
_FEW = 4  # elements of a constant that is part of a region's template (`graphs.region`)
_NAMED = 16  # whole numbers of one constant that may be the lengths that a Reshape names
_KERNELS = ("Conv", "ConvTranspose")  # whose taps are told apart: their number is no length

Memo = MutableMapping[object, Identity | NotProved]


@dataclass(frozen=True)
class Rewrite:
    """A subgraph and what shall take its place: both are functions of the same leaves."""

    before: Region
    after: Region


@dataclass(frozen=True)
class Pair:
    """A result before and after: a region, and the tensor that shall be the same function of its leaves."""

    before: Region | Refusal
    after: gs.Tensor


@dataclass(frozen=True)
class Proved:
    """Rewrites of the same leaves, and the certificate of all."""

    rewrites: tuple[Rewrite, ...]
    certificate: Certificate


def pair_of(graph: Graph, old: gs.Tensor, leaves: Sequence[gs.Tensor], new: gs.Tensor) -> Pair:
    """Return ``old`` as a function of ``leaves``, and ``new``, which shall be the same function of them."""
    return Pair(compile_region(graph, old, leaves), new)


Failure = Refusal | Certificate
"""Why nothing is proved: the sides can't be compared, or the certificate failed."""


def rewrite_of(graph: Graph, pair: Pair) -> Rewrite | Refusal:
    """Compile the tensor after to a region of the leaves of that before."""
    if isinstance(pair.before, Refusal):
        return pair.before
    after = compile_region(graph, pair.after, pair.before.leaves)
    return after if isinstance(after, Refusal) else Rewrite(pair.before, after)


def decide(
    graph: Graph,
    memo: Memo,
    pairs: Sequence[Pair],
    *,
    expressions: Computed | None = None,
    partly_hidden: Collection[gs.Tensor] = (),
) -> Proved | Failure:
    """Prove that each pair is one function, as `certified`."""
    rewrites: list[Rewrite] = []
    for pair in pairs:
        rewrite = rewrite_of(graph, pair)
        if isinstance(rewrite, Refusal):
            return rewrite
        rewrites.append(rewrite)
    certificate = certified(memo, rewrites, expressions=expressions, partly_hidden=partly_hidden)
    return Proved(tuple(rewrites), certificate) if certificate else certificate


def why(failure: Failure) -> str:
    """Return the reason of a failure, for people."""
    return failure.reason if isinstance(failure, Refusal) else f"it can't be proved: {failure.note}"


def certified(
    memo: Memo,
    rewrites: Sequence[Rewrite],
    expressions: Computed | None = None,
    partly_hidden: Collection[gs.Tensor] = (),
) -> Certificate:
    """The certificate of a rewrite; of several results at once where ``rewrites`` are several, of the same leaves.

    ``memo``: what was proved of others in this graph. ``expressions``: what the constants of a fold are made of.
    ``partly_hidden``: leaves of which the caller has shown that no row is -Inf throughout.
    """
    try:
        constants = list(_constants([region for r in rewrites for region in (r.before, r.after)], expressions))
        require_as_in_file(rewrites[0].before.graph, [node.inputs[i] for node, i in constants])
        sides = of_regions([r.before for r in rewrites], [r.after for r in rewrites], expressions)
        sides = replace(sides, held=_read(rewrites[0].before.graph, constants))
        hiding = {id(t) for t in partly_hidden}
        numbers = frozenset(i for i, t in enumerate(rewrites[0].before.leaves) if id(t) in hiding)
        sides = replace(sides, partly_hidden=numbers)
        read = [*rewrites[0].before.leaves, *(() if expressions is None else expressions.leaves)]
        sides = replace(sides, named=_lengths(rewrites[0].before.graph, read, constants, sides.held))
        told = _told(rewrites[0].before.graph, constants, sides.held)
        proof: Identity | NotProved = NotProved(Why.SIZE, "")
        general = [(sides.named, identity_of_any_length)] if sides.named else []
        for names, show in (*general, ({}, identity)):
            parts = [region.template_of(names) for r in rewrites for region in (r.before, r.after)]
            key = (*parts, told, () if expressions is None else expressions.template(names), bool(names), numbers)
            if key not in memo:
                try:
                    memo[key] = show(sides)
                except NotProved as e:
                    memo[key] = _bare(e)
            proof = memo[key]
            if isinstance(proof, Identity):
                if proof.epsilons:  # which may be made of the elements of constants: of this rewrite alone
                    del memo[key]
                break
        if isinstance(proof, NotProved):  # not raised, which would give it a frame
            return certificate_of(proof)
        checked(sides, proof)
    except NotProved as e:
        return certificate_of(e)
    except OverflowError as e:
        return certificate_of(NotProved(Why.LIMIT, str(e)))
    return certificate_of(proof)


def certified_sides(sides: Callable[[], Iterable[Sides]]) -> Certificate:
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
        whole = both(whole, certificate_of(proved))
    assert whole is not None
    return whole


def _bare(error: NotProved) -> NotProved:
    """Without the frames of the attempts before it, too, which would hold all that was evaluated."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def unproved(finding: Finding, failure: Failure) -> Finding:
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


def _read(graph: Graph, constants: Sequence[tuple[gs.Node, int]]) -> dict[int, Held]:
    """The floating constants by the ids of their tensors."""
    read: dict[int, Held] = {}
    for node, i in constants:
        t = node.inputs[i]
        parts = None if id(t) in read else graph.parts(t)
        if parts is not None and parts[0].dtype.kind == "f":
            read[id(t)] = Held(parts[0], half(graph, t), parts[1])
    told_apart(read.values())
    return read


def _lengths(
    graph: Graph, leaves: Sequence[gs.Tensor], constants: Sequence[tuple[gs.Node, int]], held: Mapping[int, Held]
) -> dict[int, Size]:
    """The lengths along leaves and constants, each as a size of its own, in the order in which they are met."""
    lengths, taps = dict[int, None](), set[int]()
    for t in leaves:
        lengths |= dict.fromkeys(n for n in graph.shape(t) or () if isinstance(n, int))
        taps |= {
            number
            for n in graph.shape(t) or ()
            if isinstance(n, str) and (number := dim_size(n, "").number) is not None
        }
    for node, i in constants:
        constant = held.get(id(node.inputs[i]))
        if (
            constant is None
        ):  # whole numbers: lengths that a Reshape names, or what may become a tensor of so many places
            known = graph.known(node.inputs[i])
            taps |= set() if known is None else {*known.shape, *known.reshape(-1)[:_NAMED].tolist()}
        else:
            lengths |= dict.fromkeys(constant.array.shape)
            taps |= set(constant.array.shape[2:]) if node.op in _KERNELS and i == 1 else set()
    long = [n for n in lengths if n >= _LONG and n not in taps]
    return {n: Size.unknown("length", i) for i, n in enumerate(long)}


def _told(graph: Graph, constants: Sequence[tuple[gs.Node, int]], held: Mapping[int, Held]) -> tuple[object, ...]:
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
        if constant.array.size <= _FEW:  # its elements are part of the template
            told.append((constant.half, computed))
            continue
        number = constant.first() if constant.uniform else None
        told.append((classes.setdefault(constant.content, len(classes)), number, constant.told, computed))
    return tuple(told)


def _constants(regions: Sequence[Region], expressions: Computed | None) -> Iterator[tuple[gs.Node, int]]:
    """Where constants are read: a node, and which of its inputs."""
    chain = () if expressions is None else expressions.nodes
    for node in (*(n for region in regions for n in region.nodes), *chain):
        for i, t in enumerate(node.inputs):
            if not t.is_empty() and regions[0].graph.is_constant(t):
                yield node, i
