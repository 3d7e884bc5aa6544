"""`--rotate` from end to end: the account, the options, and where it helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.findings.quantization_report import QuantizationReport
from normdeploy.model import Dim, InputSpec
from normdeploy.quantization.quantization_request import QuantizationRequest
from normdeploy.quantization.quantizer import quantize_model
from normdeploy.quantization.sample_split import split_samples
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from tests.cli.test_app import run
from tests.half_graphs import text
from tests.quantization.streams import INPUTS, WIDTH, WORDS, transformer
from tests.support import run_onnxruntime

IDS = np.random.default_rng(5).integers(0, WORDS, (64, 12))
SPECS = [InputSpec("ids", "int64", (Dim("b", 1, 8, 64), Dim("s", 1, 8, 64)))]


def made(proto: onnx.ModelProto, to: str, rotate: bool) -> tuple[float, QuantizationReport]:
    """The error of the quantized file beside float64 of the file before, relative to its length; and the account."""
    out, account = quantize_model(proto, QuantizationRequest(to, rotate=rotate), split_samples([{"ids": IDS}], SPECS))
    right = OnnxFloat64Runner(proto).infer({"ids": IDS})["y"]
    (value,) = run_onnxruntime(out, {"ids": IDS})
    return float(np.linalg.norm(value - right) / np.linalg.norm(right)), account


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_account_tells_of_every_stream(norm: str) -> None:
    error, account = made(transformer(norm), "int8", rotate=True)
    assert error < 0.1  # eight bits, and sixteen layers of which each may lose half a percent
    kinds = {m.kind: m.status for m in account.migrations}
    assert kinds["rotate"] == "made"
    assert ("center" in kinds) == (norm == "layer")
    layers = {layer.tensor: layer.migrated for layer in account.layers}
    assert all("rotate" in migrated for migrated in layers.values())
    assert all(len(set(migrated)) == len(migrated) for migrated in layers.values())
    assert all(layer.status == "quantized" for layer in account.layers)


def test_large_channels_that_differ_by_token_cost_half_as_much() -> None:
    """One scale for each channel serves all tokens: it can't lessen what is large in another channel of each token. A
    rotation can: seen is half of the error; three quarters are allowed."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((WORDS, WIDTH)) + 0.5
    table[np.arange(WORDS), rng.integers(0, WIDTH, WORDS)] *= 60
    proto = transformer("rms", more={"table": table})
    plain, turned = (made(proto, "int8", rotate)[0] for rotate in (False, True))
    assert turned < 0.75 * plain


def test_a_model_without_a_stream_is_told_of() -> None:
    w = np.random.default_rng(1).standard_normal((WORDS, WIDTH))
    proto = text("x = Gather(w, ids) t = Tanh(x) y = MatMul(t, v)", INPUTS, f"float[b,s,{WORDS}] y", 23, w=w, v=w.T)
    error, account = made(proto, "int8", rotate=True)
    assert error < 0.1
    assert "nothing was rotated" in " ".join(account.notes)


def test_a_refusal_is_told_and_the_rest_is_quantized() -> None:
    proto = transformer("rms", {"first sum": "z = Add(x0, a0) x1 = Relu(z)"})
    _, account = made(proto, "int8", rotate=True)
    (refused,) = (m for m in account.migrations if m.status == "refused")
    assert (refused.kind, refused.reason) == ("rotate", "Relu 'x1' does not commute with it")
    assert all(layer.status == "quantized" for layer in account.layers)


def test_rotation_alone_is_no_wish() -> None:
    with pytest.raises(InputError, match="dynamic and rotate need quantization; also pass quantize"):
        normdeploy.optimize(transformer("rms"), rotate=True)
    with pytest.raises(InputError, match="rotate is 'yes'; pass True or False"):
        normdeploy.optimize(transformer("rms"), quantize="int4", rotate="yes")  # type: ignore[arg-type]


def test_the_command_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(transformer("layer"), source)
    np.savez(tmp_path / "ids.npz", ids=IDS)
    words = ["optimize", str(source), "-o", str(target)]
    refused = run(*words, "--rotate")
    assert refused.returncode == 1
    assert "dynamic and rotate need quantization" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert not target.exists()
    done = run(*words, "--rotate", "--quantize", "int8", "--calibrate", str(tmp_path / "ids.npz"))
    assert done.returncode == 0, done.stderr
    assert "center of 1 stream, gamma and beta of 3 norms, rotate of 2 streams" in " ".join(done.stdout.split())
    onnx.checker.check_model(onnx.load(target), full_check=True)
