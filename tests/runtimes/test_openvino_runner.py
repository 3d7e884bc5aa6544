"""OpenVINO: names, types and sizes as onnxruntime gives them, float32 by default, errors of one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import GraphError, InputError, RuntimeUnavailable
from normdeploy.runtimes import openvino_runner
from normdeploy.runtimes.openvino_runner import (
    MISSING,
    OpenVinoRunner,
    describe_error,
    explain_missing_openvino,
    import_openvino,
)
from tests.forked import ROOT
from tests.support import parsed

installed = pytest.mark.skipif(explain_missing_openvino() is not None, reason="OpenVINO is not installed")
# Two kernels of a float32 op may differ by some ulps.
CLOSE = 2.0**-20


def opened(text: str, runner: str = "openvino", **constants: np.ndarray) -> OpenVinoRunner:
    return OpenVinoRunner(parsed(text, **constants).SerializeToString(), runner)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


@installed
def test_bfloat16_is_read_and_written(x: np.ndarray) -> None:
    narrow = x.astype(ml_dtypes.bfloat16)
    with opened("g (bfloat16[N, 3] x) => (bfloat16[N, 3] y) { y = Neg(x) }") as runner:
        value = runner.infer({"x": narrow})["y"]
        tensor = runner.infer({"x": torch.from_numpy(x).bfloat16()})["y"]
    assert value.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(value, -narrow)
    assert tensor.dtype == torch.bfloat16


@installed
def test_computes_in_float32_unless_the_runner_is_bf16() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 64)).astype(np.float32)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    text = "g (float[N, 256] x) => (float[N, 64] y) { y = MatMul(x, w) }"

    def error(runner: str) -> float:
        with opened(text, runner, w=weight) as held:
            return float(np.abs(held.infer({"x": x})["y"] - exact).max())

    assert error("openvino") < 256 * 2.0**-24 * np.abs(exact).max()
    if "BF16" not in import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16")
    assert error("openvino-bf16") > 100 * error("openvino")


@installed
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_integers_that_openvino_would_truncate_are_refused(value: int) -> None:
    with opened("g (int64[N] x) => (int64[N] y) { y = Identity(x) }") as runner:
        np.testing.assert_array_equal(runner.infer({"x": np.array([2**31 - 1])})["y"], [2**31 - 1])
        with pytest.raises(InputError, match="int64 in int32"):
            runner.infer({"x": np.array([value])})


@installed
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('g (float[3, 3] x) => (float y) { ["my node"] y = Det(x) }', "no conversion for Det (my node)"),
        ("g (float[3, 3] x) => (float y) { y = Det(x) }", "no conversion for Det (the node that computes 'y')"),
        (
            "g (float[3, 3] x, bool c) => (float y) { y = If(c) <then_branch = t () => (float p) { p = Det(x) },"
            " else_branch = e () => (float q) { q = Det(x) }> }",
            "no conversion for Det (the node that computes 'p' and 1 more)",
        ),
    ],
)
def test_an_op_without_conversion_is_named_in_one_line(text: str, words: str) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        opened(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@installed
def test_a_graph_that_is_wrong_is_refused_with_its_node() -> None:
    with pytest.raises(GraphError) as caught:
        opened('g (float[N, 3] x, float[M, 4] z) => (float[N, 3] y) { ["the sum"] y = Add(x, z) }')
    assert "Add the sum: Argument shapes are inconsistent" in str(caught.value)
    assert "\n" not in str(caught.value)


@installed
def test_strings_are_refused() -> None:
    with pytest.raises(InputError, match="string"):
        opened("g (string[N] x) => (string[N] y) { y = Identity(x) }")


def test_without_openvino_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        openvino_runner.importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name)
    )
    onnx.save(parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }"), tmp_path / "net.onnx")
    with pytest.raises(RuntimeUnavailable) as caught:
        normdeploy.run(tmp_path / "net.onnx", runner="openvino")
    assert str(caught.value) == MISSING
    verdict = normdeploy.verify(tmp_path / "net.onnx", tmp_path / "net.onnx", runners="openvino", prove=False)
    assert [(miss.runtime, miss.reason) for miss in verdict.unrun] == [("OpenVINO", MISSING)]


@installed
def test_the_import_does_not_disturb_other_runtimes(tmp_path: Path) -> None:
    proto = parsed("g (float[N, 64] x) => (float[N, 64] y) { t = MatMul(x, w)  y = Softmax<axis = 1>(t) }")
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "net.onnx")
    script = f"""
import sys
order = sys.argv[1:]
import numpy as np
x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
from normdeploy.runtimes.openvino_runner import OpenVinoRunner
for name in order:
    if name == "openvino":
        OpenVinoRunner({str(tmp_path / "net.onnx")!r}).infer({{"x": x}})
    else:
        import torch, onnxruntime
        torch.set_num_threads(1)
        y = torch.softmax(torch.from_numpy(x) @ torch.from_numpy(x).T, 1)
        session = onnxruntime.InferenceSession({str(tmp_path / "net.onnx")!r}, providers=["CPUExecutionProvider"])
        z = session.run(None, {{"x": x}})[0]
        print(y.numpy().tobytes().hex() + z.tobytes().hex())
"""

    def printed(*order: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, *order], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    alone = printed("others")
    assert printed("openvino", "others") == alone
    assert printed("others", "openvino", "others") == alone * 2


def test_an_error_without_a_known_form_becomes_one_short_line() -> None:
    assert describe_error("some\n  failure\n") == "some failure"
    assert len(describe_error("x" * 5000)) == 400
