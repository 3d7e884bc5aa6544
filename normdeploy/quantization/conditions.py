"""By what the inputs of linear layers are divided and lessened before they are quantized, so that least is lost.

Tried on rows that calibration saw: for each group of layers that read one tensor, the error of their products as it is
and with factors s = max|x|^α / max|W|^(1 − α) of some α for each channel (SmoothQuant, Xiao et al., arXiv 2211.10438),
each the nearest power of two. Behind a norm this costs nothing when the model runs; elsewhere it is one op or two in
front of the layer, and is done where it takes away half of the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .migrate import Condition
from .observe import Seen
from .steps import Format, rounded, rounded_weight, step_of

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_WORTH = {True: 0.95, False: 0.5}  # of the error, at most, behind a norm and elsewhere
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
    lengths, form = row_lengths(rows @ w), (activation, weight, block)
    plain = error_of(rows, w, low, high, form, lengths)
    tried: list[tuple[float, Condition]] = []
    moves: list[np.ndarray | None] = [None]
    if activation is not None and activation.low < 0 and not group.free:  # no zero point does that
        moves += [v.astype(np.float32).astype(np.float64) for v in ((low + high) / 2, np.median(rows, axis=0))]
    for shift in moves:
        x, bottom, top = (v if shift is None else v - shift for v in (rows, low, high))
        if shift is not None:
            error = error_of(x, w, bottom, top, form, lengths)
            tried.append((error, Condition(np.ones(len(w)), shift, "shift")))
        for alpha in ALPHAS:
            s = factors(np.maximum(np.abs(bottom), np.abs(top)), np.abs(w).max(1), alpha)
            error = error_of(x / s, w * s[:, None], bottom / s, top / s, form, lengths)
            tried.append((error, Condition(s, shift, "smooth", alpha)))
    best = min(tried, key=lambda pair: pair[0])
    return best[1] if best[0] < _WORTH[group.free] * plain else None


def factors(x: np.ndarray, w: np.ndarray, alpha: float) -> np.ndarray:
    """Powers of two near max|x|^α / max|W|^(1 − α), the largest 1."""
    tiny = np.finfo(np.float32).tiny
    s = np.maximum(x, tiny) ** alpha / np.maximum(w, tiny) ** (1 - alpha)
    s = np.where((x > 0) & (w > 0), s, 0.0)
    largest = s.max(initial=0.0)
    if largest == 0:
        return np.ones_like(s)
    return np.exp2(np.rint(np.log2(np.maximum(s / largest, _FINEST))))


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
