"""Eval BatchNorm, the node and by hand: measured as one scale and shift, folded where that is exact, refused with the
reason elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from normdeploy.findings.records import Summary
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

UNIT = 2.0**-24


class HandNorm(nn.Module):
    """Batch norm by hand over axis 1, in several spellings."""

    def __init__(self, channels: int, rank: int, spelling: str) -> None:
        super().__init__()
        self.shape, self.spelling = (1, channels, *[1] * (rank - 2)), spelling
        for name in ("gamma", "beta", "mean"):
            self.register_buffer(name, torch.randn(channels))
        self.register_buffer("var", torch.rand(channels) + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gamma, beta, mean, var = (t.view(self.shape) for t in (self.gamma, self.beta, self.mean, self.var))
        if self.spelling == "rsqrt":
            return (x - mean) * torch.rsqrt(var + 1e-5) * gamma + beta
        if self.spelling == "folded by the author":
            scale = gamma / torch.sqrt(var + 1e-5)
            return x * scale + (beta - mean * scale)
        if self.spelling == "branching":
            y = (x - mean) / torch.sqrt(var + 1e-5)
            return y + y * (gamma - 1) + beta
        return gamma * ((x - mean) / (var + 1e-5) ** 0.5) + beta


def norm(channels: int, rank: int, spelling: str = "node") -> nn.Module:
    if spelling != "node":
        return HandNorm(channels, rank, spelling)
    made = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank](channels)
    with torch.no_grad():
        for t in (made.weight, made.bias, made.running_mean):
            t.copy_(torch.randn(channels))
        made.running_var.copy_(torch.rand(channels) + 0.1)
    return made


def exported(module: nn.Module, *args: torch.Tensor) -> onnx.ModelProto:
    program = torch.export.export(module.eval(), args, strict=False)
    made = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=21, verbose=False)
    assert made is not None
    return made.model_proto


def folded(module: nn.Module, *args: torch.Tensor) -> tuple[onnx.ModelProto, Summary]:
    """Optimize, and hold the result to the module in float64: 16 u of the sums of magnitudes would be the bound of any
    order of summation; the networks here add up fewer than 100 terms of order 10."""
    proto, summary = optimize_norms(exported(module, *args))
    onnx.checker.check_model(proto, full_check=True)
    got = run_onnxruntime(proto, {i.name: a.numpy() for i, a in zip(proto.graph.input, args, strict=True)})
    with torch.no_grad():
        exact = module.double()(*(a.double() for a in args))
    for found, reference in zip(got, [exact] if isinstance(exact, torch.Tensor) else exact, strict=True):
        assert np.abs(found - reference.numpy()).max() <= 256 * UNIT * (1 + float(reference.abs().max()))
    return proto, summary


def left(proto: onnx.ModelProto) -> list[str]:
    """The ops that compute on data; constants and shapes of weights are folded later."""
    return [
        n.op_type
        for n in proto.graph.node
        if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul", "Add", "BatchNormalization")
    ]


INTO_PREVIOUS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "conv 1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9), 6),
    "conv 2d, padded": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 8), 6),
    "conv 2d without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 7, 8), 6),
    "conv 3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 5), 3),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 7, 8), 4),
    "grouped, strided, dilated": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2, dilation=2), (2, 4, 11, 12), 6),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 6), 6),
    "transposed with groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2, bias=False), (2, 4, 5, 6), 6),
    "linear": (lambda: nn.Linear(5, 6), (3, 5), 6),
    "linear without bias": (lambda: nn.Linear(5, 6, bias=False), (3, 5), 6),
}


@pytest.mark.parametrize(
    ("name", "spelling"),
    [*((name, "node") for name in INTO_PREVIOUS)]
    + [("conv 2d, padded", s) for s in ("rsqrt", "folded by the author", "branching", "pow")]
    + [("transposed with groups", "branching"), ("linear without bias", "rsqrt")],
)
def test_into_the_linear_op_before(name: str, spelling: str) -> None:
    make, shape, channels = INTO_PREVIOUS[name]
    torch.manual_seed(1)
    module = nn.Sequential(make(), norm(channels, len(shape), spelling))
    proto, summary = folded(module, torch.randn(shape))
    assert len(left(proto)) == 1 or left(proto) == ["MatMul", "Add"]
    (finding,) = [f for f in summary.findings if f.status == "folded"]
    assert "folded into" in finding.became
    assert finding.certificate


def test_into_a_linear_of_three_dims_behind_a_view() -> None:
    """LeViT's Linear, flatten, BatchNorm1d, view back."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(5, 6), norm(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return self.norm(y.flatten(0, 1)).view_as(y)

    proto, summary = folded(Block(), torch.randn(2, 3, 5))
    assert left(proto) == ["MatMul", "Add"]
    assert [f.status for f in summary.findings] == ["folded"]


@pytest.mark.parametrize(
    "behind", [lambda: nn.Conv2d(4, 6, 3), lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False)], ids=["conv", "grouped"]
)
def test_into_the_linear_op_behind(behind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    proto, summary = folded(nn.Sequential(nn.ReLU(), norm(4, 4), behind()), torch.randn(2, 4, 6, 7))
    assert left(proto) == ["Conv"]
    assert next(f.became for f in summary.findings if f.status == "folded").startswith("folded into the following ")


def test_into_a_linear_behind() -> None:
    torch.manual_seed(3)
    proto, _ = folded(nn.Sequential(nn.ReLU(), norm(5, 2), nn.Linear(5, 6)), torch.randn(3, 5))
    assert left(proto) == ["Gemm"]


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), norm(4, 4, "rsqrt")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        return self.norm(y), torch.tanh(y)


class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), norm(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(torch.tanh(self.conv(x))))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "relu between": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), norm(4, 4, "rsqrt")), "no linear op"),
    "two readers": (TwoReaders, "other nodes also read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_folded_becomes_one_scale_and_shift(name: str) -> None:
    make, reason = REFUSED[name]
    torch.manual_seed(4)
    proto, summary = folded(make(), torch.randn(2, 3, 5, 6))
    assert [op for op in left(proto) if op in ("Mul", "Add", "BatchNormalization")] == ["Mul", "Add"]
    assert any(reason in f.reason for f in summary.findings)


def test_a_padded_conv_behind_takes_the_scale() -> None:
    torch.manual_seed(4)
    proto, _ = folded(nn.Sequential(nn.ReLU(), norm(3, 4), nn.Conv2d(3, 4, 3, padding=1)), torch.randn(2, 3, 5, 6))
    assert left(proto) == ["Add", "Conv"]


def test_a_scale_and_shift_begins_behind_what_others_read_too() -> None:
    """x − mean is an output's, so that it stays, and what comes after it is folded all the same."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 3, 3)
            for name in ("gamma", "beta", "mean"):
                self.register_buffer(name, torch.randn(4, 1, 1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            centred = x - self.mean
            return self.conv(centred * self.gamma + self.beta), torch.relu(centred)

    torch.manual_seed(4)
    proto, summary = folded(Centred(), torch.randn(2, 4, 6, 6))
    assert [n.op_type for n in proto.graph.node] == ["Sub", "Conv", "Relu"]
    assert [f.status for f in summary.findings] == ["folded"]


def test_a_shared_weight_is_copied() -> None:
    torch.manual_seed(4)
    proto, summary = folded(SharedWeight(), torch.randn(2, 3, 5, 6))
    assert left(proto) == ["Conv", "Conv"]
    assert "2 nodes share" in summary.findings[0].became


def test_training_mode_is_refused() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        agraph (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y)
        <float[3] s = {1.0, 2.0, 3.0}, float[3] b = {0.0, 1.0, 2.0}, float[3] m = {0.0, 1.0, 2.0},
        float[3] v = {1.0, 2.0, 3.0}>
        { y, rm, rv = BatchNormalization <training_mode = 1> (x, s, b, m, v) }"""
    proto, summary = optimize_norms(onnx.parser.parse_model(text))
    assert [n.op_type for n in proto.graph.node] == ["BatchNormalization"]
    assert "training mode" in summary.findings[0].reason


@pytest.mark.parametrize("variance", [0.0, 1e-12, 1e6])
def test_extreme_statistics(variance: float) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), norm(4, 4))
    with torch.no_grad():
        module[1].running_var.fill_(variance)
    proto, _ = optimize_norms(exported(module, x := torch.randn(2, 3, 4, 4)))
    exact = module.double()(x.double()).detach()
    (got,) = run_onnxruntime(proto, {proto.graph.input[0].name: x.numpy()})
    assert np.abs(got - exact.numpy()).max() <= 64 * UNIT * (1 + float(exact.abs().max()))


def test_a_scale_that_overflows_the_type_is_not_folded() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), norm(4, 4)).half()
    with torch.no_grad():
        module[1].running_var.fill_(0.0)
        module[1].weight.fill_(6e4)  # 6e4/sqrt(1e-5) is 1.9e7
    _, summary = optimize_norms(exported(module, torch.randn(2, 3, 4, 4).half()))
    assert not any("folded into" in f.became for f in summary.findings)


def test_attention_s_one_over_root_of_d_is_no_batch_norm() -> None:
    """(q + b)/sqrt(3d), DeBERTa's: the root of one number does not make the bias and it a BatchNorm that has to be told
    of."""
    text = """<ir_version: 9, opset_import: ["" : 21]> net (float[B, 4] x) => (float[B, 4] y)
        <float[4] b = {1, 2, 3, 4}, float d = {24}> { q = Add(x, b) r = Sqrt(d) y = Div(q, r) }"""
    out, summary = optimize_norms(onnx.parser.parse_model(text))
    assert not summary.findings
    assert [n.op_type for n in out.graph.node] == ["Add", "Sqrt", "Div"]


def test_a_lone_batch_norm_behind_an_identity_stays_one_node() -> None:
    """DenseNet's first layer of a block: torch writes the cat of a single tensor as Identity."""
    text = """<ir_version: 9, opset_import: ["" : 21]> net (float[B, 2, H] x) => (float[B, 2, H] y)
        <float[2] g = {1, 2}, float[2] s = {3, 4}, float[2] m = {0.5, 1}, float[2] v = {2, 3}>
        { i = Identity(x) n = BatchNormalization(i, g, s, m, v) y = Relu(n) }"""
    out, summary = optimize_norms(onnx.parser.parse_model(text))
    assert [f.status for f in summary.findings] == ["folded"]
    assert [n.op_type for n in out.graph.node] == ["BatchNormalization", "Relu"]


@pytest.mark.parametrize(
    ("mean", "variance", "epsilon", "status"),
    [(0, 1, 0, "kept"), (0, 4, 0, "folded"), (1, 1, 0, "folded"), (0, 1, 1e-3, "folded")],
)
def test_only_a_batch_norm_of_plain_scale_and_shift_is_one_already(
    mean: float, variance: float, epsilon: float, status: str
) -> None:
    """Of mean 0, variance 1 and epsilon 0; every other one is written so."""
    text = f"""<ir_version: 9, opset_import: ["" : 21]> net (float[B, 2, H] x) => (float[B, 2, H] y)
        <float[2] g = {{1, 2}}, float[2] s = {{3, 4}}, float[2] m = {{{mean}, {mean}}},
        float[2] v = {{{variance}, {variance}}}>
        {{ i = Relu(x) n = BatchNormalization <epsilon = {float(epsilon)}> (i, g, s, m, v) y = Relu(n) }}"""
    out, summary = optimize_norms(onnx.parser.parse_model(text))
    assert [f.status for f in summary.findings] == [status]
    made = next(n for n in out.graph.node if n.op_type == "BatchNormalization")
    held = {t.name: onnx.numpy_helper.to_array(t) for t in out.graph.initializer}
    assert [held[i].tolist() for i in made.input[3:5]] == [[0, 0], [1, 1]]


def test_a_scale_and_shift_of_what_was_cast_is_not_folded_past_the_cast() -> None:
    """The result keeps its type."""
    text = """<ir_version: 9, opset_import: ["" : 21]> net (float16[B, 2, H] x) => (float[B, 2, H] y)
        <float16[2, 2, 1] w = {1, 2, 3, 4}, float[2, 1] s = {3, 4}, float[2, 1] b = {0.5, 1}>
        { h = Conv(x, w) c = Cast <to = 1> (h) m = Mul(c, s) y = Add(m, b) }"""
    out, _ = optimize_norms(onnx.parser.parse_model(text))
    onnx.checker.check_model(out, full_check=True)
    assert [n.op_type for n in out.graph.node] == ["Conv", "Cast", "Mul", "Add"]


def test_strings_behind_a_scale_are_no_norm() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> f (float[2,4] x) => (float[2,4] y)
        <float[4] a = {1, 2, 3, 4}, float[4] b = {1, 2, 3, 4}> {
            words = Constant <value_strings = ["1", "2", "3", "4"]> () c = Cast <to = 1> (words)
            n = LayerNormalization <axis = -1> (x, a) m = Mul (n, a) s = Add (m, b) y = Add (s, c)
        }"""
    _, summary = optimize_norms(onnx.parser.parse_model(text))
    assert [f.kind for f in summary.findings] == ["LayerNorm"]
