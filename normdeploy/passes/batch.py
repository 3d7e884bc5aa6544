"""Batch normalization in eval mode: one scale and one shift, folded into a neighbouring linear op.

    y = (z − mean)/sqrt(var + ε)·γ + β = a·z + b,   a = γ/sqrt(var + ε),   b = β − mean·a     (Ioffe and Szegedy, 2015, arXiv:1502.03167)

A chain of nodes (BatchNormalization, or Mul, Add, Sub, Div by constants, views between) is asked for a and b in float64, so spelling does
not matter. What is done with it, the first that is exact:

- the linear op before, z = W·x + c: weight a·W and bias a·c + b, along the output channels (Conv, ConvTranspose with groups, Gemm, MatMul);
- the linear op behind, W·y + c: weight W·a and bias c + W·b, along the input channels. A convolution with padding would see the zeros of
  the padding without the shift, so there it is only done where b is zero;
- otherwise one Mul and one Add.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from .. import evaluate
from ..graph import Graph
from ..region import NoMatch
from ..scales import Affine
from .form import Form

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def into_previous(graph: Graph, found: Affine) -> Form | NoMatch:
    """a·(W·x + c) + b as one linear op."""
    t = found.z
    linear = graph.producer(t)
    if linear is None or linear.op not in LINEAR or (linear.domain or "") not in ("", "ai.onnx"):
        return NoMatch("no linear op stands before it", t.name)
    if graph.is_output(t) or len(graph.consumers(t)) != 1:
        return NoMatch(f"{t.name!r}, the output of {linear.op} {linear.name!r}, is read by others as well", t.name)
    weight = _weight_index(graph, linear)
    if weight is None:
        return NoMatch(f"the weight of {linear.op} {linear.name!r} is no constant", t.name)
    shared = _readers_of_values(graph, linear.inputs[weight])
    if shared > 1:
        return NoMatch(f"the weight {linear.inputs[weight].name!r} is shared by {shared} nodes: folding would copy it", t.name)
    if len(linear.inputs[weight].shape or (0, 0)) < 2:
        return NoMatch(f"the weight of {linear.op} {linear.name!r} is a vector: its output has no channels", t.name)
    rank = len(graph.shape(t) or ())
    channel = _output_channel(linear, weight, rank)
    if any(n > 1 and a != channel for p in (found.scale, found.shift) for a, n in enumerate(p.shape)):
        return NoMatch(f"its scale or shift varies along more than the output channels of {linear.op}", t.name)
    return _folded_previous(graph, found, linear, weight)


def _folded_previous(graph: Graph, found: Affine, linear: gs.Node, weight: int) -> Form | NoMatch:
    attrs = dict(linear.attrs)
    w = graph.known(linear.inputs[weight])
    if w is None:
        return NoMatch(f"the weight of {linear.op} {linear.name!r} can't be evaluated", found.z.name)
    a, b = found.scale.reshape(-1), found.shift.reshape(-1)
    channels = _channels(linear, w, weight, attrs)
    a, b = np.broadcast_to(a, channels), np.broadcast_to(b, channels)
    bias_at = 2
    held = linear.inputs[bias_at] if len(linear.inputs) > bias_at and not linear.inputs[bias_at].is_empty() else None
    c = graph.known(held) if held is not None else np.zeros(1)
    if c is None:
        return NoMatch(f"the bias of {linear.op} {linear.name!r} is no constant", found.z.name)
    alpha, beta = float(attrs.get("alpha", 1.0)), float(attrs.get("beta", 1.0))
    if linear.op == "Conv":
        w2 = w * a.reshape(-1, *[1] * (w.ndim - 1))
    elif linear.op == "ConvTranspose":
        groups = int(attrs.get("group", 1))
        w2 = w.reshape(groups, -1, *w.shape[1:]) * a.reshape(groups, 1, -1, *[1] * (w.ndim - 2))
        w2 = w2.reshape(w.shape)
    elif linear.op == "Gemm":
        w2 = alpha * (w * a[:, None] if attrs.get("transB", 0) else w * a)
        c = beta * c
        attrs.pop("alpha", None)
        attrs.pop("beta", None)
    else:
        w2 = w * a if weight == 1 else w * a[:, None]
    if linear.op == "Gemm" and c.ndim == 2 and c.shape[0] > 1:
        return NoMatch("the bias of the Gemm differs by row", found.z.name)
    shift = a * c.reshape(-1) + b
    return _linear(
        graph, found, linear, weight, w2, shift, attrs, f"folded into {linear.op}" + (f" {linear.name!r}" if linear.name else "")
    )


def into_next(graph: Graph, found: Affine) -> Form | NoMatch:
    """W·(a·z + b) + c as one linear op."""
    y = found.y
    readers = graph.consumers(y)
    if graph.is_output(y) or len(readers) != 1 or readers[0].op not in LINEAR or (readers[0].domain or "") not in ("", "ai.onnx"):
        return NoMatch("no linear op alone stands behind it", y.name)
    linear = readers[0]
    weight = _weight_index(graph, linear)
    if weight is None or linear.inputs[1 - weight] is not y:
        return NoMatch(f"the weight of {linear.op} {linear.name!r} is no constant", y.name)
    if _readers_of_values(graph, linear.inputs[weight]) > 1:
        return NoMatch(f"the weight {linear.inputs[weight].name!r} is shared: folding would copy it", y.name)
    w, attrs = graph.known(linear.inputs[weight]), dict(linear.attrs)
    if w is None:
        return NoMatch(f"the weight of {linear.op} {linear.name!r} can't be evaluated", y.name)
    rank = len(graph.shape(y) or ())
    channel = _input_channel(linear, weight, rank, attrs)
    if any(n > 1 and a != channel for p in (found.scale, found.shift) for a, n in enumerate(p.shape)):
        return NoMatch(f"its scale or shift varies along more than the input channels of {linear.op}", y.name)
    conv = linear.op in ("Conv", "ConvTranspose")
    if conv and found.shift.any() and (linear.op == "ConvTranspose" or _pads(attrs)):
        return NoMatch(f"{linear.op} {linear.name!r} pads its input with zeros, which the shift would have to reach", y.name)
    held = linear.inputs[2] if len(linear.inputs) > 2 and not linear.inputs[2].is_empty() else None
    c = graph.known(held) if held is not None else np.zeros(1)
    if c is None:
        return NoMatch(f"the bias of {linear.op} {linear.name!r} is no constant", y.name)
    if c.ndim == 2 and c.shape[0] > 1:
        return NoMatch("the bias of the Gemm differs by row", y.name)
    if linear.op == "MatMul" and found.shift.any():
        return NoMatch("MatMul has no bias to take the shift", y.name)
    a, b = found.scale.reshape(-1), found.shift.reshape(-1)
    w2, shift = _behind(linear, weight, w, a, b, attrs)
    alpha, beta = float(attrs.pop("alpha", 1.0)), float(attrs.pop("beta", 1.0))
    said = f"folded into {linear.op} {linear.name!r} behind it" if linear.name else f"folded into {linear.op} behind it"
    return _linear(graph, found, linear, weight, alpha * w2, alpha * shift + beta * c.reshape(-1), attrs, said, behind=True)


def _behind(
    linear: gs.Node, weight: int, w: np.ndarray, a: np.ndarray, b: np.ndarray, attrs: dict[str, object]
) -> tuple[np.ndarray, np.ndarray]:
    """The weight that takes the scale of its input channels, and what the shift adds to its output channels."""
    if linear.op in ("Conv", "ConvTranspose"):
        groups = int(attrs.get("group", 1))  # type: ignore[call-overload]
        if linear.op == "ConvTranspose":
            return w * np.broadcast_to(a, w.shape[0]).reshape(-1, *[1] * (w.ndim - 1)), np.zeros(w.shape[1] * groups)
        inner = w.shape[1]
        per = [np.broadcast_to(p, inner * groups).reshape(groups, 1, inner, *[1] * (w.ndim - 2)) for p in (a, b)]
        cut = w.reshape(groups, -1, *w.shape[1:])
        return (cut * per[0]).reshape(w.shape), (cut * per[1]).sum(axis=tuple(range(2, cut.ndim))).reshape(-1)
    rows = w.T if attrs.get("transB", 0) else w
    if weight == 0:
        return w * a, (w @ np.broadcast_to(b, w.shape[-1]))
    k = rows.shape[-2] if rows.ndim > 1 else rows.shape[0]
    full_a, full_b = np.broadcast_to(a, k), np.broadcast_to(b, k)
    scaled = rows * (full_a[:, None] if rows.ndim > 1 else full_a)
    return (scaled.T if attrs.get("transB", 0) else scaled), full_b @ rows


def scale_and_shift(graph: Graph, found: Affine) -> Form | NoMatch:
    """One Mul and one Add; the one that does nothing is left out."""
    if not _representable(found.dtype, found.scale, found.shift):
        return NoMatch(f"its scale or shift does not fit into {found.dtype.name}", found.y.name)
    nodes: list[gs.Node] = []
    t = found.z
    for op, value, neutral, name in (("Mul", found.scale, 1.0, "scale"), ("Add", found.shift, 0.0, "shift")):
        if (value == neutral).all() and (nodes or op == "Mul"):
            continue
        shape = value.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        nodes.append(graph.node(op, [t, graph.constant(f"{found.y.name}_{name}", value.reshape(shape), found.dtype)], found.y))
        t = nodes[-1].outputs[0]
    return Form(tuple(nodes), " and ".join(n.op for n in nodes) + " (one scale and shift)" if len(nodes) > 1 else f"one {nodes[0].op}")


def _linear(
    graph: Graph,
    found: Affine,
    linear: gs.Node,
    weight: int,
    w: np.ndarray,
    shift: np.ndarray,
    attrs: dict[str, object],
    said: str,
    behind: bool = False,
) -> Form | NoMatch:
    stored = linear.inputs[weight]
    dtype = found.dtype
    if not _representable(dtype, w, shift):
        return NoMatch(f"the folded weight does not fit into {dtype.name}", found.y.name)
    name = linear.name or found.y.name
    inputs = list(linear.inputs[:2])
    inputs[weight] = graph.constant(stored.name or f"{name}_weight", w, dtype)
    if behind:
        inputs[1 - weight] = found.z
    out = linear.outputs[0] if behind else found.y
    if linear.op == "MatMul":
        node = graph.node("MatMul", inputs, out, attrs)
        if not shift.any():
            return Form((node,), said, core=linear.op)
        lined = shift if weight == 1 else shift[:, None]
        added = graph.node("Add", [node.outputs[0], graph.constant(f"{name}_bias", lined, dtype)], out)
        return Form((node, added), said, core=linear.op)
    had = len(linear.inputs) > 2 and not linear.inputs[2].is_empty()
    if had or shift.any():
        inputs.append(graph.constant((linear.inputs[2].name if had else "") or f"{name}_bias", shift, dtype))
    return Form((graph.node(linear.op, inputs, out, attrs),), said, core=linear.op)


def _representable(dtype: np.dtype, *values: np.ndarray) -> bool:
    """Neither overflow nor, in half precision, loss of digits below the smallest normal number (2⁻⁸ is the unit of bfloat16)."""
    with evaluate.quiet():
        stored = [v.astype(dtype).astype(np.float64) for v in values]
    pairs = zip(values, stored, strict=True)
    return all(np.isfinite(s).all() and np.abs(s - v).max(initial=0.0) <= 2.0**-8 * np.abs(v).max(initial=0.0) for v, s in pairs)


def _readers_of_values(graph: Graph, t: gs.Tensor) -> int:
    return sum(n.op not in ("Shape", "Size") for n in graph.consumers(t))


def _weight_index(graph: Graph, linear: gs.Node) -> int | None:
    if graph.is_constant(linear.inputs[1]) and not graph.is_constant(linear.inputs[0]):
        return 1
    return 0 if linear.op == "MatMul" and graph.is_constant(linear.inputs[0]) and not graph.is_constant(linear.inputs[1]) else None


def _output_channel(linear: gs.Node, weight: int, rank: int) -> int:
    if linear.op in ("Conv", "ConvTranspose"):
        return 1
    return rank - 1 if weight == 1 else rank - 2


def _input_channel(linear: gs.Node, weight: int, rank: int, attrs: dict[str, object]) -> int:
    if linear.op in ("Conv", "ConvTranspose"):
        return 1
    if linear.op == "Gemm":
        return 0 if attrs.get("transA", 0) else 1
    return rank - 1 if weight == 1 else rank - 2


def _channels(linear: gs.Node, w: np.ndarray, weight: int, attrs: dict[str, object]) -> int:
    if linear.op == "Conv":
        return w.shape[0]
    if linear.op == "ConvTranspose":
        return w.shape[1] * int(attrs.get("group", 1))  # type: ignore[call-overload]
    if linear.op == "Gemm":
        return w.shape[0] if attrs.get("transB", 0) else w.shape[1]
    return w.shape[-1] if weight == 1 else w.shape[-2]


def _pads(attrs: dict[str, object]) -> bool:
    pads: Sequence[int] = attrs.get("pads") or ()  # type: ignore[assignment]
    return any(pads) or str(attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID", "b'NOTSET'", "b'VALID'")
