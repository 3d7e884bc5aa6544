"""Norms that other tools left in ops of their own, read back: onnxruntime's contrib ops, TensorRT's old plugins,
GroupNormalization 18.

Before anything is recognised each such node is replaced by standard primitives of the file's own opset, with a
certificate against its owner's definition. From there on it is a norm written by hand, like any other: it becomes the
best standard node, with a certificate, and what can't is correct standard ONNX all the same. A node whose meaning is
not certain is left alone and reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx

from ..domains import default_opset, is_standard
from ..graphs.nested import Nested, bodies
from ..graphs.nested_functions import functions, unopened
from ..graphs.protos import module, names
from ..graphs.region import Refused
from ..proof.certificate import NOT_KNOWN
from ..proof.nodes import attributes
from ..records import Finding
from ..storage.protos import copy_field, nodes_of
from .account import Foreign, Read
from .ops import op_of
from .proof import MALFORMED, Memo, proved
from .shapes import stated, types_of
from .write import OLDEST, Op, Types, Writer


@dataclass
class _Expander:
    """One graph on its way to standard nodes."""

    opset: int
    types: Types
    taken: set[str]
    functions: frozenset[tuple[str, str]]
    known: set[str]  # tensors whose type the file states
    read: Read
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    value_info: list[onnx.ValueInfoProto] = field(default_factory=list)
    memo: Memo = field(default_factory=dict)

    def take(self, node: onnx.NodeProto) -> None:
        own = (node.domain, node.op_type) in self.functions  # the file says itself what it means
        op = None if own else op_of(node, self.opset)
        if op is None:
            if _unknown_norm(node) and not own:
                self._leave(node, _finding(node, "unknown", "refused", f"no definition of {_op_text(node)} is known"))
            else:
                self.nodes.append(node)
            return
        writer = Writer(node, self.opset, self.types, self.taken)
        try:
            _check(op, node, self.opset)
            op.write(writer, attributes(node))
            strange = set(node.output) - {"", *(o for n in writer.nodes for o in n.output)}
            if strange:
                raise Refused(f"it has no output {min(strange)!r}")
            certificate = proved(self.memo, op, writer, self.types)
        except Refused as e:
            self._leave(node, _finding(node, op.kind, "refused", f"{_op_text(node)}: {e}"))
            return
        except MALFORMED as e:
            self._leave(
                node, _finding(node, op.kind, "refused", f"{_op_text(node)} can't be read: {type(e).__name__}: {e}")
            )
            return
        if not certificate:
            known = certificate.why not in NOT_KNOWN
            why = (
                f"the certificate of its standard form failed: {certificate.note}"
                if known
                else f"it can't be proved: {certificate.note}"
            )
            finding = _finding(node, op.kind, "undone" if known else "refused", f"{_op_text(node)}: {why}")
            self._leave(node, replace(finding, certificate=certificate))
            return
        for made in writer.nodes:
            made.metadata_props.extend(node.metadata_props)
        self.nodes += writer.nodes
        self.initializers += writer.initializers
        self.value_info += stated(writer, self.types, self.known)
        reason = f"no norm was recognised in it; it is {len(writer.nodes)} standard nodes now"
        finding = replace(
            _finding(node, op.kind, "refused", reason),
            certificate=certificate,
            proved=("identity",),
            notes=writer.notes,
        )
        self.read.expansions.append(
            Foreign(finding, frozenset(node.input), frozenset(o for n in writer.nodes for o in n.output))
        )

    def _leave(self, node: onnx.NodeProto, finding: Finding) -> None:
        self.nodes.append(node)
        self.read.left.append(Foreign(finding, frozenset(node.input)))


def standardized(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Read]:
    """``proto`` with its foreign norms as standard nodes, those in bodies and functions too: itself where there are
    none, else a copy."""
    read = Read()
    if not any(_looks_foreign(n, opset) for n, opset in nodes_of(proto)):
        return proto, read
    out = _graph(proto, set(), read)
    for function in functions(out):
        _inside(function, set(), read)
    for function, reason in unopened(out):
        _leave_all(function, reason, read)
    if not read.expansions:
        return proto, read
    used = {n.domain for n, _ in nodes_of(out)}
    for holder in (out, *out.functions):
        kept = [o for o in holder.opset_import if o.domain.startswith("ai.onnx") or o.domain in ("", *used)]
        del holder.opset_import[:]
        holder.opset_import.extend(kept)
    return out, read


def _graph(proto: onnx.ModelProto, around: set[str], read: Read) -> onnx.ModelProto:
    """A copy of ``proto``, the foreign norms of its graph and of the bodies in it written as standard nodes."""
    opset = default_opset(proto)
    types = types_of(proto, opset)
    taken = {*around, *names(proto.graph)}
    functions_of = frozenset((f.domain, f.name) for f in proto.functions)
    known = {v.name for v in (*proto.graph.value_info, *proto.graph.output)}
    work = _Expander(opset, types, taken, functions_of, known, read)
    for node in proto.graph.node:
        work.take(node)
    out = onnx.ModelProto()
    for entry, value in proto.ListFields():
        if entry.name != "graph":
            copy_field(out, entry, value)
    for entry, value in proto.graph.ListFields():  # one by one: a message of more than 2 GB can't be copied as a whole
        if entry.name != "node":
            copy_field(out.graph, entry, value)
    out.graph.node.extend(work.nodes)
    out.graph.initializer.extend(work.initializers)
    out.graph.value_info.extend(work.value_info)
    for body in bodies(out):
        _inside(body, taken, read)
    return out


def _inside(nested: Nested, around: set[str], read: Read) -> None:
    inside = Read()
    out = _graph(nested.model, around, inside)
    if inside.expansions:
        nested.put_back(out)
    read.expansions += [replace(e, finding=_placed(e.finding, nested)) for e in inside.expansions]
    read.left += [replace(f, finding=_placed(f.finding, nested)) for f in inside.left]


def _leave_all(function: Nested, reason: str, read: Read) -> None:
    """Let what is foreign in a function that can't be opened be told."""
    own = {(f.domain, f.name) for f in function.model.functions}
    for node, opset in nodes_of(onnx.ModelProto(graph=function.model.graph, opset_import=function.model.opset_import)):
        if _looks_foreign(node, opset) and (node.domain, node.op_type) not in own:
            op = op_of(node, opset)
            message = f"{_op_text(node)}: the function that it is in can't be opened: {reason}"
            finding = _finding(node, op.kind if op is not None else "unknown", "refused", message)
            read.left.append(Foreign(_placed(finding, function), frozenset(node.input)))


def _placed(finding: Finding, nested: Nested) -> Finding:
    return replace(finding, place=f"{nested.place}, {finding.place}" if finding.place else nested.place)


def _check(op: Op, node: onnx.NodeProto, opset: int) -> None:
    if opset < OLDEST:
        raise Refused(f"Add and Mul do not broadcast at opset {opset} ({OLDEST} is the first in which they do)")
    unknown = sorted({a.name for a in node.attribute} - op.attributes)
    if unknown:
        raise Refused(f"its attribute {unknown[0]!r} is of unknown meaning")
    if not any(node.output):
        raise Refused("nobody reads it")
    fewest, most = op.inputs
    if not fewest <= len(node.input) <= most:
        raise Refused(
            f"it has {len(node.input)} inputs, and should have {fewest}{f' to {most}' if most > fewest else ''}"
        )
    missing = [i for i, name in enumerate(node.input[:fewest]) if not name and i not in op.optional]
    if missing:
        raise Refused(f"its input {missing[0]} is left out")


def _finding(node: onnx.NodeProto, kind: str, status: str, reason: str) -> Finding:
    tensor = next((o for o in node.output if o), "")
    made = tuple(o for o in node.output if o)
    return Finding(kind, status, tensor, module(node), spelling=_op_text(node), reason=reason, tensors=made)  # type: ignore[arg-type]


def _op_text(node: onnx.NodeProto) -> str:
    return node.op_type if is_standard(node) else f"{node.op_type} ({node.domain})"


def _looks_foreign(node: onnx.NodeProto, opset: int) -> bool:
    return op_of(node, opset) is not None or _unknown_norm(node)


def _unknown_norm(node: onnx.NodeProto) -> bool:
    """A node that is called a norm and that no standard defines."""
    if "norm" not in node.op_type.lower() or node.domain.startswith("ai.onnx."):
        return False
    return not is_standard(node) or not onnx.defs.has(node.op_type, domain="")
