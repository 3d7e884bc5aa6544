"""Join a norm node with the QuantizeLinear after it into one op of this project (``--fuse portable``).

Rounding is not algebraic, so nothing is proved about it here. Instead, the op's body is compared with the norm node and
the QuantizeLinear before anything is written: nodes, attributes and inputs must be equal. The norm node itself was
proved before. So a runtime that runs the op by its body rounds exactly as it rounded the original nodes.

An RMSNormalization (opset 23 and newer) is first rewritten as RMSNorm of this project, with a certificate.

The op is written if QuantizeLinear has one constant scale above 0 and the zero point 0, quantizes to int8 or
float8e4m3fn, and is the only reader of the norm. Otherwise the norm's finding gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding, combine_certificates
from ..forms.norm_writer import format_epsilon
from ..forms.portable_norms import RMS
from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN, oldest_opset
from ..graphs.region import Refusal, RefusedError
from ..norms.function_bodies import describe_missing
from ..norms.norm_table import OURS, NormOp
from ..storage.onnx_domains import is_standard
from .certification import Failure, pair_of
from .proposals import NodeReplacement, Proposal, Remark, RewriteTarget
from .rewrite_ledger import LedgerEntry
from .row_quantization import RowQuantization, match_row_quantization
from .structural_equality import describe_difference, full_attributes

ROWS = {row.quantizes: row for row in OURS.values() if row.quantizes and not row.is_quantized_by_row}
_BY_ROW = {row.quantizes: row for row in OURS.values() if row.is_quantized_by_row}
# Standard ops that are rewritten as one of normdeploy's own ops before they are joined
_WRITTEN = {"RMSNormalization": f"{DOMAIN}.RMSNorm"}
_KINDS = ("int8", "float8_e4m3fn")
QUANTIZE = "QuantizeLinear"
# Name of the comparison with the op's body, as certificates show it
SAME = "the same nodes"


def propose_quantize_fusion(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | Remark | None:
    """Propose to join ``node``, a QuantizeLinear or a Cast, with the norm before it. This changes the norm's finding.

    Returns:
        the proposal; a remark with the reason if it is not possible; None if no norm precedes ``node``.
    """
    if node.op not in ("QuantizeLinear", "Cast") or not is_standard(node):
        return None
    tail = match_row_quantization(graph, node)
    if tail is not None:
        y = tail.y
    elif node.op == "QuantizeLinear":
        y = node.inputs[0]
    else:
        y = None
    if y is not None:
        norm = graph.producer(y)
    else:
        norm = None
    rows = ROWS if tail is None else _BY_ROW
    row = rows.get(_WRITTEN.get(_row_name(norm), _row_name(norm))) if norm is not None else None
    told = target.entry_of(y.name) if y is not None else None
    if norm is None or row is None or norm.outputs[0] is not y or told is None:
        return None
    try:
        _require_single_reader(graph, row, norm, () if tail is None else tail.readers)
        if _row_name(norm) in _WRITTEN:
            spelled = _as_own_rms_norm(graph, norm)
        else:
            spelled = norm
        made = _fused_node(graph, row, spelled, node, tail)
    except RefusedError as kept:
        return _kept_remark(told, str(kept))
    pairs = () if spelled is norm else (pair_of(graph, y, [norm.inputs[0]], spelled.outputs[0]),)
    return Proposal(
        told.finding,
        pairs,
        (_quantized_replacement(row, norm, node, made, tail),),
        unproved=lambda failure: _kept_remark(told, _unproved_reason(failure)),
        opset=oldest_opset(row.op),
        revised_entries=(told,),
        revise=lambda finding, certificate: _fused_finding(graph, finding, norm, made, tail, certificate, target),
    )


def _kept_remark(told: LedgerEntry, reason: str) -> Remark:
    note = f"the QuantizeLinear after it stays a separate node: {reason}"
    return Remark([told], lambda finding: replace(finding, notes=(*finding.notes, note)))


def _unproved_reason(failure: Failure) -> str:
    if isinstance(failure, Refusal):
        return f"its norm can't be proved to be an RMSNorm: {failure.reason}"
    return f"its norm is not proved to be an RMSNorm: {failure.note}"


def _as_own_rms_norm(graph: Graph, norm: gs.Node) -> gs.Node:
    """Convert an RMSNormalization to RMSNorm of this project, outside the graph.

    Raises:
        RefusedError: that is not possible.
    """
    x = norm.inputs[0]
    scale = norm.inputs[1]
    attrs = full_attributes(norm.op, graph.attrs(norm), max(graph.opset, RMS))
    shape = graph.shape(x)
    if shape is None or graph.dtype(x) != graph.dtype(scale):
        raise RefusedError("the rank of its norm's input is unknown, or the types of input and scale differ")
    axes = list(range(attrs["axis"] if attrs["axis"] < 0 else attrs["axis"] - len(shape), 0))
    given = {"axes": axes, "epsilon": attrs["epsilon"], "stash_type": attrs["stash_type"]}
    return graph.make_node("RMSNorm", [x, scale], norm.outputs[0], given, DOMAIN)


def _row_name(node: gs.Node) -> str:
    """Return the name of an op in the table of norm ops, such as ``LayerNormalization`` or ``normdeploy.RMSNorm``."""
    if is_standard(node):
        return str(node.op)
    return f"{node.domain}.{node.op}"


def _require_single_reader(graph: Graph, row: NormOp, norm: gs.Node, own: Sequence[gs.Node]) -> None:
    """Check that only QuantizeLinear, or the nodes ``own``, read the norm, and that its statistics are unread.

    Raises:
        RefusedError: another node reads the result or the statistics.
    """
    y = norm.outputs[0]
    if graph.is_output(y) or len(graph.consumers(y)) != max(1, len(own)):
        readers = len(graph.consumers(y)) - max(1, len(own))
        if graph.is_output(y):
            others = "is also a graph output"
        else:
            others = f"is also read by {readers} other node{'s' * (readers > 1)}"
        raise RefusedError(f"the norm's unquantized result {others}")
    if any(graph.is_output(t) or graph.consumers(t) for t in norm.outputs[1:] if not row.outputs[1:]):
        raise RefusedError("the norm's mean or inverse deviation is also used")


def _fused_node(graph: Graph, row: NormOp, norm: gs.Node, node: gs.Node, tail: RowQuantization | None) -> gs.Node:
    """Build the node that replaces the norm and the nodes that quantize it, in total or per row.

    Raises:
        RefusedError: the nodes differ from the op's body.
    """
    ours = OURS.get(norm.op) if norm.domain == DOMAIN else None
    if ours is not None and describe_missing(ours, [t.name for t in norm.inputs], norm.attrs):
        raise RefusedError(f"its {norm.op} does not match normdeploy's op of that name")
    # The nodes are compared by the definitions of the opset that the written nodes need.
    opset = max(graph.opset, row.since)
    if ours is None:
        attrs = full_attributes(norm.op, graph.attrs(norm), opset)
    else:
        attrs = dict(graph.attrs(norm))
    inputs = _norm_parameters(graph, row, norm)
    y = norm.outputs[0]
    if tail is None:
        scale, zero = _scale_and_zero_point(graph, node)
        inputs += [scale, zero]
        behind = [graph.make_node(node.op, [y, scale, zero], node.outputs[0], graph.attrs(node))]
    else:
        _require_last_axis(graph, norm, attrs)
        if tail.cast and not tail.least:
            raise RefusedError(
                "a row of zeros gives 0 / 0, which a Cast to int8 may turn into any value; bound its scale from below"
            )
        inputs += [tail.zero_point(graph)]
        behind = tail.build_nodes(graph, y, inputs[-1])
        attrs |= {"least": tail.least, "largest": tail.largest}
    given = {name: attrs[name] for name in row.attributes}
    made = graph.make_node(row.op, inputs, node.outputs[0], given, DOMAIN, len(row.outputs))
    for name, t in zip(row.outputs, made.outputs, strict=True):
        types = {"Y": graph.dtype(inputs[-1]), "y_scale": np.dtype(np.float32)}
        t.dtype = types.get(name, graph.dtype(norm.inputs[0]))
    if differs := describe_difference(graph, row, made, (norm, *behind)):
        raise RefusedError(differs)
    return made


def _require_last_axis(graph: Graph, norm: gs.Node, attrs: Mapping[str, Any]) -> None:
    """Check that the norm is over the last axis.

    Raises:
        RefusedError: it is over other axes.
    """
    rank = len(graph.shape(norm.inputs[0]) or ())
    axes = attrs.get("axes") or [attrs.get("axis", -1)]
    if not rank or [a % rank for a in axes] != [rank - 1]:
        raise RefusedError("its norm does not normalize exactly the last axis")


def _norm_parameters(graph: Graph, row: NormOp, norm: gs.Node) -> list[gs.Tensor]:
    """Return the norm's inputs.

    A LayerNormalization without a bias gets one of zeros, which changes no quantized number (−0 + 0 is 0).

    Raises:
        RefusedError: the number of inputs does not fit.
    """
    wanted = [name for name in row.inputs if name not in ("y_scale", "y_zero_point")]
    inputs = [t for t in norm.inputs if not t.is_empty()]
    if len(inputs) == len(wanted) - 1 and wanted[-1] == "bias":
        shape = graph.shape(inputs[-1])
        dtype = graph.dtype(inputs[-1])
        if shape is None or dtype is None or not all(isinstance(n, int) for n in shape):
            raise RefusedError("its norm has no bias, and the shape of its scale is unknown")
        zeros = np.zeros([n for n in shape if isinstance(n, int)])
        inputs.append(graph.add_constant(f"{norm.outputs[0].name}_bias", zeros, dtype))
    if len(inputs) != len(wanted):
        raise RefusedError(f"its norm has {len(inputs)} inputs, but {row.op} needs {len(wanted)}")
    return inputs


def _scale_and_zero_point(graph: Graph, node: gs.Node) -> tuple[gs.Tensor, gs.Tensor]:
    """Return QuantizeLinear's scale and zero point as initializers.

    A Constant node may come after the norm, and a zero point may be given by a dtype only.

    Raises:
        RefusedError: the scale is not one positive constant, or the zero point is not 0 in a supported type.
    """
    scale = node.inputs[1]
    attrs = graph.attrs(node)
    if graph.is_constant(scale):
        value = graph.known_value(scale)
    else:
        value = None
    if value is None or value.size != 1:
        raise RefusedError("its scale is not constant" if value is None else f"it has {value.size} scales")
    if not 0 < float(value.reshape(())) < float("inf"):
        raise RefusedError(f"its scale, {float(value.reshape(())):g}, is not positive and finite")
    if len(node.inputs) > 2 and not node.inputs[2].is_empty():
        zero = node.inputs[2]
    else:
        zero = None
    number = attrs.get("output_dtype", 0)
    if zero is None:
        if number:
            kind = onnx.helper.tensor_dtype_to_np_dtype(number)
        else:
            kind = np.dtype(np.uint8)
    else:
        kind = graph.dtype(zero)
        if graph.is_constant(zero):
            held = graph.known_value(zero)
        else:
            held = None
        if held is None or held.size != 1 or held.any():
            raise RefusedError("its zero point is not 0" if held is not None else "its zero point is not constant")
    if kind is None or kind.name not in _KINDS:
        raise RefusedError(f"it quantizes to {'an unknown type' if kind is None else kind.name}, not to int8 or FP8")
    if not isinstance(scale, gs.Constant):
        scale = graph.add_constant(f"{node.outputs[0].name}_scale", value, graph.dtype(scale))
    if not isinstance(zero, gs.Constant):
        zero = graph.add_constant(f"{node.outputs[0].name}_zero_point", np.zeros(()), kind)
    return scale, zero


# ------------------------------------------------------------------ what is written


def _quantized_replacement(
    row: NormOp, norm: gs.Node, node: gs.Node, made: gs.Node, tail: RowQuantization | None
) -> NodeReplacement:
    old = {"Y": node.outputs[0], "y_scale": node.outputs[0] if tail is None else tail.scale, "sum": norm.outputs[-1]}
    # Nodes before the quantization may read the op's last output (the sum), so the op is inserted in place of that
    # output.
    *rest, (output, last) = enumerate(row.outputs)
    also = {place: old[name] for place, name in rest}
    return NodeReplacement(old[last], (made,), output=output, origin=norm, also=also)


def _fused_finding(
    graph: Graph,
    told: Finding,
    norm: gs.Node,
    made: gs.Node,
    tail: RowQuantization | None,
    certificate: Certificate | None,
    target: RewriteTarget,
) -> Finding:
    """Return the finding of a norm and its quantization as one node."""
    attrs = {name: value for name, value in graph.attrs(made).items() if name != "stash_type"}
    shown = ", ".join(f"{name}={format_epsilon(v) if isinstance(v, float) else v}" for name, v in attrs.items())
    if told.status == "fused":
        spelling = told.spelling
    else:
        spelling = norm.op
    proved = (*told.proved, *(("identity",) if certificate else ()), SAME)
    return replace(
        told,
        status="fused",
        tensor=made.outputs[0].name,
        spelling=f"{spelling} {QUANTIZE if tail is None else tail.spelling}",
        became=f"{DOMAIN}.{made.op}({shown})",
        reason="",
        certificate=combine_certificates(told.certificate, certificate),
        proved=tuple(dict.fromkeys(proved)),
        nodes_left=1,
        written=tuple(t.name for t in made.outputs) if target.wanted.census else (),
    )
