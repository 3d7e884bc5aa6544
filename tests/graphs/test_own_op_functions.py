"""This project's own ops: their bodies are what the formulas say, they are written only on request, proved like any
node, and undone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, parser

from normdeploy.errors import GraphError
from normdeploy.evaluate import evaluator
from normdeploy.graphs import own_op_functions
from normdeploy.graphs.function_ops import attach_functions, is_own_function
from normdeploy.norms import function_bodies
from normdeploy.norms.norm_table import NormOp
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.runtimes.trt_runner import describe_missing_runtime
from normdeploy.verbs.build.build_function import build
from tests.norms.norm_formulas import norm_by_formula

CONSTANTS = (
    "float eps = {1e-5}, float[6] g = {1,2,3,4,5,6}, float[6] s = {1,0,-1,2,0,1}, float one = {1}, float much = {0.01}"
)
MEAN = "u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q)"
COUNT = (
    "sh = Shape(x) last = Gather(sh, minus) c = Cast<to: int = 1>(last) less = Sub(c, one) f = Div(c, less) w ="
    " Mul(v, f)"
)
DYNAMIC = "float eps = {1e-5}, float one = {1}, float three = {3}, int64 minus = {-1}"


def net(body: str, dims: str = "N,6", constants: str = CONSTANTS, opset: int = 17) -> onnx.ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}]> net (float[{dims}] x) => (float[{dims}] y) <{constants}> {{'
        f" {body} }}"
    )
    onnx.checker.check_model(proto, full_check=True)
    return proto


RMS = "q = Mul(x, x) v = ReduceMean<axes=[-1]>(q) e = Add(v, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)"
STD = "r = Sqrt(v) e = Add(r, eps) n = Div(d, e) m = Mul(n, g) y = Add(m, s)"
UNBIASED_STD = "w = Mul(v, factor) r = Sqrt(w) e = Add(r, eps) y = Div(d, e)"
NETS = {
    "std + eps": net(f"{MEAN} {STD}"),
    "std + eps, over n − 1, dynamic": net(f"{MEAN} {COUNT} r = Sqrt(w) e = Add(r, eps) y = Div(d, e)", "N,L", DYNAMIC),
    "over n − 1, dynamic": net(
        f"{MEAN} {COUNT} e = Add(w, eps) r = Sqrt(e) n = Div(d, r) y = Mul(n, three)", "N,L", DYNAMIC
    ),
    "rms": net(RMS),
    "std + eps over the first axis": net(MEAN.replace("-1", "0") + f" {STD}", "5,6"),
}
OPS = {
    "std + eps": "StdNorm",
    "std + eps, over n − 1, dynamic": "StdNorm",
    "over n − 1, dynamic": "LayerNorm",
    "rms": "RMSNorm",
    "std + eps over the first axis": "StdNorm",
}


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )[0]


def agree(a: onnx.ModelProto, b: onnx.ModelProto) -> None:
    for size in ((5, 6), (5, 9)) if a.graph.input[0].type.tensor_type.shape.dim[1].dim_param else ((5, 6),):
        x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        # some ten roundings of float32 in numbers up to 6 · sqrt(n)
        np.testing.assert_allclose(run(a, x), run(b, x), rtol=0, atol=10 * 2.0**-24 * 6 * size[1] ** 0.5)


def own(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node if n.domain == own_op_functions.DOMAIN]


def bytes_of(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", NETS)
def test_portable_is_one_node_with_a_body(name: str) -> None:
    proto = NETS[name]
    out, summary = optimize_norms(proto, fuse="portable")
    onnx.checker.check_model(out, full_check=True)
    assert own(out) == [OPS[name]]
    assert {n.op_type for n in out.graph.node} <= {OPS[name], "Transpose", "Mul", "Add"}
    assert [f.name for f in out.functions] == [OPS[name]]
    (finding,) = summary.findings
    assert finding.status == "fused"
    assert finding.certificate
    assert finding.proved == ("identity", "onnxruntime run")
    assert finding.became.startswith(f"normdeploy.{OPS[name]}(")
    assert "epsilon=1e-05" in finding.became  # as its author wrote it
    agree(proto, out)
    again, kept = optimize_norms(out, fuse="portable")
    assert bytes_of(again) == bytes_of(out)
    assert [(f.status, f.epsilon) for f in kept.findings] == [("kept", pytest.approx(1e-5))]


@pytest.mark.parametrize("name", NETS)
def test_standard_has_no_node_of_ours_and_says_what_portable_would_do(name: str) -> None:
    out, summary = optimize_norms(NETS[name])
    assert own(out) == []
    assert not out.functions
    assert own_op_functions.DOMAIN not in {o.domain for o in out.opset_import}
    (finding,) = summary.findings
    if name == "rms":
        assert finding.became == "RMSNormalization(axis=-1, epsilon=1e-05)"
    else:
        assert finding.status == "refused"
        assert finding.reason.endswith(f"; --fuse portable writes it as normdeploy.{OPS[name]}")


@pytest.mark.parametrize("name", NETS)
def test_the_way_back(name: str) -> None:
    portable, _ = optimize_norms(NETS[name], fuse="portable")
    out, summary = optimize_norms(portable)
    onnx.checker.check_model(out, full_check=True)
    assert own(out) == []
    assert not out.functions
    agree(NETS[name], out)
    if name == "rms":
        assert [n.op_type for n in out.graph.node] == ["RMSNormalization"]
    else:
        assert all(f.status == "refused" for f in summary.findings)


def test_from_opset_23_on_rms_norm_is_standard() -> None:
    body = "q = Mul(x, x) v = ReduceMean(q, axes) e = Add(v, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, g)"
    proto = net(body, constants=CONSTANTS + ", int64[1] axes = {-1}", opset=23)
    out, _ = optimize_norms(proto, fuse="portable")
    assert [(n.domain, n.op_type) for n in out.graph.node] == [("", "RMSNormalization")]


def test_a_file_is_raised_no_further_than_the_body_needs() -> None:
    out, summary = optimize_norms(net(RMS, opset=13), fuse="portable")
    assert summary.opset == own_op_functions.OLDEST
    assert own(out) == ["RMSNorm"]
    agree(net(RMS, opset=13), out)


@pytest.mark.parametrize("fuse", ["standard", "portable"])
def test_a_function_that_only_bears_our_name_means_what_it_says(fuse: str) -> None:
    proto = parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "normdeploy" : 1]> net (float[N,6] x) => (float[N,6] y) <float[6] g =
        {1,2,3,4,5,6}> {
            y = normdeploy.RMSNorm<axes: ints = [-1], epsilon: float = 1e-5, stash_type: int = 1>(x, g) }
        <opset_import: ["" : 18], domain: "normdeploy">
        RMSNorm <axes, epsilon, stash_type> (X, scale) => (Y) { Y = Sub(X, scale) }"""
    )
    out, summary = optimize_norms(proto, fuse=fuse)
    assert [n.op_type for n in out.graph.node] == ["Sub"]
    assert summary.findings == ()
    agree(proto, out)


@pytest.mark.parametrize("opset", [17, 18, 21, 23, 25])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("op", ["LayerNorm", "RMSNorm", "StdNorm"])
def test_bodies_compute_their_formulas(op: str, dtype: type, opset: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 5, 7)).astype(dtype)
    x[1] += 10
    scale, bias = rng.standard_normal((2, 5, 7)).astype(dtype)
    attrs = {"axes": [-2, -1], "epsilon": 0.25, "stash_type": 11 if dtype is np.float64 else 1} | (
        {} if op[0] == "R" else {"ddof": 1}
    )
    inputs = {"x": x, "scale": scale} | ({} if op[0] == "R" else {"bias": bias})
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y"], domain=own_op_functions.DOMAIN, **attrs)],
        "one",
        [helper.make_tensor_value_info(k, kind, v.shape) for k, v in inputs.items()],
        [helper.make_tensor_value_info("y", kind, x.shape)],
    )
    model = attach_functions(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), opset
    )
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    (got,) = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, inputs
    )
    given = {k: attrs[k] for k in ("axes", "epsilon", "ddof") if k in attrs}
    want = norm_by_formula(op, x, scale, 0.0 if op[0] == "R" else bias, **given)
    # statistics of numbers around 10 in float32 (float64), then three roundings of the narrow type in numbers up to
    # |want|
    stash, narrow = 2.0**-53 if dtype is np.float64 else 2.0**-24, np.finfo(dtype).eps / 2
    bound = 16 * stash * 11 * np.abs(scale.astype(np.float64)).max() + 3 * narrow * (
        np.abs(want).max() + np.abs(bias.astype(np.float64)).max()
    )
    assert got.dtype == dtype
    assert np.abs(got - want).max() <= bound
    wide = [v.astype(np.float64) for v in inputs.values()]
    (evaluated,) = evaluator.evaluate_node(op, wide, attrs, opset=opset, domain=own_op_functions.DOMAIN)
    assert evaluated is not None
    np.testing.assert_allclose(evaluated, want, rtol=1e-12, atol=1e-12)


def test_a_row_of_one_element_has_no_unbiased_variance() -> None:
    with evaluator.silence_numpy():
        (evaluated,) = evaluator.evaluate_node(
            "LayerNorm",
            [np.ones((2, 1)), np.ones(1), np.zeros(1)],
            {"axes": [-1], "epsilon": 1e-5, "ddof": 1, "stash_type": 1},
            opset=18,
            domain=own_op_functions.DOMAIN,
        )
    assert np.isnan(evaluated).all()  # as torch.var gives


def test_a_body_with_another_epsilon_fails_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = function_bodies.norm_function_body

    def wrong(row: NormOp, opset: int) -> onnx.FunctionProto:
        changed = onnx.FunctionProto()
        changed.CopyFrom(real(row, opset))
        for node in changed.node:
            if node.output[0] == "small":
                node.op_type = "Neg"
                del node.attribute[:]
        return changed

    monkeypatch.setattr(function_bodies, "norm_function_body", wrong)
    _, summary = optimize_norms(NETS["std + eps"], fuse="portable")
    assert [f.status for f in summary.findings] == ["undone"]


def test_two_norms_share_one_function() -> None:
    proto = net(
        f"{MEAN} r = Sqrt(v) e = Add(r, eps) n = Div(d, e) z = Relu(n) u2 = ReduceMean<axes=[-1]>(z) d2 = Sub(z, u2) q2"
        " = Mul(d2, d2) v2 = ReduceMean<axes=[-1]>(q2) r2 = Sqrt(v2) e2 = Add(r2, much) y = Div(d2, e2)"
    )
    out, summary = optimize_norms(proto, fuse="portable")
    assert own(out) == ["StdNorm"] * 2
    assert len(out.functions) == 1
    assert sorted(f.epsilon or 0.0 for f in summary.findings) == pytest.approx([1e-5, 0.01])
    agree(proto, out)


CALL = "normdeploy.RMSNorm<axes: ints = [-1], {}stash_type: int = 1>(x, g)"
EPSILON = "epsilon: float = 0.5, "


def calling(body: str, *held: onnx.FunctionProto, opset: int = 18) -> onnx.ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}, "normdeploy" : 1, "custom" : 1]> net (float[N,6] x) =>'
        f" (float[N,6] y) <float[6] g = {{1,2,3,4,5,6}}> {{ {body} }}"
    )
    proto.functions.extend(held)
    return proto


def by_default() -> onnx.FunctionProto:
    """RMSNorm with an epsilon that calls may leave out."""
    function = onnx.FunctionProto()
    function.CopyFrom(own_op_functions.own_op_body("RMSNorm", 18))
    function.attribute.remove("epsilon")
    function.attribute_proto.append(helper.make_attribute("epsilon", 0.5))
    return function


def caller(body: str, imports: str = '"" : 18, "normdeploy" : 1') -> onnx.FunctionProto:
    return parser.parse_function(f'<opset_import: [{imports}], domain: "custom"> Mine (x, g) => (y) {{ {body} }}')


@pytest.mark.parametrize("fuse", ["standard", "portable"])
@pytest.mark.parametrize(
    "proto",
    [
        calling(f"y = {CALL.format(EPSILON)}", own_op_functions.own_op_body("RMSNorm", 18)),
        calling(f"y = {CALL.format('')}", by_default()),
        calling(
            "y = custom.Mine(x, g)",
            caller(f"z = {CALL.format(EPSILON)} y = Relu(z)"),
            own_op_functions.own_op_body("RMSNorm", 18),
        ),
        calling(
            "y = custom.Mine(x, g)",
            caller(
                "u = ReduceMean<axes: ints = [-1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes: ints = [-1]>(q)"
                " r = Sqrt(v) eps = Constant<value_float: float = 0.5>() e = Add(r, eps) n = Div(d, e) y = Mul(n, g)",
                '"" : 17',
            ),
            opset=17,
        ),
    ],
    ids=["ours", "a default for epsilon", "ours in a function", "std + eps in a function"],
)
def test_files_that_hold_functions(proto: onnx.ModelProto, fuse: str) -> None:
    onnx.checker.check_model(proto, full_check=True)
    out, _ = optimize_norms(proto, fuse=fuse)
    onnx.checker.check_model(out, full_check=True)
    agree(proto, out)
    assert bytes_of(optimize_norms(out, fuse=fuse)[0]) == bytes_of(out)
    own_ops = {
        n.op_type
        for nodes in (out.graph.node, *(f.node for f in out.functions))
        for n in nodes
        if n.domain == own_op_functions.DOMAIN
    }
    assert own_ops == {f.name for f in out.functions if f.domain == own_op_functions.DOMAIN}
    assert bool(own_ops) == (fuse == "portable")


def test_our_op_without_its_function_gets_it() -> None:
    whole = calling(f"y = {CALL.format(EPSILON)}", own_op_functions.own_op_body("RMSNorm", 18))
    bare = calling(f"y = {CALL.format(EPSILON)}")
    for fuse in ("standard", "portable"):
        out, _ = optimize_norms(bare, fuse=fuse)
        agree(whole, out)
        assert own(out) == ([] if fuse == "standard" else ["RMSNorm"])


@pytest.mark.parametrize(
    "body",
    [
        f"y = {CALL.format('')}",
        *(
            "y = normdeploy.OldLayerNorm<epsilon: float = 1e-5>(x, g)",
            "y = normdeploy.AddLayerNorm<epsilon: float = 1e-5>(x, g)",
        ),
        *(
            "y = normdeploy.AddLayerNorm(x, x, g, g)",
            "y = normdeploy.AddLayerNorm<epsilon: float = 1e-5, stash_type: int = 1>(x, x, g)",
        ),
    ],
)
@pytest.mark.parametrize("fuse", ["standard", "portable"])
def test_what_only_bears_our_domain_is_left_alone(body: str, fuse: str) -> None:
    proto = calling(body)
    out, summary = optimize_norms(proto, fuse=fuse)
    assert list(out.graph.node) == list(proto.graph.node)
    assert not out.functions
    assert [f.status for f in summary.findings] == ["refused"]


def test_a_call_without_an_attribute_is_no_valid_file() -> None:
    with pytest.raises(GraphError, match=r"normdeploy\.RMSNorm\) lacks the attribute 'epsilon'"):
        optimize_norms(calling(f"y = {CALL.format('')}", own_op_functions.own_op_body("RMSNorm", 18)))


def test_written_out_functions_keep_what_the_file_says() -> None:
    proto = calling(f"y = {CALL.format(EPSILON)}", own_op_functions.own_op_body("RMSNorm", 18))
    proto.metadata_props.add(key="made", value="here")
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.3.norm', 'rms']")
    out, summary = optimize_norms(proto)
    assert [(p.key, p.value) for p in out.metadata_props] == [("made", "here")]
    assert [f.module for f in summary.findings] == ["layers.3.norm"]
    assert onnx.numpy_helper.to_array(out.graph.initializer[0]).tolist() == [1, 2, 3, 4, 5, 6]


def test_an_old_file_gets_the_ir_version_of_functions() -> None:
    proto = net(RMS)
    proto.ir_version = 7
    assert optimize_norms(proto, fuse="portable")[0].ir_version == 8


def test_of_a_static_size_std_is_as_its_author_wrote_it() -> None:
    """torch writes x.std() as a variance times 6/5: epsilon and n − 1 are the author's, not 1e-5·sqrt(5/6) over n."""
    proto = net(f"{MEAN} {UNBIASED_STD}", constants=f"{CONSTANTS}, float factor = {{1.2}}")
    _, summary = optimize_norms(proto, fuse="portable")
    assert [f.became for f in summary.findings] == ["normdeploy.StdNorm(axes=[-1], epsilon=1e-05, ddof=1)"]
    assert (
        optimize_norms(proto)[1]
        .findings[0]
        .reason.startswith("epsilon (1e-05) is added to the standard deviation, outside the root")
    )


def test_groups_of_dynamic_size_are_normalized_between_their_views() -> None:
    body = (
        "v = Reshape(x, grouped) u = ReduceMean<axes=[-1]>(v) d = Sub(v, u) q = Mul(d, d) b = ReduceMean<axes=[-1]>(q)"
        " sh = Shape(v) last = Gather(sh, minus) c = Cast<to: int = 1>(last) less = Sub(c, one) f = Div(c, less) w ="
        " Mul(b, f) e = Add(w, eps) r = Sqrt(e) n = Div(d, r) back = Shape(x) y = Reshape(n, back)"
    )
    out, _ = optimize_norms(net(body, "2,4,N", f"{DYNAMIC}, int64[3] grouped = {{0, 2, -1}}"), fuse="portable")
    assert own(out) == ["LayerNorm"]


def test_onnxruntime_makes_one_kernel_of_rms_norm(tmp_path: Path) -> None:
    out, _ = optimize_norms(NETS["rms"], fuse="portable")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(out.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert "SimplifiedLayerNormalization" in {n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node}


def test_no_op_bears_a_standard_name() -> None:
    """TensorRT's parser goes by the name alone: of normdeploy.RMSNormalization it ignored axes and normalized the last
    one."""
    assert not [op for op in own_op_functions.OPS if onnx.defs.has(op)]


@pytest.mark.skipif(
    bool(describe_missing_runtime("tensorrt-rtx", gpu=False)),
    reason=str(describe_missing_runtime("tensorrt-rtx", gpu=False)),
)
@pytest.mark.parametrize("name", NETS)
def test_tensorrt_rtx_builds_the_bodies(name: str, tmp_path: Path) -> None:
    out, _ = optimize_norms(NETS[name], fuse="portable")
    onnx.save(out, tmp_path / "own.onnx")
    sizes = [d.dim_param or str(d.dim_value) for d in out.graph.input[0].type.tensor_type.shape.dim]
    low, best, high = ("x".join(s if s.isdigit() else n for s in sizes) for n in ("2", "6", "9"))
    engine = build(
        tmp_path / "own.onnx", tmp_path / "own.engine", profiles=[f"x={low}:{best}:{high}"] if low != high else ()
    )
    assert engine.layers >= len(out.functions[0].node)


@pytest.mark.parametrize("op", sorted(own_op_functions.OPS))
def test_a_function_is_ours_by_what_it_computes(op: str) -> None:
    """Other tools rename tensors, name nodes and write domains out."""
    written = onnx.FunctionProto()
    written.CopyFrom(own_op_functions.own_op_body(op, max(18, own_op_functions.oldest_opset(op))))
    written.doc_string = "written again"
    new = {name: f"{name}_" for node in written.node for name in node.output if name not in written.output} | {
        "X": "input"
    }
    for i, node in enumerate(written.node):
        node.name, node.domain = f"node_{i}", "ai.onnx" if i % 2 else ""
        node.input[:], node.output[:] = [new.get(t, t) for t in node.input], [new.get(t, t) for t in node.output]
    written.input[0] = "input"
    assert is_own_function(written)
    for i, node in enumerate(written.node):
        for place in range(len(node.input)):
            wrong = onnx.FunctionProto()
            wrong.CopyFrom(written)
            wrong.node[i].input[place] = "scale" if node.input[place] != "scale" else "input"
            assert not is_own_function(wrong)
        for attribute in node.attribute:
            wrong = onnx.FunctionProto()
            wrong.CopyFrom(written)
            next(a for a in wrong.node[i].attribute if a.name == attribute.name).ref_attr_name = "stash"
            assert not is_own_function(wrong)


def test_the_way_back_keeps_epsilon_as_its_author_wrote_it() -> None:
    proto = net(f"{MEAN} {UNBIASED_STD}", constants=f"{CONSTANTS}, float factor = {{1.2}}")
    back, _ = optimize_norms(optimize_norms(proto, fuse="portable")[0])
    assert (
        optimize_norms(back, fuse="portable")[1].findings[0].became
        == "normdeploy.StdNorm(axes=[-1], epsilon=1e-05, ddof=1)"
    )


def test_double_is_computed_in_double() -> None:
    constants = "double eps = {0.25}, double[6] g = {1,2,3,4,5,6}, double[6] s = {1,0,-1,2,0,1}"
    body = f"{MEAN} {STD}"
    proto = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> net (double[N,6] x) => (double[N,6] y) <{constants}> {{ {body} }}'
    )
    out, _ = optimize_norms(proto, fuse="portable")
    assert own(out) == ["StdNorm"]
    x = np.random.default_rng(0).standard_normal((5, 6))
    np.testing.assert_allclose(run(out, x), run(proto, x), rtol=0, atol=10 * 2.0**-53 * 6 * 6**0.5)


def test_a_functions_inputs_bear_no_name_that_a_call_gives() -> None:
    """TensorRT's parsers would bind X to x, and then look up what the residual's X is."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2,4] a, float[2,4] X, float[4] residual) => (float[2,4] y)
        { sum = Add (a, X) y = LayerNormalization <axis = -1> (sum, residual) }"""
    )
    scale = onnx.numpy_helper.from_array(np.ones(4, np.float32), "residual")
    proto.graph.initializer.append(scale)
    del proto.graph.input[2]
    out, _ = optimize_norms(proto, fuse="portable")
    (node,), (function,) = out.graph.node, out.functions
    assert node.op_type == "AddLayerNorm"
    assert not {*node.input} & {*function.input}
    assert next([*n.input[:2]] for n in function.node) == [*function.input[:2]]
    again, summary = optimize_norms(out, fuse="portable")  # the function is known, whatever its inputs are called
    assert again == out
    assert summary.findings[0].status == "kept"


def test_tensorrt_rtx_reads_the_inputs_of_a_function_as_they_are_given() -> None:
    """Its parser (1.7) makes a − a of F(a, X) where F's first input is X; ours are named so that it can't."""
    trt = pytest.importorskip("tensorrt_rtx")
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2,4] a, float[2,4] X) => (float[2,4] y)
        <float[4] w = {1, 2, 3, 4}> { sum = Add (a, X) y = LayerNormalization <axis = -1> (sum, w) }"""
    )
    out, _ = optimize_norms(proto, fuse="portable")
    builder = trt.Builder(logger := trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(out.SerializeToString())
    first = network.get_layer(0)
    assert [first.get_input(i).name for i in range(2)] == ["a", "X"]
