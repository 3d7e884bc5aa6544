"""Round weights so that the error of the layer's products is small (GPTQ).

Let x be the inputs of the calibration samples, rounded as in the file, and H = E[x·xᵀ]. For the rounded weight Ŵ, the
error of a layer's products is tr((W − Ŵ)ᵀ·H·(W − Ŵ)). GPTQ (Frantar et al., arXiv 2210.17323) rounds the rows of W one
after the other. It starts with the rows that multiply the largest inputs. Before it rounds a row, it adds a correction
for the errors of the rows that are already rounded. With H = (I + U)·D·(I + U)ᵀ and U strictly upper triangular, the
rounded rows are

    ŵ_k = round(w_k + Σ_{j<k} (w_j − ŵ_j)·U_jk)

This formula is LDLQ. It gives the same numbers as GPTQ, but needs no inverse of H (Chee et al., QuIP, arXiv 2307.13304,
theorem 6). H's diagonal is increased by a share of its mean, which is called damping. There are few samples, and
damping reduces the effect of correlations that occur only in these samples. A convolution is one such product per
group, where x is a window of the convolution's input.

Biases are not changed, except for shifts (`bias_corrections`). A bias could also correct the mean error of its layer
(Nagel et al., arXiv 1906.04721, 4.2). But then `verify` could not compare the biases of the file with the biases of the
model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import numpy_helper

from ..precision.tensor_ranges import Samples
from ..storage.proto_traversal import attribute_values
from ..types import Progress
from .hessian import ConvolutionWindows, LayerInput, SecondMoments, collect_moments
from .layer_groups import LayerCandidate
from .number_formats import CodeFormat, broadcast_scales, quantize_to_codes, round_scales_up, weight_scales
from .qdq_writer import LayerPlan

# Damping as a share of the mean of H's diagonal, multiplied by channels / rows if there are fewer rows than channels.
# The key is False for matrices and True for convolutions. A convolution reads many windows of each sample, so it needs
# less damping.
DAMPING = {False: 0.1, True: 0.01}
# Number of rows of W in a block. One matrix product per block adds the corrections for all rows of earlier blocks.
_BLOCK = 128
# Minimum number of rows of samples; H can't be estimated from fewer rows.
_FEWEST = 16
# Shares of a block's largest weight. Each share is tried as the largest number that the block's scale can represent.
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True)
class _GptqLayer:
    """Layer whose weight is rounded by GPTQ.

    Attributes:
        weight: name of the weight.
        groups: groups of a convolution; 0 for a matrix.
        shape: shape of the weight.
    """

    plan: LayerPlan
    weight: str
    groups: int
    shape: tuple[int, ...]

    @property
    def hessian_size(self) -> int:
        """Return the number of elements of the layer's H."""
        if self.groups:
            return self.groups * math.prod(self.shape[1:]) ** 2
        return max(self.shape) ** 2


def compensate_rounding(
    proto: onnx.ModelProto,
    layers: Sequence[LayerCandidate],
    plans: Mapping[str, LayerPlan],
    samples: Samples,
    progress: Progress | None = None,
) -> dict[str, LayerPlan]:
    """Round the weights of layers by GPTQ.

    The weight of a MatMul, Gemm or Conv is rounded if no other node reads it. The plans of other layers, and of layers
    with fewer than 16 rows of samples, stay unchanged.

    Args:
        plans: plans, by the first result of the layer's node.

    Returns:
        ``plans`` with the codes of the rounded weights.

    Raises:
        InputError: the model does not run on a sample.
    """
    ready: dict[LayerInput, list[_GptqLayer]] = {}
    offsets: dict[LayerInput, np.ndarray] = {}
    for reading, layer in _compensable_layers(proto, layers, plans):
        ready.setdefault(reading, []).append(layer)
        if layer.plan.shift is not None:
            offsets[reading] = layer.plan.shift.offset.astype(np.float32)
    weights = {t.name: t for t in proto.graph.initializer}
    wanted = {r: (max(one.hessian_size for one in group), offsets.get(r)) for r, group in ready.items()}
    done = 0
    made = dict(plans)
    for reading, moments in collect_moments(proto, wanted, samples):
        for layer in ready[reading]:
            if progress is not None:
                progress("round", done, sum(map(len, ready.values())))
            done += 1
            if moments.rows >= _FEWEST:
                stored = numpy_helper.to_array(weights[layer.weight])
                damping = DAMPING[layer.groups > 0]
                made[layer.plan.tensor] = _plan_with_codes(layer.plan, stored, moments, layer.groups, damping)
    return made


def _compensable_layers(
    proto: onnx.ModelProto, layers: Sequence[LayerCandidate], plans: Mapping[str, LayerPlan]
) -> Iterator[tuple[LayerInput, _GptqLayer]]:
    weights = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    nodes = {n.output[0]: n for n in proto.graph.node if n.output}
    readers = Counter(name for n in proto.graph.node for name in n.input)
    for c in layers:
        plan = plans.get(c.plan.tensor)
        if plan is None or c.reason:
            continue
        node = nodes[plan.tensor]
        name = node.input[plan.weight]
        data = node.input[plan.data]
        if readers[name] != 1 or name not in weights:
            continue
        if c.op == "Conv":
            windows = _convolution_windows(node, weights[name], c.groups)
            if windows is not None:
                yield LayerInput(data, plan.step, c.axis, windows), _GptqLayer(plan, name, c.groups, weights[name])
        elif c.op in ("MatMul", "Gemm") and len(weights[name]) == 2 and _is_plain_product(node):
            yield LayerInput(data, plan.step, c.axis), _GptqLayer(plan, name, 0, weights[name])


def _is_plain_product(node: onnx.NodeProto) -> bool:
    attrs = attribute_values(node)
    return all(attrs.get(k, 1) == 1 for k in ("alpha", "beta")) and not attrs.get("transA", 0)


def _convolution_windows(node: onnx.NodeProto, shape: tuple[int, ...], groups: int) -> ConvolutionWindows | None:
    """Read the window attributes of a Conv; None if the pads depend on the size of the input."""
    attrs = attribute_values(node)
    rank = len(shape) - 2
    if attrs.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    ones = [1] * rank
    zeros = [0] * 2 * rank
    strides = tuple(attrs.get("strides", ones))
    dilations = tuple(attrs.get("dilations", ones))
    return ConvolutionWindows(shape[2:], strides, dilations, tuple(attrs.get("pads", zeros)), groups)


def carry_over_codes(before: onnx.ModelProto, plan: LayerPlan, now: onnx.ModelProto, bare: LayerPlan) -> LayerPlan:
    """Transfer the plan of a layer to the same layer in another copy of the model.

    Args:
        before: model for which ``plan`` was made.
        now: other copy of the model. ``bare`` is the plan of the layer in this copy, without steps.

    Returns:
        ``bare`` with the step, scales and shift of ``plan``. If both copies have the same weight, the result has the
        codes of ``plan`` too.
    """
    weights = []
    for proto, one in ((before, plan), (now, bare)):
        node = next(n for n in proto.graph.node if n.output and n.output[0] == one.tensor)
        stored = next(t for t in proto.graph.initializer if t.name == node.input[one.weight])
        weights.append(numpy_helper.to_array(stored))
    made = replace(bare, step=plan.step, dynamic=plan.dynamic, scales=plan.scales, shift=plan.shift, least=plan.least)
    if not np.array_equal(*weights):
        return made
    return replace(made, stored=plan.stored)


def _plan_with_codes(
    plan: LayerPlan, stored: np.ndarray, moments: SecondMoments, groups: int, damping: float
) -> LayerPlan:
    """Round the weight of one layer.

    If the H of a group can't be factored, for example because the group's channels are always 0, the group's weights
    are rounded to the nearest codes.

    Args:
        groups: groups of a convolution; 0 for a matrix.
        damping: share of the mean of H's diagonal.

    Returns:
        ``plan`` with codes and scales; ``plan`` itself if no H can be factored.
    """
    # Convolutions, and transposed matrices, have their outputs on the first axis of the weight.
    first = groups > 0 or not plan.has_channels_first
    if first:
        across = stored.reshape(max(groups, 1), -1, moments.origin.shape[-1]).swapaxes(1, 2)
    else:
        across = stored[None]
    share = damping * max(1.0, across.shape[1] / moments.rows)
    axis = None if plan.axis is None else 0 if plan.block else 1
    made = []
    feedbacks = 0
    least = np.split(plan.least, len(across)) if np.ndim(plan.least) else [plan.least] * len(across)
    # [channels, outputs]
    for w, h, floor in zip(across, moments.hessian(), least, strict=True):
        scales = round_scales_up(
            np.maximum(shrink_scales(w, np.diag(h), axis, plan.form, plan.block), floor), plan.scales
        )
        wide = np.broadcast_to(broadcast_scales(scales, w.shape, axis, plan.block), w.shape)
        feedback = factor_feedback(h, share)
        feedbacks += feedback is not None
        made.append(
            (
                quantize_to_codes(w, wide, plan.form)
                if feedback is None
                else round_with_feedback(w, wide, feedback, plan.form),
                scales,
            )
        )
    if not feedbacks:
        return plan
    q, scales = (np.stack(parts) for parts in zip(*made, strict=True))
    if first:
        q = q.swapaxes(1, 2)
        scales = scales.swapaxes(1, 2) if plan.block else scales
    if plan.block:
        scales = np.ascontiguousarray(scales[0])
    else:
        scales = scales.reshape(-1)
    return replace(plan, stored=(np.ascontiguousarray(q).reshape(stored.shape), scales))


def shrink_scales(w: np.ndarray, h: np.ndarray, axis: int | None, form: CodeFormat, block: int) -> np.ndarray:
    """Compute the scales of a weight. A scale may be too small for the largest weights if this lowers the error.

    For blocks, each scale is the scale for the block's largest weight, times one of `SHRINKS`. The share with the
    smallest Σ h_k (w_k − ŵ_k)² is chosen. This is the clipping of AWQ (Lin et al., arXiv 2306.00978), with H's diagonal
    as the weight of the errors.

    Args:
        w: [channels, outputs].
        h: diagonal of H, [channels].
        axis: axis of the scales; None for a single scale.
        block: number of channels that share a scale; 0 to return the scales of `weight_scales` unchanged.

    Returns:
        float32 scales as `weight_scales` lays them out.
    """
    scales = weight_scales(w, axis, form, block)
    if not block or axis != 0:
        return scales
    best = scales
    least = np.full(scales.shape, np.inf)
    for share in SHRINKS:
        tried = (scales * np.float32(share)).astype(np.float32)
        wide = broadcast_scales(tried, w.shape, axis, block)
        off = h[:, None] * (quantize_to_codes(w, wide, form).astype(np.float32) * wide - w) ** 2
        error = off.reshape(len(w) // block, block, -1).sum(1)
        best = np.where(error < least, tried, best)
        least = np.minimum(error, least)
    return np.asarray(best, np.float32)


def factor_feedback(h: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Factor H = (I + U)·D·(I + U)ᵀ for rounding with feedback.

    Args:
        h: H, [channels, channels].
        share: share of the mean of H's diagonal that is added to the diagonal.

    Returns:
        the order of the rows, with the largest diagonal element first, and float32 I + U in this order. None if H can't
        be factored.
    """
    diagonal = np.diag(h).copy()
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    h = h[np.ix_(order, order)]
    h[np.diag_indices(len(h))] += share * mean
    try:
        upper = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        return None
    return order, (upper / np.diag(upper)).astype(np.float32)


def round_with_feedback(
    w: np.ndarray, scales: np.ndarray, feedback: tuple[np.ndarray, np.ndarray], form: CodeFormat
) -> np.ndarray:
    """Round ``w`` row by row, and correct each row for the errors of the rows that were rounded before.

    Args:
        w: [channels, outputs].
        scales: scales, broadcast to the shape of ``w``.
        feedback: order and I + U from `factor_feedback`.

    Returns:
        codes in the shape of ``w``.
    """
    order, unit = feedback
    w = w[order].astype(np.float32)
    scales = scales[order].astype(np.float32)
    lost = np.zeros_like(w)
    q = np.zeros(w.shape, form.dtype)
    for start in range(0, len(w), _BLOCK):
        end = min(start + _BLOCK, len(w))
        wanted = w[start:end] + unit[:start, start:end].T @ lost[:start]
        for k in range(start, end):
            row = wanted[k - start] + unit[start:k, k] @ lost[start:k]
            q[k] = quantize_to_codes(row, scales[k], form)
            lost[k] = w[k] - q[k].astype(np.float32) * scales[k]
    made = np.empty_like(q)
    made[order] = q
    return made
