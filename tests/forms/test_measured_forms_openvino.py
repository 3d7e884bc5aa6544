"""Forms for OpenVINO: those that it loads, and those that were measured to be fast in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.forms.measured_forms import best_form, load_table
from normdeploy.runtimes.openvino_runner import OpenVinoRunner, explain_missing_openvino
from tests.support import parsed

OPEN_ROW = """g (float[N, M] x) => (float[N, M] y) <int64[1] axes = {-1}, float e = {1e-5}> {
    m = ReduceMean<keepdims = 1>(x, axes)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<keepdims = 1>(s, axes)
    w = Add(v, e)  r = Sqrt(w)  y = Div(d, r)
}"""
MODULATED = """g (float[B, 4, 8] x, float[B, 1, 8] gamma) => (float[B, 4, 8] y)
    <int64[1] axes = {-1}, float e = {1e-5}> {
    m = ReduceMean<keepdims = 1>(x, axes)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<keepdims = 1>(s, axes)
    w = Add(v, e)  r = Sqrt(w)  n = Div(d, r)  y = Mul(n, gamma)
}"""
GROUPS = """g (float[2, 8, 4, 4] x) => (float[2, 8, 4, 4] y)
    <int64[3] rows = {0, 2, -1}, int64[4] whole = {2, 8, 4, 4}, int64[1] axes = {-1}, float e = {1e-5}> {
    g = Reshape(x, rows)  m = ReduceMean<keepdims = 1>(g, axes)  d = Sub(g, m)  s = Mul(d, d)
    v = ReduceMean<keepdims = 1>(s, axes)  w = Add(v, e)  r = Sqrt(w)  n = Div(d, r)  t = Reshape(n, whole)
    u = Mul(t, gamma)  y = Add(u, beta)
}"""


def scales(proto: onnx.ModelProto) -> list[tuple[int, ...]]:
    sizes = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    return [sizes.get(n.input[1], ()) for n in proto.graph.node if n.op_type == "LayerNormalization"]


@pytest.mark.parametrize(
    ("text", "wanted", "other"),
    [(OPEN_ROW, [(1,)], [(1, 1)]), (MODULATED, [(8,)], [()])],
    ids=["open row", "modulated"],
)
def test_a_scale_has_as_many_axes_as_are_normalized(
    text: str, wanted: list[tuple[int, ...]], other: list[tuple[int, ...]], tmp_path: Path
) -> None:
    assert scales(normdeploy.optimize(parsed(text)).proto) == other
    made = normdeploy.optimize(parsed(text), runtime="openvino").proto
    assert scales(made) == wanted
    messages = []
    for name, proto in (("any", normdeploy.optimize(parsed(text)).proto), ("openvino", made)):
        onnx.save(proto, tmp_path / f"{name}.onnx")
        (file,) = normdeploy.check([tmp_path / f"{name}.onnx"], runtime="openvino").files
        messages.append([p.message for p in file.findings if p.rule == "runtime-fault"])
    assert [len(m) for m in messages] == [text is OPEN_ROW, 0]


@pytest.mark.skipif(explain_missing_openvino() is not None, reason="OpenVINO is not installed")
@pytest.mark.parametrize("text", [OPEN_ROW, MODULATED, GROUPS], ids=["open row", "modulated", "groups"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_files_for_openvino_load_and_keep_the_digits_of_the_original(text: str, offset: float) -> None:
    rng = np.random.default_rng(0)
    constants = {}
    if text is GROUPS:
        constants = {name: rng.standard_normal((8, 1, 1)).astype(np.float32) for name in ("gamma", "beta")}
    original = parsed(text, **constants)
    made = normdeploy.optimize(original, runtime="openvino").proto
    sizes = {"B": 2, "N": 4, "M": 16}
    feeds = {
        v.name: (
            offset * (v.name == "x")
            + rng.standard_normal([d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim])
        ).astype(np.float32)
        for v in original.graph.input
    }
    x = feeds["x"].astype(np.float64)
    rows = x.reshape(2, 2, -1) if text is GROUPS else x
    normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    exact = normal.reshape(x.shape) * feeds.get("gamma", constants.get("gamma", 1)) + constants.get("beta", 0)
    errors = []
    for proto in (original, made):
        with OpenVinoRunner(proto.SerializeToString()) as runner:
            errors.append(float(np.abs(runner.infer(feeds)["y"] - exact).max()))
    assert errors[1] <= 2 * errors[0] + 2.0**-20 * np.abs(exact).max()


def test_the_table_has_sound_forms_for_openvino() -> None:
    rows = {(r.kind, r.form): r for r in load_table() if r.runtime == "openvino"}
    for kind in ("LayerNorm", "RMSNorm", "ChannelLayerNorm", "GroupNorm", "InstanceNorm"):
        chosen = best_form(kind, "openvino", "float32", ("standard", "decomposed", "layer"))
        assert rows[kind, chosen].excess <= 1
    # Transposes around a LayerNormalization cost more than the nodes.
    assert best_form("ChannelLayerNorm", "openvino", "float32", ("standard", "decomposed")) == "decomposed"
    # Other types are computed in float32, and their forms must run in onnxruntime.
    for form in ("standard", "instance"):
        assert best_form("GroupNorm", "openvino", "float64", (form, "layer")) == best_form(
            "GroupNorm", "onnxruntime", "float64", (form, "layer")
        )
