"""Shapes that a file leaves open: found where they can be, so that the norms behind them are fused all the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from normdeploy.graphs.dims import evaluate_dim, is_invented_name
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.shape_completion import ShapedGraph, refine_dims
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

NORM = """u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q)
    e = Add(v, eps) r = Sqrt(e) n = Div(d, r) y = Mul(n, g)"""
CONSTANTS = "float eps = {1e-5}, float[6] g = {1,2,3,4,5,6}"

# PaddlePaddle writes flatten and transpose like this; onnx's inference knows no rank behind the Reshape.
FLATTENED = """s = Shape(i) two = Slice(s, b, t, b) shape = Concat<axis=0>(two, rest) f = Reshape(i, shape)
    x = Transpose<perm=[0,2,1]>(f)"""
FLATTENING = CONSTANTS + ", int64[1] b = {0}, int64[1] t = {2}, int64[1] rest = {-1}"


def net(body: str, inputs: str, outputs: str, constants: str = FLATTENING) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 13]> net ({inputs}) => ({outputs}) <{constants}> {{ {body} }}'
    )


def agree(proto: onnx.ModelProto, out: onnx.ModelProto, *sizes: tuple[int, ...]) -> None:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [
        ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]) for m in (proto, out)
    ]
    for size in sizes:
        x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        a, b = (s.run(None, {proto.graph.input[0].name: x})[0] for s in sessions)
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * 2.0**-24 * 6 * 6**0.5)  # ten roundings of up to 6 · sqrt(6)


def test_a_reshape_to_a_computed_shape() -> None:
    proto = net(f"{FLATTENED} {NORM}", "float[N,6,H,W] i", "float[N,L,6] y")
    graph = ShapedGraph(proto)
    tensors = graph.gs.tensors()
    assert graph.shape(tensors["f"]) == ("N", 6, "H*W")
    assert graph.shape(tensors["x"]) == ("N", "H*W", 6)
    assert graph.dtype(tensors["d"]) == np.float32
    out, summary = optimize_norms(proto)
    assert [f.became for f in summary.findings] == ["LayerNormalization(axis=-1, epsilon=1e-05)"]
    agree(proto, out, (2, 6, 3, 4), (1, 6, 1, 1))


def dims_of(proto: onnx.ModelProto, name: str) -> tuple[int | str | None, ...]:
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = ShapedGraph(proto)
    return graph.shape(graph.gs.tensors()[name]) or (None,)


def test_a_length_that_is_a_sum() -> None:
    proto = net(
        "s = Shape(i) k = Add(s, one) z = Expand(zero, k) f = Concat<axis=0>(i, z) x = Reshape(f, two)",
        "float[N] i",
        "float[A,B] x",
        "int64[1] one = {1}, float[1] zero = {0}, int64[2] two = {-1, 1}",
    )
    assert [evaluate_dim(dims_of(proto, name)[0], {"N": 100}) for name in ("z", "f", "x")] == [101, 201, 201]


@pytest.mark.parametrize(
    "body",
    [
        "n = Sub(most, s) k = Max(n, zeros) p = Concat<axis=0>(zeros, k) x = Pad(i, p)",  # to 64 at least
        "x = Slice(i, zeros, most, axes)",  # to 64 at most
        "q = Div(s, most) p = Concat<axis=0>(zeros, q) x = Pad(i, p)",  # longer from 64 on
        "n = Min(s, most) x = Slice(i, zeros, n, axes)",
        "q = Mod(s, most) p = Concat<axis=0>(zeros, q) x = Pad(i, p)",
        "q = Mul(s, s) d = Sub(q, most) k = Max(d, zeros) p = Concat<axis=0>(zeros, k) x = Pad(i, p)",
        "x = Slice(i, five, most, axes)",
    ],
)
def test_what_changes_from_size_to_size_stays_unknown(body: str) -> None:
    """At every small size each of these dims is one number, or the length itself."""
    constants = "int64[2] most = {64, 64}, int64[2] zeros = {0, 0}, int64[2] axes = {0, 1}, int64[2] five = {5, 5}"
    dims = dims_of(net(f"s = Shape(i) {body}", "float[N,M] i", "float[A,B] x", constants), "x")
    assert all(d is None or str(d).startswith("unk__") for d in dims), dims


def test_a_norm_over_what_is_padded_to_a_length() -> None:
    """Found by `benchmarks.attack` (sizes_cut): the norm of 64 places at least was given a gamma of 64 places."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        net (float[N,M] i) => (float[N,K] y)
        <int64[1] last = {-1}, int64[1] most = {64}, int64[1] none = {0}, int64[3] before = {0, 0, 0},
         float eps = {1e-5}, float[1] g = {1.5}>
        {
            s = Shape(i) m = Gather<axis=0>(s, last) n = Sub(most, m) k = Max(n, none) p = Concat<axis=0>(before, k)
            x = Pad(i, p)
            u = ReduceMean(x, last) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last) e = Add(v, eps) r = Sqrt(e)
            n_ = Div(d, r)
            y = Mul(g, n_)
        }""")
    out, _ = optimize_norms(proto)
    for size in ((2, 5), (1, 64), (3, 65), (2, 129)):
        x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        for a, b in zip(run_onnxruntime(proto, {"i": x}), run_onnxruntime(out, {"i": x}), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=10 * 2.0**-24 * 129**0.5 * np.abs(a).max())


def test_dims_of_minus_one_are_dynamic() -> None:
    proto = net(
        "h = Conv(i, w) y = BatchNormalization(h, a, b, b, a)",
        "float[N,2,H,W] i",
        "float[N,2,H,W] y",
        "float[2,2,1,1] w = {1,2,3,4}, float[2] a = {1,2}, float[2] b = {0,1}",
    )
    for value in (*proto.graph.input, *proto.graph.output):
        for axis in (0, 2, 3):
            value.type.tensor_type.shape.dim[axis].dim_value = -1
    out, summary = optimize_norms(proto)
    assert [(f.kind, f.status) for f in summary.findings] == [("BatchNorm", "folded")]
    agree(proto, out, (2, 2, 3, 4))


@pytest.mark.parametrize("last", [9223372036854775807, 2147483647])
def test_a_batch_whose_name_inference_loses(last: int) -> None:
    """JAX broadcasts to the batch of the graph's input; behind a Slice to the end inference has another name for it."""
    proto = net(
        """x = Slice(i, b, end, b) s = ReduceSum<keepdims=0>(x, axis) m = Mul(s, part) q = Mul(x, x) p =
        ReduceSum<keepdims=0>(q, axis)
        a = Mul(p, part) mm = Mul(m, m) v = Sub(a, mm) c = Max(v, zero) sh = Shape(i) n = Slice(sh, b, one, b)
        k = Concat<axis=0>(n, one)
        vr = Reshape(c, k) e = Add(vr, eps) w = Sqrt(e) r = Reciprocal(w) ur = Reshape(m, k) d = Sub(x, ur)
        t = Mul(r, g) y = Mul(d, t)""",
        "float[N,8] i",
        "float[N,8] y",
        f"""float eps = {{1e-5}}, float[8] g = {{1,2,3,4,5,6,7,8}}, int64[1] b = {{0}}, int64[1] end = {{{last}}},
        int64[1] axis = {{1}}, int64[1] one = {{1}}, float part = {{0.125}}, float zero = {{0}}""",
    )
    out, summary = optimize_norms(proto)
    assert [f.became for f in summary.findings] == ["LayerNormalization(axis=-1, epsilon=1e-05)"]
    agree(proto, out, (3, 8), (1, 8))


GROUPED = """
    <ir_version: 10, opset_import: ["" : 17]>
    agraph (float[batch, 8, height, width] x) => (float[named, anew, by, exporter] y)
    <int64[4] view = {0, 8, 1, -1}, int64[2] axes = {2, 3}, float eps = {1e-5}>
    {
        size = Shape(x)
        target = Identity(view)
        v = Reshape(x, target)
        u = ReduceMean<axes = [2, 3]>(v)
        d = Sub(v, u)
        q = Mul(d, d)
        w = ReduceMean<axes = [2, 3]>(q)
        e = Add(w, eps)
        r = Sqrt(e)
        n = Div(d, r)
        y = Reshape(n, size)
    }"""


def test_a_view_that_could_be_the_image_is_not_taken_for_it() -> None:
    """Where height and width are so chosen that (1, height·width) were (height, width), the norm of the view had the
    result's shape: the reshape back was dropped, and the file wrote another shape than before."""
    proto = parser.parse_model(GROUPED)
    result, _ = optimize_norms(proto)
    assert [(n.op_type, n.input[0]) for n in result.graph.node] in (
        [("InstanceNormalization", "x")],
        [("LayerNormalization", "x")],
    )
    x = np.random.default_rng(0).standard_normal((2, 8, 3, 5)).astype(np.float32)
    assert run_onnxruntime(result, {"x": x})[0].shape == (2, 8, 3, 5)


def test_names_that_an_output_alone_bears_say_nothing() -> None:
    """TorchScript's exporter calls an output's batch ``Add76_dim_0``: it was taken for another size than the
    input's."""
    graph = ShapedGraph(parser.parse_model(GROUPED))
    assert graph.shape(graph.gs.outputs[0]) == ("batch", 8, "height", "width")
    assert graph.shape(next(n for n in graph.nodes if n.op == "Sub").outputs[0]) == ("batch", 8, 1, "height*width")


def test_a_name_that_was_made_up_for_an_input_goes_on() -> None:
    """A node's result whose dim has a made-up name of its own is as long as its input, where inference of the node
    alone says so."""
    proto = net(
        "x = Compress<axis=0>(i, c) y = Relu(x)", "float[N,6] i, bool[M] c", "float[L,6] y", "float eps = {1e-5}"
    )
    graph = Graph(proto)
    relu = next(n for n in graph.nodes if n.op == "Relu")
    passed = graph.shape(relu.inputs[0])
    assert passed is not None
    assert is_invented_name(passed[0])
    assert refine_dims(graph, relu, ("unk__99", 6), passed) == passed
    assert refine_dims(graph, relu, ("N", 6), ("unk__98", 6)) == ("N", 6)  # of none of its inputs: it says nothing
