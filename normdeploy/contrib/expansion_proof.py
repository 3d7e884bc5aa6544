"""Prove that the expansion of a foreign node equals the definition by the tool that owns the op (`normdeploy.proof`).

Nodes with the same op, attributes, input sizes and expansion share one proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from ..evaluate import evaluator
from ..findings.records import Certificate
from ..graphs.symbolic_sizes import Size
from ..norms.norm_table import OpOwner
from ..proof import norm_definitions
from ..proof.certificate import certificate_of
from ..proof.contrib_definitions import TABLE
from ..proof.equivalence import Equivalence
from ..proof.identity_check import Identity
from ..proof.interpreter import ProofInterpreter
from ..proof.proof_errors import NotProved, ProofFailure
from ..proof.proto_evaluation import IndexTensor, LookupTable, attributes_of, evaluate_protos
from ..proof.prover import ProofMemo, prove_identity, prove_once
from ..proof.value import Value
from .expansion_writer import ExpansionWriter, ForeignOp, Types
from .shape_assumptions import RANKS, Shape, assume_shapes

MALFORMED = (
    evaluator.UnsupportedOp,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    ArithmeticError,
    AssertionError,
    AttributeError,
)


@dataclass(frozen=True)
class ExpansionProof:
    """Proof of one expansion.

    Attributes:
        certificate: the certificate. It may state that the proof failed.
        identity: the proof; None if it failed, or if there is one for each of several ranks.
        shapes: shapes of the node's inputs for which it holds.
    """

    certificate: Certificate
    identity: Identity | None
    shapes: Mapping[str, Shape]


def prove_expansion(memo: ProofMemo, op: ForeignOp, writer: ExpansionWriter, types: Types) -> ExpansionProof:
    """Prove every output of a node, at every input and size that its definition accepts.

    Args:
        memo: earlier proofs of other nodes; extended.

    Returns:
        the proof, or its failure.

    Raises:
        MALFORMED: the node does not fit its op.
    """
    attrs = attributes_of(writer.node)
    name = writer.node.input[0]
    ranks = [0]
    more = ""
    if types[name][1] is None and writer.node.op_type != "EmbedLayerNormalization":
        least = max(-int(attrs.get("axis", -1)), 1)
        ranks = list(range(least, least + RANKS))
        # The written nodes do not refer to an additional leading axis. So each slice along such an axis is a tensor of
        # the smaller rank, for which the proof holds.
        more = (
            f"the rank of {name!r} is unknown: proved at each rank from {least} to {ranks[-1]}, and slice by "
            "slice at higher ranks"
        )
    shapes = [assume_shapes(op, writer.node, attrs, types, rank) for rank in ranks]
    proofs = [_prove_at_sizes(memo, op, writer, attrs, sizes) for sizes in shapes]
    certificate = certificate_of(next((f for f in proofs if isinstance(f, NotProved)), proofs[-1]), more)
    if len(proofs) == 1 and isinstance(proofs[0], Identity):
        return ExpansionProof(certificate, proofs[0], shapes[0])
    return ExpansionProof(certificate, None, shapes[-1])


def _prove_at_sizes(
    memo: ProofMemo, op: ForeignOp, writer: ExpansionWriter, attrs: Mapping[str, Any], sizes: Mapping[str, Shape]
) -> Identity | NotProved:
    """Prove the expansion for inputs of these sizes. Equal nodes share the proof."""

    def prove_sides() -> Identity:
        return _prove_exactly(_expansion_equivalence(op, writer, attrs, sizes))

    return prove_once(memo, _proof_key(op, writer, sizes), prove_sides)


def _prove_exactly(sides: Equivalence) -> Identity:
    """Prove an exact identity, without a scale, shift or rounding, because an expansion computes no parameter."""
    proof = prove_identity(sides)
    if proof.parameters or proof.epsilons or proof.read:
        raise NotProved(
            ProofFailure.DIFFERS, "it computes a different function, which differs by a scale or shift", sides.culprit
        )
    return proof


def _expansion_equivalence(
    op: ForeignOp, writer: ExpansionWriter, attrs: Mapping[str, Any], sizes: Mapping[str, Shape]
) -> Equivalence:
    """Build the two sides of the proof: the owner's definition and the written nodes."""
    node = writer.node
    opset = writer.opset
    wanted = [i for i, name in enumerate(node.output) if name]
    if op.row.owner is OpOwner.ONNX:
        definition = norm_definitions.TABLE[node.op_type]
    else:
        definition = TABLE[op.row.owner, node.op_type]
    leaves, inputs_of = (
        _embedding_leaves(node, sizes) if node.op_type == "EmbedLayerNormalization" else _plain_leaves(sizes)
    )

    def evaluate_definition(m: ProofInterpreter, values: Sequence[Value]) -> list[Value]:
        given = inputs_of(values)
        results = definition(m, [given[name] if name else None for name in node.input], attrs, opset, len(node.output))
        if not isinstance(results, tuple):
            results = (results,)
        return [results[i] for i in wanted]

    def evaluate_expansion(m: ProofInterpreter, values: Sequence[Value]) -> list[Value]:
        env = evaluate_protos(m, writer.nodes, writer.initializers, inputs_of(values), writer.written_opset)
        return [env[node.output[i]] for i in wanted]

    return Equivalence(leaves, evaluate_definition, evaluate_expansion, node.output[wanted[0]])


def _plain_leaves(sizes: Mapping[str, Shape]) -> tuple[tuple[Shape, ...], Any]:
    """Declare each input as a leaf of the proof."""
    return tuple(sizes.values()), lambda values: dict(zip(sizes, values, strict=True))


def _embedding_leaves(node: onnx.NodeProto, sizes: Mapping[str, Shape]) -> tuple[tuple[Shape, ...], Any]:
    """Make the selected rows leaves, by table and ids (or number of first rows), with gamma, beta and the mask as
    numbers.
    """
    name = dict(enumerate(node.input))
    ids, positions = name[0], name.get(8) or ""
    picks: list[tuple[str, str | Size]] = [(name[2], ids), (name[3], positions or sizes[ids][1])]
    if name[1]:
        picks += [(name[4], name[1])]
    counted = name.get(7) or ""
    leaves: dict[object, Shape] = {}
    for table, by in picks:
        leaves[table, by] = (*(sizes[by] if isinstance(by, str) else (by,)), *sizes[table])
    leaves.update((vector, sizes[vector]) for vector in (name[5], name[6]))
    if counted:
        leaves["mask"] = sizes[counted]

    def embedding_inputs(values: Sequence[Value]) -> dict[str, Any]:
        by_leaf = dict(zip(leaves, values, strict=True))
        given: dict[str, Any] = {
            t: LookupTable(t, {by: by_leaf[table, by] for table, by in picks if table == t}) for t, _ in picks
        }
        for index in filter(None, (ids, name[1], counted, positions)):
            given[index] = IndexTensor(index, sizes[index], by_leaf["mask"] if index == counted else None)
        return given | {vector: by_leaf[vector] for vector in (name[5], name[6])}

    return tuple(leaves.values()), embedding_inputs


def _proof_key(op: ForeignOp, writer: ExpansionWriter, sizes: Mapping[str, Shape]) -> object:
    """Build a key from everything that a proof depends on. Names of tensors and symbols do not change the key."""
    node = writer.node
    tensors: dict[str, int] = {}
    symbols: dict[str, int] = {}

    def input_indices(names: Sequence[str]) -> tuple[int, ...]:
        return tuple(tensors.setdefault(name, len(tensors)) if name else -1 for name in names)

    def size_key(size: Size) -> object:
        terms = [(c, tuple(symbols.setdefault(s, len(symbols)) for s in monomial)) for monomial, c in size.terms]
        return tuple(sorted(terms, key=repr))

    def node_key(n: onnx.NodeProto) -> object:
        return (
            n.op_type,
            input_indices(n.input),
            input_indices(n.output),
            tuple(sorted(a.SerializeToString(deterministic=True) for a in n.attribute)),
        )

    own = (op.row.owner, writer.opset, writer.written_opset, node_key(node), *(node_key(n) for n in writer.nodes))
    stored = tuple((input_indices([t.name]), t.data_type, tuple(t.dims), t.raw_data) for t in writer.initializers)
    return (*own, stored, tuple((input_indices([name]), tuple(map(size_key, shape))) for name, shape in sizes.items()))
