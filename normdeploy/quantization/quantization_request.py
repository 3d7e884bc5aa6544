"""Define a quantization request, and check that the runtime has kernels for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
import onnx

from ..compare.policy import Policy
from ..errors import InputError
from ..option_values import ONNXRUNTIME, TENSORRT
from ..precision.type_conversion import FORMATS
from .layer_groups import LayerCandidate
from .number_formats import FP8, INT4, INT8, UINT8, CodeFormat

# Number of input channels that share a scale in INT4; TensorRT and onnxruntime both support this block size.
BLOCK = 64
# Maximum number of layer names that an error message lists
_LISTED = 8
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"})
_QUANTIZED |= frozenset({"MatMulInteger", "ConvInteger", "MatMulNBits", "DynamicQuantizeMatMul"})


@dataclass(frozen=True)
class QuantizationRequest:
    """Request to quantize a model.

    Attributes:
        to: "int8", "fp8" or "int4".
        runtime: runtime for which the file is written.
        calibration: "minmax", "entropy" or "percentile".
        policy: metrics that the file must reach.
        dynamic: True to compute the ranges of activations at run time; only for onnxruntime.
        half: type of the other layers and of the scales: "fp16", "bf16", or "" for float32.
        rotate: True to rotate residual streams first (`normdeploy.quantization.stream_rotation`).
        keep_float: patterns for the names of layers that stay float; `*` matches any characters, and `?` any single
            character.
    """

    to: str
    runtime: str = "any"
    calibration: str = "minmax"
    policy: Policy = field(default_factory=Policy)
    dynamic: bool = False
    half: str = ""
    rotate: bool = False
    keep_float: tuple[str, ...] = ()

    @property
    def scale_dtype(self) -> np.dtype:
        """Return the dtype that must represent the scales exactly.

        Rounding them later would change every dequantized number.
        """
        if self.half:
            return FORMATS[self.half].dtype
        return np.dtype(np.float32)

    @property
    def weight_format(self) -> CodeFormat:
        """Return the format of the weights."""
        return {"int8": INT8, "fp8": FP8, "int4": INT4}[self.to]

    @property
    def activation_format(self) -> CodeFormat | None:
        """Return the format of the activations; None if they are not quantized, or only at run time."""
        if self.to == "int4" or self.dynamic:
            return None
        if self.to == "int8" and self.runtime in ONNXRUNTIME:
            return UINT8
        return self.weight_format

    @property
    def counts_padding(self) -> bool:
        """Return True if padding tokens count when ranges are measured: for all formats but symmetric int8.

        Padding tokens widen the ranges. If the ranges are measured without padding tokens, uint8 files are less
        accurate (the mean error of MiniLM grows by a fifth), and INT4 files slightly less. Symmetric int8 does not need
        padding tokens, because it widens the range of each channel itself. FP8 was not measured without padding.
        """
        return self.activation_format is not INT8

    @property
    def block_size(self) -> int:
        """Return the number of input channels that share a scale of the weight; 0 for one scale per output channel."""
        if self.to == "int4":
            return BLOCK
        return 0


def require_valid_request(proto: onnx.ModelProto, wish: QuantizationRequest) -> None:
    """Check a request before any work starts.

    Raises:
        InputError: the file is already quantized, or the runtime lacks kernels for the request.
    """
    require_runtime_kernels(wish)
    done = next((n for n in proto.graph.node if n.op_type in _QUANTIZED), None)
    if done is not None:
        raise InputError(
            f"the file is already quantized: it contains {done.op_type} {done.name or done.output[0]!r}; quantize "
            "the original float model"
        )


def require_runtime_kernels(wish: QuantizationRequest) -> None:
    """Check that the runtime has kernels for a request.

    Raises:
        InputError: the runtime has no kernels for it.
    """
    if wish.dynamic and (wish.runtime not in ONNXRUNTIME or wish.to != "int8"):
        raise InputError(
            f"--dynamic supports int8 in onnxruntime, not {wish.to} for {wish.runtime!r}; pass --runtime "
            "onnxruntime, or calibration samples instead of --dynamic"
        )
    if wish.to == "fp8" and wish.runtime not in TENSORRT:
        raise InputError(
            "only TensorRT has FP8 kernels (compute capability 8.9 or higher), but the runtime is "
            f"{wish.runtime!r}; pass --runtime tensorrt or tensorrt-rtx"
        )


def require_half_support(wish: QuantizationRequest) -> None:
    """Check that the runtime's kernels can be combined with half precision.

    Raises:
        InputError: the runtime's integer kernels do not read half precision.
    """
    if wish.half and wish.to == "int8" and wish.runtime in ONNXRUNTIME:
        raise InputError(
            f"onnxruntime's int8 kernels read and write float32: with {wish.half}, it would dequantize every "
            "layer and compute in float32, slower than either; omit --precision for onnxruntime, or pass another "
            "--runtime"
        )


def mark_excluded_layers(layers: list[LayerCandidate], wish: QuantizationRequest) -> list[LayerCandidate]:
    """Add a reason to layers that must stay float, by request or because the runtime has no kernel.

    Returns:
        all layers in their order.
    """
    return _keep_float_without_kernel([_keep_float_by_pattern(c, wish.keep_float) for c in layers], wish)


def require_matching_patterns(layers: Sequence[LayerCandidate], patterns: Sequence[str]) -> None:
    """Check that each pattern matches a layer.

    Raises:
        InputError: a pattern matches no layer.
    """
    names = [c.module or c.result for c in layers]
    for pattern in patterns:
        if not any(_matches_pattern(c, pattern) for c in layers):
            told = ", ".join(map(repr, get_close_matches(pattern, names, _LISTED, 0.0)))
            raise InputError(
                f"no linear layer matches {pattern!r}, which should stay float; the closest names of "
                f"{len(names)} layers are {told}"
            )


def _matches_pattern(layer: LayerCandidate, pattern: str) -> bool:
    """Return True if the pattern matches the layer's module or result."""
    return any(name and fnmatchcase(name, pattern) for name in (layer.module, layer.result))


def _keep_float_by_pattern(layer: LayerCandidate, patterns: Sequence[str]) -> LayerCandidate:
    pattern = next((p for p in patterns if _matches_pattern(layer, p)), None)
    if pattern is None:
        return layer
    return replace(layer, reason=f"it was requested to stay float ({pattern})")


def _keep_float_without_kernel(layers: list[LayerCandidate], wish: QuantizationRequest) -> list[LayerCandidate]:
    if wish.to == "int8" and not wish.dynamic:
        return layers
    # In a depthwise convolution, an output is a sum of only about nine products. FP8 weights have three fraction bits,
    # and their errors do not average out in so short a sum.
    if wish.to == "fp8":
        why = "in FP8, a grouped convolution loses too much accuracy"
        return [replace(c, reason=why) if c.groups > 1 and not c.reason else c for c in layers]
    name = {"int4": "INT4 weights are supported", "int8": "dynamic quantization is supported"}[wish.to]
    ops = ("MatMul",) if wish.dynamic else ("MatMul", "Gemm")
    if wish.dynamic:
        served = "MatMul, and Gemm of alpha = beta = 1 whose input is not transposed"
    else:
        served = " and ".join(ops)
    fit = [c.op in ops and not (wish.dynamic and c.plan.weight == 0) for c in layers]
    return [
        c if c.reason or good else replace(c, reason=f"{name} only for {served}")
        for c, good in zip(layers, fit, strict=True)
    ]


def build_notes(wish: QuantizationRequest) -> tuple[str, ...]:
    """Write notes about the hardware or runtime that the format needs.

    Returns:
        the notes.
    """
    if wish.to == "fp8":
        return ("FP8 needs compute capability 8.9 or higher",)
    if wish.runtime in ONNXRUNTIME and wish.to == "int8":
        return ("uint8 with a zero point is only for onnxruntime: TensorRT supports only symmetric int8",)
    return ()
