"""A BatchNorm with nothing linear before it and a padding convolution behind it, where the file is quantized."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from tests.half_graphs import text
from tests.support import run_onnxruntime

CHANNELS = 16
RNG = np.random.default_rng(3)
GAMMA = np.exp(RNG.uniform(np.log(1e-3), 0, CHANNELS))
BETA = RNG.standard_normal(CHANNELS)
MEAN = RNG.standard_normal(CHANNELS) / 5
VAR = RNG.uniform(0.5, 1.5, CHANNELS)
WEIGHT = RNG.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 12
X = RNG.standard_normal((64, CHANNELS, 6, 6)).astype(np.float32)
SHAPE = f"float[b,{CHANNELS},6,6]"
CONV = "y = Conv<pads = [1, 1, 1, 1]>(n, w)"


def net(result: str = "n", behind: str = CONV, width: int = 6, **more: np.ndarray) -> onnx.ModelProto:
    """``behind``: what stands behind the BatchNorm, whose result is ``result``."""
    weights = {"gamma": GAMMA, "beta": BETA, "mean": MEAN, "var": VAR, "w": WEIGHT}
    shape = f"float[b,{CHANNELS},6,{width}]"
    body = f"{result} = BatchNormalization(x, gamma, beta, mean, var) {behind}"
    return text(body, f"{shape} x", f"{shape} y", **weights, **more)


def module() -> nn.Module:
    norm, conv = nn.BatchNorm2d(CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
    values = {"weight": GAMMA, "bias": BETA, "running_mean": MEAN, "running_var": VAR}
    norm.load_state_dict({n: torch.as_tensor(v) for n, v in values.items()}, strict=False)
    conv.load_state_dict({"weight": torch.as_tensor(WEIGHT)})
    return nn.Sequential(norm, conv).float().eval()


def error(made: onnx.ModelProto, x: np.ndarray, right: np.ndarray) -> float:
    (value,) = run_onnxruntime(made, {made.graph.input[0].name: x})
    return float(np.linalg.norm(value - right) / np.linalg.norm(right))


@pytest.mark.parametrize(("to", "runtime"), [("int8", "any"), ("int8", "onnxruntime"), ("fp8", "tensorrt")])
@pytest.mark.parametrize("verb", ["optimize", "export"])
def test_its_result_is_quantized_not_its_input(to: str, runtime: str, verb: str) -> None:
    """The error is that of the convolution alone, which is given the BatchNorm's result; with the scale folded into the
    convolution it was 50 times that."""
    (right,) = run_onnxruntime(net(), {"x": X})
    if verb == "optimize":
        result = normdeploy.optimize(net(), quantize=to, runtime=runtime, calibrate=[{"x": X}])
    else:
        one = torch.as_tensor(X)
        specs = [f"input[b,{CHANNELS},6,6]"]
        samples = [{"input": X}]
        result = normdeploy.export(
            module(), one[:8], inputs=specs, dims=["b=1:8:64"], quantize=to, runtime=runtime, calibrate=samples
        )
    assert result.proto is not None
    (finding,) = result.summary.findings
    assert finding.became == "BatchNormalization (one scale and shift)"
    assert "folding only its scale would quantize" in finding.reason

    (n,) = run_onnxruntime(net("y", ""), {"x": X})
    alone = normdeploy.optimize(
        text(CONV, f"{SHAPE} n", f"{SHAPE} y", w=WEIGHT), quantize=to, runtime=runtime, calibrate=[{"n": n}]
    )
    assert alone.proto is not None
    # the two split the samples into other batches, so that other values meet a step's end
    assert error(result.proto, X, right) <= 1.5 * error(alone.proto, n, right)


def test_a_convolution_that_stays_float_takes_the_scale(rng: np.random.Generator) -> None:
    """INT4 rounds no activation; `last` is what it serves."""
    last = {"last": rng.standard_normal((64, 64))}
    proto = net("n", CONV.replace("y", "c") + " y = MatMul(c, last)", 64, **last)
    for how in ({}, {"quantize": "int4"}):
        (finding,) = normdeploy.optimize(proto, **how).summary.findings
        assert finding.became == "its scale folded into the following Conv, its shift written as one Add"
