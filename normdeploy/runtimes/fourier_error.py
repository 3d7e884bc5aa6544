"""Bound the rounding error of Fourier transforms, and spread NaN through them.

Each bin (element of the result) is a sum of n products x[k]·w^k over the n samples of a frame. The error of direct
summation is u·√n/3 times the size of the sum, where u is the unit roundoff. The error of a fast transform is smaller
(u·log₂ n: Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 24.1). For this estimate, the size of
the sum is ‖x‖₂ for every bin of a frame, which is the root mean square of the bins (Parseval). So a bin in which the
products cancel has the same error as other bins. In a constant frame, for example, the products cancel in every bin
except the first. A file may write a transform as a matrix product, so the reference draws the larger error, which is
the error of direct summation.

Every bin reads every sample. Kernels leave out products with 0. So if one sample is NaN or infinite, the imaginary part
of the first bin may be NaN or 0. The reference sets all bins to NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Operators that transform one axis. Their third argument names the axis; the default is the last axis.
_OVER_ONE = frozenset(f"fft_{name}" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"))
_OVER_TWO = frozenset(f"fft_{name}" for name in ("fft2", "ifft2", "rfft2", "irfft2"))
_OVER_SOME = frozenset(f"fft_{name}" for name in ("fftn", "ifftn", "rfftn", "irfftn"))
# Lower-level operators. They take their axes as the second argument.
_KERNELS = frozenset({"_fft_r2c", "_fft_c2c", "_fft_c2r"})
_SHORT_TIME = "stft"
INVERSE_SHORT_TIME = "istft"


def find_transformed_axes(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[int] | None:
    """Find the axes of ``result`` that contain the bins of a Fourier transform.

    Returns:
        Nonnegative axes; None if the operator is not a Fourier transform.
    """
    if not isinstance(result, torch.Tensor) or not result.dim():
        return None
    if op == _SHORT_TIME:
        # The result is complex [..., bins, frames], or real [..., bins, frames, 2].
        return [result.dim() - (2 if result.is_complex() else 3)]
    axes = _transform_axes(op, args, kwargs, result.dim())
    if axes is None:
        return None
    return [axis % result.dim() for axis in axes]


def _transform_axes(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> list[int] | None:
    stated = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if op in _OVER_ONE:
        return [-1 if stated is None else stated]
    if op in _OVER_TWO:
        if stated is None:
            return [-2, -1]
        return list(stated)
    if op in _OVER_SOME:
        if stated is None:
            return list(range(rank))
        return list(stated)
    if op in _KERNELS:
        return list(args[1])
    return None


def frame_roundings(x: torch.Tensor, result: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Compute the rounding error of each element of a transform: √n/3 times the root mean square of the element's
    frame.

    A transform of n real samples may have only n/2 bins. So n is assumed to be twice the number of elements of a frame.

    Args:
        x: the transform's input.
        axes: the axes of ``result`` that were transformed.

    Returns:
        Errors in units of the unit roundoff, with the shape of ``result``.
    """
    pairs = axes and not result.is_complex() and result.dim() > x.dim() + 1
    size = result.abs().square()
    if pairs:
        size = size.sum(-1, keepdim=True)
    mean = torch.where(torch.isfinite(size), size, 0.0).mean(list(axes), keepdim=True)
    terms = 2.0 * max(1, _count_along_axes(result, axes))
    return mean.sqrt().expand(result.shape) * max(1.0, terms**0.5 / 3)


def _count_along_axes(value: torch.Tensor, axes: Sequence[int]) -> int:
    count = 1
    for axis in axes:
        count *= value.shape[axis]
    return count


def spread_nan(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Set every bin of a frame to NaN if one of its bins is not finite.

    Returns:
        The changed result; ``result`` itself for any operator but a Fourier transform.
    """
    axes = find_transformed_axes(op, args, kwargs, result)
    if axes is None or not isinstance(result, torch.Tensor):
        return result
    lost = ~torch.isfinite(result)
    if op == _SHORT_TIME and not result.is_complex():
        axes = [*axes, result.dim() - 1]
    hit = lost.any(axes[0], keepdim=True)
    for axis in axes[1:]:
        hit = hit.any(axis, keepdim=True)
    nan = torch.full((), float("nan"), dtype=torch.float64)
    if result.is_complex():
        filler = torch.complex(nan, nan)
    else:
        filler = nan
    return torch.where(hit, filler, result)
