"""What float16 can't hold is named: an epsilon that became 0, and a square beyond its range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault
from tests.support import parsed


class Norm(nn.Module):
    """A LayerNorm by hand, with a factor before it and a linear layer behind it."""

    def __init__(self, eps: float, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.eps, self.factor = eps, factor
        self.w, self.b = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factor
        d = x - x.mean(-1, keepdim=True)
        v = (d * d).mean(-1, keepdim=True)
        return self.out(d / torch.sqrt(v + self.eps) * self.w + self.b)


BODY = """
    [cast] h = Cast<to=10>(x)
    [scaled] s = Mul(h, factor)
    [mean] m = ReduceMean<axes=[-1]>(s)
    [centered] d = Sub(s, m)
    [squared] q = Mul(d, d)
    [variance] v = ReduceMean<axes=[-1]>(q)
    SUM
    [root] r = Sqrt(a)
    [divided] n = Div(d, r)
    [gained] g = Mul(n, w)
    [shifted] t = Add(g, b)
    [linear] o = Gemm<transB=1>(t, ow, ob)
    [back] y = Cast<to=1>(o)
"""


def half_file(net: Norm, folder: Path, *, adds: bool = True) -> Path:
    """The module with every number rounded to float16, as a careless converter writes it."""
    body = BODY.replace("SUM", "[sum] a = Add(v, eps)" if adds else "[sum] a = Identity(v)")
    proto = parsed(f"net (float[batch, 16] x) => (float[batch, 4] y) {{ {body} }}", opset=17)
    numbers = {"factor": net.factor, "w": net.w, "b": net.b, "ow": net.out.weight, "ob": net.out.bias}
    if adds:
        numbers["eps"] = net.eps
    for name, value in numbers.items():
        array = torch.as_tensor(value).detach().numpy().astype(np.float16)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto)
    onnx.save(proto, folder / "half.onnx")
    return folder / "half.onnx"


def first_fault(net: Norm, path: Path) -> Fault:
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(net.eval(), (torch.randn(4, 16),), dynamic_shapes=shapes)
    found = normdeploy.bisect(program, path, seeds=1)
    assert not found
    return found.faults[0]


@pytest.mark.parametrize("eps", [1e-12, 1e-8])
def test_epsilon_that_rounds_to_zero_is_named(tmp_path: Path, eps: float) -> None:
    net = Norm(eps, 1.0)
    fault = first_fault(net, half_file(net, tmp_path))
    assert fault.kind == "epsilon"
    assert fault.nodes == ("Add sum",)
    assert f"has epsilon 0, but the model has {eps:.3g} (it rounds to 0 in float16)" in fault.cause
    assert fault.mended


@pytest.mark.parametrize("eps", [1e-12, 1e-8])
def test_epsilon_that_a_converter_dropped_is_named(tmp_path: Path, eps: float) -> None:
    net = Norm(eps, 1.0)
    fault = first_fault(net, half_file(net, tmp_path, adds=False))
    assert fault.kind == "epsilon"
    assert f"the epsilon {eps:.3g} is missing before Sqrt 'root'" in fault.cause
    assert fault.mended


def test_square_beyond_float16_is_named(tmp_path: Path) -> None:
    net = Norm(1e-5, 400.0)
    fault = first_fault(net, half_file(net, tmp_path))
    assert fault.kind == "overflow"
    assert fault.nodes == ("Mul squared",)
    assert "the largest float16 is 65504" in fault.cause
    assert fault.widened.mends
    assert fault.mended


def test_half_file_without_a_fault_has_none(tmp_path: Path) -> None:
    net = Norm(1e-3, 1.0)
    path = half_file(net, tmp_path)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(net.eval(), (torch.randn(4, 16),), dynamic_shapes=shapes)
    assert normdeploy.bisect(program, path, seeds=1)
