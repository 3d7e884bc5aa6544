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
    """Range of the values that one quantizer of activations received so far. The record is true if the quantizer clips.

    Attributes:
        node: name of the quantizer.
        tensor: the tensor that is quantized.
        ends: lower and upper end of the quantizer's range as real numbers; NaN if each channel has its own scale.
        least: the least finite value seen.
        largest: the largest finite value seen.
        share: fraction of elements outside the range in the worst run.
        beyond: the largest distance of a value from the range, in steps. If the range begins at 0, only values above
            the range count, since clipping at 0 is a ReLU.
        used: the largest fraction of the range's width that the values of one run span.
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
        held: name of a node's output -> replacement. For a DequantizeLinear, the replacement is the value of the
            output. None selects the unrounded tensor before quantization instead (only in
            `QuantizedRunner.run_all_tensors`, which keeps every tensor). For an integer product, the replacement is the
            codes of its weight. For a QuantizeLinear, the replacement is None: rounding and all clipping except that of
            a ReLU are left out.
        clips: True clips codes that lie more than a step outside their range. False clips only for a ReLU. The field
            has no effect if activations round as the file does.
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
