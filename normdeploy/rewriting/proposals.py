"""Define the proposal of a transform at one node of a graph, before anything is changed.

A transform is a function ``propose(graph, node, target)``. It returns one of

- `Proposal`: nodes that may replace others; `rewriter.Rewriter` proves, tries, applies, seals and reports it.
- `Finding`: the result for a norm that stays unchanged.
- `Remark`: an addition to existing findings of norms.
- None: the transform does not apply at this node.

A transform changes neither findings nor the graph.
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

COMPUTED = "computed once: it depends only on constants"


@dataclass(frozen=True)
class RewriteTarget:
    """Inputs of a transform besides the graph.

    Attributes:
        wanted: options of the rewrite.
        entry_of: returns the entry of the norm that computes a tensor, by name; None if there is none.
        entries_behind: returns the entries of the norms that one rewrite merged into a tensor.
        shared: tensors that rewrites wrote and that other rewrites reuse if they need the same value.
    """

    wanted: RewriteOptions
    entry_of: Callable[[str], LedgerEntry | None]
    entries_behind: Callable[[str], Sequence[LedgerEntry]]
    shared: Mapping[tuple[object, ...], gs.Tensor]


@dataclass(frozen=True)
class NodeReplacement:
    """New nodes, of which the last one computes ``old``.

    Attributes:
        old: tensor of the graph; it keeps its name and readers.
        nodes: the new nodes in topological order.
        output: index of the last node's output that becomes ``old``.
        shape: shape of ``old`` if it is known now.
        origin: node whose metadata the new nodes get; None for the producer of ``old``.
        also: index of another output of the last node → tensor of the graph that this output replaces.
    """

    old: gs.Tensor
    nodes: tuple[gs.Node, ...]
    output: int = 0
    shape: Dims | None = None
    origin: gs.Node | None = None
    also: Mapping[int, gs.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """Tensor that becomes an initializer of the same name with ``value``."""

    tensor: gs.Tensor
    value: np.ndarray


@dataclass(frozen=True)
class Remark:
    """Addition to existing findings of norms."""

    entries: Sequence[LedgerEntry]
    revise: Callable[[Finding], Finding]


@dataclass(frozen=True)
class Proposal:
    """Nodes that may replace others.

    Attributes:
        finding: finding of the rewrite; the certificate is added.
        pairs: pairs to prove; empty if the transform compared the nodes itself.
        changes: changes of the graph.
        unproved: returns the finding or remark to record if the rewrite and all its alternatives fail.
        values: tensors that become constants after the changes.
        sides: claims to prove instead of pairs, for nodes that no region can express.
        expressions: expressions of the computed constants.
        partly_hidden: leaves for which the transform showed that no row consists of -Inf only.
        opset: lowest opset that has the nodes.
        trial: builds the onnxruntime trial from (rewrites, unique number of the trial).
        kind: key that is equal for proposals that run the same kernels; only a few trials of one kind are run.
        only_for_speed: True if the rewrite concerns no norm and is made for speed alone. It is taken back if it costs
            accuracy.
        revised_entries: norms whose findings the rewrite changes. The rewrite then has no separate finding.
        revise: returns the changed finding of such a norm from (finding, certificate).
        stored: converts the proved proposal to the form that the file stores.
        shared: tensors that other rewrites may read from now on.
        otherwise: yields alternatives if the rewrite is not made. The first alternative that is made, or whose finding
            is "kept", counts.
        instead: returns an alternative if the rewrite is not made. This alternative counts, whatever its result.
        then: returns a follow-up proposal after the rewrite was made.
        joined: merges the finding with the finding of ``then``; None to keep both.
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
    def written_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the proposal computes anew or makes constant."""
        replaced = [t for change in self.changes for t in (change.old, *change.also.values())]
        return tuple(dict.fromkeys(t.name for t in (*replaced, *(v.tensor for v in self.values))))

    @property
    def nodes(self) -> list[gs.Node]:
        """Return all written nodes."""
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
    """Propose ``nodes`` to replace the nodes that compute ``old``, if that is faster and costs no accuracy.

    Args:
        kind: kind of the finding.
        became: description of the result.
        module: name of the module.
        pairs: pairs to prove.
        more: other fields of the proposal.

    Returns:
        a proposal with ``only_for_speed``.
    """
    told = Finding(kind, "fused", old.name, module, became=became)
    changes = (NodeReplacement(old, tuple(nodes)),)
    return Proposal(told, pairs, changes, unproved=ignore_failure, only_for_speed=True, **more)


def propose_stored(old: gs.Tensor, module: str, values: Sequence[StoredTensor], **more: Any) -> Proposal:
    """Propose that tensors become constants.

    Args:
        old: tensor named in the finding.
        more: other fields of the proposal.

    Returns:
        a proposal with ``only_for_speed``.
    """
    told = Finding("constant", "folded", old.name, module, became=COMPUTED)
    return Proposal(told, (), (), unproved=ignore_failure, values=tuple(values), only_for_speed=True, **more)


ProposeResult = Proposal | Finding | Remark | None
Propose = Callable[[Graph, gs.Node, RewriteTarget], ProposeResult]
Sweep = Callable[[RewriteTarget], Iterator[tuple[gs.Node, ProposeResult]]]
"""Yields proposals for a whole graph, each with its first node. The next one follows after the decision on it."""


def ignore_failure(failure: Failure) -> None:
    """Report nothing for a failed proposal that concerns no norm."""
