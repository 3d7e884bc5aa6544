"""Fold a scale into the DequantizeLinear scales of a linear layer with stored codes.

    W = (q − z)·s          F·W = (σ(q − z) + z − z)·(|F|·s),   σ = sign(F)

F is the factor that a fold requires for each element of the weight. The codes q stay unchanged if F is positive, and
are mirrored at the zero point z if F is negative. So scales stay positive, because some runtimes refuse negative
scales. F·s may vary only along the layer's output channels, because the layer's scales may only vary there.

While scales and shifts are folded, a dequantized weight counts as the constant (q − z)·s, which float64 represents
without rounding. So the fold is proved like any other fold (`forms.fold_expressions`). This module writes the proved
weight as codes and scales, and compares their product with the proved weight, element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..errors import ExportError
from ..evaluate.evaluator_core import is_quantized_type
from ..evaluate.quantize_ops import broadcast_parameter, finite_limits
from ..forms.batch_norm import AffineFold, FoldShare
from ..forms.constant_linear import LINEAR, ConstantLinear, is_representable
from ..graphs.graph import Graph
from ..graphs.quantization_info import DEQUANTIZE, QUANTIZE
from ..graphs.region import Refusal
from ..storage.onnx_domains import is_standard

# Lowest opset in which DequantizeLinear has an axis
_PER_CHANNEL = 13
# Maximum relative difference of two products in float64 that count as equal
_CLOSE = 2.0**-46


@dataclass(frozen=True)
class _StoredCodes:
    """Constant inputs of a DequantizeLinear.

    Attributes:
        node: the DequantizeLinear.
        q: codes in their own type.
        zero: zero points in float64, broadcast over ``q``.
        step: scales in float64, broadcast over ``q``.
        axis: axis of the scales, non-negative.
        block: block size; 0 without blocks.
    """

    node: gs.Node
    q: np.ndarray
    zero: np.ndarray
    step: np.ndarray
    axis: int
    block: int

    @property
    def dequantized_array(self) -> np.ndarray:
        """Return (q − z)·s in float64."""
        return np.asarray((self.q.astype(np.float64) - self.zero) * self.step)


@dataclass(frozen=True)
class _RescaledWeight:
    """DequantizeLinear that replaces the constant ``share.weight``.

    Attributes:
        share: the fold's share of one layer.
        node: the new DequantizeLinear.
        mirrored: number of output channels with mirrored codes.
    """

    share: FoldShare
    node: gs.Node
    mirrored: int


@contextmanager
def treat_dequantized_as_constants(graph: Graph) -> Iterator[None]:
    """Treat the weights and biases that DequantizeLinear computes from constants for linear layers as constants.

    Yields:
        nothing; the graph treats them so within the context.
    """
    with graph.allow_temporary_constants():
        for node in graph.nodes:
            if (
                node.op == DEQUANTIZE
                and is_standard(node)
                and any(_is_weight_or_bias(graph, node, r) for r in _value_readers(graph, node))
            ):
                _treat_as_constant(graph, node)
        yield


def _treat_as_constant(graph: Graph, node: gs.Node) -> None:
    codes = _stored_codes(graph, node)
    if codes is not None and _is_exact_in_float64(codes):
        graph.treat_as_constant(node.outputs[0], codes.dequantized_array)


def _value_readers(graph: Graph, node: gs.Node) -> list[gs.Node]:
    return graph.consumers(node.outputs[0])


def _is_weight_or_bias(graph: Graph, node: gs.Node, reader: gs.Node) -> bool:
    """Return True if ``reader`` is a linear layer or adds the bias after a MatMul."""
    if reader.op in LINEAR:
        return True
    if reader.op == "Add":
        others = [t for t in reader.inputs if t is not node.outputs[0]]
    else:
        others = []
    if len(others) == 1:
        above = graph.producer(others[0])
    else:
        above = None
    return above is not None and above.op == "MatMul"


def _stored_codes(graph: Graph, node: gs.Node) -> _StoredCodes | None:
    """Read the codes; None if codes, scale or zero point are not constant."""
    q, step, zero = (graph.known_value(t) for t in (*node.inputs, *[gs.Variable.empty()] * (3 - len(node.inputs))))
    if q is None or step is None or (zero is None and len(node.inputs) > 2 and not node.inputs[2].is_empty()):
        return None
    if q.dtype.kind not in "iu" and not is_quantized_type(q.dtype):
        return None
    attrs = graph.attrs(node)
    axis = int(attrs.get("axis", 1))
    block = int(attrs.get("block_size", 0))
    try:
        if zero is None:
            shift = np.zeros(())
        else:
            shift = broadcast_parameter(zero, q.shape, axis, block).astype(np.float64)
        laid = broadcast_parameter(step, q.shape, axis, block).astype(np.float64)
    except ValueError:
        return None
    return _StoredCodes(node, q, shift, laid, axis % max(q.ndim, 1), block)


def _is_exact_in_float64(codes: _StoredCodes) -> bool:
    """Return True if float64 represents each (q − z)·s. A 32-bit code times a 24-bit scale may have too many bits."""
    longer = (codes.q.astype(np.longdouble) - codes.zero) * codes.step
    return bool(np.isfinite(codes.dequantized_array).all()) and bool((longer == codes.dequantized_array).all())


def is_quantized_dequantized(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if ``t`` comes from a QuantizeLinear followed by a DequantizeLinear."""
    node = graph.producer(t)
    if node is not None and node.op == DEQUANTIZE:
        before = graph.producer(node.inputs[0])
    else:
        before = None
    return before is not None and before.op == QUANTIZE


# ------------------------------------------------------------------ what a fold makes of it


def require_expressible(graph: Graph, form: AffineFold | Refusal) -> AffineFold | Refusal:
    """Check that each dequantized weight of a fold can take its share.

    Returns:
        ``form``, or the refusal of the first weight that cannot.
    """
    for share in form.shares if isinstance(form, AffineFold) else ():
        codes = _weight_codes(graph, share.linear)
        if codes is None:
            continue
        parts = codes if isinstance(codes, Refusal) else rescaled_parts(graph, share, codes)
        if isinstance(parts, Refusal):
            return parts
    return form


def write_dequantized(graph: Graph, form: AffineFold) -> AffineFold:
    """Replace the constants that a proved fold made of dequantized weights by DequantizeLinear nodes.

    Returns:
        ``form`` with these nodes; ``form`` itself if no dequantized weight takes part.
    """
    made: dict[int, _RescaledWeight] = {}
    for share in form.shares:
        codes = _weight_codes(graph, share.linear)
        if isinstance(codes, _StoredCodes):
            made[id(share.weight)] = _write_dequantizer(graph, share, codes)
    if not made:
        return form

    def with_dequantizers(node: gs.Node) -> tuple[gs.Node, ...]:
        own = [made[id(t)].node for t in node.inputs if id(t) in made]
        for i, t in enumerate(node.inputs):
            if id(t) in made:
                node.inputs[i] = made[id(t)].node.outputs[0]
        return (*own, node)

    first = {id(node): with_dequantizers(node) for node in form.nodes}
    edits = tuple((old, tuple(n for node in nodes for n in first.get(id(node), (node,)))) for old, nodes in form.edits)
    nodes = tuple(n for node in form.nodes for n in first[id(node)])
    for one in made.values():
        _treat_as_constant(graph, one.node)
    kinds = ", ".join(dict.fromkeys(np.dtype(graph.dtype(one.node.inputs[0])).name for one in made.values()))
    mirrored = sum(one.mirrored for one in made.values())
    said = f", in the scales of its {kinds} weight"
    if mirrored:
        said += f", with the codes of {mirrored} channel{'s' * (mirrored > 1)} negated"
    return replace(form, nodes=nodes, edits=edits, became=form.became + said)


def _weight_codes(graph: Graph, linear: ConstantLinear) -> _StoredCodes | Refusal | None:
    """Return the codes of a layer's weight; None if the weight is not dequantized."""
    t = linear.node.inputs[linear.weight]
    node = graph.producer(t)
    if isinstance(t, gs.Constant) or node is None:
        return None
    if node.op == DEQUANTIZE:
        return _stored_codes(graph, node)
    stack = [node]
    seen = set[int]()
    while stack:
        top = stack.pop()
        if top.op == DEQUANTIZE:
            return Refusal(f"the weight of {linear.title} is dequantized and then changed by {node.op}", t.name)
        seen.add(id(top))
        stack += [n for i in top.inputs if (n := graph.producer(i)) is not None and id(n) not in seen]
    return None


def _scale_factors(share: FoldShare) -> np.ndarray:
    """Return F, in the layout of the stored weight."""
    linear = share.linear
    alpha = float(share.linear.node.attrs.get("alpha", 1.0))
    ones = replace(linear, w=np.full(linear.w.shape, alpha))
    if share.side == "output":
        return ones.scale_output(share.scale, np.zeros_like(share.scale))[0].compute()
    return ones.scale_input(share.scale, np.zeros_like(share.scale))[0]


def rescaled_parts(
    graph: Graph, share: FoldShare, codes: _StoredCodes
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]] | Refusal:
    """Compute codes, scales and attributes of the new DequantizeLinear of a layer's weight.

    Returns:
        (codes, scales, attributes), or the refusal if the codes cannot express the weight.
    """
    factor = _scale_factors(share)
    title = share.linear.title
    node = codes.node
    dtype = graph.dtype(node.inputs[1])
    if dtype is None or graph.dtype(node.outputs[0]) not in (None, dtype):
        return Refusal(f"the weight of {title} is dequantized to a type that differs from the type of its scales", "")
    step = np.where(factor == 0, codes.step, np.abs(factor) * codes.step)
    laid = _layout_scale(graph, share, codes, step)
    if isinstance(laid, Refusal):
        return laid
    if not is_representable(dtype, *(np.array(v) for v in (laid[0].min(), laid[0].max()))):
        return Refusal(f"the folded scales of {title} are out of range for {np.dtype(dtype).name}", "")
    low, high = finite_limits(codes.q.dtype)
    mirrored = np.sign(factor) * (codes.q.astype(np.float64) - codes.zero) + codes.zero
    beyond = int(np.count_nonzero((mirrored < low) | (mirrored > high)))
    if beyond:
        worst = codes.q.reshape(-1)[int(np.argmax(np.abs(mirrored - codes.zero).reshape(-1)))]
        return Refusal(
            f"its scale is negative in some channels, so {beyond} codes of {title} (for example {float(worst):g}) "
            f"would exceed the range of {codes.q.dtype.name}, {low:g} to {high:g}",
            "",
        )
    return mirrored.astype(codes.q.dtype), laid[0], laid[1]


def _layout_scale(
    graph: Graph, share: FoldShare, codes: _StoredCodes, step: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]] | Refusal:
    """Lay out ``step``, one number per element, as DequantizeLinear's scale, and return it with its attributes."""
    if codes.block:
        starts = np.arange(0, step.shape[codes.axis], codes.block)
        blocks = step.take(starts, axis=codes.axis)
        if (np.repeat(blocks, codes.block, codes.axis).take(range(step.shape[codes.axis]), codes.axis) == step).all():
            return blocks, {"axis": codes.axis, "block_size": codes.block}
        return Refusal(f"its scale varies within blocks of {codes.block} of {share.linear.title}", "")
    if step.size and (step == step.flat[0]).all() and codes.step.size == 1:
        return np.asarray(step.flat[0]), {}
    if codes.step.size > 1:
        own = [codes.axis]
    else:
        own = []
    for axis in (*own, output_axis(share.linear)):
        first = step.max(axis=tuple(i for i in range(step.ndim) if i != axis), keepdims=True)
        if (first == step).all():
            if graph.opset < _PER_CHANNEL:
                why = (
                    f"DequantizeLinear of opset {graph.opset} supports only one scale for all channels; "
                    "export with opset 13"
                )
                return Refusal(f"{why} or higher", "")
            return first.reshape(-1), {"axis": axis}
    if share.side != "output":
        where = "input"
    else:
        where = "output"
    if share.linear.groups > 1:
        groups = f" in {share.linear.groups} groups"
    else:
        groups = ""
    return Refusal(
        f"{share.linear.title}{groups} has one scale per index of axis {(*own, output_axis(share.linear))[0]} "
        f"of its weight, but the scaled {where} channels are along another axis",
        "",
    )


def output_axis(linear: ConstantLinear) -> int:
    """Find the axis of the output channels in a layer's weight.

    Returns:
        a non-negative axis of the stored weight.
    """
    rank = linear.w.ndim
    if linear.node.op in ("Conv", "ConvTranspose"):
        if linear.node.op == "Conv":
            return 0
        return 1
    if linear.node.op == "Gemm":
        rows = linear.is_transposed
    else:
        rows = linear.weight == 0
    if rows:
        return rank - 2
    return rank - 1


def _write_dequantizer(graph: Graph, share: FoldShare, codes: _StoredCodes) -> _RescaledWeight:
    parts = rescaled_parts(graph, share, codes)
    assert not isinstance(parts, Refusal), parts.reason
    q, step, attrs = parts
    node = codes.node
    old = codes.node.inputs
    dtype = graph.dtype(old[1])
    name = old[0].name or node.outputs[0].name
    mirrored = q.astype(np.float64) != codes.q.astype(np.float64)
    if mirrored.any():
        stored = graph.add_constant(name, q, codes.q.dtype)
    else:
        stored = old[0]
    inputs = [stored, graph.add_constant(old[1].name or f"{name}_scale", step, dtype)]
    if len(old) > 2 and not old[2].is_empty():
        zero = np.asarray(graph.value(old[2]))
        inputs.append(
            old[2]
            if zero.shape == step.shape
            else graph.add_constant(old[2].name, _broadcast_zero_point(zero, codes, step, attrs), zero.dtype)
        )
    if "output_dtype" in node.attrs:
        attrs = {**attrs, "output_dtype": node.attrs["output_dtype"]}
    made = graph.make_node(DEQUANTIZE, inputs, node.outputs[0], attrs)
    _require_same_weight(graph, share, q, codes, step, attrs)
    channels = np.moveaxis(mirrored, output_axis(share.linear), 0)
    return _RescaledWeight(share, made, int(channels.reshape(len(channels), -1).any(1).sum()))


def _broadcast_zero_point(zero: np.ndarray, codes: _StoredCodes, step: np.ndarray, attrs: dict[str, Any]) -> np.ndarray:
    """Return the zero point in the shape of the scale."""
    if zero.size == 1:
        return np.broadcast_to(zero.reshape(()), step.shape).copy()
    whole = np.broadcast_to(codes.zero, codes.q.shape)
    return whole.max(axis=tuple(i for i in range(whole.ndim) if i != attrs["axis"])).astype(zero.dtype)


def _require_same_weight(
    graph: Graph, share: FoldShare, q: np.ndarray, codes: _StoredCodes, step: np.ndarray, attrs: dict[str, Any]
) -> None:
    """Check that codes times scales equal the proved weight, before the scales are rounded once.

    Raises:
        ExportError: they differ.
    """
    laid = broadcast_parameter(step, q.shape, attrs.get("axis", 1), attrs.get("block_size", 0))
    value = (q.astype(np.float64) - codes.zero) * laid
    proved = graph.value(share.weight)
    if not (np.abs(value - proved) <= _CLOSE * np.abs(proved)).all():
        raise ExportError(
            f"the codes and scales of {share.linear.title} differ from the proved weight. This is a bug in "
            "normdeploy; please report it"
        )
