"""Words of trtexec and Polygraphy that users try with ``build``, and former words of ``build``.

The flags are those of trtexec's help in TensorRT 10 and 11 and of ``polygraphy convert``.
"""

from __future__ import annotations

from ...errors import InputError
from ...other_words import ArgumentWord, CommandWord

_HARDWARE = {"ampere+": "ampere-plus", "sameComputeCapability": "same-compute-capability"}
_TYPES = (
    "the engine computes in the data types of the ONNX file, and TensorRT 11 has no such option either; first write a"
    " file in half precision: normdeploy optimize MODEL.onnx -o HALF.onnx --precision fp16 (or bf16), then build"
    " HALF.onnx"
)
_QUANTIZED = (
    "the engine computes in the data types of the ONNX file, and TensorRT 11 has no such option either; first write a"
    " quantized file: normdeploy optimize MODEL.onnx -o INT8.onnx --quantize int8 (or fp8, int4) --calibrate"
    " samples.npz, then build INT8.onnx"
)
_STRONG = "build makes only strongly typed networks: the engine computes in the data types of the ONNX file; omit it"


def _hardware_level(value: str) -> str:
    """Translate a value of --hardwareCompatibilityLevel."""
    if value not in _HARDWARE:
        raise InputError(
            f"--hardwareCompatibilityLevel {value!r} is --hardware-compat here, with"
            f" {' or '.join(_HARDWARE.values())}; omit it for no compatibility"
        )
    return _HARDWARE[value]


TRTEXEC_WORDS = (
    CommandWord(
        flags=("--runtime",),
        means=("--library",),
        takes_value=True,
        note="--runtime of build is now --library",
    ),
    CommandWord(flags=("--onnx",), means=(), takes_value=True),
    CommandWord(flags=("--saveEngine",), means=("--output",), takes_value=True),
    CommandWord(flags=("--trt-min-shapes",), means=("--minShapes",), takes_value=True),
    CommandWord(flags=("--trt-opt-shapes",), means=("--optShapes",), takes_value=True),
    CommandWord(flags=("--trt-max-shapes",), means=("--maxShapes",), takes_value=True),
    CommandWord(flags=("--timingCacheFile",), means=("--timing-cache",), takes_value=True),
    CommandWord(flags=("--builderOptimizationLevel",), means=("--optimization-level",), takes_value=True),
    CommandWord(flags=("--versionCompatible", "--vc"), means=("--version-compatible",)),
    CommandWord(
        flags=("--hardwareCompatibilityLevel",),
        means=("--hardware-compat",),
        takes_value=True,
        convert=_hardware_level,
    ),
    CommandWord(flags=("--allowWeightStreaming",), means=("--weight-streaming",)),
    CommandWord(flags=("--fp16", "--bf16", "--dtype", "--precision", "--best"), refusal=_TYPES),
    CommandWord(flags=("--int8", "--fp8", "--int4", "--calib", "--quantize"), refusal=_QUANTIZED),
    CommandWord(flags=("--stronglyTyped", "--strongly-typed"), refusal=_STRONG),
    CommandWord(flags=("--precisionConstraints", "--layerPrecisions", "--layerOutputTypes"), refusal=_STRONG),
    CommandWord(
        flags=("--profilingVerbosity",),
        refusal="build always keeps the details of layers, as trtexec does with --profilingVerbosity=detailed; omit it",
    ),
    CommandWord(flags=("--noTF32", "--no-tf32"), refusal="build never uses TF32; omit it"),
    CommandWord(
        flags=("--dim",),
        refusal="sizes of an engine are --profile here, such as --profile batch=1:8:64; optimize --dim records sizes"
        " in the file",
    ),
    CommandWord(
        flags=("--shapes",),
        refusal="sizes to build for are --profile, or --minShapes, --optShapes and --maxShapes; bench --size and run"
        " --inputs choose sizes to run with",
    ),
    CommandWord(
        flags=("--memPoolSize",),
        refusal="the limit is --workspace here, in bytes or with a unit: --memPoolSize=workspace:512 is --workspace"
        " 512M",
    ),
    CommandWord(flags=("--loadEngine",), refusal="build writes engines; normdeploy run and bench load them"),
    CommandWord(
        flags=("--plugins", "--staticPlugins", "--dynamicPlugins", "--setPluginsToSerialize"),
        refusal="build loads no libraries of plugins; --norm-impl plugin puts normdeploy's kernels into the engine, and"
        " --print-trtexec prints the line for trtexec, to which such an option can be added",
    ),
)
"""Words of the command line."""

BUILD_ARGUMENTS = (
    ArgumentWord(name="runtime", means="library", former=True),
    ArgumentWord(name="fp16", harmless=(False, None), refusal=_TYPES),
    ArgumentWord(name="precision", harmless=(None,), refusal=_TYPES),
    ArgumentWord(name="dtype", harmless=(None,), refusal=_TYPES),
    ArgumentWord(name="int8", harmless=(False, None), refusal=_QUANTIZED),
    ArgumentWord(name="dims", harmless=((), None), refusal="sizes of an engine are profiles=['batch=1:8:64'] here"),
)
"""Arguments of the Python function."""
