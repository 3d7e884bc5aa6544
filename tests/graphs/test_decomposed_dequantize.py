"""Weights that are dequantized by a Cast and a Mul are judged as those of a DequantizeLinear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from normdeploy import verify
from normdeploy.graphs.decomposed_dequantize import rewrite_as_dequantize
from tests.support import parsed, run_onnxruntime

WEIGHT = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32) / 4
X = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
PER_TENSOR, PER_CHANNEL = np.float32(np.abs(WEIGHT).max() / 127), np.abs(WEIGHT).max(0) / 127
FORMS = {
    "one scale": ("f = Cast<to = 1> (q) w = Mul (s, f)", PER_TENSOR, None),
    "channels": ("f = Cast<to = 1> (q) w = Mul (f, s)", PER_CHANNEL, None),
    "rows and a zero": (
        "f = Cast<to = 1> (q) c = Sub (f, z) w = Mul (c, s)",
        np.abs(WEIGHT).max(1, keepdims=True) / 127,
        np.float32(128),
    ),
}


def net(weight: str, **constants: np.ndarray) -> onnx.ModelProto:
    return parsed(f"net (float[n, 16] x) => (float[n, 32] y) {{ {weight} y = MatMul (x, w) }}", **constants)


def quantized(form: str, factor: float = 1.0) -> onnx.ModelProto:
    text, scale, zero = FORMS[form]
    codes = np.rint(WEIGHT / scale) + (0 if zero is None else zero)
    constants = {"q": codes.astype(np.int8 if zero is None else np.uint8), "s": scale * np.float32(factor)}
    return net(text, **constants, **({} if zero is None else {"z": zero}))


@pytest.mark.parametrize("form", FORMS)
def test_the_pair_gives_what_the_ops_give(form: str) -> None:
    proto = quantized(form)
    pairs = rewrite_as_dequantize(proto)
    assert [node.op_type for node in pairs.graph.node].count("DequantizeLinear") == 1
    (before,), (after,) = run_onnxruntime(proto, {"x": X}), run_onnxruntime(pairs, {"x": X})
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("change", ["two axes", "a fraction as zero", "a computed scale"])
def test_what_is_no_pair_stays(change: str) -> None:
    codes = np.rint(WEIGHT / PER_TENSOR).astype(np.int8)
    body, constants = "w = Mul (f, s)", {"s": np.ones((16, 32), np.float32)}
    if change == "a fraction as zero":
        body, constants = "c = Sub (f, z) w = Mul (c, s)", {"s": PER_CHANNEL, "z": np.full(32, 0.5, np.float32)}
    elif change == "a computed scale":
        body, constants = "s = Abs (t) w = Mul (f, s)", {"t": PER_CHANNEL}
    proto = net(f"f = Cast<to = 1> (q) {body}", q=codes, **constants)
    assert rewrite_as_dequantize(proto) is proto


class Stored(torch.nn.Module):
    """A model that holds the codes itself: nothing is rounded in a file of it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("codes", torch.from_numpy(np.rint(WEIGHT / PER_CHANNEL).astype(np.int8)))
        self.register_buffer("scale", torch.from_numpy(PER_CHANNEL * np.float32(factor)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x @ (self.codes.float() * self.scale)
        return y


def test_codes_that_the_model_holds_itself_are_compared_as_they_are(tmp_path: Path) -> None:
    for factor in (1.0, 1.001):
        path, x = tmp_path / f"{factor}.onnx", torch.from_numpy(X)
        torch.onnx.export(Stored(factor).eval(), (x,), path, dynamo=False, input_names=["x"], do_constant_folding=False)
        comparison = verify(Stored(1.0).eval(), path, (x,), seeds=1)
        assert bool(comparison) is (factor == 1.0)
        assert not any("is quantized" in note for note in comparison.notes)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_with_such_weights_is_judged_by_its_steps(form: str, tmp_path: Path) -> None:
    onnx.save(net("w = Identity (v)", v=WEIGHT), tmp_path / "float.onnx")
    onnx.save(quantized(form), tmp_path / "right.onnx")
    onnx.save(quantized(form, 1.1), tmp_path / "wrong.onnx")
    right = verify(tmp_path / "float.onnx", tmp_path / "right.onnx", seeds=1)
    assert right, right.table()
    assert any("is quantized" in note for note in right.notes)
    assert not verify(tmp_path / "float.onnx", tmp_path / "wrong.onnx", seeds=1)
