"""Half files whose squares leave float16's range where torch's kernels hold them in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

from normdeploy.loading import from_module
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.file_comparison import compare_files

INPUT = "x:float32[batch=1:2:4,8,16]"
TOLD = "half.onnx does not fit inputs as large as 'times 100"


class Deviation(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.layer = factor, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mul(self.factor).var(-1).sqrt()


def normalized() -> nn.Module:
    """Return a LayerNorm, of which opset 11 divides by an infinite root: the quotient is 0."""
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(8)
    return nn.Sequential(layer, nn.LayerNorm(16))


def compared(
    net: nn.Module, folder: Path, change: Callable[[onnx.ModelProto], None] = lambda proto: None
) -> Comparison:
    dims = {"x": {0: "batch"}}
    torch.onnx.export(
        net.eval(),
        (torch.zeros(2, 8, 16),),
        folder / "float.onnx",
        dynamo=False,
        opset_version=11,
        input_names=["x"],
        dynamic_axes=dims,
    )
    proto = convert_float_to_float16(onnx.load(folder / "float.onnx"), keep_io_types=True)
    change(proto)
    onnx.save(proto, folder / "half.onnx")
    return compare_files(from_module(net.eval(), inputs=[INPUT]), folder / "half.onnx")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [Deviation, normalized])
def test_overflow_at_inputs_times_100_is_told_and_no_fault(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    comparison = compared(make(), tmp_path)
    assert comparison, str(comparison)
    assert TOLD in " ".join(str(comparison).split())


def cut_off(proto: onnx.ModelProto) -> None:
    """Cut the products off where no usual input reaches."""
    product = next(node for node in proto.graph.node if node.op_type == "MatMul")
    own = f"{product.output[0]}_whole"
    bounds = [numpy_helper.from_array(torch.tensor(v).half().numpy(), f"end_{v}") for v in (-30.0, 30.0)]
    proto.graph.initializer.extend(bounds)
    clip = helper.make_node("Clip", [own, *(b.name for b in bounds)], [product.output[0]])
    product.output[0] = own
    proto.graph.node.insert(list(proto.graph.node).index(product) + 1, clip)


def test_fault_at_inputs_times_100_fails_beside_an_overflow(tmp_path: Path) -> None:
    assert not compared(Deviation(), tmp_path, cut_off)


def test_overflow_at_usual_inputs_fails(tmp_path: Path) -> None:
    assert not compared(Deviation(1000.0), tmp_path)
