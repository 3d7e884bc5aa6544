"""The process that builds: its crashes, its end without an answer, its time, and what it must not read."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from normdeploy.errors import BuildError
from normdeploy.verbs.build.build_function import build
from tests.verbs.build.test_build_function import MODELS, ONES, saved

from ..norm_nodes import MODELS as NODES


@pytest.fixture
def layer_norm(tmp_path: Path) -> Path:
    text, constants = MODELS["LayerNorm"]
    return saved(tmp_path / "m.onnx", text, **constants)


def worker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the worker be this Python program."""
    monkeypatch.setattr(
        importlib.import_module("normdeploy.engines.builder_client"), "COMMAND", (sys.executable, "-c", code)
    )


@pytest.mark.skipif(os.name != "posix", reason="other systems have no signals")
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGABRT, r"crashed \(SIGABRT\): tactic 7 is null"),
        (signal.SIGKILL, "killed by the system, most likely because memory ran out"),
    ],
)
def test_a_crash_of_the_library_is_an_error_with_its_reason(
    number: signal.Signals, said: str, layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(
        monkeypatch,
        "import os, sys; print('[V] fine\\n[E] tactic 7 is null', file=sys.stderr, flush=True); os.kill(os.getpid(),"
        f" {number})",
    )
    with pytest.raises(BuildError, match=said):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"])
    assert "tactic 7" in (tmp_path / "m.engine.log").read_text()
    assert not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('out of luck')", "could not build the engine: out of luck"),
        (
            "import sys; print('[E] a\\n[E] b\\n[E] a', file=sys.stderr); sys.exit(1)",
            "could not build the engine: a; b",
        ),
        ("pass", "could not build the engine"),
    ],
)
def test_a_worker_that_ends_without_an_answer(
    code: str, said: str, layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, code)
    with pytest.raises(BuildError, match=said):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"])


def asked(onnx_path: Path, engine: Path) -> tuple[dict[str, Any], str]:
    """(the worker's last answer, its log) when it is asked directly, without the checks before it."""
    request = {
        "runtime": "tensorrt-rtx",
        "onnx": str(onnx_path),
        "engine": str(engine),
        "capabilities": [],
        "profile": {},
    }
    command = [sys.executable, "-m", "normdeploy.engines.builder_process"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_network_of_no_layers_is_refused(layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself parses an empty file without complaint."""
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert asked(tmp_path / "empty.onnx", tmp_path / "m.engine")[0] == {"refused": "empty"}
    assert not (tmp_path / "m.engine").exists()
    worker(monkeypatch, """print('{"refused": "empty"}')""")
    with pytest.raises(BuildError, match="network of 0 layers"):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"])


def test_products_of_float32_are_not_computed_in_tf32(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", "(float[2, 8] x) => (float[2, 8] y) { y = LayerNormalization(x, s) }", s=ONES)
    answer, log = asked(path, tmp_path / "m.engine")
    assert answer["built"]["layers"] > 0
    (flags,) = (line for line in log.splitlines() if line.strip().startswith("Flags"))
    assert "STRONGLY_TYPED" in flags
    assert "TF32" not in flags


def test_the_time_is_limited(layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(BuildError, match="within the timeout"):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"], timeout=0.2)


def test_an_interrupted_build_leaves_no_process_and_no_file(
    layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, """import os, time; print('{"progress": [1, %d]}' % os.getpid(), flush=True); time.sleep(60)""")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            started.append(total)
            raise KeyboardInterrupt

    started: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"], progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_the_working_directory_is_not_imported(
    layer_norm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "polygraphy.py").write_text("open('ran', 'w'); raise ImportError")
    monkeypatch.chdir(tmp_path)
    build(layer_norm, tmp_path / "m.engine", profiles=["batch=1:2:4"])
    assert not (tmp_path / "ran").exists()


def test_a_failed_build_leaves_no_rewritten_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(NODES["GroupNormalization of one group"].proto(static=True), tmp_path / "m.onnx")
    worker(monkeypatch, "import json, sys; print(json.load(sys.stdin)['onnx'], file=sys.stderr); sys.exit(1)")
    with pytest.raises(BuildError, match=r"could not build the engine: .*m\.onnx"):
        build(tmp_path / "m.onnx", tmp_path / "m.engine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine.log", "m.onnx"]
    path = (tmp_path / "m.engine.log").read_text().strip()
    assert path != str(tmp_path / "m.onnx")
    assert not Path(path).exists()
