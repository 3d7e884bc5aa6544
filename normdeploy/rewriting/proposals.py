"""What a transform proposes at one node of a graph, before anything is changed.

A transform is a function ``propose(graph, node, target)``. It returns one of

    Proposal    nodes that may take the place of others: `rewriter.Rewriter` proves, tries, edits, seals and tells
    Finding     what is told of a norm that stays as it is
    Remark      what is told besides of norms that have a finding
    None        nothing: this is no place for it

It changes neither findings nor the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding
from ..graphs.dims import Dims
from ..graphs.graph import Graph
from ..proof.computed_constants import ComputedConstants
from ..proof.equivalence import Equivalence
from .certification import Failure, ResultPair, Rewrite
from .rewrite_ledger import LedgerEntry, RewriteOptions
from .rounding_verdicts import RoundingTrial

COMPUTED = "computed once: constants alone feed it"


@dataclass(frozen=True)
class RewriteTarget:
    """What a transform may ask besides the graph."""

    wanted: RewriteOptions
    # Of a tensor: what is told of the norm that makes it.
    entry_of: Callable[[str], LedgerEntry | None]
    # Of a tensor that a rewrite of several norms made: what is told of these.
    entries_behind: Callable[[str], Sequence[LedgerEntry]]
    # What was written once for all that read the same.
    shared: Mapping[tuple[object, ...], gs.Tensor]


@dataclass(frozen=True)
class NodeReplacement:
    """Nodes of which the last makes ``old``.

    Args:
        old: a tensor of the graph; it keeps its name and readers.
        output: which output of the last node it becomes.
        shape: of ``old``, where it is known now.
        origin: the node whose metadata the new ones get; None: the one that made ``old``.
        also: tensors that other outputs of the last node become.
    """

    old: gs.Tensor
    nodes: tuple[gs.Node, ...]
    output: int = 0
    shape: Dims | None = None
    origin: gs.Node | None = None
    also: Mapping[int, gs.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is computed once: it becomes an initializer of its name that holds ``value``."""

    tensor: gs.Tensor
    value: np.ndarray


@dataclass(frozen=True)
class Remark:
    """What is told besides of norms that have a finding."""

    entries: Sequence[LedgerEntry]
    revise: Callable[[Finding], Finding]


@dataclass(frozen=True)
class Proposal:
    """Nodes that may take the place of others.

    Args:
        finding: what is told of it; the certificate is added.
        pairs: what has to be proved; none where the transform compared the nodes themselves.
        changes: what becomes of the graph.
        sides: what has to be proved in the place of pairs, of nodes whose meaning no region knows.
        values: tensors that become constants, after the changes.
        expressions: what new constants are made of.
        partly_hidden: leaves of which no row is -Inf throughout, as the transform has shown.
        opset: the lowest that has the nodes.
        trial: makes what onnxruntime shall run of both sides, of (rewrites, a number that no other trial has).
        kind: equal for proposals that differ in gamma and beta alone, of which a few are run.
        only_for_speed: whether it is taken back where it costs accuracy, and no norm is rewritten by it.
        revised_entries: norms that it says something of, in the place of a finding of its own.
        revise: makes their findings, of (finding, certificate).
        stored: gives the proposal as the file shall hold it, once it is proved.
        shared: what others that read the same may read from now on.
        otherwise: what to try where it is not made; the first that is made, or that says "kept", counts.
        instead: what counts where it is not made, whatever comes of it.
        unproved: what is told where nothing is made.
        then: what to try where it is made.
        joined: makes one finding of its own and that of ``then``; None: they are two.
    """

    finding: Finding
    pairs: tuple[ResultPair, ...]
    changes: tuple[NodeReplacement, ...]
    unproved: Callable[[Failure], Finding | Remark | None]
    values: tuple[StoredTensor, ...] = ()
    sides: Callable[[], Iterable[Equivalence]] | None = None
    expressions: ComputedConstants | None = None
    partly_hidden: tuple[gs.Tensor, ...] = ()
    opset: int = 0
    trial: Callable[[Sequence[Rewrite], int], RoundingTrial | None] | None = None
    kind: object = None
    only_for_speed: bool = False
    revised_entries: tuple[LedgerEntry, ...] = ()
    revise: Callable[[Finding, Certificate | None], Finding] | None = None
    stored: Callable[[Proposal], Proposal] | None = None
    shared: Mapping[tuple[object, ...], gs.Tensor] = field(default_factory=dict)
    otherwise: Callable[[Failure], Iterable[ProposeResult]] | None = None
    instead: Callable[[], ProposeResult] | None = None
    then: Callable[[], ProposeResult] | None = None
    joined: Callable[[Finding, Finding], Finding] | None = None

    @property
    def nodes(self) -> list[gs.Node]:
        """All that are written."""
        return [node for change in self.changes for node in change.nodes]


def propose_for_speed(
    kind: str,
    old: gs.Tensor,
    nodes: Sequence[gs.Node],
    became: str,
    module: str,
    pairs: tuple[ResultPair, ...] = (),
    **more: Any,
) -> Proposal:
    """Propose ``nodes`` in the place of what makes ``old``, where that is faster and costs no accuracy.

    Args:
        more: other fields of the proposal.
    """
    told = Finding(kind, "fused", old.name, module, became=became)
    changes = (NodeReplacement(old, tuple(nodes)),)
    return Proposal(told, pairs, changes, unproved=ignore_failure, only_for_speed=True, **more)


def propose_stored(old: gs.Tensor, module: str, values: Sequence[StoredTensor], **more: Any) -> Proposal:
    """Propose that tensors become constants. ``old``: that the finding names; ``more``: other fields."""
    told = Finding("constant", "folded", old.name, module, became=COMPUTED)
    return Proposal(told, (), (), unproved=ignore_failure, values=tuple(values), only_for_speed=True, **more)


ProposeResult = Proposal | Finding | Remark | None
Propose = Callable[[Graph, gs.Node, RewriteTarget], ProposeResult]
Sweep = Callable[[RewriteTarget], Iterator[tuple[gs.Node, ProposeResult]]]
"""Proposes for a whole graph: each time the node at which it begins. It goes on once that is decided."""


def ignore_failure(failure: Failure) -> None:
    """Tell nothing of a proposal that is not made: it is no norm's."""
