"""Define the report on a half-precision model: its float32 regions and totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from .quantization_report import LayerExclusion, MetricReport, OutputDrift
from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Float32Region(ShortRepr):
    """Nodes that stay float32 for one reason.

    Attributes:
        kind: "norm", "statistics", "constant", "range", "positions", "angles", "scales", "logarithm", "logits", "no
            half form", "control flow", "as written", "requested" or "metric".
        tensor: tensor to which the reason applies.
        value: largest magnitude of the tensor that calibration saw; None if it was not measured.
        nodes: outputs of the nodes that stay float32.
    """

    kind: str
    op: str
    module: str
    tensor: str
    reason: str
    value: float | None = None
    nodes: tuple[str, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.kind}, {self.op} {self.module or self.tensor!r}, {len(self.nodes)} nodes: {self.reason}"


@dataclass(frozen=True, repr=False)
class PrecisionReport(ShortRepr):
    """Result of a conversion to half precision.

    Attributes:
        to: "fp16" or "bf16".
        islands: float32 regions, in the graph's order.
        nodes: number of floating-point nodes of the main graph.
        kept: number of these nodes that stay float32.
        casts: number of inserted Casts.
        bytes: size of the weights before and after the conversion.
        calibrated: source of the calibration inputs: "given", "generated" or "".
        samples: number of inputs that calibration ran on.
        inputs: type of each input in the file, by name.
        outputs: type of each output in the file, by name.
        judging: number of samples on which the metrics were measured; 0 if no metric was requested.
        exclusions: steps that left blocks in float32 to reach the metrics.
        errors: name of a block -> relative error of the outputs with only this block in half precision; empty if the
            metrics were reached without leaving blocks in float32.
        moved: difference of each output from the float32 model's output in float64.
    """

    to: str
    islands: tuple[Float32Region, ...]
    nodes: int
    kept: int
    casts: int
    bytes: tuple[int, int]
    calibrated: str
    samples: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    notes: tuple[str, ...] = ()
    judging: int = 0
    judged: tuple[MetricReport, ...] = ()
    exclusions: tuple[LayerExclusion, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    moved: tuple[OutputDrift, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.to}: {self.kept} of {self.nodes} floating-point nodes in float32, {self.casts} Casts"
