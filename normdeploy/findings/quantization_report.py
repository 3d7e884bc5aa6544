"""Report of a quantization: the outcome of each linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .records import Certificate


@dataclass(frozen=True)
class Migration:
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


@dataclass(frozen=True)
class LayerReport:
    """Linear layer or convolution with a constant weight.

    Attributes:
        tensor: result of the layer, which names it.
        op: Conv, ConvTranspose, Gemm or MatMul.
        input: tensor that is quantized before the layer.
        reason: why the layer stays float.
        weight: "int8 for each of 384 channels", "int4 in blocks of 32".
        rounding: of the weight: "GPTQ" (by the error of the layer's products on samples) or "nearest".
        activation: "int8", "uint8", "float8e4m3fn"; "" if only the weight is quantized.
        low: lower end of the input's calibrated range.
        high: upper end of that range.
        migrated: kinds of the migrations into the layer.
        error: ‖output with only this layer quantized − output‖ / ‖output‖ of the model, on the samples.
    """

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


@dataclass(frozen=True)
class QuantizationReport:
    """Result of a quantization.

    Attributes:
        to: "int8", "fp8" or "int4".
        runtime: the form of Q and DQ nodes is chosen for it.
        calibration: "minmax", "entropy", "percentile", "dynamic" or "none".
        calibrated: number of samples used for calibration.
        judging: number of other samples, used for the metrics.
        bytes: of the weights, before and after.
        notes: remarks, for example on GPUs that the file builds for.
        moved: drift of each output; empty without samples.
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
