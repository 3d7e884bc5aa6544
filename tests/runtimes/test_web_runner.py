"""onnxruntime-web in Node.js: types that it lacks, errors of one line, time limits, and no process that stays."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.cli import app as cli
from normdeploy.environment import NODE, WEB, describe_environment, find_web_package, library_versions
from normdeploy.errors import NOT_RUN, GraphError, InputError, RuntimeCrash, RuntimeUnavailable
from normdeploy.runtimes.web_process import MISSING_NODE, MISSING_PACKAGE, WebProcess, WebProcessError
from normdeploy.runtimes.web_runner import TYPES, WebRunner, describe_error
from tests.forked import ROOT
from tests.support import parsed

NEG = "g (float[N] x) => (float[N] y) { y = Neg(x) }"
# Runs for years with n = 2^62.
LOOP = (
    "g (int64 n, bool c, float[1] x) => (float[1] y) { y = Loop(n, c, x) <body = b (int64 i, bool k, float[1] a)"
    " => (bool again, float[1] z) { again = Identity(k)  z = Mul(a, a) }> }"
)
ENDLESS = {"n": np.array(2**62), "c": np.array(True), "x": np.ones(1, np.float32)}
# Stand-in for Node.js that answers each request. `answer` is a Python expression.
ANSWERING = """\
import json, os, struct, sys
def read(size):
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        sys.exit()
    return data
def write(header):
    text = json.dumps({{"sizes": [], **header}}).encode()
    os.write(int(sys.argv[3]), struct.pack("<I", len(text)) + text)
while True:
    header = json.loads(read(struct.unpack("<I", read(4))[0]))
    arrays = [read(size) for size in header["sizes"]]
    write({answer} if header["do"] == "open" else {{}})
"""


def opened(text: str, seconds: float = 60.0) -> WebRunner:
    return WebRunner(parsed(text).SerializeToString(), seconds=seconds)


def node_processes() -> set[int]:
    """Processes of Node.js that this process started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in children if is_session(int(pid))}


def is_session(pid: int) -> bool:
    try:
        return b"web_session.mjs" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(5).astype(np.float32)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Put a program in the place of Node.js, and an empty package in the place of onnxruntime-web."""
    package = tmp_path / "node_modules" / WEB
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.0.0"}')
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def put(script: str, interpreter: str = "/bin/sh") -> None:
        node = programs / NODE
        node.write_text(f"#!{interpreter}\n{script}\n")
        node.chmod(node.stat().st_mode | stat.S_IEXEC)

    return put


# ------------------------------------------------------------------ without Node.js


def test_without_node_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    onnx.save(parsed(NEG), tmp_path / "net.onnx")
    with pytest.raises(RuntimeUnavailable) as caught:
        normdeploy.run(tmp_path / "net.onnx", runner=WEB)
    assert str(caught.value) == MISSING_NODE
    verdict = normdeploy.verify(tmp_path / "net.onnx", tmp_path / "net.onnx", runners=WEB, prove=False)
    assert [(miss.runtime, miss.reason) for miss in verdict.unrun] == [(WEB, MISSING_NODE)]
    assert not set(describe_environment()) & {NODE, WEB}


def test_without_the_package_verify_ends_as_not_run(stand_in, tmp_path: Path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    stand_in("exit 0")
    (tmp_path / "node_modules").rename(tmp_path / "modules")
    monkeypatch.delenv("NODE_PATH", raising=False)
    onnx.save(parsed(NEG), tmp_path / "net.onnx")
    monkeypatch.setattr(sys, "argv", ["normdeploy", "verify", "net.onnx", "net.onnx", "--runner", WEB])
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main())  # type: ignore[func-returns-value]
    assert ended.value.code == NOT_RUN
    assert f"{WEB}: {MISSING_PACKAGE}" in " ".join("".join(capfd.readouterr()).split())
    monkeypatch.setenv("NODE_PATH", f"{tmp_path / 'none'}{os.pathsep}{tmp_path / 'modules'}")
    assert find_web_package() == tmp_path / "modules" / WEB


def test_the_package_is_found_in_a_folder_above(stand_in, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    stand_in("echo v99.1.0")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find_web_package() == tmp_path / "node_modules" / WEB
    assert library_versions([NODE, WEB]) == {NODE: "99.1.0", WEB: "1.0.0"}
    (tmp_path / "node_modules" / WEB / "package.json").write_text("{")
    assert library_versions([NODE, WEB]) == {}


def test_a_removed_working_folder_has_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.delenv("NODE_PATH", raising=False)
    (tmp_path / "gone").rmdir()
    assert find_web_package() is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Error: Cannot find module' >&2; exit 1", "exit code 1: Error: Cannot find module"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_node_that_does_not_start_is_not_available(stand_in, script: str, words: str) -> None:  # type: ignore[no-untyped-def]
    stand_in(script)
    with pytest.raises(RuntimeUnavailable, match="can't be started") as caught:
        opened(NEG)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_node_that_hangs_is_stopped(stand_in) -> None:  # type: ignore[no-untyped-def]
    stand_in("exec sleep 100")
    start = time.monotonic()
    with pytest.raises(RuntimeUnavailable, match=r"stopped after 0\.5 s"):
        opened(NEG, seconds=0.5)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("sys.exit(3)", RuntimeCrash),
        ("os.kill(os.getpid(), 9)", RuntimeCrash),
        (
            '{"error": "Can\'t create a session. ERROR_CODE: 9, ERROR_MESSAGE: Could not find an implementation"}',
            RuntimeUnavailable,
        ),
        ('{"error": "Can\'t create a session. ERROR_CODE: 1, ERROR_MESSAGE: bad"}', GraphError),
        ('{"error": "no available backend found. ERR: [wasm] Error: no file"}', RuntimeUnavailable),
    ],
)
def test_a_failed_load_has_the_error_of_its_cause(stand_in, answer: str, error: type[Exception]) -> None:  # type: ignore[no-untyped-def]
    stand_in(ANSWERING.format(answer=answer), sys.executable)
    with pytest.raises(error, match="can't load the model") as caught:
        opened(NEG)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }", "'x' is bfloat16, but only tensors of float32,"),
        ("g (string[N] x) => (string[N] y) { y = Identity(x) }", "'x' is string, but"),
        ("g (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x) }", "'y' is not a tensor, but"),
    ],
)
def test_types_that_it_lacks_are_named(text: str, words: str) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        opened(text)
    assert words in str(caught.value)
    assert TYPES[-1] in str(caught.value)


def test_errors_are_shortened() -> None:
    assert describe_error("x" * 5000) == "x" * 400
    assert describe_error("failed to call OrtRun(). ERROR_CODE: 6, ERROR_MESSAGE: std::bad_alloc") == (
        "out of memory, WebAssembly has 4 GiB at most: std::bad_alloc"
    )


# ------------------------------------------------------------------ with Node.js


@pytest.mark.usefixtures("web")
def test_versions_are_recorded() -> None:
    facts = describe_environment()
    assert facts[WEB].split(".")[0].isdecimal()
    assert facts[NODE].split(".")[0].isdecimal()


@pytest.mark.usefixtures("web")
def test_a_package_is_found_by_a_relative_path(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_web_package()
    assert package is not None
    monkeypatch.setenv("NODE_PATH", os.path.relpath(package.parent))
    with opened(NEG) as runner:
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], -x)


@pytest.mark.usefixtures("web")
def test_an_op_without_kernel_is_named_in_one_line() -> None:
    with pytest.raises(RuntimeUnavailable, match=r"an implementation for Neg\(13\).*'my node'") as caught:
        opened('g (float[N] x) => (float[N] y) { t = Cast<to = 16>(x)  ["my node"] u = Neg(t)  y = Cast<to = 1>(u) }')
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("web")
def test_several_prepared_runs_keep_their_inputs(x: np.ndarray) -> None:
    with opened(NEG) as runner:
        runs = [runner.prepare({"x": x}), runner.prepare({"x": x[:2]})]
        for run in runs:
            run()
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], -x)
    with pytest.raises(InputError, match="the runner is closed"):
        runs[0]()


@pytest.mark.usefixtures("web")
def test_runs_from_several_threads_wait_for_each_other() -> None:
    arrays = [np.full(10000 + i, i, np.float32) for i in range(8)]
    with opened(NEG) as runner, ThreadPoolExecutor(4) as pool:
        bound = runner.prepare({"x": arrays[0]})
        results = pool.map(lambda array: (bound(), runner.infer({"x": array})["y"])[1], arrays * 5)
        for array, result in zip(arrays * 5, results, strict=True):
            np.testing.assert_array_equal(result, -array)


@pytest.mark.usefixtures("web")
def test_a_link_has_its_weights_in_its_own_folder(tmp_path: Path, x: np.ndarray) -> None:
    (tmp_path / "far").mkdir()
    proto = parsed("g (float[N] x) => (float[N] y) { y = Mul(x, w) }", w=x)
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "net.onnx").rename(tmp_path / "far" / "net.onnx")
    (tmp_path / "net.onnx").symlink_to(tmp_path / "far" / "net.onnx")
    with WebRunner(tmp_path / "net.onnx") as runner:
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], x * x)


@pytest.mark.usefixtures("web")
def test_threads_give_the_same_numbers() -> None:
    text = "g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }"
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    with opened(text) as one, WebRunner(parsed(text).SerializeToString(), threads=2) as two:
        np.testing.assert_allclose(one.infer({"x": x})["y"], two.infer({"x": x})["y"], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("web")
def test_weights_in_a_subfolder_and_in_two_files_are_found(tmp_path: Path, x: np.ndarray) -> None:
    proto = parsed("g (float[N] x) => (float[N] y) { t = Mul(x, v)  y = Add(t, w) }", v=x, w=-x)
    for name, tensor in zip(("a.data", "./b.data"), proto.graph.initializer, strict=True):
        (tmp_path / name).write_bytes(b"\0" * 8 + tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, name, offset=8, length=len(tensor.raw_data))
        tensor.ClearField("raw_data")
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with WebRunner(tmp_path / "net.onnx") as runner:
        np.testing.assert_allclose(runner.infer({"x": x})["y"], x * x - x, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("web")
def test_a_run_that_takes_too_long_is_stopped() -> None:
    process = WebProcess(1, seconds=60)
    process.request({"do": "open", "external": []}, [parsed(LOOP).SerializeToString()])
    inputs = [{"name": name, "type": a.dtype.name, "dims": list(a.shape)} for name, a in ENDLESS.items()]
    process.seconds = 1
    with pytest.raises(WebProcessError, match="stopped after 1 s") as caught:
        process.request({"do": "run", "inputs": inputs}, [*ENDLESS.values()])
    assert caught.value.ended
    assert not node_processes()
    process.close()


@pytest.mark.usefixtures("web")
def test_a_killed_process_is_named_and_not_waited_for(x: np.ndarray) -> None:
    with opened(NEG) as runner:
        (pid,) = node_processes()
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(InputError, match=r"Node\.js ended by SIGKILL"):
                runner.infer({"x": x})


@pytest.mark.usefixtures("web")
def test_memory_that_does_not_suffice_is_named() -> None:
    text = "g (int64[1] n) => (float[M] y) { y = ConstantOfShape(n) }"
    with opened(text) as runner:
        with pytest.raises(InputError, match="out of memory"):
            runner.infer({"n": np.array([2**30 - 2**14])})
        assert runner.infer({"n": np.array([2])})["y"].shape == (2,)


@pytest.mark.usefixtures("web")
def test_no_process_stays_after_the_runner() -> None:
    before = node_processes()
    runner = opened(NEG)
    assert len(node_processes()) == len(before) + 1
    del runner
    with opened(NEG):
        pass
    assert node_processes() == before


@pytest.mark.usefixtures("web")
@pytest.mark.parametrize("runs", [False, True], ids=["idle", "in a run"])
def test_no_process_stays_after_a_kill_of_python(runs: bool) -> None:
    script = f"""
from tests.runtimes.test_web_runner import ENDLESS, LOOP, node_processes, opened
runner = opened(LOOP)
print(*node_processes(), flush=True)
if {runs}:
    runner.infer(ENDLESS)
input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as python:
        assert python.stdout is not None
        pid = int(python.stdout.readline())
        assert is_session(pid)
        time.sleep(0.5)
        python.kill()
    deadline = time.monotonic() + 20
    while is_session(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_session(pid)
