"""List the parts of the GPU day: everything that needs a GPU, each as a separate command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Tests of the sanitizer run, one size of each kind: a long row, a small image, a row shorter than a warp, a row that is
# not a multiple of any tile
_SANITIZED = "1001 or 7x7 or 7-20 or 40x41"
_GPU_TESTS = ("-m", "pytest", "-rs", "tests/plugins/test_gpu.py")


@dataclass(frozen=True)
class Part:
    """One command, to be run by ``python``.

    ``{results}`` in it is a file that the command may write, with rows of "name", "status" and "detail". Exit code 0 is
    success; 3, with the reason in the last line, means that something it needs is missing.

    Attributes:
        shows: fact that a successful run proves.
        seconds: time limit.
        tests: True if the command is pytest. Its counts are then the result.
        program: program that runs ``python``, with its options; must be installed.
        alone: options that are added without a GPU. With them, the part does everything for which it needs no GPU.
        environment: variables set for the command.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: int
    tests: bool = False
    program: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _engines(name: str, shows: str, seconds: int, *options: str) -> Part:
    return Part(name, shows, ("-m", "benchmarks.gpu_day.engines", "{results}", *options), seconds)


PARTS = (
    Part("kernels", "our kernels on the GPU give float64's numbers, every tactic", _GPU_TESTS, 360, tests=True),
    Part(
        "memory",
        "they read and write nothing but their tensors",
        (*_GPU_TESTS, "-k", _SANITIZED),
        180,
        tests=True,
        # torch's cache would put tensors side by side and hide an access beyond one of them. cuda-bindings asks an
        # older driver for functions that it lacks; these errors are not the kernels'.
        program=("compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no"),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Part(
        "C++",
        "an engine with our plugins inside runs in a process without Python, and is right",
        ("-m", "pytest", "-rs", "tests/plugins/test_gpu_cpp.py"),
        60,
        tests=True,
    ),
    Part(
        "onnxruntime",
        "onnxruntime's CUDA provider runs on the caller's memory and streams, and verify judges it",
        ("-m", "pytest", "-rs", "tests/runtimes/test_session_runner_cuda.py"),
        60,
        tests=True,
    ),
    _engines("tensorrt", "TensorRT parses and builds native norms, and its engines are right", 200, "tensorrt"),
    _engines("plugins", "TensorRT builds our plugins into engines, which are right", 200, "tensorrt", "plugin"),
    _engines(
        "tensorrt-rtx",
        "TensorRT-RTX's engines run and are right, keep what they compile, and run in onnxruntime",
        200,
        "tensorrt-rtx",
    ),
    Part(
        "bandwidth",
        "how much of the memory's bandwidth the kernels reach, beside torch, torch.compile, Liger and quack",
        ("-m", "benchmarks.kernels", "--dtypes", "fp16", "--mib", "128"),
        240,
        alone=("--dry-run", "--ops", "LayerNorm"),
    ),
)
