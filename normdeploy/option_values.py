"""What the options of the verbs may be, and the families that ask alike."""

from __future__ import annotations

from typing import Literal, get_args

Runtime = Literal["any", "onnxruntime", "onnxruntime-accurate", "tensorrt", "tensorrt-rtx"]  # of a file
Fuse = Literal["standard", "portable"]  # which ops may be written
EngineRuntime = Literal["tensorrt-rtx", "tensorrt"]  # what an engine is built with
Quantize = Literal["int8", "fp8", "int4"]  # what linear layers are quantized to
Calibrator = Literal["minmax", "entropy", "percentile"]  # how ranges are taken of samples
RuntimeCache = Literal["keep", "off"]  # of what TensorRT-RTX compiles
NormImpl = Literal["native", "plugin", "auto"]  # the form of the norms in an engine

OPSETS = range(18, 26)  # torch takes others without a word and writes something else
FUSES: tuple[Fuse, ...] = get_args(Fuse)
NORM_IMPLS: tuple[NormImpl, ...] = get_args(NormImpl)
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
CALIBRATORS: tuple[Calibrator, ...] = get_args(Calibrator)
PROVIDERS = ("cpu", "cuda")

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
ANY, USUAL, ACCURATE, *TENSORRT = RUNTIMES  # TENSORRT: their files need not run in onnxruntime
CUDA = "onnxruntime-cuda"  # what ``--runtime onnxruntime --provider cuda`` stands for
ONNXRUNTIME = (USUAL, ACCURATE, CUDA)
