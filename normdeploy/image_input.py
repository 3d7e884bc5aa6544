"""Describe the images that a file takes: their type, their layout, and the normalization that the file does itself.

The file computes, for each channel c of a picture u,

    x = (u / divisor − mean[c]) / std[c],

which is torchvision's ``Normalize`` after ``ToTensor``. The model computes its outputs from x, whose channels are on
axis 1.
"""

from __future__ import annotations

from dataclasses import dataclass

# Letters of the axes by rank: channels first, channels last.
LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
UINT8 = "uint8"
# Largest value of an 8-bit pixel.
BRIGHTEST = 255.0


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Image input of a file, and its preparation inside the file.

    Attributes:
        name: name of the input.
        dtype: dtype of the pixels.
        channels_last: True if the channels are on the last axis.
        peak: value of the brightest pixel for which ``mean`` and ``std`` are stated: 1 for torchvision's, 255 for those
            of 8-bit pixels.
        mean: subtracted from each channel; one number for all channels, or () for 0.
        std: divides each channel; one number for all channels, or () for 1.
    """

    name: str
    dtype: str
    channels_last: bool = False
    peak: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def divisor(self) -> float:
        """Return the number that divides the pixels before ``mean`` is subtracted; 1 for floats."""
        if self.dtype == UINT8:
            return BRIGHTEST / self.peak
        return 1.0

    @property
    def range(self) -> tuple[float, float] | None:
        """Return the half-open interval of the pixels; None if nothing is known about floats."""
        if self.dtype == UINT8:
            return (0, int(BRIGHTEST) + 1)
        if self.mean:
            return (0.0, self.peak)
        return None

    def __str__(self) -> str:
        parts = [self.dtype]
        if self.channels_last:
            parts.append("channels last")
        if self.divisor != 1:
            parts.append(f"divided by {self.divisor:g}")
        if self.mean:
            parts.append(f"mean {_join_numbers(self.mean)}, std {_join_numbers(self.std)}")
        return ", ".join(parts)


def _join_numbers(numbers: tuple[float, ...]) -> str:
    return "/".join(f"{number:g}" for number in numbers)
