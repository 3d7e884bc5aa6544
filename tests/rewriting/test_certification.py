"""Certificates must fail on what was misread: each test plants a wrong claim about a subgraph and sees the identity
verdict reject it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest

from normdeploy.errors import CertificateError
from normdeploy.findings.records import Certificate, combine_certificates
from normdeploy.forms import layer_norm, write_norm
from normdeploy.forms.norm_writer import NormForm
from normdeploy.graphs.graph import Graph
from normdeploy.recognition.anchors import is_anchor
from normdeploy.recognition.norm_candidates import candidate_at, candidate_readings
from normdeploy.recognition.norm_facts import Norm
from normdeploy.recognition.norm_parameters import MeasuredParameter
from normdeploy.rewriting import certification, norm_optimizer

AXES = {"last": "-1", "channel": "1"}


def model(axis: str = "last", unbiased: bool = False, epsilon: float = 1e-5, shape: str = "N, 6, 6") -> onnx.ModelProto:
    """A layer norm by hand over one axis of a tensor whose axes 1 and 2 have the same size, so that a swapped axis
    still runs."""
    factor = "v = Mul(v0, bessel)" if unbiased else "v = Identity(v0)"
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[{shape}] x) => (float[{shape}] y)
        <int64[1] axes = {{{AXES[axis]}}}, float eps = {{{epsilon}}}, float bessel = {{1.2}}>
        {{
            u = ReduceMean(x, axes)
            d = Sub(x, u)
            q = Mul(d, d)
            v0 = ReduceMean(q, axes)
            {factor}
            e = Add(v, eps)
            r = Sqrt(e)
            y = Div(d, r)
        }}"""
    return onnx.parser.parse_model(text)


def read(proto: onnx.ModelProto) -> tuple[Graph, Norm]:
    graph = Graph(proto)
    root = next(n for n in graph.nodes if is_anchor(graph, n))
    around = candidate_at(graph, root)
    assert around is not None
    return graph, next(r for r in candidate_readings(graph, around) if isinstance(r, Norm))


def judged(graph: Graph, norm: Norm, claim: Norm) -> Certificate:
    """The certificate of writing ``claim`` in the place of ``norm``."""
    form = write_norm(graph, claim, "any")
    assert isinstance(form, NormForm)
    rewritten = certification.rewrite_of(graph, certification.ResultPair(norm.region, form.nodes[-1].outputs[0]))
    assert isinstance(rewritten, certification.Rewrite)
    return certification.certify_rewrites({}, [rewritten])


def unbiased_as_biased(norm: Norm) -> Norm:
    return replace(norm, gamma=None, epsilon=1e-5)


WRONG: dict[str, tuple[dict[str, object], Callable[[Norm], Norm]]] = {
    "channel norm claimed as last axis": ({"axis": "channel"}, lambda n: replace(n, fit=replace(n.fit, axes=(2,)))),
    "last axis claimed as channel norm": ({}, lambda n: replace(n, fit=replace(n.fit, axes=(1,)))),
    "both axes claimed": ({}, lambda n: replace(n, fit=replace(n.fit, axes=(1, 2)))),
    "epsilon dropped": ({}, lambda n: replace(n, epsilon=0.0)),
    "a tiny epsilon dropped": ({"epsilon": 1e-12}, lambda n: replace(n, epsilon=0.0)),
    "epsilon 1e-6 for 1e-5": ({}, lambda n: replace(n, epsilon=1e-6)),
    "epsilon off by 1e-5 of itself": ({}, lambda n: replace(n, epsilon=n.epsilon * (1 + 1e-5))),
    "unbiased read as biased": ({"unbiased": True}, unbiased_as_biased),
    "unbiased epsilon not scaled": ({"unbiased": True}, lambda n: replace(n, epsilon=1e-5)),
    "mean not subtracted": ({}, lambda n: replace(n, fit=replace(n.fit, centered=False))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_misread_norm_fails(name: str) -> None:
    how, misread = WRONG[name]
    graph, norm = read(model(**how))  # type: ignore[arg-type]
    assert judged(graph, norm, norm), "the right reading must pass"
    certificate = judged(graph, norm, misread(norm))
    assert not certificate
    assert certificate.why in ("DIFFERS", "STORED", "HIDDEN", "LIMIT")


def test_the_reference_is_the_subgraph_not_the_fact() -> None:
    """A claim that is wrong about the shift only, where every norm node would agree with the claim itself."""
    graph, norm = read(model())
    assert not judged(graph, norm, replace(norm, beta=MeasuredParameter(np.full((1, 1, 1), 1e-3))))


def _plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass write every layer norm with ten times its epsilon."""
    real = layer_norm.write_layer_norm

    def wrong(graph: Graph, norm: Norm, runtime: str) -> object:
        return real(graph, replace(norm, epsilon=10 * norm.epsilon), runtime)

    monkeypatch.setattr("normdeploy.forms.FORMS", (wrong,))


def test_a_failed_certificate_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch)
    proto = model()
    out, summary = norm_optimizer.optimize_norms(proto)
    (finding,) = summary.findings
    assert finding.status == "undone"
    assert "certificate failed" in finding.reason
    assert [n.op_type for n in out.graph.node] == [n.op_type for n in proto.graph.node]


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch)
    with pytest.raises(CertificateError, match="'y'"):
        norm_optimizer.optimize_norms(model(), strict=True)


def test_rounding_is_run_and_reported() -> None:
    _, summary = norm_optimizer.optimize_norms(model())
    (finding,) = summary.findings
    assert finding.proved == ("identity", "onnxruntime run")
    assert finding.certificate is not None
    assert finding.certificate.is_rounding_ok


def test_an_inaccurate_kernel_is_named_and_does_not_undo() -> None:
    """onnxruntime's GroupNormalization computes E[x²] − E[x]²: at an offset of 1e3 it loses everything (facts of
    onnxruntime 1.31)."""
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N, 4, 3, 3] x) => (float[N, 4, 3, 3] y)
        <int64[1] axes = {-1}, float eps = {1e-5}, int64[3] view = {0, 2, -1}, int64[4] back = {0, 4, 3, 3}>
        {
            g = Reshape(x, view)
            u = ReduceMean(g, axes)
            d = Sub(g, u)
            q = Mul(d, d)
            v = ReduceMean(q, axes)
            e = Add(v, eps)
            r = Sqrt(e)
            n = Div(d, r)
            y = Reshape(n, back)
        }"""
    out, summary = norm_optimizer.optimize_norms(onnx.parser.parse_model(text), runtime="tensorrt")
    (finding,) = summary.findings
    assert [n.op_type for n in out.graph.node] == ["GroupNormalization"]
    assert finding.certificate
    assert finding.certificate.is_rounding_ok is False
    assert any("inaccurate" in note for note in finding.notes)
    accurate, again = norm_optimizer.optimize_norms(onnx.parser.parse_model(text))
    assert "GroupNormalization" not in [n.op_type for n in accurate.graph.node]
    assert again.findings[0].certificate is not None
    assert again.findings[0].certificate.is_rounding_ok


@pytest.mark.parametrize("compared", ["x", "u"])
@pytest.mark.parametrize("number", [-1.0, 0.0, 3.25])
def test_a_mask_inside_a_norm_is_refused(compared: str, number: float) -> None:
    """A mask shows only where an element (or the mean) is that very number; no random input ever holds it."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N, 6] x) => (float[N, 6] y)
        <int64[1] axes = {{-1}}, float eps = {{1e-5}}, float number = {{{number}}}, float nothing = {{2}}>
        {{
            u = ReduceMean(x, axes)
            d0 = Sub(x, u)
            mask = Equal({compared}, number)
            d = Where(mask, nothing, d0)
            q = Mul(d, d)
            v = ReduceMean(q, axes)
            e = Add(v, eps)
            r = Sqrt(e)
            y = Div(d, r)
        }}"""
    proto = onnx.parser.parse_model(text)
    result, summary = norm_optimizer.optimize_norms(proto)
    assert [n.op_type for n in result.graph.node] == [n.op_type for n in proto.graph.node]
    assert [f.status for f in summary.findings] == ["refused"]
    assert "Where is not algebraic" in summary.findings[0].reason


def test_a_division_that_spares_constant_rows_is_refused() -> None:
    """Where σ is 0 it divides by 1 and gives 0; a norm with an epsilon of 0 would give NaN there, and the same
    everywhere else."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N, 6] x) => (float[N, 6] y)
        <int64[1] axes = {-1}, float zero = {0}, float one = {1}>
        {
            u = ReduceMean(x, axes)
            d = Sub(x, u)
            q = Mul(d, d)
            v = ReduceMean(q, axes)
            r = Sqrt(v)
            constant = Equal(r, zero)
            s = Where(constant, one, r)
            y = Div(d, s)
        }""")
    result, summary = norm_optimizer.optimize_norms(proto)
    assert [n.op_type for n in result.graph.node] == [n.op_type for n in proto.graph.node]
    assert [f.status for f in summary.findings] == ["refused"]


@pytest.mark.parametrize("turned", [False, True])
def test_two_steps_are_as_sure_as_the_less_sure_of_both(turned: bool) -> None:
    """Either may be wrong: 2^-100 and 2^-120 are less than 2^-99 together. What one step makes of Inf stays made."""
    one = Certificate(True, 1e-9, 1e-7, 4, "zero", method="exact", bits=100, degree=3, gains=True)
    other = Certificate(True, 3e-9, 2e-7, 6, "normal", method="exact", bits=120, degree=5)
    found = combine_certificates(*((other, one) if turned else (one, other)))
    assert found is not None
    assert (found.bits, found.degree, found.gains, found.cases, found.worst) == (99, 5, True, 10, "normal")
    assert (found.error, found.bound) == (4e-9, 1e-7 + 2e-7)
    numeric = combine_certificates(one, replace(other, method="float64", bits=0))
    assert numeric is not None
    assert (numeric.method, numeric.bits) == ("float64", 0)
