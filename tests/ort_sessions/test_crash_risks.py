"""Which nodes may end onnxruntime's process, by what a file states of them."""

from __future__ import annotations

import onnx.parser
import pytest

from normdeploy.ort_sessions.crash_risks import find_crash_risks, find_empty_input_risks


def risks(body: str, opset: int = 23) -> list[str]:
    return find_crash_risks(
        onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": {opset}, "com.microsoft": 1]> {body}')
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("net (int64[n] x, int64[n] z) => (int64[n] y) { y = Div (x, z) }", "Div (output 'y') may divide the smallest"),
        ("net (int32[n] x) => (int32[n] y) <int32[2] z = {1, -1}> { y = Mod (x, z) }", "-2147483648, by -1"),
        # The type of a value inside is the one that it comes from.
        (
            "net (float[n] x, int64[n] z) => (int64[n] y) { i = Cast <to=7> (x) y = Div (i, z) }",
            "-9223372036854775808, by -1",
        ),
        (
            "net (bool b, int64[n] x) => (int64[n] y) { y = If (b)"
            " <then_branch = t () => (int64[n] a) { a = Div (x, x) },"
            " else_branch = e () => (int64[n] c) { c = Identity (x) }> }",
            "Div (output 'a')",
        ),
        (
            "net (float[n,4,8] x, float[4,4,3] w) => (float[n,b,d] y) { y = ConvTranspose <group=0> (x, w) }",
            "has group = 0",
        ),
        ("net (float[n,l,4] x) => (float[n,l,d] y) { y = Attention <q_num_heads=0, kv_num_heads=1> (x, x, x) }", "= 0"),
        (
            "net (float[1,64,1] x, int64 s) => (float[a,b,c,d] y) <int64 t = {4}> { y = STFT (x, t, , s) }",
            "which may be 0",
        ),
        ("net (float[n,4] x) => (seq(float[a,b]) y) <int64 s = {0}> { y = SplitToSequence (x, s) }", "may be 0"),
        ("net (float[n,4] x, int64[3,1] i) => (float[a] y) { y = GatherND <batch_dims=-9> (x, i) }", "batch_dims = -9"),
        (
            "net (float[1,4,6,6] x) => (float[a,b,c,d] y) { y = DepthToSpace <blocksize=4294967296> (x) }",
            "blocksize = 4294967296, whose square is 0",
        ),
        (
            "net (float[n,4] x, float[1,12,4] w, float[1,12,3] r) => (float[a,b,c,d] y)"
            " { z = NonZero (x) c = Cast <to=1> (z) y = LSTM <hidden_size=3> (c, w, r) }",
            "LSTM (output 'y') may get a tensor without an element",
        ),
        (
            "net (float[2,n,4] x, float[1,9,4] w, float[1,9,3] r) => (float[a,b,c,d] y)"
            " <int64[1] s = {7}, int64[1] e = {9}> { z = Slice (x, s, e) y = GRU <hidden_size=3> (z, w, r) }",
            "GRU (output 'y') may get a tensor without an element",
        ),
        (
            "net (float[n,16,1] x) => (float[a,b,c,d] y) <int64 t = {4}, float[0] w = {}> { y = STFT (x, t, w) }",
            "without an element",
        ),
        (
            "net (float[2,2,3] x, int64[1] s, int64[r] t) => (float[a,b,c,d] y)"
            " { z = Reshape (s, t) y = AffineGrid (x, z) }",
            "AffineGrid (output 'y') may get 'z' with fewer than 1 dims",
        ),
        (
            "net (uint8[n] x, uint8[4,4,3,3] w, int64[r] t) => (int32[a,b,c,d] y)"
            " { z = Reshape (x, t) y = ConvInteger (z, w) }",
            "ConvInteger (output 'y') may get 'z' with fewer than 3 dims",
        ),
        (
            "net (float[n,4] x, float[3,4] s, float[4] w) => (float[n,4] y) <int64[1] b = {7}, int64[1] e = {9}>"
            " { z = Slice (s, b, e) y = com.microsoft.SkipLayerNormalization (x, z, w) }",
            "SkipLayerNormalization (output 'y') may get a tensor without an element",
        ),
        (
            "net (float[n,1,16] x, int32[n] l, int32 t) => (float[a,b,c] y)"
            " { y = com.microsoft.GroupQueryAttention <num_heads = 4294967296, kv_num_heads = 1> (x, x, x, , , l, t) }",
            "has num_heads = 4294967296 and divides by it",
        ),
        ("net (float[2,3] x) => (float[2,3] y) { y = com.microsoft.Inverse (x) }", "may not be square"),
    ],
)
def test_crash_risks_node_that_may_crash_is_named(body: str, words: str) -> None:
    (risk,) = risks(body)
    assert words in risk


@pytest.mark.parametrize(
    "body",
    [
        "net (float[n] x, float[n] z) => (float[n] y) { y = Div (x, z) }",
        "net (int64[n] x) => (int64[n] y) <int64[1] z = {2}> { y = Div (x, z) }",
        # 0 alone is an error of onnxruntime's, and int8 is divided in int.
        "net (int64[n] x) => (int64[n] y) <int64[1] z = {0}> { y = Div (x, z) }",
        "net (int8[n] x, int8[n] z) => (int8[n] y) { y = Div (x, z) }",
        # A size is never -1, wherever it is moved.
        "net (float[a,b] x, int64[1] v) => (int64[1] y) <int64[1] i = {0}>"
        " { s = Shape (x) d = Gather (s, i) e = Squeeze (d) y = Div (v, e) }",
        "net (uint8[n,4,h,w] x, uint8[4,4,3,3] w) => (int32[a,b,c,d] y) { y = ConvInteger (x, w) }",
        "net (float[1,64,1] x, float[16] w, int64 s) => (float[a,b,c,d] y) { y = STFT (x, s, w) }",
        "net (float[1,64,1] x, int64 s) => (float[a,b,c,d] y) <int64 f = {16}> { y = STFT (x, s, , f) }",
    ],
)
def test_crash_risks_safe_node_is_not_named(body: str) -> None:
    assert risks(body) == []


def test_empty_risks_lstm_of_any_length_is_named() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> net (float[s,n,4] x, float[1,12,4] w, float[1,12,3] r)'
        " => (float[a,b,c,d] y) { y = LSTM <hidden_size=3> (x, w, r) }"
    )
    # Ordinary inputs need no child.
    assert find_crash_risks(model) == []
    assert find_empty_input_risks(model) == ["LSTM (output 'y') may get a tensor without an element"]


def test_crash_risks_input_with_a_default_may_be_given() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]>'
        " net (int64[n] x, int64[1] z) => (int64[n] y) <int64[1] z = {2}> { y = Div (x, z) }"
    )
    assert len(find_crash_risks(model)) == 1


def test_crash_risks_many_nodes_names_the_first_three() -> None:
    nodes = " ".join(f"y{i} = Div (x, z)" for i in range(9))
    told = risks(f"net (int64[n] x, int64[n] z) => (int64[n] y0) {{ {nodes} }}")
    assert [risk.split(" may")[0] for risk in told[:3]] == [f"Div (output 'y{i}')" for i in range(3)]
    assert told[3:] == ["6 more nodes like these"]


def test_crash_risks_sparse_constant_of_a_function_is_named() -> None:
    # onnxruntime ends its process when it opens some of these files, by the number of nodes around.
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "own": 1]> net (float[3] x) => (float[3] y) { y = own.Shifted (x) }
        <domain: "own", opset_import: ["": 17]> Shifted (p) => (q)
        { k = Constant <value_float = 1.0> () q = Add (p, k) }"""
    )
    values = onnx.helper.make_tensor("values", onnx.TensorProto.FLOAT, [1], [1.0])
    indices = onnx.helper.make_tensor("indices", onnx.TensorProto.INT64, [1], [2])
    constant = model.functions[0].node[0]
    assert find_crash_risks(model) == []
    sparse = onnx.helper.make_sparse_tensor(values, indices, [3])
    constant.CopyFrom(onnx.helper.make_node("Constant", [], ["k"], sparse_value=sparse))
    (risk,) = find_crash_risks(model)
    assert "Constant (output 'k') of the function Shifted has a sparse value" in risk
