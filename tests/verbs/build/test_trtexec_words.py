"""Words of trtexec, of Polygraphy and of earlier versions at ``build``."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import typer.testing

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, RuntimeUnavailable

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 3] x, float[m, 2] z) => (float[n, 3] y) <float[3] c = {1.5, 2.5, -3.5}> { y = Add(x, c) }"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(MODEL), "m.onnx")
    return tmp_path


def run(line: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["build", *line.split()])


@pytest.mark.parametrize(
    "line",
    [
        "--onnx=m.onnx --saveEngine=m.engine --minShapes=x:1x3,z:1x2 --optShapes=x:2x3,z:1x2 --maxShapes=x:4x3,z:8x2",
        "--onnx m.onnx --saveEngine m.engine --minShapes x:1x3,z:1x2 --optShapes x:2x3,z:1x2 --maxShapes x:4x3,z:8x2",
        "m.onnx -o m.engine --trt-min-shapes x:[1,3] z:[1,2] --trt-opt-shapes x:[2,3] z:[1,2]"
        " --trt-max-shapes x:[4,3] z:[8,2]",
        "m.onnx -o m.engine --profile x=1x3:2x3:4x3 --profile z=1x2:1x2:8x2",
    ],
)
def test_all_spellings_state_the_same_profile(folder: Path, line: str) -> None:
    done = run(f"{line} --compute-capability 8.6 8.9 --report r.json")
    assert done.exit_code == 0, done.output
    assert "for compute capabilities 8.6, 8.9" in done.stdout
    assert "shapes of x: 1×3 to 4×3, fastest at 2×3" in done.stdout
    assert "shapes of z: 1×2 to 8×2, fastest at 1×2" in done.stdout
    assert (folder / "m.engine").is_file()


def test_the_former_word_for_the_library_works_with_a_note(folder: Path) -> None:
    done = run("m.onnx -o m.engine --runtime tensorrt-rtx --optShapes x:2x3,z:1x2")
    assert done.exit_code == 0, done.output
    assert done.stderr == "note: --runtime of build is now --library\n"
    with pytest.warns(DeprecationWarning, match="runtime is now library"):
        normdeploy.build("m.onnx", "m.engine", runtime="tensorrt-rtx", opt_shapes="x:2x3,z:1x2")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--fp16", ["--precision fp16", "normdeploy optimize"]),
        ("--dtype fp16", ["--precision fp16"]),
        ("--best", ["--precision fp16"]),
        ("--int8", ["--quantize int8", "--calibrate"]),
        ("--fp8", ["--quantize"]),
        ("--stronglyTyped", ["strongly typed"]),
        ("--noTF32", ["never uses TF32"]),
        ("--profilingVerbosity=detailed", ["always keeps the details"]),
        ("--dim n=1:2:3", ["--profile"]),
        ("--shapes=x:1x3", ["--profile", "--minShapes"]),
        ("--memPoolSize=workspace:512", ["--workspace 512M"]),
        ("--loadEngine=m.engine", ["normdeploy run"]),
        ("--staticPlugins=lib.so", ["--norm-impl plugin", "--print-trtexec"]),
        ("--hardwareCompatibilityLevel=turing+", ["--hardware-compat", "ampere-plus"]),
        ("--minShapes=x:1x3", ["--optShapes"]),
        # Both words for one thing.
        ("--saveEngine=b.engine", ["-o and --saveEngine", "--output"]),
        ("--onnx=b.onnx", ["--onnx", "'m.onnx'"]),
        ("--library tensorrt-rtx --runtime tensorrt", ["--library and --runtime", "only --library"]),
        ("--timing-cache a --timingCacheFile=b", ["--timing-cache and --timingCacheFile"]),
        ("--optShapes x:2x3,z:1x2 --profile n=1:2:3", ["--optShapes", "--profile"]),
    ],
)
def test_a_word_without_a_counterpart_names_ours(folder: Path, line: str, words: list[str]) -> None:
    done = run(f"m.onnx -o m.engine {line}")
    assert isinstance(done.exception, InputError)
    for word in words:
        assert word in str(done.exception)
    assert [path.name for path in folder.iterdir()] == ["m.onnx"]


def test_options_of_trtexec_reach_the_library(folder: Path) -> None:
    # Without a GPU, TensorRT itself can't build, so only the options' values are checked.
    with pytest.raises(InputError, match="--hardware-compat"):
        raise_error("m.onnx -o m.engine --hardwareCompatibilityLevel=ampere+ --optShapes=x:2x3,z:1x2")
    with pytest.raises(InputError, match="--version-compatible"):
        raise_error("m.onnx -o m.engine --vc --optShapes=x:2x3,z:1x2")
    with pytest.raises(InputError, match="--timing-cache"):
        raise_error("m.onnx -o m.engine --timingCacheFile=t.cache --optShapes=x:2x3,z:1x2")


def raise_error(line: str) -> None:
    done = run(line)
    assert done.exception is not None, done.output
    raise done.exception


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "--precision fp16"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"int8": True}, "--quantize int8"),
        ({"dims": ["n=1:2:3"]}, "profiles="),
        ({"runtime": "tensorrt", "library": "tensorrt"}, "runtime and library are the same argument"),
        ({"library": "openvino"}, "unknown library 'openvino'; choose one of tensorrt-rtx, tensorrt"),
    ],
)
def test_an_argument_without_a_counterpart_names_ours(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        normdeploy.build("m.onnx", "m.engine", **options)  # type: ignore[arg-type]


def test_a_library_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="TensorRT"):
        normdeploy.build("m.onnx", "m.engine", library="tensorrt", opt_shapes="x:2x3,z:1x2")
