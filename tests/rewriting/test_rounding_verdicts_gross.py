"""A rewrite that onnxruntime can't run, or not with a reasonable error, gets another form or is undone; the file
always loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.compare.rewrite_errors import norm_rounding_error
from normdeploy.errors import CertificateError
from normdeploy.forms import measured_forms
from normdeploy.graphs.region import Refusal
from normdeploy.rewriting import rounding_verdicts
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

BY_HAND = """
    m{i} = ReduceMean(x, axes) d{i} = Sub(x, m{i}) q{i} = Mul(d{i}, d{i}) v{i} = ReduceMean(q{i}, axes)
    e{i} = Add(v{i}, eps) r{i} = Sqrt(e{i}) n{i} = Div(d{i}, r{i}) g{i} = Mul(n{i}, gamma{i}) y{i} = Add(g{i}, beta)"""


def instance_norm(dtype: str = "double", shape: str = "N, 4, H, W", copies: int = 1) -> onnx.ModelProto:
    gammas = ", ".join(f"{dtype}[4, 1, 1] gamma{i} = {{{i + 1}, 2, 3, 4}}" for i in range(copies))
    outputs = ", ".join(f"{dtype}[{shape}] y{i}" for i in range(copies))
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net ({dtype}[{shape}] x) => ({outputs})
        <int64[2] axes = {{2, 3}}, {dtype} eps = {{0.00001}}, {gammas}, {dtype}[4, 1, 1] beta = {{1, 2, 3, 4}}>
        {{ {" ".join(BY_HAND.format(i=i) for i in range(copies))} }}""")


def group_norm(dtype: str = "double", shape: str = "N, 4, 5, 6") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net ({dtype}[{shape}] x) => ({dtype}[{shape}] y)
        <int64[1] axes = {{-1}}, int64[3] groups = {{0, 2, -1}}, {dtype} eps = {{0.00001}}>
        {{
            z = Reshape(x, groups) m = ReduceMean(z, axes) d = Sub(z, m) q = Mul(d, d) v = ReduceMean(q, axes)
            e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Shape(x) y = Reshape(n, s)
        }}""")


def drawn(dtype: type = np.float64) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((3, 4, 5, 6)).astype(dtype)}


@pytest.fixture
def forms_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing were known of kernels."""
    monkeypatch.setattr(measured_forms, "_WITHOUT", frozenset())


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "onnxruntime-accurate"])
@pytest.mark.parametrize(
    "proto", [instance_norm(), instance_norm(shape="N, 4, 5, 6"), group_norm(), group_norm(shape="N, 4, H, W")]
)
def test_a_norm_in_float64_takes_a_form_that_has_a_kernel(proto: onnx.ModelProto, runtime: str) -> None:
    """The bound: what an epsilon in float32 costs, 2⁻²⁵·ε·|y|/2 with ε = 1e-5 and |y| < 32, is below 1e-11."""
    out, summary = optimize_norms(proto, runtime=runtime)
    assert summary.findings[0].status == "fused"
    assert "LayerNormalization" in {n.op_type for n in out.graph.node}
    before, after = (run_onnxruntime(p, drawn())[0] for p in (proto, out))
    assert np.abs(before - after).max() < 1e-11


def test_the_table_of_kernels_is_as_onnxruntime_has_it() -> None:
    """Should a release bring a kernel, the table is to be shortened."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> net (double[2, 4, 6] x) => (double[2, 4, 6] y) <double[4] one = {1,'
        " 1, 1, 1}> { y = OP }"
    )
    instance = onnx.parser.parse_model(text.replace("OP", "InstanceNormalization(x, one, one)"))
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        ort.InferenceSession(instance.SerializeToString(), providers=["CPUExecutionProvider"])
    group = onnx.parser.parse_model(text.replace("OP", "GroupNormalization <num_groups: int = 2> (x, one, one)"))
    x = np.random.default_rng(0).standard_normal((2, 4, 6))
    rows = x.reshape(2, 2, -1)
    exact = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(
        rows.var(-1, keepdims=True) + np.float64(np.float32(1e-5))
    ) + 1
    assert np.abs(run_onnxruntime(group, {"x": x})[0].reshape(2, 2, -1) - exact).max() > 1e-9


@pytest.mark.usefixtures("forms_of_all")
def test_what_has_no_kernel_is_taken_back() -> None:
    proto = instance_norm()
    out, summary = optimize_norms(proto)
    (finding,) = summary.findings
    assert finding.status == "undone"
    assert not finding.became
    assert "could not run it" in finding.reason
    assert "NOT_IMPLEMENTED" in finding.reason
    assert [n.op_type for n in out.graph.node] == [n.op_type for n in proto.graph.node]
    assert (run_onnxruntime(out, drawn())[0] == run_onnxruntime(proto, drawn())[0]).all()
    with pytest.raises(CertificateError, match="taken back"):
        optimize_norms(proto, strict=True)


@pytest.mark.usefixtures("forms_of_all")
def test_what_computes_in_a_narrower_type_is_taken_back() -> None:
    out, summary = optimize_norms(group_norm())
    (finding,) = summary.findings
    assert finding.status == "undone"
    assert "at ordinary inputs" in finding.reason
    assert "GroupNormalization" not in {n.op_type for n in out.graph.node}


@pytest.mark.usefixtures("forms_of_all")
def test_every_norm_of_a_kind_is_taken_back() -> None:
    """Only eight of those that differ in gamma alone are run."""
    copies = rounding_verdicts.OF_A_KIND + 3
    out, summary = optimize_norms(instance_norm(copies=copies))
    assert [f.status for f in summary.findings] == ["undone"] * copies
    assert "InstanceNormalization" not in {n.op_type for n in out.graph.node}
    assert len(run_onnxruntime(out, drawn())) == copies


@pytest.mark.usefixtures("forms_of_all")
def test_a_norm_in_a_body_is_taken_back() -> None:
    """And only that one: the same tensor names stand in the other branch, whose norm keeps its form."""
    inner = instance_norm().graph
    plain = instance_norm("float").graph
    branches = []
    for graph, name in ((inner, "then_branch"), (plain, "else_branch")):
        body = onnx.GraphProto(name=name, node=graph.node, initializer=graph.initializer, output=graph.output)
        for node in body.node:
            for i, read in enumerate(node.input):
                if read == "x":
                    node.input[i] = "z" if name == "else_branch" else "x"
        if name == "else_branch":
            body.node.insert(0, onnx.helper.make_node("Cast", ["x"], ["z"], to=onnx.TensorProto.FLOAT))
            body.node.append(onnx.helper.make_node("Cast", ["y0"], ["w"], to=onnx.TensorProto.DOUBLE))
            body.output[0].name, body.output[0].type.tensor_type.elem_type = "w", onnx.TensorProto.DOUBLE
        branches.append(body)
    x = inner.input[0]
    gate = onnx.helper.make_tensor_value_info("gate", onnx.TensorProto.BOOL, [])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, None)
    node = onnx.helper.make_node("If", ["gate"], ["y"], name="switch", then_branch=branches[0], else_branch=branches[1])
    graph = onnx.helper.make_graph([node], "net", [x, gate], [y])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    out, summary = optimize_norms(proto)
    assert {f.place.split()[0]: f.status for f in summary.findings} == {"then_branch": "undone", "else_branch": "fused"}
    for way in (True, False):
        feeds = {**drawn(), "gate": np.array(way)}
        before, after = (run_onnxruntime(p, feeds)[0] for p in (proto, out))
        assert np.abs(before - after).max() < 1e-5


@pytest.mark.usefixtures("forms_of_all")
def test_onnxruntime_does_not_decide_for_another_runtime() -> None:
    _, summary = optimize_norms(instance_norm(), runtime="tensorrt")
    assert [f.status for f in summary.findings] == ["fused"]


def test_what_is_inaccurate_at_large_offsets_alone_stays_with_a_note() -> None:
    """GroupNormalization loses its digits at an offset of 1e3 in onnxruntime, wherever it comes from."""
    _, summary = optimize_norms(group_norm("float"), runtime="tensorrt")
    (finding,) = summary.findings
    assert finding.status == "fused"
    assert finding.certificate is not None
    assert finding.certificate.is_rounding_ok is False
    assert any("inaccurate" in note for note in finding.notes)


@pytest.mark.parametrize(
    ("value", "ordinary", "gross"),
    [
        (1.0, True, False),
        (1 + 1e-5, True, False),
        (1 + 1e-3, True, True),
        (np.nan, True, True),
        (np.inf, True, True),
        (np.nan, False, False),
    ],
)
def test_what_is_gross(value: float, ordinary: bool, gross: bool) -> None:
    """Allowed is 1e-6 here, so that 16 times that lies between 1e-5 and 1e-3."""
    piece = rounding_verdicts.SideModel((), (), (), {}, "y", 21)
    trial = rounding_verdicts.RoundingTrial(
        piece, piece, np.ones((2, 3)), lambda v: v, np.full(2, 1e-6), np.array([True, ordinary])
    )
    after = np.ones((2, 3))
    after[1, 2] = value
    verdict = rounding_verdicts.judge_trial(trial, np.ones((2, 3)), after)
    assert bool(verdict.gross) is gross


@pytest.mark.parametrize("before", [Refusal("onnxruntime could not run it: no kernel"), np.full((2, 3), np.nan)])
def test_a_rounding_that_compares_nothing_says_so(before: Refusal | np.ndarray) -> None:
    """The bound was infinite then, and the report said "5e-08 ≤ inf"."""
    piece = rounding_verdicts.SideModel((), (), (), {}, "y", 21)
    trial = rounding_verdicts.RoundingTrial(
        piece, piece, np.ones((2, 3)), lambda v: v, np.full(2, 1e-6), np.array([True, True])
    )
    verdict = rounding_verdicts.judge_trial(trial, before, np.ones((2, 3)))
    assert (verdict.before, verdict.after) == (None, None)
    assert str(verdict.missing).startswith("the rounding was not compared: ")


def test_a_group_that_compares_nothing_is_not_the_worst() -> None:
    piece = rounding_verdicts.SideModel((), (), (), {}, "y", 21)
    trial = rounding_verdicts.RoundingTrial(
        piece, piece, np.ones((2, 3)), lambda v: v, np.full(2, 1e-6), np.array([True, True])
    )
    before, after = np.ones((2, 3)), np.ones((2, 3))
    before[0, 0], after[1, 1] = np.nan, 1 + 5e-7
    verdict = rounding_verdicts.judge_trial(trial, before, after)
    assert verdict.after is not None
    assert verdict.after.allowed == 1e-6
    assert verdict.after.error == pytest.approx(5e-7)


U = 2.0**-24


@pytest.mark.parametrize(
    ("x", "epsilon", "centered", "gamma", "units"),
    [
        ([-1.0, 1.0], 0.0, True, 1.0, 8 * (1 + 1) + 1),  # σ = 1, the largest is 1, y = ±1
        ([-1.0, 1.0], 0.0, True, 3.0, 8 * (1 + 1) * 3 + 3),
        ([999.0, 1001.0], 0.0, True, 1.0, 8 * (1 + 1001) + 1),  # the mean's rounding is of the size of x
        ([999.0, 1001.0], 0.0, False, 1.0, 8 * (1 + 1001 / np.sqrt(1e6 + 1)) + 1001 / np.sqrt(1e6 + 1)),
        ([-1.0, 1.0], 3.0, True, 1.0, 8 * (1 + 1 / 2) + 1 / 2 + 3 / 4 / 4),  # y = ±1/2; half an ulp of ε is 3/4 of it
        ([0.0, 0.0], 0.0, True, 1.0, 8),
    ],
)
def test_what_a_norm_may_err_by(x: list[float], epsilon: float, centered: bool, gamma: float, units: float) -> None:
    """By hand from the module's formula, in units of float32's roundoff u: 2⁻²⁵ is u / 2."""
    row = np.array([x])
    moved = row - row.mean() if centered else row
    y = gamma * moved / np.sqrt(np.square(moved).mean() + epsilon + 1e-300)
    np.testing.assert_allclose(
        norm_rounding_error(row, y, epsilon, centered=centered, gamma=gamma, unit=U), [units * U], rtol=1e-12
    )


def test_what_a_fold_may_err_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """8u times the largest sum of magnitudes: weights of 1, -2 and 3, a scale of 4 and the input that the certificate
    takes."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N, 3] x) => (float[N, 1] y)
        <float[3, 1] w = {1, -2, 3}, float[1] s = {4}, float[1] b = {0}, float[1] m = {0}, float[1] v = {1}>
        { h = MatMul(x, w) y = BatchNormalization<epsilon = 0.0>(h, s, b, m, v) }""")
    inputs, real = [], rounding_verdicts.make_case_trial

    def watched(
        rewrite: Any, chosen: rounding_verdicts.TrialInput, *rest: Any
    ) -> rounding_verdicts.RoundingTrial | None:
        inputs.append(chosen.case.leaves[0])
        return real(rewrite, chosen, *rest)

    monkeypatch.setattr(rounding_verdicts, "make_case_trial", watched)
    _, summary = optimize_norms(proto)
    (finding,), (x,) = summary.findings, inputs
    assert finding.certificate is not None
    largest = float((np.abs(x) @ np.array([4.0, 8, 12])).max())
    assert finding.certificate.rounding_bound == pytest.approx(8 * U * largest, rel=1e-6)


def test_sizes_at_which_a_convolution_has_no_window_are_not_tried() -> None:
    """Behind a strided convolution a small size leaves a negative number of rows: no input can be drawn there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear, self.norm = nn.Conv1d(1, 8, 31, stride=16), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).transpose(1, 2)
            return self.norm(y + self.linear(y))

    result = normdeploy.export(Net().eval(), inputs=["x[batch,1,samples]"], dims=["samples=960:1600:4800"])
    assert [finding.status for finding in result.summary.findings] == ["kept"]
