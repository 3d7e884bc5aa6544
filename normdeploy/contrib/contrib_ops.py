"""Write foreign norm nodes as standard nodes, by their definitions (`normdeploy.norms`).

Foreign ops here are onnxruntime's contrib ops, and GroupNormalization of opsets before 21. The function that writes an
op gets the `ExpansionWriter` and the node's attributes. It raises RefusedError if the node can't be written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx

from ..graphs.region import RefusedError
from ..norms import onnx_norms
from ..norms.interpreter import EPSILON
from ..norms.norm_table import CONTRIB, STANDARD, OpOwner, StatisticsKind, rows_of_owner
from ..storage.nonstandard_norms import is_nonstandard_norm
from ..storage.onnx_domains import is_standard
from .expansion_writer import Attrs, ExpansionWriter, ForeignOp
from .tensorrt_plugins import PLUGINS


def foreign_op_of(node: onnx.NodeProto, opset: int, avoided: Collection[str] = ()) -> ForeignOp | None:
    """Find the foreign op of a node.

    Args:
        avoided: standard norm ops that are treated as foreign, because the target does not run them.

    Returns:
        the op, or None for other standard ops and unknown ops.
    """
    if is_standard(node):
        if node.op_type in avoided and node.op_type in _STANDARD_OPS and opset >= STANDARD[node.op_type].since:
            return _STANDARD_OPS[node.op_type]
        if is_nonstandard_norm(node.op_type, opset):
            return _STRAYS[node.op_type]
        return None
    if node.domain == CONTRIB:
        return ONNXRUNTIME_OPS.get(node.op_type)
    if node.domain.startswith(("com.microsoft", "com.ms.", "ai.onnx.")):
        return None
    return PLUGINS.get(node.op_type)


def _check_skip_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    w.learn_elem_type(w.input_name(0), w.input_name(1), w.input_name(2))


def _check_skip_rms_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if w.wants_output(1):
        raise RefusedError("its mean output is used, but it does not compute a mean")
    _check_skip_layer_norm(w, attrs)


def _check_embed_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if w.opset < 10:
        raise RefusedError(f"opset {w.opset} does not support Slice with inputs; opset 10 does")


def _check_skip_group_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if not attrs.get("channels_last", 1):
        raise RefusedError("it does not support channels_last = 0")
    _check_ort_groups(w, attrs)


def _check_ort_groups(w: ExpansionWriter, attrs: Attrs) -> None:
    if attrs.get("activation") not in (0, 1):
        raise RefusedError(f"its activation is {attrs.get('activation')}; expected 0 (none) or 1 (SiLU)")
    if "groups" not in attrs:
        raise RefusedError("its number of groups is missing")
    w.require_divisible_groups(w.input_name(0), -1 if attrs.get("channels_last", 1) else 1, attrs["groups"])


def _write_group_norm_18(w: ExpansionWriter, attrs: Attrs) -> None:
    """Write GroupNormalization 18 with a scale and bias per channel if the number of channels is static.

    Opset 21 and later have a node with this scale and bias.
    """
    x = w.input_name(0)
    groups = attrs["num_groups"]
    w.require_divisible_groups(x, 1, groups)
    for t in w.node.input[1:3]:
        length = w.vector_length(t)
        if length is not None and length != groups:
            raise RefusedError(f"{t!r} has {length} values; at opset {w.opset}, expected one per group: {groups}")
    channels = w.shape_of(x)[1]
    if not isinstance(channels, int):
        w.expand_definition(onnx_norms.group_norm, attrs)
        return
    scale, bias = (_repeat_values(w, t, channels // groups) for t in w.node.input[1:3])
    epsilon = attrs.get("epsilon", EPSILON)
    w.expand_definition(onnx_norms.group_norm_21, {"groups": groups, "epsilon": epsilon}, (x, scale, bias))


def _repeat_values(w: ExpansionWriter, t: str, times: int) -> str:
    """Repeat each value of (G,) ``times`` times to (G · times,)."""
    column = w("Expand", w.reshape(t, [-1, 1]), w.make_int64_vector([1, times], "times"))
    return w.reshape(column, [-1])


_CHECKS: dict[str, Callable[[ExpansionWriter, Attrs], None]] = {
    "SkipLayerNormalization": _check_skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _check_skip_rms_norm,
    "EmbedLayerNormalization": _check_embed_layer_norm,
    "GroupNorm": _check_ort_groups,
    "SkipGroupNorm": _check_skip_group_norm,
}
"""Of ops that are refused in some forms, or of which more is known than their definition says."""

ONNXRUNTIME_OPS = {op: ForeignOp(row, _CHECKS.get(op)) for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items()}
# Norm ops of the standard that can be written as several nodes, for a target that does not run them.
_STANDARD_OPS = {
    op: ForeignOp(row)
    for op, row in STANDARD.items()
    if row.definition is not None and row.statistics is StatisticsKind.INPUT
}
# Foreign ops in ONNX's own domain, by op type.
_STRAYS = {
    **PLUGINS,
    **{op: ONNXRUNTIME_OPS[op] for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "" in row.domains},
    **{op: ForeignOp(row, write=_write_group_norm_18) for op, row in rows_of_owner(OpOwner.ONNX_18).items()},
}
