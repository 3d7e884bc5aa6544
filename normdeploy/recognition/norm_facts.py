"""Norms as facts: what recognition says of a square root in the graph.

Structure proposes where a norm may begin and end (`recognition.anchors`, `recognition.norm_candidates`), values say
whether it is one and which (`normdeploy.recognition.fit_measurement`, `normdeploy.recognition.region_fitting`), and the
passes say which of the readings is written as the fewest nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.dims import Dims
from ..graphs.region import Region
from .norm_fit import NormFit
from .norm_parameters import MeasuredParameter


@dataclass(frozen=True)
class Norm:
    """y = gamma · (x − mean)/sqrt(variance + epsilon) + beta; x and y have one shape and type."""

    region: Region
    x: gs.Tensor
    y: gs.Tensor
    fit: NormFit
    # as the file states it
    shape: Dims
    dtype: np.dtype
    epsilon: float
    # None: one everywhere
    gamma: MeasuredParameter | None
    # None: zero everywhere
    beta: MeasuredParameter | None
    ddof: int = (
        # 1: the variance divides by n − 1, and n is dynamic (of a static n gamma and epsilon hold the factor)
        0
    )
    # what its user should know where it is fused
    notes: tuple[str, ...] = ()
    guessed: bool = (
        # read like another norm, its constants taken from where that one has them: its certificate must tell
        False
    )

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes normalized over; of group norm's channel axis only a part."""
        return self.fit.normalized_axes

    @property
    def kind(self) -> str:
        if self.fit.kind != "LayerNorm":
            return self.fit.kind
        rank = len(self.shape)
        varies = {a for p in (self.gamma, self.beta) if p is not None for a in p.varies}
        spatial = rank - 2
        if spatial >= 1 and len(self.axes) == spatial and 0 not in self.axes and varies and not varies & set(self.axes):
            return "InstanceNorm"
        return "LayerNorm"


@dataclass(frozen=True)
class RootCandidate:
    """A root with its surroundings: where the norm around it may begin (nearest first) and end (in the graph's
    order)."""

    root: gs.Node
    xs: tuple[gs.Tensor, ...]
    ys: tuple[gs.Tensor, ...]
    passed: tuple[gs.Node, ...]
