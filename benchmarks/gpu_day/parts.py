"""The parts of the GPU day: what no machine without a GPU has shown, each a command of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# an extent of each kind: a long row, a small image, a row that fills no lane, one that is no multiple of any tile
_SANITIZED = "1001 or 7x7 or 7-20 or 40x41"
_GPU_TESTS = ("-m", "pytest", "-rs", "tests/plugins/test_gpu.py")


@dataclass(frozen=True)
class Part:
    """One command, behind ``python``.

    ``{results}`` in it is a file that it may write, of rows with "name", "status" and "detail". Exit code 0 says that
    all went well; 3, with the reason in the last line, that what it needs is missing.

    Attributes:
        shows: what is known once it has run.
        seconds: after which it is ended.
        tests: it is pytest: what it counts is the outcome.
        program: what must be installed to run it, in front of ``python``, with its options.
        alone: added where there is no GPU; with it the part does all that needs none.
        environment: variables that are set for it.
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
        # torch's cache would put tensors side by side and hide an access beyond one of them.
        # cuda-bindings asks an older driver for functions that it lacks; these errors are not the kernels'.
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
