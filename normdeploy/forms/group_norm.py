"""Write group normalization as GroupNormalization (ONNX opset 21, which has one scale and bias value per channel).

    GroupNormalization(x, scale, bias; num_groups, epsilon): x of (N, C, d1, …), mean and variance over C/num_groups
    channels and d1, …

A norm with one group is written as LayerNormalization over all axes but the batch, because TensorRT reads a
GroupNormalization with one group as an instance norm (TensorRT#4756). A norm with as many groups as channels is written
as InstanceNormalization. Neither of these norms splits the channel axis, so other modules write them. A layer norm over
all axes but the batch is written here only if its scale is narrower than its rows and the runtime is slow with such a
scale.

onnxruntime has no kernel for GroupNormalization. It runs the op's function body, which computes the variance as E[x²] −
E[x]² and so loses digits. The other forms are a Reshape to (N, G, −1), then InstanceNormalization, or
LayerNormalization over the last axis, and a Reshape back. Gamma and beta follow as a BatchNormalization with mean 0 and
variance 1, or as Mul and Add. Measurements decide which form a runtime gets (`normdeploy.forms.measured_forms`).

normdeploy's own op GroupNorm (``--fuse portable``) has the form with InstanceNormalization as its body. It is written
if this form is the best, so the norm stays one node and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..norms.norm_table import OURS
from ..option_values import ANY, USUAL
from ..recognition.norm_facts import Norm
from ..recognition.norm_parameters import MeasuredParameter
from .measured_forms import best_form
from .norm_writer import (
    NodeWriter,
    NormForm,
    OpWriter,
    epsilon_for_single,
    format_epsilon,
    inverse_permutation,
    prefers_instances,
    varies_only_along,
)

# Form in the table of measurements -> op that computes the norm
_FORM_OPS = {
    "standard": "GroupNormalization",
    "instance": "InstanceNormalization",
    "layer": "LayerNormalization",
}
# Names of the dtypes for which onnxruntime has a BatchNormalization kernel
_SCALED = ("float32", "float16")


def write_group_norm(
    graph: Graph, norm: Norm, runtime: str, excluded: Container[str] = (), *, own: bool = False
) -> NormForm | Refusal:
    """Write a norm over groups of channels, or a layer norm that the runtime computes faster as InstanceNormalization.

    Such a layer norm normalizes all axes but the batch.

    Args:
        excluded: standard norm ops that must not be written.
        own: True to write normdeploy's own op GroupNorm if its body is the runtime's best form.

    Returns:
        the form, or a refusal with the reason.
    """
    if own and _is_slow_group(norm, runtime, excluded):
        return _write_own(graph, norm, [*range(len(norm.shape))], 1)
    channel = norm.fit.split
    rank = len(norm.shape)
    if (
        prefers_instances(norm, runtime)
        and norm.axes == tuple(range(1, rank))
        and not any(p and p.data for p in (norm.gamma, norm.beta))
    ):
        return _write_regrouped(graph, norm, NodeWriter(graph, norm), 1, list(range(rank)), "InstanceNormalization")
    if channel is None:
        return Refusal("not a group norm", norm.y.name, kind=RefusalKind.OTHER_NORM)
    if not norm.fit.centered:
        return Refusal("it normalizes groups without a mean; no standard op does", norm.y.name)
    size = norm.shape[channel]
    outside = [a for a in range(rank) if a not in norm.axes]
    if not isinstance(size, int) or len(outside) != 1:
        return Refusal("its channels are dynamic, or more than one other axis is not normalized", norm.y.name)
    forms = [form for form, op in _FORM_OPS.items() if op not in excluded] or [*_FORM_OPS]
    if own:
        own = _prefers_own(norm, runtime, forms)
    chosen = best_form("GroupNorm", runtime, norm.dtype.name, forms, epsilon=epsilon_for_single(norm))
    if chosen == "standard" and rank == 2:
        chosen = "layer"
    op = _FORM_OPS[chosen].replace("GroupNormalization", "")
    regrouped = bool(op) and not own
    if not all(_fits_channel_parameter(graph, p, channel, regrouped) for p in (norm.gamma, norm.beta)):
        return Refusal("its scale or shift does not have one value per channel", norm.y.name)
    groups = size // norm.fit.block
    perm = [outside[0], channel, *(a for a in norm.axes if a != channel)]
    if own:
        return _write_own(graph, norm, perm, groups)
    writer = NodeWriter(graph, norm)
    writer.transpose(perm)
    if op:
        result = _write_regrouped(graph, norm, writer, groups, perm, op)
    else:
        scale = writer.parameter(norm.gamma, (size,), 1.0, "scale")
        bias = writer.parameter(norm.beta, (size,), 0.0, "bias")
        writer.add_node("GroupNormalization", scale, bias, num_groups=groups, epsilon=norm.epsilon)
        writer.transpose(inverse_permutation(perm))
        result = writer.make_form(
            "GroupNormalization", f"GroupNormalization(num_groups={groups}, epsilon={format_epsilon(norm.epsilon)})"
        )
    return result


def _prefers_own(norm: Norm, runtime: str, forms: list[str]) -> bool:
    """Check whether the body of the own op GroupNorm is the best of ``forms``. It computes in float32."""
    return (
        norm.dtype.itemsize <= np.dtype(np.float32).itemsize
        and best_form("GroupNorm", runtime, "float32", forms, epsilon=epsilon_for_single(norm)) == "instance"
    )


def _is_slow_group(norm: Norm, runtime: str, excluded: Container[str]) -> bool:
    """Check whether a layer norm is a norm of one group of channels that runs faster as the own op GroupNorm.

    onnxruntime is slow with a LayerNormalization whose scale has fewer elements than a row.
    """
    measured = str(USUAL) if runtime == ANY else runtime
    rank = len(norm.shape)
    return (
        rank > 2
        and norm.axes == tuple(range(1, rank))
        and isinstance(norm.shape[1], int)
        and norm.dtype.itemsize <= np.dtype(np.float32).itemsize
        and all(varies_only_along(p, (1,)) and not (p and p.data) for p in (norm.gamma, norm.beta))
        and "InstanceNormalization" not in excluded
        and prefers_instances(norm, measured)
    )


def _write_own(graph: Graph, norm: Norm, perm: list[int], groups: int) -> NormForm:
    """Write normdeploy's own op GroupNorm; ``perm`` begins with the batch and the channels."""
    channels = (int(norm.shape[perm[1]]),)  # type: ignore[arg-type]
    writer = OpWriter(graph, norm, OURS["GroupNorm"])
    writer.transpose(perm)
    scale = writer.parameter(norm.gamma, channels, 1.0, "scale")
    bias = writer.parameter(norm.beta, channels, 0.0, "bias")
    writer.op(scale, bias, epsilon=norm.epsilon, num_groups=groups)
    writer.transpose(inverse_permutation(perm))
    return writer.done()


def _fits_channel_parameter(graph: Graph, param: MeasuredParameter | None, channel: int, regrouped: bool) -> bool:
    """Return True if the parameter has one value per channel.

    A parameter that is data, not a constant, must be a vector. Such a parameter can't be used in the forms with two
    Reshapes.
    """
    if param is None or not param.data:
        return param is None or set(param.varies) <= {channel}
    return (
        not regrouped
        and param.varies == (channel,)
        and param.tensor is not None
        and len(graph.shape(param.tensor) or ()) == 1
    )


def _write_regrouped(
    graph: Graph, norm: Norm, writer: NodeWriter, groups: int, perm: list[int], op: str
) -> NormForm | Refusal:
    """Write a Reshape to (N, groups, −1), the norm ``op``, a Reshape back, and gamma and beta."""
    dynamic = [a for a in perm[1:] if not isinstance(norm.shape[a], int)]
    if perm != sorted(perm) and dynamic:
        return Refusal("a Reshape can't restore transposed dynamic sizes", norm.y.name)

    def integer_constant(values: list[int], name: str) -> object:
        return graph.add_constant(f"{norm.y.name}_{name}", np.array(values, dtype=np.int64), np.int64)

    start = writer.t
    writer.add_node("Reshape", integer_constant([0, groups, -1], "groups"))
    if op == "LayerNormalization":
        writer.add_node(
            op, graph.add_constant(f"{norm.y.name}_one", np.ones(1), norm.dtype), axis=-1, epsilon=norm.epsilon
        )
    else:
        unit, zero = (
            graph.add_constant(f"{norm.y.name}_{n}", np.full(groups, v), norm.dtype)
            for n, v in (("unit", 1.0), ("zero", 0.0))
        )
        writer.add_node(op, unit, zero, epsilon=norm.epsilon)
    if len(dynamic) <= 1:
        back = [0, *(-1 if a in dynamic else int(norm.shape[a]) for a in perm[1:])]  # type: ignore[arg-type]
        writer.add_node("Reshape", integer_constant(back, "shape"))
    else:
        shape = graph.make_node("Shape", [start], norm.y)
        shape.outputs[0].dtype = np.dtype(np.int64)
        writer.nodes.append(shape)
        writer.add_node("Reshape", shape.outputs[0])
    vectors = [p.value.reshape(-1) for p in (norm.gamma, norm.beta) if p is not None and p.value is not None]
    if op == "InstanceNormalization" and norm.dtype.name in _SCALED and len(vectors) == 2 and len(perm) > 2:
        writer.scale_channels(*(np.broadcast_to(v, int(norm.shape[perm[1]])) for v in vectors))  # type: ignore[arg-type]
        writer.transpose(inverse_permutation(perm))
    else:
        writer.transpose(inverse_permutation(perm))
        writer.affine(norm.gamma, norm.beta)
    over = "axis=-1, " if op == "LayerNormalization" else ""
    return writer.make_form(op, f"Reshape to {groups} groups, {op}({over}epsilon={format_epsilon(norm.epsilon)})")
