"""Define the report on a quantization: the result of each linear layer, the metrics and the migrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .records import Certificate
from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Migration(ShortRepr):
    """Factor or shift that was moved into linear layers before quantization, or the refusal of such a move.

    Attributes:
        kind: "gamma and beta", "smooth" or "shift"; for a residual stream "center" (every writer of the stream
            subtracts the mean) or "rotate".
        norm: tensor with the norm's result; for a stream, the first tensor of the stream.
        linears: results of the linear layers. For a stream, these are all layers that write or read it.
        status: "made" or "refused".
        reason: why the move was refused.
        alpha: SmoothQuant's α, from 0 (the activations keep their whole range) to 1 (the weights take all of it).
    """

    kind: str
    norm: str
    linears: tuple[str, ...]
    status: Literal["made", "refused"]
    reason: str = ""
    alpha: float | None = None
    certificate: Certificate | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.status}, {self.kind} of {self.norm!r}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, repr=False)
class LayerReport(ShortRepr):
    """One linear layer or convolution with a constant weight."""

    tensor: str
    op: str
    module: str
    input: str
    status: Literal["quantized", "float"]
    reason: str = ""
    weight: str = ""
    rounding: str = ""
    activation: str = ""
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    zero_point: int | None = None
    migrated: tuple[str, ...] = ()
    error: float | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        kinds = "; ".join(filter(None, (self.weight, self.activation, self.reason)))
        return f"{self.status}, {self.op} {self.module or self.tensor!r}{f': {kinds}' if kinds else ''}"


@dataclass(frozen=True)
class MetricReport:
    """One metric of one output, on samples that were not used for calibration.

    Attributes:
        value: value of the metric for the quantized file.
        float32: value of the metric for the file before quantization.
        samples: number of rows, if the metric is a share of rows; 0 for other metrics.
    """

    output: str
    metric: str
    threshold: float
    value: float
    float32: float
    met: bool
    samples: int = 0


def format_metric(value: float) -> str:
    """Write a metric with six digits, or its distance from 1 if these digits do not show it.

    Returns:
        text such as "0.9982" or "1 - 2.3e-07".
    """
    if 0 < 1 - value < 5e-6:
        return f"1 - {1 - value:.2g}"
    return f"{value:.6g}"


@dataclass(frozen=True)
class OutputDrift:
    """Difference of an output from the model's output, over all samples that were not used for calibration.

    Attributes:
        error: ‖value − reference‖ / ‖reference‖ of the quantized file.
        cosine: cosine of the angle between value and reference.
        float32: the same error for the file before quantization.
    """

    output: str
    error: float
    cosine: float
    float32: float


@dataclass(frozen=True)
class LayerExclusion:
    """Layers that one step of the exclusion left in float to reach the metrics.

    Attributes:
        metric: name of the metric that is farthest below its threshold.
        before: value of the metric before the step.
        after: value of the metric after the step.
    """

    tensors: tuple[str, ...]
    metric: str
    before: float
    after: float


@dataclass(frozen=True, repr=False)
class QuantizationReport(ShortRepr):
    """Result of a quantization.

    Attributes:
        to: "int8", "fp8" or "int4".
        runtime: runtime for which the file was written.
        calibration: "minmax", "entropy", "percentile", "dynamic" or "none".
        calibrated: number of calibration samples.
        judging: number of judging samples, on which the metrics were measured.
        bytes: size of the weights before and after the quantization.
        moved: difference of each output from the model's output.
    """

    to: str
    runtime: str
    calibration: str
    calibrated: int
    judging: int
    layers: tuple[LayerReport, ...]
    migrations: tuple[Migration, ...] = ()
    judged: tuple[MetricReport, ...] = ()
    exclusions: tuple[LayerExclusion, ...] = ()
    bytes: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()
    moved: tuple[OutputDrift, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        count = sum(layer.status == "quantized" for layer in self.layers)
        missed = sum(not metric.met for metric in self.judged)
        verdict = f"{missed} of {len(self.judged)} metrics NOT met; " if missed else ""
        return f"{verdict}{self.to} for {self.runtime}: {count} of {len(self.layers)} linear layers"
