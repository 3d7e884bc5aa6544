"""What the options of the verbs may be, and the families that ask alike."""

from __future__ import annotations

from typing import Literal, get_args

# of a file
Runtime = Literal["any", "onnxruntime", "onnxruntime-accurate", "tensorrt", "tensorrt-rtx"]
# which ops may be written
Fuse = Literal["standard", "portable"]
# what an engine is built with
EngineRuntime = Literal["tensorrt-rtx", "tensorrt"]
# what linear layers are quantized to
Quantize = Literal["int8", "fp8", "int4"]
# how ranges are taken of samples
Calibrator = Literal["minmax", "entropy", "percentile"]
# of what TensorRT-RTX compiles
RuntimeCache = Literal["keep", "off"]
# the form of the norms in an engine
NormImpl = Literal["native", "plugin", "auto"]

# torch takes others without a word and writes something else
OPSETS = range(18, 26)
FUSES: tuple[Fuse, ...] = get_args(Fuse)
NORM_IMPLS: tuple[NormImpl, ...] = get_args(NormImpl)
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
CALIBRATORS: tuple[Calibrator, ...] = get_args(Calibrator)
PROVIDERS = ("cpu", "cuda")

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
# TENSORRT: their files need not run in onnxruntime
ANY, USUAL, ACCURATE, *TENSORRT = RUNTIMES
# what ``--runtime onnxruntime --provider cuda`` stands for
CUDA = "onnxruntime-cuda"
ONNXRUNTIME = (USUAL, ACCURATE, CUDA)
