"""Describe how a quantized file rounds in a float64 run (`runtimes.quantized_float64`) and which values it quantized.

This is a separate module because `quantized_float64` imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..evaluate.evaluator_core import Array


@dataclass
class Saturation:
    """Values that one quantizer of data received so far; true if it clips.

    Attributes:
        node: the quantizer.
        tensor: the tensor that is quantized.
        ends: ends of the range as real numbers; NaN if each channel has its own scale.
        least: the least finite value seen.
        largest: the largest finite value seen.
        share: fraction of elements outside the range in the worst run.
        beyond: the largest excess, in steps; if the range begins at 0, only above it, since the lower end is a ReLU.
        used: the largest fraction of the range's width that any run used.
    """

    node: str
    tensor: str
    ends: tuple[float, float]
    least: float = np.inf
    largest: float = -np.inf
    share: float = 0.0
    beyond: float = 0.0
    used: float = 0.0

    def __bool__(self) -> bool:
        return self.beyond > 0

    def __str__(self) -> str:
        if np.isnan(self.ends[0]):
            ends = ""
        else:
            ends = f", but its range is {self.ends[0]:.4g} to {self.ends[1]:.4g}"
        return (
            f"{self.tensor!r} saturates at {self.node}: its values are {self.least:.4g} to {self.largest:.4g}{ends}; "
            f"{self.share:.2%} of a run is clipped, by at most {self.beyond:.3g} steps"
        )


@dataclass(frozen=True)
class RoundingDraw:
    """Rounding of one run.

    Attributes:
        activations: None rounds as the file does, "exact" does not round, and a seed draws the roundings.
        weights: None keeps the stored codes; a seed draws weights that round to them.
        held: replacements by output tensor. For a DequantizeLinear: its value, or None for the tensor that was
            quantized before it, unrounded (only in `QuantizedRunner.run_all_tensors`, which keeps every tensor). For an
            integer product: the codes to read as its weight. For a QuantizeLinear: None, to neither round nor clip
            except for ReLU.
        clips: clip codes more than a step outside their range; False clips only for ReLU. It has no effect if
            activations round as the file does.
        width: factor on the drawn roundings.
    """

    activations: int | str | None = None
    weights: int | None = None
    held: Mapping[str, Array | None] = field(default_factory=dict)
    clips: bool = True
    width: float = 1.0

    @property
    def rounds_as_stored(self) -> bool:
        """Return whether the run rounds as the file does."""
        return self.activations is None and self.weights is None
