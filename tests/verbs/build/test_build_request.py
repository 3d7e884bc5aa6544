"""Options of a build: what TensorRT-RTX really makes of each, and what TensorRT is told, over a stand-in."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from normdeploy.errors import BuildError, InputError
from normdeploy.runtimes import build_options, trt_runner
from normdeploy.verbs.build.build_function import build
from normdeploy.verbs.build.build_request import parse_byte_size
from tests.standin_builder import Config, TimingCache

MODEL = '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x) => (float[batch, 8] y) { y = Relu(x) }'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def rtx(model: Path, **options: Any) -> Any:
    given = {"profiles": ["batch=1:2:4"], "compute_capabilities": ["8.6"]} | options
    return build(model, model.with_name("m.engine"), **given)


# ------------------------------------------------------------------ TensorRT-RTX, for real


def test_options_that_tensorrt_rtx_builds_with(model: Path) -> None:
    plain = rtx(model)
    assert (plain.capability, plain.notes, plain.more_profiles) == ("STANDARD", (), ())
    before = plain.path.read_bytes()
    for level in (0, 5):  # it takes the levels, and makes the same of them
        assert rtx(model, optimization_level=level).path.read_bytes() == before
    streamed = rtx(model, weight_streaming=True)
    assert streamed.path.read_bytes() != before
    assert "weight streaming: all weights stay" in streamed.notes[0]
    several = rtx(model, workspace="1G", more_profiles=["batch=8:16:32", {"x": ((40, 8), (40, 8), (64, 8))}])
    assert several.bytes > plain.bytes
    assert several.profile == {"x": ((1, 8), (2, 8), (4, 8))}
    assert several.more_profiles == ({"x": ((8, 8), (16, 8), (32, 8))}, {"x": ((40, 8), (40, 8), (64, 8))})
    assert several.options.workspace == 2**30
    text = str(several)
    assert "profile 0, shapes of x: 1×8 to 4×8" in text
    assert "profile 2, shapes of x: 40×8 to 64×8" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimization_level": 6}, "--optimization-level: level 6 was requested, but it uses 5; omit"),
        (
            {"version_compatible": True},
            "--version-compatible: .* its engines run only with the version that built them",
        ),
        ({"hardware_compatibility": "ampere-plus"}, "stays at NONE; name the GPUs with --compute-capability"),
        (
            {"timing_cache": "times"},
            "--timing-cache: it reports that its timing caches do nothing; it measures no timings",
        ),
    ],
)
def test_options_that_tensorrt_rtx_lacks(options: dict[str, Any], said: str, model: Path) -> None:
    if "timing_cache" in options:
        options = {"timing_cache": model.with_name("times")}
    with pytest.raises(InputError, match=f"TensorRT-RTX does not support .*{said}"):
        rtx(model, **options)
    assert [p.name for p in model.parent.iterdir()] == ["m.onnx"]


def test_a_workspace_that_is_too_small_fails_with_the_library_s_reason(model: Path) -> None:
    text = MODEL.replace("Relu(x)", "MatMul(x, w)").replace("8] x)", "8] x, float[8, 8] w)")
    onnx.save(onnx.parser.parse_model(text), model)
    with pytest.raises(BuildError, match="no tactics to implement the operation within workspace limit"):
        rtx(model, workspace=2**12)


@pytest.mark.skipif(not trt_runner.explain_missing_gpu(), reason="there is a GPU, on which it may be built")
def test_a_refittable_engine_needs_a_gpu(model: Path) -> None:
    graph = MODEL.replace("Relu(x)", "MatMul(x, w)")
    proto = onnx.parser.parse_model(graph)
    proto.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [8, 8], [1.0] * 64))
    onnx.save(proto, model)
    with pytest.raises(BuildError, match=r"A refittable engine needs a GPU to build, .*; omit --refit"):
        rtx(model, refit=True)


# ------------------------------------------------------------------ refused before the library is asked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"hardware_compatibility": "all"},
            "unknown hardware compatibility 'all'; choose one of ampere-plus, same-compute",
        ),
        ({"optimization_level": -1}, "the optimization level is -1; pass 0 or more"),
        ({"workspace": "lots"}, "can't read the workspace 'lots'; pass bytes, or a size such as 512M"),
        ({"workspace": 0}, "can't read the workspace 0"),
        ({"timing_cache": "m.onnx"}, "the timing cache .* would replace the model"),
        ({"timing_cache": "m.engine"}, "the timing cache .* would replace the engine"),
        ({"more_profiles": ["x=1:2:3"]}, "of rank 1, but x"),
        ({"more_profiles": ["length=1:2:3"]}, "names 'length', which is neither an input nor a dynamic dim"),
    ],
)
def test_values_that_there_are_not(
    options: dict[str, Any], said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    with pytest.raises(InputError, match=said):
        rtx(model, **options)
    assert [p.name for p in model.parent.iterdir()] == ["m.onnx"]


def test_a_static_file_has_one_profile(model: Path) -> None:
    onnx.save(onnx.parser.parse_model(MODEL.replace("batch", "2")), model)
    with pytest.raises(InputError, match=r"m\.onnx has no dynamic input, so 2 profiles would be identical"):
        rtx(model, profiles=(), more_profiles=[()])


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), (7, 7), ("512M", 2**29), ("2g", 2**31), ("2GiB", 2**31), ("3 KB", 3072)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_byte_size(text) == size


# ------------------------------------------------------------------ TensorRT, over a stand-in


@pytest.fixture
def tensorrt(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds with a ``tensorrt`` that is the stand-in; gives what its configuration was told."""
    package = tmp_path_factory.mktemp("packages") / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text("from tests.standin_builder import install\ninstall()\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    module = importlib.import_module("normdeploy.verbs.build.build_function")
    monkeypatch.setattr(module, "describe_missing_runtime", lambda runtime, gpu: "")
    monkeypatch.setattr(module, "installed_version", lambda runtime: "11.4.0.106")

    def told(name: str = "m.engine", **options: Any) -> Any:
        engine = build(model, model.with_name(name), library="tensorrt", profiles=["batch=1:2:4"], **options)
        return json.loads(engine.path.read_bytes()[4:]) | {"engine": engine}

    return told


def test_what_tensorrt_is_told(tensorrt: Any, model: Path) -> None:
    plain = tensorrt()
    assert (plain["flags"], plain["level"], plain["hardware"], plain["pools"]) == ([], 3, "NONE", {})
    assert plain["calls"] == ["plugins", "parser"]  # the parser finds NVIDIA's own plugins only when they are there
    found = tensorrt(
        workspace="2G",
        optimization_level=5,
        hardware_compatibility="ampere-plus",
        version_compatible=True,
        refit=True,
        weight_streaming=True,
        more_profiles=["batch=8:16:32"],
    )
    assert found["flags"] == ["REFIT", "VERSION_COMPATIBLE", "WEIGHT_STREAMING"]
    assert (found["level"], found["hardware"], found["pools"]) == (5, "AMPERE_PLUS", {"WORKSPACE": 2**31})
    assert found["profiles"] == [{"x": [[1, 8], [2, 8], [4, 8]]}, {"x": [[8, 8], [16, 8], [32, 8]]}]
    notes = " ".join(found["engine"].notes)
    for part in ("refittable", "version-compatible", "weight streaming", "compatibility ampere-plus"):
        assert part in notes
    assert sorted(p.name for p in model.parent.iterdir()) == ["m.engine", "m.onnx"]


@pytest.mark.parametrize(
    ("lacks", "options", "said"),
    [
        ("REFIT", {"refit": True}, "--refit: it has no builder flag REFIT; omit --refit"),
        ("WEIGHT_STREAMING", {"weight_streaming": True}, "--weight-streaming: it has no builder flag WEIGHT_STREAM"),
        ("VERSION_COMPATIBLE", {"version_compatible": True}, "it has no builder flag VERSION_COMPATIBLE"),
        (
            "lean",
            {"version_compatible": True},
            "because the lean runtime is missing; install .*pip install tensorrt-lean",
        ),
        ("SAME_COMPUTE_CAPABILITY", {"hardware_compatibility": "same-compute-capability"}, "it has no hardware compat"),
        ("WORKSPACE", {"workspace": 1}, "--workspace: it has no workspace limit"),
        ("level", {"optimization_level": 4}, "level 4 was requested, but it uses 3"),
    ],
)
def test_what_tensorrt_lacks_is_refused_by_name(
    lacks: str, options: dict[str, Any], said: str, tensorrt: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_LACKS", lacks)
    with pytest.raises(InputError, match=f"TensorRT does not support .*{said}"):
        tensorrt(**options)
    assert [p.name for p in model.parent.iterdir()] == ["m.onnx"]


def test_a_timing_cache_is_read_added_to_and_left_where_it_does_not_fit(
    tensorrt: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model.with_name("times")
    monkeypatch.setenv("STANDIN_TIMES", '{"conv": 1}')
    assert tensorrt(timing_cache=cache)["known"] == {}
    monkeypatch.setenv("STANDIN_TIMES", '{"gemm": 2}')
    assert tensorrt(timing_cache=cache)["known"] == {"conv": 1}
    assert json.loads(cache.read_bytes()) == {"gpu": "A", "times": {"conv": 1, "gemm": 2}}
    assert sorted(p.name for p in model.parent.iterdir()) == ["m.engine", "m.onnx", "times"]
    before = cache.read_bytes()
    monkeypatch.setenv("STANDIN_GPU", "B")
    with pytest.raises(InputError, match=rf"times \({len(before)} bytes\) is damaged, or was written by another"):
        tensorrt(timing_cache=cache)
    cache.write_bytes(b"junk")
    with pytest.raises(InputError, match=r"times \(4 bytes\) is damaged"):
        tensorrt(timing_cache=cache)
    assert cache.read_bytes() == b"junk"


def timed(path: Path, **times: int) -> str | None:
    """What a build says that has read the file before any other wrote it, and timed ``times``."""
    config = Config()
    config.cache = TimingCache(b"")
    config.cache.held["times"] |= times
    return build_options.save_timing_cache(config, {"timing_cache": str(path)})


@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_builds_side_by_side_share_a_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each has timed is there afterwards; nobody else writes between reading and writing."""
    import fcntl

    read, path, free = build_options.read_cache_file, tmp_path / "times", list[bool]()

    def spied(file: Path) -> bytes:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free.append(True)
        except BlockingIOError:
            free.append(False)
        finally:
            os.close(other)
        return read(file)

    monkeypatch.setattr(build_options, "read_cache_file", spied)
    assert timed(path, conv=1) is timed(path, gemm=2) is None
    assert json.loads(path.read_bytes()) == {"gpu": "A", "times": {"conv": 1, "gemm": 2}}
    assert free == [False, False]


def test_a_timing_cache_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "times"
    timed(path, conv=1)
    before = path.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert "the timing cache was not written: can't write 'times': No space left" in timed(path, gemm=2)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["times"]


def test_a_cache_that_another_gpu_wrote_meanwhile_is_left(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text('{"gpu": "other", "times": {"conv": 3}}')
    assert "the timing cache times was not changed" in timed(path, conv=1)
    assert json.loads(path.read_text())["gpu"] == "other"


# ------------------------------------------------------------------ the command line


def test_options_on_the_command_line_and_in_the_report(model: Path) -> None:
    command = [sys.executable, "-m", "normdeploy", "build", "m.onnx", "-o", "m.engine", "--compute-capability", "8.6"]
    command += ["--profile", "batch=1:1:1", "--add-profile", "batch=2:4:8", "--optimization-level", "2"]
    command += ["--workspace", "256M", "--weight-streaming", "--report", "r.json"]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, text=True, check=True)
    assert "profile 1, shapes of x: 2×8 to 8×8, fastest at 4×8" in done.stdout
    assert "note: weight streaming" in done.stdout
    engine = json.loads(model.with_name("r.json").read_text())["engine"]
    assert engine["options"] == {
        "timing_cache": None,
        "workspace": 2**28,
        "optimization_level": 2,
        "hardware_compatibility": None,
        "version_compatible": False,
        "refit": False,
        "weight_streaming": True,
        "ep_context": None,
    }
    assert engine["more_profiles"] == [{"x": [[2, 8], [4, 8], [8, 8]]}]
    assert engine["ep_context"] is None
    schema = json.loads(Path("normdeploy/reports/schemas/report.json").read_text())
    jsonschema.validate(json.loads(model.with_name("r.json").read_text()), schema)
