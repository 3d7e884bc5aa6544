"""Change a file's opset before its norms are rewritten, with a record of each change for a certificate file.

Norm nodes that the wanted opset lacks are written in several standard nodes, each with a proof
(`normdeploy.contrib.standardization`). Other nodes are written as the wanted opset defines them: by
`normdeploy.graphs.opset_lowering` in an older opset, by `normdeploy.graphs.opset_conversion` in a newer one. The norms
are recognized afterwards, and get the best node that the wanted opset has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from ..contrib.foreign_findings import Expansion, ForeignNorms
from ..contrib.standardization import standardize_foreign_norms
from ..errors import GraphError
from ..graphs.dims import dim_size
from ..graphs.file_graph import NEWEST
from ..graphs.newer_ops import inline_newer_functions, inline_newer_ops
from ..graphs.opset_conversion import convert_to_opset
from ..graphs.opset_lowering import LoweredNode, lower_opset
from ..graphs.proto_queries import drop_unused_initializers
from ..graphs.region import RefusedError
from ..graphs.symbolic_sizes import UNKNOWN, Size
from ..norms.norm_table import STANDARD, OpOwner
from ..proof.certificate import certificate_of
from ..proof.equivalence import Equivalence
from ..proof.interpreter import ProofInterpreter
from ..proof.proof_errors import NotProved, ProofFailure
from ..proof.proto_evaluation import evaluate_protos
from ..proof.prover import ProofMemo, prove_identity, prove_once
from ..proof.value import Value
from ..storage.onnx_domains import default_domain_opset
from ..storage.shared_weights import tensor_array
from .certificate_modes import ALGEBRAIC
from .rewrite_ledger import RewriteOptions
from .rewrite_records import FORMS, RecordedConstant, RecordedLeaf, RecordedNode, RecordedSide, RewriteRecord

STAGE = "opset"
# Ops that have another form since this opset. A certificate states the opset of each of their nodes
# (docs/reference/certificate-format.md, "Opsets that change an op").
_REFORMED = frozenset({"Split", *(f"Reduce{kind}" for kind in ("Mean", "SumSquare", "L2", "Prod", "Max", "Min"))})


def change_opset(proto: onnx.ModelProto, wanted: RewriteOptions) -> tuple[onnx.ModelProto, ForeignNorms]:
    """Write the file in the wanted opset, and its foreign norms in standard nodes.

    Returns:
        a changed copy, or ``proto`` itself if nothing changes; and the findings of foreign norms.

    Raises:
        GraphError: a node has no equal form in the wanted opset.
    """
    opset = default_domain_opset(proto)
    target = wanted.opset or opset
    lowered: list[LoweredNode] = []
    try:
        if target < opset:
            opened = inline_newer_functions(proto, target)
            out, foreign = standardize_foreign_norms(opened, wanted.avoided, target)
            _require_written_norms(foreign, target)
            out, lowered = lower_opset(out, target)
            out = drop_unused_initializers(out)
        else:
            out, foreign = standardize_foreign_norms(proto, wanted.avoided)
            out = convert_to_opset(out, target) if target > opset else out
    except RefusedError as error:
        way = "lowered" if target < opset else "raised"
        raise GraphError(f"the file has opset {opset} and can't be {way} to {target}: {error}") from error
    if wanted.recorder is not None:
        records = [*_record_expansions(foreign), *_record_lowered(lowered, opset, target)]
        wanted.recorder.start_file(records, source_opset=opset, opset=min(opset, target))
    return out, foreign


def write_out_newer_ops(proto: onnx.ModelProto, wanted: RewriteOptions) -> onnx.ModelProto:
    """Write the norms, and the ops with a function body, that the wanted opset lacks in several nodes.

    The nodes are of the file's own opset. A runtime's kernel of such an op rounds otherwise than these nodes, so a
    lowered file is compared with the result.

    Returns:
        a copy, or ``proto`` itself if the file is not lowered.
    """
    opset = wanted.opset or NEWEST
    if opset >= default_domain_opset(proto):
        return proto
    newer = frozenset(op for op, row in STANDARD.items() if row.since > opset)
    return inline_newer_ops(standardize_foreign_norms(proto, wanted.avoided | newer)[0], opset)


def _require_written_norms(foreign: ForeignNorms, opset: int) -> None:
    """Raise RefusedError if a norm stays that the opset lacks."""
    for left in foreign.left:
        finding = left.finding
        row = STANDARD.get(finding.spelling)
        if row is not None and row.since > opset:
            raise RefusedError(
                f"node {finding.tensor!r} ({finding.spelling}) can't be written at opset {opset}: {finding.reason}; the"
                f" lowest opset for it is {row.since}"
            )


# ------------------------------------------------------------------ records for a certificate file


def _record_expansions(foreign: ForeignNorms) -> Iterator[RewriteRecord]:
    """Record the norms of ONNX's standard that were written in several nodes.

    The certificate format does not define the ops of other tools.
    """
    for node in foreign.expansions:
        expansion = node.expansion
        if expansion is not None and expansion.op.row.owner in (OpOwner.ONNX, OpOwner.ONNX_18):
            yield _record_expansion(expansion)


def _record_expansion(expansion: Expansion) -> RewriteRecord:
    node = expansion.node
    row = expansion.op.row
    outputs = tuple(o for o in node.output if o)
    given = _recorded_constants(expansion.constants)
    names: dict[str, str] = {}
    return RewriteRecord(
        expansion.place,
        STAGE,
        outputs[0],
        row.kind,
        f"{len(expansion.nodes)} standard nodes",
        leaves=tuple(
            RecordedLeaf(name, _dtype_name(expansion.types[name][0]), tuple(_name_size(d, names) for d in shape))
            for name, shape in expansion.proof.shapes.items()
            if name not in given
        ),
        before=RecordedSide((RecordedNode(node, expansion.opset),), given, outputs),
        after=RecordedSide(
            tuple(RecordedNode(n, expansion.written_opset) for n in expansion.nodes),
            given | _recorded_constants(expansion.initializers),
            outputs,
        ),
        certificate=expansion.proof.certificate,
        identity=expansion.proof.identity,
    )


def _name_size(size: Size, names: dict[str, str]) -> Size:
    """Give the unknown symbols of a size short names, so that equal unknown sizes are equal in a certificate."""
    named = Size.from_int(0)
    for symbols, factor in size.terms:
        product = Size.from_int(factor)
        for symbol in symbols:
            name = names.setdefault(symbol, f"size {len(names)}") if UNKNOWN in symbol else symbol
            product = product * Size.symbol(name)
        named = named + product
    return named


def _dtype_name(elem_type: int | None) -> str:
    return "" if not elem_type else onnx.helper.tensor_dtype_to_np_dtype(elem_type).name


def _recorded_constants(
    tensors: Sequence[onnx.TensorProto], computed: frozenset[str] = frozenset()
) -> dict[str, RecordedConstant]:
    return {t.name: RecordedConstant(tensor_array(t), computed=t.name in computed) for t in tensors}


def _record_lowered(lowered: Sequence[LoweredNode], newer: int, older: int) -> Iterator[RewriteRecord]:
    """Record the nodes whose op has another form in the older opset, because later records refer to them."""
    memo: ProofMemo = {}
    for change in lowered:
        if older < FORMS <= newer and change.before.op_type in _REFORMED:
            yield _record_reformed(change, memo, newer, older)


def _record_reformed(change: LoweredNode, memo: ProofMemo, newer: int, older: int) -> RewriteRecord:
    node = change.before
    outputs = tuple(o for o in node.output if o)
    constants = {t.name: t for t in change.constants}
    own = {o for n in change.after for o in n.output}
    plain = RewriteRecord(
        change.place,
        STAGE,
        outputs[0],
        node.op_type,
        f"{node.op_type} of opset {older}",
        reason="it has no proof: only sums, means and Splits of floats with known shapes and constant axes have one",
        writes=tuple(sorted(own - {""})),
    )
    x = node.input[0]
    elem_type, dims = change.types[x]
    if node.op_type not in ALGEBRAIC or x in constants or dims is None or elem_type not in _FLOATS:
        return plain
    shape = tuple(dim_size(d, f"{x}:{i}") for i, d in enumerate(dims))
    sides = [
        RecordedSide(tuple(RecordedNode(n, opset) for n in nodes), _constants_of(nodes, change), outputs)
        for nodes, opset in (((node,), newer), (change.after, older))
    ]
    if not all(name in constants for name in node.input[1:] if name):
        return plain
    before, after = (_evaluated(side, x, constants) for side in sides)
    equivalence = Equivalence((shape,), before, after, outputs[0])
    identity = prove_once(memo, _form_key(change, constants, shape), lambda: prove_identity(equivalence))
    if isinstance(identity, NotProved):
        if identity.why is ProofFailure.DIFFERS:
            raise GraphError(f"the {node.op_type} of opset {older} for {outputs[0]!r} differs; please report this")
        return plain
    names: dict[str, str] = {}
    return RewriteRecord(
        change.place,
        STAGE,
        outputs[0],
        node.op_type,
        plain.became,
        leaves=(RecordedLeaf(x, _dtype_name(elem_type), tuple(_name_size(d, names) for d in shape)),),
        before=sides[0],
        after=sides[1],
        certificate=certificate_of(identity),
        identity=identity,
    )


_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.DOUBLE,
)


def _constants_of(nodes: Sequence[onnx.NodeProto], change: LoweredNode) -> dict[str, RecordedConstant]:
    read = {name for node in nodes for name in node.input}
    return _recorded_constants([t for t in change.constants if t.name in read], change.computed)


def _evaluated(side: RecordedSide, x: str, constants: Mapping[str, onnx.TensorProto]) -> Any:
    """Return the function of ``x`` that a side computes, for the prover."""
    nodes = [n.proto for n in side.nodes]
    initializers = [constants[name] for name in side.constants]
    opset = side.nodes[0].opset

    def evaluate(m: ProofInterpreter, values: Sequence[Value]) -> list[Value]:
        made = evaluate_protos(m, nodes, initializers, {x: values[0]}, opset)
        return [made[o] for o in side.outputs]

    return evaluate


def _form_key(change: LoweredNode, constants: Mapping[str, onnx.TensorProto], shape: tuple[Size, ...]) -> object:
    """Build a key of everything that the proof of a reduction or Split depends on."""
    nodes = (change.before, *change.after)
    attributes = tuple(
        (n.op_type, tuple(sorted(a.SerializeToString(deterministic=True) for a in n.attribute)), len(n.output))
        for n in nodes
    )
    values = tuple(
        (i, j, tensor_array(constants[name]).tobytes())
        for i, n in enumerate(nodes)
        for j, name in enumerate(n.input)
        if name in constants
    )
    return attributes, values, shape
