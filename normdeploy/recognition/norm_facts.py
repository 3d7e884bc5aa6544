"""Define the records of recognition: a norm, and a candidate around a square root.

The graph's structure proposes an input and an output of a norm (`normdeploy.recognition.anchors`,
`normdeploy.recognition.norm_candidates`). Values decide whether the nodes between them are a norm, and which norm
(`normdeploy.recognition.fit_measurement`, `normdeploy.recognition.region_fitting`). If several readings are possible,
the rewrite that leaves the fewest nodes is chosen.
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
    """Norm y = gamma · (x − mean)/sqrt(variance + epsilon) + beta; x and y have the same shape and type.

    Attributes:
        shape: dims of x as the file states them.
        gamma: None if it is 1 everywhere.
        beta: None if it is 0 everywhere.
        ddof: 1 if the variance divides by n − 1 and n is dynamic. For a static n, gamma and epsilon contain the factor.
        notes: notes for the report about the fused norm.
        guessed: True if the norm was not measured. It was assumed to equal another norm, except for its constants. The
            proof decides whether this is right.
    """

    region: Region
    x: gs.Tensor
    y: gs.Tensor
    fit: NormFit
    shape: Dims
    dtype: np.dtype
    epsilon: float
    gamma: MeasuredParameter | None
    beta: MeasuredParameter | None
    ddof: int = 0
    notes: tuple[str, ...] = ()
    guessed: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the normalized axes. For a group norm they include the channel axis, which is normalized in parts."""
        return self.fit.normalized_axes

    @property
    def kind(self) -> str:
        """Return the fit's kind, or "InstanceNorm" for a LayerNorm with gamma or beta on other axes."""
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
    """Root with the tensors at which its norm may begin and end.

    Attributes:
        xs: tensors at which the norm may begin, nearest first.
        ys: tensors at which it may end, in the graph's order.
        passed: nodes between the root and ``xs``.
    """

    root: gs.Node
    xs: tuple[gs.Tensor, ...]
    ys: tuple[gs.Tensor, ...]
    passed: tuple[gs.Node, ...]
