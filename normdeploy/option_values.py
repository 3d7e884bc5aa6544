"""List the values that options of the verbs accept, and the groups of these values that code tests for."""

from __future__ import annotations

from typing import Literal, get_args

# Runtimes that a file can be written for.
Runtime = Literal["any", "onnxruntime", "onnxruntime-accurate", "openvino", "tensorrt", "tensorrt-rtx"]
# Ops that a file may use: "standard" allows only ONNX's standard ops, "portable" also allows normdeploy's own ops with
# function bodies.
Fuse = Literal["standard", "portable"]
# Libraries that build engines.
EngineLibrary = Literal["tensorrt-rtx", "tensorrt"]
# Formats of quantized linear layers and convolutions.
Quantize = Literal["int8", "fp8", "int4"]
# Methods that derive ranges from samples.
Calibrator = Literal["minmax", "entropy", "percentile"]
# Whether to keep the kernels that TensorRT-RTX compiles.
RuntimeCache = Literal["keep", "off"]
# Form of the norms in an engine.
NormImpl = Literal["native", "plugin", "auto"]

# Opsets to which torch's exporter can write. For an older opset, torch silently writes a file of a different opset, and
# for a newer opset, torch drops the metadata of the nodes.
TORCH_OPSETS = range(18, 26)
# Opsets to which ``export`` and ``optimize`` can write. Opsets that torch does not write are reached by converting
# torch's file.
OPSETS = range(13, 29)
# Default opset of ``export``: the first one with a usable GroupNormalization. From opset 23 on, the exporter writes
# Attention nodes, which TensorRT can't build.
DEFAULT_OPSET = 21
FUSES: tuple[Fuse, ...] = get_args(Fuse)
NORM_IMPLS: tuple[NormImpl, ...] = get_args(NormImpl)
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
CALIBRATORS: tuple[Calibrator, ...] = get_args(Calibrator)
PROVIDERS = ("cpu", "cuda")

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
LIBRARIES: tuple[EngineLibrary, ...] = get_args(EngineLibrary)
# Names of the single runtimes. A file for one of the TENSORRT runtimes need not run in onnxruntime.
ANY, USUAL, ACCURATE, OPENVINO, *TENSORRT = RUNTIMES
# Internal name of the target that ``--runtime onnxruntime --provider cuda`` selects.
CUDA = "onnxruntime-cuda"
ONNXRUNTIME = (USUAL, ACCURATE, CUDA)
