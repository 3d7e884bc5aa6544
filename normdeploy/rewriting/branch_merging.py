"""Replace a sum of parallel branches of one input by one convolution.

RepVGG, MobileOne and FastViT call this reparameterization:

    (W₁·x + c₁) ± (W₂·x + c₂) = (P₁W₁ ± P₂W₂)·x + (c₁ ± c₂)          (Ding et al., 2021, arXiv:2101.03697)
    (W·x + c) ± (a·x + b)     = (W ± P·diag(a))·x + (c ± b)

P embeds a smaller kernel into a larger kernel, with zeros around it, if both read the same places of x. Tap t of the
smaller kernel reads the same place as tap t + o of the larger kernel. The offset o is (pad of the larger − pad of the
smaller)/dilation. Both convolutions must have equally many outputs. a·x + b is a convolution of one tap. Branches are
merged in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..forms import nan_visibility
from ..forms.batch_norm import smallest_window
from ..forms.channel_views import is_read_once
from ..forms.constant_linear import ConstantLinear, channel_vector, constant_linear_of
from ..graphs.graph import Graph, value_inputs
from ..graphs.region import Refusal, RefusedError
from ..recognition.affine_chains import AffineChain, measure_affine
from ..storage.onnx_domains import is_standard
from .branch_expressions import BranchExpression, MergedBranchExpressions

# Maximum number of nodes of a scale and shift
_LONGEST = 8
_SCALES = ("BatchNormalization", "Mul", "Add", "Sub", "Div", "Neg", "Identity")


@dataclass(frozen=True)
class ParallelBranch:
    """Branch of a sum: a convolution, or a scale and shift of its input.

    Attributes:
        out: the branch's result.
        sign: 1 or −1.
        linear: the convolution; None for a scale and shift.
        chain: the scale and shift; None for a convolution.
        scale: per-channel factors if the branch is a scale and shift; empty for a convolution.
        shift: per-channel summands if the branch is a scale and shift; empty for a convolution.
    """

    out: gs.Tensor
    sign: int
    linear: ConstantLinear | None
    chain: AffineChain | None
    scale: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class BranchMerge:
    """Nodes of the convolution that computes ``old`` from ``data``.

    Attributes:
        nodes: the new nodes.
        became: description of the result.
        old: the sum.
        data: the input of all branches.
        window: shape of the smallest input that exercises the whole kernel; None if there is none.
        expressions: expressions of weight and bias.
    """

    nodes: tuple[gs.Node, ...]
    became: str
    old: gs.Tensor
    data: gs.Tensor
    window: tuple[int, ...] | None
    expressions: MergedBranchExpressions


def parallel_branches(graph: Graph, node: gs.Node) -> tuple[ParallelBranch, ParallelBranch] | None:
    """Match the two branches of one input that ``node`` adds; at least one is a convolution.

    Returns:
        both branches; None if ``node`` adds something else.
    """
    if node.op not in ("Add", "Sub") or not is_standard(node) or node.inputs[0] is node.inputs[1]:
        return None
    producers = [graph.producer(t) for t in node.inputs]
    if any(made is None or made.op not in ("Conv", *_SCALES) for made in producers):
        return None
    if len({id(made.inputs[0]) for made in producers if made is not None and made.op == "Conv"}) != 1:
        # The branches do not match. This returns before the weights are read.
        return None
    linears = [
        constant_linear_of(graph, made) if made is not None and made.op == "Conv" else None for made in producers
    ]
    convs = [v if isinstance(v, ConstantLinear) else None for v in linears]
    first = next((c for c in convs if c is not None), None)
    if first is None:
        return None
    parts: list[ParallelBranch] = []
    for i, (t, conv) in enumerate(zip(node.inputs, convs, strict=True)):
        if node.op == "Sub" and i == 1:
            sign = -1
        else:
            sign = 1
        if conv is not None and conv.data_input is first.data_input:
            parts.append(ParallelBranch(t, sign, conv, None, np.zeros(0), np.zeros(0)))
            continue
        chain = _affine_chain_to(graph, t, first.data_input)
        if chain is None:
            return None
        vectors = [channel_vector(v, 1, first.input_channels) for v in (chain.scale, chain.shift)]
        if vectors[0] is None or vectors[1] is None:
            return None
        parts.append(ParallelBranch(t, sign, None, chain, vectors[0], vectors[1]))
    return parts[0], parts[1]


def _affine_chain_to(graph: Graph, t: gs.Tensor, x: gs.Tensor) -> AffineChain | None:
    """Return the scale and shift from ``x`` to ``t``; None if there are other nodes between them, or no nodes."""
    end = t
    for _ in range(_LONGEST):
        node = graph.producer(t)
        if node is None:
            data = []
        else:
            data = [i for i in value_inputs(node) if not graph.is_shape_valued(i)]
        if node is None or len(data) != 1 or node.op not in _SCALES:
            return None
        t = data[0]
        if t is x:
            measured = measure_affine(graph, x, end)
            if isinstance(measured, AffineChain):
                return measured
            return None
    return None


def merge_branches(graph: Graph, node: gs.Node, parts: tuple[ParallelBranch, ParallelBranch]) -> BranchMerge | Refusal:
    """Merge two branches into one convolution.

    Returns:
        the merge, or the reason why it is not possible.
    """
    y = node.outputs[0]
    dtype = graph.dtype(node.outputs[0])
    for part in parts:
        if not is_read_once(graph, part.out):
            return Refusal(f"other nodes also read {part.out.name!r}, one of two parallel branches", part.out.name)
        if part.linear is not None and part.linear.shared > 1:
            return Refusal(f"the weight of {part.linear.title} would be stored an additional time", part.out.name)
    reason = ""
    for frame, other in (parts, parts[::-1]):
        if frame.linear is None:
            continue
        try:
            at = kernel_offset(frame.linear, other)
        except RefusedError as error:
            reason = str(error)
            continue
        if dtype is None:
            return Refusal(f"the type of {y.name!r} is unknown", y.name)
        small, shift = branch_weight(frame.linear, other)
        w = frame.sign * frame.linear.w
        cut = tuple(slice(o, o + n) for o, n in zip(at, small.shape[2:], strict=True))
        w[(slice(None), slice(None), *cut)] += other.sign * small
        hider = nan_visibility.find_hiding_op(graph, y, w, frame.linear.groups)
        if hider is not None:
            return Refusal(
                "if the branches are infinite with opposite signs, their sum is NaN; merged, it would be "
                f"an infinity, which {hider.op} hides",
                y.name,
            )
        c = frame.sign * np.broadcast_to(frame.linear.c, frame.linear.output_channels) + other.sign * shift
        made = frame.linear.write_nodes(graph, frame.linear.data_input, w, c, y, dtype)
        if isinstance(made, Refusal):
            return made
        bias = made[0].inputs[2] if len(made[0].inputs) > 2 else None
        none = (0,) * len(at)
        told = tuple(
            BranchExpression(p.sign, p.linear, p.chain.region if p.chain else None, none if p is frame else at)
            for p in (frame, other)
        )
        expressions = MergedBranchExpressions(told, frame.linear, made[0].inputs[1], bias)
        became = f"merged with its parallel branches into {frame.linear.title}"
        return BranchMerge(tuple(made), became, y, frame.linear.data_input, smallest_window(frame.linear), expressions)
    return Refusal(reason, y.name)


def branch_weight(frame: ConstantLinear, part: ParallelBranch) -> tuple[np.ndarray, np.ndarray]:
    """Compute weight and bias of a branch as a convolution with the groups of ``frame``.

    Args:
        frame: the convolution of the other branch, into whose kernel this branch's kernel is embedded.
        part: the branch.

    Returns:
        weight in the layout of Conv, and bias (outputs,).
    """
    if part.linear is not None:
        return part.linear.w, np.broadcast_to(part.linear.c, part.linear.output_channels)
    inputs = frame.w.shape[1]
    w = np.zeros((frame.output_channels, inputs))
    w[np.arange(frame.output_channels), np.arange(frame.output_channels) % inputs] = part.scale
    return w.reshape(*w.shape, *[1] * (frame.w.ndim - 2)), part.shift


def kernel_offset(frame: ConstantLinear, part: ParallelBranch) -> tuple[int, ...]:
    """Find the start of a branch's kernel in the kernel of ``frame``.

    Returns:
        the offset along each spatial axis.

    Raises:
        RefusedError: the branch's kernel does not fit into the kernel of ``frame``.
    """
    other = part.linear
    if frame.w.ndim < 3:
        raise RefusedError("it has no spatial axes")
    if other is None and frame.output_channels != frame.input_channels:
        raise RefusedError(
            f"{frame.title} has {frame.input_channels} input channels and {frame.output_channels} output "
            "channels, but its parallel branch does not change the number of channels"
        )
    if any(
        str(v.attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "b'NOTSET'") for v in (frame, other) if v is not None
    ):
        raise RefusedError(f"{frame.title} or its parallel branch uses auto_pad")
    if other is not None and (other.groups != frame.groups or other.w.shape[:2] != frame.w.shape[:2]):
        raise RefusedError(f"{frame.title} and the parallel {other.title} differ in groups or channels")
    axes = frame.w.ndim - 2
    places = []
    for i in range(axes):
        stride, dilation, begin, end, kernel = _axis_attributes(frame, i)
        own = (1, 1, 0, 0, 1) if other is None else _axis_attributes(other, i)
        if other is None:
            beside = "its parallel branch"
        else:
            beside = f"the parallel {other.title}"
        if own[0] != stride:
            raise RefusedError(f"{frame.title} has stride {stride}, {beside} has {own[0]}")
        if own[1] != dilation and own[4] > 1:
            raise RefusedError(f"{frame.title} has dilation {dilation}, {beside} has {own[1]}")
        at, rest = divmod(begin - own[2], dilation)
        if rest or at < 0 or at + own[4] > kernel or end - own[3] != (kernel - own[4] - at) * dilation:
            raise RefusedError(f"the paddings of {frame.title} and {beside} do not align")
        places.append(at)
    return tuple(places)


def _axis_attributes(linear: ConstantLinear, i: int) -> tuple[int, int, int, int, int]:
    """Return (stride, dilation, padding before, padding after, kernel size) of a convolution along an axis."""
    axes = linear.w.ndim - 2
    kernel = int(linear.w.shape[2 + i])
    stride, dilation = (int((linear.attrs.get(name) or [1] * axes)[i]) for name in ("strides", "dilations"))
    pads = linear.attrs.get("pads") or [0] * (2 * axes)
    return stride, dilation if kernel > 1 else 1, int(pads[i]), int(pads[i + axes]), kernel
