"""Collect the second moments of layer inputs on samples, one sample at a time.

The inputs are rounded as the quantized file rounds them.

A convolution multiplies its weight by windows of its input. The same number of windows is drawn from each sample,
`WINDOWS` windows in total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ..precision.tensor_ranges import Samples, chunk_tensors, name_failing_sample, open_session_with_outputs
from ..types import Arrays
from .activation_stats import unmasked_rows
from .number_formats import ScaleZeroPoint, quantize_dequantize

# Number of windows that are drawn for a convolution, from all samples together
WINDOWS = 2**14
# Number of channels above which H is stored and factored in float32
_WIDE = 4096
# Maximum total size in bytes of the matrices H that are in memory at a time
_HELD = 2**30


@dataclass(frozen=True)
class ConvolutionWindows:
    """Attributes of the windows that a convolution reads, one number per spatial axis; ``pads`` is in ONNX's order."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    groups: int

    def draw_windows(self, x: np.ndarray, count: int, seed: int) -> np.ndarray:
        """Draw windows at random from the input of a convolution.

        Args:
            x: [batch, channels, …].
            count: maximum number of windows.

        Returns:
            [groups, windows, channels of a group · elements of the kernel].
        """
        rank = len(self.kernel)
        ends = [(0, 0), (0, 0), *zip(self.pads[:rank], self.pads[rank:], strict=True)]
        reach = tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))
        padded = np.pad(x, ends)
        if any(size < r for size, r in zip(padded.shape[2:], reach, strict=True)):
            return np.zeros((self.groups, 0, x.shape[1] // self.groups * int(np.prod(self.kernel))), np.float32)
        views = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, 2 + rank)))
        dilated: tuple[Any, ...] = (..., *(slice(None, None, d) for d in self.dilations))
        views = views[dilated]
        places = [-(-n // s) for n, s in zip(views.shape[2 : 2 + rank], self.strides, strict=True)]
        total = len(x) * int(np.prod(places))
        draw = np.sort(np.random.default_rng(seed).permutation(total)[:count])
        sample, *at = np.unravel_index(draw, (len(x), *places))
        index: tuple[Any, ...] = (sample, slice(None), *(a * s for a, s in zip(at, self.strides, strict=True)))
        chosen = views[index]
        return np.ascontiguousarray(chosen.reshape(len(draw), self.groups, -1).swapaxes(0, 1))


@dataclass(frozen=True)
class LayerInput:
    """Input tensor of a layer, and how the layer reads it.

    Attributes:
        step: step with which the input is quantized; None if it is not quantized.
        axis: axis of the input's channels.
        windows: windows of the input that a convolution reads; None for a matrix.
    """

    tensor: str
    step: ScaleZeroPoint | None
    axis: int
    windows: ConvolutionWindows | None = None

    def input_rows(self, value: np.ndarray, sample: Arrays, number: int, count: int) -> np.ndarray:
        """Read the rows of one sample, before rounding.

        The padding of a convolution is 0, which every step represents exactly.

        Args:
            number: index of the sample; the seed for drawing windows.
            count: number of samples.

        Returns:
            [groups, rows, channels] in the dtype of ``value``.
        """
        if self.windows is None:
            return unmasked_rows(value, self.axis, sample)[None]
        return self.windows.draw_windows(value, -(-WINDOWS // count), number)


@dataclass
class SecondMoments:
    """Second moments of a layer's inputs, accumulated sample by sample.

    The sums are sums of x̂ − ``origin``, where x̂ is the rounded input. Subtracting the origin avoids cancellation in
    float32.

    Attributes:
        origin: mean of the first batch, [groups, channels].
        rows: number of rows so far.
        sums: sum of x̂ − origin, [groups, channels].
        squares: sum of the outer products of x̂ − origin, [groups, channels, channels].
    """

    origin: np.ndarray
    rows: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(()))
    squares: np.ndarray = field(default_factory=lambda: np.zeros((), np.float32))

    def accumulate(self, x: np.ndarray, step: ScaleZeroPoint | None, offset: np.ndarray | None = None) -> None:
        """Add the rows of one sample.

        Args:
            x: float32 [groups, rows, channels].
            step: step that rounds the rows; None to leave them unrounded.
            offset: shift that was subtracted from the input, and that the layer's bias compensates.
        """
        if step is None:
            quantized = x
        else:
            quantized = quantize_dequantize(x, step)
        away = (quantized if offset is None else quantized + offset) - self.origin[:, None]
        self.rows += x.shape[1]
        self.sums = self.sums + away.sum(1, dtype=np.float64)
        self.squares = self.squares + away.swapaxes(1, 2) @ away

    def hessian(self) -> np.ndarray:
        """Compute H = E[x̂·x̂ᵀ].

        Returns:
            [groups, channels, channels], float64, or float32 above `_WIDE` channels.
        """
        kind = np.dtype(np.float32 if self.origin.shape[-1] > _WIDE else np.float64)
        around = self.sums / self.rows
        mean = np.asarray(self.origin + self.sums / self.rows)
        h = np.asarray(self.squares / self.rows, kind)
        outer = (around[:, :, None] * around[:, None]).astype(kind), (mean[:, :, None] * mean[:, None]).astype(kind)
        return np.asarray(h - outer[0] + outer[1])


def collect_moments(
    proto: onnx.ModelProto, wanted: Mapping[LayerInput, tuple[int, np.ndarray | None]], samples: Samples
) -> Iterator[tuple[LayerInput, SecondMoments]]:
    """Collect the second moments of each input in ``wanted``, for as many inputs at a time as memory allows.

    Args:
        wanted: layer input → (number of elements of its H, shift of the input or None).

    Yields:
        each input for which the samples provide rows, with its moments.

    Raises:
        InputError: the model does not run on a sample.
    """
    size: dict[str, int] = {}
    for reading, (numbers, _) in wanted.items():
        size[reading.tensor] = size.get(reading.tensor, 0) + 4 * numbers
    for chunk in chunk_tensors(proto, list(size), samples) if wanted else ():
        part: list[str] = []
        for name in [*chunk, ""]:
            if part and (not name or sum(size[p] for p in part) + size[name] > _HELD):
                yield from _collect_part(
                    proto, {r: off for r, (_, off) in wanted.items() if r.tensor in part}, part, samples
                )
                part = []
            part.append(name)


def _collect_part(
    proto: onnx.ModelProto, wanted: Mapping[LayerInput, np.ndarray | None], part: Sequence[str], samples: Samples
) -> Iterator[tuple[LayerInput, SecondMoments]]:
    held: dict[LayerInput, SecondMoments] = {}
    runner = open_session_with_outputs(proto, part)
    for number, sample in enumerate(samples):
        with name_failing_sample(number):
            values = dict(zip(part, runner.run(list(part), dict(sample)), strict=True))
        for reading, offset in wanted.items():
            x = reading.input_rows(values[reading.tensor], sample, number, len(samples))
            if x.shape[1]:
                if reading not in held:
                    held[reading] = SecondMoments(x.mean(1) if offset is None else x.mean(1) + offset)
                held[reading].accumulate(x, reading.step, offset)
    for reading in wanted:
        if reading in held:
            yield reading, held.pop(reading)
