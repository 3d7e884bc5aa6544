"""Norms inside bodies of If, Loop and Scan, and inside model-local functions: fused like any other, and nothing around
them changed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from normdeploy.findings.records import Summary
from normdeploy.graphs import local_functions
from normdeploy.graphs.proto_queries import FunctionKey
from normdeploy.rewriting.norm_optimizer import optimize_norms

LAYER_NORM = """u = ReduceMean<axes=[-1]>(h) d = Sub(h, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q)
    e = Add(v, eps) r = Sqrt(e) n = Div(d, r) m = Mul(n, g) {out} = Add(m, s)"""
CONSTANTS = "float eps = {1e-5}, float[8] g = {1,2,3,4,5,6,7,8}, float[8] s = {1,1,2,2,3,3,4,4}"
HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
FUNCTIONS = '<ir_version: 9, opset_import: ["" : 17, "my" : 1]>'
EPSILON_GIVEN = f"""<opset_import: ["" : 17], domain: "my">
    norm <epsilon> (h, g, s) => (a) {{ eps = Constant<value_float: float = @epsilon>()
    {LAYER_NORM.format(out="a")} }}"""


def model(text: str, free: bool = False) -> onnx.ModelProto:
    """``free``: without the shapes that bodies state (the text form can't leave them out)."""
    proto = parser.parse_model(text)
    for node in proto.graph.node if free else ():
        for attribute in node.attribute:
            for value in (*attribute.g.input, *attribute.g.output):
                if (
                    value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
                ):  # onnxruntime wants the counter's and the condition's
                    value.type.tensor_type.ClearField("shape")
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 3, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


def checked(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Summary]:
    """The optimized model, after what holds for each: it is valid, gives the same numbers, and a second run changes
    nothing."""
    before = proto.SerializeToString(deterministic=True)
    out, summary = optimize_norms(proto)
    assert proto.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(out, full_check=True)
    assert optimize_norms(out)[0].SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    rng = np.random.default_rng(0)
    for rows in (3, 4):
        feeds = {
            "x": rng.standard_normal((rows, 8), dtype=np.float32),
            "z": rng.standard_normal((5, rows, 8), dtype=np.float32),
        }
        feeds |= {"c": np.array(rows == 3), "k": np.array(rows)}
        for a, b in zip(run(proto, **feeds), run(out, **feeds), strict=True):
            # float32 rounds some ten times in a norm of numbers up to 8 · sqrt(8) + 4; a Loop repeats it up to 4 times
            np.testing.assert_allclose(a, b, rtol=0, atol=40 * 2.0**-24 * 27)
    return out, summary


def places(summary: Summary) -> list[tuple[str, str, str]]:
    return [(f.kind, f.status, f.place) for f in summary.findings]


def ops(graph: onnx.GraphProto) -> list[str]:
    return [n.op_type for n in graph.node]


def test_a_norm_in_a_branch() -> None:
    out, summary = checked(
        model(f"""{HEAD} net (float[N,8] x, bool c) => (float[N,8] y) <{CONSTANTS}> {{
            h = Relu(x)
            y = If(c) <then_branch = t () => (float[N,8] a) {{ {LAYER_NORM.format(out="a")} }},
                       else_branch = e () => (b) {{ p = Exp(h) b = Abs(p) }}> }}""")
    )
    assert places(summary) == [("LayerNorm", "fused", "then_branch of If 'y'")]
    assert ops(next(a.g for a in out.graph.node[1].attribute if a.name == "then_branch")) == ["LayerNormalization"]
    assert {t.name for t in out.graph.initializer} == {"g", "s"}  # epsilon is an attribute now


@pytest.mark.parametrize("free", [False, True])
def test_a_norm_in_a_loop(free: bool) -> None:
    _, summary = checked(
        model(
            f"""{HEAD} net (float[N,8] x, int64 k, bool c) => (float[N,8] y) <{CONSTANTS}> {{
            t = Identity(c)
            y = Loop(k, , x) <body = b (int64 i, bool ci, float[N,8] h) => (bool co, float[N,8] a) {{
                co = Identity(ci) {LAYER_NORM.format(out="a")} }}> }}""",
            free,
        )
    )
    assert places(summary) == [("LayerNorm", "fused", "body of Loop 'y'")]


def test_what_a_loop_carries_may_grow() -> None:
    """Normalized over the axis that each iteration makes longer: no shape of it is known, none may be assumed."""
    out, summary = checked(
        model(
            f"""{HEAD} net (float[N,8] x, int64 k) => (float[N,M] y) <{CONSTANTS}> {{
            y = Loop(k, , x) <body = b (int64 i, bool ci, float[N,8] h0) => (bool co, float[N,M] a) {{
                co = Identity(ci) h = Concat<axis=-1>(h0, h0) u = ReduceMean<axes=[-1]>(h) d = Sub(h, u) q = Mul(d, d)
                v = ReduceMean<axes=[-1]>(q) e = Add(v, eps) r = Sqrt(e) a = Div(d, r) }}> }}""",
            free=True,
        )
    )
    assert all(f.status == "refused" for f in summary.findings)
    assert "LayerNormalization" not in ops(out.graph.node[0].attribute[0].g)


def test_a_norm_in_a_scan() -> None:
    _, summary = checked(
        model(
            f"""{HEAD} net (float[N,8] x, float[5,N,8] z) => (float[N,8] y, float[5,N,8] o) <{CONSTANTS}> {{
            y, o = Scan(x, z) <num_scan_inputs: int = 1, body = b (float[N,8] st, float[N,8] zi)
            => (float[N,8] a, float[N,8] zo) {{
                h = Add(st, zi) {LAYER_NORM.format(out="a")} zo = Identity(a) }}> }}""",
            free=True,
        )
    )
    assert places(summary) == [("LayerNorm", "fused", "body of Scan 'y'")]


def test_a_body_in_a_body() -> None:
    _, summary = checked(
        model(f"""{HEAD} net (float[N,8] x, int64 k, bool c) => (float[N,8] y) <{CONSTANTS}> {{
            y = Loop(k, , x) <body = b (int64 i, bool ci, float[N,8] h) => (bool co, float[N,8] w) {{ co = Identity(ci)
                w = If(c) <then_branch = t () => (float[N,8] a) {{ {LAYER_NORM.format(out="a")} }},
                           else_branch = f () => (float[N,8] o) {{ o = Tanh(h) }}> }}> }}""")
    )
    assert places(summary) == [("LayerNorm", "fused", "body of Loop 'y', then_branch of If 'w'")]


def test_a_batch_norm_in_a_branch_is_folded_into_a_copy_of_an_outer_weight() -> None:
    out, summary = checked(
        model(
            f"""{HEAD} net (float[N,8] x, bool c) => (float[N,2,1] y) <{CONSTANTS}, float[2,8,1] w =
            {{{", ".join("1234567812345678")}}},
            float[2] a = {{1,2}}, float[2] p = {{2,1}}, float[1] ax = {{2}}, int64[1] last = {{2}}> {{
            h = Unsqueeze(x, last)
            o = Conv(h, w)
            y = If(c) <then_branch = t () => (float[N,2,1] b) {{ q = Conv(h, w)
            b = BatchNormalization(q, a, p, a, p) }},
                       else_branch = e () => (float[N,2,1] b2) {{ b2 = Identity(o) }}> }}"""
        )
    )
    assert places(summary) == [("BatchNorm", "folded", "then_branch of If 'y'")]
    assert {t.name: onnx.numpy_helper.to_array(t).ravel().tolist() for t in out.graph.initializer}["w"] == [
        float(i) for i in "1234567812345678"
    ]


def test_a_constant_that_a_caller_may_replace_is_none_inside_a_body_either() -> None:
    proto = model(f"""{HEAD} net (float[N,8] x, bool c) => (float[N,8] y) <{CONSTANTS}> {{
        h = Relu(x)
        y = If(c) <then_branch = t () => (float[N,8] a) {{ {LAYER_NORM.format(out="a")} }}, else_branch = e () => (b) {{
            b = Abs(h) }}> }}""")
    proto.graph.input.append(onnx.helper.make_tensor_value_info("eps", onnx.TensorProto.FLOAT, []))
    _, summary = checked_with(proto, eps=np.float32(3.0))
    assert [f.status for f in summary.findings] == ["refused"]


def checked_with(proto: onnx.ModelProto, **more: np.ndarray) -> tuple[onnx.ModelProto, Summary]:
    out, summary = optimize_norms(proto)
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    feeds = {"x": x, "c": np.array(True), **{k: np.asarray(v) for k, v in more.items()}}
    for a, b in zip(run(proto, **feeds), run(out, **feeds), strict=True):
        np.testing.assert_array_equal(a, b)
    return out, summary


def test_a_function_of_two_callers() -> None:
    out, summary = checked(
        model(
            f"""{FUNCTIONS} net (float[N,8] x) => (float[N,8] y, float[M,8] w)
            <float[8] g = {{1,2,3,4,5,6,7,8}}, float[8] s = {{1,1,2,2,3,3,4,4}}> {{
            y = my.norm<epsilon=1e-5>(x, g, s) f = Concat<axis=0>(x, x)
            w = my.norm<epsilon=1e-5>(f, s, g) }} {EPSILON_GIVEN}"""
        )
    )
    assert places(summary) == [("LayerNorm", "fused", "function my.norm")]
    assert [n.op_type for n in out.functions[0].node] == ["LayerNormalization"]


@pytest.mark.parametrize(
    ("second", "dims"),
    [
        ("my.norm<epsilon=1e-3>(x, g, s)", "N,8"),
        ("my.norm<epsilon=1e-5>(x3, g, s)", "1,N,8"),
        (
            (
                "If(c) <then_branch = t () => (float[N,8] i) { i = my.norm<epsilon=1e-5>(x, g, s) }, "
                "else_branch = e () => (float[N,8] j) { j = Neg(x) }>"
            ),
            "N,8",
        ),
    ],
    ids=["another epsilon", "another rank", "a caller in a body"],
)
def test_a_function_whose_callers_differ_is_left_alone(second: str, dims: str) -> None:
    out, summary = checked(
        model(f"""{FUNCTIONS} net (float[N,8] x, bool c) => (float[N,8] y, float[{dims}] w)
            <float[8] g = {{1,2,3,4,5,6,7,8}}, float[8] s = {{1,1,2,2,3,3,4,4}}, int64[1] zero = {{0}}> {{
            x3 = Unsqueeze(x, zero) y = my.norm<epsilon=1e-5>(x, g, s) w = {second} }} {EPSILON_GIVEN}""")
    )
    (finding,) = summary.findings
    assert (finding.status, finding.tensor, finding.place) == ("refused", "r", "function my.norm")
    assert "can't be inlined: " in finding.reason
    assert "LayerNormalization" not in [n.op_type for n in out.functions[0].node]


def test_norms_in_a_function_of_unknown_types_are_told() -> None:
    """A root over a reduction, a norm node, one of onnxruntime's own, one in a body: nothing is left alone without a
    word."""
    branches = """then_branch = t () => (p) { p = LayerNormalization(k, g) },
        else_branch = e () => (o) { i = ReduceL2<axes=[-1], keepdims=1>(k) o = Div(k, i) }"""
    proto = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 17, "my" : 1]> net (float[N,8] x) => (float[N,8] y) <{CONSTANTS}> {{
        y = my.norm(x, eps, g, s) }}
        <opset_import: ["" : 17, "com.microsoft" : 1], domain: "my"> norm (h, eps, g, s) => (b) {{
            {LAYER_NORM.format(out="a")} k = com.microsoft.LayerNormalization(a, g, s)
            c = Constant<value = bool {{1}}>()
            b = If(c) <{branches}> }}"""
    )
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    out, summary = optimize_norms(proto)
    assert out.functions == proto.functions
    told = {(f.tensor, f.status, f.place.partition(", ")[2]) for f in summary.findings}
    within = ("then_branch of If 'b'", "else_branch of If 'b'")
    assert told == {("r", "refused", ""), ("k", "refused", ""), ("p", "kept", within[0]), ("i", "refused", within[1])}
    assert all("the type or rank of its input 'h' is unknown in a call" in f.reason for f in summary.findings)


def test_a_function_that_nobody_calls_is_not_told() -> None:
    proto = parser.parse_model(f"{FUNCTIONS} net (float[N,8] x) => (float[N,8] y) {{ y = Relu(x) }} {EPSILON_GIVEN}")
    assert optimize_norms(proto)[1].findings == ()


def test_a_function_in_a_function() -> None:
    out, summary = checked(
        model(
            f"""{FUNCTIONS} net (float[N,8] x) => (float[N,8] y) <float[8] g = {{1,2,3,4,5,6,7,8}}, float[8] s =
            {{1,1,2,2,3,3,4,4}}> {{
            y = my.block(x, g, s) }}
            <opset_import: ["" : 17, "my" : 1], domain: "my"> block (h, g, s) => (b) {{ t = Relu(h)
            b = my.norm<epsilon=1e-5>(t, g, s) }}
            {EPSILON_GIVEN}"""
        )
    )
    assert places(summary) == [("LayerNorm", "fused", "function my.norm")]
    assert sorted(n.op_type for f in out.functions for n in f.node) == ["LayerNormalization", "Relu", "norm"]


def test_what_follows_a_tensor_that_grows_has_no_known_shape_either() -> None:
    """In the first round p has 8 columns, then as many as h had in the round before: a sum over them divided by 8 is no
    mean."""
    out, _ = checked(
        model(
            f"""{HEAD} net (float[N,8] x, int64 k) => (float[N,M] z, float[N,L] y)
            <{CONSTANTS}, float eighth = {{0.125}}, int64[1] last = {{-1}}> {{
            z, y = Loop(k, , x, x) <body = b (int64 i, bool ci, float[N,8] h, float[N,8] p)
            => (bool co, float[N,M] h1, float[N,L] p1) {{
                co = Identity(ci) h1 = Concat<axis=-1>(h, h) t = ReduceSum(p, last) u = Mul(t, eighth) d = Sub(p, u)
                q = Mul(d, d)
                w = ReduceSum(q, last) v = Mul(w, eighth) e = Add(v, eps) r = Sqrt(e) n = Div(d, r)
                o = ReduceMax<axes=[-1]>(n)
                p1 = Add(h, o) }}> }}""",
            free=True,
        )
    )
    assert "LayerNormalization" not in ops(out.graph.node[0].attribute[0].g)


def test_a_scan_along_an_axis_that_is_counted_from_the_end() -> None:
    """The slices have two axes; a norm over the second of three would be another one."""
    norm = LAYER_NORM.format(out="zo").replace("axes=[-1]", "axes=[1]")
    _, summary = checked(
        model(
            f"""{HEAD} net (float[N,8] x, float[5,N,8] z) => (float[N,8] y, float[5,N,8] o) <{CONSTANTS}> {{
            y, o = Scan(x, z) <num_scan_inputs: int = 1, scan_input_axes = [-3],
                body = b (float[N,8] st, float[N,8] zi) => (float[N,8] a, float[N,8] zo) {{ a = Relu(st)
                h = Relu(zi) {norm} }}> }}""",
            free=True,
        )
    )
    assert places(summary) == [("LayerNorm", "fused", "body of Scan 'y'")]


def test_functions_each_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of all functions for each of them takes a time that is the square of their number."""
    count = 40
    calls = " ".join(f"v{i + 1} = own.F{i} (v{i})" for i in range(count))
    bodies = "\n".join(
        f'<domain: "own", opset_import: ["": 17]> F{i} (a) => (b) {{ b = Neg (a) }}' for i in range(count)
    )
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "own": 1]> net (float[2] v0) => (float[2] v{count}) {{ {calls} }}'
        f"\n{bodies}"
    )
    made = []
    right = local_functions.functions_by_key

    def counted(proto: onnx.ModelProto) -> dict[FunctionKey, onnx.FunctionProto]:
        made.append(len(proto.functions))
        return right(proto)

    monkeypatch.setattr(local_functions, "functions_by_key", counted)
    assert len(list(local_functions.open_functions(model))) == count
    assert made == [count]
