"""Replace norms in other tools' ops by standard primitives: onnxruntime's contrib ops, TensorRT's old plugins,
GroupNormalization 18.

Such a foreign norm is replaced before recognition, in the file's opset. A certificate proves that the primitives equal
the definition of the tool that owns the op. After that, the norm is treated like a norm written by hand: it becomes the
best standard node, again with a certificate. If no such node is possible, the primitives are still correct standard
ONNX. A node of uncertain meaning is kept and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx

from ..findings.records import Finding
from ..graphs.local_functions import closed_functions, open_functions
from ..graphs.proto_queries import all_names, constant_tensors, module_path
from ..graphs.region import RefusedError
from ..graphs.subgraphs import Subgraph, body_subgraphs
from ..norms.norm_table import STANDARD
from ..proof.certificate import NOT_KNOWN
from ..proof.proto_evaluation import attributes_of
from ..proof.prover import ProofMemo
from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import copy_field, nodes_with_opsets
from .contrib_ops import foreign_op_of
from .expansion_proof import MALFORMED, prove_expansion
from .expansion_types import stated_value_infos, tensor_types
from .expansion_writer import OLDEST, ExpansionWriter, ForeignOp, Types
from .foreign_findings import Expansion, ForeignNode, ForeignNorms


@dataclass
class _ForeignExpander:
    """Convert the foreign norms of one graph to standard nodes.

    Attributes:
        taken: tensor names in use.
        functions: domain and name of the file's functions.
        known: names of tensors whose type the file states.
        constants: constants of the graph by name.
        read: findings so far.
        avoided: standard norm ops that become several nodes too.
        written_opset: opset of the written nodes. Standard norm ops that it lacks become several nodes too.
    """

    opset: int
    types: Types
    taken: set[str]
    functions: frozenset[tuple[str, str]]
    known: set[str]
    constants: Mapping[str, onnx.TensorProto]
    read: ForeignNorms
    avoided: frozenset[str]
    written_opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    value_info: list[onnx.ValueInfoProto] = field(default_factory=list)
    memo: ProofMemo = field(default_factory=dict)

    def take_node(self, node: onnx.NodeProto) -> None:
        """Append the node, or its expansion if it is a foreign norm, and record the finding."""
        # The file defines the node by a model-local function.
        own = (node.domain, node.op_type) in self.functions
        op = None if own else foreign_op_of(node, self.opset, self.avoided | self._lacking_ops(node))
        if op is None:
            if _is_unknown_norm(node) and not own:
                self._leave_node(
                    node, _make_finding(node, "unknown", "refused", f"{_op_text(node)} has no known definition")
                )
            else:
                self.nodes.append(node)
            return
        writer = ExpansionWriter(node, self.opset, self.types, self.taken, self.written_opset)
        try:
            _require_expandable(op, node, self.opset)
            op.expand(writer, attributes_of(node))
            strange = set(node.output) - {"", *(o for n in writer.nodes for o in n.output)}
            if strange:
                raise RefusedError(f"it has no output {min(strange)!r}")
            proof = prove_expansion(self.memo, op, writer, self.types)
        except RefusedError as e:
            self._leave_node(node, _make_finding(node, op.row.kind, "refused", f"{_op_text(node)}: {e}"))
            return
        except MALFORMED as e:
            self._leave_node(
                node,
                _make_finding(node, op.row.kind, "refused", f"{_op_text(node)} can't be read: {type(e).__name__}: {e}"),
            )
            return
        certificate = proof.certificate
        if not certificate:
            known = certificate.why not in NOT_KNOWN
            if known:
                why = f"the certificate of its standard form failed: {certificate.note}"
            else:
                why = f"it can't be proved: {certificate.note}"
            finding = _make_finding(node, op.row.kind, "undone" if known else "refused", f"{_op_text(node)}: {why}")
            self._leave_node(node, replace(finding, certificate=certificate))
            return
        for made in writer.nodes:
            made.metadata_props.extend(node.metadata_props)
        self.nodes += writer.nodes
        self.initializers += writer.initializers
        self.value_info += stated_value_infos(writer, self.types, self.known)
        reason = f"no norm was recognized in it; it is now {len(writer.nodes)} standard nodes"
        finding = replace(
            _make_finding(node, op.row.kind, "refused", reason),
            certificate=certificate,
            proved=("identity",),
            notes=writer.notes,
        )
        self.read.expansions.append(
            ForeignNode(
                finding,
                frozenset(node.input),
                frozenset(o for n in writer.nodes for o in n.output),
                Expansion(
                    op,
                    node,
                    self.opset,
                    self.written_opset,
                    writer.nodes,
                    writer.initializers,
                    [self.constants[i] for i in dict.fromkeys(node.input) if i in self.constants],
                    proof,
                    self.types,
                ),
            )
        )

    def _lacking_ops(self, node: onnx.NodeProto) -> set[str]:
        """Return a node's op if it is a standard norm that the written opset does not have, or not for its type."""
        row = STANDARD.get(node.op_type) if is_standard(node) and node.input else None
        if row is None:
            return set()
        is_bfloat16 = self.types[node.input[0]][0] == onnx.TensorProto.BFLOAT16
        is_lacking = row.first_opset("bfloat16" if is_bfloat16 else "") > self.written_opset
        return {node.op_type} if is_lacking and self.written_opset < self.opset else set()

    def _leave_node(self, node: onnx.NodeProto, finding: Finding) -> None:
        self.nodes.append(node)
        self.read.left.append(ForeignNode(finding, frozenset(node.input)))


def standardize_foreign_norms(
    proto: onnx.ModelProto, avoided: frozenset[str] = frozenset(), written_opset: int | None = None
) -> tuple[onnx.ModelProto, ForeignNorms]:
    """Write the foreign norms of ``proto`` as standard nodes, including those in bodies and functions.

    Args:
        avoided: standard norm ops that become several nodes too, because the target does not run them.
        written_opset: opset of the written nodes, for a file that `normdeploy.graphs.opset_lowering` lowers to it
            afterwards. Standard norm ops that it lacks become several nodes too. None for the file's opset.

    Returns:
        a copy, or ``proto`` itself if it has no foreign norms; and the findings.
    """
    read = ForeignNorms()
    if written_opset is None and not any(_looks_foreign(n, opset, avoided) for n, opset in nodes_with_opsets(proto)):
        return proto, read
    wanted = _WantedForms(avoided, written_opset)
    out = _standardize_graph(proto, set(), read, wanted)
    for function in open_functions(out):
        _standardize_subgraph(function, set(), read, wanted)
    for function, reason in closed_functions(out):
        _leave_function(function, reason, read)
    if not read.expansions:
        return proto, read
    used = {n.domain for n, _ in nodes_with_opsets(out)}
    for holder in (out, *out.functions):
        kept = [o for o in holder.opset_import if o.domain.startswith("ai.onnx") or o.domain in ("", *used)]
        del holder.opset_import[:]
        holder.opset_import.extend(kept)
    return out, read


@dataclass(frozen=True)
class _WantedForms:
    """Arguments of `standardize_foreign_norms`."""

    avoided: frozenset[str]
    written_opset: int | None


def _standardize_graph(
    proto: onnx.ModelProto, around: set[str], read: ForeignNorms, wanted: _WantedForms
) -> onnx.ModelProto:
    """Copy ``proto``, and write the foreign norms of its graph and bodies as standard nodes."""
    opset = default_domain_opset(proto)
    types = tensor_types(proto, opset)
    taken = {*around, *all_names(proto.graph)}
    functions_of = frozenset((f.domain, f.name) for f in proto.functions)
    known = {v.name for v in (*proto.graph.value_info, *proto.graph.output)}
    written = opset if wanted.written_opset is None else wanted.written_opset
    constants = constant_tensors(proto.graph)
    work = _ForeignExpander(opset, types, taken, functions_of, known, constants, read, wanted.avoided, written)
    for node in proto.graph.node:
        work.take_node(node)
    out = onnx.ModelProto()
    for entry, value in proto.ListFields():
        if entry.name != "graph":
            copy_field(out, entry, value)
    # Fields are copied one by one: a message of more than 2 GB can't be copied as a whole.
    for entry, value in proto.graph.ListFields():
        if entry.name != "node":
            copy_field(out.graph, entry, value)
    out.graph.node.extend(work.nodes)
    out.graph.initializer.extend(work.initializers)
    out.graph.value_info.extend(work.value_info)
    for body in body_subgraphs(out):
        _standardize_subgraph(body, taken, read, wanted)
    return out


def _standardize_subgraph(nested: Subgraph, around: set[str], read: ForeignNorms, wanted: _WantedForms) -> None:
    """Standardize a body or function, and add its findings with their location."""
    inside = ForeignNorms()
    out = _standardize_graph(nested.model, around, inside, wanted)
    if inside.expansions:
        nested.put_back(out)
    for e in inside.expansions:
        assert e.expansion is not None
        place = "; ".join(filter(None, (nested.place, e.expansion.place)))
        located = replace(e.expansion, place=place)
        read.expansions.append(replace(e, finding=_with_location(e.finding, nested), expansion=located))
    read.left += [replace(f, finding=_with_location(f.finding, nested)) for f in inside.left]


def _leave_function(function: Subgraph, reason: str, read: ForeignNorms) -> None:
    """Report the foreign norms in a function that can't be opened."""
    own = {(f.domain, f.name) for f in function.model.functions}
    for node, opset in nodes_with_opsets(
        onnx.ModelProto(graph=function.model.graph, opset_import=function.model.opset_import)
    ):
        if _looks_foreign(node, opset) and (node.domain, node.op_type) not in own:
            op = foreign_op_of(node, opset)
            message = f"{_op_text(node)}: the function that contains it can't be inlined: {reason}"
            finding = _make_finding(node, op.row.kind if op is not None else "unknown", "refused", message)
            read.left.append(ForeignNode(_with_location(finding, function), frozenset(node.input)))


def _with_location(finding: Finding, nested: Subgraph) -> Finding:
    return replace(finding, place=f"{nested.place}, {finding.place}" if finding.place else nested.place)


def _require_expandable(op: ForeignOp, node: onnx.NodeProto, opset: int) -> None:
    """Raise RefusedError if the opset, an attribute or the inputs don't allow an expansion."""
    if opset < OLDEST:
        raise RefusedError(f"Add and Mul do not broadcast at opset {opset}; they do from opset {OLDEST}")
    unknown = sorted({a.name for a in node.attribute} - {*op.row.attributes} - op.ignored)
    if unknown:
        raise RefusedError(f"its attribute {unknown[0]!r} has an unknown meaning")
    if not any(node.output):
        raise RefusedError("its outputs are not used")
    fewest = op.row.min_inputs
    most = len(op.row.inputs)
    if not fewest <= len(node.input) <= most:
        raise RefusedError(
            f"it has {len(node.input)} inputs; expected {fewest}{f' to {most}' if most > fewest else ''}"
        )
    missing = [i for i, name in enumerate(node.input[:fewest]) if not name and i not in op.row.skippable_inputs]
    if missing:
        raise RefusedError(f"its input {missing[0]} is missing")


def _make_finding(node: onnx.NodeProto, kind: str, status: str, reason: str) -> Finding:
    tensor = next((o for o in node.output if o), "")
    made = tuple(o for o in node.output if o)
    return Finding(kind, status, tensor, module_path(node), spelling=_op_text(node), reason=reason, tensors=made)  # type: ignore[arg-type]


def _op_text(node: onnx.NodeProto) -> str:
    if is_standard(node):
        return node.op_type
    return f"{node.op_type} ({node.domain})"


def _looks_foreign(node: onnx.NodeProto, opset: int, avoided: frozenset[str] = frozenset()) -> bool:
    return foreign_op_of(node, opset, avoided) is not None or _is_unknown_norm(node)


def _is_unknown_norm(node: onnx.NodeProto) -> bool:
    """Return True for a node whose op has "norm" in its name and is not defined by a standard."""
    if "norm" not in node.op_type.lower() or node.domain.startswith("ai.onnx."):
        return False
    return not is_standard(node) or not onnx.defs.has(node.op_type, domain="")
