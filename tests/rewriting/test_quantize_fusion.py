"""A norm and the QuantizeLinear behind it become one op whose body is these two nodes (``--fuse portable``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from normdeploy.engines import norm_implementations
from normdeploy.findings.records import Summary
from normdeploy.norms.norm_table import OURS
from normdeploy.rewriting import norm_optimizer, quantize_fusion

SHAPE = (2, 5, 24)
OF = {"int8": "int8", "fp8": "float8e4m3fn"}
RNG = np.random.default_rng(3)
GAMMA, BETA = RNG.standard_normal((2, 24)).astype(np.float32)
INPUTS = {name: RNG.standard_normal(SHAPE).astype(np.float32) for name in ("x", "r")}
RMS = """two = Constant <value_float: float = 2.0> () p = Pow (x, two) axes = Constant <value_ints: ints = [-1]> ()
    m = ReduceMean <keepdims: int = 1> (p, axes) e = Constant <value_float: float = 1e-5> () v = Add (m, e) d = Sqrt (v)
    n = Div (x, d) y = Mul (n, g)"""
LN = "LayerNormalization <axis: int = -1, epsilon: float = 1e-5>"
# op -> the norm's nodes, and the opset
NORMS = {
    "LayerNormQuantize": (f"y = {LN} (x, g, b)", 21),
    "RMSNormQuantize": (RMS, 21),
    "AddLayerNormQuantize": (f"s = Add (x, r) y = {LN} (s, g, b)", 21),
    "AddRMSNormQuantize": ("s = Add (x, r) " + RMS.replace("(x,", "(s,"), 21),
}


def model(norm: str, opset: int = 21, to: str = "int8", more: str = "", outputs: str = "", **q: str) -> onnx.ModelProto:
    """The norm, which makes y, and QuantizeLinear of it; ``q``: what stands in its place."""
    quantize = q.get("quantize", "q = QuantizeLinear (y, scale, zero)")
    scale, zero = q.get("scale", "float scale = {0.02}"), q.get("zero", f"{OF[to]} zero")
    text = f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[2,5,24] x, float[2,5,24] r) =>
        ({OF[to]}[2,5,24] q{outputs})
        <float[24] g = {{{", ".join(map(repr, map(float, GAMMA)))}}},
         float[24] b = {{{", ".join(map(repr, map(float, BETA)))}}}, {scale}>
        {{ {norm} {quantize} {more} }}"""
    made = onnx.parser.parse_model(text)
    kind, _, value = zero.partition("=")
    name, kinds = kind.split()[1], {"int8": 3, "uint8": 2, "float8e4m3fn": 17, "float8e5m2": 19}
    number = float(value.strip(" {}") or 0)
    if name in {i for n in made.graph.node for i in n.input}:
        made.graph.initializer.append(onnx.helper.make_tensor(name, kinds[kind.split()[0]], [], [number]))
    return made


def optimized(proto: onnx.ModelProto, **more: Any) -> tuple[list[str], onnx.ModelProto, Summary]:
    out, summary = norm_optimizer.optimize_norms(proto, fuse="portable", **more)
    return [n.op_type for n in out.graph.node], out, summary


def run(proto: onnx.ModelProto, level: str) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, {i.name: INPUTS[i.name] for i in session.get_inputs()})]


@pytest.mark.parametrize("to", OF)
@pytest.mark.parametrize("op", NORMS)
def test_a_norm_and_its_quantize_linear_are_one_op(op: str, to: str) -> None:
    norm, opset = NORMS[op]
    more, outputs = ("t = Abs (s)", ", float[2,5,24] t") if op.startswith("Add") else ("", "")
    before = model(norm, opset, to, more, outputs)
    ops, out, summary = optimized(before)
    assert ops == [op, *(["Abs"] if more else [])]
    (finding,) = summary.findings
    assert (finding.status, finding.tensor) == ("fused", "q")
    assert finding.became.startswith(f"normdeploy.{op}(")
    assert finding.proved[-1 if "onnxruntime run" not in finding.proved else -2] == quantize_fusion.SAME
    onnx.checker.check_model(out, full_check=True)
    # the same integers: the body's nodes as they are, and what onnxruntime makes of them by itself
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        for mine, theirs in zip(run(out, level), run(before, level), strict=True):
            assert np.array_equal(mine, theirs) == True, level  # noqa: E712


@pytest.mark.parametrize("op", NORMS)
def test_a_second_run_changes_nothing_and_standard_writes_the_nodes_out(op: str) -> None:
    _, out, _ = optimized(model(*NORMS[op]))
    _ops, again, summary = optimized(out)
    assert again == out
    assert [(f.status, f.tensor, f.axes) for f in summary.findings] == [("kept", "q", (2,))]
    plain, _ = norm_optimizer.optimize_norms(out)
    assert "QuantizeLinear" in [n.op_type for n in plain.graph.node]
    assert not plain.functions
    assert np.abs(run(plain, "ORT_DISABLE_ALL")[0].astype(int) - run(out, "ORT_DISABLE_ALL")[0]).max() <= 1


def test_an_rms_normalization_is_spelled_first() -> None:
    norm = "y = RMSNormalization <axis: int = -1, epsilon: float = 1e-5> (x, g)"
    before = model(norm, 23)
    ops, out, summary = optimized(before)
    assert ops == ["RMSNormQuantize"]
    (finding,) = summary.findings
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    assert {"identity", quantize_fusion.SAME} <= {*finding.proved}
    # two spellings of one norm round differently: of a quotient beside a tie another number may come
    found, expected = (run(proto, "ORT_DISABLE_ALL")[0].astype(int) for proto in (out, before))
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 0.01


def test_what_is_left_to_defaults_is_the_same() -> None:
    """No bias, no zero point but a type, the scale in a Constant node behind the norm."""
    norm = f"y = {LN} (x, g) s = Constant <value_float: float = 0.02> ()"
    before = model(norm, 21, quantize="q = QuantizeLinear <output_dtype: int = 3> (y, s)")
    ops, out, _ = optimized(before)
    assert ops == ["LayerNormQuantize"]
    assert np.array_equal(run(out, "ORT_DISABLE_ALL")[0], run(before, "ORT_DISABLE_ALL")[0])


REFUSED = {
    "another reader": (
        {"more": "z = Abs (y)", "outputs": ", float[2,5,24] z"},
        "the norm's unquantized result is also read by 1 other node",
    ),
    "an output": ({"outputs": ", float[2,5,24] y"}, "the norm's unquantized result is also a graph output"),
    "a zero point": ({"zero": "int8 zero = {3}"}, "its zero point is not 0"),
    "asymmetric": ({"zero": "uint8 zero = {0}"}, "it quantizes to uint8"),
    "no zero point": ({"quantize": "q = QuantizeLinear (y, scale)"}, "it quantizes to uint8"),
    "e5m2": ({"zero": "float8e5m2 zero = {0}"}, "it quantizes to float8_e5m2"),
    "several scales": (
        {
            "scale": f"float[24] scale = {{{', '.join(['0.02'] * 24)}}}, int8[24] zeros = {{{', '.join(['0'] * 24)}}}",
            "quantize": "q = QuantizeLinear <axis: int = 2> (y, scale, zeros)",
        },
        "it has 24 scales",
    ),
    "a computed scale": (
        {"quantize": "top = ReduceMax <keepdims: int = 0> (r) q = QuantizeLinear (y, top, zero)"},
        "its scale is not constant",
    ),
    "a negative scale": ({"scale": "float scale = {-0.02}"}, "its scale, -0.02, is not positive"),
    "no saturation": (
        {"to": "fp8", "quantize": "q = QuantizeLinear <saturate: int = 0> (y, scale, zero)"},
        "its QuantizeLinear has the attributes {'saturate': 0}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_is_left_and_told(name: str) -> None:
    given, reason = REFUSED[name]
    before = model(NORMS["LayerNormQuantize"][0], **given)
    if name in ("asymmetric", "no zero point", "e5m2"):
        kind = onnx.TensorProto.FLOAT8E5M2 if name == "e5m2" else onnx.TensorProto.UINT8
        before.graph.output[0].type.tensor_type.elem_type = kind
    ops, _, summary = optimized(before)
    assert "QuantizeLinear" in ops
    assert "LayerNormalization" in ops
    (note,) = summary.findings[0].notes
    assert note.startswith("the QuantizeLinear after it stays a separate node: ")
    assert reason in note


@pytest.fixture
def other_body(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LayerNormQuantize with another body, for the step and for the file."""
    row = OURS["LayerNormQuantize"]
    assert isinstance(row.body, str)
    old, new = request.param
    assert old in row.body
    wrong = replace(row, body=row.body.replace(old, new))
    monkeypatch.setitem(OURS, row.op, wrong)
    monkeypatch.setitem(quantize_fusion.ROWS, row.quantizes, wrong)
    return


@pytest.mark.parametrize(
    ("other_body", "reason"),
    [
        (("QuantizeLinear (", "QuantizeLinear <saturate: int = 0> ("), "has the attributes"),
        (("QuantizeLinear (result,", "QuantizeLinear (X,"), "reads tensors that differ"),
        (("X, scale, bias", "X, bias, scale"), "reads tensors that differ"),
        (("epsilon: float = @epsilon", "epsilon: float = 1e-6"), "has the attributes"),
        (("Y = Quant", "twice = Add (result, result) Y = Quant"), "differ from the nodes of"),
        ((" Y = QuantizeLinear (", " other = QuantizeLinear ("), "its results differ"),
    ],
    indirect=["other_body"],
    ids=["saturate", "unnormalized", "swapped", "epsilon", "twice", "no result"],
)
def test_another_body_is_refused(other_body: None, reason: str) -> None:
    ops, _, summary = optimized(model(*NORMS["LayerNormQuantize"]))
    assert ops == ["LayerNormalization", "QuantizeLinear"]
    assert reason in summary.findings[0].notes[0]


# ------------------------------------------------------------------ by a scale of each row

TAIL = (
    "axes_of_rows = Constant <value_ints: ints = [-1]> () a = Abs (y)"
    " t0 = ReduceMax <keepdims: int = 1> (a, axes_of_rows)"
    " least = Constant <value_float: float = 1e-5> () t = Max (t0, least) L = Constant <value_float: float = %s> ()"
    " ys = Div (t, L) dd = Div (y, ys) "
)
CLAMP = "least = Constant <value_float: float = 1e-5> () t = Max (t0, least) "
ENDS = {
    "int8": """rr = Round (dd) lo = Constant <value_float: float = -128.0> ()
        hi = Constant <value_float: float = 127.0> () c = Clip (rr, lo, hi) q = Cast <to: int = 3> (c)""",
    "fp8": "q = Cast <to: int = 17> (dd)",
}
LARGEST = {"int8": "127.0", "fp8": "448.0"}
BY_ROW = {op.replace("Quantize", "DynamicQuantize"): norm for op, norm in NORMS.items()}


def _changed(tail: str, old: str, new: str) -> str:
    changed = tail.replace(old, new, 1) if old else tail
    return changed.replace("Div (t, L)", "Div (t0, L)") if old == CLAMP else changed


def by_row(op: str, to: str, change: tuple[str, str] = ("", ""), outputs: str = ", float[2,5,1] ys") -> onnx.ModelProto:
    tail = TAIL % LARGEST[to] + ENDS[to]
    assert change[0] in tail
    more = "z = Abs (s)" if op.startswith("Add") else ""
    made = model(BY_ROW[op][0], to=to, more=more, quantize=_changed(tail, *change), outputs=outputs)
    if more:
        made.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, SHAPE))
    return made


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("to", OF)
@pytest.mark.parametrize("op", BY_ROW)
def test_a_scale_of_each_row(op: str, to: str) -> None:
    """From the spelled-out form to one op, and on to the plugin; the same integers and scales, as without."""
    before = by_row(op, to)
    ops, out, summary = optimized(before)
    assert ops == [op, *(["Abs"] if op.startswith("Add") else [])]
    (finding,) = summary.findings
    assert (finding.status, finding.tensor) == ("fused", "q")
    assert quantize_fusion.SAME in finding.proved
    onnx.checker.check_model(out, full_check=True)
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        assert all(np.array_equal(a, b) for a, b in zip(run(out, level), run(before, level), strict=True)), level
    assert optimized(out)[1] == out
    made, (told,) = norm_implementations.implement_norms(out, norm_impl="plugin", runtime="tensorrt")
    assert (told.form, told.reason) == (f"plugin {op}", "")
    assert [*made.graph.node[0].output][:2] == ["q", "ys"]


# of the int8 form: what is written otherwise and is the same, and what is not
SAME_FORMS = {
    "no clip": (ENDS["int8"], "rr = Round (dd) q = Cast <to: int = 3> (rr)"),
    "a symmetric clip": ("-128.0", "-127.0"),
    "Clip for Max": ("Max (t0, least)", "Clip (t0, least)"),
    "QuantizeLinear": (
        ENDS["int8"],
        "u = Constant <value_float: float = 1.0> () q = QuantizeLinear (dd, u, zero)",
    ),
}
OTHER_FORMS = {
    "by 128": ("L = Constant <value_float: float = 127.0>", "L = Constant <value_float: float = 128.0>"),
    "by 127 and cut at 100": (
        "hi = Constant <value_float: float = 127.0>",
        "hi = Constant <value_float: float = 100.0>",
    ),
    "not rounded": ("c = Clip (rr,", "c = Clip (dd,"),
    "along another axis": ("[-1]", "[1]"),
    "of another tensor": ("a = Abs (y)", "a = Abs (r)"),
    "another quotient": ("dd = Div (y, ys)", "dd = Div (ys, y)"),
    "the largest, not its magnitude": (
        "t0 = ReduceMax <keepdims: int = 1> (a,",
        "t0 = ReduceMax <keepdims: int = 1> (y,",
    ),
    "by two scales": ("dd = Div (y, ys)", "yy = Add (ys, ys) dd = Div (y, yy)"),
}


@pytest.mark.parametrize("name", SAME_FORMS)
def test_other_spellings_of_the_same(name: str) -> None:
    before = by_row("LayerNormDynamicQuantize", "int8", SAME_FORMS[name])
    ops, out, _ = optimized(before)
    assert ops == ["LayerNormDynamicQuantize"]
    assert all(
        np.array_equal(a, b) for a, b in zip(run(out, "ORT_DISABLE_ALL"), run(before, "ORT_DISABLE_ALL"), strict=True)
    )


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_what_is_no_scale_of_its_row_is_left(name: str) -> None:
    outputs = ", float[2,5,1] ys" if "axis" not in name else ", float ys"
    before = by_row("LayerNormDynamicQuantize", "int8", OTHER_FORMS[name], outputs)
    if "axis" in name:
        del before.graph.output[1:]
    ops, _, _ = optimized(before)
    assert "LayerNormalization" in ops
    assert "LayerNormDynamicQuantize" not in ops


def test_a_row_of_zeros_is_not_left_to_a_cast() -> None:
    """ONNX says nothing of a NaN that is cast to int8; of FP8 it does, and QuantizeLinear is the op's own."""
    ops, _, summary = optimized(by_row("LayerNormDynamicQuantize", "int8", (CLAMP, "")))
    assert "LayerNormDynamicQuantize" not in ops
    assert "a row of zeros gives 0 / 0" in summary.findings[0].notes[0]
    before = by_row("LayerNormDynamicQuantize", "fp8", (CLAMP, ""))
    ops, out, _ = optimized(before)
    assert ops == ["LayerNormDynamicQuantize"]
    assert all(
        np.array_equal(a, b) for a, b in zip(run(out, "ORT_DISABLE_ALL"), run(before, "ORT_DISABLE_ALL"), strict=True)
    )


def test_a_norm_over_more_than_the_last_axis_has_other_rows() -> None:
    norm = (
        BY_ROW["LayerNormDynamicQuantize"][0].replace("axis: int = -1", "axis: int = 1").replace("(x, g, b)", "(x, g)")
    )
    before = model(norm, quantize=TAIL % "127.0" + ENDS["int8"])
    ops, _, summary = optimized(before)
    assert "LayerNormalization" in ops
    assert "its norm does not normalize exactly the last axis" in summary.findings[0].notes[0]


# ------------------------------------------------------------------ as plugins


@pytest.fixture
def capability(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("NORMDEPLOY_COMPUTE_CAPABILITY", getattr(request, "param", "8.9"))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("to", OF)
@pytest.mark.parametrize("op", NORMS)
def test_it_is_planned_as_a_plugin(op: str, to: str) -> None:
    norm, opset = NORMS[op]
    more = ("t = Abs (s)", ", float[2,5,24] t") if op.startswith("Add") else ("", "")
    _, out, _ = optimized(model(norm, opset, to, *more))
    made, (told,) = norm_implementations.implement_norms(out, norm_impl="plugin", runtime="tensorrt")
    assert (told.form, told.reason) == (f"plugin {op}", "")
    node = made.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["to"] == ("none", "relu", "silu", "int8", "fp8").index(to)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in made.graph.initializer}
    assert constants[node.input[-1]].tolist() == [np.float32(0.02)]
    assert not made.functions


@pytest.mark.usefixtures("capability")
def test_a_plugin_that_quantizes_otherwise_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from normdeploy.engines import quantized_plans

    monkeypatch.setattr(quantized_plans, "_TO", {"int8": "fp8"})
    _, out, _ = optimized(model(*NORMS["LayerNormQuantize"]))
    _made, (told,) = norm_implementations.implement_norms(out, norm_impl="plugin", runtime="tensorrt")
    assert told.form == "standard nodes"
    assert "not proved to compute the same as the file's nodes" in told.reason


@pytest.mark.usefixtures("capability")
def test_a_plugin_by_another_scale_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from normdeploy.engines.plugin_nodes import PluginPlanner

    own = PluginPlanner.make_constant
    twice = lambda p, x, name, value, kind: own(p, x, name, value * (2 if name == "y_scale" else 1), kind)  # noqa: E731
    monkeypatch.setattr(PluginPlanner, "make_constant", twice)
    _, out, _ = optimized(model(*NORMS["LayerNormQuantize"]))
    _, (told,) = norm_implementations.implement_norms(out, norm_impl="plugin", runtime="tensorrt")
    assert told.form == "standard nodes"
    assert "not proved" in told.reason


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("capability", ["8.6"], indirect=True)
def test_fp8_keeps_its_body_below_8_9() -> None:
    _, out, _ = optimized(model(*NORMS["LayerNormQuantize"], to="fp8"))
    _, (told,) = norm_implementations.implement_norms(out, norm_impl="plugin", runtime="tensorrt")
    assert told.form == "standard nodes"
    assert told.reason == "FP8 needs a GPU of compute capability 8.9 or newer, not 8.6"


def test_tensorrt_rtx_gets_the_bodies_written_out() -> None:
    """Its parser (1.7) reads a function with QuantizeLinear once: in the second call the layer's name is taken."""
    trt = pytest.importorskip("tensorrt_rtx")
    norm = f"v = {LN} (r, g, b) o = QuantizeLinear (v, scale, zero) y = {LN} (x, g, b)"
    ops, out, _ = optimized(model(norm, outputs=", int8[2,5,24] o"))
    assert ops == ["LayerNormQuantize"] * 2
    dequantize = [onnx.helper.make_node("DequantizeLinear", [q, "scale", "zero"], [f"{q}_end"]) for q in ("o", "q")]
    out.graph.node.extend(dequantize)
    del out.graph.output[:]
    for node in dequantize:
        out.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, SHAPE))
    assert norm_implementations.needs_native_rewrite(out, "tensorrt-rtx", "1.7.1")
    written, account = norm_implementations.implement_norms(
        out, norm_impl="native", runtime="tensorrt-rtx", version="1.7.1"
    )
    assert [told.form for told in account] == ["standard nodes"] * 2
    assert [n.op_type for n in written.graph.node] == ["LayerNormalization", "QuantizeLinear"] * 2 + [
        "DequantizeLinear"
    ] * 2
    reads = {}
    for name, proto in (("functions", out), ("nodes", written)):
        builder = trt.Builder(logger := trt.Logger(trt.Logger.INTERNAL_ERROR))
        network = builder.create_network(0)
        reads[name] = trt.OnnxParser(network, logger).parse(proto.SerializeToString())
    assert reads["nodes"]
    assert not reads["functions"], "this release reads both: write functions out no longer"


@pytest.mark.parametrize("opset", [13, 17, 18, 22, 23, 25])
def test_every_opset(opset: int) -> None:
    """Spelled out, so that in an old file the norm's node is newer than the file's opset."""
    mean = "m = ReduceMean <keepdims: int = 1, axes: ints = [-1]> (x)" if opset < 18 else "m = ReduceMean (x, last)"
    var = "v = ReduceMean <keepdims: int = 1, axes: ints = [-1]> (p)" if opset < 18 else "v = ReduceMean (p, last)"
    norm = f"""last = Constant <value_ints: ints = [-1]> () {mean} d = Sub (x, m) p = Mul (d, d) {var}
        e = Constant <value_float: float = 1e-5> () w = Add (v, e) r0 = Sqrt (w) n = Div (d, r0) k = Mul (n, g)
        y = Add (k, b)"""
    before = model(norm, opset)
    ops, out, summary = optimized(before)
    assert [op for op in ops if op != "Constant"] == ["LayerNormQuantize"]
    assert summary.opset == max(17, opset)
    found, expected = (run(proto, "ORT_DISABLE_ALL")[0].astype(int) for proto in (out, before))
    assert np.abs(found - expected).max() <= 1  # the norm's node rounds otherwise than what it was spelled in
