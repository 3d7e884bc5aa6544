"""Functions of a file that bear the name of an op: nobody may take such a node for the op, and the file keeps the
name."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from normdeploy.contrib.name_clashes import rename_clashing_functions
from normdeploy.engines.norm_implementations import implement_norms
from normdeploy.errors import GraphError
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.own_op_functions import own_op_body as our_body
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.verbs.inspect.norm_census import take_census

HELD = "float[8] g = {1,2,3,4,5,6,7,8}, float[8] s = {1,0,-1,2,0,1,3,1}, float eps = {1e-5}"
MEAN = "u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) e = Add(v, eps)"
BY_HAND = f"{MEAN} r = Sqrt(e) n = Div(d, r) m = Mul(n, g) y = Add(m, s)"
NEGATIVE = "{ b = Neg(a) }"
BRANCHES = "then_branch = t () => (i) {{ i = {call} }}, else_branch = e () => (j) {{ j = Neg(x) }}"


def file(body: str, domain: str, function: str, more: str = "", opset: int = 17) -> onnx.ModelProto:
    """A net of x [N, 8], and one function of the file, of that domain; ``more``: others."""
    imports = f'"" : {opset}' + (f', "{domain}" : 1' if domain not in ("", "ai.onnx", "own") else "") + ', "own" : 1'
    return parser.parse_model(
        f"<ir_version: 10, opset_import: [{imports}]> net (float[N,8] x, bool c) => (float[N,8] y) <{HELD}> {{"
        f" {body} }}"
        f' <domain: "{domain}", opset_import: [{imports}]> {function} {more}'
    )


def ran(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x, "c": np.array(True)})[0])


def untouched(proto: onnx.ModelProto) -> None:
    """Nothing is recognised, and each call and each function stands as it stood."""
    for fuse in ("standard", "portable"):
        out, summary = optimize_norms(proto, fuse=fuse)
        assert [f.status for f in summary.findings if f.status in ("fused", "folded", "kept")] == []
        assert out.graph.node == proto.graph.node
        assert out.functions == proto.functions
    assert not any(f.status in ("fused", "folded", "kept") for f in take_census(proto).findings)


CALLS = {
    "com.microsoft": ("com.microsoft", "SimplifiedLayerNormalization", "(x, g)", "(a, w)"),
    "com.microsoft, with skip": ("com.microsoft", "SkipLayerNormalization", "(x, x, g, s)", "(a, o, w, h)"),
    "standard": ("", "LayerNormalization", "(x, g, s)", "(a, w, h)"),
    "standard, by its other name": ("ai.onnx", "LayerNormalization", "(x, g, s)", "(a, w, h)"),
    "of a later opset": ("", "RMSNormalization", "(x, g)", "(a, w)"),
    "a standard name elsewhere": ("own", "LayerNormalization", "(x, g, s)", "(a, w, h)"),
    "a plugin's name": ("own", "LayerNorm", "(x, g, s)", "(a, w, h)"),
    "one of ours elsewhere": ("own", "RMSNorm", "(x, g)", "(a, w)"),
}


@pytest.mark.parametrize("where", ["main graph", "branch", "function"])
@pytest.mark.parametrize("what", CALLS)
def test_a_function_is_not_taken_for_the_op_of_its_name(what: str, where: str) -> None:
    domain, name, given, taken = CALLS[what]
    call = f"{domain}.{name}" if domain else name
    function = f"{name} {taken} => (b) {NEGATIVE}"
    if where == "branch":
        proto = file(f"y = If(c) <{BRANCHES.format(call=call + given)}>", domain, function)
    elif where == "function":
        imports = f'"" : 17, "own" : 1, "{domain or "unused"}" : 1' if domain != "own" else '"" : 17, "own" : 1'
        outer = f'<domain: "own", opset_import: [{imports}]> outer (x, g, s) => (k) {{ k = {call}{given} }}'
        proto = file("y = own.outer(x, g, s)", domain, function, outer)
    else:
        proto = file(f"y = {call}{given}", domain, function)
    if domain == "ai.onnx":  # the parser's nodes of it
        proto.opset_import.add(domain="ai.onnx", version=17)
    untouched(proto)


def test_what_such_a_function_computes_is_what_its_body_says() -> None:
    """Both judges take the body, and took another function's numbers for it."""
    proto = file(
        "y = com.microsoft.SimplifiedLayerNormalization(x, g)",
        "com.microsoft",
        f"SimplifiedLayerNormalization (a, w) => (b) {NEGATIVE}",
    )
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    out, _ = optimize_norms(proto)
    for y in (ran(proto, x), ran(out, x), ReferenceEvaluator(out).run(None, {"x": x, "c": np.array(True)})[0]):
        np.testing.assert_array_equal(y, -x)


@pytest.mark.parametrize("op", ["Sqrt", "ReduceMean", "Add", "Mul", "Div"])
def test_a_norm_by_hand_with_such_a_node_in_it_is_none(op: str) -> None:
    two = op in ("Add", "Mul", "Div")
    untouched(
        file(
            BY_HAND, "", f"{op} {'(a, w)' if two else '<axes> (a)' if op == 'ReduceMean' else '(a)'} => (b) {NEGATIVE}"
        )
    )


def test_no_node_is_written_that_such_a_function_would_take_for_its_call() -> None:
    proto = file(
        f"{BY_HAND.replace('y =', 'k =')} y = LayerNormalization(k, g, s)",
        "",
        f"LayerNormalization (a, w, h) => (b) {NEGATIVE}",
    )
    out, summary = optimize_norms(proto)
    assert out.graph.node == proto.graph.node
    (finding,) = summary.findings
    assert (finding.status, finding.became) == ("refused", "")
    assert "the file has a function named 'LayerNormalization'" in finding.reason


@pytest.mark.parametrize(("domain", "opset"), [("own", 23), ("", 21)])
def test_the_opset_is_not_raised_over_such_a_function(domain: str, opset: int) -> None:
    """RotaryEmbedding is none of opset 21's: at 23, which RMSNormalization needs, the function's name would be that of
    an op."""
    call = "own.RotaryEmbedding" if domain else "RotaryEmbedding"
    body = (
        "last = Constant<value_ints=[-1]>() q = Mul(x, x) v = ReduceMean(q, last) e = Add(v, eps) r = Sqrt(e) n ="
        f" Div(x, r) y = {call}(n)"
    )
    out, summary = optimize_norms(file(body, domain, f"RotaryEmbedding (a) => (b) {NEGATIVE}", opset=21))
    assert out.opset_import[0].version == opset
    assert [f.status for f in summary.findings] == ["fused" if domain else "refused"]


def test_a_norm_beside_such_a_function_and_one_in_it_are_fused_all_the_same() -> None:
    inner = BY_HAND.replace("eps", "o").replace("(x", "(a").replace(", g)", ", w)").replace(", s)", ", h)")
    function = f"SimplifiedLayerNormalization (a, w, h) => (y) {{ o = Constant<value = float {{1e-5}}>() {inner} }}"
    call = "y = com.microsoft.SimplifiedLayerNormalization(k, g, s)"
    proto = file(f"{BY_HAND.replace('y =', 'k =')} {call}", "com.microsoft", function)
    out, summary = optimize_norms(proto)
    assert [(f.status, f.place.partition(" ")[0]) for f in summary.findings] == [("fused", ""), ("fused", "function")]
    assert [n.op_type for n in out.graph.node] == ["LayerNormalization", "SimplifiedLayerNormalization"]
    assert [f.name for f in out.functions] == ["SimplifiedLayerNormalization"]
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    # two norms with a gain of 8 each: some twenty roundings of numbers up to 8 · sqrt(8) + 3
    np.testing.assert_allclose(ran(out, x), ran(proto, x), rtol=0, atol=20 * 2.0**-24 * 26 * 8)


def test_an_overload_of_one_of_our_ops_is_not_ours() -> None:
    ours = our_body("RMSNorm", 17)
    proto = file("y = Neg(x)", "own", f"other (a) => (b) {NEGATIVE}")
    proto.opset_import.add(domain="normdeploy", version=1)
    node = onnx.helper.make_node(
        "RMSNorm", ["x", "g"], ["y"], domain="normdeploy", axes=[-1], epsilon=1e-5, stash_type=1
    )
    node.overload = "another"
    proto.graph.node[0].CopyFrom(node)
    function = onnx.FunctionProto()
    function.CopyFrom(ours)
    function.overload = "another"
    del function.node[:]
    function.node.append(onnx.helper.make_node("Neg", ["X"], ["Y"]))
    proto.functions.append(function)
    out, summary = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Neg"]
    assert not summary.findings


def test_a_call_keeps_no_shape_because_of_its_name() -> None:
    """A node of an unknown domain called Relu may make anything of its input."""
    text = (
        """<ir_version: 8, opset_import: ["": 17, "own": 1]> net (float[N,8] x) => (y) { z = own.Relu(x) y = Neg(z) }"""
    )
    graph = Graph(parser.parse_model(text))
    assert [graph.shape(t) for n in graph.nodes for t in n.outputs] == [None, None]


def test_the_names_come_back_unchanged() -> None:
    proto = file(
        "y = Sqrt(x)",
        "",
        f"Sqrt (a) => (b) {NEGATIVE}",
        f'<domain: "own", opset_import: ["" : 17]> Relu (a) => (b) {NEGATIVE}',
    )
    hidden, shadows = rename_clashing_functions(proto)
    assert {f.name for f in hidden.functions}.isdisjoint({"Sqrt", "Relu"})
    assert proto.graph.node[0].op_type == "Sqrt"
    assert shadows.restore_names(hidden) == proto


def test_half_precision_of_a_function_in_onnx_s_own_domain_is_refused() -> None:
    with pytest.raises(GraphError, match="a function named 'Sqrt' in ONNX's own domain"):
        convert_to_half(file("y = Sqrt(x)", "", f"Sqrt (a) => (b) {NEGATIVE}"), "fp16")


def test_a_builder_takes_no_such_function_for_a_norm() -> None:
    proto = file("y = LayerNormalization(x, g, s)", "", f"LayerNormalization (a, w, h) => (b) {NEGATIVE}")
    out, account = implement_norms(proto, norm_impl="native", runtime="tensorrt-rtx")
    assert account == ()
    assert [f.name for f in out.functions] == [out.graph.node[0].op_type] == ["LayerNormalization of the file"]
