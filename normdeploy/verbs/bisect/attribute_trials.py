"""Try other values for the attributes of a node, for example its padding, windows and groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from ...runtimes.float64_evaluator import NodeChange
from ...types import Array
from .trial_changes import Cause, Trial, TrialNode, attributes_with_defaults, with_attributes

# Maximum padding on one side that is tried.
_MOST_PADS = 8
_MOST_GROUPS = 512
# Maximum number of entries of a list that a message shows completely.
_MOST_SHOWN = 8
# Maximum number of differing entries that a message shows of a longer list.
_MOST_ENTRIES = 3
# Maximum number of elements of a node's result. The windows of a node with a larger result are not varied.
_MOST_MADE = 100_000
_STRIDES = _DILATIONS = (1, 2, 3)
_WINDOWED = ("Conv", "ConvTranspose", "AveragePool", "MaxPool", "LpPool")
# Op -> attribute -> values of this attribute that are tried, one at a time.
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
# Attributes of Resize -> values; all combinations are tried.
_RESIZE: dict[str, tuple[object, ...]] = {
    "mode": ("nearest", "linear", "cubic"),
    "coordinate_transformation_mode": ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"),
    "nearest_mode": ("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"),
    "cubic_coeff_a": (-0.75, -0.5),
}
# Op -> (meaning, index) of its integer input.
_INTEGER_INPUTS = {"CumSum": ("axis", 1), "Trilu": ("diagonal", 1), "TopK": ("k", 1), "Slice": ("axis", 3)}
_FARTHEST_DIAGONAL = 3
_MOST_WHOLE = 64
# Attribute of Resize -> the only mode that uses it.
_ONLY = {"nearest_mode": "nearest", "cubic_coeff_a": "cubic"}


def try_attributes(at: TrialNode) -> Iterator[Trial]:
    """Set attributes of a node to other values. Attributes that affect each other are set together.

    Yields:
        Trials of kind "attribute".
    """
    if not at.is_standard():
        return
    for attribute, choices in _CHOICES.get(at.op, {}).items():
        # An older opset may lack the attribute.
        if attribute in at.attributes:
            for choice in choices:
                yield from _try_setting(at, {attribute: choice})
    if at.op == "Resize":
        # At one scale factor, several settings may give the same result. The setting with the fewest changes is tried
        # first.
        for chosen in sorted(_iter_resize_modes(), key=lambda chosen: len(_differing_attributes(at, chosen))):
            yield from _try_setting(at, chosen)
    if at.op in _WINDOWED:
        for window in _iter_windows(at):
            yield from _try_setting(at, window)
    if at.op == "Pad":
        yield from _try_moved_padding(at)


def try_integer_inputs(at: TrialNode) -> Iterator[Trial]:
    """Try other integers for an input: the axis of a CumSum or Slice, the diagonal of a Trilu, the k of a TopK.

    Yields:
        Trials of kind "axis" or "attribute".
    """
    x = at.input_value(0)
    if x is None or not at.is_standard(*_INTEGER_INPUTS):
        return
    what, i = _INTEGER_INPUTS[at.op]
    stored = at.fixed_input(i, "iub")
    if stored is None or stored.size != 1:
        return
    own = stored.item()
    here = own
    kind = "attribute"
    if what == "diagonal":
        choices = range(-_FARTHEST_DIAGONAL, _FARTHEST_DIAGONAL + 1)
    elif what == "k":
        choices = range(min(x.shape[at.stated_axis(-1)] + 1, _MOST_WHOLE) if x.ndim else 0)
    else:
        kind = "axis"
        choices = range(x.ndim)
        here = own % max(x.ndim, 1)
    for other in choices:
        if other != here:
            yield at.with_inputs(kind, at.describe_other(what, own, other), {i: np.full_like(stored, other)})


def try_model_attributes(at: TrialNode) -> Iterator[Trial]:
    """Give a node all attributes of a similar node of the reference.

    Yields:
        A trial for each similar node whose attributes differ.
    """
    for theirs in _iter_similar_nodes(at):
        differs = _differing_attributes(at, attributes_with_defaults(at.exact, theirs))
        if differs:
            told = [describe_two_values(name, at.attributes.get(name), value) for name, value in differs.items()]
            yield at.as_node("attribute", f"{at} has {', '.join(told)}", with_attributes(at.node, differs))


def try_model_integers(at: TrialNode) -> Iterator[Trial]:
    """Give a node the fixed integers that a similar node of the reference reads.

    Yields:
        A trial for each similar node whose integers differ.
    """
    for theirs in _iter_similar_nodes(at):
        inputs: dict[int, Array] = {}
        told: list[str] = []
        for i, (mine, other) in enumerate(zip(at.node.input, theirs.input, strict=True)):
            own = at.fixed_input(i, "iub")
            right = at.around.program.fixed_integers(other)
            if own is not None and right is not None and not np.array_equal(own, right):
                inputs[i] = right
                told.append(describe_two_values(repr(mine), own.tolist(), right.tolist()))
        if inputs:
            yield at.with_inputs("attribute", f"{at} has {', '.join(told)}", inputs)


def _iter_similar_nodes(at: TrialNode) -> Iterator[onnx.NodeProto]:
    own = (at.op, at.node.domain, len(at.node.input))
    for theirs in at.around.program.onnx_nodes(at.around.operators):
        if (theirs.op_type, theirs.domain, len(theirs.input)) == own:
            yield theirs


def _differing_attributes(at: TrialNode, others: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in others.items() if at.attributes.get(name) != value}


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
    """Describe a value of a node together with the model's value. Of long lists, show only the entries that differ.

    Returns:
        For example "axis 1 (model: 2)".
    """
    if not isinstance(own, list) or not isinstance(right, list) or max(len(own), len(right)) <= _MOST_SHOWN:
        return f"{name} {_format_value(own)} (model: {_format_value(right)})"
    if len(own) != len(right):
        return f"{name} of {len(own)} entries (model: {len(right)})"
    differs = [i for i in range(len(own)) if own[i] != right[i]]
    told = ", ".join(describe_two_values(f"{name}[{i}]", own[i], right[i]) for i in differs[:_MOST_ENTRIES])
    if len(differs) <= _MOST_ENTRIES:
        return told
    return f"{told} ({len(differs)} of {len(own)} entries differ)"


def _try_setting(at: TrialNode, attributes: Mapping[str, object]) -> Iterator[Trial]:
    differs = _differing_attributes(at, attributes)
    if not differs:
        return
    told = " and ".join(f"{name} {_format_value(at.attributes.get(name))}" for name in differs)
    right = " and ".join(map(_format_value, differs.values()))
    if "pads" in differs:
        differs["auto_pad"] = "NOTSET"
    yield at.as_node(
        "attribute", f"{at} has {told}; with {right} the result is correct", with_attributes(at.node, differs)
    )


def _iter_resize_modes() -> Iterator[dict[str, object]]:
    for values in itertools.product(*_RESIZE.values()):
        chosen = dict(zip(_RESIZE, values, strict=True))
        unread = [name for name, mode in _ONLY.items() if chosen["mode"] != mode]
        # For an attribute that the mode does not use, one value is enough.
        if all(chosen[name] == _RESIZE[name][0] for name in unread):
            yield {name: value for name, value in chosen.items() if name not in unread}


def _iter_windows(at: TrialNode) -> Iterator[dict[str, object]]:
    """Yield other pads, strides and dilations, which are equal along all axes.

    The first windows keep the total padding of each axis, and distribute it differently between the two sides.
    """
    kernel = at.attributes.get("kernel_shape")
    if kernel is None and at.name_of_input(1) in at.exact.weights:
        kernel = list(at.exact.weights[at.name_of_input(1)].dims[2:])
    if not isinstance(kernel, list) or not kernel:
        return
    pads = at.attributes.get("pads")
    if isinstance(pads, list):
        for shared in _iter_padding_shares(pads):
            yield {"pads": shared}
    if at.op == "ConvTranspose":
        for extra in (0, 1):
            yield {"output_padding": [extra] * len(kernel)}
    made = at.output_value
    if made is None or made.size > _MOST_MADE:
        return
    for stride, dilation in itertools.product(_STRIDES, _DILATIONS):
        reaches = [dilation * (size - 1) for size in kernel]
        for pad in range(min(max(reaches), _MOST_PADS) + 1):
            same = [min(pad, reach) for reach in reaches]
            window: dict[str, object] = {"pads": [*same, *same]}
            for name, value in (("strides", stride), ("dilations", dilation)):
                if value > 1 or name in at.attributes:
                    window[name] = [value] * len(kernel)
            yield window


def _iter_padding_shares(pads: Sequence[int]) -> Iterator[list[int]]:
    """Yield each way to distribute the padding of an axis between its two sides, equally along all axes."""
    before, after = np.reshape(pads, (2, -1))
    total = before + after
    for share in range(min(max(total, default=0), _MOST_PADS) + 1):
        first = np.minimum(total, share)
        yield [*first.tolist(), *(total - first).tolist()]


def _try_moved_padding(at: TrialNode) -> Iterator[Trial]:
    """Distribute the padding of each axis differently between its two sides. The total stays the same."""
    pads = at.fixed_input(1, "iub")
    if pads is None or pads.ndim != 1 or len(pads) % 2:
        return
    own = pads.tolist()
    for other in _iter_padding_shares(own):
        if other != own:
            text = at.describe_other("pads", own, other)
            yield at.with_inputs("attribute", text, {1: np.array(other, pads.dtype)})


def try_num_groups(at: TrialNode) -> Iterator[Trial]:
    """Try other numbers of groups for GroupNormalization or InstanceNormalization.

    Yields:
        Trials that replace the node's result by the norm over that many groups.
    """
    x = at.input_value(0)
    scale = at.fixed_input(1, "f")
    bias = at.fixed_input(2, "f")
    epsilon = at.attributes.get("epsilon")
    if x is None or x.ndim < 3 or not x.size or scale is None or bias is None:
        return
    if at.op == "InstanceNormalization":
        groups = x.shape[1]
    elif at.op == "GroupNormalization":
        groups = at.attributes.get("num_groups")
    else:
        return
    # If the file reshapes to groups before the norm, the node's scale is all ones and does not show the number of
    # channels.
    elements = x.shape[1]
    column = [1, -1, *[1] * (x.ndim - 2)]
    if scale.size != x.shape[1] or bool((scale == scale.flat[0]).all() and (bias == bias.flat[0]).all()):
        elements = x[0].size
        scale = scale.flat[:1]
        bias = bias.flat[:1]
    for other in range(1, min(elements, _MOST_GROUPS) + 1):
        if elements % other or other == groups or not isinstance(epsilon, float):
            continue
        rows = x.reshape(len(x), other, -1)
        with np.errstate(all="ignore"):
            normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + epsilon)
        right = normal.reshape(x.shape) * scale.reshape(column) + bias.reshape(column)
        text = f"{at} normalizes over {groups} groups; with {other} the result is correct"
        yield Trial(Cause("attribute", text, at.place), NodeChange(given={at.node.output[0]: right}))
