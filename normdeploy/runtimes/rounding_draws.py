"""How a quantized file is run in float64 (`runtimes.quantized_float64`), and what its quantizers were given.

By itself, since `quantized_float64` brings torch along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..evaluate.evaluator_core import Array


@dataclass
class Saturation:
    """What one quantizer of data was given so far, in its own steps counted from zero; true where it clips.

    ``share``: of the elements of the worst run that lie outside; ``beyond``: the largest excess, in steps.
    """

    node: str
    # that is quantized
    tensor: str
    # of the range, as real numbers; NaN where there is a scale for each channel
    ends: tuple[float, float]
    # real numbers seen
    least: float = np.inf
    largest: float = -np.inf
    share: float = 0.0
    # of a range that begins at 0, above it: what is below is taken for ReLU
    beyond: float = 0.0
    # the largest part of the range's width that any run took
    used: float = 0.0

    def __bool__(self) -> bool:
        return self.beyond > 0

    def __str__(self) -> str:
        if np.isnan(self.ends[0]):
            ends = ""
        else:
            ends = f" where its range is {self.ends[0]:.4g} to {self.ends[1]:.4g}"
        return (
            f"{self.tensor!r} saturates at {self.node}: it reaches {self.least:.4g} to {self.largest:.4g}{ends},"
            f" {self.share:.2%} of a run clipped, by {self.beyond:.3g} steps at most"
        )


@dataclass(frozen=True)
class RoundingDraw:
    """How a run rounds. ``activations``, ``weights``: None as the file does, "exact" not at all, or a seed.

    ``held``: DequantizeLinear nodes, by the tensor they make, that give these values instead; of None what was
    quantized in front of them, as it was (in `StepRunner.all_values` alone, which forgets no tensor); or products of
    integers, by the tensor they make, that read these codes as their weight; or QuantizeLinear nodes, of None, that
    round nothing and cut nothing off but for ReLU. ``width``: what the drawn roundings are times.
    """

    activations: int | str | None = None
    weights: int | None = None
    held: Mapping[str, Array | None] = field(default_factory=dict)
    # at the ends of ranges, where activations are not rounded as the file does
    clips: bool = True
    width: float = 1.0

    @property
    def rounds_as_stored(self) -> bool:
        """Whether the run rounds as the file does."""
        return self.activations is None and self.weights is None
