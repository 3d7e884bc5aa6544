"""Norms that differ in gamma and beta only are read like the first of their kind; nothing else may be taken over from
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.findings.records import Summary
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Region, compile_region
from normdeploy.recognition import region_fitting
from normdeploy.recognition.norm_facts import Norm
from normdeploy.recognition.norm_fit import RejectedReading
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.rewriting.rounding_verdicts import OF_A_KIND
from tests.support import run_onnxruntime

WIDTH = 6
Kind = tuple[np.ndarray, np.ndarray, float, int]  # gamma, beta, epsilon, axis


def chain(kinds: Sequence[Kind]) -> onnx.ModelProto:
    """Layer norms by hand, one behind the other, a Relu between."""
    nodes, held, x = [], [], "x"
    for i, (gamma, beta, epsilon, axis) in enumerate(kinds):
        p = f"n{i}_"
        held += [
            (p + "g", gamma.astype(np.float32)),
            (p + "b", beta.astype(np.float32)),
            (p + "e", np.float32(epsilon)),
        ]
        for op, inputs, out, attrs in (
            ("ReduceMean", [x], "u", {"axes": [axis]}),
            ("Sub", [x, p + "u"], "d", {}),
            ("Mul", [p + "d", p + "d"], "q", {}),
            ("ReduceMean", [p + "q"], "v", {"axes": [axis]}),
            ("Add", [p + "v", p + "e"], "w", {}),
            ("Sqrt", [p + "w"], "r", {}),
            ("Div", [p + "d", p + "r"], "n", {}),
            ("Mul", [p + "n", p + "g"], "m", {}),
            ("Add", [p + "m", p + "b"], "y", {}),
            ("Relu", [p + "y"], "z", {}),
        ):
            nodes.append(helper.make_node(op, inputs, [p + out], **attrs))
        x = p + "z"
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH, WIDTH]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], [numpy_helper.from_array(v, k) for k, v in held])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def drawn(seed: int, epsilon: float = 1e-5, axis: int = -1) -> Kind:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(WIDTH), rng.standard_normal(WIDTH), epsilon, axis


def optimized(kinds: Sequence[Kind]) -> Summary:
    proto = chain(kinds)
    out, summary = optimize_norms(proto)
    x = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), dtype=np.float32)
    (before,), (after,) = run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x})
    # each norm rounds some ten times, and hands its error on times gamma/sigma: measured against the same chain it
    # stays near one of them
    assert np.abs(before - after).max() <= 2e-4 * (1 + np.abs(before).max())
    assert all(f.status == "fused" and f.certificate for f in summary.findings)
    assert len(summary.findings) == len(kinds)
    return summary


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each reading was taken over from a like."""
    seen: list[bool] = []
    real = region_fitting.norm_like_other

    def watched(region: Region, other: Norm) -> Norm | None:
        found = real(region, other)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(region_fitting, "norm_like_other", watched)
    return seen


def test_likes_have_their_own_gamma_and_beta(guesses: list[bool]) -> None:
    summary = optimized([drawn(i) for i in range(OF_A_KIND + 3)])
    assert sum(guesses) >= OF_A_KIND + 2
    assert [f.proved[-1] for f in summary.findings[-3:]] == ["onnxruntime run of its like"] * 3
    assert [f.proved[-1] for f in summary.findings[:OF_A_KIND]] == ["onnxruntime run"] * OF_A_KIND
    last = summary.findings[-1].certificate
    assert last is not None
    assert "'n0_y', which runs the same kernels" in last.note


@pytest.mark.parametrize(
    "second",
    [drawn(2, epsilon=1e-6), drawn(2, epsilon=1e-5 * (1 + 1e-6)), drawn(2, axis=0)],
    ids=["another epsilon", "an epsilon a hair off", "another axis"],
)
def test_what_differs_in_more_is_no_like(second: Kind, guesses: list[bool]) -> None:
    summary = optimized([drawn(1), second])
    assert not any(guesses)
    assert summary.findings[1].epsilon == np.float32(second[2])
    assert summary.findings[1].axes == ((1,) if second[3] == -1 else (0,))


@pytest.mark.parametrize(("first", "second"), [(0.0, 1e-12), (0.0, 1e-20), (1e-12, 0.0)])
@pytest.mark.parametrize("leaf", ["x", "a"], ids=["one leaf", "another leaf"])
def test_an_epsilon_is_not_taken_from_a_norm_whose_epsilon_shows_nowhere(
    first: float, second: float, leaf: str
) -> None:
    norm = (
        "u{i} = ReduceMean({x}, axis) d{i} = Sub({x}, u{i}) q{i} = Mul(d{i}, d{i}) v{i} = ReduceMean(q{i}, axis)"
        " w{i} = Add(v{i}, e{i}) r{i} = Sqrt(w{i}) n{i} = Div(d{i}, r{i})"
    )
    nodes = f"{norm.format(i=0, x='x')} a = Relu(n0) {norm.format(i=1, x=leaf)} y = Add(n0, n1)"
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]> g (float[4, 6] x) => (float[4, 6] y)
        <float e0 = {{{first}}}, float e1 = {{{second}}}, int64[1] axis = {{-1}}> {{ {nodes} }}"""
    )
    _, summary = optimize_norms(proto)
    assert [f.status for f in summary.findings] == ["fused", "fused"]
    assert [np.float32(f.epsilon or 0) for f in summary.findings] == [np.float32(first), np.float32(second)]


PLAIN_ROWS = """
    <ir_version: 10, opset_import: ["" : 18]>
    agraph (float[4, 6] x) => (float[4, 6] y)
    <float eps = {{1e-5}}, float[6] a = {{1, 2, 3, 4, 5, 6}}, float[6] b = {{1, 2, {last}, 4, 5, 6}},
    int64[1] axis = {{-1}}>
    {{
        p = {first}
        q = ReduceMean(p, axis)
        w = Add(q, eps)
        r = Sqrt(w)
        z = {then}
        p2 = {second}
        q2 = ReduceMean(p2, axis)
        w2 = Add(q2, eps)
        r2 = Sqrt(w2)
        y = Div(z, r2)
    }}"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """Regions that were measured."""
    seen: list[Region] = []
    real = region_fitting._measure_region

    def watched(region: Region, *more: Any) -> Norm | RejectedReading:
        seen.append(region)
        return real(region, *more)

    monkeypatch.setattr(region_fitting, "_measure_region", watched)
    return seen


def read_both(first: str, second: str, last: int, measured: list[Region]) -> tuple[list[Norm | RejectedReading], int]:
    """Read two regions, each from a tensor to its quotient.

    Returns: the readings, and how many of the regions were measured.
    """
    text = PLAIN_ROWS.format(first=first, then="Div(x, r)", second=second, last=last)
    graph = Graph(onnx.parser.parse_model(text))
    tensors = {t.name: t for node in graph.gs.nodes for t in (*node.inputs, *node.outputs)}
    readings = []
    for y, x in (("z", "x"), ("y", "z")):
        region = compile_region(graph, tensors[y], [tensors[x]])
        assert isinstance(region, Region)
        readings.append(region_fitting.read_region(region, (4, 6), np.dtype(np.float32)))
    return readings, len(measured)


def test_a_norm_without_parameters_is_measured_once(measured: list[Region]) -> None:
    (first, second), count = read_both("Mul(x, x)", "Mul(z, z)", 3, measured)
    assert isinstance(first, Norm)
    assert isinstance(second, Norm)
    assert count == 1
    assert (second.kind, second.epsilon, second.x.name, second.y.name) == (first.kind, first.epsilon, "z", "y")


def test_a_refusal_is_measured_once(measured: list[Region]) -> None:
    """The sum of absolute values is no variance."""
    (first, second), count = read_both("Abs(x)", "Abs(z)", 3, measured)
    assert isinstance(first, RejectedReading)
    assert isinstance(second, RejectedReading)
    assert count == 1
    assert (second.reason, second.tensor) == (first.reason, "y")


def test_a_refusal_of_other_constants_is_measured_again(measured: list[Region]) -> None:
    """A template leaves out the elements of a constant with more than 4."""
    (first, _), count = read_both("Mul(x, a)", "Mul(z, b)", 30, measured)
    assert isinstance(first, RejectedReading)
    assert count == 2


def template(text: str) -> tuple[object, ...]:
    """The template of what lies between x and y."""
    graph = Graph(onnx.parser.parse_model(text))
    region = compile_region(graph, graph.gs.outputs[0], graph.gs.inputs)
    assert isinstance(region, Region)
    return region.template


PLAIN = """
    <ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    agraph (float[6, 6, 6] x) => (float[6, 6, 6] y)
    <float eps = {1e-5}, float[6] gamma = {1, 2, 3, 4, 5, 6}, int64[5] sizes = {1, 6, 1, 6, 6},
    int64[3] last = {6, 6, 6}>
    {
        r = Reshape(x, sizes)
        b = Reshape(r, last)
        n = LayerNormalization <axis = -1, epsilon = 1e-5> (b, gamma)
        e = Add(n, eps)
        y = Mul(e, gamma)
    }"""


@pytest.mark.parametrize(
    ("old", "new", "alike"),
    [
        ("gamma = {1, 2, 3, 4, 5, 6}", "gamma = {1, 2, 3, 4, 5, 7}", True),
        ("float[6] gamma", "float[6, 1] gamma", False),
        ("float[6] gamma", "double[6] gamma", False),
        ("eps = {1e-5}", "eps = {1e-6}", False),
        ("sizes = {1, 6, 1, 6, 6}", "sizes = {6, 1, 6, 1, 6}", False),
        ("axis = -1", "axis = -2", False),
        ("epsilon = 1e-5>", "epsilon = 1e-6>", False),
        ("LayerNormalization <", "com.microsoft.LayerNormalization <", False),
        ("e = Add(n, eps)", "e = Sub(n, eps)", False),
        ("e = Add(n, eps)", "e = Add(b, eps)", False),
        ("float[6, 6, 6] x", "float[6, N, 6] x", False),
    ],
)
def test_a_template_holds_all_but_gamma_and_beta(old: str, new: str, alike: bool) -> None:
    assert PLAIN.count(old) == 1
    assert (template(PLAIN) == template(PLAIN.replace(old, new))) == alike


@pytest.mark.parametrize(
    "gamma",
    [np.ones(WIDTH), np.zeros(WIDTH), np.full(WIDTH, 3.0), np.array([0, 1, 0, 2, 0, 3.0]), np.full(WIDTH, 1e-20)],
    ids=["ones", "zeros", "equal", "some zeros", "tiny"],
)
def test_a_like_with_an_odd_gamma(gamma: np.ndarray) -> None:
    proto = chain([drawn(1), (gamma, *drawn(2)[1:])])
    out, summary = optimize_norms(proto)
    x = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), dtype=np.float32)
    (before,), (after,) = run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x})
    np.testing.assert_allclose(before, after, rtol=0, atol=1e-4)
    assert len(summary.findings) == 2


def test_a_guess_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that was taken over wrongly is caught by its certificate, and the norm is then read by itself."""
    real = region_fitting.norm_like_other

    def wrong(region: Region, other: Norm) -> Norm | None:
        found = real(region, other)
        return None if found is None else region_fitting.replace(found, gamma=found.beta)

    monkeypatch.setattr(region_fitting, "norm_like_other", wrong)
    optimized([drawn(1), drawn(2), drawn(3)])
