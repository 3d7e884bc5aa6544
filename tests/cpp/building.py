"""The C++ example (examples/cpp) compiled and linked: with NVIDIA's headers where they are at hand, with a header of
ours (include/), and over stubs of libnvinfer and libcudart, which run one small engine on the CPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "cpp"
COMPILER, CMAKE = shutil.which("g++"), shutil.which("cmake")
MAJOR = 11
"""Of TensorRT, whose layout our header and the stub have."""
VERSION = 110100
SYSTEM = ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/include", "/usr/local/include")
INSTALLED = ("/usr/local/tensorrt/include", "/opt/tensorrt/include", "/usr/src/tensorrt/include")
NO_HEADERS = (
    "TensorRT's own headers are not here, so nothing was compiled with them: TENSORRT_INCLUDE may name their folder"
    f" (looked for in {', '.join((*SYSTEM, *INSTALLED))})"
)
NO_CUDA = "cuda_runtime_api.h is not here: neither a CUDA toolkit (CUDA_HOME) nor Triton, which brings it, is installed"


def nvidia_headers() -> Path | None:
    """The folder with NVIDIA's NvInferRuntime.h. Raises FileNotFoundError where TENSORRT_INCLUDE names another."""
    named = os.environ.get("TENSORRT_INCLUDE")
    if named and not (Path(named) / "NvInferRuntime.h").is_file():
        raise FileNotFoundError(f"TENSORRT_INCLUDE={named}: there is no NvInferRuntime.h in it")
    folders = [Path(folder) for folder in ([named] if named else [*SYSTEM, *INSTALLED])]
    return next((folder for folder in folders if (folder / "NvInferRuntime.h").is_file()), None)


def cuda_headers() -> Path | None:
    """The folder with cuda_runtime_api.h."""
    triton = importlib.util.find_spec("triton")
    folders = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"]
    folders += [Path(p) / "backends/nvidia/include" for p in (triton and triton.submodule_search_locations) or ()]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()), None)


def major_of(headers: Path) -> int:
    """The release of NVIDIA's headers."""
    source = "#include <NvInferVersion.h>\nNV_TENSORRT_MAJOR\n"
    command = ["g++", "-E", "-P", "-x", "c++", "-I", str(headers), "-"]
    return int(subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout.split()[-1])


def compile_(*arguments: str | Path, headers: Path | None = None) -> None:
    """g++, with CUDA's headers. Raises AssertionError with its words where it refuses the source."""
    # g++ looks into the system's folders by itself; named again they would hide its own headers
    folders = [folder for folder in (headers, cuda_headers()) if folder and str(folder) not in SYSTEM]
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *(f"-isystem{folder}" for folder in folders)]
    ended = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def stubs(folder: Path) -> Path:
    """``folder`` with the three libraries, under the names that linkers and programs look for."""
    folder.mkdir(parents=True)
    for name, soname, needed in (
        ("cudart", "libcudart.so.13", ()),
        ("nvinfer", f"libnvinfer.so.{MAJOR}", (folder / "libcudart.so", "-Wl,-rpath,$ORIGIN")),
        ("nvinfer_plugin", f"libnvinfer_plugin.so.{MAJOR}", ()),
    ):
        made = folder / f"lib{name}.so"
        options = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", made]
        compile_(*options, HERE / f"{name}.cpp", *needed, headers=HERE / "include")
        (folder / soname).symlink_to(made.name)
    return folder


def sanitizers(folder: Path) -> list[str]:
    """Options of g++ that find leaks and what C++ leaves undefined, where it has them."""
    options = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["g++", *options, "-x", "c++", "-", "-o", str(folder / "sanitized")]
    tried = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    works = tried.returncode == 0 and subprocess.run([folder / "sanitized"], capture_output=True).returncode == 0
    return options if works else []


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    error: str


@dataclass(frozen=True)
class Program:
    """A compiled run_engine; the libraries that it is to find lie in ``libraries``: folders, joined by colons."""

    path: Path
    libraries: str

    def __call__(self, *arguments: str | Path, cwd: Path, **variables: str) -> Ended:
        """Without Python's environment, or anyone's."""
        found = {"ASAN_OPTIONS": "exitcode=66", "UBSAN_OPTIONS": "exitcode=66", "LD_LIBRARY_PATH": self.libraries}
        command = [str(self.path), *map(str, arguments)]
        ended = subprocess.run(command, cwd=cwd, env=found | variables, capture_output=True, text=True, timeout=120)
        assert "Sanitizer" not in ended.stderr, ended.stderr
        assert "runtime error" not in ended.stderr, ended.stderr
        assert ended.returncode in (0, 1, 2), f"{ended.returncode}: {ended.stderr}"
        return Ended(ended.returncode, ended.stdout, ended.stderr)


def example(folder: Path, headers: Path, libraries: Path, options: Sequence[str] = ()) -> Program:
    """run_engine, compiled with these headers and linked with the stubs."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "run_engine"
    linked = [f"-L{libraries}", "-lnvinfer", "-lcudart", "-ldl"]
    compile_(*options, EXAMPLE / "run_engine.cpp", "-o", made, *linked, headers=headers)
    return Program(made, str(libraries))


FLAGS = ("host code", "NVIDIA's plugin", "shape tensor", "sized by values", "vectorized", "static")
TYPES = {"float32": 0, "float16": 1, "int32": 3, "fp8": 6, "bfloat16": 7, "int64": 8}


def plan(*flags: str, kind: str = "float32", profiles: int = 1, version: int = VERSION) -> bytes:
    """An engine of the stub: x[rows, 4] to y[rows, 4], y = 2x + 1 in float32 and x in other types; profile 0 takes 1 to
    8 rows, profile 1 takes 9 to 16."""
    bits = sum(1 << FLAGS.index(flag) for flag in flags)
    return struct.pack("=4s5i", b"stub", version, 24, TYPES[kind], profiles, bits)
