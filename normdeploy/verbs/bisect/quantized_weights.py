"""Match the weights of a quantized file with the model's parameters, and describe how they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx

from ...evaluate.quantize_ops import broadcast_parameter
from ...graphs.quantization_info import DEQUANTIZE, INTEGER, GraphQuantization, is_quantization_node
from ...types import Array, Arrays
from ..verify.bias_shifts import BatchNormShifts
from ..verify.model_tensors import fold_batch_norms, iter_bias_shifts, model_tensors_by_name
from ..verify.parameter_orders import iter_arrangements
from ..verify.reference_models import Original
from .recurrent_weights import iter_packed_weights
from .stale_weights import cosine_similarity
from .trial_changes import Cause

# Largest median error at which a weight matches a parameter, relative to the parameter's root mean square.
_ALIKE = 0.5
# The same limit if the parameter may be multiplied by a factor. It is stricter, so that few pairs match by chance.
_ALIKE_BY_A_FACTOR = 0.1
# Largest error of a rounded weight in steps: half a step, plus a margin for the rounding of float32 scales.
_HALF = 0.501
# The same for the weight of a product of integers. It is larger, because codes may be clipped at the end of the range.
_CLIPPED = 1.0
# Relative error below which a factor counts as 1.
_EQUAL = 0.02
# Weights with at most this many elements are not matched up to a factor, because any parameter would match.
_ONE_OR_TWO = 2
# Possible numbers of directions of an LSTM.
_ONE_OR_BOTH = (1, 2)
# Input indices of an LSTM's weights: those for its input and those for its state.
_INPUT_AND_STATE = (1, 2)
# Maximum number of elements of a weight that are compared, evenly spaced.
_FEW = 4096


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """Weight of a file, and the parameter that is nearest to it.

    Attributes:
        made: tensor that is set to its right value in a run with the weight mended
            (`runtimes.rounding_draws.RoundingDraw`).
        tensor: tensor that a fault names.
        got: the dequantized weight.
        step: quantization step of each element.
        name, right: name and values of the parameter, in the layout of the weight; ``right`` is None if no parameter
            matches.
        scale, offset: scale and zero point of the weight of a product of integers, whose scale is applied by later
            nodes; None for other weights.
    """

    node: onnx.NodeProto
    made: str
    tensor: str
    got: Array
    step: Array
    granularity: str
    name: str
    right: Array | None
    scale: Array | None = None
    offset: Array | None = None

    @cached_property
    def steps_off(self) -> float:
        """Return the largest distance from the parameter, in steps; inf if no parameter matches."""
        if self.right is None:
            return float("inf")
        return float((np.abs(self.got - self.right) / self.step).max(initial=0.0))

    @property
    def is_right(self) -> bool:
        """Return whether rounding the parameter gives this weight."""
        return self.steps_off <= (_HALF if self.scale is None else _CLIPPED)

    @property
    def held_value(self) -> Array:
        """Return the value of ``made`` in a run with the weight mended: the parameter, or its codes for a product of
        integers.
        """
        assert self.right is not None
        if self.scale is None or self.offset is None:
            return self.right
        return np.asarray(self.right / self.scale + self.offset)

    def unrounded_values(self, mended: bool) -> Array:
        """Return the weight without its rounding.

        Args:
            mended: use the parameter even if the weight is wrong.

        Returns:
            The parameter. If the weight is wrong and not ``mended``, the file's own values.
        """
        if self.right is not None and (mended or self.is_right):
            value = self.right
        else:
            value = self.got
        return np.asarray(value if self.scale is None else value / self.scale)

    @property
    def worst_error(self) -> tuple[float, float]:
        """Return the error of the element with the largest error in steps, and half the step of this element."""
        assert self.right is not None
        off = np.abs(self.got - self.right)
        place = np.unravel_index(int(np.argmax(off / self.step)), off.shape)
        return float(off[place]), float(self.step[place] / 2)


class ModelParameters:
    """Parameters of a model, both unchanged and with BatchNorms folded in."""

    def __init__(self, model: Original) -> None:
        stored = {n: v.astype(np.float64) for n, v in model_tensors_by_name(model).items() if v.dtype.kind == "f"}
        self._by_size: dict[int, list[tuple[str, Array]]] = {}
        for name, value in [*(stored | fold_batch_norms(model, stored)).items(), *_iter_lstm_directions(stored)]:
            self._by_size.setdefault(value.size, []).append((name, value))
        self._shifts = [s for s in iter_bias_shifts(model, stored) if isinstance(s, BatchNormShifts)]

    def iter_weights(self, proto: onnx.ModelProto, values: Arrays) -> Iterator[QuantizedWeight]:
        """Match each quantized weight of a file with a parameter, in the order of the file.

        Args:
            values: every tensor of a run of the file in float64.

        Yields:
            Each weight with its nearest parameter.
        """
        q = GraphQuantization(proto)
        for node in q.nodes:
            if not is_quantization_node(node):
                continue
            if node.op_type == DEQUANTIZE and q.is_weight(node.output[0]):
                made = self._weight_of_dequantize(q, node, values)
            elif node.op_type in INTEGER:
                made = self._weight_of_integer_product(q, node)
            else:
                continue
            if made is not None:
                yield made

    def _weight_of_dequantize(
        self, q: GraphQuantization, node: onnx.NodeProto, values: Arrays
    ) -> QuantizedWeight | None:
        scheme = q.scheme_of(node)
        got = values[node.output[0]]
        scale = scheme.scale if scheme.scale is not None else values.get(node.input[1])
        if scale is None:
            return None
        step = np.abs(broadcast_parameter(scale, got.shape, scheme.axis, scheme.block).astype(np.float64))
        name, right = self._find_nearest(got)
        return QuantizedWeight(
            node=node,
            made=node.output[0],
            tensor=node.output[0],
            got=got,
            step=np.broadcast_to(step, got.shape),
            granularity=scheme.granularity,
            name=name,
            right=right,
        )

    def _weight_of_integer_product(self, q: GraphQuantization, node: onnx.NodeProto) -> QuantizedWeight | None:
        """Match the weight of a MatMulInteger or ConvInteger."""
        codes = q.constant_value(q.source_tensor(node.input[1]))
        scale = _find_scale_behind(q, node)
        if codes is None or scale is None:
            return None
        if len(node.input) > 3 and node.input[3]:
            zero = q.constant_value(node.input[3])
        else:
            zero = None
        if zero is None:
            offset = np.zeros(())
        else:
            offset = zero.astype(np.float64)
        got = (codes.astype(np.float64) - offset) * scale
        name, right = self._find_nearest(got)
        return QuantizedWeight(
            node=node,
            made=node.output[0],
            tensor=node.input[1],
            got=got,
            step=np.broadcast_to(np.abs(scale), got.shape),
            granularity="",
            name=name,
            right=right,
            scale=scale,
            offset=offset,
        )

    def _find_nearest(self, got: Array) -> tuple[str, Array | None]:
        """Find the parameter that is nearest to a weight, up to one factor, in the layout of the weight.

        If the quantizer scaled the channels of a weight (scale migration), no parameter matches.
        """
        best: tuple[float, str, Array | None] = (float("inf"), "", None)
        for name, parameter in self._iter_candidates(got):
            for laid in iter_arrangements(parameter, got):
                away = _relative_distance(got.reshape(-1), laid.reshape(-1))
                if away < best[0]:
                    best = (away, name, laid)
        return best[1], best[2]

    def _iter_candidates(self, got: Array) -> Iterator[tuple[str, Array]]:
        yield from self._by_size.get(got.size, ())
        if got.ndim == 1:
            for shifts in self._shifts:
                if shifts.size == got.size:
                    yield from zip(shifts.sources, shifts.values_of_rows()[0], strict=True)


def _iter_lstm_directions(stored: Arrays) -> Iterator[tuple[str, Array]]:
    """Yield the weights of each direction of an LSTM in ONNX's layout: [4·hidden, input]."""
    stacked = [(name, value) for name, value in stored.items() if value.ndim == 3 and len(value) in _ONE_OR_BOTH]
    for place in _INPUT_AND_STATE:
        stacked += iter_packed_weights("LSTM", place, stored)
    for name, value in stacked:
        for part in value:
            yield name, part


def _relative_distance(got: Array, laid: Array) -> float:
    """Return the relative distance of two tensors, up to one factor; inf if they are not similar."""
    few = slice(None, None, max(1, got.size // _FEW))
    a = got[few]
    b = laid[few]
    if not a.any() or not b.any():
        if a.any() == b.any():
            return 0.0
        return float("inf")
    large = (np.abs(b) >= np.median(np.abs(b))) & (b != 0)
    # With a free factor, a tensor of one number would match any other.
    if a.size > _ONE_OR_TWO:
        factor = float(np.median(a[large] / b[large]))
    else:
        factor = 1.0
    found = float("inf")
    for by, most in ((1.0, _ALIKE), (factor, _ALIKE_BY_A_FACTOR)):
        off = np.abs(a - by * b)
        size = float(np.sqrt(np.mean((by * b) ** 2)))
        if size and float(np.median(off)) < most * size:
            found = min(found, float(np.sqrt(np.mean(off**2))) / size)
    return found


def _find_scale_behind(q: GraphQuantization, node: onnx.NodeProto) -> Array | None:
    """Find the scale of the weight: the constant by which later nodes multiply the product."""
    name = node.output[0]
    while (readers := q.readers_by_tensor.get(name, [])) and readers[0].op_type in ("Cast", "Reshape", "Mul"):
        if readers[0].op_type == "Mul":
            (other,) = [other for other in readers[0].input if other != name] or [name]
            maker = q.makers.get(other)
            both = [other, *([] if maker is None or maker.op_type != "Mul" else maker.input)]
            constants = [value for each in both if (value := q.constant_value(each)) is not None]
            if not constants:
                return None
            return constants[0].astype(np.float64)
        name = readers[0].output[0]
    return None


def describe_wrong_weight(called: str, name: str, got: Array, right: Array, step: Array) -> Cause:
    """Describe how a weight differs from its parameter.

    The difference may be in all elements, in some channels of one of the first two axes, or in single elements.

    Args:
        called: the node, for the message.
        name: name of the parameter.
        step: quantization step of each number.

    Returns:
        A cause of kind "scale", "zero point", "channels" or "weights".
    """
    told = f"{called} gives {{}} of the model's {name!r}"
    if (found := _find_factor(got, right, step)) is not None:
        return Cause(found.kind, told.format(found.text))
    wrong = (np.abs(got - right) > _HALF * step).any(tuple(range(2, got.ndim)))
    for axis in range(min(2, got.ndim)):
        channels = np.flatnonzero(wrong.any(1 - axis) if got.ndim > 1 else wrong)
        if not 0 < len(channels) < got.shape[axis]:
            continue
        rows = np.moveaxis(got, axis, 0)[channels]
        theirs = np.moveaxis(right, axis, 0)[channels]
        steps = np.moveaxis(step, axis, 0)[channels]
        others = [int(np.argmax([cosine_similarity(row, other) for other in theirs])) for row in rows]
        exchanged = sorted(others) == [*range(len(others))] and others != sorted(others)
        if exchanged and all(_is_other_channel(rows[i], theirs[k], steps[i]) for i, k in enumerate(others)):
            pairs = ", ".join(f"{channels[k]} for {channels[i]}" for i, k in enumerate(others) if i != k)
            return Cause("channels", told.format(f"other channels ({pairs})"))
        if (found := _find_factor(rows, theirs, steps)) is not None:
            which = f"{'channel' if len(channels) == 1 else 'channels'} {', '.join(map(str, channels[:5]))}"
            return Cause(found.kind, told.format(f"{found.text} in {which}"))
    off = np.abs(got - right) / step
    count = int((off > _HALF).sum())
    worst = np.unravel_index(int(np.argmax(off)), off.shape)
    if off.ndim:
        where = f"at {[int(i) for i in worst]}"
    else:
        where = "there"
    values = f"{count} wrong values out of {off.size}, up to {off.max():.3g} steps off {where},"
    return Cause("weights", told.format(values))


def channel_size_ratio(weight: Array) -> float:
    """Compute the ratio of the largest to the smallest magnitude of a channel.

    Returns:
        The larger ratio of the first two axes, at least 1.
    """
    ratios = [1.0]
    for axis in range(2):
        sizes = np.abs(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)).max(1)
        if (sizes > 0).any():
            ratios.append(float(sizes.max() / sizes[sizes > 0].min()))
    return max(ratios)


def _is_other_channel(row: Array, other: Array, step: Array) -> bool:
    """Check that a channel equals another channel times a factor, as if the file had stored the codes of the other
    channel.
    """
    if other.any():
        factor = float((row * other).sum() / (other * other).sum())
    else:
        factor = 0.0
    return bool((np.abs(row - factor * other) <= step).all())


def _find_factor(got: Array, right: Array, step: Array) -> Cause | None:
    """Find one factor, or one number of steps, by which all elements are off; None if neither exists."""
    if right.any():
        factor = float((got * right).sum() / (right * right).sum())
    else:
        factor = 1.0
    if abs(factor - 1) > _EQUAL and (np.abs(got - factor * right) <= step).all():
        return Cause("scale", f"{factor:.3g} times the values")
    shift = float(np.median((got - right) / step))
    if abs(shift) > _HALF and (np.abs(got - right - shift * step) <= 0.75 * step).all():
        return Cause("zero point", f"values {shift:.3g} steps away from those")
    return None
