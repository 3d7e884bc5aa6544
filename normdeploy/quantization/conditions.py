"""By what the inputs of linear layers are divided and lessened before they are quantized, so that least is lost.

Tried on rows that calibration saw: for each group of layers that read one tensor, the error of their products as it is
and with factors s = max|x|^α / max|W|^(1 − α) of some α for each channel (SmoothQuant, Xiao et al., arXiv 2211.10438).
Behind a norm they are powers of two and cost nothing when the model runs; elsewhere they are one op or two in front of
the layer, and are written where they take away half of the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .migrate import Condition
from .observe import Seen
from .steps import Format, rounded, rounded_weight, step_of

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_WORTH = {True: 0.95, False: 0.5}  # of the error, at most, behind a norm and elsewhere
_FEWEST = 16  # rows, of which nothing can be said
_COMPENSATED = 0.5  # of the variance that rounding the weights adds, which `compensate` leaves on inputs it did not see
_SIMULATED = 512  # rows that are rounded and multiplied, where no formula says what comes of it
_FINEST = 2.0**-12  # of the largest factor: a channel that is always zero is no channel to divide by


@dataclass(frozen=True)
class Group:
    """Layers that read one tensor.

    ``weights``: float64 [channels, outputs] of each. ``scale``, ``shift``: the tensor is scale·n + shift of what a norm
    makes; None behind no norm.
    """

    tensor: str
    weights: tuple[np.ndarray, ...]
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    free: bool = False  # the norm writes any factor


def condition_of(
    group: Group, seen: Seen, activation: Format | None, weight: Format, block: int = 0
) -> Condition | None:
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
        with np.errstate(all="ignore"):
            rows, ends = ((x - group.shift) / group.scale for x in (rows, np.stack([low, high])))
        rows, ends = (np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (rows, ends))
        low, high = ends.min(0), ends.max(0)
        w = w * group.scale[:, None]
    if activation is None and not group.free:
        return None
    if len(rows) < _FEWEST:
        return None
    counted = activation is not None and activation.integers and not block
    tried = _expected if counted else _tried
    rows = rows if counted else rows[:: max(1, len(rows) // _SIMULATED)]
    lengths, form = row_lengths(rows @ w), (activation, weight, block)
    shifts = ("", "middle") if activation is not None and activation.low < 0 and not group.free else ("",)
    halves = [(rows[i::2], rows[1 - i :: 2], lengths[1 - i :: 2]) for i in (0, 1)]

    def error(shift: str, alpha: float | None) -> float:
        """Of all rows with the range of all, and of each half with the range of the other: values that calibration did
        not see must not be cut off."""
        errors = [tried(rows, lengths, (low, high), w, shift, alpha, form, group.free)]
        errors += [tried(y, n, (x.min(0), x.max(0)), w, shift, alpha, form, group.free) for x, y, n in halves]
        return float(np.sqrt(np.mean(np.square(errors))))

    choices = [(shift, alpha) for shift in shifts for alpha in (None, *ALPHAS)]
    errors = {choice: error(*choice) for choice in choices}
    best = min(choices, key=lambda choice: errors[choice])
    if best == ("", None) or errors[best] >= _WORTH[group.free] * errors["", None]:
        return None
    s, c = _factors_and_shift(low, high, w, *best, powers=group.free)
    return Condition(s, c if best[0] else None, "shift" if best[1] is None else "smooth", best[1])


def _tried(
    rows: np.ndarray,
    lengths: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    w: np.ndarray,
    shift: str,
    alpha: float | None,
    form: tuple[Format | None, Format, int],
    powers: bool,
) -> float:
    """The error of ``rows`` with the factors and the range that the ``ends`` of the channels give."""
    low, high = ends
    s, c = _factors_and_shift(low, high, w, shift, alpha, powers)
    return error_of((rows - c) / s, w * s[:, None], (low - c) / s, (high - c) / s, form, lengths)


def _expected(
    rows: np.ndarray,
    lengths: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    w: np.ndarray,
    shift: str,
    alpha: float | None,
    form: tuple[Format | None, Format, int],
    powers: bool,
) -> float:
    """As `_tried` for integers, of which no product has to be rounded: rounding is a noise of step²/12 that the other
    numbers know nothing of (Widrow, Kollar, Quantization Noise, 2008), and what lies beyond the range is cut off. The
    mean of the weights' errors is left out: GPTQ takes it away first, as all inputs have it in common."""
    activation, weight, _ = form
    assert activation is not None
    s, c = _factors_and_shift(*ends, w, shift, alpha, powers)
    low, high = ((end - c) / s for end in ends)
    step = step_of(float(low.min()), float(high.max()), activation)
    first, last = ((code - step.zero_point) * step.scale for code in (activation.low, activation.high))
    wide, share = (w * s[:, None]).astype(np.float32), 1 / lengths**2
    z = ((rows - c) / s).astype(np.float32)
    excess = z - np.clip(z, first - step.scale / 2, last + step.scale / 2)
    cut = excess.any(1)
    clipped = float((share[cut] * ((excess[cut] @ wide) ** 2).sum(1)).sum()) / len(rows)
    noise = step.scale**2 / 12 * float((wide**2).sum(dtype=np.float64)) * float(share.mean())
    steps = np.abs(wide).max(0).astype(np.float64) / weight.high
    spread = _COMPENSATED * (share @ np.square(z - z.mean(0))).sum() / len(rows)
    return float(np.sqrt(clipped + noise + float((steps**2).sum()) / 12 * float(spread)))


def _factors_and_shift(
    low: np.ndarray, high: np.ndarray, w: np.ndarray, shift: str, alpha: float | None, powers: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Over the channels, in float32: ``shift`` "" is 0, ``alpha`` None is 1."""
    c = (low + high) / 2 if shift else np.zeros_like(low)
    c = c.astype(np.float32).astype(np.float64)
    if alpha is None:
        return np.ones_like(low), c
    return factors(np.maximum(np.abs(low - c), np.abs(high - c)), np.abs(w).max(1), alpha, powers), c


def factors(x: np.ndarray, w: np.ndarray, alpha: float, powers: bool) -> np.ndarray:
    """max|x|^α / max|W|^(1 − α), the largest 1; ``powers``: the nearest powers of two."""
    tiny = np.finfo(np.float32).tiny
    s = np.maximum(x, tiny) ** alpha / np.maximum(w, tiny) ** (1 - alpha)
    s = np.where((x > 0) & (w > 0), s, 0.0)
    largest = s.max(initial=0.0)
    if largest == 0:
        return np.ones_like(s)
    s = np.maximum(s / largest, _FINEST)
    return np.exp2(np.rint(np.log2(s))) if powers else s.astype(np.float32).astype(np.float64)


def row_lengths(products: np.ndarray) -> np.ndarray:
    """The length of each row, of next to nothing that of a thousandth of the mean: [rows]."""
    lengths = np.linalg.norm(products, axis=1)
    return np.maximum(lengths, max(float(np.sqrt(np.mean(lengths**2))) * 2.0**-10, 1e-300))


def error_of(
    rows: np.ndarray,
    w: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    form: tuple[Format | None, Format, int],
    lengths: np.ndarray,
) -> float:
    """The root of the mean over the rows of ‖x'·W' − x·W‖² / length², the range of x that of all channels.

    ``form``: of activations, of weights, and the block. ``lengths``: of the products before any factor and shift. Each
    row by its own length: the norm behind brings all rows to one, and of some tokens a channel is a hundred times as
    large as of the others (Sun et al., Massive Activations, arXiv 2402.17762).
    """
    activation, weight, block = form
    x = rows
    if activation is not None:
        step = step_of(float(low.min()), float(high.max()), activation)
        x = rounded(rows.astype(np.float32), step).astype(np.float64)
    off = x @ rounded_weight(w.astype(np.float32), 0 if block else 1, weight, block) - rows @ w
    return float(np.sqrt(np.mean((np.linalg.norm(off, axis=1) / lengths) ** 2)))
