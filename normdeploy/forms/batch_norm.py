"""Fold a batch normalization in eval mode, which is a scale and a shift, into a neighboring linear op.

    y = (z − mean)/sqrt(var + ε)·γ + β = a·z + b,   a = γ/sqrt(var + ε),   b = β − mean·a     (Ioffe and Szegedy, 2015,
    arXiv:1502.03167)

The scale and shift is a BatchNormalization, or a chain of Mul, Add, Sub and Div with constants, possibly with views
between them. It is evaluated in float64 to get a and b, so its spelling does not matter. The following rewrites are
tried in order, and the first exact rewrite is used (`normdeploy.forms.constant_linear` has the formulas):

- The previous linear op takes scale and shift, also through views that keep the channels apart. After a Concat, each
  linear op that computes an input of the Concat takes the part of scale and shift for this input.
- The next linear op takes scale and shift. A convolution that pads its input with zeros cannot take the shift, because
  the padding gets no shift. It takes only the scale, W·pad(a·z + b) = (W·a)·pad(z + b/a), which leaves one Add.
- Otherwise scale and shift become one Mul and one Add. A BatchNormalization node stays a single node, because a Mul and
  an Add would be more nodes than before. Its scale and bias then contain the statistics, and its mean is 0 and its
  variance is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..recognition.affine_chains import AffineChain
from .channel_views import (
    input_channel_vector,
    is_read_once,
    output_channel_vector,
    producing_node,
    value_readers,
    views_above,
    views_below,
)
from .constant_linear import (
    ConstantLinear,
    absorb_added_bias,
    channel_vector,
    constant_linear_of,
    is_representable,
    title_of,
)
from .fold_expressions import FoldExpressions, FoldShare

# A tensor of the graph, and the nodes that will produce it
Edit = tuple[gs.Tensor, tuple[gs.Node, ...]]


@dataclass(frozen=True)
class AffineFold:
    """Nodes that compute ``old`` from ``leaves`` after a fold.

    Attributes:
        became: description of the result for reports.
        windows: for each leaf, a small shape that is large enough to test the fold, or None if no such shape is known.
        edits: the changes of the graph that insert the nodes.
        expressions: the formulas of the new constants.
        remains: ops that remain of the scale and shift.
    """

    nodes: tuple[gs.Node, ...]
    became: str
    old: gs.Tensor
    leaves: tuple[gs.Tensor, ...]
    windows: tuple[tuple[int, ...] | None, ...]
    edits: tuple[Edit, ...]
    expressions: FoldExpressions
    remains: tuple[str, ...] = ()

    @property
    def shares(self) -> tuple[FoldShare, ...]:
        """Return the shares of the linear ops; empty if the scale and shift was not folded into a linear op."""
        return self.expressions.shares


def fold_into_previous(graph: Graph, affine: AffineChain) -> AffineFold | Refusal:
    """Fold a·V(W·x + c) + b into the previous linear op; V is a chain of views that keep the channels apart, or empty.

    Returns:
        the fold into V of one linear op, or a refusal.
    """
    t, views = views_above(graph, affine.z)
    linear = constant_linear_of(graph, graph.producer(t))
    if isinstance(linear, Refusal):
        none = linear.kind is RefusalKind.NO_LINEAR_OP
        return Refusal("no linear op precedes it" if none else linear.reason, affine.z.name, kind=linear.kind)
    for tensor in (t, *(v.outputs[0] for v in views)):
        if not is_read_once(graph, tensor):
            return Refusal(f"other nodes also read {tensor.name!r}, which follows {linear.title}", tensor.name)
    vectors = [output_channel_vector(graph, values, t, affine.z, linear) for values in (affine.scale, affine.shift)]
    a, b = vectors
    if a is None or b is None:
        return Refusal(
            f"its scale or shift varies along more axes than the output channels of {linear.title}", affine.z.name
        )
    made = linear.write_nodes(graph, linear.data_input, *linear.scale_output(a, b), affine.y, affine.dtype)
    if isinstance(made, Refusal):
        return made
    if not views:
        edits: tuple[Edit, ...] = ((affine.y, tuple(made)),)
        nodes = made
    else:
        nodes = [*made, *_copy_views(graph, views, made[-1].outputs[0])]
        edits = ((t, tuple(made)), (affine.y, (_copy_node(graph, views[-1], views[-1].inputs[0]),)))
    expressions = FoldExpressions(
        affine.region, shares=(FoldShare(linear, "output", a, b, *_written_constants(linear, made), bool(views)),)
    )
    return AffineFold(
        tuple(nodes),
        f"folded into {linear.title}",
        affine.y,
        (linear.data_input,),
        (smallest_window(linear),),
        edits,
        expressions,
    )


def _written_constants(linear: ConstantLinear, made: Sequence[gs.Node]) -> tuple[gs.Constant, gs.Constant | None]:
    """Return weight and bias of a linear op as `ConstantLinear.write_nodes` wrote it."""
    node = made[0]
    if len(made) > 1:
        bias = made[1].inputs[1]
    elif len(node.inputs) > 2:
        bias = node.inputs[2]
    else:
        bias = None
    return node.inputs[linear.weight], bias


def fold_into_concat(graph: Graph, affine: AffineChain) -> AffineFold | Refusal:
    """Fold the scale and shift of a Concat into the linear ops that compute its parts.

    Returns:
        the fold, or a refusal.
    """
    joint = graph.producer(affine.z)
    rank = len(graph.shape(affine.z) or ())
    if not rank:
        return Refusal("the file does not specify its rank", affine.z.name, kind=RefusalKind.NO_LINEAR_OP)
    if joint is None or joint.op != "Concat" or not is_read_once(graph, affine.z):
        return Refusal("no linear op precedes it", affine.z.name, kind=RefusalKind.NO_LINEAR_OP)
    axis = int(graph.attrs(joint)["axis"]) % rank
    parts: list[ConstantLinear] = []
    for t in joint.inputs:
        linear = constant_linear_of(graph, producing_node(graph, t))
        if not isinstance(linear, Refusal):
            linear = absorb_added_bias(graph, linear)
        if isinstance(linear, Refusal) or linear.out is not t:
            if isinstance(linear, Refusal) and linear.kind is RefusalKind.NO_LINEAR_OP:
                why = "no linear op computes it"
            else:
                why = getattr(linear, "reason", "")
            return Refusal(f"{t.name!r}, an input of Concat {joint.name!r}, can't be scaled: {why}", t.name)
        if not is_read_once(graph, t) or sum(i is t for i in joint.inputs) > 1:
            return Refusal(f"other nodes also read {t.name!r}, an input of Concat {joint.name!r}", t.name)
        if linear.channel_axis(rank) != axis:
            return Refusal(
                f"Concat {joint.name!r} does not concatenate along the output channels of {linear.title}", t.name
            )
        parts.append(linear)
    vectors = [
        channel_vector(values, axis, sum(p.output_channels for p in parts)) for values in (affine.scale, affine.shift)
    ]
    a, b = vectors
    if a is None or b is None:
        return Refusal(f"its scale or shift varies along more axes than that of Concat {joint.name!r}", affine.z.name)
    nodes: list[gs.Node] = []
    joined: list[gs.Tensor] = []
    shares: list[FoldShare] = []
    start = 0
    for part in parts:
        cut = slice(start, start := start + part.output_channels)
        made = part.write_nodes(graph, part.data_input, *part.scale_output(a[cut], b[cut]), part.out, affine.dtype)
        if isinstance(made, Refusal):
            return made
        nodes += made
        shares.append(
            FoldShare(
                part,
                "output",
                a[cut],
                b[cut],
                *_written_constants(part, made),
                start=cut.start,
                whole=len(a),
                index=len(shares),
            )
        )
        joined.append(made[-1].outputs[0])
    nodes.append(graph.make_node("Concat", joined, affine.y, {"axis": axis}))
    leaves = {id(p.data_input): p.data_input for p in parts}
    windows = {id(p.data_input): smallest_window(p) for p in reversed(parts)}
    same = all(smallest_window(p) == windows[id(p.data_input)] for p in parts)
    small = tuple(windows[i] if same else None for i in leaves)
    titles = ", ".join(p.title for p in parts)
    edits = ((affine.y, tuple(nodes)),)
    return AffineFold(
        tuple(nodes),
        f"folded into {titles}",
        affine.y,
        tuple(leaves.values()),
        small,
        edits,
        FoldExpressions(affine.region, shares=tuple(shares)),
    )


def fold_into_next(graph: Graph, affine: AffineChain) -> AffineFold | Refusal:
    """Fold W·V(a·z + b) + c into one linear op of V(z); V is a chain of views, or empty.

    Returns:
        the fold, or a refusal, for example if a convolution pads its input, because the padding gets no shift.
    """
    behind = _linear_behind(graph, affine)
    if isinstance(behind, Refusal):
        return behind
    linear = behind.linear
    if linear.has_padding() and behind.shift.any():
        return Refusal(f"{linear.title} pads its input with zeros, which the shift would have to change", affine.y.name)
    return _fold_next_linear(graph, affine, behind, *linear.scale_input(behind.scale, behind.shift))


def fold_scale_into_next(graph: Graph, affine: AffineChain) -> AffineFold | Refusal:
    """Fold the scale into the next convolution, which pads its input.

    The shift, divided by the scale, remains as one Add.

    Returns:
        the fold, or a refusal.
    """
    behind = _linear_behind(graph, affine)
    if isinstance(behind, Refusal):
        return behind
    # If a scale is 0, the ratio is infinite, and the fold is refused below.
    with evaluator.silence_numpy():
        ratio = affine.shift / affine.scale
    if not is_representable(affine.dtype, ratio):
        return Refusal(
            f"its shift divided by its scale, which may be 0, is out of range for {affine.dtype.name}", affine.y.name
        )
    shift = graph.add_constant(f"{affine.y.name}_shift", _trim_leading_axes(ratio), affine.dtype)
    added = graph.make_node("Add", [affine.z, shift], affine.y)
    scaled = behind.linear.scale_input(behind.scale, np.zeros_like(behind.scale))
    return _fold_next_linear(graph, affine, behind, *scaled, added)


def write_scale_and_shift(graph: Graph, affine: AffineChain) -> AffineFold | Refusal:
    """Write the scale and shift as one Mul and one Add. Omit a node that has no effect.

    Returns:
        the fold, or a refusal if a constant does not fit into the dtype.
    """
    if not is_representable(affine.dtype, affine.scale, affine.shift):
        return Refusal(f"its scale or shift is out of range for {affine.dtype.name}", affine.y.name)
    nodes: list[gs.Node] = []
    constants: dict[str, tuple[gs.Constant, ...]] = {}
    t = affine.z
    for op, value, neutral, name in (("Mul", affine.scale, 1.0, "scale"), ("Add", affine.shift, 0.0, "shift")):
        if (value == neutral).all() and (nodes or op == "Mul"):
            continue
        constants[name] = (graph.add_constant(f"{affine.y.name}_{name}", _trim_leading_axes(value), affine.dtype),)
        nodes.append(graph.make_node(op, [t, *constants[name]], affine.y))
        t = nodes[-1].outputs[0]
    if len(nodes) > 1:
        became = " and ".join(n.op for n in nodes) + " (one scale and shift)"
    else:
        became = f"one {nodes[0].op}"
    expressions = FoldExpressions(affine.region, **constants)
    remains = tuple(n.op for n in nodes)
    return AffineFold(
        tuple(nodes), became, affine.y, (affine.z,), (None,), ((affine.y, tuple(nodes)),), expressions, remains
    )


def neutralize_statistics(graph: Graph, affine: AffineChain, node: gs.Node) -> AffineFold | Refusal:
    """Fold the statistics of the BatchNormalization ``node`` into its own scale and bias.

    Returns:
        the fold, or a refusal if a constant does not fit into the dtype.
    """
    channels = affine.shift.shape[1:2] or (1,)
    size = graph.known_value(node.inputs[1])
    a, b = (channel_vector(v, 1, size.size if size is not None else channels[0]) for v in (affine.scale, affine.shift))
    if a is None or b is None or not is_representable(affine.dtype, a, b):
        return Refusal(f"its scale or shift is out of range for {affine.dtype.name}", affine.y.name)
    vectors = zip(("scale", "shift", "mean", "variance"), (a, b, np.zeros_like(a), np.ones_like(a)), strict=True)
    inputs = [graph.add_constant(f"{affine.y.name}_{name}", value, affine.dtype) for name, value in vectors]
    made = graph.make_node("BatchNormalization", [affine.z, *inputs], affine.y, {"epsilon": 0.0})
    became = "BatchNormalization (one scale and shift)"
    expressions = FoldExpressions(affine.region, scale=(inputs[0],), shift=(inputs[1],))
    return AffineFold((made,), became, affine.y, (affine.z,), (None,), ((affine.y, (made,)),), expressions, (made.op,))


def has_neutral_statistics(graph: Graph, node: gs.Node) -> bool:
    """Return True if the node has mean 0, variance 1 and epsilon 0, so that it is already a scale and shift."""
    mean, variance = (graph.known_value(t) for t in node.inputs[3:5])
    if mean is None or variance is None or graph.attrs(node).get("epsilon", 1e-5) != 0.0:
        return False
    return not mean.any() and bool((variance == 1).all())


def smallest_window(linear: ConstantLinear) -> tuple[int, ...] | None:
    """Compute the smallest input of a convolution that gives three outputs along each axis: two borders and the middle.

    Returns:
        the shape (2, channels, …). None for other ops, for automatic padding, or if the padding is larger than the
        input.
    """
    if linear.node.op not in ("Conv", "ConvTranspose") or str(linear.attrs.get("auto_pad", "NOTSET")) not in (
        "NOTSET",
        "b'NOTSET'",
    ):
        return None
    kernel = linear.w.shape[2:]
    axes = linear.w.ndim - 2
    if linear.node.op == "ConvTranspose":
        return (2, linear.input_channels, *[3] * axes)
    strides, dilations = (linear.attrs.get(name) or [1] * axes for name in ("strides", "dilations"))
    pads = linear.attrs.get("pads") or [0] * (2 * axes)
    sizes = [
        2 * s + d * (k - 1) + 1 - pads[i] - pads[i + axes]
        for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True))
    ]
    if min(sizes, default=1) > 0:
        return (2, linear.input_channels, *sizes)
    return None


# ------------------------------------------------------------------ next linear op


@dataclass(frozen=True)
class _NextLinear:
    """Linear op after a scale and shift.

    Attributes:
        views: views between the scale and the op.
        scale, shift: vectors over the input channels of the op.
    """

    linear: ConstantLinear
    views: list[gs.Node]
    scale: np.ndarray
    shift: np.ndarray


def _linear_behind(graph: Graph, affine: AffineChain) -> _NextLinear | Refusal:
    """Find the linear op that is the only reader of a scale and shift, possibly through views."""
    t, views = views_below(graph, affine.y)
    reading = value_readers(graph, t)
    if graph.is_output(t) or graph.is_output(affine.y) or len(reading) != 1:
        return Refusal("it is not followed by exactly one linear op", affine.y.name, kind=RefusalKind.NO_LINEAR_OP)
    # Large weights are not read in vain.
    if reading[0].op == "Conv" and reading[0].inputs[0] is t and not views and _varies_by_place(graph, affine):
        return _by_place_refusal(affine, title_of(reading[0]))
    linear = constant_linear_of(graph, reading[0])
    if isinstance(linear, Refusal):
        none = linear.kind is RefusalKind.NO_LINEAR_OP
        return Refusal(
            "it is not followed by exactly one linear op" if none else linear.reason, affine.y.name, kind=linear.kind
        )
    if linear.data_input is not t:
        return Refusal(f"it is the weight or bias of {linear.title}", affine.y.name)
    linear = absorb_added_bias(graph, linear)
    scale = input_channel_vector(graph, affine.scale, affine.y, t, linear)
    shift = input_channel_vector(graph, affine.shift, affine.y, t, linear)
    if scale is None or shift is None:
        return _by_place_refusal(affine, linear.title)
    return _NextLinear(linear, views, scale, shift)


def _varies_by_place(graph: Graph, affine: AffineChain) -> bool:
    """Return True if a scale or shift of a convolution's input varies along another axis than its channels."""
    shape = graph.shape(affine.y)
    if shape is None:
        return False
    parts = (affine.scale, affine.shift)
    return any(n > 1 and len(shape) - part.ndim + axis != 1 for part in parts for axis, n in enumerate(part.shape))


def _by_place_refusal(affine: AffineChain, title: str) -> Refusal:
    reason = f"its scale or shift varies along more axes than the input channels of {title}"
    return Refusal(reason, affine.y.name)


def _fold_next_linear(
    graph: Graph,
    affine: AffineChain,
    behind: _NextLinear,
    w: np.ndarray,
    c: np.ndarray,
    added: gs.Node | None = None,
) -> AffineFold | Refusal:
    """Write the linear op with the weight ``w`` and the bias ``c``.

    Args:
        added: the Add that keeps the shift, if only the scale is folded.
    """
    linear = behind.linear
    source = affine.z if added is None else added.outputs[0]
    copies = _copy_views(graph, behind.views, source)
    made = linear.write_nodes(graph, copies[-1].outputs[0] if copies else source, w, c, linear.out, affine.dtype)
    if isinstance(made, Refusal):
        return made
    nodes = (*(() if added is None else (added,)), *copies, *made)
    # Nodes that read the shape of a removed tensor read the equal shape of z instead.
    shapes: list[Edit] = []
    for reader in (r for r in graph.consumers(affine.y) if r.op in ("Shape", "Size")):
        shapes.append((reader.outputs[0], (_copy_node(graph, reader, affine.z),)))
    small = None if behind.views else smallest_window(linear)
    if added is None:
        became = f"folded into the following {linear.title}"
    else:
        became = f"its scale folded into the following {linear.title}, its shift written as one Add"
    share = FoldShare(
        linear,
        "input" if added is None else "scale",
        behind.scale,
        behind.shift,
        *_written_constants(linear, made),
        bool(behind.views),
    )
    expressions = FoldExpressions(affine.region, ratio=() if added is None else (added.inputs[1],), shares=(share,))
    remains = () if added is None else (added.op,)
    return AffineFold(
        nodes, became, linear.out, (affine.z,), (small,), (*shapes, (linear.out, nodes)), expressions, remains
    )


def _copy_node(graph: Graph, node: gs.Node, data: gs.Tensor) -> gs.Node:
    return graph.make_node(node.op, [data, *node.inputs[1:]], node.outputs[0], node.attrs)


def _copy_views(graph: Graph, views: Sequence[gs.Node], data: gs.Tensor) -> list[gs.Node]:
    copies: list[gs.Node] = []
    for view in views:
        copies.append(_copy_node(graph, view, data))
        data = copies[-1].outputs[0]
    return copies


def _trim_leading_axes(values: np.ndarray) -> np.ndarray:
    """Remove leading axes of size 1, which broadcasting restores."""
    shape = values.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return values.reshape(shape)
