"""Models that refer to their weights: whatever is made of them is made of those that hold them, bit for bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from normdeploy.errors import GraphError
from normdeploy.graphs.simplification import simplify
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.storage import shared_weights
from normdeploy.storage.onnx_files import fill_shared_weights, load_onnx, save_onnx
from normdeploy.storage.proto_traversal import copy_model
from normdeploy.storage.weight_serialization import share_large_weights
from tests.graphs.test_subgraphs import CONSTANTS, FUNCTIONS, HEAD, LAYER_NORM

NORM = LAYER_NORM.format(out="a")
WEIGHT = (
    f"float[2,8,1] w = {{{', '.join('1234567812345678')}}}, float[2] s2 = {{1,2}}, float[2] v2 = {{2,1}}, int64[1] last"
    " = {2}"
)
TEXTS = {
    "plain": f"{HEAD} net (float[N,8] h) => (float[N,8] a) <{CONSTANTS}> {{ {NORM} }}",
    "opset 11": f"{HEAD.replace('17', '11')} net (float[N,8] h) => (float[N,8] a) <{CONSTANTS}> {{ {NORM} }}",
    "in a body": (
        f"""{HEAD} net (float[N,8] h, bool c) => (float[N,8] y) <{CONSTANTS}> {{
        y = If(c) <then_branch = t () => (float[N,8] a) {{ {NORM} }}, else_branch = e () => (b) {{
        b = Mul(h, g) }}> }}"""
    ),
    "folded in a body": (
        f"""{HEAD} net (float[N,8] x, bool c) => (float[N,2,1] y) <{WEIGHT}> {{
        h = Unsqueeze(x, last)
        o = Conv(h, w)
        y = If(c) <then_branch = t () => (float[N,2,1] b) {{ q = Conv(h, w)
        b = BatchNormalization(q, s2, v2, s2, v2) }},
                   else_branch = e () => (float[N,2,1] b2) {{ b2 = Identity(o) }}> }}"""
    ),
    "in a function": (
        f"""{FUNCTIONS} net (float[N,8] x) => (float[N,8] y) <{CONSTANTS}> {{ y = my.norm(x, g, s) }}
        <opset_import: ["" : 17], domain: "my"> norm (h, g, s) => (a) {{ eps = Constant<value_float:
        float = 1e-5>() {NORM} }}"""
    ),
    "constants of constants": (
        f"""{HEAD} net (float[N,8] x) => (float[N,2,1] y) <{WEIGHT}> {{
        h = Unsqueeze(x, last) e = Exp(w) k = Mul(w, e) q = Conv(h, k) y = BatchNormalization(q, s2, v2, s2, v2) }}"""
    ),
}


def parsed(text: str) -> onnx.ModelProto:
    proto = parser.parse_model(text)
    for tensor in proto.graph.initializer:  # as files hold them
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return proto


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_made_of_a_model_does_not_depend_on_where_its_weights_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "SMALLEST", 1)
    whole = parsed(TEXTS[name])
    light, weights = share_large_weights(whole)
    assert weights
    given = light.SerializeToString()
    (expected, told), (found, said) = optimize_norms(whole), optimize_norms(light)
    assert said.findings == told.findings
    assert any(f.status in ("fused", "folded") for f in said.findings)
    assert fill_shared_weights(copy_model(found)) == expected
    assert fill_shared_weights(simplify(found).proto) == simplify(expected).proto
    assert light.SerializeToString() == given


@pytest.mark.parametrize("external", [False, True])
def test_a_model_is_written_with_the_weights_that_it_refers_to(
    external: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("held")
    w = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
    whole = parsed(TEXTS["plain"])
    whole.graph.initializer.append(numpy_helper.from_array(w, "w"))
    light, weights = share_large_weights(whole)
    assert [a.shape for a in weights.values()] == [(128, 64)]
    save_onnx(light, folder / "light.onnx", external=external)
    save_onnx(whole, folder / "whole.onnx", external=external)
    assert load_onnx(folder / "light.onnx") == load_onnx(folder / "whole.onnx") == whole


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("shape", [(128, 64), (8192, 1), (3, 70000)])
def test_a_weight_by_columns_is_not_copied_and_written_by_rows(
    shape: tuple[int, int], external: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("turned")
    w = np.random.default_rng(0).standard_normal(shape[::-1]).astype(np.float32).T
    light, weights = parsed(TEXTS["plain"]), shared_weights.Weights()
    tensor = light.graph.initializer.add(name="w", data_type=onnx.TensorProto.FLOAT, dims=shape)
    shared_weights.share_array(tensor, w, weights)
    assert np.shares_memory(shared_weights.tensor_array(tensor), w)
    save_onnx(light, folder / "light.onnx", external=external)
    whole = fill_shared_weights(light)
    assert load_onnx(folder / "light.onnx") == whole
    assert (numpy_helper.to_array(whole.graph.initializer[-1]) == w).all()


def test_no_file_reaches_the_weights_of_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    proto = parsed(TEXTS["plain"])
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((128, 64), np.float32), "w"))
    light, weights = share_large_weights(proto)
    assert weights
    (folder / "net.onnx").write_bytes(
        light.SerializeToString()
    )  # the references themselves, as a thief would have them
    with pytest.raises(GraphError, match="'w'"):
        load_onnx(folder / "net.onnx")


def test_weights_go_with_whoever_keeps_them() -> None:
    tensor, weights = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[64]), shared_weights.Weights()
    shared_weights.share_array(tensor, np.ones(64, np.float32), weights)
    assert (shared_weights.tensor_array(tensor) == 1).all()
    weights.clear()
    with pytest.raises(GraphError, match="'w' is no longer in memory"):
        shared_weights.tensor_array(tensor)
