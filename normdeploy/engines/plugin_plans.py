"""Map a norm's node to a plugin node, or give the reason why no kernel accepts it. `engines.plugin_proof` proves the
plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.region import RefusedError
from ..norms import third_party
from ..norms.norm_table import DOMAIN, OURS, STANDARD
from .plugin_nodes import Given, PluginPlan, PluginPlanner
from .quantized_plans import plan_quantized_norm


def qualified_op_name(node: gs.Node) -> str:
    """Return the op's name, with the domain if it is one of normdeploy's own ops.

    Returns:
        for example "LayerNormalization" or "normdeploy.RMSNorm".
    """
    if node.domain == DOMAIN:
        return f"{node.domain}.{node.op}"
    return str(node.op)


def plan_plugin(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan the plugin nodes for a norm's node, whose op has a plugin (`normdeploy.norms.norm_table`).

    Returns:
        the plan.

    Raises:
        RefusedError: no kernel accepts the norm.
    """
    if node.domain in (None, "", "ai.onnx", DOMAIN):
        return PLANS[qualified_op_name(node)](p, node)
    return _plan_third_party(p, node)


def _plan_third_party(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan the plugin that an installed package provides for its op."""
    guest = third_party.third_party_norm(node.domain, node.op)
    if guest is None or guest.norm.plugin is None:
        raise RefusedError("the package that provides it has no kernel for it")
    plugin = guest.norm.plugin
    attributes = p.graph.attrs(node)
    x = node.inputs[0]
    y = node.outputs[0]
    written = {name: attributes[name] for name in guest.row.attributes} | dict(plugin.attributes)
    parsed = {"plugin_namespace": plugin.namespace, "plugin_version": plugin.version}
    new = p.graph.make_node(plugin.name, node.inputs, y, written | parsed, node.domain)
    told = f"plugin {plugin.name} of the package {guest.row.package}, assumed to compute the same as the body"
    return PluginPlan((node,), (y,), p.data_inputs(x, node.inputs[1:]), (new,), p.known_shape(x), (), told)


# ------------------------------------------------------------------ over trailing dims


def _plan_row_norm(
    p: PluginPlanner, node: gs.Node, name: str, axis: int, given: Given, **attributes: Any
) -> PluginPlan:
    """Plan a norm over the dims of the first input from the negative ``axis`` on."""
    x = node.inputs[0]
    epsilon = p.attributes(node)["epsilon"]
    rank = len(p.known_shape(x))
    parameters, shape = p.expand_parameters(x, range(rank + axis, rank), given)
    free = tuple(range(rank + axis))
    y = node.outputs[0]
    if name == "LayerNorm" and not attributes["ddof"]:
        splits = p.row_splits(shape[:axis], shape[axis:])
    else:
        splits = 0
    if splits:
        first = p.make_statistics_node(x, axis, 1, splits, 0)
        second = p.make_plugin_node("LayerNormApply", [x, first.outputs[0], *parameters], y, epsilon=epsilon, axis=axis)
        return PluginPlan(
            (node,),
            (y,),
            p.data_inputs(x, parameters),
            (first, second),
            shape,
            free,
            "plugins NormStatistics and LayerNormApply",
        )
    new = p.make_plugin_node(name, [x, *parameters], y, epsilon=epsilon, axis=axis, **attributes)
    return PluginPlan((node,), (y,), p.data_inputs(x, parameters), (new,), shape, free, f"plugin {name}")


def _affine_parameters(node: gs.Node, first: int = 1, biased: bool = True) -> Given:
    if not biased:
        return {"scale": (node.inputs[first], 1.0)}
    if len(node.inputs) > first + 1:
        bias = node.inputs[first + 1]
    else:
        bias = None
    return {"scale": (node.inputs[first], 1.0), "bias": (bias, 0.0)}


def _negative_axis(p: PluginPlanner, node: gs.Node) -> int:
    axis = int(p.attributes(node).get("axis", -1))
    rank = len(p.known_shape(node.inputs[0]))
    if not -rank <= axis < rank:
        raise RefusedError(f"its axis {axis} is out of range for an input of rank {rank}")
    if axis < 0:
        return axis
    return axis - rank


def _plan_layer_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    if any(p.is_read(t) for t in node.outputs[1:]):
        raise RefusedError("its mean or its deviation is also read")
    axis = _negative_axis(p, node)
    x = node.inputs[0]
    rank = len(p.known_shape(x))
    if axis == 1 - rank and rank > 2 and all(_varies_by_channel(p, t, rank) for t in node.inputs[1:]):
        return _plan_groups(p, node, 1, _affine_parameters(node), silu=False, channels=False)
    return _plan_row_norm(p, node, "LayerNorm", axis, _affine_parameters(node), ddof=0)


def _varies_by_channel(p: PluginPlanner, t: gs.Tensor, rank: int) -> bool:
    """Check if a parameter over (C, ...) depends on the channel alone. The norm is then a GroupNorm of one group."""
    own = () if t.is_empty() else p.known_shape(t, 0)
    if len(own) >= rank - 1:
        return all(n == 1 for n in own[max(0, len(own) - rank + 2) :])
    return all(n == 1 for n in own)


def _plan_rms_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    if p.graph.dtype(node.inputs[1]) != p.dtype(node.inputs[0]):
        raise RefusedError("its result has its scale's type, not its input's")
    return _plan_row_norm(p, node, "RMSNorm", _negative_axis(p, node), {"scale": (node.inputs[1], 1.0)}, offset=0.0)


def _last_axes_start(p: PluginPlanner, node: gs.Node) -> int:
    rank = len(p.known_shape(node.inputs[0]))
    axes = sorted(a if a < 0 else a - rank for a in p.attributes(node)["axes"])
    if axes != list(range(-len(axes), 0)) or len(axes) > rank:
        raise RefusedError("its axes are not the last ones")
    return axes[0]


def _plan_own_rms_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    return _plan_row_norm(p, node, "RMSNorm", _last_axes_start(p, node), {"scale": (node.inputs[1], 1.0)}, offset=0.0)


def _plan_own_centered(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    return _plan_row_norm(
        p, node, node.op, _last_axes_start(p, node), _affine_parameters(node), ddof=p.attributes(node)["ddof"]
    )


def _plan_residual_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan AddLayerNorm and AddRMSNorm: two inputs of one shape, two outputs."""
    x, residual = node.inputs[:2]
    rank = len(p.known_shape(x))
    if p.known_shape(x) != p.known_shape(residual) or None in p.known_shape(x) or p.dtype(x) != p.dtype(residual):
        raise RefusedError("its two inputs are not known to have the same shape and type")
    layer = OURS[node.op].centered
    if layer:
        given = _affine_parameters(node, 2)
    else:
        given = {"scale": (node.inputs[2], 1.0)}
    parameters, shape = p.expand_parameters(x, [rank - 1], given)
    if layer:
        more = {}
    else:
        more = {"offset": 0.0}
    new = p.make_plugin_node(
        node.op, [x, residual, *parameters], node.outputs[0], epsilon=p.attributes(node)["epsilon"], **more
    )
    if node.outputs[0].is_empty():
        raise RefusedError("only its sum is read")
    outputs = tuple(t for t in node.outputs if not t.is_empty())
    return PluginPlan(
        (node,),
        outputs,
        (x, *p.data_inputs(residual, parameters)),
        (new,),
        shape,
        tuple(range(rank - 1)),
        f"plugin {node.op}",
    )


def _plan_quantizing_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    row = OURS[node.op]
    added = "residual" in row.inputs
    if added or row.is_quantized_by_row:
        axis = -1
    elif row.centered:
        axis = _negative_axis(p, node)
    else:
        axis = _last_axes_start(p, node)
    return plan_quantized_norm(p, node, axis, _affine_parameters(node, 1 + added, biased=row.centered))


def _plan_modulated_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    x, scale, shift = node.inputs
    shape = p.known_shape(x, 2)
    for name, t in (("scale", scale), ("shift", shift)):
        own = p.known_shape(t)
        if own != (shape[0], *(1,) * (len(shape) - 2), shape[-1]) or None in own or p.dtype(t) != p.dtype(x):
            raise RefusedError(f"its {name} is not known to be one row for each sample, in its input's type")
    new = p.make_plugin_node(node.op, [x, scale, shift], node.outputs[0], epsilon=p.attributes(node)["epsilon"])
    return PluginPlan(
        (node,), (node.outputs[0],), (x, scale, shift), (new,), shape, tuple(range(len(shape) - 1)), f"plugin {node.op}"
    )


def _plan_gated_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    x, scale, gate = node.inputs
    if p.known_shape(x) != p.known_shape(gate) or None in p.known_shape(x) or p.dtype(x) != p.dtype(gate):
        raise RefusedError("its input and its gate are not known to have the same shape and type")
    last = len(p.known_shape(x)) - 1
    parameters, shape = p.expand_parameters(x, [last], {"scale": (scale, 1.0)})
    new = p.make_plugin_node(node.op, [x, *parameters, gate], node.outputs[0], epsilon=p.attributes(node)["epsilon"])
    return PluginPlan(
        (node,),
        (node.outputs[0],),
        p.data_inputs(x, (*parameters, gate)),
        (new,),
        shape,
        tuple(range(last)),
        f"plugin {node.op}",
    )


# ------------------------------------------------------------------ by channels


def _plan_group_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    if p.graph.opset < (since := STANDARD["GroupNormalization"].since):
        raise RefusedError(f"GroupNormalization below opset {since} has one scale for each group")
    return _plan_groups(p, node, int(p.attributes(node)["num_groups"]), _affine_parameters(node), silu=False)


def _plan_own_group_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    silu = node.op == "GroupNormSiLU"
    return _plan_groups(p, node, int(p.attributes(node)["num_groups"]), _affine_parameters(node), silu=silu)


def _plan_groups(
    p: PluginPlanner, node: gs.Node, groups: int, given: Given, *, silu: bool, channels: bool = True
) -> PluginPlan:
    x = node.inputs[0]
    y = node.outputs[0]
    epsilon = p.attributes(node)["epsilon"]
    p.known_shape(x, 3)
    parameters, shape = p.expand_parameters(x, [1], given, channels=channels)
    count = shape[1]
    if not isinstance(count, int) or groups < 1 or count % groups:
        raise RefusedError(f"its {count} channels do not divide into {groups} groups")
    old = _include_transposes(p, node)
    last = 0
    free = (0, *range(2, len(shape)))
    splits = p.row_splits((shape[0], groups), (count // groups, *shape[2:]))
    if len(old) == 3:
        last = 1
        x = old[0].inputs[0]
        y = old[2].outputs[0]
        shape, free = (shape[0], *shape[2:], count), tuple(range(len(shape) - 1))
    common = {"epsilon": epsilon, "num_groups": groups, "channels_last": last}
    if splits:
        first = p.make_statistics_node(x, 1, groups, splits, last)
        apply = p.make_plugin_node(
            "GroupNormApply", [x, first.outputs[0], *parameters], y, activation="silu" if silu else "none", **common
        )
        return PluginPlan(
            old,
            (y,),
            p.data_inputs(x, parameters),
            (first, apply),
            shape,
            free,
            "plugins NormStatistics and GroupNormApply",
        )
    name = "GroupNormSiLU" if silu else "GroupNorm"
    return PluginPlan(
        old,
        (y,),
        p.data_inputs(x, parameters),
        (p.make_plugin_node(name, [x, *parameters], y, **common),),
        shape,
        free,
        f"plugin {name}",
    )


def _include_transposes(p: PluginPlanner, node: gs.Node) -> tuple[gs.Node, ...]:
    """Find the Transposes around a node that convert NHWC to NCHW and back.

    Returns:
        the node with its Transposes; the node alone if there are no such Transposes or other nodes read them.
    """
    before = p.graph.producer(node.inputs[0])
    after = p.only_reader(node.outputs[0])
    rank = len(p.known_shape(node.inputs[0]))
    first = [0, rank - 1, *range(1, rank - 1)]
    back = [0, *range(2, rank), 1]
    if before is None or after is None or before.op != "Transpose" or after.op != "Transpose":
        return (node,)
    if (
        p.graph.attrs(before).get("perm") != first
        or p.graph.attrs(after).get("perm") != back
        or not p.only_reader(before.outputs[0])
    ):
        return (node,)
    return (before, node, after)


def _plan_instance_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan InstanceNormalization and ChannelLayerNorm."""
    name = (OURS if node.domain == DOMAIN else STANDARD)[node.op].plugin
    x = node.inputs[0]
    y = node.outputs[0]
    p.known_shape(x, 3)
    parameters, shape = p.expand_parameters(x, [1], _affine_parameters(node), channels=True)
    new = p.make_plugin_node(name, [x, *parameters], y, epsilon=p.attributes(node)["epsilon"])
    return PluginPlan(
        (node,), (y,), p.data_inputs(x, parameters), (new,), shape, (0, *range(2, len(shape))), f"plugin {name}"
    )


def _plan_ada_group_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    x, scale, shift = node.inputs
    attributes = p.attributes(node)
    shape = p.known_shape(x, 3)
    groups, count = int(attributes["num_groups"]), shape[1]
    if not isinstance(count, int) or groups < 1 or count % groups:
        raise RefusedError(f"its {count} channels do not divide into {groups} groups")
    per_channel = (shape[0], count, *(1,) * (len(shape) - 2))
    layouts = [p.known_shape(t) for t in (scale, shift)]
    if any(None in own or own not in (shape, per_channel) for own in layouts) or layouts[0] != layouts[1]:
        raise RefusedError("its scale and its shift are not known to have its input's shape, or (N, C, 1, …)")
    if p.dtype(scale) != p.dtype(x) or p.dtype(shift) != p.dtype(x):
        raise RefusedError("its scale and its shift do not have its input's type")
    y = node.outputs[0]
    spatial = int(layouts[0] != per_channel)
    common = {"epsilon": attributes["epsilon"], "num_groups": groups, "spatial": spatial}
    splits = p.row_splits((shape[0], groups), (count // groups, *shape[2:]))
    new: tuple[gs.Node, ...]
    if splits:
        first = p.make_statistics_node(x, 1, groups, splits, 0)
        activation = "silu" if node.op == "AdaGroupNormSiLU" else "none"
        second = p.make_plugin_node(
            "AdaGroupNormApply", [x, first.outputs[0], scale, shift], y, activation=activation, **common
        )
        new = (first, second)
        became = "plugins NormStatistics and AdaGroupNormApply"
    else:
        new = (p.make_plugin_node(node.op, [x, scale, shift], y, **common),)
        became = f"plugin {node.op}"
    # A spatial scale varies from position to position, so no position is like another.
    free = (0,) if spatial else (0, *range(2, len(shape)))
    return PluginPlan((node,), (y,), (x, scale, shift), new, shape, free, became)


# ------------------------------------------------------------------ scale and shift


def _plan_batch_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    attributes = p.attributes(node)
    values = [v for v in map(p.graph.known_value, node.inputs[1:5]) if v is not None]
    if attributes.get("training_mode", 0) or any(p.is_read(t) for t in node.outputs[1:]):
        raise RefusedError("it is in training mode")
    if len(values) < 4:
        raise RefusedError("its parameters are not constant")
    gamma, beta, mean, variance = (v.reshape(-1) for v in values)
    scale = gamma / np.sqrt(variance + attributes["epsilon"])
    return _make_scale_shift_plan(p, (node,), node.inputs[0], 1, scale, beta - mean * scale)


def plan_scale_shift(p: PluginPlanner, node: gs.Node) -> PluginPlan | None:
    """Plan a Mul and an Add by constants for each channel. Folding a BatchNorm may leave these two nodes.

    Returns:
        the plan, or None if ``node`` does not begin such a pair.
    """
    if node.op != "Mul" or node.domain or len(node.inputs) != 2:
        return None
    add = p.only_reader(node.outputs[0])
    if add is None or add.op != "Add" or p.graph.shape(node.outputs[0]) is None:
        return None
    first = _constant_operand(p, node, None)
    second = _constant_operand(p, add, node.outputs[0])
    if first is None or second is None:
        return None
    (scale, x), shift = first, second[0]
    shape = p.graph.shape(x)
    if shape is None or len(shape) < 2 or max(scale.ndim, shift.ndim) > len(shape):
        return None
    laid = [v.reshape((1,) * (len(shape) - v.ndim) + v.shape) for v in (scale, shift)]
    axes = {a for v in laid for a, n in enumerate(v.shape) if n > 1}
    if axes != {1} or laid[0].size == 1 or laid[1].size not in (1, laid[0].size):
        return None
    channels = laid[0].size
    try:
        return _make_scale_shift_plan(
            p, (node, add), x, 1, laid[0].reshape(-1), np.broadcast_to(laid[1].reshape(-1), (channels,))
        )
    except RefusedError:
        return None


def _constant_operand(p: PluginPlanner, node: gs.Node, data: gs.Tensor | None) -> tuple[np.ndarray, gs.Tensor] | None:
    for own, other in ((node.inputs[1], node.inputs[0]), (node.inputs[0], node.inputs[1])):
        if p.graph.is_constant(own) and not p.graph.is_constant(other) and (data is None or other is data):
            value = p.graph.known_value(own)
            if value is None:
                return None
            return (value, other)
    return None


def _make_scale_shift_plan(
    p: PluginPlanner, old: tuple[gs.Node, ...], x: gs.Tensor, axis: int, scale: np.ndarray, shift: np.ndarray
) -> PluginPlan:
    shape = list(p.known_shape(x, 2))
    dtype = p.dtype(x)
    if shape[axis] not in (None, len(scale)) and isinstance(shape[axis], int):
        raise RefusedError(f"its {shape[axis]} channels have {len(scale)} parameters")
    shape[axis] = len(scale)
    activation, behind = _find_activation(p, old[-1].outputs[0])
    y = (behind or old)[-1].outputs[0]
    if not all(np.array_equal(v, v.astype(dtype).astype(np.float64)) for v in (scale, shift)):
        # Values that were computed here in float64 are rounded once, to float32.
        dtype = np.dtype(np.float32)
    parameters = [p.make_constant(x, name, value, dtype) for name, value in (("scale", scale), ("shift", shift))]
    new = p.make_plugin_node("ScaleShift", [x, *parameters], y, axis=axis, activation=activation)
    free = tuple(a for a in range(len(shape)) if a != axis)
    return PluginPlan((*old, *behind), (y,), (x,), (new,), tuple(shape), free, "plugin ScaleShift")


def _find_activation(p: PluginPlanner, y: gs.Tensor) -> tuple[str, tuple[gs.Node, ...]]:
    """Return the name and the nodes of the activation if only this activation reads ``y``; otherwise "none" and ()."""
    if p.graph.is_output(y):
        readers = []
    else:
        readers = sorted(p.graph.consumers(y), key=p.graph.position_of)
    ops = [n.op for n in readers if not n.domain]
    if ops == ["Relu"]:
        return "relu", (readers[0],)
    if ops == ["Swish"] and p.graph.attrs(readers[0]).get("alpha", 1.0) == 1.0:
        return "silu", (readers[0],)
    if ops == ["Sigmoid", "Mul"] and p.only_reader(readers[0].outputs[0]) is readers[1]:
        return "silu", (readers[0], readers[1])
    return "none", ()


PLANS: dict[str, Callable[[PluginPlanner, gs.Node], PluginPlan]] = {
    "LayerNormalization": _plan_layer_norm,
    "RMSNormalization": _plan_rms_norm,
    "GroupNormalization": _plan_group_norm,
    "InstanceNormalization": _plan_instance_norm,
    "BatchNormalization": _plan_batch_norm,
    f"{DOMAIN}.RMSNorm": _plan_own_rms_norm,
    f"{DOMAIN}.LayerNorm": _plan_own_centered,
    f"{DOMAIN}.StdNorm": _plan_own_centered,
    f"{DOMAIN}.AddLayerNorm": _plan_residual_norm,
    f"{DOMAIN}.AddRMSNorm": _plan_residual_norm,
    f"{DOMAIN}.ModulatedLayerNorm": _plan_modulated_norm,
    f"{DOMAIN}.GatedRMSNorm": _plan_gated_norm,
    f"{DOMAIN}.SigmoidGatedRMSNorm": _plan_gated_norm,
    f"{DOMAIN}.AdaGroupNorm": _plan_ada_group_norm,
    f"{DOMAIN}.AdaGroupNormSiLU": _plan_ada_group_norm,
    f"{DOMAIN}.GroupNorm": _plan_own_group_norm,
    f"{DOMAIN}.GroupNormSiLU": _plan_own_group_norm,
    f"{DOMAIN}.ChannelLayerNorm": _plan_instance_norm,
    **{row.name: _plan_quantizing_norm for row in OURS.values() if row.quantizes},
}
