"""Sums over places each of which is divided by statistics of its own: refused where places are sampled, in either order
of the operands, and counted with all their denominators where none is left out."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Refusal, compile_region
from normdeploy.graphs.symbolic_sizes import Size
from normdeploy.proof.degree import ALL, Degree
from normdeploy.proof.equivalence import equivalence_of_regions
from normdeploy.proof.proof_errors import NotProved, ProofFailure
from normdeploy.proof.prover import prove

from .support import graph_of, regions

STATISTICS = "q = Mul(y, y) s = ReduceSum<keepdims=0>(q, last) r = Add(s, one)"


def asked(body: str, shape: str = "C", other: str = "C, T") -> object:
    """The proof that a body is itself."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> net (float[{shape}] x, float[{other}] y) => (float[] z)
        <int64[1] last = {{-1}}, int64[1] first = {{0}}, float one = {{1}}> {{ {STATISTICS} {body} }}"""
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    graph = Graph(proto)
    tensors = graph.gs.tensors()
    region = compile_region(graph, tensors["z"], [tensors["x"], tensors["y"]])
    assert not isinstance(region, Refusal)
    return prove(equivalence_of_regions([region], [region], None))


@pytest.mark.parametrize(
    "body",
    [
        "d = Div(x, r) z = ReduceSum<keepdims=0>(d, first)",
        "i = Reciprocal(r) d = Mul(i, x) z = ReduceSum<keepdims=0>(d, first)",
        "i = Reciprocal(r) d = Mul(x, i) z = ReduceSum<keepdims=0>(d, first)",
        "i = Reciprocal(r) z = MatMul(x, i)",
        "i = Reciprocal(r) z = MatMul(i, x)",
        "i = Sqrt(r) z = MatMul(x, i)",
        (
            "t = Reciprocal(r) u = Unsqueeze(t, last) v = Unsqueeze(x, last) c = Concat<axis=1>(u, v) z ="
            " ReduceSum<keepdims=0>(c, first)"
        ),
    ],
)
def test_either_order_is_refused(body: str) -> None:
    """`unified` keeps the name of the first operand's axis; what the second is divided by was forgotten."""
    with pytest.raises(NotProved) as e:
        asked(body)
    assert e.value.why is ProofFailure.LIMIT
    assert "different denominators" in str(e.value)


def test_parts_of_a_concat_are_divided_by_their_own() -> None:
    ones = " ".join(f"r{i + 1} = Add(r{i}, one) i{i} = Reciprocal(r{i})" for i in range(6))
    parts = ", ".join(f"u{i}" for i in range(6))
    columns = " ".join(f"u{i} = Unsqueeze(i{i}, last)" for i in range(6))
    with pytest.raises(NotProved, match="different denominators"):
        asked(
            f"r0 = Identity(r) {ones} {columns} c = Concat<axis=1>({parts}) w = ReduceSum<keepdims=0>(c, last) z ="
            " Mul(w, x)"
        )


def test_few_static_rows_are_added_up_with_all_their_denominators() -> None:
    assert asked("d = Div(x, r) z = ReduceSum<keepdims=0>(d, first)", "3", "3, T")


def test_a_sum_of_quotients_has_the_product_of_their_denominators() -> None:
    t = Size.symbol("T")
    quotient = Degree({ALL: (1, 2), t: (0, 2)})
    assert quotient.repeat_sum(4) == Degree({ALL: (7, 8), t: (6, 8)})
    assert quotient.repeat_sum(1) == quotient
    assert quotient.has_denominator
    assert not Degree.of_element([t]).has_denominator


@pytest.mark.parametrize("parts", ["u, v", "v, u"])
def test_parts_of_a_concat_are_told_by_either_name(parts: str) -> None:
    body = (
        f"t = Reciprocal(r) u = Unsqueeze(t, last) v = Unsqueeze(x, last) c = Concat<axis=1>({parts}) z ="
        " ReduceSum<keepdims=0>(c, first)"
    )
    with pytest.raises(NotProved) as refusal:
        asked(body)
    assert refusal.value.why is ProofFailure.LIMIT


def test_places_of_a_convolution_that_are_divided_by_their_own_statistics() -> None:
    """Each tap reads a place with a denominator of its own."""
    graph = graph_of(
        """q = Mul(x, x) s = ReduceSum<keepdims=1>(q, channels) r = Add(s, one) t = Div(x, r)
        before = Conv(t, w) after = Identity(before)""",
        shape="B, 96, S",
        one=np.float32(1),
        channels=np.array([1]),
        w=np.random.default_rng(0).standard_normal((4, 96, 7)),
    )
    before, after = regions(graph)
    with pytest.raises(NotProved) as refusal:
        prove(equivalence_of_regions([before], [after]))
    assert refusal.value.why is ProofFailure.LIMIT
