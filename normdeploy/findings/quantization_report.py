"""What became of each linear layer where a model was quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .records import Certificate
from .rendering import ShortRepr


@dataclass(frozen=True, repr=False)
class Migration(ShortRepr):
    """A factor or a shift that was moved from a norm into the linear layers behind it, before anything was rounded.

    ``kind``: "gamma and beta", "smooth", "shift"; of a stream "center" (the mean taken off by all that write it) and
    "rotate". ``status``: "made", or "refused" for ``reason``.
    """

    kind: str
    # the tensor that holds the norm's result; of a stream its first
    norm: str
    # the results of the linear layers; of a stream of those that write and that read it
    linears: tuple[str, ...]
    status: Literal["made", "refused"]
    reason: str = ""
    # of SmoothQuant: between 0 (all in the activations) and 1 (all in the weights)
    alpha: float | None = None
    certificate: Certificate | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{self.status}, {self.kind} of {self.norm!r}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, repr=False)
class LayerReport(ShortRepr):
    """One linear layer or convolution with a constant weight."""

    # its result, by which it is named
    tensor: str
    # Conv, ConvTranspose, Gemm or MatMul
    op: str
    module: str
    # the tensor that is quantized in front of it
    input: str
    status: Literal["quantized", "float"]
    # why it stays float
    reason: str = ""
    # "int8 for each of 384 channels", "int4 in blocks of 32"
    weight: str = ""
    # of the weight: "GPTQ" by the error of the layer's products on samples, or "nearest"
    rounding: str = ""
    # "int8", "uint8", "float8e4m3fn"; "" where the weight alone is quantized
    activation: str = ""
    # the range that calibration gave its input
    low: float | None = None
    high: float | None = None
    scale: float | None = None
    zero_point: int | None = None
    # kinds of the migrations into it
    migrated: tuple[str, ...] = ()
    # ‖output with it alone quantized − output‖ / ‖output‖ of the model, on the samples
    error: float | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        kinds = "; ".join(filter(None, (self.weight, self.activation, self.reason)))
        return f"{self.status}, {self.op} {self.module or self.tensor!r}{f': {kinds}' if kinds else ''}"


@dataclass(frozen=True)
class MetricReport:
    """One metric of one output, on samples that did not calibrate."""

    output: str
    metric: str
    threshold: float
    # of the quantized file
    value: float
    # of the file before
    float32: float
    met: bool
    # rows that a share is of; 0 of other metrics
    samples: int = 0


@dataclass(frozen=True)
class OutputDrift:
    """How far an output is from the model's on samples that did not calibrate, all of them together."""

    output: str
    # ‖value − reference‖ / ‖reference‖ of the quantized file
    error: float
    # of the angle between the two
    cosine: float
    # the error of the file before
    float32: float


@dataclass(frozen=True)
class LayerExclusion:
    """Layers that were left in float for the metric's sake, and the worst metric before and after."""

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
    # of the weights, before and after
    bytes: tuple[int, int] = (0, 0)
    # what it builds for, among others
    notes: tuple[str, ...] = ()
    # empty without samples
    moved: tuple[OutputDrift, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        count = sum(layer.status == "quantized" for layer in self.layers)
        missed = sum(not metric.met for metric in self.judged)
        verdict = f"{missed} of {len(self.judged)} metrics NOT met; " if missed else ""
        return f"{verdict}{self.to} for {self.runtime}: {count} of {len(self.layers)} linear layers"
