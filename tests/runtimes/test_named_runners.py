"""OpenVINO and onnxruntime-web return names, types and sizes as onnxruntime does, and refuse inputs that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import normdeploy
from normdeploy.environment import WEB
from normdeploy.errors import GraphError, InputError
from normdeploy.runtimes.live_runner import LiveRunner
from normdeploy.runtimes.named_runners import BUILTIN_RUNNERS
from normdeploy.runtimes.ort_runner import OrtRunner
from tests.support import parsed, run_onnxruntime


@pytest.fixture(params=["openvino", WEB])
def runtime(request: pytest.FixtureRequest, web_path: None) -> str:
    """Name of a runner that is installed."""
    if reason := BUILTIN_RUNNERS[request.param].explain_missing():
        pytest.skip(reason)
    return str(request.param)


def opened(runtime: str, proto: onnx.ModelProto) -> LiveRunner:
    return BUILTIN_RUNNERS[runtime].open(proto.SerializeToString())


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


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
def test_outputs_keep_their_names_and_order(runtime: str, text: str, x: np.ndarray) -> None:
    proto = parsed(text)
    feeds = {v.name: x for v in proto.graph.input}
    with opened(runtime, proto) as runner, OrtRunner(proto, optimize=False) as other:
        assert [spec.name for spec in runner.inputs] == [v.name for v in proto.graph.input]
        ours = runner.infer(feeds)
        theirs = other.infer(feeds)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


def test_listed_twice_an_output_is_returned_once(runtime: str, x: np.ndarray) -> None:
    with opened(runtime, parsed("g (float[N, 3] x) => (float[N, 3] y, float[N, 3] y) { y = Neg(x) }")) as runner:
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], -x)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float64"])
def test_types_and_scalars_are_kept(runtime: str, dtype: str) -> None:
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
    with opened(runtime, proto) as runner:
        values = runner.infer(feeds)
    for name, given in (("y", "x"), ("t", "s")):
        assert values[name].dtype == feeds[given].dtype
        np.testing.assert_array_equal(values[name], feeds[given])
        assert values[name].shape == feeds[given].shape


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_tensors_have_the_sizes_of_onnxruntime(runtime: str, shape: tuple[int, int]) -> None:
    proto = parsed(
        "g (float[N, M] x, float[M, 4] w) => (float[N, M] y, float[N, 4] z, float[N] s) <int64[1] a = {1}>"
        "{ y = Neg(x)  z = MatMul(x, w)  s = ReduceSum<keepdims = 0>(x, a) }"
    )
    feeds = {"x": np.zeros(shape, np.float32), "w": np.zeros((shape[1], 4), np.float32)}
    with opened(runtime, proto) as runner:
        ours = runner.infer(feeds)
    for value, wanted in zip(ours.values(), run_onnxruntime(proto, feeds), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_sizes_may_change_between_runs_and_results_stay(runtime: str, x: np.ndarray) -> None:
    with opened(runtime, parsed("g (float[N, M] x) => (float[N, M] y) { y = Neg(x) }")) as runner:
        first = runner.infer({"x": x})["y"]
        kept = first.copy()
        for shape in ((5, 7), (1, 1), (2, 3)):
            assert runner.infer({"x": np.ones(shape, np.float32)})["y"].shape == shape
    np.testing.assert_array_equal(first, kept)


def test_views_and_read_only_arrays_are_read_and_not_changed(runtime: str, x: np.ndarray) -> None:
    fixed = x.copy()
    fixed.flags.writeable = False
    before = x.copy()
    with opened(runtime, parsed("g (float[N, M] x) => (float[N, M] y) { t = Relu(x)  y = Neg(t) }")) as runner:
        for given in (x, fixed, x[:, ::-1], x.T, x.astype(">f4").astype("<f4"), torch.from_numpy(x)):
            wanted = -np.maximum(np.asarray(given), 0)
            np.testing.assert_array_equal(np.asarray(runner.infer({"x": given})["y"]), wanted)
    np.testing.assert_array_equal(x, before)


def test_prepare_runs_without_binding_again(runtime: str, x: np.ndarray) -> None:
    with opened(runtime, parsed("g (float[N, M] x) => (float[N, M] y) { y = Neg(x) }")) as runner:
        run = runner.prepare({"x": x})
        np.testing.assert_array_equal(runner.infer({"x": x[:1]})["y"], -x[:1])
        run()


@pytest.mark.parametrize("name", ["net.onnx", "net", "ü ü.model"])
def test_weights_in_another_file_are_found(runtime: str, tmp_path: Path, name: str, x: np.ndarray) -> None:
    weight = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    proto = parsed("g (float[N, 3] x) => (float[N, 64] y) { y = MatMul(x, w) }", w=weight)
    onnx.save(proto, tmp_path / name, save_as_external_data=True, location="w.data", size_threshold=0)
    with normdeploy.open_runner(tmp_path / name, runner=runtime) as runner:
        np.testing.assert_allclose(runner.infer({"x": x})["y"], x @ weight, rtol=0, atol=1e-5)
    (tmp_path / "w.data").unlink()
    with pytest.raises(GraphError, match=r"w\.data"):
        normdeploy.open_runner(tmp_path / name, runner=runtime)


def test_weights_with_a_default_are_no_inputs(runtime: str, x: np.ndarray) -> None:
    proto = parsed("g (float[N, 3] x, float[3] w) => (float[N, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }")
    with opened(runtime, proto) as runner:
        assert [spec.name for spec in runner.inputs] == ["x"]
        np.testing.assert_array_equal(runner.infer({"x": x})["y"], x * np.array([1, 2, 3], np.float32))


def test_inputs_that_do_not_fit_are_refused(runtime: str, x: np.ndarray) -> None:
    with opened(runtime, parsed("g (float[N, M] x, float[N, M] z) => (float[N, M] y) { y = MatMul(x, z) }")) as runner:
        with pytest.raises(InputError, match="float64"):
            runner.infer({"x": x.astype(np.float64), "z": x})
        with pytest.raises(InputError) as caught:
            runner.infer({"x": x, "z": x})
        assert "\n" not in str(caught.value)
