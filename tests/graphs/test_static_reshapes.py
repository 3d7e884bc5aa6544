"""Reshape and Expand to computed sizes get constant operands where one size stays open; everything else stays as it
is."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import normdeploy
from normdeploy.graphs.simplification import SimplifiedModel, simplify
from normdeploy.graphs.static_reshapes import resolve_reshapes
from tests.support import run_onnxruntime

CONSTANTS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] four = {4},
int64[1] six = {6},
    int64[1] rest = {-1}, int64[1] eight = {8}, int64[1] none = {0}"""


def net(body: str, inputs: str = "float[N,M,6] x", output: str = "y", opset: int = 17) -> onnx.ModelProto:
    text = (
        f'<ir_version: 8, opset_import: ["" : {opset}]> net ({inputs}) => (float[] {output}) <{CONSTANTS}> {{ {body} }}'
    )
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


SAME: list[int] = []


def operands(proto: onnx.ModelProto) -> list[list[int] | None]:
    """Of each Reshape and Expand: the constant operand, None where it is computed; `SAME` of an Identity in its
    place."""
    held = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in proto.graph.initializer}
    kinds = ("Reshape", "Expand", "Identity")
    return [SAME if n.op_type == "Identity" else held.get(n.input[1]) for n in proto.graph.node if n.op_type in kinds]


N, M = "s = Shape(x) n = Slice(s, zero, one)", "m = Slice(s, one, two)"
RESOLVED = {
    f"{N} {M} k = Concat<axis=0>(n, m, two, three) y = Reshape(x, k)": [0, 0, 2, 3],
    f"{N} k = Concat<axis=0>(n, rest) y = Reshape(x, k)": [0, -1],  # the -1 is the file's own
    f"{N} {M} p = Mul(n, m) k = Concat<axis=0>(p, six) y = Reshape(x, k)": [-1, 6],
    f"{N} {M} p = Mul(m, six) k = Concat<axis=0>(n, p) y = Reshape(x, k)": None,
    f"{N} {M} k = Concat<axis=0>(m, n, six) y = Reshape(x, k)": None,  # two open sizes in other places
    f"{N} {M} k = Concat<axis=0>(m, rest) y = Reshape(x, k)": None,
    f"{N} {M} k = Concat<axis=0>(n, m, six) y = Expand(x, k)": SAME,
    f"{N} {M} k = Concat<axis=0>(two, n, m, six) y = Expand(x, k)": [2, 1, 1, 6],
    f"{N} {M} k = Concat<axis=0>(n, n, m, six) y = Expand(x, k)": None,
    f"{N} k = Concat<axis=0>(zero, n, rest) z = Concat<axis=0>(x, x) y = Reshape<allowzero=1>(x, k)": None,
    f"{N} {M} q = Max(n, eight) k = Concat<axis=0>(rest, m, six) z = Concat<axis=0>(m, six, n) y = Reshape(x, k)": SAME,
    f"{N} {M} q = Max(n, eight) k = Concat<axis=0>(rest, m, three, two) y = Reshape(x, k)": [-1, 0, 3, 2],
    f"{N} {M} q = Max(n, eight) d = Div(q, q) e = Mul(n, d) k = Concat<axis=0>(e, m, six) y = Reshape(x, k)": (
        None
    ),  # n, by way of a Max
}


@pytest.mark.parametrize("body", RESOLVED)
def test_an_operand_is_a_constant_where_one_size_stays_open(body: str) -> None:
    proto = net(body)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError:
        proto = net(body.replace("<axis=0>(x, x)", "<axis=0>(x)"))
    out = onnx.ModelProto.FromString(proto.SerializeToString())
    resolve_reshapes(out)
    (found,) = operands(out)
    assert found == RESOLVED[body]
    if "allowzero" in body:
        return
    for size in ((1, 1), (2, 5), (7, 3), (33, 2), (4, 64)):
        x = np.random.default_rng(0).standard_normal((*size, 6), dtype=np.float32)
        for a, b in zip(run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x}), strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_computed_the_sizes_goes_away() -> None:
    """Attention's reshapes as torch writes them for a dynamic batch: Shape, Slice and Concat go."""
    k = "s = Shape(x) n = Slice(s, zero, one) k = Concat<axis=0>(n, rest, two, three) z = Reshape(x, k)"
    proto = net(
        f"{k} t = Transpose<perm=[0,2,1,3]>(z) u = Shape(t) l = Slice(u, zero, one) f = Concat<axis=0>(l, rest) y ="
        " Reshape(t, f)"
    )
    cleaned = simplify(proto, [{"x": np.ones((2, 5, 6), np.float32)}], resolves=True)
    assert not cleaned.note
    assert sorted(n.op_type for n in cleaned.proto.graph.node) == ["Reshape", "Reshape", "Transpose"]


@pytest.mark.parametrize(
    "size",
    [
        "q = Mul(w, w) s = Shape(q)",
        "q = Neg(w) p = Size(q) s = Reshape(p, rest)",
        "q = Cast<to=7>(w) s = Slice(q, zero, one)",
    ],
)
def test_a_size_from_a_large_weight_does_not_stop_the_cleanup(size: str) -> None:
    """The cleanup works on a copy of the model without the elements of large weights."""
    proto = net(f"{size} t = Identity(x) y = Reshape(t, s)", "float[512] x")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.full(512, 512.0, np.float32), "w"))
    cleaned = simplify(proto, [{"x": np.arange(512, dtype=np.float32)}], resolves=True)
    assert not cleaned.note
    assert cleaned.ran


def test_an_empty_batch_runs_as_before() -> None:
    """[n, 6·m] of no rows: [0, -1] would ask for a rest that nothing tells."""
    proto = net(f"{N} {M} p = Mul(m, six) k = Concat<axis=0>(n, p) y = Reshape(x, k)")
    out = onnx.ModelProto.FromString(proto.SerializeToString())
    resolve_reshapes(out)
    for size in ((0, 5, 6), (3, 5, 6)):
        x = np.zeros(size, np.float32)
        assert run_onnxruntime(out, {"x": x})[0].shape == run_onnxruntime(proto, {"x": x})[0].shape == (size[0], 30)


def test_sizes_that_two_dims_share_are_not_mixed_up() -> None:
    """Where both dims bear one name the size is the data's own in both places, and 0 takes the one at its place."""
    body = f"{N} {M} k = Concat<axis=0>(m, n, three, two) y = Reshape(x, k)"
    proto = net(body, "float[N,N,6] x")
    resolve_reshapes(proto)
    assert operands(proto) == [[0, 0, 3, 2]]


def test_a_default_that_may_be_overridden_is_no_constant() -> None:
    """An initializer that is an input too: the file computes with what it is given."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[N] x, float c) => (float[N] y) <float c = {0}> {
            z = Add(x, c) d = Add(c, c) y = Mul(z, d)
        }"""
    )
    cleaned = simplify(proto, resolves=True)
    assert not cleaned.note
    session = ort.InferenceSession(cleaned.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "c": np.array(2, np.float32)})[0], (x + 2) * 4)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.zeros(3, np.float32))


def test_two_draws_stay_two() -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> net (float[N] x) => (float[N] y) {
            a = RandomNormalLike(x) b = RandomNormalLike(x) e = Exp(x) f = Exp(x) s = Sub(a, b) t = Add(e, f)
            y = Add(s, t)
        }""")
    cleaned = simplify(proto)
    assert [n.op_type for n in cleaned.proto.graph.node].count("RandomNormalLike") == 2


@pytest.mark.parametrize("opset", [7, 9, 11, 13])
def test_old_files_are_cleaned_without_rules(opset: int) -> None:
    """Constants are computed and dead ends removed; no op is written that the opset does not have."""
    body = "c = Add(one, two) d = Add(six, c) e = Cast<to=1>(c) y = Mul(x, e)"
    proto = net(body, opset=opset)
    cleaned = simplify(proto, resolves=True)
    assert not cleaned.note
    onnx.checker.check_model(cleaned.proto, full_check=True)
    assert [n.op_type for n in cleaned.proto.graph.node] == ["Mul"]
    x = np.ones((1, 2, 6), np.float32)
    np.testing.assert_array_equal(run_onnxruntime(cleaned.proto, {"x": x})[0], 3 * x)


def untidy() -> onnx.ModelProto:
    """A relu with a constant that is computed twice, and a dead end."""
    body = (
        "c = Add(one, two) d = Add(one, two) e = Cast<to=1>(c) f = Cast<to=1>(d) g = Mul(e, f) dead = Exp(x) r ="
        " Relu(x) y = Mul(r, g)"
    )
    return net(body)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def test_optimize_cleans_up_unless_told_not_to() -> None:
    assert ops(normdeploy.optimize(untidy()).proto) == ["Relu", "Mul"]
    assert ops(normdeploy.optimize(untidy(), simplify=False).proto) == ops(untidy())


def test_optimize_cleans_up_only_what_it_can_compare() -> None:
    result = normdeploy.optimize(untidy(), compare_limit=0)
    assert ops(result.proto) == ops(untidy())
    assert any("not cleaned up" in note for note in result.notes)


def test_a_cleanup_that_changes_numbers_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(proto: onnx.ModelProto, **_: object) -> SimplifiedModel:
        out = onnx.ModelProto.FromString(proto.SerializeToString())
        out.graph.node[-2].op_type = "LeakyRelu"
        return SimplifiedModel(out)

    monkeypatch.setattr("normdeploy.graphs.simplification.simplify", wrong)
    result = normdeploy.optimize(untidy())
    assert ops(result.proto) == ops(untidy())
    assert any("not simplified" in note for note in result.notes)
