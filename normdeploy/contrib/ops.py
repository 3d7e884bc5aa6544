"""Foreign norm nodes written as standard nodes, by their definitions (`normdeploy.norms.definitions`): onnxruntime's
contrib ops, and GroupNormalization as it was before opset 21.

An op's function gets the `Writer` and the node's attributes; it raises Refused where the node can't be written.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..domains import is_standard
from ..graphs.region import Refused
from ..norms import definitions
from ..norms.definitions import Definition
from ..norms.ops import CONTRIB, Owner, owned_by
from ..storage.strays import is_stray
from .plugins import PLUGINS
from .write import Attrs, Op, Writer, written_by


def op_of(node: onnx.NodeProto, opset: int) -> Op | None:
    """What a node means; None for standard ops, and for those that nothing is known of."""
    if is_standard(node):
        return _STRAYS[node.op_type] if is_stray(node.op_type, opset) else None
    if node.domain == CONTRIB:
        return _ONNXRUNTIME.get(node.op_type)
    return None if node.domain.startswith(("com.microsoft", "com.ms.", "ai.onnx.")) else PLUGINS.get(node.op_type)


def _skip_layer_norm(w: Writer, attrs: Attrs) -> None:
    _skip_norm(w, attrs, definitions.skip_layer_norm)


def _skip_simplified_layer_norm(w: Writer, attrs: Attrs) -> None:
    if w.wants(1):
        raise Refused("its mean is wanted, and it takes none")
    _skip_norm(w, attrs, definitions.skip_rms_norm)


def _skip_norm(w: Writer, attrs: Attrs, definition: Definition) -> None:
    w.learn_kind(w.input(0), w.input(1), w.input(2))
    *_, total = w.write(definition, attrs)
    w.alike.append(str(total))


def _embed_layer_norm(w: Writer, attrs: Attrs) -> None:
    if w.opset < 10:
        raise Refused(f"opset {w.opset} has no Slice with inputs (10)")
    w.write(definitions.embed_layer_norm, attrs)


def _ort_group_norm(w: Writer, attrs: Attrs) -> None:
    _check_ort_groups(w, attrs)
    w.write(definitions.ort_group_norm, attrs)


def _skip_group_norm(w: Writer, attrs: Attrs) -> None:
    if not attrs.get("channels_last", 1):
        raise Refused("it is not defined for channels_last = 0")
    _check_ort_groups(w, attrs)
    w.write(definitions.skip_group_norm, attrs)


def _check_ort_groups(w: Writer, attrs: Attrs) -> None:
    if attrs.get("activation") not in (0, 1):
        raise Refused(f"its activation is {attrs.get('activation')}; 0 (none) and 1 (SiLU) are known")
    if "groups" not in attrs:
        raise Refused("its number of groups is not written")
    w.check_groups(w.input(0), -1 if attrs.get("channels_last", 1) else 1, attrs["groups"])


def _group_norm_18(w: Writer, attrs: Attrs) -> None:
    """With one scale and bias a channel where the number of channels is static: later opsets have such a node."""
    x, groups = w.input(0), attrs["num_groups"]
    w.check_groups(x, 1, groups)
    for t in w.node.input[1:3]:
        length = w.length(t)
        if length is not None and length != groups:
            raise Refused(f"{t!r} has {length} values; at opset {w.opset} it has one for each group: {groups}")
    channels = w.shape(x)[1]
    if not isinstance(channels, int):
        w.write(definitions.group_norm, attrs)
        return
    scale, bias = (_repeated(w, t, channels // groups) for t in w.node.input[1:3])
    epsilon = attrs.get("epsilon", definitions.EPSILON)
    w.write(definitions.group_norm_21, {"groups": groups, "epsilon": epsilon}, (x, scale, bias))


def _repeated(w: Writer, t: str, times: int) -> str:
    """(G,) → (G · times,), each value ``times`` times."""
    column = w("Expand", w.reshape(t, [-1, 1]), w.ints([1, times], "times"))
    return w.reshape(column, [-1])


_WRITERS: dict[str, Callable[[Writer, Attrs], None]] = {
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "GroupNorm": _ort_group_norm,
    "SkipGroupNorm": _skip_group_norm,
}
"""Of ops that are refused in some forms, or of which more is known than their definition says."""

_ONNXRUNTIME = {op: written_by(row, _WRITERS.get(op)) for op, row in owned_by(Owner.ONNXRUNTIME).items()}
_STRAYS = {  # those in ONNX's own domain
    **PLUGINS,
    **{op: _ONNXRUNTIME[op] for op, row in owned_by(Owner.ONNXRUNTIME).items() if "" in row.domains},
    **{op: written_by(row, _group_norm_18) for op, row in owned_by(Owner.ONNX_18).items()},
}
