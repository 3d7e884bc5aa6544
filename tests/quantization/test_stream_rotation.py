"""Streams centered and rotated: the same function in float64 at any input, proved; and lookalikes that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from normdeploy.findings.quantization_report import Migration
from normdeploy.quantization import residual_streams
from normdeploy.quantization.stream_edits import StreamEdits, StreamMap
from normdeploy.quantization.stream_rotation import center_streams, rotate_streams
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from tests.half_graphs import text
from tests.quantization.drawn_streams import drawn
from tests.quantization.streams import ATTENTION, FEED, HIDDEN, INPUTS, OUTPUTS, PLACES, WIDTH, WORDS, transformer

RNG = np.random.default_rng(17)
MATRIX = RNG.standard_normal((WIDTH, WIDTH)) / 5


def feeds(proto: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(seed), {}
    for value in proto.graph.input:
        shape = [d.dim_value or {"b": 2, "s": 4 + seed % 2}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        whole = value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        made[value.name] = rng.integers(0, WORDS, shape) if whole else rng.standard_normal(shape).astype(np.float32)
    return made


def shaken(proto: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Each element of each weight off by 2^-24 of itself, up or down."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for t in made.graph.initializer:
        if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) > 0:
            array = numpy_helper.to_array(t)
            off = array * (1 + rng.choice([-1.0, 1.0], array.shape) * 2.0**-23.5)
            t.CopyFrom(numpy_helper.from_array(off.astype(np.float32), t.name))
    return made


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Equal in float64 but for the rounding of what was computed.

    Rounding moves each element by at most 2^-24 of itself, so a weight by 2^-24 of its length; a rotation keeps
    lengths. Beside the model itself with every element 2^-24 of itself off: as far for each of the roundings of a
    weight (one for its gamma and rotations, each constant once), 4 for directions that were not drawn.
    """
    onnx.checker.check_model(after, full_check=True)
    rng = np.random.default_rng(0)
    others = [OnnxFloat64Runner(shaken(before, rng)) for _ in range(4)]
    runners = [OnnxFloat64Runner(before), OnnxFloat64Runner(after)]
    for seed in (1, 2):
        fed = feeds(before, seed)
        right, made = (runner.infer(fed) for runner in runners)
        for name, value in right.items():
            moved = max(float(np.abs(other.infer(fed)[name] - value).max()) for other in others)
            assert 0 < moved < 1e-4 * (1 + np.abs(value).max())
            assert np.abs(made[name] - value).max() <= 4 * moved, name


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def told(migrations: tuple[Migration, ...], kind: str) -> list[tuple[str, str]]:
    """(status, tensor) of each of a kind; what was made has a certificate."""
    chosen = [m for m in migrations if m.kind == kind]
    for m in chosen:
        assert (m.status == "refused") == bool(m.reason)
        assert m.status == "refused" or (
            m.certificate is not None and m.certificate.identity and m.certificate.method == "exact"
        )
        assert m.certificate is None or m.certificate.bits >= 80
    return [(m.status, m.norm) for m in chosen]


# ------------------------------------------------------------------ what is made


def test_layer_norms_become_rms_norms_where_the_mean_is_taken_off_before() -> None:
    proto = transformer("layer")
    after, migrations = center_streams(proto)
    assert told(migrations, "center") == [("made", "x0")]
    assert "LayerNormalization" not in ops(after)
    assert ops(after).count("RMSNormalization") == 3
    same(proto, after)
    table = next(t for t in after.graph.initializer if t.dims == [WORDS, WIDTH])
    # each of 24 elements of about one is rounded by 2^-25 of itself
    assert np.abs(numpy_helper.to_array(table).astype(float).mean(-1)).max() < WIDTH * 2.0**-23


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_stream_and_the_values_are_rotated(norm: str) -> None:
    proto = transformer(norm)
    after, migrations = rotate_streams(proto)
    assert told(migrations, "center") == ([("made", "x0")] if norm == "layer" else [])
    assert told(migrations, "rotate") == [("made", "x0"), ("made", "vt0")]
    stream, values = (m for m in migrations if m.kind == "rotate")
    assert set(stream.linears) == {"a0", "a1", "q0", "k0", "v0", "u1", "y"}
    assert set(values.linears) == {"v0", "a0"}
    assert ops(after).count("RMSNormalization") == 3
    assert "Mul" not in ops(after)
    same(proto, after)


def test_no_channel_of_a_rotated_table_stands_out(rng: np.random.Generator) -> None:
    """A table with one large channel: each row of 24 gets 1/√24 of it in every channel."""
    table = rng.standard_normal((WORDS, WIDTH))
    table[:, 5] = 100
    after, _ = rotate_streams(transformer("rms", more={"table": table}))
    (stored,) = (numpy_helper.to_array(t) for t in after.graph.initializer if t.dims == [WORDS, WIDTH])
    assert np.abs(np.abs(stored) - 100 / np.sqrt(WIDTH)).max() < np.abs(np.delete(table, 5, 1)).sum(1).max() / 4
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), np.linalg.norm(table, axis=1), rtol=1e-6)


TRUE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a tied embedding": ({"head": "tied = Transpose<perm=[1, 0]>(table) y = MatMul(n2, tied)"}, {}),
    "a head of rows": (
        {"head": "y = Gemm<transB=1>(rows, both)"}
        | {"last norm": "nn = RMSNormalization<epsilon=1e-3>(x2, g2) rows = Reshape(nn, two)"},
        {"both": RNG.standard_normal((WORDS, WIDTH)), "two": np.array([-1, WIDTH])},
    ),
    "learned positions": (
        {
            "embedding": "w = Gather(table, ids) sh = Shape<start=1, end=2>(ids) n = Squeeze(sh)"
            " r = Range(zero, n, one) p = Gather(places, r) x0 = Add(w, p)"
        },
        {"places": RNG.standard_normal((PLACES, WIDTH)), "zero": np.array(0), "one": np.array(1)},
    ),
    "a constant row": ({"first sum": "x1 = Sum(x0, a0, row)"}, {"row": RNG.standard_normal(WIDTH)}),
    "a scaled embedding": (
        {"embedding": "e = Gather(table, ids) x0 = Mul(e, root)"},
        {"root": np.array(np.sqrt(WIDTH), np.float32)},
    ),
    "a stream of rows": (
        {"feed": "r = Reshape(n1, two) u1 = Gemm(r, wu1, bu1) h1 = Tanh(u1)"
         " d = Gemm<transB=1, alpha=0.5, beta=2.0>(h1, wt, bd1) sh = Shape(x1) a1 = Reshape(d, sh)"},
        {"two": np.array([-1, WIDTH]), "wt": RNG.standard_normal((WIDTH, HIDDEN))},
    ),
    "the last token alone": (
        {"second sum": "x9 = Add(x1, a1) x2 = Gather<axis=1>(x9, last)"},
        {"last": np.array([-1])},
    ),
    "the last tokens": (
        {"second sum": "x9 = Add(x1, a1) x2 = Slice(x9, start, end, axis)"},
        {"start": np.array([-1]), "end": np.array([2**40]), "axis": np.array([1])},
    ),
    "one weight of two layers": (
        {"feed": FEED.format(i=1) + "dm = MatMul(h1, wd1) d2 = Add(dm, bd1)", "second sum": "x2 = Sum(x1, a1, d2)"},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", TRUE)
def test_other_streams_that_are_closed(name: str, norm: str) -> None:
    changed, more = TRUE[name]
    if norm == "layer" and "last norm" in changed:
        changed = changed | {"last norm": changed["last norm"].replace("RMSN", "LayerN").replace("g2)", "g2, b2)")}
    outputs = OUTPUTS.replace("b,s,", "rows,") if "Gemm" in changed.get("head", "") else OUTPUTS
    proto = transformer(norm, changed, outputs=outputs.replace("s,", "1,") if "last" in name else outputs, more=more)
    after, migrations = rotate_streams(proto)
    assert ("made", "x0") in told(migrations, "rotate"), [m.reason for m in migrations]
    same(proto, after)


def test_a_weight_that_layers_share_stays_one() -> None:
    changed, more = TRUE["one weight of two layers"]
    proto = transformer("rms", changed, more=more)
    after, _ = rotate_streams(proto)
    read = [n.input[1] for n in after.graph.node if n.op_type == "MatMul" and n.input[0] == "h1"]
    assert len(read) == 2
    assert len(set(read)) == 1


def test_a_width_without_a_hadamard_matrix_is_rotated_in_blocks(rng: np.random.Generator) -> None:
    """Of 24·7 channels runs of 24; and an odd width is refused."""
    for width, made in ((168, True), (25, False)):
        shapes = {"table": (WORDS, width), "w": (width, 8), "v": (8, width), "head": (width, WORDS)}
        drawn = {name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()} | {"g": np.ones(width)}
        body = (
            "x = Gather(table, ids) n = RMSNormalization(x, g) h = MatMul(n, w) t = Tanh(h) a = MatMul(t, v)"
            " z = Add(x, a) m = RMSNormalization(z, g) y = MatMul(m, head)"
        )
        proto = text(body, INPUTS, OUTPUTS, 23, **drawn)
        after, migrations = rotate_streams(proto)
        assert told(migrations, "rotate") == [("made" if made else "refused", "x")]
        assert made or "its 25 channels" in migrations[0].reason
        if made:
            same(proto, after)


def test_grouped_values_and_the_attention_op(rng: np.random.Generator) -> None:
    """One head of values for two of queries, by Expand and by the op's own head counts."""
    expanded = ATTENTION.format(i=0).replace(
        "vt0 = Transpose<perm=[0, 2, 1, 3]>(vh0)",
        "vs0 = Transpose<perm=[0, 2, 1, 3]>(vh0) ve0 = Expand(vs0, twice) vt0 = Identity(ve0)",
    )
    expanded = expanded.replace("vh0 = Reshape(v0, heads)", "vh0 = Reshape(v0, one)")
    op = (
        "q0 = MatMul(n0, wq0) k0 = MatMul(n0, wk0) v0 = MatMul(n0, wv0)"
        " of0 = Attention<q_num_heads=2, kv_num_heads=1>(q0, k0, v0) a0 = MatMul(of0, wo0)"
    )
    half = WIDTH // 2
    more = {"wv0": rng.standard_normal((WIDTH, half)) / 5, "bv0": rng.standard_normal(half)}
    more |= {"one": np.array([0, 0, 1, half]), "twice": np.array([1, 2, 1, 1])}
    for attention, changed in ((expanded, more), (op, more | {"wk0": rng.standard_normal((WIDTH, half)) / 5})):
        proto = transformer("rms", {"attention": attention}, more=changed)
        after, migrations = rotate_streams(proto)
        assert [status for status, _ in told(migrations, "rotate")] == ["made", "made"]
        same(proto, after)


def test_a_linear_layer_may_read_a_rotated_stream_but_no_centered_one() -> None:
    changed = {"head": "y1 = MatMul(n2, head) y2 = MatMul(x2, head) y = Add(y1, y2)"}
    proto = transformer("rms", changed)
    after, migrations = rotate_streams(proto)
    assert ("made", "x0") in told(migrations, "rotate")
    same(proto, after)
    after, migrations = rotate_streams(transformer("layer", changed))
    assert [m.reason for m in migrations if m.kind == "center"] == [
        "MatMul 'y2' reads it and depends on the mean of each row"
    ]


# ------------------------------------------------------------------ lookalikes

REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "an output of the graph": (
        {"first sum": "k = Add(x0, a0) x1 = Identity(k)", "outputs": f"{OUTPUTS}, float[b,s,{WIDTH}] k"},
        {},
        "'k' is a graph output",
    ),
    "positions that are an input": (
        {"embedding": "w = Gather(table, ids) x0 = Add(w, p)", "inputs": f"{INPUTS}, float[b,s,{WIDTH}] p"},
        {},
        "'p' is a graph input",
    ),
    "a gate on the stream": (
        {"first sum": "z = Add(x0, a0) t = MatMul(n0, gate) s = Sigmoid(t) x1 = Mul(z, s)"},
        {"gate": MATRIX},
        "Mul 'x1' multiplies it by a tensor that varies along its channels",
    ),
    "a gate of constants": (
        {"first sum": "z = Add(x0, a0) x1 = Mul(z, gate)"},
        {"gate": np.arange(WIDTH) / 24},
        "Mul 'x1' multiplies it by a tensor that varies along its channels",
    ),
    "a weight that another op reads": (
        {"head": "y1 = MatMul(n2, head) e = Gather(wd1, ids) w = ReduceMean(e) y = Add(y1, w)"},
        {},
        "'wd1', the weight",
    ),
    "a tied table that is a layer's weight as it stands": (
        {"embedding": "x0 = Gather(both, ids)", "last norm": "nn = RMSNormalization(x2, g2) n2 = Reshape(nn, two)",
         "head": "y = Gemm<transB=1>(n2, both)", "outputs": f"float[rows,{WORDS}] y"},
        {"both": RNG.standard_normal((WORDS, WIDTH)), "two": np.array([-1, WIDTH])},
        "'both', the weight",
    ),
    "a table that another op reads": (
        {"head": "y1 = MatMul(n2, head) w = ReduceMean(table) y = Add(y1, w)"},
        {},
        "ReduceMean 'w' also reads the table 'table'",
    ),
    "two norms on one layer": (
        {"last norm": "na = RMSNormalization(x2, g2) nb = RMSNormalization(x2, g1) n2 = Add(na, nb)"},
        {},
        "Add 'n2' reads",
    ),
    "parts joined along the channels": (
        {"second sum": "x2 = Concat<axis=-1>(x1, a1)", "last norm": "n2 = RMSNormalization(x2, g3)",
         "head": "y = MatMul(n2, head3)"},
        {"g3": np.ones(2 * WIDTH), "head3": RNG.standard_normal((2 * WIDTH, WORDS))},
        "Concat 'x2' does not commute with it",
    ),
    "padded channels": (
        {"second sum": "z = Add(x1, a1) x2 = Pad(z, pads)", "last norm": "n2 = RMSNormalization(x2, g3)",
         "head": "y = MatMul(n2, head3)"},
        {"pads": np.array([0, 0, 0, 0, 0, 8]), "g3": np.ones(WIDTH + 8),
         "head3": RNG.standard_normal((WIDTH + 8, WORDS))},
        "Pad 'x2' does not commute with it",
    ),
    "an activation on the stream": (
        {"second sum": "z = Add(x1, a1) x2 = Relu(z)"},
        {},
        "Relu 'x2' does not commute with it",
    ),
    "a norm in the middle": (
        {"second sum": "z = Add(x1, a1) x2 = RMSNormalization(z, g1)"},
        {},
        "RMSNormalization 'n2' reads RMSNormalization 'x2'",
    ),
    "channels that change places": (
        {"second sum": "z = Add(x1, a1) x2 = Gather<axis=2>(z, turned)"},
        {"turned": np.arange(WIDTH)[::-1].copy()},
        "Gather 'x2' does not commute with it",
    ),
    "a norm over rows and channels": (
        {"last norm": "n2 = LayerNormalization<axis=1>(x2, g2)", "inputs": "int64[b,1] ids"},
        {},
        "LayerNormalization 'n2' normalizes over several axes",
    ),
    "a stream that is a weight": (
        {"head": "xt = Transpose<perm=[0, 2, 1]>(x2) y1 = MatMul(n2, xt) y2 = MatMul(n2, head) s = ReduceMean(y1)"
         " y = Add(y2, s)"},
        {},
        "Transpose 'xt' does not commute with it",
    ),
    "a gamma that is data": (
        {"last norm": "g = ReduceMean<keepdims=0>(x2, axes) gg = Sigmoid(g2) n2 = RMSNormalization(x2, gd)",
         "inputs": f"{INPUTS}, float[{WIDTH}] gd"},
        {"axes": np.array([0, 1])},
        "ReduceMean 'g' does not commute with it",
    ),
    "a body that reads the stream": (
        {"head": "yes = Constant<value_int=1>() c = Cast<to=9>(yes)"
         " w = If (c) <then_branch = t () => (float[u,v,w] o) { o = Neg(x2) },"
         " else_branch = e () => (float[u,v,w] o2) { o2 = Abs(x2) }>"
         " s = ReduceMean(w) y1 = MatMul(n2, head) y = Add(y1, s)"},
        {},
        "If 'w' does not commute with it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lookalikes_are_refused_and_named(name: str) -> None:
    changed, more, why = REFUSED[name]
    changed = dict(changed)
    inputs, outputs = changed.pop("inputs", INPUTS), changed.pop("outputs", OUTPUTS)
    proto = transformer("rms", changed, inputs, outputs, more)
    after, migrations = rotate_streams(proto)
    refused = [m for m in migrations if m.status == "refused"]
    assert why in " ".join(m.reason for m in refused), [m.reason for m in refused]
    assert [m.norm for m in migrations if m.status == "made"] in ([], ["vt0"])  # the values are apart from it
    if any(m.status == "made" for m in migrations):
        same(proto, after)
    else:
        assert after is proto


CENTERED: dict[str, tuple[dict[str, str], str]] = {
    "an RMS norm reads it too": ({"last norm": "n2 = RMSNormalization(x2, g2)"}, "RMSNormalization 'n2' reads it"),
    "a norm writes it": (
        {"second sum": "z = Add(x1, a1) x2 = RMSNormalization(z, g1)"},
        "RMSNormalization 'x2' writes it with its own gamma or beta",
    ),
    "statistics are also used": (
        {"last norm": "n2, m = LayerNormalization(x2, g2, b2)", "head": "y1 = MatMul(n2, head) y = Add(y1, m)"},
        "the statistics of LayerNormalization 'n2' are also used",
    ),
}


@pytest.mark.parametrize("name", CENTERED)
def test_a_mean_that_matters_is_not_taken_off(name: str) -> None:
    changed, why = CENTERED[name]
    proto = transformer("layer", changed)
    after, migrations = center_streams(proto)
    assert after is proto
    assert any(why in m.reason for m in migrations)
    assert {(m.kind, m.status) for m in migrations} == {("center", "refused")}
    _, migrations = rotate_streams(proto)
    assert not [m for m in migrations if m.status == "made" and m.norm != "vt0"]


def test_values_that_are_kept_for_later_stay() -> None:
    attention = ATTENTION.format(i=0).replace("vt0 =", "past =").replace("MatMul(p0, vt0)", "MatMul(p0, past)")
    outputs = f"{OUTPUTS}, float[b,{2},s,{WIDTH // 2}] past"
    proto = transformer("rms", {"attention": attention}, outputs=outputs)
    after, migrations = rotate_streams(proto)
    assert told(migrations, "rotate") == [("made", "x0"), ("refused", "past")]
    assert migrations[-1].reason == "'past' is a graph output"
    same(proto, after)


def test_the_opset_is_raised_for_the_norm() -> None:
    proto = transformer("layer", opset=21)
    after, migrations = rotate_streams(proto)
    assert after.opset_import[0].version == 23
    assert ("made", "x0") in told(migrations, "rotate")
    same(proto, after)


def test_half_precision_is_left_alone() -> None:
    w = {"table": MATRIX[:WORDS].astype(np.float16), "g": np.ones(WIDTH, np.float16), "w": MATRIX.astype(np.float16)}
    body = "x = Gather(table, ids) n = RMSNormalization(x, g) y = MatMul(n, w)"
    proto = text(body, INPUTS, f"float16[b,s,{WIDTH}] y", 23, **w)
    after, migrations = rotate_streams(proto)
    assert after is proto
    assert migrations[0].reason == "'x' is float16, not float32"


# ------------------------------------------------------------------ mistakes


def _flipped(self: StreamMap, values: np.ndarray) -> np.ndarray:
    right = _RIGHT(self, values).copy()
    right[..., 0] *= -1
    return right


def _biased(self: StreamMap, values: np.ndarray) -> np.ndarray:
    return values - values.mean(-1, keepdims=True) * (WIDTH / (WIDTH - 1))


def _shorter(self: StreamMap, values: np.ndarray) -> np.ndarray:
    return _RIGHT(self, values) * (1 - 2.0**-30)


_RIGHT = StreamMap.map_rows


def test_layers_that_do_not_take_back_the_rotation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proof holds for whatever matrix: that of the readers has to be the inverse."""
    right = StreamEdits.matrix_node

    def wrong(self: StreamEdits, width: int, side: Any) -> Any:
        return right(self, width, "output")

    monkeypatch.setattr(StreamEdits, "matrix_node", wrong)
    monkeypatch.setattr(StreamMap, "map_columns", lambda self, values: self._map_runs(values.T, self.run.T.copy()).T)
    _, migrations = rotate_streams(transformer("rms"))
    refused = [m.reason for m in migrations if m.kind == "rotate"]
    assert refused == ["the matrices of its writers and readers are not inverse to each other"]


@pytest.mark.parametrize(
    ("method", "mistake", "transform"),
    [
        ("map_rows", _flipped, rotate_streams),
        ("map_rows", _shorter, rotate_streams),
        ("map_rows", _biased, center_streams),
        ("map_columns", lambda self, values: self._map_runs(values.T, self.run.T.copy()).T, rotate_streams),
    ],
    ids=["a sign", "a length", "another mean", "not transposed"],
)
def test_mistakes_are_no_proof(method: str, mistake: Any, transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamMap, method, mistake)
    proto = transformer("layer" if transform is center_streams else "rms")
    after, migrations = transform(proto)
    refused = [m for m in migrations if m.status == "refused"]
    assert refused
    assert all("it can't be proved" in m.reason for m in refused)
    assert not [m for m in migrations if m.status == "made" and m.kind in ("center", "rotate")]
    if any(m.status == "made" for m in migrations):  # gammas are in the layers by then
        same(proto, after)


def test_nothing_drawn_is_rotated_wrongly() -> None:
    """Forty transformers with ops of all kinds in their streams: what is made gives the same answers."""
    made = {"center": 0, "rotate": 0}
    refused = 0
    for seed in range(40):
        proto = drawn(seed)
        after, migrations = rotate_streams(proto)
        streams = [m for m in migrations if m.norm != "vt0"]
        refused += any(m.status == "refused" for m in streams)
        for kind in made:
            made[kind] += any(m.status == "made" and m.kind == kind for m in streams)
        if after is not proto:
            same(proto, after)
    assert made["center"] > 1  # or nothing was tried
    assert made["rotate"] > 5
    assert refused > 10


@pytest.mark.parametrize("op", ["Relu", "Tanh", "Softmax"])
def test_a_closure_that_lets_an_op_through_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the drawn ones: each local proof holds, the stream is not closed."""
    monkeypatch.setattr(residual_streams, "VIEWS", residual_streams.VIEWS | {op})
    wrong = 0
    for proto in map(drawn, range(60)):
        if op in [n.op_type for n in proto.graph.node if n.output[0][0] in "xyabcz" and n.output[0] != "a0"]:
            after, _ = rotate_streams(proto)
            try:
                same(proto, after)
            except AssertionError:
                wrong += 1
    assert wrong


@pytest.mark.parametrize(
    "changed",
    [
        {"second sum": "x1s = Mul(x1, f) x2 = Add(x1s, a1)"},
        {"second sum": "x1s = Div(x1, f) x2 = Add(x1s, a1)"},
        {"second sum": "t = Add(x1, a1) x2 = Mul(f, t)"},
        {"first sum": "x1 = Add(x0, f)"},
    ],
)
def test_a_factor_of_unknown_rank_is_not_taken_for_one_number(changed: dict[str, str]) -> None:
    """It may be a vector along the channels, which no rotation passes."""
    before = transformer("rms", changed, f"{INPUTS}, float f", OUTPUTS)
    next(v for v in before.graph.input if v.name == "f").type.tensor_type.ClearField("shape")
    after, told = rotate_streams(before)
    streams_told = [m for m in told if m.kind == "rotate"]
    assert any(m.status == "refused" and "whose rank is unknown" in m.reason for m in streams_told)
    # What is rotated still gives the same where f is a vector.
    fed = {"ids": np.arange(8).reshape(2, 4) % WORDS, "f": np.linspace(0.5, 2, WIDTH, dtype=np.float32)}
    right, made = (next(iter(OnnxFloat64Runner(proto).infer(fed).values())) for proto in (before, after))
    assert np.allclose(right, made, rtol=1e-5, atol=1e-5)
