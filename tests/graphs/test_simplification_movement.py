"""Elements that are only moved: fewer nodes move them, and what comes out is equal bit by bit."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import parser
from torch import nn

import normdeploy
from normdeploy.graphs.simplification import simplify
from normdeploy.graphs.static_reshapes import resolve_reshapes
from tests.support import run_onnxruntime

CONSTANTS = """int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] last = {-1}, int64[2] a02 = {0, 2}, int64 i0 = {0}, int64
i2 = {2},
    int64[1] v1 = {1}, bool yes = {1}, bool no = {0}, bool[1] row = {1}"""


def cleaned(body: str, x: np.ndarray, shape: str = "N, 3, 4", outputs: str = "float[] y") -> Counter[str]:
    """The ops that are left of a body, which gives the same as before for ``x``."""
    text = f'<ir_version: 8, opset_import: ["" : 18]> net (float[{shape}] x) => ({outputs}) <{CONSTANTS}> {{ {body} }}'
    return left(text, x)


def left(text: str, x: np.ndarray) -> Counter[str]:
    proto = parser.parse_model(text)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    done = simplify(proto, resolves=True)
    assert not done.note
    onnx.checker.check_model(done.proto, full_check=True)
    before, after = run_onnxruntime(proto, {"x": x}), run_onnxruntime(done.proto, {"x": x})
    assert all(np.array_equal(a, b) and a.shape == b.shape for a, b in zip(before, after, strict=True))
    return Counter(
        node.op_type for node in done.proto.graph.node if node.op_type != "Identity"
    )  # from an input to an output


X = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32)


@pytest.mark.parametrize("perm", list(itertools.permutations(range(4))))
def test_an_axis_put_in_and_taken_out_is_no_axis(perm: tuple[int, ...]) -> None:
    at = perm.index(0)
    body = (
        f"u = Unsqueeze(x, a0) t = Transpose<perm={list(perm)}>(u) k = Constant<value_ints=[{at - 4}]>() y ="
        " Squeeze(t, k)"
    )
    rest = [axis for axis in perm if axis]
    assert cleaned(body, X) == ({} if rest == sorted(rest) else {"Transpose": 1})


@pytest.mark.parametrize(
    "body",
    [
        # takes out N, which is one in this run
        "u = Unsqueeze(x, a0) t = Transpose<perm=[1, 0, 2, 3]>(u) y = Squeeze(t, a0)",
        "u = Unsqueeze(x, a02) t = Transpose<perm=[2, 4, 0, 3, 1]>(u) y = Squeeze(t, last)",  # one of two
        (
            "u = Unsqueeze(x, a0) t = Transpose<perm=[3, 2, 1, 0]>(u) z = Squeeze(t, last) m = Neg(t) s = Squeeze(m,"
            " last) y = Add(z, s)"
        ),
    ],
)
def test_other_axes_stay(body: str) -> None:
    left = cleaned(body, X[:1])
    assert left["Squeeze"] + left["Reshape"] >= 1
    assert left["Transpose"] >= 1


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
@pytest.mark.parametrize(("pads", "kept"), [("0, 0, 0, 0, 0, 0", 0), ("0, 0, 0, 0, 0, 1", 1), ("0, 0, 1, 0, 0, -1", 1)])
def test_a_pad_by_nothing_is_gone(mode: str, pads: str, kept: int) -> None:
    body = f'p = Constant<value_ints=[{pads}]>() q = Pad<mode="{mode}">(x, p) y = Neg(q)'
    assert cleaned(body, X) == Counter(Neg=1) + Counter(Pad=kept)


def test_a_pad_by_what_is_computed_stays() -> None:
    """Nothing as well in this run, but by what the data say."""
    body = """m = ReduceMax<keepdims = 0>(x) far = Constant<value_float = 100.0>() above = Greater(m, far) n = Cast<to =
    7>(above)
        v = Unsqueeze(n, a0) p = Concat<axis=0>(a0, a0, a0, a0, a0, v) q = Pad(x, p) y = Neg(q)"""
    assert cleaned(body, X)["Pad"] == 1


def test_a_selection_is_made_before_the_transpose() -> None:
    body = "t = Transpose<perm=[1, 0, 2]>(x) p = Gather<axis=0>(t, i0) q = Gather<axis=-3>(t, i2) y = Sub(p, q)"
    assert cleaned(body, X) == {"Gather": 2, "Sub": 1}
    assert cleaned("t = Transpose<perm=[1, 0, 2]>(x) y = Gather<axis=1>(t, i0)", X) == {
        "Gather": 1
    }  # 3×4, in the old order


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (
            "t = Transpose<perm=[1, 0, 2]>(x) y = Gather<axis=0>(t, i0) n = Neg(t)",
            "float[] y, float[] n",
        ),  # needed as it is
        ("t = Transpose<perm=[1, 0, 2]>(x) y = Gather<axis=0>(t, i0)", "float[] y, float[] t"),
        ("t = Transpose<perm=[2, 0, 1]>(x) y = Gather<axis=1>(t, i0)", "float[] y"),  # 4×3
        (
            "t = Transpose<perm=[1, 0, 2]>(x) y = Gather<axis=0>(t, v1)",
            "float[] y",
        ),  # an index of rank 1 keeps the axis
    ],
)
def test_where_the_transpose_says_something_it_stays(body: str, outputs: str) -> None:
    assert cleaned(body, X, outputs=outputs)["Transpose"] == 1


def test_packed_attention() -> None:
    """torch's own: query, key and value are taken of one product, without the Transpose of all three."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x, x, x, need_weights=False)[0]
            return made

    net, x = Attend().eval(), torch.randn(2, 5, 16)
    result = normdeploy.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=9)},))
    ops = Counter(node.op_type for node in result.proto.graph.node)
    assert ops["Unsqueeze"] == ops["Squeeze"] == 0
    (y,) = run_onnxruntime(result.proto, {result.proto.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        want = net.double()(x.double()).numpy()
    assert np.abs(y - want).max() <= 64 * 2.0**-24 * np.abs(want).max()  # four sums of 16, Softmax


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("y = Reshape(x, k)", {}),
        ("t = Transpose<perm=[1, 0, 2]>(x) r = Reshape(t, o) y = Transpose<perm=[0, 2, 1]>(r)", {"Transpose": 1}),
        (
            "t = Transpose<perm=[1, 0, 2]>(x) r = Reshape(t, k) y = Transpose<perm=[0, 2, 1]>(r)",
            {"Transpose": 2, "Reshape": 1},
        ),
    ],
)
def test_a_reshape_to_the_shape_that_is_there(body: str, left: dict[str, int]) -> None:
    constants = "k = Constant<value_ints=[-1, 3, 4]>() o = Constant<value_ints=[3, -1, 4]>()"
    assert cleaned(f"{constants} {body}", X) == left


@pytest.mark.parametrize(
    ("attribute", "reshapes"),
    [
        ("<allowzero=1>", 1),
        ("", 2),  # a 0 that is worked out would stand for a dim between the two
    ],
)
def test_a_reshape_of_a_reshape_to_a_shape_that_is_worked_out(attribute: str, reshapes: int) -> None:
    constants = "flat = Constant<value_ints=[-1, 2]>() two = Constant<value_ints=[2]>()"
    wanted = "n = Shape<start=0, end=1>(x) t = Mul(n, two) m = Shape<start=1, end=2>(x) w = Concat<axis=0>(t, m, two)"
    body = f"{constants} {wanted} r = Reshape(x, flat) y = Reshape{attribute}(r, w)"
    assert cleaned(body, X, shape="N, M, 4")["Reshape"] == reshapes


def test_what_a_file_states_of_the_result_is_not_believed() -> None:
    """A Reshape to (N, 4, 3) whose result is stated as (N, 3, 4)."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]> net (float[N, 3, 4] x) => (float[] y)
        <int64[3] k = {0, 4, 3}> { r = Reshape(x, k) y = Neg(r) }""")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["N", 3, 4]))
    resolve_reshapes(proto)
    assert [node.op_type for node in proto.graph.node] == ["Reshape", "Neg"]


@pytest.mark.parametrize(
    ("body", "left"), [("And(b, yes)", 2), ("Or(no, b)", 2), ("And(b, no)", 3), ("Or(b, yes)", 3), ("And(b, row)", 2)]
)
def test_what_is_neutral_for_masks(body: str, left: int) -> None:
    assert sum(cleaned(f"b0 = Cast<to=9>(x) b = Not(b0) y = {body}", X, outputs="bool[] y").values()) == left


def test_positions_and_masks_are_folded_and_tables_are_not_blown_up() -> None:
    """16,384 positions are more than onnxscript folds by itself; rows that are taken of a table again and again are
    left to it."""
    body = """r = Range(i0, n, one) c = Unsqueeze(r, a1) d = Sub(r, c) k = Abs(d) m = Less(k, i2) f = Cast<to=1>(m)
        s = ReduceSum<keepdims=0>(f, a0) g = Gather(table, r) h = Gather(table, many)
        y2 = Add(z, h) t = ReduceMean<axes=[1], keepdims=0>(g) w = Add(s, t) y = Mul(x, w)"""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[N, 128] x, float z) => (float[N, 128] y, float[1024,
    64] y2)
        <{CONSTANTS}, int64 n = {{128}}, int64 one = {{1}}, float[512, 64] table, int64[1024] many> {{ {body} }}"""
    proto = parser.parse_model(text)
    table = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    many = onnx.numpy_helper.from_array(np.resize(np.arange(512), 1024), "many")
    kept = [many, *(t for t in proto.graph.initializer if t.name not in ("table", "many"))]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*kept, onnx.numpy_helper.from_array(table, "table")])
    done = simplify(proto)
    assert Counter(node.op_type for node in done.proto.graph.node)["Gather"] == 1
    assert {"Range", "Sub", "Abs", "Less"}.isdisjoint(node.op_type for node in done.proto.graph.node)
    assert max(np.prod(t.dims) for t in done.proto.graph.initializer) == 512 * 64
    feeds = {"x": np.random.default_rng(2).standard_normal((3, 128)).astype(np.float32), "z": np.ones((), np.float32)}
    for before, after in zip(run_onnxruntime(proto, feeds), run_onnxruntime(done.proto, feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-6)  # a mean of 64 may be added up in another order


GELU = "q = Pow(r, three) k = Mul(q, c) s = Add(r, k) t = Tanh(s) o = Add(t, one) h = Mul(r, half) g = Mul(h, o)"
NUMBERS = (
    "float three = {3.0}, float c = {0.044715}, float one = {1.0}, float half = {0.5}, float[1] row1 = {2.0}, float[4]"
    " row4 = {1, 2, 3, 4}"
)
SHAPES = "int64[2] flat = {-1, 4}, int64[3] back = {-1, 3, 4}, int64[2] other = {-1, 2}"


def flattened(body: str) -> Counter[str]:
    """The ops that are left between two products of rows, which give the same as before."""
    product = (
        "w = Constant<value = float[4, 4] {1,2,3,4, 5,6,7,8, 8,7,6,5, 4,3,2,1}>() b = Constant<value = float[4]"
        " {1,1,2,2}>()"
    )
    text = f"""<ir_version: 8, opset_import: ["" : 18]> net (float[N, 4] x) => (float[] y) <{NUMBERS}, {SHAPES}> {{
        {product} m = Gemm(x, w, b) {body} }}"""
    return left(text, np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))


def test_rows_stay_rows_between_two_layers() -> None:
    ops = flattened(f"r = Reshape(m, back) {GELU} f = Reshape(g, flat) y = Gemm(f, w, b)")
    assert "Reshape" not in ops
    assert ops["Gemm"] == 2


@pytest.mark.parametrize(
    ("body", "reshapes"),
    [
        ("r = Reshape(m, back) s = Softmax(r) f = Reshape(s, flat) y = Gemm(f, w, b)", 2),  # of a whole row
        ("r = Reshape(m, back) s = Mul(r, row4) f = Reshape(s, flat) y = Gemm(f, w, b)", 2),  # along an axis
        (
            "r = Reshape(m, back) s = Mul(r, row1) f = Reshape(s, flat) y = Gemm(f, w, b)",
            2,
        ),  # a row of one: it may add an axis
        (
            "r = Reshape(m, back) s = Tanh(r) f = Reshape(s, flat) z = Gemm(f, w, b) e = ReduceSum(s) y = Add(z, e)",
            2,
        ),  # another reader
        (
            (
                "r = Reshape(m, back) k = Softmax(m) p = Reshape(k, back) s = Add(r, p) f = Reshape(s, flat) y ="
                " Gemm(f, w, b)"
            ),
            3,
        ),  # two of them
        ("r = Reshape(m, back) s = Tanh(r) f = Reshape(s, other) y = Exp(f)", 1),  # to another shape: one is enough
    ],
)
def test_where_something_looks_at_the_shape_it_stays(body: str, reshapes: int) -> None:
    assert flattened(body)["Reshape"] == reshapes


@pytest.mark.parametrize(
    ("first", "then"),
    [([0], [0]), ([1], [0]), ([1, 2], [3]), ([0, 2], [1, 4]), ([3], [1, 3]), ([0], [-1]), ([-1], [0])],
    ids=str,
)
def test_axes_are_put_in_at_once(first: list[int], then: list[int]) -> None:
    """Counted from the end they depend on the rank, and stay two."""
    body = (
        f"k = Constant<value_ints={first}>() l = Constant<value_ints={then}>() u = Unsqueeze(x, k) y = Unsqueeze(u, l)"
    )
    assert cleaned(body, X)["Unsqueeze"] <= (1 if min(first + then) >= 0 else 2)


@pytest.mark.parametrize("index", [[[0, 2, -1], [1, 1, -4]], [[3], [0]]], ids=str)
def test_rows_of_a_table_of_constants_are_taken_once(index: list[list[int]]) -> None:
    """Also where there are fewer rows than the table has."""
    rows, flat = len(index[0]), ", ".join(str(i) for row in index for i in row)
    table = ", ".join(map(str, range(12)))
    body = f"""d = Constant<value = float[3, 4] {{{table}}}>() i = Constant<value = int64[2, {rows}] {{{flat}}}>()
        g = GatherElements<axis = 1>(d, i) n = ReduceSum(x) y = Add(g, n)"""
    assert "GatherElements" not in cleaned(body, X)


@pytest.mark.parametrize("given", ["d", "i"])
def test_a_table_that_a_caller_may_replace_is_looked_up_each_time(given: str) -> None:
    kinds = {"d": "float[3, 4]", "i": "int64[2, 1]"}
    values = {"d": f"{{{', '.join(map(str, range(12)))}}}", "i": "{3, 0}"}
    held = ", ".join(f"{kinds[name]} {name} = {values[name]}" for name in kinds)
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2, 1] x, {kinds[given]} {given}) => (float[2, 1] y)
        <{held}> {{ g = GatherElements<axis = 1>(d, i) y = Add(g, x) }}"""
    )
    made = simplify(proto).proto
    other = {"d": np.ones((3, 4), np.float32), "i": np.array([[1], [2]])}[given]
    wanted = {"d": [[1], [1]], "i": [[1], [6]]}[given]
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.zeros((2, 1), np.float32), given: other})
    np.testing.assert_array_equal(found, wanted)
