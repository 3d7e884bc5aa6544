"""Recognition by values: what ``probe`` says of functions, and what ``facts`` reads out of small graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from normdeploy.graphs.dims import dim_symbols, evaluate_dim
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Refusal, compile_region, size_assignments
from normdeploy.recognition.anchors import find_entries, find_results, is_anchor
from normdeploy.recognition.fit_measurement import measure_fit
from normdeploy.recognition.norm_fit import NormFit
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime


class Asked:
    """Stands for a bound region: any function of x."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self.function = function

    def run(self, feeds: list[np.ndarray]) -> np.ndarray:
        return self.function(feeds[0])


def layer(
    axes: tuple[int, ...],
    epsilon: float,
    ddof: int = 0,
    gamma: float | np.ndarray = 1.0,
    beta: float | np.ndarray = 0.0,
) -> Callable:
    return lambda x: (
        (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, ddof=ddof, keepdims=True) + epsilon) * gamma + beta
    )


def asked(function: Callable, shape: tuple[int, ...]) -> NormFit | Refusal:
    return measure_fit(Asked(function), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 1e-8, 1e-5, 1e-3])
@pytest.mark.parametrize("axes", [(2,), (1, 2), (1,), (0,)])
def test_layer_norm_is_measured(axes: tuple[int, ...], epsilon: float) -> None:
    found = asked(layer(axes, epsilon), (3, 5, 8))
    assert isinstance(found, NormFit)
    assert (found.axes, found.split, found.centered) == (axes, None, True)
    assert found.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert np.allclose(found.gamma, 1, rtol=1e-11)


def test_unbiased_variance_is_a_factor() -> None:
    n = 8
    found = asked(layer((2,), 1e-5, ddof=1), (3, 5, n))
    assert isinstance(found, NormFit)
    assert found.epsilon == pytest.approx(1e-5 * (n - 1) / n, rel=1e-9)
    assert np.allclose(found.gamma, np.sqrt((n - 1) / n), rtol=1e-11)


@pytest.mark.parametrize(
    "gamma", [np.array([0.0, -2.0, 1.0, 3.0]), np.array([1e-6, 1e6, -1.0, 1e-3]), np.array([1.0, 0.0, 0.0, 1e-30])]
)
def test_gamma_of_any_size_and_sign(gamma: np.ndarray) -> None:
    beta = np.array([0.5, -1.0, 0.0, 2.0])
    found = asked(layer((1,), 1e-5, gamma=gamma, beta=beta), (6, 4))
    assert isinstance(found, NormFit)
    assert np.allclose(found.gamma, gamma, rtol=1e-6, atol=1e-9)  # 1e-16 of beta is what can't be seen of gamma
    assert np.allclose(found.beta, beta, atol=1e-9)


def test_groups_and_instances() -> None:
    def group(x: np.ndarray) -> np.ndarray:
        view = x.reshape(x.shape[0], 2, -1)
        return layer((2,), 1e-5)(view).reshape(x.shape)

    found = asked(group, (3, 6, 4, 5))
    assert isinstance(found, NormFit)
    assert (found.axes, found.split, found.block) == ((2, 3), 1, 3)
    instance = asked(layer((2, 3), 1e-5), (3, 6, 4, 5))
    assert isinstance(instance, NormFit)
    assert (instance.axes, instance.split) == ((2, 3), None)


def test_rms_has_no_mean() -> None:
    found = asked(lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * 1.5, (4, 8))
    assert isinstance(found, NormFit)
    assert not found.centered
    assert found.epsilon == pytest.approx(1e-6, rel=1e-9)


def test_epsilon_outside_the_root_is_a_fit_of_its_own() -> None:
    found = asked(lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6), (4, 8))
    assert isinstance(found, NormFit)
    assert found.outside
    assert found.epsilon == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3])
def test_a_norm_that_is_clamped_is_a_fit_of_its_own(epsilon: float) -> None:
    """F.normalize, scaled and shifted."""
    found = asked(lambda x: 3 * x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), epsilon) + 0.5, (4, 8))
    assert isinstance(found, NormFit)
    assert found.clamped
    assert found.epsilon == pytest.approx(epsilon, rel=1e-9)
    np.testing.assert_allclose(found.gamma, 3, rtol=1e-9)


LOOKALIKES: dict[str, tuple[Callable, str]] = {
    "clamped": (
        lambda x: (x - x.mean(-1, keepdims=True)) / np.maximum(x.std(-1, keepdims=True), 1e-6),
        "clamped",
    ),
    "another mean": (lambda x: (x - x.mean()) / np.sqrt(x.var(-1, keepdims=True) + 1e-5), "differ"),
    "variance for deviation": (lambda x: (x - x.mean(-1, keepdims=True)) / (x.var(-1, keepdims=True) + 1e-5), ""),
    "mean deviation": (
        lambda x: (
            (x - x.mean(-1, keepdims=True)) / (np.abs(x - x.mean(-1, keepdims=True)).mean(-1, keepdims=True) + 1e-5)
        ),
        "",
    ),
    "half of the row": (
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x[:, :4].var(-1, keepdims=True) + 1e-5),
        "",
    ),
    "softmax": (
        lambda x: np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
        "",
    ),
    "identity": (lambda x: x, ""),
    "constant": (lambda x: np.zeros_like(x), "does not depend"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_no_fit(name: str) -> None:
    function, reason = LOOKALIKES[name]
    found = asked(function, (4, 8))
    assert isinstance(found, Refusal), found
    assert reason in found.reason


def test_dims_are_read_and_never_run() -> None:
    assert evaluate_dim("2*s16*s82", {"s16": 3, "s82": 5}) == 30
    assert evaluate_dim("s77 // 2 + 1", {"s77": 9}) == 5
    assert dim_symbols("2*s16*s82") == {"s16", "s82"}
    assert dim_symbols("floor(s1/2)") == {"floor(s1/2)"}  # no arithmetic that we read: one symbol by itself
    assert evaluate_dim("__import__('os').system('true')", {}) is None


LAYER_NORM = """
    <ir_version: 10, opset_import: ["" : 21]>
    agraph (float[batch, seq, 4] x, float[4] scale, float[batch, 1, 4] shift) => (float[batch, seq, 4] out)
    <int64[1] last = {-1}, float eps = {1e-5}, float[4] weight = {1.0, 2.0, 3.0, 4.0},
    float[4] bias = {0.5, 0.25, 1.0, 2.0}>
    {
        u = ReduceMean(x, last)
        d = Sub(x, u)
        q = Mul(d, d)
        v = ReduceMean(q, last)
        e = Add(v, eps)
        r = Sqrt(e)
        n = Div(d, r)
        REST
    }"""


def written(rest: str) -> onnx.ModelProto:
    return optimize_norms(onnx.parser.parse_model(LAYER_NORM.replace("REST", rest)))[0]


def test_entries_and_results_bracket_the_norm() -> None:
    graph = Graph(onnx.parser.parse_model(LAYER_NORM.replace("REST", "m = Mul(n, weight)  out = Add(m, bias)")))
    (root,) = (n for n in graph.nodes if is_anchor(graph, n))
    xs, _ = find_entries(graph, root)
    assert [t.name for t in xs] == ["e", "v", "q", "d", "x"]
    ys = find_results(graph, root, xs)
    assert [t.name for t in ys] == ["r", "n", "m", "out"]
    region = compile_region(graph, ys[-1], xs[-1:])
    assert not isinstance(region, Refusal)
    assert region.spelling() == "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul Add"


def test_initializers_keep_their_names() -> None:
    (node,) = written("m = Mul(n, weight)  out = Add(m, bias)").graph.node
    assert list(node.input) == ["x", "weight", "bias"]
    assert {a.name: a.f for a in node.attribute if a.name == "epsilon"}["epsilon"] == np.float32(1e-5)


@pytest.mark.parametrize(
    ("rest", "inputs"),
    [("out = Mul(n, scale)", ["x", "scale"]), ("m = Mul(n, weight)  out = Add(m, shift)", ["x", "weight", "shift"])],
    ids=["scale is an input", "shift of (B, 1, D)"],
)
def test_gamma_and_beta_may_be_data(rest: str, inputs: list[str]) -> None:
    proto = written(rest)
    (node,) = proto.graph.node
    assert list(node.input) == inputs
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((2, 3, 4)),
        "scale": rng.standard_normal(4),
        "shift": rng.standard_normal((2, 1, 4)),
    }
    narrow = {k: v.astype(np.float32) for k, v in feeds.items()}
    (got,) = run_onnxruntime(proto, narrow)
    (want,) = run_onnxruntime(onnx.parser.parse_model(LAYER_NORM.replace("REST", rest)), narrow)
    assert np.abs(got - want).max() <= 16 * 2.0**-24 * np.abs(want).max()


def test_a_residual_stream_is_no_shift() -> None:
    """Data of x's own shape added behind: a LayerNormalization could not broadcast it, and no one would call it
    beta."""
    text = LAYER_NORM.replace("float[batch, 1, 4] shift", "float[batch, seq, 4] shift").replace(
        "REST", "m = Mul(n, weight)  out = Add(m, shift)"
    )
    proto, _ = optimize_norms(onnx.parser.parse_model(text))
    assert [n.op_type for n in proto.graph.node] == ["LayerNormalization", "Add"]


def test_an_inner_tensor_that_is_read_elsewhere_survives() -> None:
    text = LAYER_NORM.replace("=> (float[batch, seq, 4] out)", "=> (float[batch, seq, 4] out, float[batch, seq, 4] d)")
    proto, _ = optimize_norms(onnx.parser.parse_model(text.replace("REST", "m = Mul(n, weight)  out = Add(m, bias)")))
    assert sorted(n.op_type for n in proto.graph.node) == ["LayerNormalization", "ReduceMean", "Sub"]


def test_a_shared_norm_is_written_once() -> None:
    """x̂ with two affines: one norm without affine, as the two read it."""
    text = LAYER_NORM.replace(
        "=> (float[batch, seq, 4] out)", "=> (float[batch, seq, 4] out, float[batch, seq, 4] other)"
    )
    proto, _ = optimize_norms(
        onnx.parser.parse_model(text.replace("REST", "out = Mul(n, weight)  other = Add(n, bias)"))
    )
    assert sorted(n.op_type for n in proto.graph.node) == ["Add", "LayerNormalization", "Mul"]


def test_default_values_of_inputs_are_no_constants() -> None:
    proto = onnx.parser.parse_model(LAYER_NORM.replace("REST", "out = Mul(n, scale)"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "scale"))
    out, _ = optimize_norms(proto)
    assert [i.name for i in out.graph.input] == ["x", "scale", "shift"]
    assert "scale" in [i.name for i in out.graph.initializer]
    assert "scale" in out.graph.node[0].input


def test_the_argument_is_not_changed_and_twice_is_once() -> None:
    proto = onnx.parser.parse_model(LAYER_NORM.replace("REST", "m = Mul(n, weight)  out = Add(m, bias)"))
    proto.metadata_props.add(key="author", value="somebody")
    proto.graph.node[3].metadata_props.add(key="note", value="kept")
    before = proto.SerializeToString(deterministic=True)
    once, _ = optimize_norms(proto)
    assert proto.SerializeToString(deterministic=True) == before
    assert [p.value for p in once.metadata_props] == ["somebody"]
    twice, summary = optimize_norms(once)
    assert twice.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)
    assert [f.status for f in summary.findings] == ["kept"]


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt", "tensorrt-rtx"])
def test_one_group_is_never_a_group_normalization(runtime: str) -> None:
    """TensorRT takes a GroupNormalization with one group for an instance norm (TensorRT#4756)."""
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N, 4, 3, 3] x) => (float[N, 4, 3, 3] y)
        <float[4] s = {1.0, 2.0, 3.0, 4.0}, float[4] b = {0.0, 1.0, 2.0, 3.0}>
        { y = GroupNormalization <num_groups = 1, epsilon = 1e-5> (x, s, b) }"""
    proto, _ = optimize_norms(onnx.parser.parse_model(text), runtime=runtime)
    (node,) = proto.graph.node
    assert node.op_type == "LayerNormalization"


@pytest.mark.parametrize("runtime", ["any", "tensorrt", "tensorrt-rtx"])
def test_a_group_norm_of_rows_is_no_group_normalization(runtime: str) -> None:
    """GroupNormalization's input is (N, C, D1, ...): it has places beside the channels (ONNX, GroupNormalization
    21)."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 8] x) => (float[N, 8] y)
        <int64[3] groups = {0, 2, 4}, int64[2] back = {0, 8}, float eps = {0.001},
        float[8] gamma = {1, 2, 3, 4, 5, 6, 7, 8}> {
            z = Reshape(x, groups) m = ReduceMean<keepdims = 1>(z, last) d = Sub(z, m) q = Mul(d, d)
            v = ReduceMean<keepdims = 1>(q, last)
            e = Add(v, eps) r = Sqrt(e) n = Div(d, r) h = Reshape(n, back) y = Mul(h, gamma)
        }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "last"))
    out, summary = optimize_norms(proto, runtime=runtime)
    assert [f.status for f in summary.findings] == ["fused"]
    assert "GroupNormalization" not in {n.op_type for n in out.graph.node}
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    z = x.astype(np.float64).reshape(5, 2, 4)
    expected = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + np.float32(1e-3))
    # of numbers below 2, which float32 rounds some ten times, times 8
    assert (
        np.abs(run_onnxruntime(out, {"x": x})[0] - expected.reshape(5, 8) * np.arange(1, 9)).max()
        <= 10 * 2.0**-24 * 2 * 8
    )


@pytest.mark.parametrize("first", [0.1, 1e5])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_float32_gamma_of_a_float16_norm_is_not_rounded(first: float) -> None:
    """float16 has eleven bits of 0.1 and ends before 1e5: with such a gamma the norm is one in float32, between
    Casts."""
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float16[N, 8] x) => (float16[N, 8] y)
        <int64[1] last = {{-1}}, float eps = {{0.001}}, float[8] gamma = {{{first}, 1, 1, 1, 1, 1, 1, 1}}> {{
            h = Cast<to = 1>(x) m = ReduceMean(h, last) d = Sub(h, m) q = Mul(d, d) v = ReduceMean(q, last)
            e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, gamma) y = Cast<to = 10>(s)
        }}""")
    out, _ = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Cast", "LayerNormalization", "Cast"]
    held = {t.name: onnx.numpy_helper.to_array(t) for t in out.graph.initializer}
    np.testing.assert_array_equal(held[out.graph.node[1].input[1]], np.array([first, 1, 1, 1, 1, 1, 1, 1], np.float32))


@pytest.mark.parametrize("names", [["N"], ["N", "M"], ["N", "M", "K", "L"]])
def test_sizes_that_are_tried_first(names: list[str]) -> None:
    """x̂ of two elements is ±1, whatever they are, and axes of one size may be swapped unseen."""
    first, second, *_ = size_assignments(names)
    assert all(size > 2 for tried in (first, second) for size in tried.values())
    assert all(len(set(tried.values())) == len(names) for tried in (first, second))
    assert first != second
