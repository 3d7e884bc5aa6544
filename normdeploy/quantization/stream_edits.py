"""Merge a map of rows into the weights of all writers of a closed stream, and its inverse into the weights of all
readers.

Each edit is proved separately. docs/explanation/identities.md, "A map of a whole stream", explains why this suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding
from ..forms.constant_linear import ConstantLinear
from ..graphs.graph import Graph
from ..graphs.region import RefusedError, require_success
from ..proof.computed_constants import ComputedConstants
from ..proof.lemmas.isometry import inverse_pair_factor
from ..rewriting import certification
from ..rewriting.certification import ResultPair, pair_of
from ..rewriting.proposals import NodeReplacement, Proposal, ignore_failure
from ..rewriting.rewriter import DecidedProposal, Rewriter
from .residual_streams import LinearLayers, ResidualStream
from .rotation_constants import RotationConstants

STAGE = "quantization"
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class StreamMap:
    """Map of rows: Q = A/√k, applied to consecutive runs of each row.

    Without a matrix, the map subtracts the mean of each row.

    Attributes:
        run: matrix A for one run, int8 (n, n) of ±1 with A·Aᵀ = k·I; None to subtract the mean.
        k: square of the divisor √k.
    """

    run: np.ndarray | None
    k: int = 1

    def full_matrix(self, width: int) -> np.ndarray:
        """Build the matrix for rows of ``width``.

        Returns:
            int8 (width, width), with a block A for each run on the diagonal.
        """
        assert self.run is not None
        return np.kron(np.eye(width // len(self.run), dtype=np.int8), self.run)

    def map_rows(self, values: np.ndarray) -> np.ndarray:
        """Map the rows of float64 (…, width).

        Returns:
            the mapped rows in the same shape.
        """
        if self.run is None:
            return values - values.mean(-1, keepdims=True)
        return self._map_runs(values, self.run)

    def map_columns(self, values: np.ndarray) -> np.ndarray:
        """Compute Qᵀ·values.

        Returns:
            float64 (width, …).
        """
        assert self.run is not None
        return self._map_runs(values.T, self.run).T

    def _map_runs(self, values: np.ndarray, a: np.ndarray) -> np.ndarray:
        runs = np.ascontiguousarray(values).reshape(-1, len(a)) @ a.astype(np.float64)
        return np.asarray((runs / math.sqrt(self.k)).reshape(values.shape))


def propose_nodes(
    graph: Graph,
    out: gs.Tensor,
    nodes: Sequence[gs.Node],
    pairs: tuple[ResultPair, ...] = (),
    expressions: ComputedConstants | None = None,
) -> Proposal:
    """Propose ``nodes`` instead of the nodes that compute ``out``.

    Without ``pairs``, ``nodes`` must be the original nodes with other constants, and these constants must be proved
    already.

    Returns:
        the proposal.
    """
    return Proposal(
        Finding("linear layer", "folded", out.name),
        pairs=pairs,
        changes=(NodeReplacement(out, tuple(nodes), shape=graph.shape(out)),),
        expressions=expressions,
        unproved=ignore_failure,
    )


def prove_nodes(
    rewriter: Rewriter,
    out: gs.Tensor,
    nodes: Sequence[gs.Node],
    pairs: tuple[ResultPair, ...] = (),
    expressions: ComputedConstants | None = None,
) -> DecidedProposal:
    """Prove that ``nodes`` may replace the nodes that compute ``out``.

    Returns:
        the proved proposal.

    Raises:
        RefusedError: the replacement is not proved.
    """
    decided = rewriter.prove_proposal(propose_nodes(rewriter.graph, out, nodes, pairs, expressions))
    if not isinstance(decided, DecidedProposal):
        raise RefusedError(certification.failure_reason(decided))
    return decided


def layer_bias(made: Sequence[gs.Node]) -> gs.Tensor | None:
    """Find the bias of a layer that `ConstantLinear.write_nodes` wrote.

    A MatMul's bias is an input of the Add after it.

    Returns:
        the bias; None if the layer has no bias.
    """
    if len(made) > 1:
        return made[1].inputs[1]
    if len(made[0].inputs) > 2:
        return made[0].inputs[2]
    return None


@dataclass
class StreamEdits:
    """Edits of one stream.

    All edits are proved before the first is applied, so a stream is mapped completely or not at all.
    """

    rewriter: Rewriter
    layers: LinearLayers
    stream: ResidualStream
    map: StreamMap
    edits: list[DecidedProposal] = field(default_factory=list)
    _matrices: dict[tuple[int, str], gs.Node] = field(default_factory=dict)
    _weights: dict[tuple[int, str, bool], gs.Constant] = field(default_factory=dict)
    _tables: dict[int, gs.Constant] = field(default_factory=dict)
    _turned: list[RotationConstants] = field(default_factory=list)
    _certificates: list[Certificate] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        return self.rewriter.graph

    def prove_edits(self) -> None:
        """Prove the edit of each writer, reader, table and constant of the stream.

        Raises:
            RefusedError: an edit can't be proved.
        """
        self.edits += self._iter_edits()
        if not self._is_inverse():
            raise RefusedError("the matrices of its writers and readers are not inverse to each other")

    @property
    def _mapped_side(self) -> Literal["output"] | None:
        if self.map.run is None:
            return None
        return "output"

    def _iter_edits(self) -> Iterator[DecidedProposal]:
        for layer in self.stream.writers.values():
            yield self._edit_layer(layer, self._mapped_side)
        for layer in self.stream.readers.values():
            yield self._edit_layer(layer, "input")
        for node in self.stream.tables.values():
            yield self._edit_gather(node)
        for node, at in self.stream.carriers.values():
            if at:
                yield self._edit_carrier(node, at)

    def _is_inverse(self) -> bool:
        """Return True if the matrices of the readers undo the matrices of the writers.

        The check uses the matrices to which the proofs refer.
        """
        if self.map.run is None:
            return True
        held: dict[str, dict[int, np.ndarray]] = {"output": {}, "input": {}}
        for turned in self._turned:
            assert turned.side is not None
            assert turned.turn is not None
            matrix = turned.turn.inputs[1]
            held[turned.side][id(matrix)] = self.graph.value(matrix)
        return (
            inverse_pair_factor(list(held["output"].values()), list(held["input"].values()), len(self.map.run))
            == self.map.k
        )

    def apply_edits(self, more: Sequence[DecidedProposal] = ()) -> Certificate:
        """Apply the proved edits, then ``more``.

        Returns:
            the certificate of all edits together.
        """
        for edit in (*self.edits, *more):
            self.rewriter.apply_decided(STAGE, edit)
            self.layers.update_layers(edit.proposal.nodes)
            if edit.certificate is not None:
                self._certificates.append(edit.certificate)
        return _combine_all_certificates(self._certificates)

    def _edit_layer(self, linear: ConstantLinear, side: Literal["output", "input"] | None) -> DecidedProposal:
        # True if the rows of the weight are its input channels
        rows = not linear.is_transposed
        w = linear.w
        c = linear.c
        if side == "input":
            if rows:
                w = self.map.map_columns(w)
            else:
                w = self.map.map_rows(w)
        else:
            if rows:
                w = self.map.map_rows(w)
            else:
                w = self.map.map_rows(w.T).T
            if c.any():
                c = self.map.map_rows(np.broadcast_to(c, linear.output_channels))
        made = require_success(linear.write_nodes(self.graph, linear.data_input, w, c, linear.out, FLOAT))
        stored = made[0].inputs[linear.weight]
        held = (id(linear.node.inputs[linear.weight]), side or "", rows)
        # Layers that share a weight also share the new weight.
        made[0].inputs[linear.weight] = weight = self._weights.setdefault(held, stored)
        bias = layer_bias(made)
        if side is None:
            turn = None
        else:
            turn = self.matrix_node(linear.output_channels if side == "output" else linear.input_channels, side)
        turned = RotationConstants(linear, weight, bias, side, turn, self.map.k)
        pair = pair_of(self.graph, linear.out, [linear.data_input], made[-1].outputs[0])
        try:
            decided = prove_nodes(self.rewriter, linear.out, made, (pair,), turned)
        except RefusedError as error:
            raise RefusedError(f"{error} ({linear.title})") from error
        self._turned.append(turned)
        return decided

    def matrix_node(self, width: int, side: Literal["output", "input"]) -> gs.Node:
        """Build a node that multiplies rows by A, or by the transpose of A for ``side`` "input".

        The node exists only for proofs and is never written to a file.

        Returns:
            the node; always the same node for one width and side.
        """
        if (width, side) not in self._matrices:
            a = self.map.full_matrix(width)
            stored = self.graph.add_constant("turn", np.ascontiguousarray(a if side == "output" else a.T), FLOAT)
            like = next(iter(self.stream.tensors.values()))
            self._matrices[width, side] = self.graph.make_node("MatMul", [like, stored], like)
        return self._matrices[width, side]

    def _edit_gather(self, node: gs.Node) -> DecidedProposal:
        inputs = [self._map_table(node.inputs[0]), node.inputs[1]]
        new = self.graph.make_node("Gather", inputs, node.outputs[0], dict(node.attrs))
        return DecidedProposal(propose_nodes(self.graph, node.outputs[0], [new]))

    def _edit_carrier(self, node: gs.Node, constants: Sequence[int]) -> DecidedProposal:
        inputs = list(node.inputs)
        for i in constants:
            inputs[i] = self._map_table(node.inputs[i])
        new = self.graph.make_node(node.op, inputs, node.outputs[0], dict(node.attrs), outputs=len(node.outputs))
        return DecidedProposal(propose_nodes(self.graph, node.outputs[0], [new]))

    def _map_table(self, t: gs.Tensor) -> gs.Constant:
        """Map the rows of a constant.

        This is proved as a MatMul of arbitrary rows by the constant. A Gather is such a MatMul, whose left factor
        consists of rows of the unit matrix.
        """
        if id(t) not in self._tables:
            self._tables[id(t)] = self._map_constant(t)
        return self._tables[id(t)]

    def _map_constant(self, t: gs.Tensor) -> gs.Constant:
        graph = self.graph
        values = graph.known_value(t)
        assert values is not None
        flat = values.reshape(-1, values.shape[-1])
        if values.ndim == 2:
            table = t
        else:
            table = graph.add_constant(f"{t.name}_rows", flat, FLOAT)
        picks = gs.Variable(f"{t.name}_picks", dtype=FLOAT)
        graph.record_type(picks, None, ("rows", len(flat)))
        like = next(iter(self.stream.tensors.values()))
        node = graph.make_node("MatMul", [picks, table], like)
        linear = ConstantLinear(node, 1, flat, np.zeros(1), False, 1, node.outputs[0], (node,))
        edit = self._edit_layer(linear, self._mapped_side)
        assert edit.certificate is not None
        self._certificates.append(edit.certificate)
        made = edit.proposal.nodes[0].inputs[1]
        if values.ndim == 2:
            return made
        return graph.add_constant(t.name, graph.value(made).reshape(values.shape), FLOAT)


def _combine_all_certificates(certificates: Sequence[Certificate]) -> Certificate:
    """Combine certificates into one certificate. Their error probabilities add up."""

    def combine_two(one: Certificate, other: Certificate) -> Certificate:
        return replace(
            one,
            cases=one.cases + other.cases,
            bits=min(one.bits, other.bits),
            degree=max(one.degree, other.degree),
            gains=one.gains or other.gains,
        )

    whole = reduce(combine_two, certificates)
    return replace(whole, bits=whole.bits - math.ceil(math.log2(len(certificates))), note="")
