"""Maps a norm's node to a plugin node, or says why no kernel takes it. `engines.plugin_proof` proves what is planned
here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.region import Refused
from ..norms import guests
from ..norms.ops import DOMAIN, OURS, STANDARD
from .plugin_nodes import Given, Plan, Planner
from .quantized_plans import quantized


def op_name(node: gs.Node) -> str:
    """The op, with the domain of ours."""
    return f"{node.domain}.{node.op}" if node.domain == DOMAIN else str(node.op)


def plan(p: Planner, node: gs.Node) -> Plan:
    """The plugin nodes for a norm's node, whose op is one that has a plugin (`normdeploy.norms.ops`).

    Raises:
        Refused: no kernel takes it.
    """
    return _PLANS[op_name(node)](p, node) if node.domain in (None, "", "ai.onnx", DOMAIN) else _guest(p, node)


def _guest(p: Planner, node: gs.Node) -> Plan:
    """An op of an installed package, by the plugin that it brings."""
    guest = guests.guest(node.domain, node.op)
    if guest is None or guest.norm.plugin is None:
        raise Refused("the package that brings it has no kernel for it")
    plugin, attributes = guest.norm.plugin, p.graph.attrs(node)
    x, y = node.inputs[0], node.outputs[0]
    written = {name: attributes[name] for name in guest.row.attributes} | dict(plugin.attributes)
    parsed = {"plugin_namespace": plugin.namespace, "plugin_version": plugin.version}
    new = p.graph.node(plugin.name, node.inputs, y, written | parsed, node.domain)
    told = f"plugin {plugin.name} of the package {guest.row.package}, taken to compute what the body says"
    return Plan((node,), (y,), p.data(x, node.inputs[1:]), (new,), p.shape(x), (), told)


# ------------------------------------------------------------------ over trailing dims


def _rows(p: Planner, node: gs.Node, name: str, axis: int, given: Given, **attributes: Any) -> Plan:
    """A norm over the dims of the first input from ``axis`` (negative) on."""
    x, epsilon = node.inputs[0], p.attributes(node)["epsilon"]
    rank = len(p.shape(x))
    parameters, shape = p.vectors(x, range(rank + axis, rank), given)
    free, y = tuple(range(rank + axis)), node.outputs[0]
    splits = p.splits(shape[:axis], shape[axis:]) if name == "LayerNorm" and not attributes["ddof"] else 0
    if splits:
        first = p.statistics(x, axis, 1, splits, 0)
        second = p.node("LayerNormApply", [x, first.outputs[0], *parameters], y, epsilon=epsilon, axis=axis)
        return Plan(
            (node,),
            (y,),
            p.data(x, parameters),
            (first, second),
            shape,
            free,
            "plugins NormStatistics and LayerNormApply",
        )
    new = p.node(name, [x, *parameters], y, epsilon=epsilon, axis=axis, **attributes)
    return Plan((node,), (y,), p.data(x, parameters), (new,), shape, free, f"plugin {name}")


def _affine(node: gs.Node, first: int = 1, biased: bool = True) -> Given:
    if not biased:
        return {"scale": (node.inputs[first], 1.0)}
    bias = node.inputs[first + 1] if len(node.inputs) > first + 1 else None
    return {"scale": (node.inputs[first], 1.0), "bias": (bias, 0.0)}


def _axis(p: Planner, node: gs.Node) -> int:
    axis, rank = int(p.attributes(node).get("axis", -1)), len(p.shape(node.inputs[0]))
    if not -rank <= axis < rank:
        raise Refused(f"its axis {axis} is none of an input of rank {rank}")
    return axis if axis < 0 else axis - rank


def _layer_normalization(p: Planner, node: gs.Node) -> Plan:
    if any(p.read(t) for t in node.outputs[1:]):
        raise Refused("its mean or its deviation is read as well")
    axis, x = _axis(p, node), node.inputs[0]
    rank = len(p.shape(x))
    if axis == 1 - rank and rank > 2 and all(_along_channels(p, t, rank) for t in node.inputs[1:]):
        return _groups(p, node, 1, _affine(node), silu=False, channels=False)
    return _rows(p, node, "LayerNorm", axis, _affine(node), ddof=0)


def _along_channels(p: Planner, t: gs.Tensor, rank: int) -> bool:
    """Whether a parameter over (C, ...) varies with the channel alone: the norm is a GroupNorm of one group."""
    own = () if t.is_empty() else p.shape(t, 0)
    return all(n == 1 for n in own[max(0, len(own) - rank + 2) :]) if len(own) >= rank - 1 else all(n == 1 for n in own)


def _rms_normalization(p: Planner, node: gs.Node) -> Plan:
    if p.graph.dtype(node.inputs[1]) != p.dtype(node.inputs[0]):
        raise Refused("its result has the type of its scale, not that of its input")
    return _rows(p, node, "RMSNorm", _axis(p, node), {"scale": (node.inputs[1], 1.0)}, offset=0.0)


def _own_axis(p: Planner, node: gs.Node) -> int:
    rank = len(p.shape(node.inputs[0]))
    axes = sorted(a if a < 0 else a - rank for a in p.attributes(node)["axes"])
    if axes != list(range(-len(axes), 0)) or len(axes) > rank:
        raise Refused("its axes are not the last ones")
    return axes[0]


def _own_rms_norm(p: Planner, node: gs.Node) -> Plan:
    return _rows(p, node, "RMSNorm", _own_axis(p, node), {"scale": (node.inputs[1], 1.0)}, offset=0.0)


def _own_centered(p: Planner, node: gs.Node) -> Plan:
    return _rows(p, node, node.op, _own_axis(p, node), _affine(node), ddof=p.attributes(node)["ddof"])


def _added(p: Planner, node: gs.Node) -> Plan:
    """AddLayerNorm and AddRMSNorm: two inputs of one shape, two outputs."""
    x, residual = node.inputs[:2]
    rank = len(p.shape(x))
    if p.shape(x) != p.shape(residual) or None in p.shape(x) or p.dtype(x) != p.dtype(residual):
        raise Refused("its two inputs are not known to have one shape and type")
    layer = OURS[node.op].centered
    given = _affine(node, 2) if layer else {"scale": (node.inputs[2], 1.0)}
    parameters, shape = p.vectors(x, [rank - 1], given)
    more = {} if layer else {"offset": 0.0}
    new = p.node(node.op, [x, residual, *parameters], node.outputs[0], epsilon=p.attributes(node)["epsilon"], **more)
    if node.outputs[0].is_empty():
        raise Refused("its sum alone is read")
    outputs = tuple(t for t in node.outputs if not t.is_empty())
    return Plan(
        (node,), outputs, (x, *p.data(residual, parameters)), (new,), shape, tuple(range(rank - 1)), f"plugin {node.op}"
    )


def _quantizing(p: Planner, node: gs.Node) -> Plan:
    row = OURS[node.op]
    added = "residual" in row.inputs
    axis = -1 if added or row.by_row else _axis(p, node) if row.centered else _own_axis(p, node)
    return quantized(p, node, axis, _affine(node, 1 + added, biased=row.centered))


def _modulated(p: Planner, node: gs.Node) -> Plan:
    x, scale, shift = node.inputs
    shape = p.shape(x, 2)
    for name, t in (("scale", scale), ("shift", shift)):
        own = p.shape(t)
        if own != (shape[0], *(1,) * (len(shape) - 2), shape[-1]) or None in own or p.dtype(t) != p.dtype(x):
            raise Refused(f"its {name} is not known to be one row for each sample, in its input's type")
    new = p.node(node.op, [x, scale, shift], node.outputs[0], epsilon=p.attributes(node)["epsilon"])
    return Plan(
        (node,), (node.outputs[0],), (x, scale, shift), (new,), shape, tuple(range(len(shape) - 1)), f"plugin {node.op}"
    )


# ------------------------------------------------------------------ by channels


def _group_normalization(p: Planner, node: gs.Node) -> Plan:
    if p.graph.opset < (since := STANDARD["GroupNormalization"].since):
        raise Refused(f"GroupNormalization below opset {since} has one scale for each group")
    return _groups(p, node, int(p.attributes(node)["num_groups"]), _affine(node), silu=False)


def _group_norm_silu(p: Planner, node: gs.Node) -> Plan:
    return _groups(p, node, int(p.attributes(node)["num_groups"]), _affine(node), silu=True)


def _groups(p: Planner, node: gs.Node, groups: int, given: Given, *, silu: bool, channels: bool = True) -> Plan:
    x, y, epsilon = node.inputs[0], node.outputs[0], p.attributes(node)["epsilon"]
    p.shape(x, 3)
    parameters, shape = p.vectors(x, [1], given, channels=channels)
    count = shape[1]
    if not isinstance(count, int) or groups < 1 or count % groups:
        raise Refused(f"its {count} channels do not divide into {groups} groups")
    old, last = _between_transposes(p, node), 0
    free = (0, *range(2, len(shape)))
    splits = p.splits((shape[0], groups), (count // groups, *shape[2:]))
    if len(old) == 3:
        last, x, y = 1, old[0].inputs[0], old[2].outputs[0]
        shape, free = (shape[0], *shape[2:], count), tuple(range(len(shape) - 1))
    common = {"epsilon": epsilon, "num_groups": groups, "channels_last": last}
    if splits:
        first = p.statistics(x, 1, groups, splits, last)
        apply = p.node(
            "GroupNormApply", [x, first.outputs[0], *parameters], y, activation="silu" if silu else "none", **common
        )
        return Plan(
            old, (y,), p.data(x, parameters), (first, apply), shape, free, "plugins NormStatistics and GroupNormApply"
        )
    name = "GroupNormSiLU" if silu else "GroupNorm"
    return Plan(
        old, (y,), p.data(x, parameters), (p.node(name, [x, *parameters], y, **common),), shape, free, f"plugin {name}"
    )


def _between_transposes(p: Planner, node: gs.Node) -> tuple[gs.Node, ...]:
    """The node with the Transposes around it that make NCHW of NHWC and back, or it alone where there are none, or
    others read them."""
    before, after = p.graph.producer(node.inputs[0]), p.only_reader(node.outputs[0])
    rank = len(p.shape(node.inputs[0]))
    first, back = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    if before is None or after is None or before.op != "Transpose" or after.op != "Transpose":
        return (node,)
    if (
        p.graph.attrs(before).get("perm") != first
        or p.graph.attrs(after).get("perm") != back
        or not p.only_reader(before.outputs[0])
    ):
        return (node,)
    return (before, node, after)


def _instance(p: Planner, node: gs.Node) -> Plan:
    """InstanceNormalization and ChannelLayerNorm."""
    name = (OURS if node.domain == DOMAIN else STANDARD)[node.op].plugin
    x, y = node.inputs[0], node.outputs[0]
    p.shape(x, 3)
    parameters, shape = p.vectors(x, [1], _affine(node), channels=True)
    new = p.node(name, [x, *parameters], y, epsilon=p.attributes(node)["epsilon"])
    return Plan((node,), (y,), p.data(x, parameters), (new,), shape, (0, *range(2, len(shape))), f"plugin {name}")


# ------------------------------------------------------------------ scale and shift


def _batch_normalization(p: Planner, node: gs.Node) -> Plan:
    attributes = p.attributes(node)
    values = [v for v in map(p.graph.known, node.inputs[1:5]) if v is not None]
    if attributes.get("training_mode", 0) or any(p.read(t) for t in node.outputs[1:]):
        raise Refused("it is in training mode")
    if len(values) < 4:
        raise Refused("its parameters are data")
    gamma, beta, mean, variance = (v.reshape(-1) for v in values)
    scale = gamma / np.sqrt(variance + attributes["epsilon"])
    return _scale_shift(p, (node,), node.inputs[0], 1, scale, beta - mean * scale)


def scaled_and_shifted(p: Planner, node: gs.Node) -> Plan | None:
    """Mul and Add by constants for each channel, which folding leaves of a BatchNorm; None where ``node`` does not
    begin such a pair."""
    if node.op != "Mul" or node.domain or len(node.inputs) != 2:
        return None
    add = p.only_reader(node.outputs[0])
    if add is None or add.op != "Add" or p.graph.shape(node.outputs[0]) is None:
        return None
    first, second = _constant_operand(p, node, None), _constant_operand(p, add, node.outputs[0])
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
        return _scale_shift(
            p, (node, add), x, 1, laid[0].reshape(-1), np.broadcast_to(laid[1].reshape(-1), (channels,))
        )
    except Refused:
        return None


def _constant_operand(p: Planner, node: gs.Node, data: gs.Tensor | None) -> tuple[np.ndarray, gs.Tensor] | None:
    for own, other in ((node.inputs[1], node.inputs[0]), (node.inputs[0], node.inputs[1])):
        if p.graph.is_constant(own) and not p.graph.is_constant(other) and (data is None or other is data):
            value = p.graph.known(own)
            return None if value is None else (value, other)
    return None


def _scale_shift(
    p: Planner, old: tuple[gs.Node, ...], x: gs.Tensor, axis: int, scale: np.ndarray, shift: np.ndarray
) -> Plan:
    shape, dtype = list(p.shape(x, 2)), p.dtype(x)
    if shape[axis] not in (None, len(scale)) and isinstance(shape[axis], int):
        raise Refused(f"its {shape[axis]} channels have {len(scale)} parameters")
    shape[axis] = len(scale)
    activation, behind = _activation(p, old[-1].outputs[0])
    y = (behind or old)[-1].outputs[0]
    if not all(np.array_equal(v, v.astype(dtype).astype(np.float64)) for v in (scale, shift)):
        dtype = np.dtype(np.float32)  # what was computed is rounded once, in float32
    parameters = [p.constant(x, name, value, dtype) for name, value in (("scale", scale), ("shift", shift))]
    new = p.node("ScaleShift", [x, *parameters], y, axis=axis, activation=activation)
    free = tuple(a for a in range(len(shape)) if a != axis)
    return Plan((*old, *behind), (y,), (x,), (new,), tuple(shape), free, "plugin ScaleShift")


def _activation(p: Planner, y: gs.Tensor) -> tuple[str, tuple[gs.Node, ...]]:
    """The activation that alone reads ``y``, and its nodes."""
    readers = [] if p.graph.is_output(y) else sorted(p.graph.consumers(y), key=p.graph.order)
    ops = [n.op for n in readers if not n.domain]
    if ops == ["Relu"]:
        return "relu", (readers[0],)
    if ops == ["Swish"] and p.graph.attrs(readers[0]).get("alpha", 1.0) == 1.0:
        return "silu", (readers[0],)
    if ops == ["Sigmoid", "Mul"] and p.only_reader(readers[0].outputs[0]) is readers[1]:
        return "silu", (readers[0], readers[1])
    return "none", ()


_PLANS: dict[str, Callable[[Planner, gs.Node], Plan]] = {
    "LayerNormalization": _layer_normalization,
    "RMSNormalization": _rms_normalization,
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": _instance,
    "BatchNormalization": _batch_normalization,
    f"{DOMAIN}.RMSNorm": _own_rms_norm,
    f"{DOMAIN}.LayerNorm": _own_centered,
    f"{DOMAIN}.StdNorm": _own_centered,
    f"{DOMAIN}.AddLayerNorm": _added,
    f"{DOMAIN}.AddRMSNorm": _added,
    f"{DOMAIN}.ModulatedLayerNorm": _modulated,
    f"{DOMAIN}.GroupNormSiLU": _group_norm_silu,
    f"{DOMAIN}.ChannelLayerNorm": _instance,
    **{row.name: _quantizing for row in OURS.values() if row.quantizes},
}
