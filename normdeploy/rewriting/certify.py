"""Certificates: the proof that stands behind each rewrite (`normdeploy.proof`, docs/certificates.md).

The reference is the BEFORE subgraph itself, never the recognised fact: a norm that was misread would certify itself. Norms that differ in
the elements of their gammas and betas alone share one identity; what each of them stores is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..proof.branches import Branches
from ..proof.certificate import NOT_KNOWN, certificate_of
from ..proof.errors import NotProved
from ..proof.folds import Expressions
from ..proof.prove import Identity, checked, identity
from ..proof.sides import of_regions
from ..recognition.region import NoMatch, Region, compile_region
from ..records import Certificate, Finding

_FEW = 4  # elements of a constant that is part of a region's template (`recognition.region`)
_SMALL = 2**16  # elements of a constant that is told by its content; a larger one is told by itself

Memo = MutableMapping[object, Identity | NotProved]


@dataclass(frozen=True)
class Rewrite:
    """A subgraph and what shall take its place: both are functions of the same leaves."""

    before: Region
    after: Region


def rewrite_of(graph: Graph, before: Region, nodes: Sequence[gs.Node]) -> Rewrite | NoMatch:
    """Pair a region with the nodes that shall replace it."""
    after = compile_region(graph, nodes[-1].outputs[0], before.leaves)
    return after if isinstance(after, NoMatch) else Rewrite(before, after)


def certified(memo: Memo, rewrites: Sequence[Rewrite], expressions: Expressions | Branches | None = None) -> Certificate:
    """The certificate of a rewrite; of several results at once where ``rewrites`` are several, of the same leaves.

    ``memo``: what was proved of others in this graph. ``expressions``: what the constants of a fold are made of.
    """
    try:
        sides = of_regions([r.before for r in rewrites], [r.after for r in rewrites], expressions)
        key = _key(rewrites, expressions)
        if key not in memo:
            try:
                memo[key] = identity(sides)
            except NotProved as e:
                memo[key] = e
        found = memo[key]
        if isinstance(found, NotProved):
            raise found
        checked(sides, found)
    except NotProved as e:
        return certificate_of(e)
    return certificate_of(found)


def unproved(finding: Finding, certificate: Certificate) -> Finding:
    """A finding whose rewrite is not made.

    It is refused where the nodes before are no algebra, or of unknown sizes: nobody can say what they are at every input. Where the two
    differ it is undone.
    """
    if certificate.why in NOT_KNOWN:
        return replace(finding, status="refused", reason=f"it can't be proved: {certificate.note}", became="", certificate=certificate)
    return replace(finding, status="undone", reason=f"its certificate failed: {certificate.note}", became="", certificate=certificate)


def _key(rewrites: Sequence[Rewrite], expressions: Expressions | Branches | None) -> object:
    """Equal for rewrites that differ in the elements of their larger constants alone, and in these alike."""
    regions = [region for r in rewrites for region in (r.before, r.after)]
    graph = regions[0].graph
    classes: dict[object, int] = {}
    told: list[object] = []
    for t in _constants(regions, expressions):
        held = graph.known(t)
        if held is None or held.size <= _FEW or held.dtype.kind != "f":
            continue
        content = held.tobytes() if held.size <= _SMALL else id(t)
        sign = 2 if (held > 0).all() else int((held >= 0).all())
        number = float(held.flat[0]) if (held == held.flat[0]).all() else None
        told.append((classes.setdefault(content, len(classes)), sign, number, bool(np.isfinite(held).all())))
    folds: tuple[object, ...] = ()
    if expressions is not None:
        folds = expressions.told
    return (*(region.template for region in regions), tuple(told), folds)


def _constants(regions: Sequence[Region], expressions: Expressions | Branches | None) -> Iterator[gs.Tensor]:
    chain = () if expressions is None else expressions.nodes
    for node in (*(n for region in regions for n in region.nodes), *chain):
        for t in node.inputs:
            if not t.is_empty() and regions[0].graph.is_constant(t):
                yield t
