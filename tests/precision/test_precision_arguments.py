"""Half precision around what shows every digit of what it reads: angles, and the scales of a Resize."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normdeploy
from normdeploy.precision.emulated_half import emulate_half
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.precision.type_conversion import FORMATS
from tests.half_graphs import node, reasons, runs, text, types
from tests.support import run_onnxruntime


class Timesteps(nn.Module):
    """The sinusoidal embedding of diffusers: angles of float32 timesteps."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.half = size // 2
        self.linear = nn.Linear(size, 8)

    def forward(self, t: Tensor) -> Tensor:
        frequency = torch.exp(-math.log(10000) * torch.arange(self.half, dtype=torch.float32) / self.half)
        angle = t[:, None].float() * frequency[None]
        return self.linear(torch.cat([angle.sin(), angle.cos()], -1).to(self.linear.weight.dtype))


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_angles_of_a_timestep_that_is_no_whole_number_keep_their_digits(to: str) -> None:
    """No range is stated of t, so that calibration draws small numbers: these say nothing of the timesteps to come."""
    torch.manual_seed(0)
    net, t = Timesteps().eval(), torch.tensor([999.0, 500.5, 37.25, 1.0])
    result = normdeploy.export(net, (t,), inputs=["t[4]"], precision=to)
    assert result.precision is not None
    assert {island.op: island.kind for island in result.precision.islands} == {"Sin": "angles", "Cos": "angles"}
    assert result.precision.inputs == {"t": "float32"}
    assert any("computed from the input 't'" in note and "stays float32" in note for note in result.precision.notes)
    (found,) = run_onnxruntime(emulate_half(result.proto), {"t": t.numpy()})
    with torch.no_grad():
        exact = net(t).numpy()
        eager = (
            net.to(torch.float16 if to == "fp16" else torch.bfloat16)(t).float().numpy()
        )  # angles in float32, as written
    assert np.abs(found - exact).max() <= 2 * max(
        np.abs(eager - exact).max(), FORMATS[to].unit_roundoff * np.abs(exact).max()
    )


def test_angles_of_a_product_are_kept_where_they_are_seen_to_turn() -> None:
    """A sine as an activation behind a layer stays half; Fourier features of coordinates do not."""
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    features = text("a = MatMul(x, w) y = Sin(a)", w=40 * np.eye(4))
    assert reasons(convert_to_half(features, "fp16", [{"x": x}])[1]) == {"Sin": "angles"}
    assert not convert_to_half(text("a = MatMul(x, w) y = Sin(a)", w=np.eye(4)), "fp16", [{"x": x}])[1].islands
    behind = text("h = Relu(x) a = MatMul(h, w) y = Sin(a)", w=40 * np.eye(4))
    assert not convert_to_half(behind, "fp16", [{"x": x}])[1].islands


class Upsampled(nn.Module):
    def __init__(self, **how: object) -> None:
        super().__init__()
        self.how = how
        self.conv, self.norm, self.out = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 4, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.interpolate(F.silu(self.norm(self.conv(x))), **self.how))  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "how",
    [
        {"scale_factor": 2.0, "mode": "nearest"},
        {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2.0, "mode": "bicubic"},
    ],
    ids=lambda how: how["mode"],
)
def test_upsampling_by_scales_becomes_half(how: dict[str, object], to: str) -> None:
    torch.manual_seed(0)
    net, x = Upsampled(**how).eval(), torch.randn(1, 3, 8, 8).half().float()
    result = normdeploy.export(net, (x,), inputs=["x[1,3,8,8]"], precision=to)
    resize, kinds = node(result.proto, "Resize"), types(result.proto)
    assert (kinds[resize.input[0]], kinds[resize.input[2]]) == (FORMATS[to].dtype.name, "float32")
    with torch.no_grad():
        exact = net(x).numpy()
    for found in runs(result.proto, to, {"x": x.numpy()}).values():
        assert np.abs(found[0] - exact).max() <= 32 * FORMATS[to].unit_roundoff * np.abs(exact).max()


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_scales_that_are_computed_are_not_rounded(to: str) -> None:
    """As tf2onnx and torch's older exporter write it. 3 · 1.3336 is 4 pixels; of the scale rounded to half it is 3."""
    proto = text(
        "s = Div(size, old) k = Concat<axis = 0>(ones, s) h = Relu(x) z = Resize<mode = 'nearest'>(h, none, k) y ="
        " Neg(z)".replace("'", '"'),
        inputs="float[1,1,3,3] x, float[2] size",
        outputs="float[1,1,h,w] y",
        old=np.array([3.0, 3.0]),
        ones=np.array([1.0, 1.0]),
        none=np.array([], np.float32),
    )
    feeds = {"x": np.ones((1, 1, 3, 3), np.float32), "size": np.array([4.0001, 4.0001], np.float32)}
    made, account = convert_to_half(proto, to, [feeds])
    assert set(reasons(account).values()) == {"scales"}
    assert account.inputs["size"] == "float32"
    onnx.checker.check_model(made, full_check=True)
    session = ort.InferenceSession(emulate_half(made).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, feeds)[0].shape == (1, 1, 4, 4)
