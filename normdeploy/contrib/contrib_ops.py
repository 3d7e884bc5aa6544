"""Foreign norm nodes written as standard nodes, by their definitions (`normdeploy.norms.definitions`): onnxruntime's
contrib ops, and GroupNormalization as it was before opset 21.

An op's function gets the `ExpansionWriter` and the node's attributes; it raises Refused where the node can't be
written.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..graphs.region import RefusedError
from ..norms import definitions
from ..norms.definitions import Definition
from ..norms.norm_table import CONTRIB, OpOwner, rows_of_owner
from ..storage.nonstandard_norms import is_nonstandard_norm
from ..storage.onnx_domains import is_standard
from .expansion_writer import Attrs, ExpansionWriter, ForeignOp, make_foreign_op
from .tensorrt_plugins import PLUGINS


def foreign_op_of(node: onnx.NodeProto, opset: int) -> ForeignOp | None:
    """What a node means; None for standard ops, and for those that nothing is known of."""
    if is_standard(node):
        if is_nonstandard_norm(node.op_type, opset):
            return _STRAYS[node.op_type]
        return None
    if node.domain == CONTRIB:
        return ONNXRUNTIME_OPS.get(node.op_type)
    if node.domain.startswith(("com.microsoft", "com.ms.", "ai.onnx.")):
        return None
    return PLUGINS.get(node.op_type)


def _skip_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    _skip_norm(w, attrs, definitions.skip_layer_norm)


def _skip_simplified_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if w.wants_output(1):
        raise RefusedError("its mean is wanted, and it takes none")
    _skip_norm(w, attrs, definitions.skip_rms_norm)


def _skip_norm(w: ExpansionWriter, attrs: Attrs, definition: Definition) -> None:
    w.learn_elem_type(w.input_name(0), w.input_name(1), w.input_name(2))
    *_, total = w.expand_definition(definition, attrs)
    w.alike.append(str(total))


def _embed_layer_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if w.opset < 10:
        raise RefusedError(f"opset {w.opset} has no Slice with inputs (10)")
    w.expand_definition(definitions.embed_layer_norm, attrs)


def _ort_group_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    _check_ort_groups(w, attrs)
    w.expand_definition(definitions.ort_group_norm, attrs)


def _skip_group_norm(w: ExpansionWriter, attrs: Attrs) -> None:
    if not attrs.get("channels_last", 1):
        raise RefusedError("it is not defined for channels_last = 0")
    _check_ort_groups(w, attrs)
    w.expand_definition(definitions.skip_group_norm, attrs)


def _check_ort_groups(w: ExpansionWriter, attrs: Attrs) -> None:
    if attrs.get("activation") not in (0, 1):
        raise RefusedError(f"its activation is {attrs.get('activation')}; 0 (none) and 1 (SiLU) are known")
    if "groups" not in attrs:
        raise RefusedError("its number of groups is not written")
    w.require_divisible_groups(w.input_name(0), -1 if attrs.get("channels_last", 1) else 1, attrs["groups"])


def _group_norm_18(w: ExpansionWriter, attrs: Attrs) -> None:
    """With one scale and bias a channel where the number of channels is static: later opsets have such a node."""
    x = w.input_name(0)
    groups = attrs["num_groups"]
    w.require_divisible_groups(x, 1, groups)
    for t in w.node.input[1:3]:
        length = w.vector_length(t)
        if length is not None and length != groups:
            raise RefusedError(f"{t!r} has {length} values; at opset {w.opset} it has one for each group: {groups}")
    channels = w.shape_of(x)[1]
    if not isinstance(channels, int):
        w.expand_definition(definitions.group_norm, attrs)
        return
    scale, bias = (_repeat_values(w, t, channels // groups) for t in w.node.input[1:3])
    epsilon = attrs.get("epsilon", definitions.EPSILON)
    w.expand_definition(definitions.group_norm_21, {"groups": groups, "epsilon": epsilon}, (x, scale, bias))


def _repeat_values(w: ExpansionWriter, t: str, times: int) -> str:
    """(G,) → (G · times,), each value ``times`` times."""
    column = w("Expand", w.reshape(t, [-1, 1]), w.make_int64_vector([1, times], "times"))
    return w.reshape(column, [-1])


_WRITERS: dict[str, Callable[[ExpansionWriter, Attrs], None]] = {
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "GroupNorm": _ort_group_norm,
    "SkipGroupNorm": _skip_group_norm,
}
"""Of ops that are refused in some forms, or of which more is known than their definition says."""

ONNXRUNTIME_OPS = {op: make_foreign_op(row, _WRITERS.get(op)) for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items()}
# those in ONNX's own domain
_STRAYS = {
    **PLUGINS,
    **{op: ONNXRUNTIME_OPS[op] for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "" in row.domains},
    **{op: make_foreign_op(row, _group_norm_18) for op, row in rows_of_owner(OpOwner.ONNX_18).items()},
}
