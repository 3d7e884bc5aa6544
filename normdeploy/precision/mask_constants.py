"""Handle mask constants: numbers that mean "as low as possible" and exceed the range of half precision.

If they became −Inf, a softmax over a fully masked row would give NaN. Two functions prevent this:

- `find_mask_constants` replaces such a constant by a number that half precision can represent, if all readers of the
  constant give the same result for any low number. Such readers are softmax, other functions that are constant for low
  numbers, and comparisons with other mask constants.
- `mask_ranges` finds the other tensors that may contain a number beyond the type's range, even if calibration did not
  see such a number. These tensors stay float32.
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

# Ops whose result consists of elements of the operands
_CHOICES = frozenset(
    {
        *(MOVES - {"Cast"}),
        *("Min", "Max", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "TopK"),
        *("ScatterND", "ScatterElements", "Compress"),
    }
)
_MASKING = _CHOICES | {"Cast", "Add", "Sub", "Mul"}
# Ops whose results are about as large as the largest operand. The ops of `_SUMS` keep the operand's sign, whereas the
# ops of `_SIGNED` may change it.
_SUMS = frozenset(
    {
        *("Add", "Cast", "Sum", "Mean", "ReduceSum", "ReduceMean", "CumSum", "AveragePool", "GlobalAveragePool"),
        *("Relu", "LeakyRelu", "ReduceLogSumExp", "LogSoftmax"),
    }
)
_SIGNED = frozenset({"Sub", "Mul", "Div", "Neg", "Abs", "ReduceL1"})
# Ops whose result is constant, within rounding, for all arguments below the floor of either half type
_LEVELS_OFF = frozenset({"Softmax", "Sigmoid", "Tanh", "Exp", "Erf", "Softplus", "IsNaN", "IsInf", "HardSigmoid"})
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
# Numbers below this limit are surely masks. A number above the limit may be a factor, such as a temperature.
_SURELY = -1e6
# Maximum number of masks that may be added up. With more masks, half precision has too little range left for scores.
_MOST_SUMMANDS = 64
# Maximum number of different mask numbers. If there are more numbers, they must have other meanings than "as low as
# possible", and their replacements would be too close together.
_MOST_NUMBERS = 16


@dataclass
class MaskConstants:
    """Mask constants that are replaced by numbers in the range of half precision.

    Attributes:
        arrays: name -> (new array in half precision's range, lowest number before).
        carried: tensors that a mask reaches. The lower end of their ranges is ignored.
    """

    arrays: dict[str, tuple[np.ndarray, float]] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)


@dataclass
class _MaskPath:
    """Path of a mask constant through the graph.

    Attributes:
        tensors: tensors that may contain the constant.
        thresholds: constants that the mask constant is compared with.
    """

    tensors: set[str]
    thresholds: set[str] = field(default_factory=set)


def expand_fills(graph: onnx.GraphProto, form: HalfFormat) -> None:
    """Replace each ConstantOfShape of a number outside the range of ``form`` by an Expand of a constant, in place."""
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
    """Find the constants that only mean "as low as possible", and numbers in half precision's range to replace them.

    The replacement, called the floor, is −1.5·2ᵏ, with k as large as the type and the number of added masks allow.
    Scores can be added to it without overflow. If a small score is added to the floor, the sum rounds to the floor, as
    with float32's lowest number. The exponential of the floor is 0, and a fully masked row does not become NaN. Numbers
    that are compared with each other keep their order.

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
        # The lowest number becomes the floor. Higher numbers outside half precision's range become numbers above the
        # floor, in the same order.
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
    """Follow a constant outside half precision's range to its readers; None if it is not a mask."""
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
    """Remove constants that may be compared with numbers that are not masks.

    Set the thresholds of the remaining paths.
    """
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
    """Collect the constants that the comparisons on a path read; None if the comparisons also read other values."""
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
    """Map each tensor that contains only elements of constants to these constants."""
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
    """List the operands from which an op in `_CHOICES` takes its elements."""
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
    """List the numbers below half precision's range in the constants ``names``, lowest first."""
    every: set[float] = set()
    for name in names:
        array = initializer_values(view.constants[name])
        every |= {float(v) for v in np.unique(array[np.isfinite(array)]) if v < -view.form.largest}
    return sorted(every)


def _others_are_above(view: PrecisionView, names: Iterable[str], highest: float) -> bool:
    """Return True if the unchanged numbers of ``names`` are above ``highest``, the highest replaced number."""
    for name in names:
        array = initializer_values(view.constants[name])
        kept = array[np.isfinite(array) & (array >= -view.form.largest)]
        if (kept <= highest).any():
            return False
    return True


def _group_meeting_constants(ways: Mapping[str, _MaskPath]) -> list[list[str]]:
    """Group constants that occur in the same tensor or comparison, because their numbers have to keep their order."""
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
    """Return the largest number of masks that are added up on any path to a softmax."""
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
    """Return the lowest −1.5·2ᵏ that can be added ``summands`` times to a score without overflow; None if there are too
    many summands.
    """
    if summands > _MOST_SUMMANDS:
        return None
    exponent = int(np.floor(np.log2(view.form.largest / (1.5 * summands))))
    return -1.5 * 2.0**exponent


# ------------------------------------------------------------------ ranges of other tensors


def mask_ranges(view: PrecisionView, carried: Collection[str]) -> dict[str, TensorRange]:
    """Compute the ranges of tensors that may contain a constant outside the type's range, or a sum with one.

    The samples of calibration may not contain an input for which the constant is chosen.

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
    """Return the range that the ranges ``found`` give to a node's result; None if the node does not pass them on."""
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
    # The result of a Max is at least as large as the operand outside ``found``, which is not a low number.
    if op == "Max" and len(own) < len(read):
        low = 0.0
    if op == "Min" and len(own) < len(read):
        high = 0.0
    if op == "Clip":
        low = max(low, _clip_bound(view, node, 1, low))
        high = min(high, _clip_bound(view, node, 2, high))
    return TensorRange(low, high)


def _clip_bound(view: PrecisionView, node: onnx.NodeProto, place: int, otherwise: float) -> float:
    """Return a constant bound of a Clip if half precision can represent it, otherwise ``otherwise``."""
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
