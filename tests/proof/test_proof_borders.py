"""Rewrites that a review found proved and that are another function: at borders, where a NaN was, at a size where a
divisor is zero."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from normdeploy.evaluate import evaluator
from normdeploy.forms.constant_linear import ConstantLinear
from normdeploy.graphs.dims import dim_size
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.symbolic_sizes import Size
from normdeploy.proof.equivalence import equivalence_of_regions
from normdeploy.proof.proof_errors import NotProved, ProofFailure
from normdeploy.proof.prover import prove
from normdeploy.rewriting.norm_optimizer import optimize_norms

from .support import graph_of, refused, regions


@pytest.mark.parametrize("batch", ["1", "N"])
@pytest.mark.parametrize("zero", [False, True], ids=["full", "first taps zero"])
def test_a_shift_before_padding_is_not_the_same_at_static_sizes(
    batch: str, zero: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Recognition misreads the padding; the border's outputs differ, and where the first tap is zero not at the first
    place."""
    monkeypatch.setattr(ConstantLinear, "has_padding", lambda self: False)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> net (float[{batch}, 3, 8, 8] x) => (float[{batch}, 4, 8, 8] y)
        {{ b = BatchNormalization (x, s, c, m, v) y = Conv <pads = [1, 1, 1, 1]> (b, w) }}"""
    )
    w = rng.standard_normal((4, 3, 3, 3))
    if zero:
        w[:, :, 0] = w[:, :, :, 0] = 0
    held = {
        "s": rng.uniform(0.5, 2, 3),
        "c": rng.standard_normal(3),
        "m": rng.standard_normal(3),
        "v": rng.uniform(0.5, 2, 3),
        "w": w,
    }
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items())
    out, summary = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["BatchNormalization", "Conv"]
    assert [f.status for f in summary.findings] == ["undone"]
    assert "its certificate failed" in summary.findings[0].reason


@pytest.mark.parametrize("attrs", ["", "<pads = [1, 1]>", "<strides = [2]>"])
@pytest.mark.parametrize("shape", ["N, 3, H", "N, 3, 9"])
def test_a_nan_behind_two_convolutions_is_seen(attrs: str, shape: str, rng: np.random.Generator) -> None:
    """Of another input, whose convolutions cancel."""
    body = "".join(
        f"d{i} = Conv{attrs}({'x' if i == 0 else 'd0'}, w) e{i} = Conv{attrs}({'z' if i == 0 else 'e0'}, w) "
        for i in range(2)
    )
    cancelled = "q = Sub(e1, e1) before = Add(d1, q) after = Identity(d1)"
    refused(
        body + cancelled, ProofFailure.HIDDEN, shape=shape, leaves=[f"z: {shape}"], w=rng.standard_normal((3, 3, 1))
    )


def divided(number: str, *why: ProofFailure, middle: float, leaf: str = "") -> None:
    """x/v beside x/n₁·n₁/v, v = (1/n₁)² + 1, n₁ = ``number`` − ``middle``: where n₁ is zero the first is 0, the second
    NaN."""
    body = f"""sh = Shape <start = 0, end = 1> (x) n2 = {number} nf = Cast <to = 1> (n2) n1 = Sub(nf, c) r = Div(unit,
    n1) rr = Mul(r, r)
        v = Add(rr, unit) xz = {"Mul(x, z)" if leaf else "Identity(x)"}
        before = Div(xz, v) xs = Div(xz, n1) xt = Mul(xs, n1) after = Div(xt, v)"""
    graph = graph_of(
        body, shape="n, 4", leaves=["z: h, 1, 4"] if leaf else [], c=np.float32(middle), unit=np.float32(1)
    )
    if leaf:
        for value in graph.proto.graph.input:
            if value.name == "z":
                value.type.tensor_type.shape.dim[0].dim_param = leaf
        graph = Graph(graph.proto)
    before, after = regions(graph)
    with pytest.raises(NotProved) as refusal, evaluator.silence_numpy():
        prove(equivalence_of_regions([before], [after]))
    assert refusal.value.why in why, refusal.value.reason


@pytest.mark.parametrize("c", [1, 10, 1000])
def test_a_size_at_which_a_divisor_is_zero_is_looked_at(c: int) -> None:
    divided("Identity(sh)", ProofFailure.HIDDEN, middle=c)


def test_twice_a_size_is_looked_at() -> None:
    divided("Add(sh, sh)", ProofFailure.HIDDEN, middle=22)


def test_where_it_is_not_known_it_is_refused() -> None:
    divided("Identity(sh)", ProofFailure.SIZE, middle=5000)  # a size that is too large to be looked at


def test_a_squared_size_is_looked_at() -> None:
    divided("Mul(sh, sh)", ProofFailure.HIDDEN, middle=25)


def test_a_leaf_of_another_size_is_no_reason_to_look_away() -> None:
    divided("Identity(sh)", ProofFailure.HIDDEN, middle=1, leaf="h - 4")


def named(rng: np.random.Generator, body: str, names: dict[str, str], shape: str, leaf: str) -> None:
    """Refused where dims have names that are no identifiers."""
    graph = graph_of(body, shape=shape, leaves=[leaf], w=rng.standard_normal((3, 3, 2)))
    for value in graph.proto.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = names.get(dim.dim_param, dim.dim_param)
    before, after = regions(Graph(graph.proto))
    with pytest.raises(NotProved), evaluator.silence_numpy():
        prove(equivalence_of_regions([before], [after]))


@pytest.mark.parametrize(
    "name", ["convolution of H by -2 in strides of 2", "convolution of H in strides of 2", repr(Size.opaque("x", 2))]
)
def test_no_dim_is_called_what_a_convolution_makes(name: str, rng: np.random.Generator) -> None:
    """Behind strides a length is no polynomial; its symbol must be no name that a file can write."""
    length = (
        "c = Conv<strides=[2]>(x, w) n = Shape<start=2,end=3>(c) f = Cast<to=1>(n) m = Shape<start=0,end=1>(y) g ="
        " Cast<to=1>(m)"
    )
    named(rng, f"{length} before = Mul(y, f) after = Mul(y, g)", {"Q": name}, "1, 3, H", "y: Q")


def test_lengths_that_read_alike_are_two(rng: np.random.Generator) -> None:
    """2*B is twice B; 2·B is a name."""
    length = """c = Conv<strides=[3]>(x, w) n = Shape<start=2,end=3>(c) f = Cast<to=1>(n)
        d = Conv<strides=[3]>(y, w) m = Shape<start=2,end=3>(d) g = Cast<to=1>(m)"""
    named(rng, f"{length} before = Mul(x, f) after = Mul(x, g)", {"P": "2*B", "Q": "2·B"}, "1, 3, P", "y: 1, 3, Q")


@pytest.mark.parametrize("made", [Size.opaque("conv", 1), dim_size(None, "x:0")])
def test_symbols_of_unknown_sizes_are_no_names(made: Size) -> None:
    (symbol,) = made.symbols()
    assert dim_size(symbol, "") != made
