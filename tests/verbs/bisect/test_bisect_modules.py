"""Several nodes, one mistake: modules exchanged, code that runs twice, faults that hide each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bisect.file_bisection import Bisection


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)))


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def searched(model: nn.Module, wrong: nn.Module, folder: Path, *args: torch.Tensor) -> Bisection:
    path = folder / "wrong.onnx"
    torch.onnx.export(wrong.eval(), args, path, dynamo=True, verbose=False)
    return normdeploy.bisect(model.eval(), path, args, seeds=1)


@pytest.mark.parametrize("kind", [Tower, Mlp])
def test_modules_in_each_others_place_are_one_fault(kind: type[nn.Module], tmp_path: Path) -> None:
    """Of towers, the BatchNorms are folded into the convolutions."""
    torch.manual_seed(0)
    model = Chain(kind)
    wrong = Chain(kind)
    wrong.first, wrong.second = model.second, model.first
    args = torch.randn(2, 4, 6, 6) if kind is Tower else torch.randn(3, 4)
    (fault,) = searched(model, wrong, tmp_path, args).faults
    assert fault.kind == "order"
    assert "the modules 'first' and 'second' are exchanged" in fault.cause
    assert len(fault.nodes) == 2
    assert fault.mended


class Twice(nn.Module):
    """Two activations of one kind, and what they make nearly cancels."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.one, self.other, self.approximate = nn.Linear(4, 5), nn.Linear(4, 5), approximate
        with torch.no_grad():
            self.other.weight.copy_(1.02 * self.one.weight)
            self.other.bias.copy_(self.one.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (nn.functional.gelu(f(x), approximate=self.approximate) for f in (self.one, self.other))
        return one - other


def test_the_same_change_of_two_nodes_is_one_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wrong = Twice("none"), Twice("tanh")
    wrong.load_state_dict(model.state_dict())
    (fault,) = searched(model, wrong, tmp_path, torch.randn(3, 4)).faults
    assert fault.kind == "approximation"
    assert "the same holds for Gelu 'node_gelu_1'" in fault.cause


class Hidden(nn.Module):
    """Two branches whose sines are subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.b.load_state_dict(self.a.state_dict())
        self.right.load_state_dict(self.left.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(torch.sin(self.a(x))) - self.right(torch.sin(self.b(x)))


def test_faults_that_hide_each_other_are_both_named(tmp_path: Path) -> None:
    """Each mended alone leaves the output twenty times as wrong."""
    torch.manual_seed(0)
    model, wrong = Hidden(), Hidden()
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        wrong.a.bias += 1
        wrong.b.bias += 1.05
    one, other = searched(model, wrong, tmp_path, torch.randn(3, 4)).faults
    assert (one.module, other.module) == ("a", "b")
    assert "'a.bias' differs from the model's" in one.cause
    assert "'b.bias' differs from the model's" in other.cause
    assert other.mended


class Labels(Hidden):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(torch.sin(self.a(x))) + self.right(torch.cos(self.b(x)))).argmax(-1)


def test_faults_that_a_label_feels_only_together_are_both_named(tmp_path: Path) -> None:
    """Either bias alone makes each label 0, so the label stays wrong with one mended."""
    torch.manual_seed(0)
    model, wrong = Labels(), Labels()
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        wrong.left.bias[0] += 10
        wrong.right.bias[0] += 10
    faults = searched(model, wrong, tmp_path, torch.randn(16, 4)).faults
    assert [fault.module for fault in faults] == ["left", "right"]


class Edges(nn.Module):
    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.own, self.far, self.swapped = nn.Linear(4, 5), nn.Linear(4, 5), swapped

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = (edges[1], edges[0]) if self.swapped else (edges[0], edges[1])
        sent = torch.tanh(self.own(x)[source] + self.far(x)[target]) * self.own(x)[source]
        return torch.zeros(6, 5).index_add(0, target, sent)


def test_tensors_of_one_source_exchanged_for_all_their_readers_are_one_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wrong = Edges(swapped=False), Edges(swapped=True)
    wrong.load_state_dict(model.state_dict())
    (fault,) = searched(model, wrong, tmp_path, torch.randn(6, 4), torch.randint(0, 6, (2, 9))).faults
    assert (fault.kind, fault.nodes) == ("order", ("Gather node_select", "Gather node_select_1"))


class Turned(nn.Module):
    """The rotation of rotary positions, of neighbors or of halves."""

    def __init__(self, *, interleaved: bool) -> None:
        super().__init__()
        self.layer, self.interleaved = nn.Linear(8, 8), interleaved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.interleaved:
            turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        else:
            one, other = x.chunk(2, -1)
            turned = torch.cat([-other, one], -1)
        return torch.cos(x) + turned * torch.arange(1.0, 9.0)


def test_interleaved_rotation_is_an_order_with_signs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wrong = Turned(interleaved=False), Turned(interleaved=True)
    wrong.load_state_dict(model.state_dict())
    (fault,) = searched(model, wrong, tmp_path, torch.randn(3, 8)).faults
    assert fault.kind == "order"
    assert "with the slices [-5, 4, -7, 6, 1, -0, 3, -2] of its axis 1" in fault.cause


class Rolled(nn.Module):
    """A branch that is rolled before it is added, and what is computed from the sum."""

    def __init__(self, *, rolls: bool) -> None:
        super().__init__()
        self.branch, self.norm, self.last, self.rolls = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), rolls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.branch(x))
        x = x + (y.roll(1, 1) if self.rolls else y)
        return x + self.last(self.norm(x))


def test_operator_left_out_before_one_input_of_a_node_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, wrong = Rolled(rolls=True).eval(), Rolled(rolls=False).eval()
    wrong.load_state_dict(model.state_dict())
    path, args = tmp_path / "wrong.onnx", (torch.randn(2, 5, 6),)
    torch.onnx.export(wrong, args, path, dynamo=False, opset_version=17)
    (fault,) = normdeploy.bisect(model, path, args, seeds=1).faults
    assert fault.kind == "left out"
    assert fault.cause == "aten.roll is missing: Add '/Add' reads '/Tanh_output_0' directly"
