"""What foreign norm nodes mean, written as standard nodes: onnxruntime's contrib ops, and GroupNormalization as it was
before opset 21.

An op's function gets the `Writer` and the node's attributes; it raises Refused where the node can't be written.
Semantics and defaults: `normdeploy.proof.contrib`.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..domains import is_standard
from ..graphs.region import Refused
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


def _layer_norm(w: Writer, attrs: Attrs) -> None:
    """LayerNormalization(X, scale, B) → Y, Mean, InvStdDev, as it was before opset 17."""
    _affine_norm(w, attrs, w.input(0), w.input(2), centered=True, inverse=2)


def _simplified_layer_norm(w: Writer, attrs: Attrs) -> None:
    """SimplifiedLayerNormalization(X, scale) → Y, inv_std_var."""
    _affine_norm(w, attrs, w.input(0), "", centered=False, inverse=1)


def _affine_norm(w: Writer, attrs: Attrs, x: str, beta: str, centered: bool, inverse: int) -> None:
    normalized = w.normalized(x, w.from_axis(x, attrs.get("axis", -1)), attrs.get("epsilon", 1e-5), centered)
    w.give(0, w.scaled(normalized.value, w.input(1), beta))
    if centered:
        w.give(1, normalized.mean)
    _give_inverse(w, inverse, normalized.deviation)


def _give_inverse(w: Writer, index: int, deviation: str) -> None:
    if index < len(w.node.output) and w.node.output[index]:
        w.give(index, w.then("Reciprocal", deviation))


def _skip_layer_norm(w: Writer, attrs: Attrs) -> None:
    """SkipLayerNormalization(input, skip, gamma, beta, bias) → output, mean, inv_std_var, input + skip + bias."""
    _skip_norm(w, attrs, beta=w.input(3), bias=w.input(4), centered=True)


def _skip_simplified_layer_norm(w: Writer, attrs: Attrs) -> None:
    """SkipSimplifiedLayerNormalization(input, skip, gamma, bias) → output, –, inv_std_var, input + skip + bias."""
    if len(w.node.output) > 1 and w.node.output[1]:
        raise Refused("its mean is wanted, and it takes none")
    _skip_norm(w, attrs, beta="", bias=w.input(3), centered=False)


def _skip_norm(w: Writer, attrs: Attrs, beta: str, bias: str, centered: bool) -> None:
    total = w.then("Add", w.input(0), w.input(1), kind=w.kind(w.input(0), w.input(1), w.input(2)))
    total = w.then("Add", total, bias) if bias else total
    w.alike.append(total)
    normalized = w.normalized(total, [-1], attrs.get("epsilon", 1e-12), centered)
    w.give(0, w.scaled(normalized.value, w.input(2), beta))
    w.give(1, normalized.mean)
    _give_inverse(w, 2, normalized.deviation)
    w.give(3, total)


def _embed_layer_norm(w: Writer, attrs: Attrs) -> None:
    """EmbedLayerNormalization: the sum of word, position and segment embeddings, its layer norm, and the ones in each
    row of the mask."""
    if w.opset < 10:
        raise Refused(f"opset {w.opset} has no Slice with inputs (10)")
    ids, segments, words, positions = (w.input(i) for i in range(4))
    kind = w.kind(words)
    if w.input(8):
        place = w.then("Gather", positions, w.input(8), axis=0, kind=kind)
    else:
        shape = w.then("Shape", ids, kind=onnx.TensorProto.INT64)
        length = w.then("Slice", shape, w.ints([1], "start"), w.ints([2], "end"))
        place = w.then("Slice", positions, w.ints([0], "start"), length, w.ints([0], "axes"))
    total = w.then("Add", w.then("Gather", words, ids, axis=0, kind=kind), place)
    if segments:
        total = w.then("Add", total, w.then("Gather", w.input(4), segments, axis=0, kind=kind))
    normalized = w.normalized(total, [-1], attrs.get("epsilon", 1e-12))
    w.give(0, w.scaled(normalized.value, w.input(5), w.input(6)))
    if len(w.node.output) > 1 and w.node.output[1]:
        w.give(1, _ones(w, ids, w.input(7)))
    w.give(2, total)


def _ones(w: Writer, ids: str, mask: str) -> str:
    """The number of ones in each row of an int32 mask; zeros without one."""
    kind = onnx.TensorProto.INT32
    if mask:
        mask_of_ones = w.cast(w.then("Equal", mask, w.constant(1, kind, "one"), kind=onnx.TensorProto.BOOL), kind)
    else:
        mask_of_ones = w.then("Sub", ids, ids, kind=kind)
    if w.opset < 13:
        return w.then("ReduceSum", mask_of_ones, axes=[1], keepdims=0)
    return w.then("ReduceSum", mask_of_ones, w.ints([1], "axes"), keepdims=0)


def _ort_group_norm(w: Writer, attrs: Attrs) -> None:
    """GroupNorm(X, gamma, beta), X of (N, H, W, C), or (N, C, H, W) where channels_last is 0; activation 1 is SiLU."""
    _ort_groups(w, attrs, w.input(0))


def _skip_group_norm(w: Writer, attrs: Attrs) -> None:
    """SkipGroupNorm(X, gamma, beta, skip, bias): GroupNorm of X + skip + bias, and that sum. skip may be (N, C)."""
    if not attrs.get("channels_last", 1):
        raise Refused("it is not defined for channels_last = 0")
    skip = w.input(3)
    if len(w.shape(skip)) == 2:
        skip = w.then("Reshape", skip, w.ints([0, 1, 1, -1], "shape"))
    total = w.then("Add", w.input(0), skip)
    total = w.then("Add", total, w.input(4)) if w.input(4) else total
    _ort_groups(w, attrs, total)
    w.give(1, total)


def _ort_groups(w: Writer, attrs: Attrs, x: str) -> None:
    if attrs.get("activation") not in (0, 1):
        raise Refused(f"its activation is {attrs.get('activation')}; 0 (none) and 1 (SiLU) are known")
    if "groups" not in attrs:
        raise Refused("its number of groups is not written")
    last, kind = attrs.get("channels_last", 1), w.kind(w.input(0))
    w.check_groups(w.input(0), -1 if last else 1, attrs["groups"])
    y = w.then("Transpose", x, perm=[0, 3, 1, 2]) if last else x
    y = w.grouped(y, attrs["groups"], attrs.get("epsilon", 1e-5), rank=4)
    y = w.cast(y, kind)
    y = w.then("Transpose", y, perm=[0, 2, 3, 1]) if last else y
    w.give(0, w.silu(y) if attrs["activation"] else y)


def _group_norm_18(w: Writer, attrs: Attrs) -> None:
    """GroupNormalization as opsets 18 to 20 had it: scale and bias have one value for each group."""
    x, groups = w.input(0), attrs["num_groups"]
    w.check_groups(x, 1, groups)
    for t in w.node.input[1:3]:
        length = w.length(t)
        if length is not None and length != groups:
            raise Refused(f"{t!r} has {length} values; at opset {w.opset} it has one for each group: {groups}")
    channels = w.shape(x)[1]
    if isinstance(channels, int):
        gamma, beta = (_repeated(w, t, channels // groups) for t in w.node.input[1:3])
        w.give(0, w.grouped(x, groups, attrs.get("epsilon", 1e-5), len(w.shape(x)), gamma, beta))
        return
    view = w.then("Reshape", x, w.ints([0, groups, -1], "groups"))
    y = w.scaled(w.normalized(view, [-1], attrs.get("epsilon", 1e-5)).value, w.input(1), w.input(2), shape=[-1, 1])
    w.give(0, w.then("Reshape", y, w.then("Shape", x, kind=onnx.TensorProto.INT64)))


def _repeated(w: Writer, t: str, times: int) -> str:
    """(G,) → (G · times,), each value ``times`` times."""
    column = w.then("Expand", w.reshape(t, [-1, 1]), w.ints([1, times], "times"))
    return w.reshape(column, [-1])


_WRITERS: dict[str, Callable[[Writer, Attrs], None]] = {
    "LayerNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "GroupNorm": _ort_group_norm,
    "SkipGroupNorm": _skip_group_norm,
}
_ONNXRUNTIME = {op: written_by(row, _WRITERS[op]) for op, row in owned_by(Owner.ONNXRUNTIME).items()}
_STRAYS = {  # those in ONNX's own domain
    **PLUGINS,
    **{op: _ONNXRUNTIME[op] for op, row in owned_by(Owner.ONNXRUNTIME).items() if "" in row.domains},
    **{op: written_by(row, _group_norm_18) for op, row in owned_by(Owner.ONNX_18).items()},
}
