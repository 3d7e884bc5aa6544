"""Choose scales and shifts for inputs of linear layers that make the quantization error smallest.

Candidates are tried on rows of the calibration samples. The layers that read one tensor form a group. For each group,
the error of the layers' products is measured twice: without factors, and with one factor s per channel. The factors are
s = max|x|^α / max|W|^(1 − α), for several α (SmoothQuant, Xiao et al., arXiv 2211.10438). After a norm, factors cost
nothing at run time, because the norm absorbs them. Elsewhere they need one or two ops before the layer. There they are
used only if they remove a quarter of the error.

If a layer reads symmetric integers and no norm precedes it, factors from the range of each channel are tried too
(`factors_from_ranges`). With the factors s and shifts c, (x − c)/s has the same range in all channels. A few samples do
not show the whole range of a channel, and values outside the range cause a larger error than rounding. So the ranges
are made wider than observed. The error on rows of other samples decides how much wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .activation_stats import ActivationStats
from .number_formats import CodeFormat, quantize_dequantize, quantize_dequantize_weight, step_for_range
from .scale_migration import InputCondition

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Whether the tensor comes directly from a norm → largest share of the error that may remain, so that a change is worth
# its cost.
_WORTH = {True: 0.95, False: 0.75}
# Minimum number of rows; the error can't be estimated from fewer rows.
_FEWEST = 16
# Share of the error variance of rounded weights that remains after GPTQ, on inputs that GPTQ did not see
_COMPENSATED = 0.7
# Number of rows on which the error is measured, for formats without a formula for the error
_SIMULATED = 512
# Smallest factor, as a share of the largest factor
_FINEST = 2.0**-12
# A channel is idle if its largest input times its largest weight is below this share of the largest such product.
# Rounding loses smaller products anyway.
_IDLE = 2.0**-16
# Numbers of three binary digits; 1/s is such a number times a power of two.
COARSE = np.arange(4, 9) / 8
# Minimum ratio of scale to shift. With a smaller ratio, float32 leaves too few digits of the scaled part of y.
_SHOWN = 2.0**-12
_FEW_ALPHAS = (0.5, 0.7, 0.9)
# Candidates for the lower limit of each channel's half width, as quantiles of the half widths of all channels
_LEAST = (0.5, 0.8, 0.95)
# Candidates for the room that is added to each half width, as shares of the median half width
_ROOMS = (0.0, 0.5, 1.0)


# Candidate: (least, room) of `factors_from_ranges`, an alpha of `smoothing_factors`, or None for no change
Choice = tuple[float, float] | float | None


@dataclass(frozen=True)
class LayerGroup:
    """Layers that read one tensor. After a norm, the tensor is scale·n + shift, with the normalized n.

    Attributes:
        weights: weight of each layer, float64 [channels, outputs].
        scale: [channels]; None without a norm.
        shift: [channels]; None without a norm.
        free: True if a norm precedes the layers and can absorb any factor at no cost.
    """

    tensor: str
    weights: tuple[np.ndarray, ...]
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    free: bool = False


@dataclass(frozen=True)
class LayerFormats:
    """Formats of a layer's input and weight.

    Attributes:
        activation: format of the input; None if it stays float.
        block: input channels that share a scale of the weight; 0 for one scale per output channel.
    """

    activation: CodeFormat | None
    weight: CodeFormat
    block: int = 0


@dataclass(frozen=True)
class SeenRows:
    """Rows of a layer's input, with the ranges of its channels.

    The error of each row is divided by the length of the row's product, because the next norm in the model brings all
    rows to the same length. Without this division, a few tokens would dominate: in some channels, their values are a
    hundred times as large as the values of all other tokens (Sun et al., Massive Activations, arXiv 2402.17762).

    Attributes:
        rows: [rows, channels].
        low: minimum of each channel.
        high: maximum of each channel.
        lengths: length of each row's product before quantization, [rows].
    """

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    lengths: np.ndarray

    def divided(self, s: np.ndarray, c: np.ndarray) -> SeenRows:
        """Compute (x − c)/s.

        Returns:
            the rows and ranges after shift and scale.
        """
        return SeenRows((self.rows - c) / s, (self.low - c) / s, (self.high - c) / s, self.lengths)

    def crossed(self, first: slice, second: slice) -> list[SeenRows]:
        """Combine each half of the rows with the ranges of the other half.

        This estimates the error for values that calibration did not see, which may lie outside the ranges.

        Returns:
            all rows with their own ranges, then each half with the ranges of the other half.
        """
        parts = [self]
        for seen, judged in ((first, second), (second, first)):
            x = self.rows[seen]
            parts.append(SeenRows(self.rows[judged], x.min(0), x.max(0), self.lengths[judged]))
        return parts


def choose_condition(
    group: LayerGroup, seen: ActivationStats, activation: CodeFormat | None, weight: CodeFormat, block: int = 0
) -> InputCondition | None:
    """Choose the best scale and shift for the input of a group.

    Args:
        seen: statistics of the tensor on calibration samples.
        activation: format of the tensor; None if only the weights are quantized (AWQ, Lin et al., arXiv 2306.00978).
        weight: format of the weights.
        block: input channels that share a scale of the weight; 0 for one scale per output channel.

    Returns:
        the condition; None if no scale or shift is worth its cost. Even if the result is None, gamma and beta of a norm
        may be moved into the weights.
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
    """Recover n from y = scale·n + shift.

    If a channel's scale is close to zero relative to its shift, n can't be computed from y. The rows of n are then set
    to 0 in this channel, with the range |n| ≤ √C for C channels, because Σ n² ≤ C.

    Args:
        rows: rows of y, [rows, channels].
        low: minimum of each channel of y.
        high: maximum of each channel of y.

    Returns:
        rows, minima and maxima of n.
    """
    shown = np.abs(scale) > np.maximum(_SHOWN * np.abs(shift), np.finfo(np.float32).tiny)
    divisor = np.where(shown, scale, 1.0)
    bound = float(np.sqrt(len(scale)))
    rows, low, high = ((x - shift) / divisor for x in (rows, low, high))
    low, high = np.minimum(low, high), np.maximum(low, high)
    return np.where(shown, rows, 0.0), np.where(shown, low, -bound), np.where(shown, high, bound)


def _condition_by_ranges(known: SeenRows, w: np.ndarray, formats: LayerFormats) -> InputCondition | None:
    """Choose a condition that gives each channel its own range, if it removes a quarter of the error.

    To measure the error, each half of the rows is quantized with the ranges of the other half.
    """
    middle = len(known.rows) // 2
    parts = known.crossed(slice(middle), slice(middle, None))

    def choice_error(choice: Choice) -> float:
        return float(np.mean([_range_error(part, w, choice, formats) for part in parts]))

    wide: list[Choice] = [None, *((least, room) for least in _LEAST for room in _ROOMS)]
    errors = {choice: choice_error(choice) for choice in (*wide, *_FEW_ALPHAS)}
    best = min(wide, key=lambda choice: errors[choice])
    narrow = min(_FEW_ALPHAS, key=lambda alpha: errors[alpha])
    # Factors from an alpha leave less room for unseen values, so they are used only if their error is smaller by a
    # quarter.
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
    """Return bool [channels]: True if the root mean square of x is at most the root mean square of x − c."""
    return np.asarray((rows**2).mean(0) <= ((rows - c) ** 2).mean(0))


def _range_error(part: SeenRows, w: np.ndarray, choice: Choice, formats: LayerFormats) -> float:
    """Compute the mean square error of the products.

    The error from rounded inputs is measured, whereas the error from rounded weights is an expected value.
    """
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
    """Compute factors, shifts and reach for a choice.

    For a pair, `factors_from_ranges` computes them; for an alpha, `smoothing_factors` does. None leaves the input
    unchanged. An alpha suits a channel that is never active but has large weights.
    """
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
    """Round the shifts ``c`` so that a code represents zero in every channel."""
    code = s * step_for_range(-reach, reach, activation).scale
    return np.asarray((np.rint(c / code) * code).astype(np.float32), np.float64)


def factors_from_ranges(
    low: np.ndarray, high: np.ndarray, least: float, room: float, activation: CodeFormat
) -> tuple[np.ndarray, np.ndarray, float]:
    """Compute factors s and shifts c that give each channel of (x − c)/s the same range.

    A code represents zero exactly in every channel. So the zeros of an activation such as GELU stay exact. This matters
    for channels in which a few tokens have massive activations, because these channels are zero in nearly all other
    rows.

    Args:
        low: minimum of each channel.
        high: maximum of each channel.
        least: lower limit of each half width, as a quantile of the half widths (`_LEAST`).
        room: room that is added to each half width, as a share of the median half width (`_ROOMS`).
        activation: format of the input.

    Returns:
        s, c, and the r for which the range of (x − c)/s is from −r to r.
    """
    half = (high - low) / 2
    wide = np.maximum(half, np.quantile(half, least)) + room * float(np.median(half))
    reach = float(wide.max(initial=0.0))
    if reach == 0:
        return np.ones_like(half), np.zeros_like(half), 0.0
    wide = np.maximum(wide, reach * _FINEST)
    s = (wide / reach).astype(np.float32).astype(np.float64)
    # A range need not reach below the smallest value of all channels.
    middle = np.maximum((low + high) / 2 - wide, low.min()) + wide
    return s, _align_shifts_to_codes(middle, s, reach, activation), reach


def expected_error(part: SeenRows, w: np.ndarray, formats: LayerFormats) -> float:
    """Estimate the error that `relative_error` measures, for integers, by formulas instead of rounding all numbers.

    Rounding is treated as noise of variance step²/12 that is independent of the numbers (Widrow, Kollar, Quantization
    Noise, 2008). Values beyond the range are clipped. The error from the mean of the inputs is left out, because all
    rows share the mean and GPTQ removes this error.

    Returns:
        the relative root mean square error of the products.
    """
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
    """Compute the mean square error of the products from rounded weights, each row weighted by its ``share``."""
    steps = np.abs(w).max(0).astype(np.float64) / weight.high
    # The error of a weight that rounds to 0 is its value, which may be less than the noise.
    lost = np.minimum(steps**2 / 12, np.square(w, dtype=np.float64)).sum(1)
    spread = share @ np.square(z - z.mean(0)) / len(z)
    return _COMPENSATED * float(spread @ lost)


def _smoothing_factors_and_shift(
    low: np.ndarray, high: np.ndarray, w: np.ndarray, shift: str, alpha: float | None, coarse: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute factors and shifts over the channels, as numbers of float32.

    The shift is 0 if ``shift`` is "". The factors are 1 if ``alpha`` is None.
    """
    if shift:
        c = (low + high) / 2
    else:
        c = np.zeros_like(low)
    c = c.astype(np.float32).astype(np.float64)
    if alpha is None:
        return np.ones_like(low), c
    return smoothing_factors(np.maximum(np.abs(low - c), np.abs(high - c)), np.abs(w).max(1), alpha, coarse), c


def smoothing_factors(x: np.ndarray, w: np.ndarray, alpha: float, coarse: bool) -> np.ndarray:
    """Compute the factors max|x|^α / max|W|^(1 − α), scaled so that the largest is 1.

    For idle channels, which hardly contribute to any product, the factor keeps inputs and weights within the range of
    the other channels.

    Args:
        x: largest magnitude of each channel.
        w: largest magnitude of each channel's weights.
        coarse: True to round 1/s to three binary digits. A norm's gamma can store such a number exactly, even in half
            precision.

    Returns:
        s as float64 [channels]. float32 represents s exactly, unless ``coarse`` is set; then 1/s has three binary
        digits.
    """
    size = x * w
    tiny = np.finfo(np.float32).tiny
    live = size > _IDLE * size.max(initial=0.0)
    if not live.any():
        return np.ones_like(x)
    s = np.ones_like(x)
    s[live] = x[live] ** alpha / w[live] ** (1 - alpha)
    s[live] = np.maximum(s[live] / s[live].max(), _FINEST)
    # Idle channels fill at most half of the range of the other channels.
    least = 2 * x[~live] / (x[live] / s[live]).max()
    s[~live] = np.clip(1.0, least, (w[live] * s[live]).max() / np.maximum(w[~live], tiny))
    if not coarse:
        return s.astype(np.float32).astype(np.float64)
    fraction, exponent = np.frexp(1 / s)
    # Choose the value of `COARSE` that is nearest by ratio, not by difference.
    bounds = np.sqrt(COARSE[:-1] * COARSE[1:])
    return np.asarray(1 / np.ldexp(COARSE[np.searchsorted(bounds, fraction)], exponent))


def row_lengths(products: np.ndarray) -> np.ndarray:
    """Compute the length of each row; smaller lengths are raised to a thousandth of the mean length.

    Returns:
        [rows].
    """
    lengths = np.linalg.norm(products, axis=1)
    return np.maximum(lengths, max(float(np.sqrt(np.mean(lengths**2))) * 2.0**-10, 1e-300))


def relative_error(part: SeenRows, w: np.ndarray, formats: LayerFormats) -> float:
    """Measure the relative error of the products, with one range of x for all channels.

    The error is the root of the mean over the rows of ‖x'·W' − x·W‖² / length², where x' and W' are rounded.

    Returns:
        the error.
    """
    x = part.rows
    block = formats.block
    if formats.activation is not None:
        step = step_for_range(float(part.low.min()), float(part.high.max()), formats.activation)
        x = quantize_dequantize(x.astype(np.float32), step).astype(np.float64)
    rounded = quantize_dequantize_weight(w.astype(np.float32), 0 if block else 1, formats.weight, block)
    off = x @ rounded - part.rows @ w
    return float(np.sqrt(np.mean((np.linalg.norm(off, axis=1) / part.lengths) ** 2)))
