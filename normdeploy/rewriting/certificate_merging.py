"""Merge chains of rewrites for a certificate: one rewrite leads from nodes of the source to nodes of the written file.

A rewrite may replace nodes that an earlier rewrite wrote. The certificate has both as one rewrite. So a checker needs
only the source and the written file, and no graph between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import onnx

from .certificate_modes import choose_mode, exact_epsilons
from .expression_nodes import ExpressionRecord
from .rewrite_recording import sort_nodes
from .rewrite_records import RecordedConstant, RecordedNode, RecordedSide, RewriteRecord


@dataclass(frozen=True)
class MergedRewrite:
    """One or more rewrites as one.

    Attributes:
        record: both sides. Without sides, the mode is "none".
        mode: "exact", "affine", "numeric" or "none".
        reason: why the mode is "numeric" or "none".
        epsilons: exact epsilons by the first outputs of nodes after the rewrite.
        tensors: tensors at which the transforms started, in the order of the rewrites.
        written: names of all tensors that the rewrites computed.
    """

    record: RewriteRecord
    mode: str
    reason: str
    epsilons: Mapping[str, Fraction] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()


def merge_chains(records: Sequence[RewriteRecord], final: Collection[str]) -> list[MergedRewrite]:
    """Merge each rewrite with the earlier rewrites whose nodes it replaced.

    Args:
        final: names of the tensors of the written file.

    Returns:
        the rewrites, in the order of the last rewrite of each chain.
    """
    merged: list[MergedRewrite] = []
    for record in records:
        rewrite = _single_rewrite(record)
        for earlier in [m for m in reversed(merged) if _replaces(rewrite, m)]:
            merged.remove(earlier)
            rewrite = _merge(earlier, rewrite, final)
        merged.append(rewrite)
    return merged


def _single_rewrite(record: RewriteRecord) -> MergedRewrite:
    mode, reason = choose_mode(record)
    epsilons = exact_epsilons(record) if mode == "affine" else {}
    if epsilons is None:
        mode, reason, epsilons = "numeric", "its exact epsilon is not a simple fraction of an epsilon before", {}
    written = {*record.writes, *(_outputs(record.after.nodes) if record.after is not None else ())}
    return MergedRewrite(record, mode, reason, epsilons, (record.tensor,), frozenset(written - {""}))


def _replaces(later: MergedRewrite, earlier: MergedRewrite) -> bool:
    """Return True if the later rewrite replaced nodes, or read constants, that the earlier one wrote."""
    before, after = later.record.before, earlier.record.after
    if before is None or later.record.place != earlier.record.place:
        return False
    computed = {n for n, c in after.constants.items() if c.rounded is not None} if after is not None else set()
    return bool(_outputs(before.nodes) & earlier.written or before.constants.keys() & computed)


def _merge(first: MergedRewrite, second: MergedRewrite, final: Collection[str]) -> MergedRewrite:
    tensors, written = first.tensors + second.tensors, first.written | second.written
    none = replace(second.record, before=None, after=None, writes=tuple(sorted(written)))
    if "none" in (first.mode, second.mode):
        reason = first.reason if first.mode == "none" else second.reason
        return MergedRewrite(none, "none", reason, {}, tensors, written)
    record = _merge_records(first.record, second.record, final)
    if record is None:
        return MergedRewrite(none, "none", "no result of a chain of rewrites is in the file", {}, tensors, written)
    assert record.after is not None
    mode, reason = "exact", ""
    if first.mode != "exact" or second.mode != "exact":
        mode, reason = "numeric", f"a chain of rewrites of the modes {first.mode} and {second.mode}"
    kept = _outputs(record.after.nodes)
    epsilons = {name: e for name, e in {**first.epsilons, **second.epsilons}.items() if name in kept}
    return MergedRewrite(record, mode, reason, epsilons, tensors, written)


def _merge_records(first: RewriteRecord, second: RewriteRecord, final: Collection[str]) -> RewriteRecord | None:
    """Return the record from the nodes before ``first`` to the nodes after ``second``; None if it has no result."""
    assert first.before is not None
    assert first.after is not None
    assert second.before is not None
    assert second.after is not None
    known = _outputs(first.before.nodes) | _outputs(first.after.nodes)
    before = [*first.before.nodes, *(n for n in second.before.nodes if not _outputs([n]) & known)]
    newest = _outputs(second.after.nodes)
    after = [*(n for n in first.after.nodes if not _outputs([n]) & newest), *second.after.nodes]
    outputs = [name for name in first.before.outputs if name in newest or name in final]
    outputs += [name for name in second.before.outputs if name not in outputs]
    outputs = [name for name in outputs if name in _outputs(before) and name in _outputs(after)]
    if not outputs:
        return None
    sides = []
    for nodes, constants in (
        (_needed(before, outputs), {**second.before.constants, **first.before.constants}),
        (_needed(after, outputs), {**first.after.constants, **second.after.constants}),
    ):
        sides.append(_side(nodes, constants, outputs))
    inside = _outputs(before) | _outputs(after)
    leaves = {leaf.name: leaf for leaf in (*second.leaves, *first.leaves) if leaf.name not in inside}
    return replace(
        second,
        before=sides[0],
        after=sides[1],
        leaves=tuple(leaves.values()),
        expressions=_merge_expressions(first.expressions, second.expressions),
        converted=first.converted or second.converted,
        writes=(),
    )


def _side(
    nodes: Sequence[RecordedNode], constants: Mapping[str, RecordedConstant], outputs: Iterable[str]
) -> RecordedSide:
    read = {name for node in nodes for name in node.proto.input}
    return RecordedSide(sort_nodes(nodes), {n: c for n, c in constants.items() if n in read}, tuple(outputs))


def _needed(nodes: Sequence[RecordedNode], outputs: Iterable[str]) -> list[RecordedNode]:
    """Return the nodes on which the outputs depend."""
    writers = {o: n for n in nodes for o in n.proto.output if o}
    needed: dict[int, RecordedNode] = {}
    pending = list(outputs)
    while pending:
        node = writers.get(pending.pop())
        if node is not None and id(node) not in needed:
            needed[id(node)] = node
            pending.extend(node.proto.input)
    return [node for node in nodes if id(node) in needed]


def _outputs(nodes: Iterable[RecordedNode]) -> set[str]:
    return {name for node in nodes for name in node.proto.output if name}


def _merge_expressions(first: ExpressionRecord | None, second: ExpressionRecord | None) -> ExpressionRecord | None:
    """Compute the constants of ``second`` from those of ``first``, where it reads them."""
    if first is None or second is None:
        return second or first
    prefix = f"{len(first.nodes)}/"
    names = {name: first.results.get(name, prefix + name) for name in second.constants}
    nodes = list(first.nodes)
    for proto, opset in second.nodes:
        renamed = onnx.NodeProto()
        renamed.CopyFrom(proto)
        renamed.input[:] = [names.get(n, prefix + n) if n else "" for n in proto.input]
        renamed.output[:] = [prefix + n if n else "" for n in proto.output]
        nodes.append((renamed, opset))
    own = {prefix + name: value for name, value in second.constants.items() if name not in first.results}
    results = {name: names.get(tensor, prefix + tensor) for name, tensor in second.results.items()}
    return ExpressionRecord(nodes, {**first.constants, **own}, {**first.results, **results})
