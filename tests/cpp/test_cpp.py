"""The C++ example: compiled with NVIDIA's headers where they are at hand and with one of ours, linked with stubs of
libnvinfer and libcudart (docs/reference/cpp.md), and run. The name of each test says with which headers.

The stub's engine computes y = 2x + 1 on the CPU. Nothing here shows that TensorRT itself loads an engine: that is
tests/plugins/test_gpu_cpp.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from docs.refresh import blocks

from ..plugins.bindings import mock, wheels
from .building import (
    CMAKE,
    COMPILER,
    EXAMPLE,
    HERE,
    MAJOR,
    NO_CUDA,
    NO_HEADERS,
    ROOT,
    Ended,
    Program,
    compile_,
    cuda_headers,
    example,
    major_of,
    nvidia_headers,
    plan,
    sanitizers,
    stubs,
)

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="g++ is not here: the C++ example was not compiled"),
    pytest.mark.skipif(cuda_headers() is None, reason=NO_CUDA),
]
OURS, NVIDIAS = "our-header", "NVIDIA-headers"
HEADERS = [OURS, pytest.param(NVIDIAS, marks=pytest.mark.skipif(nvidia_headers() is None, reason=NO_HEADERS))]


def folder_of(headers: str) -> Path:
    return HERE / "include" if headers == OURS else nvidia_headers() or Path()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stubs(tmp_path_factory.mktemp("stubs") / "lib")


@pytest.fixture(scope="module")
def programs(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    """The example by the headers that it is compiled with, once for all tests."""

    @cache
    def made(headers: str) -> Program:
        folder = tmp_path_factory.mktemp("example")
        return example(folder, folder_of(headers), libraries, ["-g", *sanitizers(folder)])

    return made


@pytest.fixture
def program(request: pytest.FixtureRequest, programs: Callable[[str], Program]) -> Program:
    headers = getattr(request, "param", OURS)
    made = programs(headers)
    if headers == NVIDIAS and (found := major_of(folder_of(headers))) != MAJOR:
        pytest.skip(
            f"compiled and linked with headers of TensorRT {found}, but the stub that runs it is that of {MAJOR}"
        )
    return made


both = pytest.mark.parametrize("program", HEADERS, indirect=True)
X = np.arange(8, dtype=np.float32).reshape(2, 4) / 2 - 1


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A plan, and x.npy to feed it with."""
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "net.engine").write_bytes(plan())
    return tmp_path / "net.engine"


# ------------------------------------------------------------------ the two headers, and the layout behind them


@pytest.mark.parametrize("headers", HEADERS)
def test_signatures(headers: str) -> None:
    """Every name that our header declares for programs has its type and value in NVIDIA's too."""
    compile_("-fsyntax-only", "-Wno-deprecated-declarations", HERE / "signatures.cpp", headers=folder_of(headers))


def test_signatures_of_everything_that_is_declared() -> None:
    declared = (HERE / "include" / "NvInferRuntime.h").read_text().rpartition("what programs call")[2]
    names = set(re.findall(r"\b((?:get|set|is|create|deserialize|infer|enqueue)\w+)\(", declared))
    assert len(names) > 15
    compared = (HERE / "signatures.cpp").read_text()
    assert {name for name in names if name not in compared} == set()


def test_the_layout_is_that_of_the_bindings(libraries: Path, tmp_path: Path) -> None:
    """NVIDIA's compiled bindings find every function of the stub, which is compiled with our header, in its place."""
    installed = wheels.installed()
    if installed is None:
        pytest.skip("NVIDIA's bindings are not installed (pip install --no-deps tensorrt-cu13-bindings)")
    if wheels.number(installed[0])[0] != MAJOR:
        pytest.skip(f"the installed bindings are of TensorRT {installed[0]}, our header is that of {MAJOR}")
    (tmp_path / "net.engine").write_bytes(plan("host code", kind="int64", profiles=2))
    command = [libraries / "libnvinfer.so", mock.compiled(tmp_path, MAJOR), installed[1], tmp_path / "net.engine"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cpp.layout", *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "refused": True,  # without host code
        "profiles": 2,
        "names": ["x", "y"],
        "modes": ["INPUT", "OUTPUT"],
        "type": "INT64",
        "location": "DEVICE",
        "format": "LINEAR",
        "shape": [-1, 4],
        "profile": [[9, 4], [12, 4], [16, 4]],
        "chosen": [False, True],
        "unknown": ["x"],
        "set": [False, True],
        "inferred": [],
        "output": [9, 4],
        "addresses": [False, True],
        "run": False,  # y has no address
    }
    assert "x is not aligned to 256 bytes" in ended.stderr + ended.stdout  # through the logger


def test_sanitizers(tmp_path: Path) -> None:
    if not sanitizers(tmp_path):
        pytest.skip("g++ has no sanitizers here: leaks were looked for by the stub alone, undefined behaviour was not")


# ------------------------------------------------------------------ runs


@both
def test_run(program: Program, engine: Path) -> None:
    ended = program("net.engine", "--input", "x=x.npy", "--output", "out", cwd=engine.parent)
    assert ended == Ended(
        0,
        "net.engine: TensorRT 11.1.0, profile 0\n"
        "input   x  float32   2x4  x.npy\n"
        "output  y  float32   2x4  out/y.npy\n"
        "0.25 ms a run, mean of 10\n",  # the stub's clock
        "",
    )
    made = np.load(engine.parent / "out" / "y.npy")
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, 2 * X + 1, strict=True)


@both
def test_raw_files(program: Program, engine: Path) -> None:
    (engine.parent / "x.bin").write_bytes(X.tobytes())
    command = ["--input", "x=x.bin", "--shape", "x=2x4", "--output", "a/b", "--raw", "--repeat", "0"]
    ended = program("net.engine", *command, cwd=engine.parent)
    assert ended.code == 0, ended.error
    assert "ms" not in ended.out
    assert (engine.parent / "a" / "b" / "y.raw").read_bytes() == (2 * X + 1).tobytes()


@both
def test_the_profile_that_takes_the_shape(program: Program, engine: Path) -> None:
    engine.write_bytes(plan(profiles=2))
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    np.save(engine.parent / "x.npy", x)
    ended = program("net.engine", "--input", "x=x.npy", "--output", ".", cwd=engine.parent)
    assert ended.code == 0, ended.error
    assert "profile 1\n" in ended.out
    np.testing.assert_array_equal(np.load(engine.parent / "y.npy"), 2 * x + 1)


def test_a_static_input_needs_no_shape(program: Program, engine: Path) -> None:
    engine.write_bytes(plan("static"))
    ended = program("net.engine", cwd=engine.parent)
    assert ended.code == 0, ended.error
    assert "input   x  float32   8x4  drawn with seed 0\noutput  y  float32   8x4  not written\n" in ended.out


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int32", "int64"])
def test_drawn_values_are_those_of_the_seed(program: Program, engine: Path, kind: str) -> None:
    """The same in every floating type: the generator is the Mersenne Twister, which NumPy has too."""
    engine.write_bytes(plan(kind=kind))
    command = ["--shape", "x=7x4", "--seed", "42", "--output", "."]
    assert program("net.engine", *command, cwd=engine.parent).code == 0
    generator = np.random.MT19937()
    generator._legacy_seeding(42)  # type: ignore[attr-defined]
    drawn = (generator.random_raw(28) >> 24).astype(np.int64).reshape(7, 4)
    made = np.load(engine.parent / "y.npy")
    if kind == "bfloat16":
        made = made.view(ml_dtypes.bfloat16)
    assert made.dtype == kind
    floating = (drawn - 128) / 128
    expected = drawn >> 7 if "int" in kind else 2 * floating + 1 if kind == "float32" else floating
    np.testing.assert_array_equal(made.astype(np.float64), expected.astype(np.float64))
    assert len(np.unique(made.astype(np.float64))) > (1 if "int" in kind else 20)


@pytest.mark.parametrize("array", [np.float32(2.0), np.zeros((0, 4), np.float32), np.ones((2, 3, 4), np.int8)])
def test_npy_files_are_numpys(program: Program, engine: Path, array: Any) -> None:
    """Whatever the engine takes, the example reads the shape and the type that NumPy wrote."""
    np.save(engine.parent / "x.npy", array)
    ended = program("net.engine", "--input", "x=x.npy", cwd=engine.parent)
    shape = "x".join(map(str, array.shape)) or "scalar"
    reason = f"not of {shape}\n" if array.dtype == np.float32 else "x.npy: holds |i1, but x is float32 (<f4)"
    assert (ended.code, ended.out) == (1, "")
    assert reason in ended.error


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_of_npy(program: Program, engine: Path, version: tuple[int, int]) -> None:
    with (engine.parent / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, X, version=version)
    assert program("net.engine", "--input", "x=x.npy", "--output", ".", cwd=engine.parent).code == 0
    np.testing.assert_array_equal(np.load(engine.parent / "y.npy"), 2 * X + 1)


def test_engines_with_code_or_nvidias_plugins(program: Program, engine: Path) -> None:
    """Both only where they are asked for."""
    command = ["net.engine", "--shape", "x=1x4"]
    engine.write_bytes(plan("host code", "NVIDIA's plugin"))
    assert program(*command, "--host-code", "--nvidia-plugins", cwd=engine.parent).code == 0
    for missing, reason in (("--nvidia-plugins", "the plan holds host code"), ("--host-code", "could not find plugin")):
        ended = program(*command, missing, cwd=engine.parent)
        assert ended.code == 1
        assert reason in ended.error


# ------------------------------------------------------------------ errors

HINT = "net.engine: TensorRT 11.1.0 can't load it; its words stand above."
GIVEN = "--input=x=x.npy"


def refused(program: Program, folder: Path, *arguments: str, **variables: str) -> str:
    """What the example says of it; nothing is printed or written."""
    split = [part for argument in arguments for part in argument.split("=", 1 if argument.startswith("--") else 0)]
    ended = program("net.engine", *split, cwd=folder, **variables)
    assert (ended.code, ended.out) == (1, ""), ended.error
    assert not (folder / "y.npy").exists()
    return ended.error


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (None, "error: net.engine: there is no such file\n"),
        (b"", "error: net.engine: 0 of 0 bytes can be read\n"),
        (b"s", "TensorRT: Serialization assertion failed: magic tag does not match\nerror: " + HINT),
        (b"\0" * 99, "magic tag does not match\nerror: " + HINT),
        (plan()[:-1], "TensorRT: the plan has another size than it says\nerror: " + HINT),
        (plan() + b"\0", "TensorRT: the plan has another size than it says\nerror: " + HINT),
        (plan(version=100900), "TensorRT: Version tag does not match: 100900\nerror: " + HINT),
        (plan("shape tensor"), "error: x: lies in host memory (a shape), which this program does not handle\n"),
        (plan("sized by values"), "error: y: its size depends on the values, which this program does not handle\n"),
        (plan("vectorized"), "error: x: has a type or a format that this program does not know\n"),
        (plan(kind="fp8"), "error: x: has a type or a format that this program does not know\n"),
    ],
    ids=["none", "empty", "byte", "zeros", "short", "long", "version", "shape", "values", "format", "type"],
)
@both
def test_engine_that_can_not_be_run(program: Program, engine: Path, written: bytes | None, reason: str) -> None:
    engine.unlink()
    if written is not None:
        engine.write_bytes(written)
    said = refused(program, engine.parent, GIVEN, "--output=.")
    assert reason in said
    if HINT in said:
        assert f"all of its bytes ({len(written or b'')} were read)" in said


FIT = (
    "error: the inputs' shapes do not fit; pass shapes with --shape NAME=4x8:\n"
    "  profile 0 takes x of 1x4 to 8x4, not of "
)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shape=z=2x4"], "error: --shape: the engine has no input z\n"),
        (["--input=y=x.npy"], "error: --input: the engine has no input y\n"),
        ([], FIT + "?x4\n"),
        (["--shape=x=0x4"], FIT + "0x4\n"),
        (["--shape=x=9x4"], FIT + "9x4\n"),
        (["--shape=x=2x5"], FIT + "2x5\n"),
        (["--shape=x=2"], FIT + "2\n"),
        (["--shape=x=2x4x1"], FIT + "2x4x1\n"),
        (["--shape=x=" + "x".join(["999999999"] * 12)], FIT + "999999999x"),
        ([GIVEN, "--shape=x=4x2"], "error: x.npy: is 2x4, not 4x2\n"),
        (["--input=x=double.npy"], "error: double.npy: holds <f8, but x is float32 (<f4)\n"),
        (["--input=x=fortran.npy"], "error: fortran.npy: is in Fortran's order; save numpy.ascontiguousarray of it\n"),
        (["--input=x=missing.npy"], "error: missing.npy: there is no such file\n"),
        (["--input=x=folder.npy"], "error: folder.npy: there is no such file\n"),
        (["--input=x=short.npy"], "error: short.npy: has 31 bytes of values, but x of 2x4 takes 32\n"),
        (["--input=x=x.npy", "--output=x.npy/y"], "x.npy"),
        (["--input=x=x.bin", "--shape=x=2x4"], "error: x.bin: has 33 bytes of values, but x of 2x4 takes 32\n"),
        (["--input=x=x.bin"], FIT + "?x4\n"),
    ],
)
def test_inputs_that_do_not_fit(program: Program, engine: Path, arguments: list[str], reason: str) -> None:
    folder = engine.parent
    np.save(folder / "double.npy", X.astype(np.float64))
    np.save(folder / "fortran.npy", np.asfortranarray(X))
    (folder / "short.npy").write_bytes((folder / "x.npy").read_bytes()[:-1])
    (folder / "x.bin").write_bytes(X.tobytes() + b"\0")
    (folder / "folder.npy").mkdir()
    assert reason in refused(program, folder, *arguments)


def test_npy_files_cut_short(program: Program, engine: Path) -> None:
    whole = (engine.parent / "x.npy").read_bytes()
    for length in (1, 5, 6, 8, 9, 10, 11, 40, 127, 128):
        (engine.parent / "x.npy").write_bytes(whole[:length])
        assert "error: x.npy: " in refused(program, engine.parent, GIVEN), length


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no engine is given"),
        (["a", "b"], "b: is no option"),
        (["a", "--fast"], "--fast: is no option"),
        (["a", "--seed"], "--seed: a value is missing"),
        (["a", "--repeat", "-1"], "'-1' is no whole number below a billion"),
        (["a", "--shape", "x"], "--shape x: NAME= is missing"),
        (["a", "--shape", "x=2x"], "'' is no whole number below a billion"),
        (["a", "--shape", "x=2xn"], "'n' is no whole number below a billion"),
    ],
)
def test_wrong_command_lines(program: Program, tmp_path: Path, arguments: list[str], reason: str) -> None:
    ended = program(*arguments, cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith(f"error: {reason}\nrun_engine ENGINE [options]\n")


FAILING = {
    **dict.fromkeys(("cudaMalloc", "cudaStreamCreate", "cudaEventCreate"), "CUDA: {}: out of memory"),
    **dict.fromkeys(
        (
            "cudaMemcpyAsync to the GPU",
            "cudaMemcpyAsync from the GPU",
            "cudaStreamSynchronize",
            "cudaEventRecord",
            "cudaEventSynchronize",
            "cudaEventElapsedTime",
        ),
        "CUDA: {}: another error of CUDA",
    ),
    **dict.fromkeys(
        (
            "createInferRuntime",
            "createExecutionContext",
            "setOptimizationProfileAsync",
            "inferShapes",
            "enqueueV3",
            "initLibNvInferPlugins",
        ),
        "TensorRT: {} failed; what TensorRT says of it stands above",
    ),
    **dict.fromkeys(("setInputShape", "setTensorAddress"), "TensorRT: {} of x failed; what TensorRT says of it"),
}


TWICE = ("cudaMalloc", "setTensorAddress", "enqueueV3", "cudaEventCreate", "cudaEventRecord")
"""Of x and of y, for the outputs and for the time, for the beginning and for the end."""


@pytest.mark.parametrize("call", [*(f"{call}:1" for call in FAILING), *(f"{call}:2" for call in TWICE)])
def test_every_call_is_checked(program: Program, engine: Path, call: str) -> None:
    engine.write_bytes(plan(profiles=2))
    command = ["net.engine", "--shape", "x=9x4", "--nvidia-plugins", "--repeat", "1"]
    ended = program(*command, cwd=engine.parent, STUB_FAIL=call)
    name, _, nth = call.partition(":")
    assert ended.code == 1
    expected = FAILING[name].format(name)
    assert f"error: {expected.replace(' of x ', ' of y ') if nth == '2' else expected}" in ended.error


def test_every_call_is_among_them() -> None:
    """Those of TensorRT and CUDA that can fail; deserializeCudaEngine and initLibNvInferPlugins are tested above."""
    source = (EXAMPLE / "run_engine.cpp").read_text()
    called = Counter(re.findall(r"\bcuda(?!Memcpy\w*To|Success|Error)[A-Z]\w*(?=[(,)>])", source))
    called += Counter(re.findall(r"(?:(?:context|engine|runtime)(?:->|\.)|trt::)([a-z]\w*)\(", source))
    never = {"cudaFree", "cudaStreamDestroy", "cudaEventDestroy", "cudaGetErrorString", "setEngineHostCodeAllowed"}
    never |= {name for name in called if name.startswith("get")}
    tested = Counter([*(name.split()[0] for name in FAILING), *TWICE, "deserializeCudaEngine"])
    del tested["initLibNvInferPlugins"]  # found by its name in the library
    tested -= Counter(["cudaMalloc", "setTensorAddress"])  # in a loop
    assert {name: count for name, count in called.items() if name not in never} == tested


def test_memory_has_to_be_aligned(program: Program, engine: Path) -> None:
    """What cudaMalloc gives is; the stub gives other memory and refuses it as TensorRT's documentation says."""
    said = refused(program, engine.parent, GIVEN, STUB_FAIL="alignment:1")
    assert "TensorRT: setTensorAddress: x is not aligned to 256 bytes\n" in said
    assert "error: TensorRT: setTensorAddress of x failed" in said


@both
def test_a_library_of_nvidias(program: Program, libraries: Path, engine: Path) -> None:
    """TensorRT-RTX's library, which has the same interfaces, in the place of the stub: it makes a runtime, refuses what
    is no engine through our logger, and says its version. That needs no GPU."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    found = [
        lib for p in (spec and spec.submodule_search_locations) or () for lib in Path(p).glob("libtensorrt_rtx.so.*")
    ]
    if not found:
        pytest.skip("TensorRT-RTX is not installed (pip install tensorrt-rtx): no library of NVIDIA's was tried")
    folder = engine.parent / "rtx"
    folder.mkdir()
    (folder / f"libnvinfer.so.{MAJOR}").symlink_to(found[0])
    (folder / "libcudart.so.13").symlink_to(libraries / "libcudart.so.13")
    engine.write_bytes(b"no engine" * 100)
    ended = Program(program.path, str(folder))(
        "net.engine", cwd=engine.parent, ASAN_OPTIONS="exitcode=66:detect_leaks=0"
    )
    version = importlib.metadata.version("tensorrt_rtx").split(".")
    assert ended.code == 1, ended.error
    assert re.search(r"^TensorRT: .*Error Code ", ended.error, re.MULTILINE)
    assert f"error: net.engine: TensorRT {'.'.join(version[:3])} can't load it;" in ended.error


# ------------------------------------------------------------------ the page


def test_page(libraries: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/cpp.md: its commands build the example with CMake, and run it; they print what the page shows."""
    if CMAKE is None:
        pytest.skip("cmake is not here: docs/reference/cpp.md's commands were not run")
    folder, prefix = engine.parent, engine.parent / "prefix"
    (folder / "examples").symlink_to(ROOT / "examples")
    prefix.mkdir()
    (prefix / "lib").symlink_to(libraries)
    (prefix / "include").symlink_to(nvidia_headers() or HERE / "include")
    print(f"headers: {NVIDIAS if nvidia_headers() else OURS}")
    environment = os.environ | {"CMAKE_PREFIX_PATH": str(prefix), "CUDA_HOME": str((cuda_headers() or folder).parent)}
    shown = [b for b in blocks((ROOT / "docs" / "reference" / "cpp.md").read_text()) if b.language in ("sh", "text")]
    run = 0
    for block, answer in zip(shown, [*shown[1:], None], strict=True):
        if block.language != "sh" or not re.match("cmake |build/cpp/run_engine ", block.text):
            continue
        ended = subprocess.run(
            ["bash", "-e", "-c", block.text], cwd=folder, env=environment, capture_output=True, text=True
        )
        if block.text.startswith("cmake"):
            assert ended.returncode == 0, ended.stdout + ended.stderr
            assert "warning" not in (ended.stdout + ended.stderr).lower()
        else:
            assert answer is not None
            assert ended.stdout + ended.stderr == answer.text
        run += 1
    assert run == 3
    assert shutil.which("run_engine", path=str(folder / "build" / "cpp"))
