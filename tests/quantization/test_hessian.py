"""What convolutions read, beside torch's own convolutions; rounding by it, on inputs that it did not see."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from normdeploy.model import Dim, InputSpec
from normdeploy.quantization.hessian import ConvolutionWindows, LayerInput, collect_moments
from normdeploy.quantization.number_formats import INT8, step_for_range
from normdeploy.quantization.quantization_request import QuantizationRequest
from normdeploy.quantization.quantizer import quantize_model
from normdeploy.quantization.sample_split import split_samples
from tests.half_graphs import text
from tests.support import run_onnxruntime

RNG = np.random.default_rng(7)
CASES = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (11,)),
    "2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 3)), (9, 8)),
    "pointwise": (nn.Conv2d(4, 6, 1), (5, 7)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (6, 6)),
    "depthwise": (nn.Conv2d(4, 4, 5, groups=4, padding=2, stride=3), (9, 10)),
    "3d": (nn.Conv3d(4, 6, 2, padding=1), (3, 4, 5)),
}


def windows(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> ConvolutionWindows:
    pads = tuple(int(p) for p in conv.padding)
    return ConvolutionWindows(conv.kernel_size, conv.stride, conv.dilation, pads * 2, conv.groups)


@pytest.mark.parametrize("kind", CASES)
def test_windows_times_the_weight_is_the_convolution(kind: str, rng: np.random.Generator) -> None:
    conv, size = CASES[kind]
    x = rng.standard_normal((3, 4, *size))
    rows = windows(conv).draw_windows(x, 10**6, 0)  # all there are, in their order
    weight = conv.weight.detach().double().numpy()
    products = rows @ weight.reshape(conv.groups, weight.shape[0] // conv.groups, -1).swapaxes(1, 2)
    with torch.no_grad():
        right = torch.moveaxis(conv.double()(torch.from_numpy(x)), 1, -1).numpy()
    made = products.swapaxes(0, 1).reshape(right.shape) + conv.bias.detach().numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(made, right, rtol=0, atol=1e-12)  # float64, sums of 20 terms


def test_some_windows_are_drawn_and_none_of_what_is_too_small(rng: np.random.Generator) -> None:
    conv, size = CASES["2d"]
    x = rng.standard_normal((3, 4, *size)).astype(np.float32)
    every, some = (windows(conv).draw_windows(x, count, 0) for count in (10**6, 20))
    assert some.shape == (1, 20, every.shape[2])
    assert all((every[0] == row).all(1).any() for row in some[0])
    assert windows(conv).draw_windows(x[..., :2], 20, 0).shape == (1, 0, every.shape[2])


def test_moments_are_of_what_the_quantizer_leaves(rng: np.random.Generator) -> None:
    """Of the file's own input, over two samples."""
    body = "r = Relu(x) y = Conv<pads=[1,1,1,1], group=4>(r, w)"
    proto = text(body, "float[b,4,6,6] x", "float[b,4,6,6] y", w=W)
    conv = windows(nn.Conv2d(4, 4, 3, padding=1, groups=4))
    step = step_for_range(0.0, 3.0, INT8)
    samples = [{"x": rng.standard_normal((2, 4, 6, 6)).astype(np.float32)} for _ in range(2)]
    ((reading, held),) = collect_moments(proto, {LayerInput("r", step, 1, conv): (4 * 81, None)}, samples)
    assert (reading.tensor, held.rows) == ("r", 2 * 2 * 36)
    left = [np.clip(np.rint(np.maximum(s["x"], 0) / step.scale), 0, 127) * step.scale for s in samples]
    rows = np.concatenate([conv.draw_windows(x, 10**6, 0) for x in left], axis=1)
    np.testing.assert_allclose(held.hessian(), rows.swapaxes(1, 2) @ rows / rows.shape[1], rtol=1e-4, atol=1e-6)


W = RNG.standard_normal((4, 1, 3, 3)).astype(np.float32)
SPECS = [InputSpec("x", "float32", (Dim("b", 1, 8, 256), *map(Dim.from_size, (16, 8, 8))))]
GRAPHS = {
    "pointwise": ("y = Conv(x, w, b)", (24, 16, 1, 1)),
    "3 by 3": ("y = Conv<pads=[1,1,1,1]>(x, w, b)", (24, 16, 3, 3)),
    "grouped": ("y = Conv<group=4>(x, w, b)", (24, 4, 3, 3)),
    "depthwise": ("y = Conv<group=16, strides=[2,2]>(x, w, b)", (16, 1, 3, 3)),
    "same": ('y = Conv<auto_pad="SAME_UPPER">(x, w, b)', (24, 16, 3, 3)),
}


def pictures(seed: int, count: int) -> np.ndarray:
    """Channels and neighbours hang together, as in pictures; float32 [count, 16, 8, 8]."""
    rng = np.random.default_rng(seed)
    mixed = np.einsum("oc,nchw->nohw", np.random.default_rng(1).standard_normal((16, 4)), _smooth(rng, count))
    return (mixed + 0.1 * rng.standard_normal(mixed.shape)).astype(np.float32)


def _smooth(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.asarray(rng.standard_normal((count, 4, 8, 8)).cumsum(2).cumsum(3) / 8)


@pytest.mark.parametrize("kind", GRAPHS)
def test_convolutions_are_nearer_on_pictures_that_it_did_not_see(kind: str) -> None:
    """Of weights alone: the model runs with those that the file stores, and with the nearest codes."""
    body, shape = GRAPHS[kind]
    rng = np.random.default_rng(3)
    w, b = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[0]).astype(np.float32)
    proto = text(body, "float[b,16,8,8] x", f"float[b,{shape[0]},h,v] y", w=w, b=b)
    made, account = quantize_model(proto, QuantizationRequest("int8"), split_samples([{"x": pictures(2, 64)}], SPECS))
    (layer,) = account.layers
    assert layer.rounding == ("nearest" if kind == "same" else "GPTQ")
    if kind == "same":
        return
    stored = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    dequantize = next(n for n in made.graph.node if n.op_type == "DequantizeLinear" and n.input[0].startswith("w"))
    codes, scales = (stored[name].astype(np.float64) for name in dequantize.input[:2])
    wide = scales.reshape(-1, 1, 1, 1)
    unseen = {"x": pictures(4, 32)}
    right = _convolved(proto, unseen, w)
    ours = _convolved(proto, unseen, codes * wide)
    nearest = _convolved(proto, unseen, np.clip(np.rint(w / wide), -127, 127) * wide)
    assert np.square(ours - right).mean() < 0.7 * np.square(nearest - right).mean()


def test_a_channel_that_is_always_zero_leaves_the_others_theirs() -> None:
    """Its own weights are rounded to the nearest; the others as where it is a copy of another, which moves no range."""
    body, shape = GRAPHS["depthwise"]
    w = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    proto = text(body, "float[b,16,8,8] x", "float[b,16,h,v] y", w=w, b=np.ones(16, np.float32))
    codes = []
    for fill in (0, pictures(2, 64)[:, 4]):
        x = pictures(2, 64)
        x[:, 5] = fill
        made, account = quantize_model(proto, QuantizationRequest("int8"), split_samples([{"x": x}], SPECS))
        assert [layer.rounding for layer in account.layers] == ["GPTQ"]
        stored = [numpy_helper.to_array(t) for t in made.graph.initializer]
        codes += [a for a in stored if a.dtype == np.int8 and a.shape == w.shape]
    dead, alive = codes
    np.testing.assert_array_equal(np.delete(dead, 5, 0), np.delete(alive, 5, 0))
    nearest = np.rint(w / (np.abs(w).max((1, 2, 3), keepdims=True) / np.float32(127)))
    np.testing.assert_array_equal(dead[5], nearest[5])
    assert (np.delete(dead, 5, 0) != np.delete(nearest, 5, 0)).any()


def _convolved(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], w: np.ndarray) -> np.ndarray:
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    next(t for t in changed.graph.initializer if t.name == "w").CopyFrom(numpy_helper.from_array(np.float32(w), "w"))
    (value,) = run_onnxruntime(changed, feeds)
    return value.astype(np.float64)
