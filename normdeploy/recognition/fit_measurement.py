"""Measure whether a region computes y = γ·(x − mean)/sqrt(var + ε) + β, and measure its groups, γ, β and ε.

Only the values of the region matter, not its nodes. The region is evaluated in float64 on a few inputs (z is a random
input, ẑ is z normalized):

- s·z and −s·z at a large scale s, at which ε is negligible. A norm is an odd function plus β. So β = (y(s·z) +
  y(−s·z))/2, and the odd part is γ·ẑ.
- z with one element changed. The elements of y that change form the group of this element, because they share its mean
  and variance.
- z plus a constant. y stays the same if the norm subtracts the mean (layer norm), and changes if it does not (RMS
  norm).
- s·z at scales s near sqrt(ε), with v the variance of z. The odd part shrinks by ρ = sqrt(s²v/(s²v + ε)), so ε =
  s²v(1/ρ² − 1).

An unbiased variance needs no separate case. For n elements, (x − m)/sqrt(var·n/(n−1) + ε) is measured as γ' =
γ·sqrt((n−1)/n) and ε' = ε·(n−1)/n. Every fit is checked on new inputs at several scales. A fit that passes is still
only a proposal. The proof decides whether it is used (`normdeploy.rewriting.certification`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..evaluate import evaluator
from ..graphs.region import BoundRegion, EvaluationFailed, RefusalKind
from ..storage.heap import trim_heap
from .norm_fit import Clarity, Denominator, NormFit, RejectedReading

# Relative tolerance of a fit. Float64 arithmetic over a few thousand elements loses 1e-13. Functions that only resemble
# a norm differ by far more than 1e-9 at one of the scales.
_TOLERANCE = 1e-9
CLAMPED = "its denominator is clamped from below instead of having epsilon added"
EVEN = "it gives the same result for x and −x, so it may be a deviation, but not x divided by one"
# Number of bytes from which gamma counts as large. The measurement holds about a dozen arrays of the size of x.
_HEAVY = 2**20
# Scale at which ε is negligible, about 1.7e10. An ε up to 0.1, inside the root or outside, changes y by far less than
# the tolerance.
_LARGE = 2.0**34


def measure_fit(
    bound: BoundRegion, shape: tuple[int, ...], others: Sequence[np.ndarray] = (), like: NormFit | None = None
) -> NormFit | RejectedReading:
    """Measure the norm that a bound region computes from its first leaf x.

    Args:
        shape: concrete shape of x.
        others: values of the other leaves.
        like: fit of another region, which may differ from this region only in gamma and beta. If so, only gamma and
            beta are measured.

    Returns:
        the fit, or a rejected reading with the reason.
    """
    if 0 in shape or int(np.prod(shape, dtype=int)) < 2:
        return RejectedReading(f"its input has shape {shape}: nothing to normalize", clarity=Clarity.VAGUE)
    try:
        with evaluator.silence_numpy():
            if like is not None and like.shape == shape:
                same = _remeasure_fit(_RegionProbe(bound, shape, others), like)
            else:
                same = None
            if same is not None:
                return same
            return _fit_region(_RegionProbe(bound, shape, others))
    except EvaluationFailed as e:
        return RejectedReading(f"it can't be evaluated: {e}", clarity=Clarity.VAGUE, kind=RefusalKind.NOT_EVALUATED)


class _RegionProbe:
    """Region as a function of x, with the odd part of its results."""

    def __init__(self, bound: BoundRegion, shape: tuple[int, ...], others: Sequence[np.ndarray]) -> None:
        self.bound = bound
        self.others = others
        self.shape = shape
        self.rng = np.random.default_rng(20)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.bound.run([x, *self.others])
        if y.shape != self.shape:
            raise EvaluationFailed(f"its result has shape {y.shape}, its input {self.shape}")
        return y

    def draw_input(self) -> np.ndarray:
        """Draw magnitudes from [0.5, 1.5] with random signs, so that few elements are near the mean of their group.

        Returns:
            x of the probe's shape.
        """
        z = self.rng.uniform(0.5, 1.5, self.shape)
        z *= self.rng.choice([-1.0, 1.0], self.shape)
        return z

    def odd_part(self, x: np.ndarray) -> np.ndarray:
        """Compute (y(x) − y(−x))/2.

        Returns:
            the odd part, of the shape of x.
        """
        odd = np.asarray(self(x) - self(-x))
        odd /= 2
        return odd


def _fit_region(ask: _RegionProbe) -> NormFit | RejectedReading:
    """Measure beta, the groups, centering, gamma and epsilon, in this order, then check the fit on a new input."""
    z = ask.draw_input()
    up = ask(_LARGE * z)
    down = ask(-_LARGE * z)
    if not (np.isfinite(up).all() and np.isfinite(down).all()):
        return RejectedReading("it gives NaN or Inf on ordinary inputs", clarity=Clarity.VAGUE)
    beta = (up + down) / 2
    odd = (up - down) / 2
    # Free this array: x may have millions of elements, and the memory use of an export may peak here.
    del down
    if not odd.any():
        moves = bool((ask(_LARGE * ask.draw_input()) != up).any())
        if moves:
            return RejectedReading(EVEN, clarity=Clarity.VAGUE, kind=RefusalKind.EVEN)
        return RejectedReading("it does not depend on its input (gamma is zero everywhere)", clarity=Clarity.VAGUE)
    groups = _measure_groups(ask, z, up, odd)
    if isinstance(groups, RejectedReading):
        return groups
    axes, split, block = groups
    moved = np.abs(ask(_LARGE * (z + 3.0)) - up).max()
    centered = bool(moved <= 1e-7 * np.abs(odd).max())
    del up
    plain = NormFit(ask.shape, axes, split, block, centered, 0.0, np.ones(()), np.zeros(()))
    if centered and plain.group_size == 1:
        return RejectedReading(
            "each group has one element, so the result does not depend on the input", clarity=Clarity.VAGUE
        )
    odd /= plain(_LARGE * z)
    fitted = _measure_epsilon(ask, plain, odd, beta, z)
    del odd, beta, z
    if isinstance(fitted, RejectedReading):
        return fitted
    if not _differs_on_fresh_input(ask, fitted):
        return fitted
    if fitted.gamma.nbytes > _HEAVY:
        trim_heap()
    return _explain_mismatch(ask, fitted)


def _remeasure_fit(ask: _RegionProbe, like: NormFit) -> NormFit | None:
    """Return ``like`` with newly measured gamma and beta; None if it does not fit."""
    z = ask.draw_input()
    up = ask(_LARGE * z)
    down = ask(-_LARGE * z)
    unit = replace(like, epsilon=0.0, gamma=np.ones(()), beta=np.zeros(()))(_LARGE * z)
    size = np.abs(unit)
    # A small element near the mean of its group would not give gamma accurately. A norm of length 1 has small elements
    # only.
    if not (np.isfinite(up).all() and np.isfinite(down).all()) or size.min() < 0.05 * min(1.0, float(size.max())):
        return None
    refitted = replace(like, gamma=(up - down) / 2 / unit, beta=(up + down) / 2)
    if _differs_on_fresh_input(ask, refitted):
        return None
    return refitted


def _measure_groups(
    ask: _RegionProbe, z: np.ndarray, up: np.ndarray, odd: np.ndarray
) -> tuple[tuple[int, ...], int | None, int] | RejectedReading:
    """Find the elements that share statistics.

    Returns:
        (axes that a group spans in full, the axis split into blocks or None, the size of a block).
    """
    if (np.abs(odd) > 1e-9 * np.abs(odd).max()).all():
        extent = _extent_moved_by_first(ask, z, up)
    else:
        # An element of y with gamma zero never changes. So take the largest element of y, and find the elements of x
        # that change it.
        extent = _extent_moving_largest(ask, z, up, int(np.argmax(np.abs(odd))))
    full = tuple(a for a, (e, n) in enumerate(zip(extent, ask.shape, strict=True)) if e == n and n > 1)
    part = [a for a, (e, n) in enumerate(zip(extent, ask.shape, strict=True)) if 1 < e < n]
    if len(part) > 1 or (part and ask.shape[part[0]] % extent[part[0]]):
        return RejectedReading("its groups are not blocks along one axis")
    if not full and not part:
        return RejectedReading("each element is normalized by itself", clarity=Clarity.VAGUE)
    return full, (part[0] if part else None), (extent[part[0]] if part else 1)


def _extent_moved_by_first(ask: _RegionProbe, z: np.ndarray, up: np.ndarray) -> list[int]:
    """Return, for each axis, the extent of the box of outputs that change if element 0 of x changes."""
    changed = z.copy()
    changed.flat[0] += 7.0
    changed *= _LARGE
    moved = ask(changed) != up
    along = (moved.any(axis=tuple(b for b in range(z.ndim) if b != a)) for a in range(z.ndim))
    return [int(places.nonzero()[0].max(initial=0)) + 1 for places in along]


def _extent_moving_largest(ask: _RegionProbe, z: np.ndarray, up: np.ndarray, flat: int) -> list[int]:
    """Return, for each axis, the extent of the group of the element at ``flat``.

    On each axis, try the blocks that contain the element, largest first. Take the first block in which a change of x at
    the block's far end changes the element.
    """
    base = tuple(int(i) for i in np.unravel_index(flat, z.shape))

    def is_moved_by(axis: int, index: int) -> bool:
        changed = z.copy()
        changed[(*base[:axis], index, *base[axis + 1 :])] += 7.0
        return bool(ask(_LARGE * changed)[base] != up[base])

    extent = []
    for axis, size in enumerate(z.shape):
        at = base[axis]
        # Possible sizes of blocks, largest first.
        blocks = [k for k in range(size, 1, -1) if size % k == 0]
        ends = ((k, at // k * k + (k - 1 if at % k < k - 1 else 0)) for k in blocks)
        extent.append(next((k for k, end in ends if is_moved_by(axis, end)), 1))
    return extent


def _measure_epsilon(
    ask: _RegionProbe, plain: NormFit, gamma: np.ndarray, beta: np.ndarray, z: np.ndarray
) -> NormFit | RejectedReading:
    """Measure epsilon at a scale at which it is about as large as the variance."""
    d, v = plain.center_and_square(z)
    unit = np.asarray(gamma * d)
    unit /= np.sqrt(v)
    size = np.abs(unit)
    # Keep only the elements from which epsilon can be computed most accurately.
    weight = size >= max(np.median(size), 0.1 * size.max())
    unit = unit[weight]
    v = v[weight]
    del size, d
    scale = 1e-2
    epsilon = 0.0
    for _ in range(8):
        ratio = ask.odd_part(scale * z)[weight] / unit
        if not np.isfinite(ratio).all():
            return RejectedReading("it gives NaN or Inf on small inputs", clarity=Clarity.VAGUE)
        estimate = float(np.median(scale**2 * v * (1.0 / ratio**2 - 1.0)))
        variance = float(np.median(scale**2 * v))
        # At this scale, float64 cannot resolve an epsilon that is this small.
        if abs(estimate) <= 1e-11 * variance:
            scale *= 1e-4
            continue
        epsilon = estimate
        if 0.3 < estimate / variance < 3:
            break
        scale = float(np.sqrt(abs(estimate) / np.median(v)))
    if epsilon < 0:
        return _explain_mismatch(ask, replace(plain, gamma=gamma, beta=beta))
    return replace(plain, epsilon=epsilon, gamma=gamma, beta=beta)


def _differs_on_fresh_input(ask: _RegionProbe, fitted: NormFit) -> bool:
    """Return True if the region and the fit differ on a new input whose groups have several scales."""
    small = fitted.epsilon_scale
    scales = [s for s in (0.6 * small, 1.0, 10 * small, _LARGE, 0.05 * small) if s]
    rows = fitted.rows_of(ask.draw_input())
    for start in range(0, len(scales), len(rows)):
        order = (start + np.arange(len(rows))) % len(scales)
        x = fitted.arrange_rows(rows * np.array(scales)[order][:, None])
        expected = fitted(x)
        apart = np.abs(ask(x) - expected)
        allowed = np.abs(expected)
        for part in (fitted.gamma, fitted.beta):
            allowed = allowed + np.abs(part)
        if not (apart <= _TOLERANCE * allowed).all():
            return True
    return False


def _explain_mismatch(ask: _RegionProbe, fitted: NormFit) -> NormFit | RejectedReading:
    """Distinguish the usual functions that resemble a norm, by their odd part as x shrinks.

    Returns:
        a fit with epsilon outside the root or with a clamped length, or a rejected reading.
    """
    x = ask.draw_input()
    large = ask.odd_part(_LARGE * x)
    d, v = fitted.center_and_square(x)
    size = np.abs(large)
    sure = (size > 0.3 * np.median(size)) & (v > 0)
    unit = np.asarray(fitted.gamma * d)
    unit /= np.sqrt(v)
    large = large[sure]
    unit = unit[sure]
    v = v[sure]
    del size, d
    if not np.allclose(large, unit, rtol=1e-6, atol=0):
        with_mean = _fit_with_mean(ask, fitted)
        if with_mean is not None:
            return with_mean
        if np.allclose(_LARGE * ask.odd_part(x)[sure], large, rtol=1e-3, atol=0):
            return RejectedReading(
                "its result grows with its input, so it is not divided by its own deviation (for example "
                "global response normalization)",
                clarity=Clarity.VAGUE,
            )
        return RejectedReading(
            "its numerator and denominator use different statistics (another mean, other axes, another tensor, "
            "or no root)",
            clarity=Clarity.VAGUE,
        )
    deviation = np.sqrt(v)
    scale = 1e-2
    for _ in range(5):
        ratio = ask.odd_part(scale * x)[sure] / unit
        if not np.isfinite(ratio).all():
            return RejectedReading("it gives NaN or Inf on small inputs", clarity=Clarity.VAGUE)
        if (np.abs(ratio - 1.0) < 1e-12).any() and (ratio < 0.999).any():
            break
        added = scale * deviation * (1.0 / ratio - 1.0)
        epsilon = float(np.median(added))
        # float64 resolves such an epsilon. If it varies, a smaller scale shows no other function.
        if epsilon > 1e-3 * scale:
            outside = replace(fitted, epsilon=epsilon, denominator=Denominator.EPSILON_OUTSIDE_ROOT)
            if np.ptp(added) <= 1e-6 * np.abs(added).max() and not _differs_on_fresh_input(ask, outside):
                return outside
            break
        scale = epsilon if 1e-30 < epsilon < 0.1 * scale else scale * 1e-3
    if sure.any() and (np.abs(ask.odd_part(x)[sure] / unit - 1) < 1e-12).all():
        clamped = _clamped_fit(ask, fitted, x, sure)
        if clamped is not None and not _differs_on_fresh_input(ask, clamped):
            return clamped
        return RejectedReading(CLAMPED, fit=replace(fitted, epsilon=math.nan))
    return RejectedReading(
        "epsilon is not added to the variance as in sqrt(variance + epsilon)", fit=replace(fitted, epsilon=math.nan)
    )


def _fit_with_mean(ask: _RegionProbe, fitted: NormFit) -> NormFit | None:
    """Return the fit x/sqrt(variance + ε), whose numerator keeps the mean; None if it does not fit.

    Its groups and beta are those of ``fitted``; gamma and epsilon are measured again.
    """
    if fitted.centered or fitted.keeps_mean or fitted.group_size < 2:
        return None
    z = ask.draw_input()
    plain = replace(fitted, centered=True, keeps_mean=True, epsilon=0.0, gamma=np.ones(()), beta=np.zeros(()))
    gamma = ask.odd_part(_LARGE * z) / plain(_LARGE * z)
    measured = _measure_epsilon(ask, plain, gamma, fitted.beta, z)
    if isinstance(measured, RejectedReading) or _differs_on_fresh_input(ask, measured):
        return None
    return measured


def _clamped_fit(ask: _RegionProbe, fitted: NormFit, x: np.ndarray, sure: np.ndarray) -> NormFit | None:
    """Return the fit with the denominator max(‖x‖₂, ε), which gives γ·x/ε for a small x; None if it does not fit."""
    gamma = fitted.gamma * math.sqrt(fitted.group_size)
    scale = 1.0
    for _ in range(16):
        # The denominator, max(‖x‖, ε), of each element.
        told = scale * (gamma * x)[sure] / ask.odd_part(scale * x)[sure]
        epsilon = float(np.median(told))
        if not np.isfinite(told).all() or epsilon <= 0:
            return None
        if np.ptp(told) <= 1e-9 * epsilon and epsilon > 2 * scale * float(
            np.sqrt(fitted.group_size * fitted.center_and_square(x)[1].max())
        ):
            if fitted.centered:
                return None
            return replace(fitted, gamma=gamma, epsilon=epsilon, denominator=Denominator.CLAMPED_LENGTH)
        scale *= 1e-2
    return None
