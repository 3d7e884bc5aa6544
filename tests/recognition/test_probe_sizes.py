"""Norms of large static tensors are judged at small sizes of the axes along which they do the same at each place, and
of no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from normdeploy.forms import write_norm
from normdeploy.forms.norm_writer import NormForm
from normdeploy.graphs.graph import Graph
from normdeploy.recognition.anchors import is_anchor
from normdeploy.recognition.norm_candidates import candidate_at, candidate_readings
from normdeploy.recognition.norm_facts import Norm
from normdeploy.recognition.probe_sizes import find_loose_axes
from normdeploy.rewriting import certification
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

SHAPE = (24, 64, 56)  # axis 1 holds the channels


def spelled(
    axes: str = "channels",
    x: str = "x",
    mean: str = "{out} = ReduceMean({t}, {axes})",
    add: bool = True,
    affine: bool = True,
) -> str:
    """A layer norm by hand; ``mean`` is how one is taken, ``x`` the tensor that it is of."""
    steps = [
        mean.format(out="u", t=x, axes=axes),
        f"d = Sub({x}, u)",
        "q = Mul(d, d)",
        mean.format(out="v", t="q", axes=axes),
    ]
    steps += ["e = Add(v, eps)" if add else "e = Identity(v)", "r = Sqrt(e)", "n = Div(d, r)"]
    steps += ["m = Mul(n, gamma)", "y = Add(m, beta)"] if affine else ["y = Identity(n)"]
    return "\n".join(steps)


# Each body with the axes that may shrink.
BODIES: dict[str, tuple[str, tuple[int, ...]]] = {
    "over the channels": (spelled(), (0, 2)),
    "over all but the batch": (spelled("all"), (0,)),
    "over the batch": (spelled("batch"), (2,)),
    "over the batch, without gamma": (spelled("batch", affine=False), (1, 2)),
    "over the batch, without gamma and epsilon": (spelled("batch", add=False, affine=False), (1, 2)),
    "over the batch, n a constant": (
        spelled("batch", mean="{out}s = ReduceSum({t}, {axes})\n {out} = Mul({out}s, share)"),
        (2,),
    ),
    "a Reshape holds the batch": ("flat = Reshape(x, holding)\n" + spelled(x="flat"), (2,)),
    "a Reshape leaves the batch open": ("flat = Reshape(x, open)\n" + spelled(x="flat"), (0, 2)),
    "a shape is read": ("s = Shape(x)\n flat = Reshape(x, s)\n" + spelled(x="flat"), ()),
}


def model(body: str, shape: str = "24, 64, 56") -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[{shape}] x) => (float[{shape}] y)
        <int64[1] channels = {{1}}, int64[2] all = {{1, 2}},
        int64[1] batch = {{0}}, float eps = {{1e-5}}, float share = {{{1 / 24!r}}},
         int64[3] holding = {{24, 64, -1}}, int64[3] open = {{-1, 64, 0}}>
        {{{body}}}""")
    rng = np.random.default_rng(3)
    for name in ("gamma", "beta"):
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.standard_normal((64, 1), dtype=np.float32), name)
        )
    return proto


def read(proto: onnx.ModelProto) -> tuple[Graph, Norm]:
    graph = Graph(proto)
    around = candidate_at(graph, next(n for n in graph.nodes if is_anchor(graph, n)))
    assert around is not None
    return graph, next(r for r in candidate_readings(graph, around) if isinstance(r, Norm))


@pytest.mark.parametrize("name", BODIES)
def test_axes_shrink_where_nothing_meets_along_them(name: str) -> None:
    body, expected = BODIES[name]
    proto = model(body)
    _, norm = read(proto)
    assert find_loose_axes(norm.region) == expected
    out, summary = optimize_norms(proto)
    (finding,) = summary.findings
    assert finding.status == "fused"
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"  # for every size, whatever was looked at
    x = np.random.default_rng(1).standard_normal(SHAPE, dtype=np.float32)
    (before,), (after,) = run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x})
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-5)  # some ten roundings of numbers up to 10


def test_small_ones_keep_their_sizes() -> None:
    _, norm = read(model(spelled(), shape="12, 64, 56"))
    assert find_loose_axes(norm.region) == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda n: replace(n, epsilon=n.epsilon * (1 + 1e-5)),
        lambda n: replace(n, fit=replace(n.fit, axes=(0, 1))),
        lambda n: replace(n, fit=replace(n.fit, axes=(1, 2))),
        lambda n: replace(n, fit=replace(n.fit, centered=False)),
        lambda n: replace(n, gamma=n.beta),
    ],
    ids=["epsilon", "the batch too", "the place too", "no mean", "another gamma"],
)
def test_misreadings_fail(change) -> None:  # type: ignore[no-untyped-def]
    graph, norm = read(model(spelled()))
    claim = change(norm)
    form = write_norm(graph, claim, "any")
    assert isinstance(form, NormForm)
    rewrite = certification.rewrite_of(graph, certification.ResultPair(norm.region, form.nodes[-1].outputs[0]))
    assert isinstance(rewrite, certification.Rewrite)
    assert not certification.certify_rewrites({}, [rewrite])
