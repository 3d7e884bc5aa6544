"""Write norms as normdeploy's own ops, which have a function body (`normdeploy.graphs.own_op_functions`).

These ops express norms that no standard node of the file's opset can express.
"""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..norms.norm_table import OURS, STANDARD
from ..recognition.norm_facts import Norm
from ..recognition.norm_fit import Denominator
from ..recognition.norm_parameters import stored_epsilon
from .norm_writer import (
    NormForm,
    OpWriter,
    axes_last,
    inverse_permutation,
    trailing_axis,
    varies_only_along,
)

RMS = STANDARD["RMSNormalization"].since


def portable_op_of(graph: Graph, norm: Norm) -> str | None:
    """Choose one of normdeploy's own ops for a norm.

    Returns:
        the op that `write_portable_norm` writes. None if a standard node expresses the norm, or if none of normdeploy's
        own ops does.
    """
    if norm.fit.split is not None:
        return None
    if norm.fit.clamped:
        # The number that clamps the length must be exact. A measured number would define another function.
        if stored_epsilon(graph, norm.region, norm.epsilon) is None:
            return None
        if norm.fit.denominator is Denominator.CLAMPED_ROOT:
            return "ClampedRMSNorm"
        return "L2Norm"
    if norm.fit.outside:
        if norm.fit.centered:
            return "StdNorm"
        return "OuterRMSNorm"
    if norm.fit.keeps_mean:
        return "SimpleNorm"
    if norm.ddof:
        return "LayerNorm"
    if _is_over_channels(norm):
        return "ChannelLayerNorm"
    if not norm.fit.centered and graph.opset < RMS:
        return "RMSNorm"
    return None


def write_portable_norm(graph: Graph, norm: Norm, op: str) -> NormForm | Refusal:
    """Write ``norm`` as ``op``, which `portable_op_of` returned.

    Returns:
        the form, or a refusal if scale or shift is data along a transposed axis.
    """
    writer = OpWriter(graph, norm, OURS[op])
    if op == "ChannelLayerNorm":
        return _write_channel_layer_norm(norm, writer)
    # The kernel of an op reads contiguous rows, so the normalized axes must be last. An op without a kernel runs as its
    # body, which reduces over any axes.
    if not OURS[op].plugin:
        return _write_norm_over_any_axes(norm, writer)
    return _write_norm_over_axes(norm, writer)


def _is_over_channels(norm: Norm) -> bool:
    """Return True for a norm over only axis 1 of (N, C, …). As a standard node, it would need Transposes around it."""
    fixed = all(p is None or (varies_only_along(p, (1,)) and not p.data) for p in (norm.gamma, norm.beta))
    return (
        norm.fit.centered
        and norm.axes == (1,)
        and trailing_axis(norm) is None
        and isinstance(norm.shape[1], int)
        and fixed
    )


def _write_channel_layer_norm(norm: Norm, writer: OpWriter) -> NormForm:
    """Write a norm over axis 1 of (N, C, …), with scale and bias of shape (C,)."""
    channels = (int(norm.shape[1] or 0),)
    scale = writer.parameter(norm.gamma, channels, 1.0, "scale")
    bias = writer.parameter(norm.beta, channels, 0.0, "bias")
    writer.op(scale, bias, epsilon=norm.epsilon, stash_type=writer.stash_type)
    return writer.done()


def _write_norm_over_any_axes(norm: Norm, writer: OpWriter) -> NormForm:
    """Write a norm without a bias over any axes, with a scale that broadcasts to x without a Transpose."""
    shape = [1]
    if norm.gamma is not None and norm.gamma.value is not None:
        sizes = list(norm.gamma.value.shape)
        shape = sizes[next((i for i, n in enumerate(sizes) if n > 1), len(sizes)) :] or [1]
    scale = writer.parameter(norm.gamma, shape, 1.0, "scale")
    axes = [a - len(norm.shape) for a in norm.axes]
    if "ddof" in writer.row.attributes:
        attributes = {"ddof": norm.ddof}
    else:
        attributes = {}
    writer.op(scale, axes=axes, epsilon=norm.epsilon, stash_type=writer.stash_type, **attributes)
    writer.affine(None, norm.beta)
    return writer.done()


def _write_norm_over_axes(norm: Norm, writer: OpWriter) -> NormForm | Refusal:
    """Write a norm over its trailing axes, with scale and bias of the normalized shape.

    If the norm is over other axes, Transposes move them to the end.
    """
    last = axes_last(norm)
    fits = varies_only_along(norm.gamma, last.normalized) and varies_only_along(norm.beta, last.normalized)
    gamma, beta = (norm.gamma, norm.beta) if fits else (None, None)
    refusal = last.check_data(norm)
    if refusal is not None:
        return refusal
    writer.transpose(last.perm)
    shape = last.parameter_shape(gamma, beta)
    inputs = [writer.parameter(gamma, shape, 1.0, "scale")]
    axes = list(range(last.axis - len(last.perm), 0))
    attrs = {"axes": axes, "epsilon": norm.epsilon, "stash_type": writer.stash_type}
    if norm.fit.centered:
        inputs.append(writer.parameter(beta, shape, 0.0, "bias"))
        attrs["ddof"] = norm.ddof
    writer.op(*inputs, **attrs)
    writer.transpose(inverse_permutation(last.perm))
    writer.affine(None if fits else norm.gamma, None if fits and norm.fit.centered else norm.beta)
    return writer.done()
