"""The census tells what a norm computes, what runtimes make of it, and why something is none."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as state
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.findings.records import Finding, HalfConstants, NormParameter
from normdeploy.graphs import norm_extraction
from normdeploy.runtimes import kernel_support
from normdeploy.verbs.inspect.norm_census import take_census

MEAN = "m = ReduceMean(x, ax)  c = Sub(x, m)  s = Mul(c, c)"
BIASED = f"{MEAN}  v = ReduceMean(s, ax)"
UNBIASED = f"{MEAN}  t = ReduceSum(s, ax)  v = Div(t, less)"
AFTER = "e = Add(v, eps) r = Sqrt(e) n = Div(c, r) g = Mul(n, w) y = Add(g, b)"
SQUARE = "s = Mul(x, x)  v = ReduceMean(s, ax)"


def model(
    body: str, *, kind: str = "float", inputs: str = "", held: str = "", opset: int = 18, x: str = "b,8"
) -> onnx.ModelProto:
    """y from x of shape (b, 8), with the usual constants in x's type."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "custom": 1]> g ({kind}[{x}] x{inputs})
    => ({kind}[{x}] y)
        <int64[1] ax = {{-1}}, float eps = {{0.00001}}, float less = {{7.0}}, float one = {{1.0}},
         float[8] w = {{0.5, 0.25, 2, 3, 4, 5, 6, 7}}, float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}}{held}> {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    if kind != "float":
        held_as = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
        for i, t in enumerate(proto.graph.initializer):
            if t.data_type == onnx.TensorProto.FLOAT:
                array = onnx.numpy_helper.to_array(t).astype(held_as)
                proto.graph.initializer[i].CopyFrom(onnx.numpy_helper.from_array(array, t.name))
    return proto


def only(proto: onnx.ModelProto) -> Finding:
    (finding,) = take_census(proto).findings
    return finding


# ------------------------------------------------------------------ what it computes


@pytest.mark.parametrize(
    ("body", "ddof", "epsilon", "outside"),
    [
        (f"{BIASED} e = Add(v, eps) r = Sqrt(e) y = Div(c, r)", 0, 1e-5, False),
        (f"{UNBIASED} e = Add(v, eps) r = Sqrt(e) y = Div(c, r)", 1, 1e-5, False),
        (f"{UNBIASED} r = Sqrt(v) y = Div(c, r)", 1, 0.0, False),
        (f"{BIASED} r = Sqrt(v) y = Div(c, r)", 0, 0.0, False),
        (f"{UNBIASED} r = Sqrt(v) d = Add(r, eps) y = Div(c, d)", 1, 1e-5, True),
        (f"{BIASED} r = Sqrt(v) d = Add(r, eps) y = Div(c, d)", 0, 1e-5, True),
        (f"{SQUARE} e = Add(v, eps) r = Sqrt(e) y = Div(x, r)", None, 1e-5, False),
        ("y = LayerNormalization<axis = -1, epsilon = 0.00001>(x, w)", 0, 1e-5, False),
    ],
)
def test_ddof_and_epsilon_are_those_of_the_author(body: str, ddof: int | None, epsilon: float, outside: bool) -> None:
    finding = only(model(body))
    assert (finding.ddof, finding.outside, finding.statistics) == (ddof, outside, "float32")
    assert finding.epsilon_as_written == float(np.float32(epsilon))
    assert (finding.input, finding.shape, finding.axes) == ("x", ("b", 8), (1,))


def test_unbiased_over_a_dynamic_size() -> None:
    body = (
        f"{MEAN} t = ReduceSum(s, ax) n = Shape<start = 1>(x) f = Cast<to = 1>(n) l = Sub(f, one) v = Div(t, l) e ="
        " Add(v, eps) r = Sqrt(e)"
    )
    finding = only(model(f"{body} y = Div(c, r)", x="b,n"))
    assert (finding.status, finding.ddof) == ("refused", 1)
    assert finding.epsilon_as_written == pytest.approx(1e-5, rel=1e-7)  # the file's, in float32


NORMED = f"{BIASED} e = Add(v, eps) r = Sqrt(e) n = Div(c, r)"


@pytest.mark.parametrize(
    ("body", "gamma", "beta"),
    [
        (f"{NORMED} y = Identity(n)", None, None),
        (f"{NORMED} g = Mul(n, w) y = Add(g, b)", NormParameter(False, (1,), "w"), NormParameter(False, (1,), "b")),
        (f"{NORMED} k = Add(w, one) y = Mul(n, k)", NormParameter(False, (1,), "w", one_plus=True), None),
        (f"{NORMED} k = Add(one, w) y = Mul(n, k)", NormParameter(False, (1,), "w", one_plus=True), None),
        (f"{NORMED} y = Mul(n, less)", NormParameter(False, (), "less"), None),
        (
            f"{NORMED} g = Mul(n, data) y = Add(g, b)",
            NormParameter(True, (1,), "data"),
            NormParameter(False, (1,), "b"),
        ),
        (f"{NORMED} k = Add(data, one) y = Mul(n, k)", NormParameter(True, (1,), "data", one_plus=True), None),
    ],
)
def test_affine(body: str, gamma: NormParameter | None, beta: NormParameter | None) -> None:
    finding = only(model(body, inputs=", float[8] data"))
    assert (finding.gamma, finding.beta) == (gamma, beta)


def test_gamma_of_an_unbiased_norm_is_the_authors() -> None:
    finding = only(model(f"{UNBIASED} {AFTER}"))
    assert (finding.status, finding.gamma) == ("fused", NormParameter(False, (1,), "w"))


def test_type_of_statistics_sees_casts() -> None:
    upcast = (
        "f = Cast<to = 1>(x) s = Mul(f, f) v = ReduceMean(s, ax) e = Add(v, eps) r = Sqrt(e) n = Div(f, r) y = Cast<to"
        " = 10>(n)"
    )
    wide = model(upcast, kind="float16")
    eps = onnx.numpy_helper.from_array(np.float32(1e-5), "eps")
    wide.graph.initializer[[t.name for t in wide.graph.initializer].index("eps")].CopyFrom(eps)
    assert only(wide).statistics == "float32"
    assert only(model(f"{BIASED} e = Add(v, eps) r = Sqrt(e) y = Div(c, r)", kind="float16")).statistics == "float16"
    assert only(model("y = LayerNormalization(x, w)", kind="float16")).statistics == "float32"  # its stash_type


@pytest.mark.parametrize("epsilon", [1e-12, 2e-8, 4e-8, 1e-5, 1e-4, 0.0])
def test_half_precision_is_what_a_cast_gives(epsilon: float) -> None:
    finding = only(
        model(
            f"y = LayerNormalization<axis = -1, epsilon = {epsilon:.12f}>(x, big)",
            held=", float[8] big = {1e5,1,1,1,1,1,1,1}",
        )
    )
    for half, kind in zip(finding.half, (np.float16, ml_dtypes.bfloat16), strict=True):
        stored = float(np.float32(epsilon).astype(kind))
        normal = float(ml_dtypes.finfo(kind).smallest_normal)
        fate = "" if stored >= normal or not epsilon else "subnormal" if stored else "zero"
        assert half == HalfConstants(half.dtype, stored, fate, ("big",) if kind is np.float16 else ())  # type: ignore[arg-type]


def test_eval_batchnorm() -> None:
    body = "h = Relu(x) n = BatchNormalization<epsilon = 0.001>(h, w, b, b, big) y = Relu(n)"
    finding = only(model(body, x="b,8,4,4", held=", float[8] big = {1e5,1,1,1,1,1,1,1}"))
    assert (finding.kind, finding.axes, finding.epsilon, finding.statistics) == (
        "BatchNorm",
        (0, 2, 3),
        float(np.float32(0.001)),
        "constant",
    )
    assert (finding.gamma, finding.beta) == (NormParameter(False, (1,), "w"), NormParameter(False, (1,), "b"))
    assert finding.half[0].overflow == ("big",)


@pytest.mark.parametrize(
    ("body", "axes"),
    [
        ("n = BatchNormalization(h, ones, b, b, ones)", (0, 2, 3)),
        ("c = Sub(h, mean) d = Add(mean, eps) r = Sqrt(d) n = Div(c, r)", (0, 2, 3)),
        (
            "v = Reshape(h, rows) k = BatchNormalization(v, ones, ones, ones, ones) s = Shape(h) n = Reshape(k, s)",
            (),
        ),  # not told
    ],
)
def test_channels_of_a_batchnorm_that_was_never_trained(body: str, axes: tuple[int, ...]) -> None:
    ones = ", ".join(["1"] * 8)
    held = f", float[8] ones = {{{ones}}}, float[8,1,1] mean = {{{ones}}}, int64[2] rows = {{-1, 8}}"
    assert only(model(f"h = Relu(x) {body} y = Relu(n)", x="b,8,4,4", held=held)).axes == axes


@pytest.mark.parametrize(
    "body",
    [
        "y = LayerNormalization(x, g)",
        "y = RMSNormalization(x, g)",
        "y = LayerNormalization(x, g, g)",
        "y = InstanceNormalization(x, w, g)",
    ],
)
def test_node_with_data_of_its_own_is_listed(body: str) -> None:
    finding = only(model(body, inputs=", float[8] g", opset=23, x="2,8,8" if "Instance" in body else "b,8"))
    assert (finding.status, finding.tensor) == ("kept", "y")


def test_optimize_does_not_pay_for_the_census() -> None:
    (finding,) = normdeploy.optimize(model(f"{NORMED} y = Identity(n)")).summary.findings
    assert (finding.tensors, finding.half, finding.statistics, finding.runtimes) == ((), (), "", ())


# ------------------------------------------------------------------ lookalikes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"{BIASED} e = Add(v, eps) y = Div(c, e)", "a variance without taking the root"),
        (f"{BIASED} e = Add(v, eps) i = Reciprocal(e) y = Mul(c, i)", "a variance without taking the root"),
        (f"{SQUARE} y = Div(x, v)", "a mean or sum of squares without taking the root"),
        (f"{MEAN} a = Abs(c) v = ReduceMean(a, ax) y = Div(c, v)", "a mean or sum of magnitudes"),
        ("v = ReduceL1(x, ax) e = Max(v, eps) y = Div(x, e)", "a mean or sum of magnitudes"),
        ("a = Abs(x) v = ReduceMax(a, ax) y = Div(x, v)", "the largest magnitude"),
        ("h = ReduceMax(x, ax) l = ReduceMin(x, ax) d = Sub(h, l) n = Sub(x, l) y = Div(n, d)", "a range"),
    ],
)
def test_statistics_without_a_root_are_named(body: str, reason: str) -> None:
    finding = only(model(body))
    assert (finding.kind, finding.status, finding.tensor) == ("lookalike", "refused", "y")
    assert reason in finding.reason


@pytest.mark.parametrize(
    "body",
    [
        "y = Softmax(x)",
        "h = ReduceMax(x, ax) d = Sub(x, h) e = Exp(d) t = ReduceSum(e, ax) y = Div(e, t)",
        "t = ReduceSum(x, ax) y = Div(x, t)",
        "y = Div(x, w)",
        "t = ReduceMean(x, ax) y = Sub(x, t)",
        "z = Add(x, x) a = Abs(z) v = ReduceMax(a, ax) y = Div(w2, v)",
    ],
)
def test_no_norm_at_all(body: str) -> None:
    summary = take_census(model(body, inputs=", float[b,8] w2"))
    assert summary.findings == ()


# ------------------------------------------------------------------ runtimes


OPS = {
    "LayerNormalization": (17, "y = LayerNormalization<axis = -1>(x, w)"),
    "RMSNormalization": (23, "y = RMSNormalization<axis = -1>(x, w)"),
    "InstanceNormalization": (21, "y = InstanceNormalization(x, w, b)"),
    "GroupNormalization": (21, "y = GroupNormalization<num_groups = 2>(x, w, b)"),
    "BatchNormalization": (15, "y = BatchNormalization(x, w, b, b, w)"),
    "MeanVarianceNormalization": (13, "y = MeanVarianceNormalization(x)"),
}


def registered(op: str, kind: str, opset: int) -> bool:
    """Whether onnxruntime's own list of kernels has one; another source than the sessions that `kernels` makes."""
    spelled = {
        "float": "tensor(float)",
        "float16": "tensor(float16)",
        "double": "tensor(double)",
        "bfloat16": "tensor(bfloat16)",
    }[kind]
    since = onnx.defs.get_schema(op, opset).since_version
    return any(
        k.op_name == op
        and k.domain == ""
        and k.version_range[0] <= since <= k.version_range[1]
        and all(
            spelled in kinds for kinds in k.type_constraints.values() if "tensor(float)" not in kinds or kind == "float"
        )
        and any(spelled in kinds for kinds in k.type_constraints.values())
        for k in state.get_registered_ep_kernel_defs("CPUExecutionProvider")
    )


@pytest.mark.parametrize("kind", ["float", "float16", "double"])
@pytest.mark.parametrize("op", OPS)
def test_onnxruntime_has_the_kernels_that_it_lists(op: str, kind: str) -> None:
    opset, body = OPS[op]
    asked, _ = kernel_support.query_runtimes([model(body, kind=kind, opset=opset, x="2,8,4,8")])
    (answer,) = asked[0].answers
    assert asked[0].runtime == f"onnxruntime {onnxruntime.__version__} CPU"
    own = answer.verdict == "kernel" and not answer.reason
    assert own == registered(op, kind, opset), answer
    has_body = (
        onnx.defs.get_schema(op, opset).has_function or onnx.defs.get_schema(op, opset).has_context_dependent_function
    )
    if not own and not has_body:
        assert answer.verdict == "missing" or "Casts" in answer.reason


def test_function_and_unknown_ops() -> None:
    function, unknown = kernel_support.query_runtimes(
        [model(OPS["GroupNormalization"][1], opset=21, x="2,8,4,4"), model("y = custom.Norm(x)")]
    )[0][0].answers
    assert function.verdict == "function"
    assert "GroupNormalization" in function.reason
    assert "GroupNormalization" not in function.parts
    assert (unknown.verdict, "custom:Norm" in unknown.reason) == ("missing", True)


def test_tensorrt_parser_makes_layers() -> None:
    pytest.importorskip("tensorrt_rtx")
    asked = kernel_support.query_runtimes(
        [model(OPS["LayerNormalization"][1]), model(f"{NORMED} y = Identity(n)"), model("y = custom.Norm(x)")]
    )[0]
    single, chain, unknown = next(a.answers for a in asked if a.runtime.startswith("TensorRT-RTX"))
    assert (single.verdict, single.parts) == ("layers", ("NORMALIZATION",))
    assert chain.parts == (
        "REDUCE",
        "ELEMENTWISE",
        "ELEMENTWISE",
        "REDUCE",
        "ELEMENTWISE",
        "UNARY",
        "ELEMENTWISE",
        "IDENTITY",
    )
    assert (unknown.verdict, unknown.reason != "") == ("missing", True)


def test_parser_that_dies_loses_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def dies_on_the_second(models: list[onnx.ModelProto], runtime: str) -> tuple[list[dict[str, object]], str]:
        calls.append(len(models))
        lines: list[dict[str, object]] = [{"version": "1.7"}, {"layers": ["NORMALIZATION"]}]
        return lines, "exit code -6"

    monkeypatch.setattr(kernel_support, "run_parser", dies_on_the_second)
    asked = kernel_support.query_tensorrt([onnx.ModelProto()] * 3, "tensorrt-rtx")
    assert [a.verdict for a in asked.answers] == ["layers", "missing", "layers"]
    assert "exit code -6" in asked.answers[1].reason
    assert calls == [3, 1]


def test_norms_are_shown_as_they_stand_and_as_they_would_be_written() -> None:
    finding = only(model(f"{NORMED} y = Relu(n)"))
    (now,) = (s for s in finding.runtimes if s.form == "now" and s.runtime.endswith("CPU"))
    (then,) = (s for s in finding.runtimes if s.form == "optimized" and s.runtime.endswith("CPU"))
    assert now.nodes == ("ReduceMean", "Sub", "Mul", "ReduceMean", "Add", "Sqrt", "Div")
    assert (then.nodes, then.verdict) == (("LayerNormalization",), "kernel")


def test_of_a_module_only_nodes_of_one_norm_are_shown_as_they_stand() -> None:
    """What torch decomposed is not written so, but a node that stays is what a runtime gets."""

    class ByHand(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)

    def asked(module: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
        (norm,) = normdeploy.inspect(module.eval(), inputs=["x:float32[2,8]"]).findings
        return [(s.form, s.nodes) for s in norm.runtimes if s.runtime.endswith("CPU")]

    assert asked(nn.LayerNorm(8)) == [("now", ("LayerNormalization",))]
    assert asked(ByHand()) == [("optimized", ("RMSNormalization",))]
    assert [form for form, _ in asked(nn.GroupNorm(2, 8))] == ["now", "optimized"]


def test_likes_are_one_cut() -> None:
    numbers = ", ".join(["2.0"] * 20)
    held = f", float[20] g = {{{numbers}}}, float[20] h = {{{numbers.replace('2', '3')}}}"
    chain = (
        "p = LayerNormalization(x, g, h) q = Relu(p) r = LayerNormalization(q, h, g) y = LayerNormalization<axis ="
        " 0>(r, one)"
    )
    cutter = norm_extraction.NormExtractor(model(chain, held=held, x="b,20"))
    first, second, other = (
        m.SerializeToString(deterministic=True)
        for t in ("p", "r", "y")
        if (m := cutter.extract_model([t], {})) is not None
    )
    assert first == second != other
    assert cutter.extract_model(["nowhere"], {}) is None


def test_norms_in_bodies() -> None:
    inner = (
        f"then_branch = t () => (float[b,8] u) {{ {NORMED} u = Relu(n) }}, else_branch = e () => (float[b,8] z) {{ z ="
        " Neg(x) }"
    )
    finding = only(model(f"y = If (flag) <{inner}>", inputs=", bool flag"))
    assert (finding.place, finding.status) == ("then_branch of If 'y'", "fused")
    assert {s.form for s in finding.runtimes} == {"now", "optimized"}


# ------------------------------------------------------------------ explain


CLAMPED = f"{BIASED} e = Max(v, eps) r = Sqrt(e) n = Div(c, r) y = Relu(n)"


@pytest.mark.parametrize("name", ["n", "s", "(n)"])
def test_refusal_is_explained_node_by_node(name: str) -> None:
    (explanation,) = take_census(model(CLAMPED), explain=name).explanations
    assert explanation.finding is not None
    assert "clamped" in explanation.finding.reason
    assert explanation.start == "x"
    assert [s.tensor for s in explanation.way] == ["m", "c", "s", "v", "e", "r", "n"]
    assert {s.tensor: s.mark for s in explanation.way if s.mark} == {"e": "the clamp", "r": "the root"}
    assert {s.tensor: s.text for s in explanation.way}["m"] == "ReduceMean(x, [-1])"
    assert "evaluated" in explanation.said[0]


def test_what_is_no_norm_is_told_what_it_lacks() -> None:
    def said(body: str, name: str) -> str:
        (explanation,) = take_census(model(body), explain=name).explanations
        assert explanation.finding is None
        return "\n".join(explanation.said)

    assert "neither was found nearby" in said("y = Relu(x)", "y")
    assert "have no root after them" in said("m = ReduceMean(x, ax) y = Sub(x, m)", "y")
    assert "has no reduction before it" in said("y = Sqrt(x)", "y")
    assert "no norm was recognized around the root" in said(f"{BIASED} r = Sqrt(v) y = Concat<axis = 1>(r, r)", "r")
    assert "the nearest norm is LayerNorm 'n' (skipped)" in said(CLAMPED, "y")
    assert "an input or a constant" in said(CLAMPED, "x")


def test_unknown_names_are_refused_with_their_neighbours() -> None:
    proto = model(NORMED + " variance_of_x = Relu(n) y = Relu(variance_of_x)")
    with pytest.raises(InputError, match="similar names: variance_of_x"):
        take_census(proto, explain="varience_of_x")
    with pytest.raises(InputError, match="norms were found at n"):
        take_census(proto, explain="qqqqqqqqqqq")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_an_error_and_no_census(name: str, tmp_path: Path) -> None:
    source = tmp_path / "clamped.onnx"
    onnx.save(model(CLAMPED), source)
    done = CliRunner().invoke(app, ["inspect", str(source), "--explain", name])
    assert isinstance(done.exception, InputError)
    assert f"the name to explain is {name!r}" in str(done.exception)


def test_a_line_of_the_report_is_a_name() -> None:
    chain = "a0 = LayerNormalization(x, w) b0 = Relu(a0) a1 = LayerNormalization(b0, w) y = Relu(a1)"
    assert len(take_census(model(chain), explain="(a{0..1})").explanations) == 2
    assert len(take_census(model(chain), explain="a1").explanations) == 1


# ------------------------------------------------------------------ the command line


def test_inspect_on_the_command_line(tmp_path: Path) -> None:
    source, report = tmp_path / "clamped.onnx", tmp_path / "report.json"
    onnx.save(model(CLAMPED), source)
    before = source.read_bytes()
    done = CliRunner().invoke(app, ["inspect", str(source), "--report", str(report)])
    assert done.exit_code == 0
    assert "onnxruntime CPU" in done.output
    document = json.loads(report.read_text())
    (norm,) = document["norms"]
    assert (norm["ddof"], norm["shape"], norm["half"][0]["dtype"]) == (0, ["b", 8], "float16")
    assert norm["runtimes"][0]["verdict"] == "kernel"
    assert document["explanations"] == []
    assert source.read_bytes() == before


def test_explain_on_the_command_line(tmp_path: Path) -> None:
    source, report = tmp_path / "clamped.onnx", tmp_path / "report.json"
    onnx.save(model(CLAMPED), source)
    done = CliRunner().invoke(app, ["inspect", str(source), "--explain", "n", "--report", str(report)])
    assert done.exit_code == 0
    assert "Max(v, 1e-05)  ← the clamp" in done.output
    (explanation,) = json.loads(report.read_text())["explanations"]
    assert (explanation["finding"], explanation["way"][4]["mark"]) == ("n", "the clamp")
    missed = CliRunner().invoke(app, ["inspect", str(source), "--explain", "zzz"])
    assert isinstance(missed.exception, InputError)


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    source = tmp_path / "escape.onnx"
    proto = model("y = LayerNormalization(x, w)")
    proto.graph.node[0].output[0] = proto.graph.output[0].name = "\x1b[31m[red]y"
    onnx.save(proto, source)
    done = CliRunner().invoke(app, ["inspect", str(source)])
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "[31m[red]y" in done.output


def test_files_without_norms(tmp_path: Path) -> None:
    for body in ("y = Relu(x)", "y = Identity(x)"):
        source = tmp_path / "none.onnx"
        onnx.save(model(body), source)
        done = CliRunner().invoke(app, ["inspect", str(source)])
        assert done.exit_code == 0
        assert "no normalization found" in done.output
