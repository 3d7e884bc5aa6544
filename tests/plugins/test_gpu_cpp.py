"""On a GPU: engines of TensorRT, with our kernels inside and without, loaded and run by the C++ example in a fresh
process without Python, against float64 (docs/reference/cpp.md).

`make test-gpu`; skipped without a GPU, the full TensorRT, or what the example is compiled with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from normdeploy_plugins.ops import BY_NAME

from normdeploy.verbs.build.build_function import build

from ..cpp.building import COMPILER, EXAMPLE, HERE, MAJOR, Program, compile_, cuda_headers, major_of, nvidia_headers
from ..support import parsed
from .cases import Case, allowed

SEED = int(os.environ.get("SEED") or int.from_bytes(os.urandom(3), "big"))
WIDTH = 768
MODEL = f"""g (float16[n, 77, {WIDTH}] x) => (float16[n, 77, {WIDTH}] y) {{
    y = LayerNormalization<axis = -1, epsilon = 1e-5>(x, gamma, beta)
}}"""


def loaded(name: str) -> Path:
    """The file of a library that this process has loaded, by the beginning of its name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in lines if len(line.split(maxsplit=5)) == 6}
    found = sorted(file for file in files if file.name.startswith(name))
    if not found:
        pytest.skip(f"{name} is not loaded here: nothing to link the C++ example with")
    return found[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The example, linked with the libraries that PyTorch and TensorRT loaded here."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: no engine was loaded in C++ (run `make test-gpu` where there is one)")
    trt: Any = pytest.importorskip(
        "tensorrt", reason="the full TensorRT is not installed: no engine was loaded in C++", exc_type=ImportError
    )
    if COMPILER is None or cuda_headers() is None:
        pytest.skip("g++ or CUDA's headers are not here: the C++ example was not compiled")
    torch.zeros(1, device="cuda")  # loads the CUDA runtime
    major, headers = int(trt.__version__.split(".")[0]), nvidia_headers()
    if headers is None and major != MAJOR:
        pytest.skip(f"TensorRT {trt.__version__} without its headers (TENSORRT_INCLUDE): ours are those of {MAJOR}")
    if headers is not None and major_of(headers) != major:
        pytest.skip(f"TensorRT {trt.__version__}, but the headers in TENSORRT_INCLUDE are of {major_of(headers)}")
    print(f"compiled with {headers or 'a header of ours'}", file=sys.stderr)
    libraries = [loaded("libnvinfer.so"), loaded("libcudart.so")]
    folders = ":".join([*(str(library.parent) for library in libraries), os.environ.get("LD_LIBRARY_PATH", "")])
    made = tmp_path_factory.mktemp("example") / "run_engine"
    # what libnvinfer itself needs is found when the program is started
    options = ["-O2", "-Wl,--allow-shlib-undefined", "-ldl", "-o", made]
    compile_(EXAMPLE / "run_engine.cpp", *libraries, *options, headers=headers or HERE / "include")
    return Program(made, folders)


def model() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One layer norm, which ``plugin`` makes a kernel of ours, and its parameters."""
    random = np.random.default_rng(SEED)
    parameters = {name: random.standard_normal(WIDTH).astype(np.float16) for name in ("gamma", "beta")}
    return parsed(MODEL, **parameters), parameters


def judge(x: np.ndarray, y: np.ndarray, parameters: dict[str, np.ndarray]) -> None:
    """An output against float64, by the bounds of our kernels' own tests."""
    case = Case("LayerNorm", x.shape, {"epsilon": 1e-5, "axis": -1, "ddof": 0}, "fp16")
    stored = [a.astype(np.float64) for a in (x, parameters["gamma"], parameters["beta"])]
    expected = BY_NAME["LayerNorm"].reference(*stored, **case.attributes)
    assert y.shape == x.shape
    assert y.dtype == np.float16
    assert (np.abs(y.astype(np.float64) - expected) <= allowed(case, stored, expected, "fp16")).all(), f"SEED={SEED}"


@pytest.mark.parametrize("norm_impl", ["plugin", "native"])
def test_engine_in_a_process_without_python(program: Program, norm_impl: str, tmp_path: Path) -> None:
    proto, parameters = model()
    onnx.save(proto, tmp_path / "net.onnx")
    engine = build(
        tmp_path / "net.onnx",
        tmp_path / "net.engine",
        library="tensorrt",
        norm_impl=norm_impl,
        profiles=["n=1:4:8"],
    )
    if norm_impl == "plugin":
        assert [norm.form for norm in engine.norms] == ["plugin LayerNorm"]
    for n in (1, 5):
        x = np.random.default_rng(SEED + n).standard_normal((n, 77, WIDTH)).astype(np.float16)
        np.save(tmp_path / "x.npy", x)
        command = ["net.engine", "--input", "x=x.npy", "--output", "out"]
        # the GPU that this process sees first; the dynamic linker tells which libraries the new one loads
        variables = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "NVIDIA_"))}
        variables |= {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "files")}
        ended = program(*command, cwd=tmp_path, **variables)
        assert ended.code == 0, ended.error
        print(ended.out, file=sys.stderr)
        files = "".join(file.read_text() for file in tmp_path.glob("files.*"))
        assert "libnvinfer.so" in files
        assert "libpython" not in files
        judge(x, np.load(tmp_path / "out" / "y.npy"), parameters)
