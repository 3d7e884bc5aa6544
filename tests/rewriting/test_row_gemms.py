"""Linear layers over rows: MatMul and the Add of a bias are one Gemm where onnxruntime is asked for, the same numbers
to rounding."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from normdeploy.rewriting import row_gemms
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

UNIT = 2.0**-24
LAYER = "p = MatMul(x, w) y = Add(p, b)"


def graph(body: str, x: str = "float[N,7,24]", outputs: str = "float[] y", **others: np.ndarray) -> onnx.ModelProto:
    """``body`` with a weight w of 24 to 40 channels and a bias b."""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({x} x) => ({outputs}) {{ {body} }}')
    kind = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    held = {"w": rng.standard_normal((24, 40)), "b": rng.standard_normal(40), **others}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v).astype(kind), k) for k, v in held.items())
    for t in proto.graph.output:
        t.type.tensor_type.ClearField("shape")
    return proto


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


@pytest.mark.parametrize(
    ("x", "sizes", "around"),
    [
        ("float[N,7,24]", (3, 7, 24), []),
        ("float[3,7,24]", (3, 7, 24), []),
        ("float[N,S,24]", (3, 5, 24), ["Concat", "Shape"]),
        ("float[N,S,2,24]", (3, 5, 2, 24), ["Concat", "Shape"]),
        ("float[N,S,24]", (0, 5, 24), ["Concat", "Shape"]),
    ],
)
@pytest.mark.parametrize("body", [LAYER, "p = MatMul(x, w) y = Add(b, p)"])
def test_a_layer_is_a_gemm_of_rows(body: str, x: str, sizes: tuple[int, ...], around: list[str]) -> None:
    before = graph(body, x)
    after, _ = optimize_norms(before, runtime="onnxruntime")
    assert sorted(ops(after)) == sorted(["Reshape", *around, "Gemm", "Reshape"])
    fed = np.random.default_rng(1).standard_normal(sizes).astype(np.float32)
    (y,) = run_onnxruntime(after, {"x": fed})
    w, b = (numpy_helper.to_array(t).astype(np.float64) for t in before.graph.initializer)
    right = fed.astype(np.float64) @ w + b
    assert y.shape == right.shape
    # 25 terms are added: each sum is off by a unit of the sum of their magnitudes for each at most (Higham, section
    # 3.1)
    assert (np.abs(y - right) <= 25 * UNIT * (np.abs(fed.astype(np.float64)) @ np.abs(w) + np.abs(b))).all()
    again, _ = optimize_norms(after, runtime="onnxruntime")
    assert ops(again) == ops(after)


@pytest.mark.parametrize("runtime", ["any", "onnxruntime-accurate", "tensorrt", "tensorrt-rtx"])
def test_for_other_runtimes_a_layer_stays_as_it_is(runtime: str) -> None:
    assert ops(optimize_norms(graph(LAYER), runtime=runtime)[0]) == ["MatMul", "Add"]


@pytest.mark.parametrize(
    ("body", "others"),
    [
        (LAYER, {"x": "float[N,24]"}),  # rows already: onnxruntime joins them itself
        (LAYER, {"x": "double[N,7,24]"}),
        (LAYER, {"b": np.ones(1)}),
        (LAYER, {"b": np.ones((7, 40))}),
        (LAYER, {"outputs": "float[] y, float[] p"}),
        ("p = MatMul(x, w) q = Add(p, b) y = Add(p, q)", {}),
        ("p = MatMul(x, w) y = Sub(p, b)", {}),
        ("s = ReduceSum<keepdims = 0>(x) v = Add(w, s) p = MatMul(x, v) y = Add(p, b)", {}),  # no constant
        ("s = ReduceSum<keepdims = 0>(x) c = Add(b, s) p = MatMul(x, w) y = Add(p, c)", {}),
    ],
)
def test_what_is_no_such_layer_stays(body: str, others: dict[str, str | np.ndarray]) -> None:
    before = graph(body, **others)  # type: ignore[arg-type]
    assert "Gemm" not in ops(optimize_norms(before, runtime="onnxruntime")[0])


def test_layers_that_read_one_tensor_read_one_matrix_of_rows() -> None:
    body = "p = MatMul(x, w) q = Add(p, b) r = MatMul(x, v) s = Add(r, b) y = Mul(q, s)"
    after, _ = optimize_norms(graph(body, "float[N,S,24]", v=np.ones((24, 40)) / 7), runtime="onnxruntime")
    assert sorted(ops(after)) == sorted(["Shape", "Concat", "Reshape", "Gemm", "Reshape", "Gemm", "Reshape", "Mul"])


def test_a_gemm_of_another_bias_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate reads the nodes: what the step believes of the layer is no proof."""
    real = row_gemms.match_layer

    def mistaken(g: row_gemms.Graph, node: row_gemms.gs.Node) -> row_gemms.BiasedMatMul | None:
        layer = real(g, node)
        other = None if layer is None else g.add_constant("other", np.arange(40.0), np.float32)
        return None if layer is None or other is None else dataclasses.replace(layer, bias=other)

    monkeypatch.setattr(row_gemms, "match_layer", mistaken)
    assert ops(optimize_norms(graph(LAYER), runtime="onnxruntime")[0]) == ["MatMul", "Add"]


def test_optimize_linear_layer_in_a_branch_becomes_gemm() -> None:
    """A body holds what its steps say: one that no norm is found in is written back too."""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (bool c, float[N,7,24] x) => (float[N,7,40] y) {
            y = If (c) <
                then_branch = t () => (float[N,7,40] a) { p = MatMul(x, w) a = Add(p, b) },
                else_branch = e () => (float[N,7,40] d) { q = MatMul(x, w) d = Sub(q, b) }
            >
        }"""
    )
    proto.graph.initializer.extend(
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (24, 40)), ("b", (40,)))
    )
    made, _ = optimize_norms(proto, runtime="onnxruntime")
    branches = {a.name: [n.op_type for n in a.g.node] for a in made.graph.node[-1].attribute}
    assert "Gemm" in branches["then_branch"]
    assert "Gemm" not in branches["else_branch"]
    x = rng.standard_normal((3, 7, 24)).astype(np.float32)
    for c in (True, False):
        feeds = {"c": np.array(c), "x": x}
        (before,) = run_onnxruntime(proto, feeds)
        (after,) = run_onnxruntime(made, feeds)
        # Both sum 24 products and a bias, so each is off by at most 25 roundings of the sum of magnitudes.
        w, b = (numpy_helper.to_array(t) for t in proto.graph.initializer)
        magnitude = np.abs(x) @ np.abs(w) + np.abs(b)
        assert (np.abs(before - after) <= 2 * 25 * UNIT * magnitude).all()
