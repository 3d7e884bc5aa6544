"""Report of a quantization: the outcome of each linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .records import Certificate
from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Migration(ShortRepr):
    """Factor or shift that moved from a norm into the linear layers after it, before any rounding.

    Attributes:
        kind: "gamma and beta", "smooth" or "shift"; for a residual stream "center" (every writer of the stream
            subtracts the mean) or "rotate".
        norm: tensor with the norm's result; for a stream its first tensor.
        linears: results of the linear layers; for a stream of all that write and read it.
        status: "made" or "refused".
        reason: why it was refused.
        alpha: of SmoothQuant, from 0 (everything in the activations) to 1 (everything in the weights).
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
        value: of the quantized file.
        float32: of the file before.
        samples: number of rows that a share refers to; 0 for other metrics.
    """

    output: str
    metric: str
    threshold: float
    value: float
    float32: float
    met: bool
    samples: int = 0


@dataclass(frozen=True)
class OutputDrift:
    """Distance of an output from the model's, over all samples that were not used for calibration.

    Attributes:
        error: ‖value − reference‖ / ‖reference‖ of the quantized file.
        cosine: of the angle between the two.
        float32: error of the file before.
    """

    output: str
    error: float
    cosine: float
    float32: float


@dataclass(frozen=True)
class LayerExclusion:
    """Layers left in float to reach the metric.

    Attributes:
        metric: name of the worst metric.
        before: its value before the exclusion.
        after: its value after the exclusion.
    """

    tensors: tuple[str, ...]
    metric: str
    before: float
    after: float


@dataclass(frozen=True, repr=False)
class QuantizationReport(ShortRepr):
    """``to``: "int8", "fp8" or "int4"; ``runtime``: whose form of Q and DQ was written; ``calibration``: "minmax",
    "entropy", "percentile", "dynamic" or "none"; ``calibrated`` and ``judging``: samples."""

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
