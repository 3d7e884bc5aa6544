"""Faults of everyday models that one change of one node does not show: exchanged edges, constants, sequences."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bisect.fault_search import FaultSearch
from normdeploy.verbs.bisect.file_bisection import Bisection


class Graph(nn.Module):
    """Messages along edges, averaged at their targets."""

    is_swapped = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.message, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        source, target = (edges[1], edges[0]) if self.is_swapped else (edges[0], edges[1])
        sums = torch.zeros_like(h).index_add(0, target, nn.functional.gelu(self.message(h[source])))
        ones = torch.ones_like(target, dtype=x.dtype)
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, ones).clamp(min=1)
        return self.last(h + sums / degree[:, None])


class Rotary(nn.Module):
    """Queries and keys turned by their position."""

    base = 10000.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.k = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        angles = torch.arange(x.shape[1])[:, None] * self.base ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

        def turned(x: torch.Tensor) -> torch.Tensor:
            one, other = x.chunk(2, -1)
            return x * cos + torch.cat([-other, one], -1) * sin

        return (turned(self.q(x)) @ turned(self.k(x)).transpose(1, 2)).softmax(-1) @ x


class Bags(nn.Module):
    """A Loop over a sequence, in the file of torch's exporter."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(30, 8, mode="mean"), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.bag(ids))


def searched(model: nn.Module, damaged: nn.Module, folder: Path, args: tuple[Any, ...], **dims: Any) -> Bisection:
    path = folder / "wrong.onnx"
    torch.onnx.export(damaged.eval(), args, path, dynamo=True, verbose=False, **dims)
    return normdeploy.bisect(model.eval(), path, args, seeds=1)


def damaged_graph() -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Graph()
    damaged = copy.deepcopy(model)
    damaged.is_swapped = True
    return model, damaged, (torch.randn(7, 6), torch.randint(0, 7, (2, 12)))


def test_exchanged_rows_of_an_edge_index_are_one_fault(tmp_path: Path) -> None:
    """Each row mended alone leaves the output as wrong."""
    (fault,) = searched(*damaged_graph()[:2], tmp_path, damaged_graph()[2]).faults
    assert fault.nodes == ("Gather node_select",)
    assert "'node_select' and Gather 'node_select_1': 'select' and 'select_1' are exchanged" in fault.cause
    assert fault.mended


def test_a_wrong_constant_is_named_in_the_place_of_its_readers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Rotary()
    damaged = copy.deepcopy(model)
    damaged.base = 9000.0
    (fault,) = searched(
        model,
        damaged,
        tmp_path,
        (torch.randint(0, 20, (2, 10)),),
        dynamic_shapes=({1: torch.export.Dim("length", min=2, max=64)},),
    ).faults
    assert len(fault.nodes) == 1
    assert (fault.kind, fault.mended) == ("constant", True)
    assert "0.102669, but the model has 0.1 (3 of 4 elements differ)" in fault.cause


def test_constants_that_are_wrong_together_are_one_fault(tmp_path: Path) -> None:
    """At a fixed length the exporter folds the angles into their cosines and sines."""
    torch.manual_seed(0)
    model = Rotary()
    damaged = copy.deepcopy(model)
    damaged.base = 9000.0
    (fault,) = searched(model, damaged, tmp_path, (torch.randint(0, 20, (2, 10)),)).faults
    assert (fault.kind, fault.mended) == ("constant", True)
    assert fault.cause.count("differs from the model's") == 2
    assert "and one more node read" in fault.cause


def test_a_loop_over_a_sequence_is_searched_in_float64(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Bags()
    damaged = copy.deepcopy(model)
    damaged.bag.mode = "sum"
    found = searched(model, damaged, tmp_path, (torch.randint(0, 30, (4, 6)),))
    (fault,) = found.faults
    assert not found.not_searched
    assert (fault.module, fault.cause) == ("bag", "it is 6 times the model's value")


def test_a_stretch_that_has_no_float64_form_is_named_by_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normdeploy.runtimes.float64_evaluator import NotEvaluated

    def refuse(self: FaultSearch, tensor: str) -> None:
        raise NotEvaluated("Loop 'n' has no float64 form")

    monkeypatch.setattr(FaultSearch, "stretch_search", refuse)
    model, _, args = damaged_graph()
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.get_parameter("last.bias")[1] += 0.1
    (fault,) = searched(model, damaged, tmp_path, args).faults
    assert (fault.module, fault.nodes) == ("last", ("Gemm node_linear_2",))
    assert fault.cause == "Loop 'n' has no float64 form; it is between 'add', correct, and 'linear_2', wrong"


class Gated(nn.Module):
    """A residual whose branch is halved, and a mask by lengths."""

    is_halved, is_strict, is_bent, is_tiled, is_added, is_rolled = True, True, True, False, True, True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skip = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = nn.functional.elu(h) if self.is_bent else h
        h = h + (0.5 if self.is_halved else 1.0) * self.second(h.flatten(1).view_as(h))
        h = h.roll(2 if self.is_rolled else 1, 1)
        places = torch.arange(x.shape[1])
        mask = places < lengths[:, None] if self.is_strict else places <= lengths[:, None]
        h = torch.where(mask[..., None], h, h.exp())
        h = h.repeat(1, 2, 1) if self.is_tiled else h.repeat_interleave(2, 1)
        return h + self.skip(x).repeat(1, 2, 1) if self.is_added else h


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ("is_halved", "has a scale of its input 'linear_1' of 1; with 0.5 the result is correct"),
        ("is_strict", "LessOrEqual 'node_le' should be Less"),
        ("is_tiled", "with the slices [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] of its axis 1 in this order it is correct"),
        ("is_added", "aten.add with the result of aten.repeat is missing"),
        ("is_bent", "aten.elu to aten.view_as are missing"),
        ("is_rolled", "rolled by [0, -4, 0] along its axes it is correct"),
    ],
)
def test_a_fault_is_named_by_what_mends_it(setting: str, cause: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gated()
    damaged = copy.deepcopy(model)
    setattr(damaged, setting, not getattr(model, setting))
    (fault,) = searched(model, damaged, tmp_path, (torch.randn(2, 5, 6), torch.tensor([5, 3]))).faults
    assert cause in fault.cause


def test_a_function_that_is_missing_at_the_end_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 8)
    (fault,) = searched(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer), tmp_path, (torch.randn(2, 6),)).faults
    assert fault.cause == "Identity should be Tanh"
