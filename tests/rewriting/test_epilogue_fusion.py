"""Norms joined with their neighbours (``--fuse portable``): what is joined, what only looks like it, and that the
numbers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from normdeploy_plugins.ops import BY_NAME
from onnx import helper, numpy_helper, parser

import normdeploy
from normdeploy.evaluate import evaluator
from normdeploy.graphs import own_op_functions
from normdeploy.graphs.function_ops import attach_functions
from normdeploy.norms import function_bodies
from normdeploy.norms.norm_table import OURS, NormOp
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.runtimes.trt_runner import describe_missing_runtime
from normdeploy.verbs.build.build_function import build

D = 12
RNG = np.random.default_rng(5)
HELD = {
    "g": RNG.uniform(0.5, 2, D),
    "b": RNG.standard_normal(D),
    "one": np.ones(1),
    "two": np.full(1, 2.0),
    "wide": RNG.standard_normal((4, D)),
}
HELD |= {
    "eights": np.ones(8),
    "zeros": np.zeros(8),
    "places": np.ones((5, 2)),
    "uneven": np.arange(1.0, 11).reshape(5, 2),
}
HELD |= {"ones": np.ones(D), "scale": RNG.uniform(0.5, 2, 8), "bias": RNG.standard_normal(8)}
LN = "LayerNormalization<axis = -1, epsilon = 1e-3>"
RMS = "RMSNormalization<axis = -1, epsilon = 1e-3>"
GN = "GroupNormalization<num_groups = 4, epsilon = 1e-3>"
ROWS = {"x": "N,4,12", "r": "N,4,12"}
DIT = {"x": "N,4,12", "s": "N,1,12", "t": "N,1,12"}
IMAGE = {"x": "N,8,H,W"}
EMBEDDED = IMAGE | {"s": "N,8,1,1", "t": "N,8,1,1"}
SPATIAL = IMAGE | {"s": "N,8,H,W", "t": "N,8,H,W"}

# name -> (the op, inputs, outputs, body); the opset is 23, so that RMS norms are standard nodes
# the others, which quantize, are tried in test_quantize_fusion.py
WITH_FLOATS = {op for op, row in OURS.items() if row.plugin and not row.quantizes}

JOINED: dict[str, tuple[str, dict[str, str], str, str]] = {
    "add, LayerNorm": ("AddLayerNorm", ROWS, "y", f"a = Add(x, r) y = {LN}(a, g, b)"),
    "the sum is read too": ("AddLayerNorm", ROWS, "z", f"a = Add(x, r) y = {LN}(a, g, b) z = Add(a, y)"),
    "the sum is read before the norm": (
        "AddLayerNorm",
        ROWS,
        "z",
        f"a = Add(x, r) k = Relu(a) y = {LN}(a, g, b) z = Mul(k, y)",
    ),
    "the sum is an output": ("AddLayerNorm", ROWS, "y, a", f"a = Add(x, r) y = {LN}(a, g, b)"),
    "the sum is a Sum": ("AddLayerNorm", ROWS, "y", f"a = Sum(x, r) y = {LN}(a, g, b)"),
    "no beta": ("AddLayerNorm", ROWS, "y", f"a = Add(x, r) y = {LN}(a, g)"),
    "no gamma": ("AddLayerNorm", ROWS, "y", f"a = Add(x, r) y = {LN}(a, ones)"),
    "the axis is 2": ("AddLayerNorm", ROWS, "y", "a = Add(x, r) y = LayerNormalization<axis = 2>(a, g, b)"),
    "two dims": ("AddLayerNorm", {"x": "N,12", "r": "N,12"}, "y", f"a = Add(x, r) y = {LN}(a, g, b)"),
    "a dynamic row": ("AddLayerNorm", {"x": "N,L", "r": "N,L"}, "y", f"a = Add(x, r) y = {LN}(a, two)"),
    "add, RMSNorm": ("AddRMSNorm", ROWS, "y", "a = Add(x, r) y = RMSNormalization<epsilon = 1e-3>(a, g)"),
    "modulated": ("ModulatedLayerNorm", DIT, "y", f"k = Add(s, one) y = {LN}(x, k, t)"),
    "one plus s": ("ModulatedLayerNorm", DIT, "y", f"k = Add(one, s) y = {LN}(x, k, t)"),
    "modulated by hand": (
        "ModulatedLayerNorm",
        DIT,
        "y",
        f"k = Add(s, one) n = {LN}(x, one) m = Mul(n, k) y = Add(m, t)",
    ),
    "modulated by (N, D)": (
        "ModulatedLayerNorm",
        DIT | {"s": "N,12"},
        "y",
        f"k = Add(s, one) at = Constant<value_ints = [1]>() u = Unsqueeze(k, at) y = {LN}(x, u, t)",
    ),
    "SiLU": ("GroupNormSiLU", IMAGE, "y", f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(n, e)"),
    "the gate first": ("GroupNormSiLU", IMAGE, "y", f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(e, n)"),
    "one dim of places": (
        "GroupNormSiLU",
        {"x": "2,8,5"},
        "y",
        f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(n, e)",
    ),
    "a gate": ("GatedRMSNorm", ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)"),
    "a gate in front": ("GatedRMSNorm", ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(e, r) y = Mul(k, n)"),
    "a gate, then its sigmoid": (
        "GatedRMSNorm",
        ROWS,
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(n, r) y = Mul(k, e)",
    ),
    "a sigmoid, then its gate": (
        "GatedRMSNorm",
        ROWS,
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(e, n) y = Mul(r, k)",
    ),
    "a gate without gamma": (
        "GatedRMSNorm",
        {"x": "N,L", "r": "N,L"},
        "y",
        f"n = {RMS}(x, two) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a gate by hand": (
        "GatedRMSNorm",
        ROWS,
        "y",
        "last = Constant<value_ints = [-1]>() q = Mul(x, x) v = ReduceMean<keepdims = 1>(q, last) f = Add(v, one) w ="
        " Sqrt(f) d = Div(x, w) n = Mul(d, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a gate read elsewhere": (
        "GatedRMSNorm",
        ROWS,
        "y, z",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k) z = Relu(r)",
    ),
    "a sigmoid gate": ("SigmoidGatedRMSNorm", ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(r) y = Mul(n, e)"),
    "a sigmoid gate, then another product": (
        "SigmoidGatedRMSNorm",
        ROWS | {"s": "N,4,12"},
        "z",
        f"n = {RMS}(x, g) e = Sigmoid(r) y = Mul(e, n) z = Mul(y, s)",
    ),
    "adaptive": ("AdaGroupNorm", EMBEDDED, "y", f"n = {GN}(x, eights, zeros) m = Mul(n, s) y = Add(m, t)"),
    "adaptive, one plus s": (
        "AdaGroupNorm",
        EMBEDDED,
        "y",
        f"n = {GN}(x, eights, zeros) k = Add(s, one) m = Mul(k, n) y = Add(t, m)",
    ),
    "adaptive, gamma and beta": (
        "AdaGroupNorm",
        EMBEDDED,
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "adaptive, SiLU": (
        "AdaGroupNormSiLU",
        EMBEDDED,
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) a = Add(m, t) e = Sigmoid(a) y = Mul(a, e)",
    ),
    "adaptive, the sum is read twice": (
        "AdaGroupNorm",
        EMBEDDED,
        "y, z",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t) z = Relu(y)",
    ),
    "adaptive, one dim of places": (
        "AdaGroupNorm",
        {"x": "2,8,5", "s": "2,8,1", "t": "2,8,1"},
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "adaptive instances": (
        "AdaGroupNorm",
        EMBEDDED,
        "y",
        "n = InstanceNormalization<epsilon = 1e-3>(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "adaptive, instances as a layer norm": (
        "AdaGroupNorm",
        {"x": "N,8,5,2", "s": "N,8,1,1", "t": "N,8,1,1"},
        "y",
        "n = LayerNormalization<axis = 2, epsilon = 1e-3>(x, places) m = Mul(n, s) y = Add(m, t)",
    ),
    "adaptive, one group": (
        "AdaGroupNorm",
        {"x": "N,8,5,2", "s": "N,8,1,1", "t": "N,8,1,1"},
        "y",
        "n = LayerNormalization<axis = 1, epsilon = 1e-3>(x, one) m = Mul(n, s) y = Add(m, t)",
    ),
    "SiLU without weights": (
        "GroupNormSiLU",
        IMAGE,
        "y",
        "c = Shape<start = 1, end = 2>(x) k = ConstantOfShape<value = float[1] {1.0}>(c) z = ConstantOfShape(c)"
        f" n = {GN}(x, k, z) e = Sigmoid(n) y = Mul(n, e)",
    ),
    "adaptive without weights": (
        "AdaGroupNorm",
        EMBEDDED,
        "y",
        "c = Shape<start = 1, end = 2>(x) k = ConstantOfShape<value = float[1] {1.0}>(c) z = ConstantOfShape(c)"
        f" n = {GN}(x, k, z) m = Mul(n, s) y = Add(m, t)",
    ),
    "spatial": (
        "AdaGroupNorm",
        SPATIAL,
        "y",
        "n = InstanceNormalization<epsilon = 1e-3>(x, eights, zeros) k = Add(s, one) m = Mul(n, k) y = Add(m, t)",
    ),
    "spatial, groups, SiLU": (
        "AdaGroupNormSiLU",
        SPATIAL,
        "y",
        f"n = {GN}(x, eights, zeros) m = Mul(n, s) a = Add(m, t) e = Sigmoid(a) y = Mul(a, e)",
    ),
}
LEFT: dict[str, tuple[dict[str, str], str, str]] = {
    "a bias is no residual": (ROWS, "y", f"a = Add(x, g) y = {LN}(a, g, b)"),
    "it broadcasts": (ROWS | {"r": "N,1,12"}, "y", f"a = Add(x, r) y = {LN}(a, g, b)"),
    "shapes that may differ": ({"x": "N,4,12", "r": "M,4,12"}, "y", f"a = Add(x, r) y = {LN}(a, g, b)"),
    "two axes": (ROWS, "y", "a = Add(x, r) y = LayerNormalization<axis = 1>(a, wide)"),
    "gamma by row": (ROWS, "y", f"a = Add(x, r) y = {LN}(a, wide)"),
    "the mean is read": (ROWS, "y, mean", f"a = Add(x, r) y, mean = {LN}(a, g, b)"),
    "a constant of its shape": ({"x": "4,12"}, "y", f"a = Add(x, wide) y = {LN}(a, g, b)"),
    "added to itself and read": ({"x": "N,4,12"}, "y, a", f"a = Add(x, x) y = {LN}(a, g, b)"),
    "added to itself": ({"x": "N,4,12"}, "y", f"a = Add(x, x) y = {LN}(a, g, b)"),
    "a difference": (ROWS, "y", f"a = Sub(x, r) y = {LN}(a, g, b)"),
    "two plus s": (DIT, "y", f"k = Add(s, two) y = {LN}(x, k, t)"),
    "s without a one": (DIT, "y", f"y = {LN}(x, s, t)"),
    "the norm is read too": (IMAGE, "y, n", f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(n, e)"),
    "the gate is read too": (IMAGE, "y, e", f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(n, e)"),
    "the gate of another": (IMAGE, "y", f"n = {GN}(x, scale, bias) e = Sigmoid(x) y = Mul(n, e)"),
    "squared": (IMAGE, "y", f"n = {GN}(x, scale, bias) e = Sigmoid(n) y = Mul(e, e)"),
    "a gate through a tanh": (ROWS, "y", f"n = {RMS}(x, g) e = Tanh(r) k = Mul(r, e) y = Mul(n, k)"),
    "a sigmoid of another": (
        ROWS | {"s": "N,4,12"},
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(s) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a sigmoid of the norm's input": (ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(x) y = Mul(n, e)"),
    "the sigmoid of a gate is read too": (ROWS, "y, e", f"n = {RMS}(x, g) e = Sigmoid(r) y = Mul(n, e)"),
    "adapted by a shift alone": (EMBEDDED, "y", f"n = {GN}(x, scale, bias) y = Add(n, t)"),
    "adapted, the norm is read too": (EMBEDDED, "y, n", f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)"),
    "adapted, the product is read too": (EMBEDDED, "y, m", f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)"),
    "adapted from another batch": (
        IMAGE | {"s": "M,8,1,1", "t": "M,8,1,1"},
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "adapted for all samples at once": (
        IMAGE | {"s": "1,8,1,1", "t": "1,8,1,1"},
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "adapted by one number": (
        IMAGE | {"s": "N,1,1,1", "t": "N,1,1,1"},
        "y",
        f"n = {GN}(x, scale, bias) m = Mul(n, s) y = Add(m, t)",
    ),
    "a spatial shift alone": (
        EMBEDDED | {"t": "N,8,H,W"},
        "y",
        f"n = {GN}(x, eights, zeros) m = Mul(n, s) y = Add(m, t)",
    ),
    "spatial with gamma": (SPATIAL, "y", f"n = {GN}(x, scale, zeros) m = Mul(n, s) y = Add(m, t)"),
    "adapted rows": (
        {"x": "N,8,5,2", "s": "N,8,1,1", "t": "N,8,1,1"},
        "y",
        "n = LayerNormalization<axis = 3, epsilon = 1e-3>(x, one) m = Mul(n, s) y = Add(m, t)",
    ),
    "adapted tokens": (
        {"x": "N,5,8", "s": "N,5,8", "t": "N,5,8"},
        "y",
        "n = LayerNormalization<axis = -1, epsilon = 1e-3>(x, eights) m = Mul(n, s) y = Add(m, t)",
    ),
    "adapted, a scale by place": (
        {"x": "N,8,5,2", "s": "N,8,1,1", "t": "N,8,1,1"},
        "y",
        "n = LayerNormalization<axis = 2, epsilon = 1e-3>(x, uneven) m = Mul(n, s) y = Add(m, t)",
    ),
    "adapted by constants": (IMAGE, "y", f"n = {GN}(x, scale, bias) m = Mul(n, two) y = Add(m, two)"),
    "a gate squared": (ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(e, e) y = Mul(n, k)"),
    "a gate that broadcasts": (
        ROWS | {"r": "N,1,12"},
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a gate that broadcasts the norm": (
        {"x": "1,4,12", "r": "N,4,12"},
        "z",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k) top = Constant<value_ints = [0]>()"
        " z = ReduceMean<keepdims = 1>(y, top)",
    ),
    "a gate of a shape that may differ": (
        {"x": "N,4,12", "r": "M,4,12"},
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a constant gate": (
        {"x": "4,12"},
        "y",
        f"n = {RMS}(x, g) e = Sigmoid(wide) k = Mul(wide, e) y = Mul(n, k)",
    ),
    "SiLU of the norm's input": (ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(x) k = Mul(x, e) y = Mul(n, k)"),
    "SiLU of the norm": (ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(n) y = Mul(n, e)"),
    "SiLU of the norm, and the norm": (ROWS, "y", f"n = {RMS}(x, g) e = Sigmoid(n) k = Mul(n, e) y = Mul(n, k)"),
    "the gated norm is read too": (
        ROWS,
        "y, n",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "SiLU of a gate is read too": (
        ROWS,
        "y, k",
        f"n = {RMS}(x, g) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)",
    ),
    "a gate of a layer norm": (ROWS, "y", f"n = {LN}(x, g, b) e = Sigmoid(r) k = Mul(r, e) y = Mul(n, k)"),
    "the gate before the norm": (ROWS, "y", f"e = Sigmoid(r) k = Mul(r, e) a = Mul(x, k) y = {RMS}(a, g)"),
    "sigmoid alone": (IMAGE, "y", f"n = {GN}(x, scale, bias) y = Sigmoid(n)"),
}


def net(inputs: dict[str, str], outputs: str, body: str, dtype: str = "float", opset: int = 23) -> onnx.ModelProto:
    args = ", ".join(f"{dtype}[{dims}] {name}" for name, dims in inputs.items())
    results = ", ".join(f"{dtype}[{next(iter(inputs.values()))}] {name}" for name in outputs.split(", "))
    if "mean" in outputs:
        results = results.replace("12] mean", "1] mean")
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> net ({args}) => ({results}) {{ {body} }}'
    )
    used = {name for node in proto.graph.node for name in node.input}
    kind = helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    proto.graph.initializer.extend(numpy_helper.from_array(v.astype(kind), k) for k, v in HELD.items() if k in used)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def feeds(proto: onnx.ModelProto, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in kind.shape.dim]
        made[value.name] = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return made


def run(
    proto: onnx.ModelProto, given: dict[str, np.ndarray], level: Any = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, level
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, given)


def agree(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Some ten roundings of float32 in numbers up to about 10, at two sizes of what is dynamic."""
    for sizes in ({"N": 3, "M": 3, "L": 5, "H": 2, "W": 7}, {"N": 1, "M": 1, "L": 9, "H": 6, "W": 1}):
        given = feeds(before, sizes)
        for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
            for want, got in zip(run(before, given), run(after, given, level), strict=True):
                np.testing.assert_allclose(got, want, rtol=0, atol=10 * 2.0**-24 * 10)


def own(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node if n.domain == own_op_functions.DOMAIN]


@pytest.mark.parametrize("name", JOINED)
def test_joined(name: str) -> None:
    op, *given = JOINED[name]
    before = net(*given)
    out, summary = optimize_norms(before, fuse="portable")
    onnx.checker.check_model(out, full_check=True)
    assert own(out) == [op]
    assert not [
        n
        for n in out.graph.node
        if n.op_type in ("LayerNormalization", "RMSNormalization", "GroupNormalization", "Sigmoid")
    ]
    (finding,) = summary.findings
    assert finding.status == "fused"
    assert finding.became.startswith(f"normdeploy.{op}(epsilon=")
    assert finding.certificate
    assert finding.certificate.error < 1e-12
    assert finding.proved == ("identity", "onnxruntime run")
    agree(before, out)
    again, kept = optimize_norms(out, fuse="portable")
    assert again.SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    assert [f.status for f in kept.findings] == ["kept"]
    back, _ = optimize_norms(out)
    assert own(back) == []
    assert not back.functions
    agree(before, back)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    before = net(*LEFT[name])
    out, summary = optimize_norms(before, fuse="portable")
    assert not own_op_functions.JOINED & {*own(out)}
    assert "undone" not in [f.status for f in summary.findings]
    agree(before, out)


@pytest.mark.parametrize("name", JOINED)
def test_standard_joins_nothing(name: str) -> None:
    out, _ = optimize_norms(net(*JOINED[name][1:]))
    assert own(out) == []


def test_swish() -> None:
    before = net(IMAGE, "y", f"n = {GN}(x, scale, bias) y = Swish(n)", opset=24)
    assert own(optimize_norms(before, fuse="portable")[0]) == ["GroupNormSiLU"]
    other = net(IMAGE, "y", f"n = {GN}(x, scale, bias) y = Swish<alpha = 2.0>(n)", opset=24)
    assert own(optimize_norms(other, fuse="portable")[0]) == ["GroupNorm"]


def test_a_norm_by_hand_is_one_finding_with_the_errors_of_both_steps() -> None:
    body = (
        "a = Add(x, r) u = ReduceMean<keepdims = 1>(a, last) d = Sub(a, u) q = Mul(d, d) v = ReduceMean<keepdims ="
        " 1>(q, last) e = Add(v, one) w = Sqrt(e) n = Div(d, w) m = Mul(n, g) y = Add(m, b)"
    )
    proto = net(ROWS, "y", f"last = Constant<value_ints = [-1]>() {body}")
    (alone,) = optimize_norms(proto)[1].findings
    out, summary = optimize_norms(proto, fuse="portable")
    (finding,) = summary.findings
    assert own(out) == ["AddLayerNorm"]
    assert finding.spelling == f"Add {alone.spelling}"
    assert alone.certificate is not None
    assert finding.certificate is not None
    assert finding.certificate.error >= alone.certificate.error
    assert finding.certificate.cases > alone.certificate.cases
    assert finding.tensor == "y"


def test_a_residual_stream_of_blocks() -> None:
    """Every norm but the first is joined, and each sum is made once."""
    body, x = "", "x"
    for i in range(4):
        body += f" n{i} = {LN}({x}, g, b) k{i} = Relu(n{i}) a{i} = Add({x}, k{i})"
        x = f"a{i}"
    before = net({"x": "N,4,12"}, "y", f"{body} y = {LN}({x}, g, b)")
    out, summary = optimize_norms(before, fuse="portable")
    assert own(out) == ["AddLayerNorm"] * 4
    assert [f.status for f in summary.findings] == ["kept"] + ["fused"] * 4
    assert not [n for n in out.graph.node if n.op_type == "Add"]
    agree(before, out)


@pytest.mark.parametrize("fuse", ["standard", "portable"])
@pytest.mark.parametrize("dims", ["N,4,12", "N,4,L"])
@pytest.mark.parametrize("centered", [True, False])
def test_a_sum_normalized_without_gamma_runs_in_onnxruntime(dims: str, centered: bool, fuse: str) -> None:
    """Its SkipLayerNormalization, which it makes of Add and LayerNormalization, refuses a scale of shape (1,) at run
    time."""
    mean = "u = ReduceMean<keepdims = 1>(a, last) d = Sub(a, u)" if centered else "d = Identity(a)"
    body = (
        f"last = Constant<value_ints = [-1]>() a = Add(x, r) {mean} q = Mul(d, d) v = ReduceMean<keepdims = 1>(q, last)"
    )
    proto = net({"x": dims, "r": dims}, "y", f"{body} e = Add(v, one) w = Sqrt(e) y = Div(d, w)")
    out, summary = optimize_norms(proto, fuse=fuse)
    assert [f.status for f in summary.findings] == ["fused"]
    agree(proto, out)


def test_two_norms_of_one_sum() -> None:
    """A parallel block: the sum is made once, the second norm reads it."""
    before = net(
        ROWS, "z", f"a = Add(x, r) p = {LN}(a, g, b) q = LayerNormalization<epsilon = 0.5>(a, b, g) z = Add(p, q)"
    )
    out, _ = optimize_norms(before, fuse="portable")
    assert sorted(n.op_type for n in out.graph.node) == ["Add", "AddLayerNorm", "LayerNormalization"]
    agree(before, out)


def test_joined_in_a_branch() -> None:
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> net (bool c, float[N,12] x, float[N,12] r) => (float[N,12] y)
        <float[12] g = {{1,2,3,4,5,6,7,8,9,1,2,3}}> {{
            y = If (c) <then_branch = t () => (float[N,12] p) {{ a = Add(x, r) p = {LN}(a, g) }},
                        else_branch = e () => (float[N,12] q) {{ q = Relu(x) }}> }}"""
    )
    out, summary = optimize_norms(proto, fuse="portable")
    assert [(f.status, f.place.split(" ")[0]) for f in summary.findings] == [("fused", "then_branch")]
    given = feeds(proto, {"N": 3}) | {"c": np.array(True)}
    np.testing.assert_allclose(run(out, given)[0], run(proto, given)[0], rtol=0, atol=1e-5)


# What each of the op's outputs is made of wrongly; the certificate has to see it.
FAULTS = {
    "the sum is x": ("AddLayerNorm", "sum", "Identity", ["X"]),
    "the norm of x": ("AddLayerNorm", "wide", "Identity", ["X"]),
    "another sum": ("AddLayerNorm", "sum", "Sub", ["X", "residual"]),
    "no one": ("ModulatedLayerNorm", "gain", "Identity", ["scale"]),
    "the shift is not added": ("ModulatedLayerNorm", "Y", "LayerNormalization", ["X", "gain"]),
    "no gate": ("GroupNormSiLU", "Y", "Identity", ["result"]),
    "another gate": ("GroupNormSiLU", "gate", "HardSigmoid", ["result"]),
    "no gate of a norm": ("GatedRMSNorm", "product", "Identity", ["scaled"]),
    "a gate of its sigmoid alone": ("GatedRMSNorm", "silu", "Identity", ["opened"]),
    "a gate through a hard sigmoid": ("GatedRMSNorm", "opened", "HardSigmoid", ["gated"]),
    "the norm's own gate": ("GatedRMSNorm", "gated", "Identity", ["scaled"]),
    "sigmoid gate: no gate": ("SigmoidGatedRMSNorm", "product", "Identity", ["scaled"]),
    "sigmoid gate: SiLU": ("SigmoidGatedRMSNorm", "opened", "Identity", ["gated"]),
    "the shift is not added to groups": ("AdaGroupNorm", "shifted", "Identity", ["scaled"]),
    "groups are not scaled": ("AdaGroupNorm", "scaled", "Identity", ["normal"]),
    "groups are not normalized": ("AdaGroupNorm", "instances", "Identity", ["rows"]),
    "an adaptive norm without its gate": ("AdaGroupNormSiLU", "product", "Identity", ["shifted"]),
    "no root": ("AddRMSNorm", "r", "Identity", ["e"]),
    "epsilon is lost": ("AddRMSNorm", "e", "Identity", ["biased"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_body_fails_its_certificate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, output, wrong, inputs = FAULTS[name]
    real = function_bodies.norm_function_body

    def changed(asked: NormOp, opset: int) -> onnx.FunctionProto:
        function = onnx.FunctionProto()
        function.CopyFrom(real(asked, opset))
        for node in function.node if asked.op == op else ():
            if node.output[0] == output:
                if node.op_type != wrong:
                    del node.attribute[:]
                node.op_type, node.input[:] = wrong, inputs
        return function

    monkeypatch.setattr(function_bodies, "norm_function_body", changed)
    given = next(case for case in JOINED.values() if case[0] == op)
    before = net(*given[1:])
    out, summary = optimize_norms(before, fuse="portable")
    assert op not in own(out)
    assert [f.status for f in summary.findings] in (["kept", "undone"], ["fused", "undone"])
    assert summary.findings[1].reason.startswith("its certificate failed: ")
    agree(before, out)


# ------------------------------------------------------------------ the bodies

SHAPES = {
    "AddLayerNorm": ((3, 4, 7), (3, 4, 7), (7,), (7,)),
    "AddRMSNorm": ((3, 4, 7), (3, 4, 7), (7,)),
    "ModulatedLayerNorm": ((3, 4, 7), (3, 1, 7), (3, 1, 7)),
    "GatedRMSNorm": ((3, 4, 7), (7,), (3, 4, 7)),
    "SigmoidGatedRMSNorm": ((3, 4, 7), (7,), (3, 4, 7)),
    "GroupNorm": ((3, 8, 5, 2), (8,), (8,)),
    "GroupNormSiLU": ((3, 8, 5, 2), (8,), (8,)),
    "AdaGroupNorm": ((3, 8, 5, 2), (3, 8, 1, 1), (3, 8, 1, 1)),
    "AdaGroupNormSiLU": ((3, 8, 5, 2), (3, 8, 5, 2), (3, 8, 5, 2)),
    "ChannelLayerNorm": ((3, 7, 5, 2), (7,), (7,)),
}
KERNEL = {
    "GroupNorm": {"num_groups": 4, "channels_last": 0},
    "GroupNormSiLU": {"num_groups": 4, "channels_last": 0},
    "AdaGroupNorm": {"num_groups": 4, "spatial": 0},
    "AdaGroupNormSiLU": {"num_groups": 4, "spatial": 1},
    "AddRMSNorm": {"offset": 0.0},
}
# They compute in float32 always.
IN_FLOAT32 = ("GroupNorm", "GroupNormSiLU", "AdaGroupNorm", "AdaGroupNormSiLU")


def call(
    op: str, shapes: tuple[tuple[int, ...], ...], dtype: Any, opset: int
) -> tuple[onnx.ModelProto, list[np.ndarray], dict[str, Any]]:
    """A model of one call, inputs for it, and its attributes."""
    function = own_op_functions.own_op_body(op, opset)
    given = {"epsilon": 0.25, "stash_type": 11 if dtype is np.float64 else 1, "num_groups": 4}
    attrs = {name: given[name] for name in OURS[op].attributes}
    arrays = [np.random.default_rng(i).standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node(op, function.input, function.output, domain=own_op_functions.DOMAIN, **attrs)],
        "one",
        [helper.make_tensor_value_info(n, kind, a.shape) for n, a in zip(function.input, arrays, strict=True)],
        [helper.make_tensor_value_info(n, kind, arrays[0].shape) for n in function.output],
    )
    model = attach_functions(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), opset
    )
    onnx.checker.check_model(model, full_check=True)
    return model, arrays, attrs


@pytest.mark.parametrize(
    ("op", "opset", "dtype"),
    [
        (op, n, dtype)
        for op in SHAPES
        for n in (17, 18, 21, 23, 25)
        for dtype in (np.float32, np.float16, np.float64)
        if n >= own_op_functions.oldest_opset(op) and not (op in IN_FLOAT32 and dtype is np.float64)
    ],
)
def test_bodies_compute_what_the_kernels_references_do(op: str, dtype: type, opset: int) -> None:
    model, arrays, attrs = call(op, SHAPES[op], dtype, opset)
    got = run(model, dict(zip(own_op_functions.own_op_body(op, opset).input, arrays, strict=True)))
    wide = [a.astype(np.float64) for a in arrays]
    expected = BY_NAME[op].reference(*wide, epsilon=0.25, **KERNEL.get(op, {}))
    want = list(expected) if isinstance(expected, tuple) else [expected]
    # ten roundings in the type itself (the sum, x̂, and what onnxruntime puts between the nodes of a body) of numbers
    # up to max|y|
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert np.abs(g - w).max() <= 10 * np.finfo(dtype).eps * (1 + np.abs(w).max())
    evaluated = evaluator.evaluate_node(op, wide, attrs, opset=opset, domain=own_op_functions.DOMAIN, outputs=len(want))
    for e, w in zip(evaluated, want, strict=True):
        np.testing.assert_allclose(e, w, rtol=1e-12, atol=1e-12)


# a group norm's Reshape has a -1 to fill in, as in torch's export and in onnxruntime's function for GroupNormalization
@pytest.mark.parametrize("op", sorted(set(SHAPES) - {"GroupNorm", "GroupNormSiLU"}))
def test_bodies_take_an_empty_batch(op: str) -> None:
    shapes = tuple((0, *s[1:]) if s[0] == 3 else s for s in SHAPES[op])
    model, arrays, _ = call(op, shapes, np.float32, 21)
    for y in run(model, dict(zip(own_op_functions.own_op_body(op, 21).input, arrays, strict=True))):
        assert y.shape == shapes[0]


def test_every_op_of_ours_has_a_kernel_of_its_name() -> None:
    assert set(BY_NAME) >= own_op_functions.OPS - own_op_functions.WITHOUT_KERNEL
    assert set(SHAPES) | {"LayerNorm", "RMSNorm", "StdNorm"} == WITH_FLOATS


@pytest.mark.skipif(
    bool(describe_missing_runtime("tensorrt-rtx", gpu=False)),
    reason=str(describe_missing_runtime("tensorrt-rtx", gpu=False)),
)
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_tensorrt_rtx_builds_a_model_of_every_op(tmp_path: Path, dtype: str) -> None:
    """All own ops in one file, at dynamic sizes, from their bodies."""
    call_of = {
        "RMSNorm": "normdeploy.RMSNorm<axes = [-1], epsilon = 1e-5, stash_type = 1>",
        "LayerNorm": "normdeploy.LayerNorm<axes = [-1], epsilon = 1e-5, ddof = 1, stash_type = 1>",
        "StdNorm": "normdeploy.StdNorm<axes = [-1], epsilon = 1e-5, ddof = 1, stash_type = 1>",
    }
    row = "<epsilon = 1e-5, stash_type = 1>"
    body = (
        f"n1 = {call_of['RMSNorm']}(x, g) n2 = {call_of['LayerNorm']}(n1, g, b) n3 = {call_of['StdNorm']}(n2, g, b) n4,"
        f" a = normdeploy.AddLayerNorm{row}(n3, r, g, b) n5, c = normdeploy.AddRMSNorm{row}(n4, a, g) z = Add(n5, c) m"
        f" = normdeploy.ModulatedLayerNorm{row}(z, s, t) k = normdeploy.GatedRMSNorm{row}(m, g, x)"
        f" o = normdeploy.SigmoidGatedRMSNorm{row}(k, g, x)"
        f" v = normdeploy.ChannelLayerNorm{row}(p, scale, bias) h ="
        " normdeploy.GroupNorm<epsilon = 1e-5, num_groups = 2>(v, scale, bias) u ="
        " normdeploy.GroupNormSiLU<epsilon = 1e-5, num_groups = 4>(h, scale, bias)"
        " d = normdeploy.AdaGroupNorm<epsilon = 1e-5, num_groups = 4>(u, e, e)"
        " w = normdeploy.AdaGroupNormSiLU<epsilon = 1e-5, num_groups = 8>(d, p, p)"
    )
    inputs = ROWS | {"s": "N,1,12", "t": "N,1,12", "p": "N,8,H,H", "e": "N,8,1,1"}
    args = ", ".join(f"{dtype}[{dims}] {name}" for name, dims in inputs.items())
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "normdeploy" : 1]> net ({args}) => ({dtype}[N,4,12] o,'
        f" {dtype}[N,8,H,H] w) {{ {body} }}"
    )
    kind = np.float16 if dtype == "float16" else np.float32
    proto.graph.initializer.extend(
        numpy_helper.from_array(HELD[k].astype(kind), k) for k in ("g", "b", "scale", "bias")
    )
    attach_functions(proto, 21)
    onnx.checker.check_model(proto, full_check=True)
    assert {f.name for f in proto.functions} == WITH_FLOATS
    onnx.save(proto, tmp_path / "all.onnx")
    engine = build(tmp_path / "all.onnx", tmp_path / "all.engine", profiles=["N=1:4:8", "H=2:8:16"])
    assert engine.bytes > 0
    given = feeds(proto, {"N": 2, "H": 4})
    assert all(np.isfinite(y).all() for y in run(proto, given))


@pytest.mark.parametrize("name", JOINED)
def test_the_census_knows_joined_norms(name: str) -> None:
    op, *given = JOINED[name]
    out, _ = optimize_norms(net(*given), fuse="portable")
    (finding,) = optimize_norms(out, fuse="portable", census=True)[1].findings
    node = next(n for n in out.graph.node if n.domain == own_op_functions.DOMAIN)
    assert finding.input == node.input[0]
    assert finding.statistics == "float32"
    assert finding.tensors == tuple(node.output)
    assert finding.shape is not None
    assert finding.gamma is not None
    assert finding.gamma.one_plus == (op == "ModulatedLayerNorm")
    assert finding.gamma.data == (op == "ModulatedLayerNorm" or op.startswith("Ada"))
    assert finding.beta is None if "RMSNorm" in op else finding.beta is not None
    assert [h.dtype for h in finding.half] == ["float16", "bfloat16"]


def test_a_copy_behind_a_norm_does_not_give_it_its_module() -> None:
    """torch's Dropout in eval mode is an Identity of another module."""
    mean = "last = Constant<value_ints = [-1]>() u = ReduceMean<keepdims = 1>(x, last) d = Sub(x, u) q = Mul(d, d)"
    body = f"{mean} v = ReduceMean<keepdims = 1>(q, last) e = Add(v, one) w = Sqrt(e) n = Div(d, w) y = Identity(n)"
    proto = net({"x": "N,4,12"}, "y", body)
    for node in proto.graph.node:
        scope = "dropout" if node.op_type == "Identity" else "norm"
        node.metadata_props.add(key="normdeploy.module", value=f"layers.3.{scope}")
    out, summary = optimize_norms(proto)
    assert [f.module for f in summary.findings] == ["layers.3.norm"]
    assert [p.value for p in out.graph.node[0].metadata_props] == ["layers.3.norm"]


def test_the_sum_stays_an_add_for_cuda() -> None:
    """onnxruntime's CUDA provider fuses it with the norm; the view in the op's body would prevent that."""
    before = net(ROWS, "y", f"a = Add(x, r) y = {LN}(a, g, b)", opset=21)
    kept = normdeploy.optimize(before, runtime="onnxruntime", provider="cuda", fuse="portable").model
    assert [n.op_type for n in kept.graph.node] == ["Add", "LayerNormalization"]
    joined = normdeploy.optimize(before, runtime="onnxruntime", fuse="portable").model
    assert own(joined) == ["AddLayerNorm"]


@pytest.mark.parametrize("dims", ["N,4,12", "3,4,12"])
def test_onnxruntime_does_not_fuse_the_sum_and_its_norm(dims: str, tmp_path: Path) -> None:
    """Its SkipLayerNormalization takes several times as long on a CPU, and loses digits at a large mean."""
    before = net({"x": dims, "r": dims}, "y", f"a = Add(x, r) n = {LN}(a, g, b) y = Relu(n)", opset=21)
    out, _ = optimize_norms(before, fuse="portable")
    assert own(out) == ["AddLayerNorm"]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    kernels = []
    for proto in (before, out):
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        kernels.append({n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node})
    assert "SkipLayerNormalization" in kernels[0]
    assert kernels[1] == {"Add", "Unsqueeze", "LayerNormalization", "Squeeze", "Relu"}
