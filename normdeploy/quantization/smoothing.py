"""By what the inputs of linear layers are divided and lessened before they are quantized, so that least is lost.

Tried on rows that calibration saw: for each group of layers that read one tensor, the error of their products as it is
and with factors s = max|x|^α / max|W|^(1 − α) of some α for each channel (SmoothQuant, Xiao et al., arXiv 2211.10438).
Behind a norm they cost nothing when the model runs; elsewhere they are one op or two in front of the layer, and are
written where they take away a quarter of the error.

For symmetric integers behind no norm, each channel gets a range of its own besides (`factors_from_ranges`): (x − c)/s
has one range for all channels. What the samples show of one channel is little, and a channel that leaves its range
costs more than all rounding, so that the ranges are wider than that, by how much the error on rows of other samples
says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .activation_stats import ActivationStats
from .number_formats import CodeFormat, quantize_dequantize, quantize_dequantize_weight, step_for_range
from .scale_migration import InputCondition

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# of the error, at most, behind a norm and elsewhere
_WORTH = {True: 0.95, False: 0.75}
# rows, of which nothing can be said
_FEWEST = 16
# of the variance that rounding the weights adds, which `gptq` leaves on inputs it did not see
_COMPENSATED = 0.7
# rows that are rounded and multiplied, where no formula says what comes of it
_SIMULATED = 512
# of the largest factor
_FINEST = 2.0**-12
# of the largest product of a channel and its weights: less is lost by all rounding
_IDLE = 2.0**-16
# times a power of two: numbers of three binary digits
COARSE = np.arange(4, 9) / 8
# of a shift: by less, float32 leaves too few digits of what is scaled
_SHOWN = 2.0**-12
_FEW_ALPHAS = (0.5, 0.7, 0.9)
# quantiles of the channels' half widths, below which none is
_LEAST = (0.5, 0.8, 0.95)
# of their median, by which each is wider than what was seen of it
_ROOMS = (0.0, 0.5, 1.0)


# least and room of `factors_from_ranges`, alpha, or nothing
Choice = tuple[float, float] | float | None


@dataclass(frozen=True)
class LayerGroup:
    """Layers that read one tensor.

    ``weights``: float64 [channels, outputs] of each. ``scale``, ``shift``: the tensor is scale·n + shift of what a norm
    makes; None behind no norm.
    """

    tensor: str
    weights: tuple[np.ndarray, ...]
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    # the norm writes any factor
    free: bool = False


@dataclass(frozen=True)
class LayerFormats:
    """What a layer's input, None where it stays, and weight are quantized to; ``block``: input channels that share a
    scale of the weight, 0: each output channel has its own."""

    activation: CodeFormat | None
    weight: CodeFormat
    block: int = 0


@dataclass(frozen=True)
class SeenRows:
    """Rows of a layer's input, what its channels reach, and the length of each row's product as it is, by which its
    error counts: the norm behind brings all rows to one, and of some tokens a channel is a hundred times as large as of
    the others (Sun et al., Massive Activations, arXiv 2402.17762)."""

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    lengths: np.ndarray

    def divided(self, s: np.ndarray, c: np.ndarray) -> SeenRows:
        """(x − c)/s."""
        return SeenRows((self.rows - c) / s, (self.low - c) / s, (self.high - c) / s, self.lengths)

    def crossed(self, first: slice, second: slice) -> list[SeenRows]:
        """All, and each half with what the channels of the other reach: values that calibration did not see must not
        be cut off."""
        parts = [self]
        for seen, judged in ((first, second), (second, first)):
            x = self.rows[seen]
            parts.append(SeenRows(self.rows[judged], x.min(0), x.max(0), self.lengths[judged]))
        return parts


def choose_condition(
    group: LayerGroup, seen: ActivationStats, activation: CodeFormat | None, weight: CodeFormat, block: int = 0
) -> InputCondition | None:
    """What serves the group best; None: nothing more than the migration of gamma and beta, if there is a norm.

    Args:
        activation: what the tensor is quantized to; None: the weights alone are (AWQ, Lin et al., arXiv 2306.00978).
        block: input channels that share a scale of the weight; 0: each output channel has its own.
    """
    rows, low, high = seen.rows.astype(np.float64), seen.low.astype(np.float64), seen.high.astype(np.float64)
    w = np.concatenate(group.weights, axis=1)
    if group.scale is not None and group.shift is not None:
        if not group.free:
            return None
        rows, low, high = undo_affine(rows, low, high, group.scale, group.shift)
        w = w * group.scale[:, None]
    if activation is None and not group.free:
        return None
    if len(rows) < _FEWEST:
        return None
    formats = LayerFormats(activation, weight, block)
    counted = activation is not None and activation.is_integer and not block
    shiftable = activation is not None and activation.low < 0 and not group.free
    if not counted:
        rows = rows[:: max(1, len(rows) // _SIMULATED)]
    known = SeenRows(rows, low, high, row_lengths(rows @ w))
    if counted and shiftable:
        return _condition_by_ranges(known, w, formats)
    shifts = ("", "middle") if shiftable else ("",)
    parts = known.crossed(slice(0, None, 2), slice(1, None, 2))

    def candidate_error(shift: str, alpha: float | None) -> float:
        errors = []
        for part in parts:
            s, c = _smoothing_factors_and_shift(part.low, part.high, w, shift, alpha, group.free)
            if counted:
                measure = expected_error
            else:
                measure = relative_error
            errors.append(measure(part.divided(s, c), w * s[:, None], formats))
        return float(np.sqrt(np.mean(np.square(errors))))

    choices = [(shift, alpha) for shift in shifts for alpha in (None, *ALPHAS)]
    errors = {choice: candidate_error(*choice) for choice in choices}
    best = min(choices, key=lambda choice: errors[choice])
    if best == ("", None) or errors[best] >= _WORTH[group.free] * errors["", None]:
        return None
    s, c = _smoothing_factors_and_shift(low, high, w, *best, coarse=group.free)
    kind = "shift" if best[1] is None else "smooth"
    return InputCondition(s, c if best[0] else None, kind, best[1], recentred=_is_nearer_to_zero(rows, c))


def undo_affine(
    rows: np.ndarray, low: np.ndarray, high: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n of y = scale·n + shift: its rows and ends. A channel whose scale is next to nothing beside its shift shows
    nothing of n, of which only |n| ≤ √C is known (Σ n² ≤ C, of C channels)."""
    shown = np.abs(scale) > np.maximum(_SHOWN * np.abs(shift), np.finfo(np.float32).tiny)
    divisor = np.where(shown, scale, 1.0)
    bound = float(np.sqrt(len(scale)))
    rows, low, high = ((x - shift) / divisor for x in (rows, low, high))
    low, high = np.minimum(low, high), np.maximum(low, high)
    return np.where(shown, rows, 0.0), np.where(shown, low, -bound), np.where(shown, high, bound)


def _condition_by_ranges(known: SeenRows, w: np.ndarray, formats: LayerFormats) -> InputCondition | None:
    """A range of its own for each channel, where that takes away a quarter of the error.

    Each half of the samples is rounded and multiplied with the ranges that the other half gives.
    """
    middle = len(known.rows) // 2
    parts = known.crossed(slice(middle), slice(middle, None))

    def choice_error(choice: Choice) -> float:
        return float(np.mean([_range_error(part, w, choice, formats) for part in parts]))

    wide: list[Choice] = [None, *((least, room) for least in _LEAST for room in _ROOMS)]
    errors = {choice: choice_error(choice) for choice in (*wide, *_FEW_ALPHAS)}
    best = min(wide, key=lambda choice: errors[choice])
    narrow = min(_FEW_ALPHAS, key=lambda alpha: errors[alpha])
    # it leaves less room for what was not seen
    if np.sqrt(errors[narrow]) < _WORTH[False] * np.sqrt(errors[best]):
        best = narrow
    if best is None or np.sqrt(errors[best]) >= _WORTH[False] * np.sqrt(errors[None]):
        return None
    s, c, reach = _factors_and_shifts(known, w, best, formats)
    if isinstance(best, float):
        alpha = best
    else:
        alpha = None
    return InputCondition(s, c if c.any() else None, "smooth", alpha, reach, _is_nearer_to_zero(known.rows, c))


def _is_nearer_to_zero(rows: np.ndarray, c: np.ndarray) -> np.ndarray:
    """bool [channels]: the root mean square of x is at most that of x − c."""
    return np.asarray((rows**2).mean(0) <= ((rows - c) ** 2).mean(0))


def _range_error(part: SeenRows, w: np.ndarray, choice: Choice, formats: LayerFormats) -> float:
    """The mean square of the products' error, that of the rounded inputs as it is and that of the weights expected."""
    assert formats.activation is not None
    s, c, reach = _factors_and_shifts(part, w, choice, formats)
    z = ((part.rows - c) / s).astype(np.float32)
    off = quantize_dequantize(z, step_for_range(-reach, reach, formats.activation)) - z
    wide = (w * s[:, None]).astype(np.float32)
    share = 1 / part.lengths**2
    rounded = float(np.mean(((off @ wide) ** 2).sum(1) / part.lengths**2))
    return rounded + _weight_error(z, wide, share, formats.weight)


def _factors_and_shifts(
    known: SeenRows, w: np.ndarray, choice: Choice, formats: LayerFormats
) -> tuple[np.ndarray, np.ndarray, float]:
    """Factors, shifts and reach: those of `factors_from_ranges`, of an alpha (a channel that is never on, with large
    weights, needs one), or none."""
    activation, low, high = formats.activation, known.low, known.high
    assert activation is not None
    if isinstance(choice, tuple):
        return factors_from_ranges(low, high, *choice, activation)
    s, c = _smoothing_factors_and_shift(low, high, w, "" if choice is None else "middle", choice, False)
    reach = float(max(np.abs((low - c) / s).max(), np.abs((high - c) / s).max()))
    if choice is None or reach == 0:
        return (s, c, reach)
    return (s, _align_shifts_to_codes(c, s, reach, activation), reach)


def _align_shifts_to_codes(c: np.ndarray, s: np.ndarray, reach: float, activation: CodeFormat) -> np.ndarray:
    """The shifts next to ``c`` with which zero is a code in every channel."""
    code = s * step_for_range(-reach, reach, activation).scale
    return np.asarray((np.rint(c / code) * code).astype(np.float32), np.float64)


def factors_from_ranges(
    low: np.ndarray, high: np.ndarray, least: float, room: float, activation: CodeFormat
) -> tuple[np.ndarray, np.ndarray, float]:
    """Factors s and shifts c over the channels, and r: what lies between −r and r of (x − c)/s is in range.

    ``low``, ``high``: what was seen of each channel. ``least``, ``room``: as `_LEAST` and `_ROOMS`. Zero is a code in
    every channel: what is switched off (by GELU, most of the time) is then exact, and in a channel that holds a massive
    activation of a few tokens that is nearly every row.
    """
    half = (high - low) / 2
    wide = np.maximum(half, np.quantile(half, least)) + room * float(np.median(half))
    reach = float(wide.max(initial=0.0))
    if reach == 0:
        return np.ones_like(half), np.zeros_like(half), 0.0
    wide = np.maximum(wide, reach * _FINEST)
    s = (wide / reach).astype(np.float32).astype(np.float64)
    # nothing was below any channel's low
    middle = np.maximum((low + high) / 2 - wide, low.min()) + wide
    return s, _align_shifts_to_codes(middle, s, reach, activation), reach


def expected_error(part: SeenRows, w: np.ndarray, formats: LayerFormats) -> float:
    """As `relative_error` for integers, of which no product has to be rounded: rounding is a noise of step²/12 that
    the other numbers know nothing of (Widrow, Kollar, Quantization Noise, 2008), and what lies beyond the range is cut
    off. The mean of the weights' errors is left out: GPTQ takes it away first, as all inputs have it in common."""
    activation = formats.activation
    assert activation is not None
    step = step_for_range(float(part.low.min()), float(part.high.max()), activation)
    first, last = ((code - step.zero_point) * step.scale for code in (activation.low, activation.high))
    wide = w.astype(np.float32)
    share = 1 / part.lengths**2
    z = part.rows.astype(np.float32)
    excess = z - np.clip(z, first - step.scale / 2, last + step.scale / 2)
    cut = excess.any(1)
    clipped = float((share[cut] * ((excess[cut] @ wide) ** 2).sum(1)).sum()) / len(z)
    noise = step.scale**2 / 12 * float((wide**2).sum(dtype=np.float64)) * float(share.mean())
    return float(np.sqrt(clipped + noise + _weight_error(z, wide, share, formats.weight)))


def _weight_error(z: np.ndarray, w: np.ndarray, share: np.ndarray, weight: CodeFormat) -> float:
    """What rounding the weights leaves of the products' mean square, each row of ``z`` by its ``share``."""
    steps = np.abs(w).max(0).astype(np.float64) / weight.high
    # a weight that rounds to 0 is lost itself
    lost = np.minimum(steps**2 / 12, np.square(w, dtype=np.float64)).sum(1)
    spread = share @ np.square(z - z.mean(0)) / len(z)
    return _COMPENSATED * float(spread @ lost)


def _smoothing_factors_and_shift(
    low: np.ndarray, high: np.ndarray, w: np.ndarray, shift: str, alpha: float | None, coarse: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Over the channels, in float32: ``shift`` "" is 0, ``alpha`` None is 1."""
    if shift:
        c = (low + high) / 2
    else:
        c = np.zeros_like(low)
    c = c.astype(np.float32).astype(np.float64)
    if alpha is None:
        return np.ones_like(low), c
    return smoothing_factors(np.maximum(np.abs(low - c), np.abs(high - c)), np.abs(w).max(1), alpha, coarse), c


def smoothing_factors(x: np.ndarray, w: np.ndarray, alpha: float, coarse: bool) -> np.ndarray:
    """max|x|^α / max|W|^(1 − α), the largest 1; of channels that no product hangs on what keeps them, and their
    weights, in the range of the others.

    ``coarse``: next to that, and 1/s a number of three binary digits, which a norm's gamma can be without rounding, in
    half precision too.
    """
    size = x * w
    tiny = np.finfo(np.float32).tiny
    live = size > _IDLE * size.max(initial=0.0)
    if not live.any():
        return np.ones_like(x)
    s = np.ones_like(x)
    s[live] = x[live] ** alpha / w[live] ** (1 - alpha)
    s[live] = np.maximum(s[live] / s[live].max(), _FINEST)
    # half of the others' range, at most
    least = 2 * x[~live] / (x[live] / s[live]).max()
    s[~live] = np.clip(1.0, least, (w[live] * s[live]).max() / np.maximum(w[~live], tiny))
    if not coarse:
        return s.astype(np.float32).astype(np.float64)
    fraction, exponent = np.frexp(1 / s)
    # nearest by ratio
    bounds = np.sqrt(COARSE[:-1] * COARSE[1:])
    return np.asarray(1 / np.ldexp(COARSE[np.searchsorted(bounds, fraction)], exponent))


def row_lengths(products: np.ndarray) -> np.ndarray:
    """The length of each row, of next to nothing that of a thousandth of the mean: [rows]."""
    lengths = np.linalg.norm(products, axis=1)
    return np.maximum(lengths, max(float(np.sqrt(np.mean(lengths**2))) * 2.0**-10, 1e-300))


def relative_error(part: SeenRows, w: np.ndarray, formats: LayerFormats) -> float:
    """The root of the mean over the rows of ‖x'·W' − x·W‖² / length², the range of x that of all channels."""
    x = part.rows
    block = formats.block
    if formats.activation is not None:
        step = step_for_range(float(part.low.min()), float(part.high.max()), formats.activation)
        x = quantize_dequantize(x.astype(np.float32), step).astype(np.float64)
    rounded = quantize_dequantize_weight(w.astype(np.float32), 0 if block else 1, formats.weight, block)
    off = x @ rounded - part.rows @ w
    return float(np.sqrt(np.mean((np.linalg.norm(off, axis=1) / part.lengths) ** 2)))
