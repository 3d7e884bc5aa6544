"""Write layer norms as LayerNormalization (ONNX opset 17) and RMS norms as RMSNormalization (opset 23).

    LayerNormalization(x, scale, bias; axis, epsilon) = (x − mean)/sqrt(variance + epsilon) · scale + bias
    RMSNormalization(x, scale; axis, epsilon)         =  x/sqrt(mean(x²) + epsilon) · scale

Both normalize the axes from ``axis`` to the last axis; scale and bias broadcast to x. If a norm is over other axes, a
Transpose moves them to the end. If a scale or shift varies along an axis that is not normalized (such as one value per
channel of an instance norm), it stays a Mul or an Add.

Without gamma, the scale is a single 1 of shape (1, …, 1). onnxruntime and TensorRT broadcast it, and it fits dynamic
sizes. For a norm over one axis, the shape (1,) is not used. onnxruntime would fuse an Add before such a norm to
SkipLayerNormalization, which then fails (1.31: "Last dimension of gamma and input does not match"). The scale is as
long as the row instead. For a dynamic row, it has shape (1, 1), and onnxruntime does not fuse.

onnxruntime's kernel is several times as fast if scale and shift have one number per element. So they are expanded if
the sizes are static (`normdeploy.forms.measured_forms`).

An unbiased variance needs no separate form, because gamma and epsilon already contain the factor (n − 1)/n
(`normdeploy.recognition.fit_measurement`).
"""

from __future__ import annotations

from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..option_values import OPENVINO
from ..recognition.norm_facts import Norm
from ..recognition.norm_parameters import MeasuredParameter
from .measured_forms import best_form
from .norm_writer import (
    SLOWER,
    NodeWriter,
    NormForm,
    axes_last,
    format_epsilon,
    inverse_permutation,
    needs_full_parameters,
    varies_only_along,
)


def write_layer_norm(graph: Graph, norm: Norm, runtime: str) -> NormForm | Refusal:
    """Write a norm as LayerNormalization, or as RMSNormalization if it is not centered.

    Returns:
        the form, or a refusal with the reason.
    """
    if norm.fit.split is not None:
        return Refusal("it normalizes groups of channels, which a layer norm does not", norm.y.name)
    centered = norm.fit.centered
    op = "LayerNormalization" if centered else "RMSNormalization"
    writer = NodeWriter(graph, norm)
    last = axes_last(norm)
    if (
        last.is_moved
        and best_form(_measured_form_name(norm), runtime, norm.dtype.name, ("standard", "decomposed")) == "decomposed"
    ):
        return Refusal(SLOWER, norm.y.name)
    behind = last.normalized
    # OpenVINO 2026.4 refuses a scale with more axes than are normalized.
    takes_modulation = runtime != OPENVINO
    fits = all(
        varies_only_along(p, behind) or (takes_modulation and _is_modulation(norm, p)) for p in (norm.gamma, norm.beta)
    )
    gamma, beta = (norm.gamma, norm.beta) if fits else (None, None)
    refusal = last.check_data(norm)
    if refusal is not None:
        return refusal
    if not all(_is_broadcastable(graph, norm, p) for p in (norm.gamma, norm.beta)):
        return Refusal("its scale or shift is data that can't be broadcast to its input", norm.y.name)
    writer.transpose(last.perm)
    shape = last.parameter_shape(gamma, beta)
    if shape == [1]:
        row = norm.shape[behind[0]]
        if isinstance(row, int):
            shape = [row]
        else:
            shape = [1] if runtime == OPENVINO else [1, 1]
    if needs_full_parameters(norm, runtime, behind):
        shape = [int(norm.shape[a]) for a in behind]  # type: ignore[arg-type]
    inputs = [writer.parameter(gamma, shape, 1.0, "scale")]
    if beta is not None and centered:
        inputs.append(writer.parameter(beta, shape, 0.0, "bias"))
    from_end = last.axis - len(last.perm)
    writer.add_node(
        op,
        *inputs,
        axis=from_end if len(behind) == 1 and not last.is_moved else last.axis,
        epsilon=norm.epsilon,
    )
    writer.transpose(inverse_permutation(last.perm))
    writer.affine(None if fits else norm.gamma, None if fits and centered else norm.beta)
    return writer.make_form(op, f"{op}(axis={from_end}, epsilon={format_epsilon(norm.epsilon)})")


def _measured_form_name(norm: Norm) -> str:
    """Return the kind under which the table of measured forms lists the norm."""
    if 0 in norm.axes:
        return "BatchLayerNorm"
    return "ChannelLayerNorm"


def _is_broadcastable(graph: Graph, norm: Norm, param: MeasuredParameter | None) -> bool:
    """Return True unless the parameter is data that broadcasts along the wrong axes of x.

    For example, a vector over channels broadcasts along the last axis, which is wrong if the channels are another axis.
    """
    if param is None or not param.data or param.tensor is None:
        return True
    shape = graph.shape(param.tensor) or ()
    rank = len(norm.shape)
    first = rank - len(shape)
    return first <= min(param.varies, default=rank) and all(
        d == 1 or first + i in param.varies for i, d in enumerate(shape)
    )


def _is_modulation(norm: Norm, param: object) -> bool:
    """Return True for data of shape (B, 1, …, D), with values per sample and per element of a row.

    A scale of this shape is allowed, because it broadcasts to x.
    """
    varies = getattr(param, "varies", ())
    between = [a for a in range(1, len(norm.shape)) if a not in norm.axes]
    return bool(getattr(param, "data", False)) and bool(between) and not set(varies) & set(between)
