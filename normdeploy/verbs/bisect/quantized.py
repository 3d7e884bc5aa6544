"""Where a quantized file goes wrong: the first quantizer or weight that is not what its steps explain, and why.

What is suspected stands in the file: a range that clips, a pair that is not each other's inverse, a weight that is not
within half a step of the parameter that it is next to. Each suspect is tried, in the file's order: with it right (the
parameter in its place, or the pair left out) the output has to come nearer to the reference by a third, or where
nothing does that, nearer at all. What is found stays mended while the search goes on, until the output is within its
budget (`verbs.verify.steps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx

from ...evaluate.quantize import spread
from ...graphs.protos import module
from ...graphs.quantized import DEQUANTIZE, INTEGER, QUANTIZE, Quantization, quantizes
from ...runtimes.draws import Draw
from ...runtimes.exact import Array
from ...runtimes.steps import StepRunner
from ..verify.originals import Original, Reference
from ..verify.results import OutputResult
from ..verify.steps import BOTH, UNROUNDED, VOID, CaseBudget
from ..verify.stored import folded, stored_in
from .changes import Cause
from .hunt import Fault
from .runtime import Widened

_ALIKE = 0.5  # of a parameter's root mean square, that a weight may be off by and still be that one
_HELPS = (2 / 3, 0.97)  # what one fault among several leaves is tried after what one alone would
_HALF = 0.501  # steps: scales are float32
_COARSE = 1 / 8  # of a range, below which three bits and more are not used
_APART = 16.0  # times, from which on one scale for all channels wastes four bits on the smallest
_FLOAT32 = 1e-5  # of an output's largest number: what evaluating in float32 may cost, far below any step
_EQUAL = 0.02  # relative, of one number for a whole channel
MOST = 5


@dataclass(frozen=True)
class Suspect:
    """``made``: the DequantizeLinear's result; ``right``: what it should be, None where that is what was quantized;
    ``steps``: how far off it is, in steps."""

    node: onnx.NodeProto
    made: str
    tensor: str
    right: Array | None
    cause: Cause
    error: float
    allowed: float
    scale: float


@dataclass(frozen=True)
class _State:
    """``error``: the output's largest, ``typical``: its root mean square, which one element does not decide;
    ``steps``: what the steps move it by over its size."""

    error: float
    typical: float
    steps: float
    right: bool


class QuantizedHunt:
    """``result``: of ``verify``, for an output that is wrong on ``feeds``."""

    def __init__(
        self, model: Original, proto: onnx.ModelProto, result: OutputResult, case: str, feeds: Mapping[str, Array]
    ) -> None:
        self._proto, self._result, self._case, self._feeds = proto, result, case, feeds
        self._quantization = Quantization(proto)
        stored = {n: v.astype(np.float64) for n, v in stored_in(model).items() if v.dtype.kind == "f"}
        self._parameters = stored | folded(model, stored)
        self._runner = StepRunner(proto)
        self._reference = Reference(model).runner.infer(feeds)[result.output]
        self._values = self._runner.all_values(feeds, Draw())
        self._ranges = {s.tensor: s for s in self._runner.saturations()}

    def faults(self) -> list[Fault]:
        """Those that make the output wrong, in the file's order."""
        held: dict[str, Array | None] = {}
        named: list[Fault] = []
        first = now = self._state(held)
        suspects = list(self._suspects())
        for helps, suspect in ((helps, suspect) for helps in _HELPS for suspect in suspects):
            if now.right or len(named) == MOST:
                break
            if suspect.made in held:
                continue
            after = self._state({**held, suspect.made: suspect.right})
            if after.right or after.typical <= helps * now.typical or after.steps <= helps * now.steps:
                held[suspect.made], now = suspect.right, after
                named.append(self._fault(suspect, first.error, after))
        return named

    def _state(self, held: Mapping[str, Array | None]) -> _State:
        """The output with these mended, beside the budget that the file has then."""

        def run(feeds: Mapping[str, Array], draw: Draw) -> dict[str, Array]:
            values = self._runner.all_values(feeds, replace(draw, held=held))
            return {self._result.output: values[self._result.output]}

        unrounded = self._result.runtime == UNROUNDED
        got = run(self._feeds, Draw("exact" if unrounded else None))[self._result.output]
        if got.shape != self._reference.shape:
            return _State(float("inf"), float("inf"), float("inf"), False)
        away = np.abs(got.astype(np.float64) - self._reference)
        budget = CaseBudget(run, self._feeds)
        base = np.full(away.shape, _FLOAT32 * float(np.nanmax(np.abs(self._reference), initial=0.0)))
        bound = budget.allowed(self._result.output, ("weights",) if unrounded else BOTH, base, away)
        steps = budget.relative(self._result.output)
        right = bool((away <= bound).all()) and (unrounded or steps <= VOID)
        typical = float(np.sqrt(np.nanmean(away**2))) if away.size else 0.0
        return _State(float(np.nanmax(away, initial=0.0)), typical, steps, right)

    def _fault(self, suspect: Suspect, before: float, after: _State) -> Fault:
        r, node = self._result, suspect.node
        return Fault(
            runtime=r.runtime,
            case=self._case,
            module=module(node) or self._module(suspect.made),
            tensor=suspect.tensor,
            nodes=(f"{node.op_type} {node.name}".strip(),),
            operator="",
            wrong="file",
            error=suspect.error,
            allowed=suspect.allowed,
            scale=suspect.scale,
            reason="",
            kind=suspect.cause.kind,
            cause=suspect.cause.text,
            widened=Widened(None, reason="the file is quantized"),
            output=r.output,
            output_error=before,
            output_allowed=r.allowed,
            output_reason="",
            mended_error=after.error,
            mended=after.right,
        )

    def _module(self, made: str) -> str:
        return next((m for reader in self._quantization.readers.get(made, ()) if (m := module(reader))), "")

    # ------------------------------------------------------------------ suspects

    def _suspects(self) -> Iterator[Suspect]:
        for node in self._proto.graph.node:
            if node.op_type in INTEGER and quantizes(node):
                suspect = self._integer(node)
            elif node.op_type != DEQUANTIZE or not quantizes(node):
                continue
            else:
                fixed = self._quantization.is_weight(node.output[0])
                suspect = self._weight(node) if fixed else self._pair(node)
            if suspect is not None:
                yield suspect

    def _pair(self, node: onnx.NodeProto) -> Suspect | None:
        q = self._quantization
        quantize = q.makers.get(node.input[0])
        if quantize is None or quantize.op_type != QUANTIZE:
            return None
        mine, theirs, source = q.scheme(node), q.scheme(quantize), quantize.input[0]
        x, back = self._values[source], self._values[node.output[0]]
        error = float(np.nanmax(np.abs(back - x), initial=0.0))
        size = float(np.nanmax(np.abs(x), initial=0.0))
        half = 0.5 * float(np.max(theirs.scale)) if theirs.scale is not None else float("nan")
        suspect = Suspect(node, node.output[0], source, None, Cause("unknown", ""), error, half, size)
        for kind, ours, other in (
            ("scale", mine.scale, theirs.scale),
            ("zero point", mine.zero_point, theirs.zero_point),
        ):
            if ours is not None and other is not None and not np.array_equal(ours, other):
                text = f"{_called(node)} has {_number(ours)}, the QuantizeLinear before it {_number(other)}"
                return replace(suspect, cause=Cause(kind, f"the {kind} of {text}"))
        seen = self._ranges.get(source)
        if seen:
            return replace(suspect, cause=Cause("saturation", f"its scale is too small: {seen}"))
        if seen is not None and 0 < seen.used < _COARSE:
            text = f"its scale is too large: {source!r} takes {seen.used:.1%} of the range of {_called(quantize)}"
            return replace(suspect, cause=Cause("coarse", text))
        return None

    def _weight(self, node: onnx.NodeProto) -> Suspect | None:
        scheme, got = self._quantization.scheme(node), self._values[node.output[0]]
        if got.ndim < 2 or scheme.scale is None:
            return None
        step = np.abs(spread(scheme.scale, got.shape, scheme.axis, scheme.block).astype(np.float64))
        step = np.broadcast_to(step, got.shape)
        name, right = self._nearest(got)
        if right is None:
            return None
        off = np.abs(got - right)
        worst = np.unravel_index(int(np.argmax(off / step)), off.shape)
        suspect = Suspect(
            node,
            node.output[0],
            node.output[0],
            right,
            Cause("weights", ""),
            float(off[worst]),
            float(step[worst] / 2),
            float(np.abs(right).max()),
        )
        if float((off / step)[worst]) > _HALF:
            return replace(suspect, cause=_wrong_weight(node, name, got, right, step))
        if scheme.granularity == "tensor" and (apart := _apart(right)) > _APART:
            text = f"one scale for all of {name!r}, whose channels differ {apart:.3g} times in size: give each its own"
            return replace(suspect, cause=Cause("granularity", text))
        return None

    def _integer(self, node: onnx.NodeProto) -> Suspect | None:
        """Look at the weight of a MatMulInteger or ConvInteger, whose scale is multiplied in behind it."""
        q = self._quantization
        codes, scale = q.constant(q.behind(node.input[1])), self._scale_behind(node)
        if codes is None or scale is None:
            return None
        zero = q.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        offset = np.zeros(()) if zero is None else zero.astype(np.float64)
        got = (codes.astype(np.float64) - offset) * scale
        name, right = self._nearest(got)
        if right is None:
            return None
        step = np.broadcast_to(np.abs(scale), got.shape)
        off = np.abs(got - right)
        worst = np.unravel_index(int(np.argmax(off / step)), off.shape)
        # A code that is clipped at the end of its range lies further away.
        if float((off / step)[worst]) <= 1:
            return None
        return Suspect(
            node,
            node.output[0],
            node.input[1],
            right / scale + offset,
            _wrong_weight(node, name, got, right, step),
            float(off[worst]),
            float(step[worst] / 2),
            float(np.abs(right).max()),
        )

    def _scale_behind(self, node: onnx.NodeProto) -> Array | None:
        """The weight's scale: the constant among what the product is multiplied with."""
        q, name = self._quantization, node.output[0]
        while (readers := q.readers.get(name, [])) and readers[0].op_type in ("Cast", "Reshape", "Mul"):
            if readers[0].op_type == "Mul":
                (other,) = [other for other in readers[0].input if other != name] or [name]
                maker = q.makers.get(other)
                both = [other, *([] if maker is None or maker.op_type != "Mul" else maker.input)]
                constants = [value for each in both if (value := q.constant(each)) is not None]
                return None if not constants else constants[0].astype(np.float64)
            name = readers[0].output[0]
        return None

    def _nearest(self, got: Array) -> tuple[str, Array | None]:
        """The model's parameter that a weight is next to, laid as it is; None where it is like none, as after a
        migration."""
        best: tuple[float, str, Array | None] = (_ALIKE, "", None)
        for name, parameter in self._parameters.items():
            for laid in (parameter, parameter.T):
                if laid.shape == got.shape:
                    size = float(np.sqrt(np.mean(laid**2)))
                    away = float(np.median(np.abs(got - laid))) / size if size else np.inf
                    best = min(best, (away, name, laid), key=lambda found: found[0])
        return best[1], best[2]


def _wrong_weight(node: onnx.NodeProto, name: str, got: Array, right: Array, step: Array) -> Cause:
    """What is wrong with a weight that is not within half a step of the parameter, by channels of either side."""
    told = f"{_called(node)} gives {{}} of the model's {name!r}"
    wrong = (np.abs(got - right) > _HALF * step).any(tuple(range(2, got.ndim)))
    for axis in range(2):
        channels = np.flatnonzero(wrong.any(1 - axis))
        if not 0 < len(channels) < got.shape[axis]:
            continue
        rows, theirs = np.moveaxis(got, axis, 0)[channels], np.moveaxis(right, axis, 0)[channels]
        steps = np.moveaxis(step, axis, 0)[channels]
        others = [int(np.argmax([_cosine(row, other) for other in theirs])) for row in rows]
        exchanged = sorted(others) == [*range(len(others))] and others != sorted(others)
        if exchanged and all(_scaled(rows[i], theirs[k], steps[i]) for i, k in enumerate(others)):
            pairs = ", ".join(f"{channels[k]} for {channels[i]}" for i, k in enumerate(others) if i != k)
            return Cause("channels", told.format(f"other channels ({pairs})"))
        if text := _factor(rows, theirs, steps):
            kind = "zero point" if "steps" in text else "scale"
            which = f"{'channel' if len(channels) == 1 else 'channels'} {', '.join(map(str, channels[:5]))}"
            return Cause(kind, told.format(f"{text} in {which}"))
    if text := _factor(got, right, step):
        return Cause("zero point" if "steps" in text else "scale", told.format(text))
    off = np.abs(got - right) / step
    return Cause("weights", told.format(f"values that are off by up to {off.max():.3g} steps"))


def _cosine(one: Array, other: Array) -> float:
    size = float(np.sqrt((one * one).sum() * (other * other).sum()))
    return float((one * other).sum()) / size if size else 0.0


def _scaled(row: Array, other: Array, step: Array) -> bool:
    """Whether a channel is another one, with its codes under a scale that is not its own."""
    factor = float((row * other).sum() / (other * other).sum()) if other.any() else 0.0
    return bool((np.abs(row - factor * other) <= step).all())


def _factor(got: Array, right: Array, step: Array) -> str:
    """Whether all is off by one factor, or by one number of steps; "" where by neither."""
    factor = float((got * right).sum() / (right * right).sum()) if right.any() else 1.0
    if abs(factor - 1) > _EQUAL and (np.abs(got - factor * right) <= step).all():
        return f"{factor:.3g} times the values"
    shift = float(np.median((got - right) / step))
    if abs(shift) > _HALF and (np.abs(got - right - shift * step) <= 0.75 * step).all():
        return f"values {shift:.3g} steps beside those"
    return ""


def _apart(weight: Array) -> float:
    """The largest over the smallest size of a channel, of the axis where that is more."""
    ratios = []
    for axis in range(2):
        sizes = np.abs(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)).max(1)
        ratios.append(float(sizes.max() / sizes[sizes > 0].min()) if (sizes > 0).any() else 1.0)
    return max(ratios)


def _called(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} of {node.output[0]!r}"


def _number(value: Array) -> str:
    return f"{value.reshape(-1)[0]:.6g}" if value.size == 1 else f"{value.size} numbers"
