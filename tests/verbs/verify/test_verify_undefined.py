"""Verdicts where a number is undefined: 0/0 in a runtime's kernel, NaN that is made inside and dropped by a maximum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normdeploy
from tests.half_graphs import text


def test_equal_elements_of_a_mean_variance_normalization_are_no_fault(tmp_path: Path) -> None:
    """onnxruntime's kernel has no epsilon, and gives NaN; the standard's function has 1e-9, and gives 0."""
    proto = text("y = MeanVarianceNormalization<axes = [0, 1]>(x)")
    onnx.save(proto, tmp_path / "a.onnx")
    assert normdeploy.verify(tmp_path / "a.onnx", tmp_path / "a.onnx")

    wrong = text("z = MeanVarianceNormalization<axes = [0, 1]>(x) y = Mul(z, by)", by=np.array(1.001))
    onnx.save(wrong, tmp_path / "b.onnx")
    assert not normdeploy.verify(tmp_path / "a.onnx", tmp_path / "b.onnx")


@pytest.mark.parametrize("size", [3, "n"])
def test_a_batch_normalization_of_a_vector_has_one_channel(size: int | str, tmp_path: Path) -> None:
    one = np.array([2.0])
    proto = text("y = BatchNormalization(x, one, one, one, one)", f"float[{size}] x", f"float[{size}] y", one=one)
    onnx.save(proto, tmp_path / "a.onnx")
    assert normdeploy.verify(tmp_path / "a.onnx", tmp_path / "a.onnx")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gru = nn.GroupNorm(1, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.norm(x.mT).mT)[0]


@pytest.mark.parametrize("kind", ["MaxPool", "GRU"])
def test_a_nan_made_of_an_infinity_may_be_dropped_by_a_maximum(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Recurrent() if kind == "GRU" else nn.Sequential(nn.GroupNorm(2, 8), nn.MaxPool2d(2))
    sample = torch.randn(2, 5, 8) if kind == "GRU" else torch.randn(2, 8, 6, 6)
    made = normdeploy.export(module.eval(), sample, output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


class Finite(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x.abs() < 1e30).all())
        return x * 2


def test_a_model_that_refuses_nan_is_not_asked_for_it() -> None:
    sample = torch.randn(2, 6, 4)
    comparison = normdeploy.verify(Finite().eval(), normdeploy.export(Finite().eval(), sample).proto, sample)
    assert comparison, comparison.table()
    assert any(note.startswith("not run at") and "nan" in note for note in comparison.notes)


def test_an_infinity_says_nothing_of_ranges_that_an_op_takes_from_its_input(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    torch.manual_seed(0)
    plain, eight = tmp_path / "plain.onnx", tmp_path / "eight.onnx"
    normdeploy.export(nn.LSTM(8, 8, batch_first=True).eval(), torch.randn(2, 5, 8), output=plain)
    quantization.quantize_dynamic(plain, eight)
    assert any(node.op_type.startswith("DynamicQuantize") for node in onnx.load(eight).graph.node)
    comparison = normdeploy.verify(plain, eight)
    assert not [r for r in comparison.results if "inf" in r.case or "nan" in r.case], comparison.table()


class Sampled(nn.Module):
    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, align_corners=False)


class Looked(nn.Module):
    """Compares with bounds in two kernels: a NaN lies beyond either end."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.bucketize(x, torch.linspace(-2, 2, 9)), torch.logit(x.sigmoid(), eps=1e-6)


class Causal(nn.Module):
    """A fused kernel passes by a NaN among the values that the mask hides; the definition does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (Sampled(), (torch.zeros(1, 2, 8, 8), torch.zeros(1, 5, 6, 2))),
        (Looked(), (torch.zeros(4, 5),)),
        (Causal(), (torch.zeros(2, 2, 6, 8),)),
    ],
    ids=["coordinates", "bounds", "hidden values"],
)
def test_numbers_that_are_not_finite_go_either_way_where_nothing_says(
    module: nn.Module, args: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    torch.onnx.export(module.eval(), args, tmp_path / "m.onnx", dynamo=False)
    comparison = normdeploy.verify(module, tmp_path / "m.onnx", args)
    assert comparison, comparison.table()


def saved(nodes: str, path: Path, x: str, outputs: str) -> Path:
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float{x} x) => ({outputs}) {{ {nodes} }}'
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_outputs_without_an_element_are_not_verified(tmp_path: Path) -> None:
    path = saved("y = Neg(x)", tmp_path / "m.onnx", "[0,4]", "float[0,4] y")
    with pytest.raises(normdeploy.errors.InputError, match=r"no output has elements at any input \(y\)"):
        normdeploy.verify(path, path)


def test_one_output_without_an_element_is_named(tmp_path: Path) -> None:
    nodes = "s = Constant<value_ints = [0]>() y = Slice(x, s, s) z = Neg(x)"
    path = saved(nodes, tmp_path / "m.onnx", "[2,4]", "float[0,4] y, float[2,4] z")
    comparison = normdeploy.verify(path, path)
    assert comparison
    assert "y has no elements at any input: only its shape was compared" in comparison.notes


def test_a_mean_of_no_elements_may_be_what_the_file_makes_of_it(tmp_path: Path) -> None:
    """ONNX leaves it open; onnxruntime gives 0, and 0/0 is NaN."""
    path = saved("y = ReduceMean<keepdims = 0>(x)", tmp_path / "m.onnx", "[2,0]", "float y")
    comparison = normdeploy.verify(path, path)
    assert comparison, comparison.table()
