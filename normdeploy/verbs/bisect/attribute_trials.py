"""Attributes of a node that change what it computes, and the padding, windows and groups that it states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ...precision.preparation import file_opset
from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, NotEvaluated, Values
from ...storage.onnx_domains import is_standard
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text, replace_by, with_attribute

# on one side
_MOST_PADS = 8
_MOST_GROUPS = 512
# entries of a list that is shown whole
_MOST_SHOWN = 8
# of a longer one, that differ
_MOST_ENTRIES = 3
# elements of a result, of which other sizes are tried
_MOST_MADE = 100_000
_STRIDES = _DILATIONS = (1, 2, 3)
_WINDOWED = ("Conv", "ConvTranspose", "AveragePool", "MaxPool", "LpPool")
# Op -> attribute -> the values that are tried, each by itself.
_CHOICES: dict[str, dict[str, tuple[object, ...]]] = {
    "AveragePool": {"count_include_pad": (0, 1), "ceil_mode": (0, 1)},
    "MaxPool": {"ceil_mode": (0, 1)},
    "LpPool": {"p": (1, 2), "ceil_mode": (0, 1)},
    "CumSum": {"exclusive": (0, 1), "reverse": (0, 1)},
    "DepthToSpace": {"mode": ("DCR", "CRD")},
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap")},
    "GRU": {"linear_before_reset": (0, 1), "direction": ("forward", "reverse")},
    "LSTM": {"direction": ("forward", "reverse")},
    "RNN": {"direction": ("forward", "reverse")},
    "ArgMax": {"select_last_index": (0, 1)},
    "ArgMin": {"select_last_index": (0, 1)},
    "TopK": {"largest": (0, 1)},
    "LpNormalization": {"p": (1, 2)},
    "GridSample": {"align_corners": (0, 1), "padding_mode": ("zeros", "border", "reflection")},
    "RotaryEmbedding": {"interleaved": (0, 1)},
    "Attention": {"is_causal": (0, 1)},
    "Trilu": {"upper": (0, 1)},
    "Resize": {"antialias": (0, 1)},
    "Mod": {"fmod": (0, 1)},
    "SoftmaxCrossEntropyLoss": {"reduction": ("mean", "sum", "none"), "ignore_index": (-100,)},
    "NegativeLogLikelihoodLoss": {"reduction": ("mean", "sum", "none"), "ignore_index": (-100,)},
    "Gemm": {"transA": (0, 1), "transB": (0, 1)},
}
# Op -> attributes that are tried together.
_RESIZE: dict[str, tuple[object, ...]] = {
    "mode": ("nearest", "linear", "cubic"),
    "coordinate_transformation_mode": ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"),
    "nearest_mode": ("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"),
    "cubic_coeff_a": (-0.75, -0.5),
}
# Op -> what one of its inputs says, and the place of that input.
_WHOLE = {"CumSum": ("axis", 1), "Trilu": ("diagonal", 1), "TopK": ("k", 1), "Slice": ("axis", 3)}
_FARTHEST_DIAGONAL = 3
_MOST_WHOLE = 64
# attribute -> the mode of Resize that reads it
_ONLY = {"nearest_mode": "nearest", "cubic_coeff_a": "cubic"}


@dataclass(frozen=True, kw_only=True)
class _AttributeTrial:
    """Attributes of one node and what each is set to."""

    place: int
    attributes: Mapping[str, object]


def try_attributes(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Set attributes of a node to other values, alone or with those that act together."""
    node = exact.nodes[place]
    if not is_standard(node):
        return
    own = attributes_with_defaults(exact, node)
    for attribute, choices in _CHOICES.get(node.op_type, {}).items():
        # An older opset may lack the attribute.
        for choice in choices if attribute in own else ():
            yield from _try_setting(exact, _AttributeTrial(place=place, attributes={attribute: choice}))
    if node.op_type == "Resize":
        trials = [_AttributeTrial(place=place, attributes=chosen) for chosen in _iter_resize_modes()]
        # Several settings may agree at one factor: the one that differs least comes first.
        trials.sort(key=lambda trial: sum(own.get(name) != value for name, value in trial.attributes.items()))
        for trial in trials:
            yield from _try_setting(exact, trial)
    if node.op_type in _WINDOWED:
        for attributes in _iter_windows(exact, node, values):
            yield from _try_setting(exact, _AttributeTrial(place=place, attributes=attributes))
    if node.op_type == "Pad":
        yield from _try_moved_padding(exact, place)


def try_integer_inputs(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Let a node read another whole number: the axis of a CumSum or Slice, the diagonal of a Trilu, the k of a TopK."""
    node = exact.nodes[place]
    if not is_standard(node) or node.op_type not in _WHOLE or node.input[0] not in values:
        return
    what, i = _WHOLE[node.op_type]
    own = _integer_constant(exact, node.input[i]) if len(node.input) > i and node.input[i] else None
    if own is None or own.size != 1:
        return
    shape = values[node.input[0]].shape
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    sizes = {"CumSum": len(shape), "Slice": len(shape), "TopK": min(shape[axis] + 1, _MOST_WHOLE) if shape else 0}
    if node.op_type == "Trilu":
        choices = range(-_FARTHEST_DIAGONAL, _FARTHEST_DIAGONAL + 1)
    else:
        choices = range(sizes[node.op_type])
    for other in choices:
        is_axis = node.op_type in ("CumSum", "Slice")
        if other != (own.item() % len(shape) if is_axis else own.item()):
            text = f"{node_at_text(exact, place)} has {what} {own.item()}, with {other} it is right"
            kind = "axis" if is_axis else "attribute"
            yield Cause(kind, text, place), NodeChange(inputs={(place, i): replace_by(np.full_like(own, other))})


def try_model_attributes(
    exact: Float64Evaluator, place: int, program: ReferenceProgram, operators: Iterable[str]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Give a node all attributes of a reference's node of its kind."""
    node = exact.nodes[place]
    for theirs in _iter_similar_nodes(node, program, operators):
        own = attributes_with_defaults(exact, node)
        differs = {
            name: value for name, value in attributes_with_defaults(exact, theirs).items() if own.get(name) != value
        }
        if differs:
            told = [describe_two_values(n, own.get(n), value) for n, value in differs.items()]
            cause = Cause("attribute", f"{node_at_text(exact, place)} has {', '.join(told)}", place)
            yield cause, NodeChange(nodes={place: _with_attributes(node, differs)})


def try_model_integers(
    exact: Float64Evaluator, place: int, program: ReferenceProgram, operators: Iterable[str]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Give a node the fixed integers that a reference's node of its kind reads."""
    node = exact.nodes[place]
    for theirs in _iter_similar_nodes(node, program, operators):
        inputs: dict[int, Array] = {}
        told: list[str] = []
        for i, (mine, other) in enumerate(zip(node.input, theirs.input, strict=True)):
            own = _integer_constant(exact, mine)
            right = program.fixed_integers(other)
            if own is not None and right is not None and not np.array_equal(own, right):
                inputs[i] = right
                told.append(describe_two_values(repr(mine), own.tolist(), right.tolist()))
        if inputs:
            cause = Cause("attribute", f"{node_at_text(exact, place)} has {', '.join(told)}", place)
            yield cause, NodeChange(inputs={(place, i): replace_by(value) for i, value in inputs.items()})


def _iter_similar_nodes(
    node: onnx.NodeProto, program: ReferenceProgram, operators: Iterable[str]
) -> Iterator[onnx.NodeProto]:
    for theirs in program.onnx_nodes(operators):
        if (theirs.op_type, theirs.domain, len(theirs.input)) == (node.op_type, node.domain, len(node.input)):
            yield theirs


def attributes_with_defaults(exact: Float64Evaluator, node: onnx.NodeProto) -> dict[str, object]:
    """Return a node's attributes but tensors and bodies, with the defaults of its opset where none is stated."""
    values: dict[str, object] = {}
    if is_standard(node) and onnx.defs.has(node.op_type):
        try:
            schema = onnx.defs.get_schema(node.op_type, file_opset(exact.proto), "")
        except onnx.defs.SchemaError:
            schema = onnx.defs.get_schema(node.op_type)
        defaults = [a.default_value for a in schema.attributes.values() if a.default_value.type]
        values = {a.name: _attribute_value(a) for a in defaults}
    kept = (onnx.AttributeProto.TENSOR, onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return values | {a.name: _attribute_value(a) for a in node.attribute if a.type not in kept}


def _attribute_value(attribute: onnx.AttributeProto) -> object:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def describe_two_values(name: str, own: object, right: object) -> str:
    """Tell what a node has as ``name`` and what the model has: of long lists the entries that differ."""
    if not isinstance(own, list) or not isinstance(right, list) or max(len(own), len(right)) <= _MOST_SHOWN:
        return f"{name} {_format_value(own)} where the model has {_format_value(right)}"
    if len(own) != len(right):
        return f"{name} of {len(own)} entries where the model has {len(right)}"
    differs = [i for i, (a, b) in enumerate(zip(own, right, strict=True)) if a != b]
    told = [
        f"{name}[{i}] {_format_value(own[i])} where the model has {_format_value(right[i])}"
        for i in differs[:_MOST_ENTRIES]
    ]
    if len(differs) > _MOST_ENTRIES:
        more = f" ({len(differs)} of {len(own)} entries differ)"
    else:
        more = ""
    return f"{', '.join(told)}{more}"


def _with_attributes(node: onnx.NodeProto, attributes: Mapping[str, object]) -> onnx.NodeProto:
    for name, value in attributes.items():
        node = with_attribute(node, name, value)
    return node


def _try_setting(exact: Float64Evaluator, trial: _AttributeTrial) -> Iterator[tuple[Cause, NodeChange]]:
    node = exact.nodes[trial.place]
    own = attributes_with_defaults(exact, node)
    differs = {name: value for name, value in trial.attributes.items() if own.get(name) != value}
    if not differs:
        return
    told = " and ".join(f"{name} {_format_value(own.get(name))}" for name in differs)
    right = " and ".join(map(_format_value, differs.values()))
    changed = _with_attributes(node, differs)
    if "pads" in differs:
        changed = with_attribute(changed, "auto_pad", "NOTSET")
    text = f"{node_at_text(exact, trial.place)} has {told}, with {right} it is right"
    yield Cause("attribute", text, trial.place), NodeChange(nodes={trial.place: changed})


def _iter_resize_modes() -> Iterator[dict[str, object]]:
    for values in itertools.product(*_RESIZE.values()):
        chosen = dict(zip(_RESIZE, values, strict=True))
        unread = [name for name, mode in _ONLY.items() if chosen["mode"] != mode]
        # The first choice stands for all where the mode does not read the attribute.
        if all(chosen[name] == _RESIZE[name][0] for name in unread):
            yield {name: value for name, value in chosen.items() if name not in unread}


def _iter_windows(exact: Float64Evaluator, node: onnx.NodeProto, values: Values) -> Iterator[dict[str, object]]:
    """Yield pads at the other sides, then other pads, strides and dilations, alike along every axis."""
    own = attributes_with_defaults(exact, node)
    kernel = own.get("kernel_shape")
    if kernel is None and len(node.input) > 1 and node.input[1] in exact.weights:
        kernel = list(exact.weights[node.input[1]].dims[2:])
    if not isinstance(kernel, list) or not kernel:
        return
    pads = own.get("pads")
    for before, after in _iter_padding_shares(pads) if isinstance(pads, list) else ():
        yield {"pads": [*before, *after]}
    if node.op_type == "ConvTranspose":
        for extra in (0, 1):
            yield {"output_padding": [extra] * len(kernel)}
    made = values.get(node.output[0])
    if made is None or made.size > _MOST_MADE:
        return
    for stride, dilation in itertools.product(_STRIDES, _DILATIONS):
        reaches = [dilation * (size - 1) for size in kernel]
        for pad in range(min(max(reaches), _MOST_PADS) + 1):
            same = [min(pad, reach) for reach in reaches]
            window: dict[str, object] = {"pads": [*same, *same]}
            if stride > 1 or "strides" in own:
                window["strides"] = [stride] * len(kernel)
            if dilation > 1 or "dilations" in own:
                window["dilations"] = [dilation] * len(kernel)
            yield window


def _iter_padding_shares(pads: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each way to share the padding of an axis among its two sides, alike along every axis."""
    rank = len(pads) // 2
    total = [before + after for before, after in zip(pads[:rank], pads[rank:], strict=True)]
    for share in range(min(max(total, default=0), _MOST_PADS) + 1):
        before = [min(each, share) for each in total]
        yield before, [each - first for each, first in zip(total, before, strict=True)]


def _try_moved_padding(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
    """Pad each axis by as much, at the other side or at both."""
    node = exact.nodes[place]
    pads = _integer_constant(exact, node.input[1]) if len(node.input) > 1 else None
    if pads is None or pads.ndim != 1 or len(pads) % 2:
        return
    for before, after in _iter_padding_shares(pads.tolist()):
        other = np.array([*before, *after], pads.dtype)
        if not np.array_equal(other, pads):
            text = f"{node_at_text(exact, place)} has pads {pads.tolist()}, with {other.tolist()} it is right"
            yield Cause("attribute", text, place), NodeChange(inputs={(place, 1): replace_by(other)})


def try_num_groups(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Let a norm of groups have another number of groups."""
    node = exact.nodes[place]
    x = values.get(node.input[0]) if node.input else None
    is_grouped = node.op_type == "InstanceNormalization" or node.op_type == "GroupNormalization"
    if not is_grouped or x is None or x.ndim < 3:
        return
    own = attributes_with_defaults(exact, node)
    scale, bias = (_float_constant(exact, name) for name in node.input[1:3])
    if scale is None or bias is None or not x.size:
        return
    if node.op_type == "InstanceNormalization":
        groups = x.shape[1]
    else:
        groups = own.get("num_groups")
    whole = scale.size != x.shape[1] or bool((scale == scale.flat[0]).all() and (bias == bias.flat[0]).all())
    # A form that reshapes to groups has a scale of ones there, and says nothing of channels.
    elements = x[0].size if whole else x.shape[1]
    column = (1, -1, *[1] * (x.ndim - 2))
    epsilon = own.get("epsilon")
    for other in range(1, min(elements, _MOST_GROUPS) + 1):
        if elements % other or other == groups or not isinstance(epsilon, float):
            continue
        rows = x.reshape(len(x), other, -1)
        with np.errstate(all="ignore"):
            normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + epsilon)
        normal = normal.reshape(x.shape)
        if whole:
            right = normal * scale.flat[0] + bias.flat[0]
        else:
            right = normal * scale.reshape(column) + bias.reshape(column)
        text = f"{node_at_text(exact, place)} normalizes over {groups} groups, with {other} it is right"
        yield Cause("attribute", text, place), NodeChange(given={node.output[0]: right})


def _integer_constant(exact: Float64Evaluator, name: str) -> Array | None:
    value = _constant_array(exact, name)
    if value is not None and value.dtype.kind in "iub":
        return value
    return None


def _float_constant(exact: Float64Evaluator, name: str) -> Array | None:
    value = _constant_array(exact, name)
    if value is not None and value.dtype.kind == "f":
        return value
    return None


def _constant_array(exact: Float64Evaluator, name: str) -> Array | None:
    if name not in exact.constants:
        return None
    try:
        value = exact.tensor_value(name, {})
    except NotEvaluated:
        return None
    if not isinstance(value, list):
        return np.asarray(value)
    return None
