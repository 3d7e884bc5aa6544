"""OpenVINO: names, types and sizes as onnxruntime gives them, float32 by default, errors of one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
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
from normdeploy.runtimes.ort_runner import OrtRunner
from tests.forked import ROOT
from tests.support import parsed, run_onnxruntime

installed = pytest.mark.skipif(explain_missing_openvino() is not None, reason="OpenVINO is not installed")
# Two kernels of a float32 op may differ by some ulps.
CLOSE = 2.0**-20


def opened(text: str, runner: str = "openvino", **constants: np.ndarray) -> OpenVinoRunner:
    return OpenVinoRunner(parsed(text, **constants).SerializeToString(), runner)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


@installed
@pytest.mark.parametrize(
    "text",
    [
        "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] same) { y = Neg(x)  same = Identity(y) }",
        "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] same) { y = Neg(x)  same = Identity(x) }",
        "g (float[N, 3] x) => (float[N, 3] x, float[N, 3] y) { y = Neg(x) }",
        "g (float[N, 3] x, float[N, 3] unread) => (float[N, 3] y) { y = Neg(x) }",
        "g (float[N, 3] x) => (float[N, 3] z, float[N, 3] y) { y = Neg(x)  t = Identity(y)  z = Abs(t) }",
        'g (float[N, 3] x) => (float[N, 3] "a/b:0") { "a/b:0" = Neg(x) }',
    ],
    ids=["two names", "copied input", "input is output", "unread input", "other order", "odd name"],
)
def test_outputs_keep_their_names_and_order(text: str, x: np.ndarray) -> None:
    proto = parsed(text)
    feeds = {v.name: x for v in proto.graph.input}
    with OpenVinoRunner(proto.SerializeToString()) as runner, OrtRunner(proto, optimize=False) as other:
        assert [spec.name for spec in runner.inputs] == [v.name for v in proto.graph.input]
        ours = runner.infer(feeds)
        theirs = other.infer(feeds)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


@installed
def test_listed_twice_an_output_is_returned_once(x: np.ndarray) -> None:
    with opened("g (float[N, 3] x) => (float[N, 3] y, float[N, 3] y) { y = Neg(x) }") as runner:
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], -x)


@installed
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float64"])
def test_types_and_scalars_are_kept(dtype: str) -> None:
    elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes: Mapping[str, list[int | str]] = {"x": ["N"], "s": []}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"]), onnx.helper.make_node("Identity", ["s"], ["t"])],
        "g",
        [onnx.helper.make_tensor_value_info(name, elem_type, shape) for name, shape in shapes.items()],
        [onnx.helper.make_tensor_value_info(name, elem_type, shape) for name, shape in (("y", ["N"]), ("t", []))],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    feeds = {"x": np.array([0, 1, 5]).astype(dtype), "s": np.array(1).astype(dtype)}
    with OpenVinoRunner(proto.SerializeToString()) as runner:
        values = runner.infer(feeds)
    for name, given in (("y", "x"), ("t", "s")):
        assert values[name].dtype == feeds[given].dtype
        np.testing.assert_array_equal(values[name], feeds[given])
        assert values[name].shape == feeds[given].shape


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
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_tensors_have_the_sizes_of_onnxruntime(shape: tuple[int, int]) -> None:
    proto = parsed(
        "g (float[N, M] x, float[M, 4] w) => (float[N, M] y, float[N, 4] z, float[N] s) <int64[1] a = {1}>"
        "{ y = Neg(x)  z = MatMul(x, w)  s = ReduceSum<keepdims = 0>(x, a) }"
    )
    feeds = {"x": np.zeros(shape, np.float32), "w": np.zeros((shape[1], 4), np.float32)}
    with OpenVinoRunner(proto.SerializeToString()) as runner:
        ours = runner.infer(feeds)
    for value, wanted in zip(ours.values(), run_onnxruntime(proto, feeds), strict=True):
        np.testing.assert_array_equal(value, wanted)


@installed
def test_sizes_may_change_between_runs_and_results_stay(x: np.ndarray) -> None:
    with opened("g (float[N, M] x) => (float[N, M] y) { y = Neg(x) }") as runner:
        first = runner.infer({"x": x})["y"]
        kept = first.copy()
        for shape in ((5, 7), (1, 1), (2, 3)):
            assert runner.infer({"x": np.ones(shape, np.float32)})["y"].shape == shape
    np.testing.assert_array_equal(first, kept)


@installed
def test_views_and_read_only_arrays_are_read_and_not_changed(x: np.ndarray) -> None:
    fixed = x.copy()
    fixed.flags.writeable = False
    before = x.copy()
    with opened("g (float[N, M] x) => (float[N, M] y) { t = Relu(x)  y = Neg(t) }") as runner:
        for given in (x, fixed, x[:, ::-1], x.T, x.astype(">f4").astype("<f4"), torch.from_numpy(x)):
            wanted = -np.maximum(np.asarray(given), 0)
            np.testing.assert_array_equal(np.asarray(runner.infer({"x": given})["y"]), wanted)
    np.testing.assert_array_equal(x, before)


@installed
def test_prepare_runs_without_binding_again(x: np.ndarray) -> None:
    with opened("g (float[N, M] x) => (float[N, M] y) { y = Neg(x) }") as runner:
        run = runner.prepare({"x": x})
        np.testing.assert_array_equal(runner.infer({"x": x[:1]})["y"], -x[:1])
        run()


@installed
@pytest.mark.parametrize("name", ["net.onnx", "net", "ü ü.model"])
def test_weights_in_another_file_are_found(tmp_path: Path, name: str, x: np.ndarray) -> None:
    weight = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    proto = parsed("g (float[N, 3] x) => (float[N, 64] y) { y = MatMul(x, w) }", w=weight)
    onnx.save(proto, tmp_path / name, save_as_external_data=True, location="w.data", size_threshold=0)
    with normdeploy.open_runner(tmp_path / name, runner="openvino") as runner:
        np.testing.assert_allclose(runner.infer({"x": x})["y"], x @ weight, rtol=0, atol=1e-5)
    (tmp_path / "w.data").unlink()
    with pytest.raises(GraphError, match=r"w\.data"):
        normdeploy.open_runner(tmp_path / name, runner="openvino")


@installed
def test_weights_with_a_default_are_no_inputs(x: np.ndarray) -> None:
    proto = parsed("g (float[N, 3] x, float[3] w) => (float[N, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }")
    with OpenVinoRunner(proto.SerializeToString()) as runner:
        assert [spec.name for spec in runner.inputs] == ["x"]
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], x * np.array([1, 2, 3], np.float32))


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
def test_inputs_that_do_not_fit_are_refused(x: np.ndarray) -> None:
    with opened("g (float[N, M] x, float[N, M] z) => (float[N, M] y) { y = MatMul(x, z) }") as runner:
        with pytest.raises(InputError, match="float64"):
            runner.infer({"x": x.astype(np.float64), "z": x})
        with pytest.raises(InputError) as caught:
            runner.infer({"x": x, "z": x})
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
