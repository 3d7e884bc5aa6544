"""Norms as this project's own ops with a function body (`graphs.own_op_functions`): what no standard node of the file's
opset can say."""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN, OLDEST
from ..graphs.region import Refusal
from ..norms.norm_table import OURS, STANDARD
from ..recognition.norm_facts import Norm
from .norm_writer import (
    NodeWriter,
    NormForm,
    OpWriter,
    axes_last_permutation,
    format_epsilon,
    inverse_permutation,
    trailing_axis,
    varies_only_along,
)

RMS = STANDARD["RMSNormalization"].since


def portable_op_of(graph: Graph, norm: Norm) -> str:
    """The op of ours that `write_portable_norm` writes for this norm; "" where a standard node says it, or none."""
    if norm.fit.split is not None:
        return ""
    if norm.fit.clamped:
        return ""
    if norm.fit.outside:
        if norm.fit.centered:
            return "StdNorm"
        return ""
    if norm.ddof:
        return "LayerNorm"
    if _is_over_channels(norm):
        return "ChannelLayerNorm"
    if not norm.fit.centered and graph.opset < RMS:
        return "RMSNorm"
    return ""


def write_by_row(graph: Graph, norm: Norm) -> NormForm | None:
    """The norm as the first op whose row says how it is written, None where none does."""
    for row in OURS.values():
        made = row.form(norm, OpWriter(graph, norm, row)) if row.form is not None else None
        if isinstance(made, NormForm):
            return made
    return None


def _is_over_channels(norm: Norm) -> bool:
    """Whether it is over axis 1 of (N, C, …) alone, where a standard node needs Transposes around it."""
    fixed = all(p is None or (varies_only_along(p, (1,)) and not p.data) for p in (norm.gamma, norm.beta))
    return (
        norm.fit.centered
        and norm.axes == (1,)
        and trailing_axis(norm) is None
        and isinstance(norm.shape[1], int)
        and fixed
    )


def write_portable_norm(graph: Graph, norm: Norm) -> NormForm | Refusal:
    core = portable_op_of(graph, norm)
    if not core:
        return Refusal("no op of ours says it", norm.y.name)
    writer = NodeWriter(graph, norm)
    if core == "ChannelLayerNorm":
        channels = (int(norm.shape[1] or 0),)
        scale = writer.parameter(norm.gamma, channels, 1.0, "scale")
        bias = writer.parameter(norm.beta, channels, 0.0, "bias")
        writer.add_own_op(core, scale, bias, epsilon=norm.epsilon, stash_type=writer.stash_type)
        return writer.make_form(core, f"{DOMAIN}.{core}(epsilon={format_epsilon(norm.epsilon)})", OLDEST)
    axis = trailing_axis(norm)
    perm = list(range(len(norm.shape)))
    if axis is None:
        perm = axes_last_permutation(norm)
        axis = len(perm) - len(norm.axes)
    behind = perm[axis:]
    fits = varies_only_along(norm.gamma, behind) and varies_only_along(norm.beta, behind)
    gamma, beta = (norm.gamma, norm.beta) if fits else (None, None)
    if perm != sorted(perm) and any(p is not None and p.data for p in (norm.gamma, norm.beta)):
        return Refusal("its scale or shift is data along an axis that has to be transposed", norm.y.name)
    writer.transpose(perm)
    shape = [1] * len(behind)
    for p in (gamma, beta):
        if p is not None and p.value is not None:
            shape = [max(n, p.value.shape[a]) for n, a in zip(shape, behind, strict=True)]
    inputs = [writer.parameter(gamma, shape, 1.0, "scale")]
    if norm.fit.centered:
        inputs.append(writer.parameter(beta, shape, 0.0, "bias"))
    axes = [i - len(perm) for i in range(axis, len(perm))]
    attrs = {"axes": axes, "epsilon": norm.epsilon, "stash_type": writer.stash_type}
    if norm.fit.centered:
        attrs["ddof"] = norm.ddof
    writer.add_own_op(core, *inputs, **attrs)
    writer.transpose(inverse_permutation(perm))
    writer.affine(None if fits else norm.gamma, None if fits and norm.fit.centered else norm.beta)
    ddof = f", ddof={norm.ddof}" if norm.fit.centered else ""
    return writer.make_form(core, f"{DOMAIN}.{core}(axes={axes}, epsilon={format_epsilon(norm.epsilon)}{ddof})", OLDEST)
