"""Sessions run files that onnxruntime runs, whatever the processor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.cli import app
from normdeploy.errors import RuntimeCrash
from normdeploy.ort_sessions.session import open_session, ort_error_message, rounds_float_operands


def test_scales_of_channels_without_zero_points_run() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[2, 3] x) => (float[2, 2] y)
        <int8[3, 2] codes = {1, 2, 3, 4, 5, 100}, float[2] scale = {0.5, 2}> {
            w = DequantizeLinear <axis = 1> (codes, scale)
            y = MatMul (x, w)
        }"""
    session = open_session(onnx.parser.parse_model(text).SerializeToString(), optimize=True)
    (y,) = session.run(None, {"x": np.ones((2, 3), np.float32)})
    # (1 + 3 + 5) / 2 and (2 + 4 + 100) * 2, which float32 holds.
    assert y.tolist() == [[4.5, 212.0]] * 2


LEAST = np.array([-(2**63)])
DIVIDES = """<ir_version: 10, opset_import: ["": 21]> net (int64[n] x, int64[n] z) => (int64[n] y) { y = Div (x, z) }"""


@pytest.fixture
def divides() -> bytes:
    """An integer division whose result may not fit, at which the processor ends the process."""
    return onnx.parser.parse_model(DIVIDES).SerializeToString()


def narrow_weights() -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a product with 4-bit weights in blocks, and its weights in float64."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (64, 8))
    scales = (0.1 * np.abs(rng.standard_normal((2, 8))) + 0.01).astype(np.float32)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> net (float[4, 64] x) => (float[4, 8] y)'
        " { w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales) y = MatMul (x, w) }"
    )
    model.graph.initializer.append(
        onnx.helper.make_tensor("codes", onnx.TensorProto.INT4, codes.shape, codes.reshape(-1).tolist())
    )
    model.graph.initializer.append(numpy_helper.from_array(scales, "scales"))
    return model, codes * np.repeat(scales.astype(np.float64), 32, axis=0)


def test_run_narrow_weights_gives_the_numbers_that_verify_judges() -> None:
    model, weights = narrow_weights()
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    result = normdeploy.run(model, {"x": x})
    # Each of the 64 products and sums is rounded once.
    bound = 65 * 2.0**-24 * (np.abs(x.astype(np.float64)) @ np.abs(weights))
    assert (np.abs(result.arrays["y"] - x.astype(np.float64) @ weights) <= bound).all()
    assert any("session.qdq_matmulnbits_accuracy_level=1" in note for note in result.notes)


def test_rounds_operands_float_weights_are_not_concerned(tmp_path: Path) -> None:
    model, _ = narrow_weights()
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert rounds_float_operands(path)
    # The product does not read what is dequantized.
    model.graph.node[1].input[1] = "scales"
    path.write_bytes(model.SerializeToString())
    assert not rounds_float_operands(path)


def test_run_overflowing_division_raises(divides: bytes) -> None:
    session = open_session(divides)
    assert session.run(None, {"x": np.array([7]), "z": np.array([-1])})[0].tolist() == [-7]
    for _ in range(2):
        with pytest.raises(RuntimeCrash, match=r"\(SIGFPE\): Div \(output 'y'\) may divide the smallest integer"):
            session.run(None, {"x": LEAST, "z": np.array([-1])})


def test_run_feed_without_an_element_that_crashes_raises() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[s, n, 4] x) => (float[a, b, c, d] y)
        { y = GRU <hidden_size = 3> (x, w, r) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("w", (1, 9, 4)), ("r", (1, 9, 3))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    session = open_session(model.SerializeToString())
    assert session.run(None, {"x": np.ones((2, 1, 4), np.float32)})[0].shape == (2, 1, 1, 3)
    with pytest.raises(RuntimeCrash, match=r"\(SIGABRT\): GRU \(output 'y'\) may get a tensor without an element"):
        session.run(None, {"x": np.ones((2, 0, 4), np.float32)})


def test_open_session_node_that_crashes_the_constructor_raises() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[n, 4, 8] x) => (float[n, b, d] y)
        { y = ConvTranspose <group = 0> (x, w) }"""
    model = onnx.parser.parse_model(text)
    # A constant weight is packed while the session opens.
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 3), np.float32), "w"))
    with pytest.raises(RuntimeCrash, match="has group = 0 and divides by it"):
        open_session(model.SerializeToString())


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT16", "STRING", "BOOL"])
def test_run_feeds_of_every_type_are_rehearsed(kind: str, divides: bytes) -> None:
    model = onnx.ModelProto.FromString(divides)
    model.graph.input.append(helper.make_tensor_value_info("w", getattr(onnx.TensorProto, kind), [2]))
    session = open_session(model.SerializeToString())
    other: Any = {
        "BFLOAT16": ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ones(2, np.uint16), onnx.TensorProto.BFLOAT16),
        "FLOAT16": np.ones(2, np.float16),
        "STRING": np.array(["a", "bc"], dtype=object),
        "BOOL": np.array([True, False]),
    }[kind]

    def run(x: np.ndarray, z: np.ndarray) -> Any:
        feeds = {"x": x, "z": z, "w": other}
        if kind != "BFLOAT16":
            return session.run(None, feeds)[0]
        values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in (("x", x), ("z", z))} | {"w": other}
        return session.run_with_ort_values(None, values)[0].numpy()

    assert run(np.array([8]), np.array([2])).tolist() == [4]
    with pytest.raises(RuntimeCrash):
        run(LEAST, np.array([-1]))


@pytest.mark.parametrize("verb", ["verify net.onnx net.onnx", "run net.onnx -o o.npz", "bench net.onnx"])
def test_verb_on_an_overflowing_division_names_the_node(
    verb: str, divides: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.ModelProto.FromString(divides)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (("x", LEAST), ("z", np.array([-1]))))
    del model.graph.input[:]
    onnx.save(model, tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["normdeploy", *verb.split()])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 1
    assert "Div (output 'y') may divide the smallest integer" in capsys.readouterr().err


ENTRIES = ("session.x64quantprecision", "optimization.disable_specified_optimizers")


def holds(options: ort.SessionOptions, entry: str) -> bool:
    try:
        options.get_session_config_entry(entry)
    except RuntimeError:
        return False
    return True


def test_a_file_that_the_entry_for_exact_integers_breaks_is_opened_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime 1.31 refuses files of shared int8 weights with it ("Attempt to replace the existing tensor")."""
    tried = []
    session = ort.InferenceSession

    def refusing(source: bytes, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
        tried.append([name for name in ENTRIES if holds(options, name)])
        if "session.x64quantprecision" in tried[-1]:
            raise ValueError("Attempt to replace the existing tensor")
        return session(source, options, providers=providers)

    monkeypatch.setattr(ort, "InferenceSession", refusing)
    text = """<ir_version: 10, opset_import: ["": 17]> net (float[2] x) => (float[2] y) { y = Neg (x) }"""
    opened = open_session(onnx.parser.parse_model(text).SerializeToString(), optimize=True)
    assert opened.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1.0, -1.0]
    assert tried == [[name] for name in ENTRIES]


def test_words_of_a_node_that_fails_are_its_op_name_and_reason() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[n] x) => (float[a, b] y) <int64[2] shape = {2, 3}> {
            [cut] y = Reshape (x, shape)
        }"""
    session = open_session(onnx.parser.parse_model(text).SerializeToString(), optimize=False)
    with pytest.raises(Exception, match="ONNXRuntimeError") as raised:
        session.run(None, {"x": np.ones(7, np.float32)})
    words = ort_error_message(raised.value)
    assert words.startswith("Reshape 'cut': ")
    assert "{7}" in words
    assert not [part for part in ("ONNXRuntimeError", "Non-zero", "Status Message", ".cc:") if part in words]
