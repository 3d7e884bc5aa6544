"""Live modules whose trace is another function, and those whose trace is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.inputs.input_cases import SMALL
from normdeploy.loading import from_module
from normdeploy.runtimes.rounding_noise import RoundingRunner
from normdeploy.runtimes.torch_runners import ModuleRunner
from normdeploy.verbs.verify.compute_budget import BudgetClock
from normdeploy.verbs.verify.trace_check import TraceDifference, compare_with_trace


class Exporting(nn.Module):
    """Doubles its result where it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return y * 2 if torch.compiler.is_exporting() else y


class Nested(nn.Module):
    """Keyword arguments, nested containers and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.linear(pair["a"]) + pair["b"])
        return {"y": hidden * scale, "mean": hidden.mean(-1)}


class Counting(nn.Module):
    """Writes a buffer that its result does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


def test_verify_module_that_differs_from_its_trace_fails(tmp_path: Path) -> None:
    net, x, file = Exporting().eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file, inputs="x[b,8]", dims="b=1:3:8")
    verdict = normdeploy.verify(net, file, x)
    assert not verdict
    assert verdict.outcome == "failed"
    assert "the module and its trace differ" in str(verdict)


@pytest.mark.parametrize(
    ("net", "args", "kwargs"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), (torch.randn(3, 8),), {}),
        (Nested(), ({"a": torch.randn(3, 8), "b": torch.randn(3, 4)},), {"scale": torch.randn(4)}),
        (nn.MultiheadAttention(8, 2, batch_first=True), tuple(torch.randn(2, 5, 8) for _ in range(3)), {}),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (torch.randn(2, 3, 8, 8),), {}),
    ],
)
def test_verify_module_whose_trace_is_right_passes(net: nn.Module, args: Any, kwargs: Any, tmp_path: Path) -> None:
    normdeploy.export(net.eval(), args, kwargs, output=tmp_path / "net.onnx")
    verdict = normdeploy.verify(net, tmp_path / "net.onnx", args, kwargs)
    assert verdict, str(verdict)
    assert not any("was not compared with its trace" in note for note in verdict.notes)


def test_verify_leaves_the_state_of_the_module_alone(tmp_path: Path) -> None:
    net, x = Counting().eval(), torch.randn(3, 8)
    normdeploy.export(net, x, output=tmp_path / "net.onnx")
    assert normdeploy.verify(net, tmp_path / "net.onnx", x)
    assert net.calls == 0


class Remembering(nn.Module):
    """Adds up what it has seen, and answers by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.mean(0))
        return x + self.seen


def test_verify_state_that_reaches_the_output_fails(tmp_path: Path) -> None:
    net, x = Remembering().eval(), torch.randn(3, 8)
    normdeploy.export(net, x, output=tmp_path / "net.onnx")
    verdict = normdeploy.verify(net, tmp_path / "net.onnx", x)
    assert not verdict
    assert "the model keeps state between calls" in str(verdict)


def test_verify_encoder_layer_with_padding_passes(tmp_path: Path) -> None:
    """Without gradients torch takes a fused kernel, which gives NaN where a mask hides a whole row."""
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    args = (torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    normdeploy.export(net, args, {"src_key_padding_mask": padding}, output=tmp_path / "net.onnx")
    verdict = normdeploy.verify(net, tmp_path / "net.onnx", args, {"src_key_padding_mask": padding})
    assert verdict, str(verdict)


class Discretized(nn.Module):
    """The state matrix of Mamba, as a function of its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.log(torch.arange(1, 17).float()).repeat(8, 1))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ torch.exp(-torch.exp(self.logarithm) * 0.1)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_verify_weight_that_the_model_computes_is_no_alteration(precision: str | None, tmp_path: Path) -> None:
    net, x, file = Discretized().eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file, precision=precision)
    verdict = normdeploy.verify(net, file, x)
    assert verdict, str(verdict)


def test_verify_computed_weight_with_one_element_off_fails(tmp_path: Path) -> None:
    net, x, file = Discretized().eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file)
    proto = onnx.load(file)
    weight = next(t for t in proto.graph.initializer if list(t.dims) == [8, 16])
    values = onnx.numpy_helper.to_array(weight).copy()
    values[3, 5] *= 1.001
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, file)
    assert not normdeploy.verify(net, file, x)


def test_trace_difference_of_equal_outputs_draws_no_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8)
    model, drawn = from_module(net, x), list[int]()
    monkeypatch.setattr(RoundingRunner, "infer", lambda *given: drawn.append(0))
    monkeypatch.setattr(RoundingRunner, "run_perturbed", lambda *given: drawn.append(1))
    assert compare_with_trace(net, model, BudgetClock(60.0)) == TraceDifference()
    assert not drawn


def test_trace_difference_out_of_time_runs_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8)
    model, runs, plain = from_module(net, x), list[int](), ModuleRunner.infer_twice

    def counted(runner: ModuleRunner, feeds: Any) -> Any:
        runs.append(1)
        return plain(runner, feeds)

    monkeypatch.setattr(ModuleRunner, "infer_twice", counted)
    clock = BudgetClock(1e-9)
    assert compare_with_trace(net, model, clock) == TraceDifference()
    assert len(runs) == 1
    assert clock.module == [f"inputs around {SMALL:g}"]


def test_verify_out_of_time_says_that_the_module_was_not_run_on_all_inputs(tmp_path: Path) -> None:
    net, x, file = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file)
    verdict = normdeploy.verify(net, file, x, max_seconds=1e-9)
    assert any("the module itself was not compared with its trace, for lack of time" in note for note in verdict.notes)
    assert verdict.limits == ("within 1e-09 s",)
