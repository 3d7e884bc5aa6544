"""Weights by columns in onnxruntime: the sum that MatMul makes, bit for bit, and no copy of the weight."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from normdeploy.graphs import ort_equivalence
from normdeploy.graphs.transposed_weights import transpose_column_weights
from normdeploy.rewriting.perturbed_model import PerturbableModel
from normdeploy.storage.onnx_files import fill_shared_weights
from normdeploy.storage.proto_traversal import copy_model
from normdeploy.storage.shared_weights import Weights, share_array

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
WEIGHT = "float[3,2] w = {1, 2, 3, 4, 5, 6}"
READ = {
    "MatMul": "y = MatMul(x, w)",
    "ai.onnx": "y = ai.onnx.MatMul(x, w)",
    "Gemm": "y = Gemm(x, w)",
    "two": "a = MatMul(x, w) b = Gemm(x, w) y = Add(a, b)",
}
COPIED = {
    "the first factor": "a = Transpose(x) y = MatMul(w, a)",
    "another op": "a = MatMul(x, w) b = Exp(w) y = Add(a, b)",
    "nobody": "y = Exp(x)",
}


def model(nodes: str) -> onnx.ModelProto:
    return parser.parse_model(f"{HEAD} net (float[N,3] x) => (float[N,M] y) <{WEIGHT}> {{ {nodes} }}")


def by_columns(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float32).T


def ran(proto: onnx.ModelProto, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    del proto.graph.initializer[:]
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, weight.shape))
    session, _ = ort_equivalence.open_session_without_weights(proto, {})
    return np.asarray(session.run(["y"], {"x": x, "w": weight})[0])


@pytest.mark.parametrize("name", READ)
def test_it_is_read_where_it_lies(name: str) -> None:
    light, weight = model(READ[name]), by_columns()
    laid = transpose_column_weights(light, {"w": weight})["w"]
    assert laid.flags.c_contiguous
    assert np.shares_memory(laid, weight)
    assert list(light.graph.initializer[0].dims) == [2, 3]
    x = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    np.testing.assert_array_equal(ran(light, laid, x), ran(model(READ[name]), np.ascontiguousarray(weight), x))


def test_a_gemm_that_takes_it_transposed_takes_it_as_it_is() -> None:
    light, weight = model("y = Gemm<transB = 1>(x, w)"), np.asfortranarray(np.ones((2, 3), np.float32))
    assert transpose_column_weights(light, {"w": weight})["w"].shape == (3, 2)
    assert [a.i for a in light.graph.node[0].attribute] == [0]


@pytest.mark.parametrize("name", COPIED)
def test_who_needs_it_by_rows_gets_it_so(name: str) -> None:
    light, weight = model(COPIED[name]), by_columns()
    given = light.SerializeToString()
    assert transpose_column_weights(light, {"w": weight})["w"] is weight
    assert light.SerializeToString() == given


def test_a_weight_by_rows_and_one_of_another_type_stay() -> None:
    light = model(READ["MatMul"])
    given = light.SerializeToString()
    for weight in (np.ascontiguousarray(by_columns()), by_columns().astype(np.float64)):
        assert transpose_column_weights(light, {"w": weight})["w"] is weight
    assert light.SerializeToString() == given


def test_a_body_that_reads_it_needs_it_by_rows() -> None:
    body = "then_branch = t () => (a) { a = MatMul(x, w) }, else_branch = e () => (b) { b = MatMul(x, w) }"
    light = parser.parse_model(
        f"{HEAD} net (float[N,3] x, bool c) => (float[N,2] y) <{WEIGHT}> {{ y = If(c) <{body}> }}"
    )
    assert transpose_column_weights(light, {"w": (weight := by_columns())})["w"] is weight


@pytest.mark.parametrize("floating", [None, {"y": onnx.TensorProto.FLOAT}])
def test_the_comparison_of_whole_models_runs_what_is_written(floating: dict[str, int] | None) -> None:
    """And perturbs the product, whatever op it is run by."""
    w = np.random.default_rng(0).standard_normal((300, 256)).astype(np.float32).T
    light, weights = (
        parser.parse_model(f"{HEAD} net (float[N,256] x) => (float[N,300] y) {{ y = MatMul(x, w) }}"),
        Weights(),
    )
    share_array(light.graph.initializer.add(name="w", data_type=1, dims=w.shape), w, weights)
    feeds = {"x": np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)}
    turned, plain = (
        PerturbableModel(light, floating=floating),
        PerturbableModel(fill_shared_weights(copy_model(light)), floating=floating),
    )
    assert np.shares_memory(turned.values["w"].numpy(), w)
    for rng in (None, 7):
        (one,), (other,) = (
            model.run_perturbed(feeds, None if rng is None else np.random.default_rng(rng), 1e-6)
            for model in (turned, plain)
        )
        np.testing.assert_array_equal(one, other)
