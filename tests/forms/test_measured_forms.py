"""The forms of norms: each computes its norm, and ``--runtime`` writes the one that the measured table says."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.forms import measured_forms
from normdeploy.forms.measured_forms import MeasuredForm, best_form
from normdeploy.rewriting import norm_optimizer
from normdeploy.verbs.bench.norm_cases import KINDS, NormCase

from ..support import run_onnxruntime

SMALL = {
    "LayerNorm": NormCase("LayerNorm", (2, 3, 5, 7), axis=2),
    "RMSNorm": NormCase("RMSNorm", (2, 3, 7)),
    "ChannelLayerNorm": NormCase("ChannelLayerNorm", (2, 6, 5, 3)),
    "BatchLayerNorm": NormCase("BatchLayerNorm", (4, 6, 5, 3)),
    "GroupNorm": NormCase("GroupNorm", (2, 6, 5, 3), groups=3),
    "InstanceNorm": NormCase("InstanceNorm", (2, 6, 5, 3)),
    "ResidualLayerNorm": NormCase("ResidualLayerNorm", (2, 6, 5)),
}
ROWS = tuple(row for row in measured_forms.load_table() if row.runtime == "onnxruntime")


def written(
    case: NormCase, dims: dict[int, str] | None = None, runtime: str = "onnxruntime"
) -> tuple[onnx.ModelProto, norm_optimizer.Summary]:
    """What becomes of the decomposed form; ``dims``: axes that are dynamic."""
    proto = case.make_model("decomposed")
    for axis, name in (dims or {}).items():
        for value in (proto.graph.input[0], proto.graph.output[0]):
            value.type.tensor_type.shape.dim[axis].dim_param = name
        whole = next((t for t in proto.graph.initializer if t.name == "whole"), None)
        if whole is not None:
            sizes = onnx.numpy_helper.to_array(whole).copy()
            sizes[axis] = -1 if axis else 0
            whole.CopyFrom(onnx.numpy_helper.from_array(sizes, "whole"))
    return norm_optimizer.optimize_norms(proto, runtime=runtime)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_computes_its_norm(kind: str) -> None:
    """Against float64; GroupNormalization is held to nothing far from 0, where onnxruntime loses it."""
    case = SMALL[kind]
    feeds = case.feeds(0.5)
    for form in case.distinct_forms:
        (found,) = run_onnxruntime(case.make_model(form), feeds)
        assert np.abs(found - case.evaluate_float64(feeds["x"])).max() <= case.allowed_error(feeds["x"]), form


def test_a_wrong_norm_is_outside_what_is_allowed() -> None:
    """The allowance tells a norm from one of other groups, of another epsilon, and without its shift."""
    case = SMALL["GroupNorm"]
    feeds = case.feeds()
    for other in (replace(case, groups=2), replace(case, epsilon=1e-3), replace(case, kind="InstanceNorm")):
        (found,) = run_onnxruntime(other.make_model("decomposed"), feeds)
        assert np.abs(found - case.evaluate_float64(feeds["x"])).max() > case.allowed_error(feeds["x"]), other
    with pytest.raises(ValueError, match="no form 'narrow'"):
        case.make_model("narrow")


def test_the_table_is_whole() -> None:
    """A row for each float32 form, the decomposed one as the measure, and where it was measured."""
    held = json.loads(resources.files("normdeploy.forms").joinpath("norm_forms.json").read_text())
    for kind, case in SMALL.items():
        rows = {r.form: r for r in ROWS if (r.kind, r.dtype) == (kind, "float32")}
        assert rows.keys() == set(case.distinct_forms)
        assert rows["decomposed"].time == 1
        assert rows["decomposed"].excess <= 1
    assert {r.runtime for r in measured_forms.load_table()} == {"onnxruntime", "openvino"} == held["measured"].keys()


def test_the_fastest_of_the_accurate_is_best() -> None:
    def row(form: str, time: float, excess: float) -> MeasuredForm:
        return MeasuredForm("onnxruntime", "GroupNorm", "float32", form, time, excess)

    rows = [row("standard", 0.1, 1.01), row("instance", 0.7, 1.0), row("layer", 0.9, 0.1)]
    forms = ("standard", "instance", "layer")
    assert best_form("GroupNorm", "onnxruntime", "float32", forms, rows) == "instance"
    assert best_form("GroupNorm", "onnxruntime", "float32", ("standard", "layer"), rows) == "layer"
    assert best_form("GroupNorm", "onnxruntime", "float32", ("standard",), rows) == "standard"
    for runtime, kind, dtype in (
        ("there", "GroupNorm", "float32"),
        ("onnxruntime", "LayerNorm", "float32"),
        ("onnxruntime", "GroupNorm", "float16"),
    ):
        assert best_form(kind, runtime, dtype, forms, rows) == "standard"
    assert best_form("GroupNorm", "onnxruntime-accurate", "float32", forms, rows) == "layer"


def test_accuracy_before_speed() -> None:
    """Constant groups: x·s − mean·s, which InstanceNormalization computes, loses what LayerNormalization's x − mean
    does not."""
    case = SMALL["GroupNorm"]
    x = np.full(case.shape, 0.3, np.float32)
    errors = {}
    for runtime in ("onnxruntime", "onnxruntime-accurate"):
        proto, summary = written(case, runtime=runtime)
        assert summary.findings[0].certificate
        (found,) = run_onnxruntime(proto, {**case.feeds(), "x": x})
        errors[runtime] = float(np.abs(found - case.evaluate_float64(x)).max())
    assert "LayerNormalization" in ops(proto)
    assert errors["onnxruntime-accurate"] < errors["onnxruntime"] / 4, errors


@pytest.mark.parametrize(
    ("kind", "forms"),
    [("GroupNorm", ("standard", "instance", "layer")), ("InstanceNorm", ("standard", "layer"))],
    ids=["group", "instance"],
)
def test_what_is_written_follows_the_table(kind: str, forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever form the table names is the one that is written, certified, for the runtime named; of group norms for
    any as well."""
    case = SMALL[kind]
    standard = {"GroupNorm": "GroupNormalization", "InstanceNorm": "InstanceNormalization"}[kind]
    core = {"standard": standard, "instance": "InstanceNormalization", "layer": "LayerNormalization"}
    for form in (None, *forms):
        if form is not None:
            table = tuple(replace(r, time=0.01 if r.form == form else 2.0, excess=0.5) for r in ROWS)
            monkeypatch.setattr(measured_forms, "load_table", lambda table=table: table)
        chosen = form or best_form(kind, "onnxruntime", "float32", forms)
        tail = ["BatchNormalization"] if (kind, chosen) == ("GroupNorm", "instance") else []
        for runtime in ("onnxruntime", *(["any"] if kind == "GroupNorm" else [])):
            proto, summary = written(case, runtime=runtime)
            assert [op for op in ops(proto) if op.endswith("Normalization")] == [core[chosen], *tail]
            assert summary.findings[0].status == "fused"
            assert summary.findings[0].certificate
        for runtime in ("tensorrt", "tensorrt-rtx", *(["any"] if kind != "GroupNorm" else [])):
            assert standard in ops(written(case, runtime=runtime)[0])


def test_a_norm_over_the_batch_stays_where_transposing_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL["BatchLayerNorm"]
    for form in ("standard", "decomposed"):
        table = tuple(replace(r, time=0.01 if r.form == form else 2.0, excess=0.5) for r in ROWS)
        monkeypatch.setattr(measured_forms, "load_table", lambda table=table: table)
        proto, summary = written(case)
        assert ("Transpose" in ops(proto)) == (form == "standard")
        assert ("norm_forms.json" in summary.findings[0].reason) == (form == "decomposed")
        assert "Transpose" in ops(written(case, runtime="any")[0])


def test_scales_are_written_out_for_onnxruntime() -> None:
    """Its kernel is several times as fast with one number for each element; TensorRT gets the shortest scale."""
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 4, 3, 5] x) => (float[N, 4, 3, 5] y) <float[4] s = {1.0, 2.0, 3.0, 4.0},
        float[4] b = {0.0, 1.0, 2.0, 3.0}>
        { y = GroupNormalization <num_groups = 1, epsilon = 1e-5> (x, s, b) }"""
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4, 3, 5)).astype(np.float32)}
    outputs = []
    for runtime, shape in (("tensorrt", [4, 1, 1]), ("any", [4, 3, 5]), ("onnxruntime", [4, 3, 5])):
        proto, _ = norm_optimizer.optimize_norms(onnx.parser.parse_model(text), runtime=runtime)
        (node,) = proto.graph.node
        held = {t.name: list(t.dims) for t in proto.graph.initializer}
        assert [held[name] for name in node.input[1:]] == [shape, shape]
        outputs += run_onnxruntime(proto, feeds)
    np.testing.assert_allclose(
        outputs[0], outputs[1], rtol=0, atol=4e-6
    )  # 8 units of the largest value, which is below 8


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((2, 3, 40), 2, ["InstanceNormalization"]), ((2, 3, 40), 1, ["Reshape", "InstanceNormalization", "Reshape"])],
)
def test_rows_of_dynamic_length_are_instances_on_onnxruntime(
    shape: tuple[int, ...], axis: int, expected: list[str]
) -> None:
    """No scale can be written out for them, and onnxruntime's layer norm is slow with a narrow one."""
    over = ", ".join(map(str, range(axis, 3)))
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 3, L] x) => (float[N, 3, L] y) <int64[{3 - axis}] axes = {{{over}}}, float eps = {{1e-5}}>
        {{ u = ReduceMean(x, axes) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, axes) e = Add(v, eps) r = Sqrt(e)
        y = Div(d, r) }}"""
    proto, summary = norm_optimizer.optimize_norms(onnx.parser.parse_model(text), runtime="onnxruntime")
    assert [op for op in ops(proto) if op not in ("Shape", "Concat")] == expected
    assert summary.findings[0].certificate
    for runtime in ("any", "tensorrt"):
        assert ops(norm_optimizer.optimize_norms(onnx.parser.parse_model(text), runtime=runtime)[0]) == [
            "LayerNormalization"
        ]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    before, after = (run_onnxruntime(p, {"x": x})[0] for p in (onnx.parser.parse_model(text), proto))
    np.testing.assert_allclose(after, before, rtol=0, atol=4e-6)


def test_a_shape_read_in_one_node_counts_for_no_work() -> None:
    """Groups of an image of any size: the norm takes the views around it along, whose sizes were put together one by
    one."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,8,H,W] x) => (float[N,8,H,W] y)
        <int64[3] split = {0, 4, -1}, int64[1] last = {2}, float epsilon = {1e-5}, int64[1] channels = {8}> {
        v = Reshape(x, split)  m = ReduceMean(v, last)  d = Sub(v, m)  q = Mul(d, d)  s = ReduceMean(q, last)
        e = Add(s, epsilon)  r = Sqrt(e)  z = Div(d, r)
        n = Shape <start = 0, end = 1> (x)  h = Shape <start = 2, end = 3> (x)  w = Shape <start = 3, end = 4> (x)
        whole = Concat <axis = 0> (n, channels, h, w)  y = Reshape(z, whole) }"""
    )
    found, summary = norm_optimizer.optimize_norms(proto, runtime="onnxruntime")
    assert [f.status for f in summary.findings] == ["fused"]
    assert sorted(ops(found)) == ["InstanceNormalization", "Reshape", "Reshape", "Shape"]


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_a_row_of_one_place_is_its_shift(epsilon: float) -> None:
    """x − mean is 0 there; onnxruntime's InstanceNormalization takes the difference of two numbers of the size of
    x/√ε."""
    body = """u = ReduceMean<axes = [2, 3]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes = [2, 3]>(q) e = Add(v,
    eps) r = Sqrt(e)
        n = Div(d, r) m = Mul(n, g) y = Add(m, b)"""
    held = f"float eps = {{{epsilon}}}, float[3,1,1] g = {{0.5, 1, 2}}, float[3,1,1] b = {{1, 2, 3}}"
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> net (float[n,3,h,w] x) => (float[n,3,h,w] y) <{held}> {{ {body} }}'
    )
    x = 1 + np.random.default_rng(0).random((4, 3, 1, 1), dtype=np.float32)
    out, summary = norm_optimizer.optimize_norms(proto)
    assert [f.status for f in summary.findings] == ["fused"]
    assert ("InstanceNormalization" in {n.op_type for n in out.graph.node}) == (epsilon == 1e-5)
    (y,) = run_onnxruntime(out, {"x": x})
    assert np.abs(y - np.array([1, 2, 3], np.float32).reshape(3, 1, 1)).max() <= (
        0.0 if epsilon < 1e-9 else 4 * 2.0**-24 * 2 / epsilon**0.5
    )


def residual() -> onnx.ModelProto:
    held = "float[8] g = {1, 2, 1, 2, 1, 2, 1, 2}, float[8] b = {1, 1, 1, 1, 2, 2, 2, 2}, float[4] h = {1, 2, 1, 2}"
    body = "s = Add(x, r) y = LayerNormalization(s, g, b) z = GroupNormalization<num_groups = 2>(i, h, h)"
    inputs, outputs = "float[n,t,8] x, float[n,t,8] r, float[n,4,5,5] i", "float[n,t,8] y, float[n,4,5,5] z"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> net ({inputs}) => ({outputs}) <{held}> {{ {body} }}'
    )


def test_what_a_gpu_runs_best_is_another_form() -> None:
    """SkipLayerNormalization is wanted there; GroupNormalization has no kernel on either."""
    on_cpu, on_gpu = (normdeploy.optimize(residual(), runtime="onnxruntime", provider=p) for p in ("cpu", "cuda"))
    ops_on_cpu, ops_on_gpu = ({n.op_type for n in r.proto.graph.node} for r in (on_cpu, on_gpu))
    assert "Sum" in ops_on_cpu
    assert "Add" in ops_on_gpu
    assert "Sum" not in ops_on_gpu
    assert "InstanceNormalization" in ops_on_gpu
    assert "GroupNormalization" not in ops_on_gpu
    assert [any("not measured" in note for note in r.notes) for r in (on_cpu, on_gpu)] == [False, True]


def test_a_group_norm_in_bfloat16_gets_the_opset_of_its_form() -> None:
    """InstanceNormalization takes the type from opset 22 on: at 21 onnx's checker refuses the file."""
    body = """r = Reshape(x, s) m = ReduceMean(r, a) d = Sub(r, m) q = Mul(d, d) v = ReduceMean(q, a) w = Add(v, e) t =
    Sqrt(w)
        n = Div(d, t) y = Reshape(n, b)"""
    held = "int64[3] s = {0, 3, -1}, int64[4] b = {2, 6, 4, 4}, int64[1] a = {-1}"
    head = f'<ir_version: 10, opset_import: ["": 21]> g (bfloat16[2,6,4,4] x) => (bfloat16[2,6,4,4] y) <{held}>'
    proto = onnx.parser.parse_model(f"{head} {{ {body} }}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-5, ml_dtypes.bfloat16), "e"))
    made = normdeploy.optimize(proto, runtime="onnxruntime", provider="cuda").proto
    onnx.checker.check_model(made, full_check=True)
    assert "InstanceNormalization" in {n.op_type for n in made.graph.node}
    assert [o.version for o in made.opset_import] == [22]


@pytest.mark.parametrize(("runtime", "provider"), [("any", "cuda"), ("tensorrt", "cuda"), ("onnxruntime", "rocm")])
def test_a_provider_is_one_of_onnxruntimes(runtime: str, provider: str) -> None:
    with pytest.raises(InputError, match=provider):
        normdeploy.optimize(residual(), runtime=runtime, provider=provider)


def test_a_shift_inside_the_scale_of_an_rms_norm_is_one_add_behind_its_node() -> None:
    """(x/rms + b)·g is x/rms·g + b·g."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]> g (float[B, 4] x) => (float[B, 4] y)
        <float[4] g = {1, 2, 3, 4}, float[4] b = {4, 3, 2, 1}, float e = {1e-5}, int64[1] a = {-1}>
        { q = Mul(x, x) m = ReduceMean(q, a) w = Add(m, e) r = Sqrt(w) d = Div(x, r) n = Add(d, b) y = Mul(n, g) }"""
    )
    made, _ = norm_optimizer.optimize_norms(proto)
    assert [n.op_type for n in made.graph.node] == ["RMSNormalization", "Add"]
    x = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
    wide, g, b = x.astype(np.float64), np.arange(1, 5), np.arange(4, 0, -1)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) + b) * g
    np.testing.assert_allclose(run_onnxruntime(made, {"x": x})[0], expected, rtol=0, atol=2e-6 * np.abs(expected).max())
