"""Write instance normalization as InstanceNormalization (ONNX opset 6).

    InstanceNormalization(x, scale, B; epsilon): x of (N, C, d1, …), mean and variance over d1, … for each n and c,
    scale and B of (C,)

LayerNormalization over the same axes normalizes x in the same way. A norm whose scale has one value per channel is
written as InstanceNormalization. If the channels are not axis 1, a Transpose moves them.

onnxruntime's kernel loses digits if the mean is much larger than the deviation: an offset of 1e3 costs three digits.
The separate nodes of a norm lose digits too. LayerNormalization does not lose digits, but takes several times as long.
Measurements decide which op a runtime gets (`normdeploy.forms.measured_forms`).
"""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..recognition.norm_facts import Norm
from ..recognition.norm_parameters import MeasuredParameter
from .measured_forms import best_form
from .norm_writer import (
    NodeWriter,
    NormForm,
    epsilon_for_single,
    format_epsilon,
    inverse_permutation,
    prefers_instances,
)


def write_instance_norm(graph: Graph, norm: Norm, runtime: str) -> NormForm | Refusal:
    """Write a norm over all axes but batch and channels.

    Returns:
        the form, or a refusal with the reason.
    """
    rank = len(norm.shape)
    outside = [a for a in range(rank) if a not in norm.axes]
    chosen = norm.kind == "InstanceNorm" and _has_instances(norm, runtime)
    plain = norm.gamma is None and norm.beta is None and outside == [0, 1] and prefers_instances(norm, runtime)
    if len(outside) != 2 or not (chosen or plain):
        return Refusal("not an instance norm", norm.y.name, kind=RefusalKind.OTHER_NORM)
    batch, channel = outside
    size = norm.shape[channel]
    if not isinstance(size, int) or not all(_is_per_channel(graph, p, channel, size) for p in (norm.gamma, norm.beta)):
        return Refusal("its scale or shift does not have one value per channel", norm.y.name)
    perm = [batch, channel, *norm.axes]
    writer = NodeWriter(graph, norm)
    writer.transpose(perm)
    scale = writer.parameter(norm.gamma, (size,), 1.0, "scale")
    bias = writer.parameter(norm.beta, (size,), 0.0, "bias")
    writer.add_node("InstanceNormalization", scale, bias, epsilon=norm.epsilon)
    writer.transpose(inverse_permutation(perm))
    return writer.make_form("InstanceNormalization", f"InstanceNormalization(epsilon={format_epsilon(norm.epsilon)})")


def _has_instances(norm: Norm, runtime: str) -> bool:
    return (
        best_form("InstanceNorm", runtime, norm.dtype.name, ("standard", "layer"), epsilon=epsilon_for_single(norm))
        == "standard"
    )


def _is_per_channel(graph: Graph, param: MeasuredParameter | None, channel: int, size: int) -> bool:
    """Return True if the parameter has one value per channel; data must already be a vector."""
    if param is None:
        return True
    vector = param.tensor is not None and graph.shape(param.tensor) == (size,)
    return set(param.varies) <= {channel} and (vector or not param.data)
