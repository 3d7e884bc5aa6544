"""Handle numbers that mean "as low as possible" and exceed the range of half precision.

If they became −Inf, a fully hidden row would become NaN. Two functions prevent this:

- `find_mask_constants` replaces a mask by a number that half represents, if all its readers only need a low number.
  Such readers are a softmax, other functions that level off, and comparisons with other numbers of the mask.
- `mask_ranges` gives the other tensors that may hold a number beyond the type's range, seen in calibration or not; they
  stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..storage.proto_traversal import attribute_value
from .float32_reasons import MOVES
from .precision_view import PrecisionView
from .tensor_ranges import TensorRange
from .type_conversion import HalfFormat, initializer_values

# Each element of the result is an element of an operand.
_CHOICES = frozenset(
    {
        *(MOVES - {"Cast"}),
        *("Min", "Max", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "TopK"),
        *("ScatterND", "ScatterElements", "Compress"),
    }
)
_MASKING = _CHOICES | {"Cast", "Add", "Sub", "Mul"}
# The results are about as large as the largest operand, with its sign or with either sign.
_SUMS = frozenset(
    {
        *("Add", "Cast", "Sum", "Mean", "ReduceSum", "ReduceMean", "CumSum", "AveragePool", "GlobalAveragePool"),
        *("Relu", "LeakyRelu", "ReduceLogSumExp", "LogSoftmax"),
    }
)
_SIGNED = frozenset({"Sub", "Mul", "Div", "Neg", "Abs", "ReduceL1"})
# These ops are constant, within rounding, below the floor of either type.
_LEVELS_OFF = frozenset({"Softmax", "Sigmoid", "Tanh", "Exp", "Erf", "Softplus", "IsNaN", "IsInf", "HardSigmoid"})
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
# A factor above this may be a temperature.
_SURELY = -1e6
# Sums of more masks leave too little range for scores.
_MOST_SUMMANDS = 64
# More numbers than these mean more than "as low as possible", and would lie close together.
_MOST_NUMBERS = 16


@dataclass
class MaskConstants:
    """Constants that become lower numbers of half.

    Attributes:
        arrays: name -> (new array in half's range, lowest number before).
        carried: tensors that a mask reaches, whose lower end is ignored.
    """

    arrays: dict[str, tuple[np.ndarray, float]] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)


@dataclass
class _MaskPath:
    """Path of a constant to its readers.

    Attributes:
        tensors: tensors that carry it.
        thresholds: constants whose numbers it is compared with.
    """

    tensors: set[str]
    thresholds: set[str] = field(default_factory=set)


def expand_fills(graph: onnx.GraphProto, form: HalfFormat) -> None:
    """Write ConstantOfShape of a number outside the range of ``form`` as Expand of a constant, in place."""
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            continue
        fill = attribute_value(node, "value")
        if fill is None or fill.data_type != TensorProto.FLOAT:
            continue
        number = initializer_values(fill).reshape(())
        if not np.isfinite(number) or abs(float(number)) <= form.largest:
            continue
        name = f"{node.output[0]}_fill"
        graph.initializer.append(numpy_helper.from_array(np.asarray(number), name))
        node.op_type = "Expand"
        del node.attribute[:]
        shape = node.input[0]
        del node.input[:]
        node.input.extend([name, shape])


def find_mask_constants(view: PrecisionView) -> MaskConstants:
    """Find the constants that only mean "as low as possible", and numbers of half to replace them.

    A floor is −1.5·2ᵏ, with k as large as the type and the number of added masks allow. It leaves room for scores
    below, and absorbs scores that are small beside it, as float32's lowest number does. Its exponential is 0, and a
    fully masked row is not NaN. Numbers that are compared keep their order.

    Returns:
        the new arrays, and the tensors that the masks reach.
    """
    found = MaskConstants()
    ways: dict[str, _MaskPath] = {}
    for name, tensor in view.constants.items():
        way = _follow_constant(view, name, tensor)
        if way is not None:
            ways[name] = way
    _drop_undecided_paths(view, ways)
    for group in _group_meeting_constants(ways):
        tensors = set().union(*(ways[name].tensors for name in group))
        names = [*group, *(t for name in group for t in ways[name].thresholds if t not in group)]
        numbers = _numbers_beyond_range(view, names)
        floor = _lowest_mask_number(view, _max_summands(view, tensors, set(group)))
        if floor is None or len(numbers) > _MOST_NUMBERS:
            continue
        # The lowest number becomes the floor; higher ones outside half's range follow above it in their order.
        moved = {number: floor * (1.0 - k / (2.0 * len(numbers))) for k, number in enumerate(numbers)}
        if len(names) > 1 and not _others_are_above(view, names, max(moved.values())):
            continue
        for name in dict.fromkeys(names):
            array = initializer_values(view.constants[name]).copy()
            low = float(array[np.isfinite(array)].min(initial=0.0))
            if low >= -view.form.largest:
                continue
            for number in numbers:
                array[array == number] = moved[number]
            found.arrays[name] = (array, low)
        found.carried |= tensors
    return found


def _follow_constant(view: PrecisionView, name: str, tensor: onnx.TensorProto) -> _MaskPath | None:
    """Follow a constant outside half's range to its readers; None if it is not a mask."""
    if tensor.data_type != TensorProto.FLOAT:
        return None
    array = initializer_values(tensor)
    finite = array[np.isfinite(array)]
    low = float(finite.min(initial=0.0))
    if low >= -view.form.largest or (array > view.form.largest).any():
        return None
    if low <= _SURELY:
        through = _MASKING
    else:
        through = _MASKING - {"Mul"}
    way = _MaskPath(tensors={name})
    waiting = [name]
    while waiting:
        top = waiting.pop()
        if top in view.outputs or not view.readers.get(top):
            return None
        for i in view.readers[top]:
            node = view.graph.node[i]
            if node.op_type in _LEVELS_OFF or node.op_type in _COMPARISONS:
                continue
            if node.op_type == "Cast" and view.types.get(node.output[0]) == TensorProto.BOOL:
                continue
            if node.op_type not in through or not all(view.types.get(o) in _FLOATS for o in node.output if o):
                return None
            waiting += [o for o in node.output if o and o not in way.tensors]
            way.tensors.update(filter(None, node.output))
    if _may_change_sign(view, way.tensors):
        return None
    return way


def _may_change_sign(view: PrecisionView, tensors: Collection[str]) -> bool:
    """Return True if a mask is subtracted from other values, or multiplied by a negative number or another mask."""
    for i in dict.fromkeys(i for tensor in tensors for i in view.readers.get(tensor, ())):
        node = view.graph.node[i]
        if node.op_type == "Sub" and node.input[0] not in tensors:
            return True
        if node.op_type == "Mul":
            factors = [n for n in node.input if n not in tensors]
            if not factors or any(
                n in view.constants and (initializer_values(view.constants[n]) < 0).any() for n in factors
            ):
                return True
    return False


def _drop_undecided_paths(view: PrecisionView, ways: dict[str, _MaskPath]) -> None:
    """Remove constants that are compared with possible non-masks, and fill in the thresholds of the others."""
    chosen = _constants_by_choice(view)
    removed = True
    while removed:
        removed = False
        for name, way in list(ways.items()):
            compared = _compared_constants(view, way, chosen)
            if compared is None or any(_is_beyond_range(view, n) and n not in ways for n in compared):
                del ways[name]
                removed = True
            else:
                way.thresholds = compared


def _compared_constants(view: PrecisionView, way: _MaskPath, chosen: Mapping[str, frozenset[str]]) -> set[str] | None:
    """Collect the constants that the comparisons on a path read; None if they also read other values."""
    found: set[str] = set()
    for i in dict.fromkeys(i for tensor in way.tensors for i in view.readers.get(tensor, ())):
        node = view.graph.node[i]
        if node.op_type not in _COMPARISONS:
            continue
        for name in node.input:
            if name not in chosen:
                return None
            found |= chosen[name]
    return found


def _constants_by_choice(view: PrecisionView) -> dict[str, frozenset[str]]:
    """Map each tensor that holds only elements of constants to these constants."""
    chosen = {name: frozenset({name}) for name in view.constants}
    for node in view.graph.node:
        if node.op_type not in _CHOICES:
            continue
        read = [n for n in _choice_operands(node) if n]
        if read and all(n in chosen for n in read):
            every = frozenset().union(*(chosen[n] for n in read))
            chosen.update((o, every) for o in node.output if o)
    return chosen


def _choice_operands(node: onnx.NodeProto) -> list[str]:
    """List the operands from which a choice takes its elements."""
    if node.op_type == "Where":
        return list(node.input[1:])
    if node.op_type in ("Min", "Max", "Concat"):
        return list(node.input)
    if node.op_type in ("ScatterND", "ScatterElements", "Pad"):
        return [node.input[0], *node.input[2:3]]
    return list(node.input[:1])


def _is_beyond_range(view: PrecisionView, name: str) -> bool:
    array = initializer_values(view.constants[name])
    return array.dtype == np.float32 and bool((np.abs(array[np.isfinite(array)]) > view.form.largest).any())


def _numbers_beyond_range(view: PrecisionView, names: Iterable[str]) -> list[float]:
    """List the numbers below half's range in any of ``names``, lowest first."""
    every: set[float] = set()
    for name in names:
        array = initializer_values(view.constants[name])
        every |= {float(v) for v in np.unique(array[np.isfinite(array)]) if v < -view.form.largest}
    return sorted(every)


def _others_are_above(view: PrecisionView, names: Iterable[str], highest: float) -> bool:
    """Return True if the unchanged numbers of ``names`` lie above ``highest``, the highest of the replaced ones."""
    for name in names:
        array = initializer_values(view.constants[name])
        kept = array[np.isfinite(array) & (array >= -view.form.largest)]
        if (kept <= highest).any():
            return False
    return True


def _group_meeting_constants(ways: Mapping[str, _MaskPath]) -> list[list[str]]:
    """Group constants that meet in a tensor or in a comparison, since their numbers have to keep their order."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, way in ways.items():
        reached = way.tensors | way.thresholds
        members = [name]
        apart: list[tuple[set[str], list[str]]] = []
        for others, theirs in groups:
            if others & reached:
                reached |= others
                members = [*theirs, *members]
            else:
                apart.append((others, theirs))
        groups = [*apart, (reached, members)]
    return [members for _, members in groups]


def _max_summands(view: PrecisionView, tensors: Collection[str], constants: Collection[str]) -> int:
    """Count the masks that are added at most on a path to a softmax."""
    count = dict.fromkeys(constants, 1)
    for node in view.graph.node:
        read = [count[n] for n in node.input if n in count]
        if not read or not any(o in tensors for o in node.output):
            continue
        if node.op_type in ("Add", "Sub"):
            total = sum(read)
        else:
            total = max(read)
        count.update((o, total) for o in node.output if o)
    return max(count.values(), default=1)


def _lowest_mask_number(view: PrecisionView, summands: int) -> float | None:
    """Return the lowest number −1.5·2ᵏ of which ``summands`` can be added together with scores; None if too many."""
    if summands > _MOST_SUMMANDS:
        return None
    exponent = int(np.floor(np.log2(view.form.largest / (1.5 * summands))))
    return -1.5 * 2.0**exponent


# ------------------------------------------------------------------ ranges of other tensors


def mask_ranges(view: PrecisionView, carried: Collection[str]) -> dict[str, TensorRange]:
    """Compute the ranges that constants outside the type's range give to tensors chosen or summed from them.

    Calibration may not have seen an input that chooses them.

    Returns:
        tensor -> range, without constants and ``carried``.
    """
    found: dict[str, TensorRange] = {}
    for name in view.constants:
        if name not in carried and _is_beyond_range(view, name):
            finite = initializer_values(view.constants[name])
            finite = finite[np.isfinite(finite)]
            found[name] = TensorRange(float(finite.min()), float(finite.max()))
    for node in view.graph.node:
        reached = _node_mask_range(view, node, found)
        if reached is not None and reached.magnitude > view.form.largest:
            found.update((o, reached) for o in node.output if o in view.floating_tensors)
    return {name: reached for name, reached in found.items() if name not in view.constants and name not in carried}


def _node_mask_range(view: PrecisionView, node: onnx.NodeProto, found: Mapping[str, TensorRange]) -> TensorRange | None:
    """Return the possible range of a node's result from ``found``; None if it passes none of it on."""
    op = node.op_type
    if op not in _CHOICES and op not in _SUMS and op not in _SIGNED and op != "Clip":
        return None
    read = [
        n for n in (_choice_operands(node) if op in _CHOICES else node.input[:1] if op == "Clip" else node.input) if n
    ]
    own = [found[n] for n in read if n in found]
    if not own:
        return None
    low = min(0.0, *(r.low for r in own))
    high = max(0.0, *(r.high for r in own))
    if op in _SIGNED:
        magnitude = max(-low, high)
        return TensorRange(-magnitude, magnitude)
    # A Max is at least its operand outside ``found``, which is not low.
    if op == "Max" and len(own) < len(read):
        low = 0.0
    if op == "Min" and len(own) < len(read):
        high = 0.0
    if op == "Clip":
        low = max(low, _clip_bound(view, node, 1, low))
        high = min(high, _clip_bound(view, node, 2, high))
    return TensorRange(low, high)


def _clip_bound(view: PrecisionView, node: onnx.NodeProto, place: int, otherwise: float) -> float:
    """Return a constant bound of a Clip if half represents it, otherwise ``otherwise``."""
    if len(node.input) > place:
        name = node.input[place]
    else:
        name = ""
    if name not in view.constants:
        return otherwise
    bound = float(initializer_values(view.constants[name]).reshape(()))
    if abs(bound) <= view.form.largest:
        return bound
    return otherwise
