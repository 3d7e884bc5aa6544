"""Integers made of sizes and single numbers by way of floats: no drawn rounding moves them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.loading import from_module
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from normdeploy.runtimes.rounding_noise import RoundingRunner

Rows = Callable[[torch.Tensor], torch.Tensor]


def by_logarithm(distance: torch.Tensor) -> torch.Tensor:
    """The buckets of T5: 8 and more lie on the edges of buckets, where a rounding takes the next one."""
    far = 4 + (torch.log(distance.clamp(min=1).float() / 4) / math.log(4) * 4).long()
    return torch.where(distance < 4, distance, far.clamp(max=7))


def by_thirds(distance: torch.Tensor) -> torch.Tensor:
    """7/3·3 is 6.999… in float64, and 7 in float32, as are 14/3·3 and others."""
    return (distance.float() * (1 / 3) * 3).long().clamp(max=7)


def by_comparison(distance: torch.Tensor) -> torch.Tensor:
    return (distance.float() * 0.1 >= 0.3).long() + (distance.float().sqrt() > 2).long()


class Biased(nn.Module):
    """A layer with a learned bias for each distance of two positions."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        distance = (positions[:, None] - positions[None]).abs()
        return self.norm(x) + self.table(self.rows(distance)).sum(1)


def made(rows: Rows, seed: int = 0) -> Biased:
    torch.manual_seed(seed)
    return Biased(rows).eval()


def written(module: nn.Module, path: Path, size: int = 12) -> Path:
    length = torch.export.Dim("length", min=2, max=64)
    sample = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(1))
    torch.onnx.export(module, (sample,), path, dynamo=True, verbose=False, dynamic_shapes=({1: length},))
    return path


def stale(module: Biased, row: int) -> Biased:
    """The same but for a row of its table, half as large."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.table.weight[row] *= 0.5
    return other


EVERY = [by_logarithm, by_thirds, by_comparison]


@pytest.mark.parametrize("rows", EVERY)
def test_draws_of_a_model_keep_settled_integers(rows: Rows) -> None:
    module = made(rows)
    sample = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(1))
    reference = RoundingRunner(from_module(module, (sample,)))
    feeds = {"x": sample.numpy()}
    eager = module(sample).detach().numpy().astype(np.float64)
    for seed in range(4):
        (drawn,) = reference.run_rounded(feeds, seed).values()
        # 12 terms of a table below 4 and a norm below 2; another row would be 1 off.
        assert np.abs(drawn - eager).max() < 64 * 2.0**-24 * 50


@pytest.mark.parametrize("rows", EVERY)
def test_draws_of_a_file_keep_settled_integers(rows: Rows, tmp_path: Path) -> None:
    module = made(rows)
    sample = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(1))
    proto = onnx.load(written(module, tmp_path / "m.onnx"))
    reference = OnnxFloat64Runner(proto)
    eager = module(sample).detach().numpy().astype(np.float64)
    for seed in range(4):
        (drawn,) = reference.run_rounded({proto.graph.input[0].name: sample.numpy()}, seed).values()
        assert np.abs(drawn - eager).max() < 64 * 2.0**-24 * 50


def test_integers_of_data_are_still_drawn() -> None:
    """A rounding of x·10 takes the other side of an edge: kernels may."""

    class Graded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1).mul(4).long()

    sample = torch.zeros(1, 4)
    reference = RoundingRunner(from_module(Graded().eval(), (sample,)))
    feeds = {"x": sample.numpy()}
    drawn = [next(iter(reference.run_rounded(feeds, seed).values())) for seed in range(8)]
    assert {0, 1} == set(np.unique(drawn))


def test_what_codes_make_is_no_settled_integer() -> None:
    """A choice of experts by a dequantized table: kernels may order equal scores as they like."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.ones(8, 4, dtype=torch.int8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.codes[ids].float() * 0.1).softmax(-1).argmax(-1)

    sample = torch.zeros(2, 16, dtype=torch.int64)
    reference = RoundingRunner(from_module(Routed().eval(), (sample,)))
    drawn = [next(iter(reference.run_rounded({"ids": sample.numpy()}, seed).values())) for seed in range(4)]
    assert np.unique(drawn).size > 1


@pytest.mark.parametrize("rows", EVERY)
def test_a_right_file_is_verified(rows: Rows, tmp_path: Path) -> None:
    module = made(rows)
    right = written(module, tmp_path / "right.onnx")
    of_model = normdeploy.verify(module, right, inputs=["x[2,12,4]"])
    assert of_model, of_model.table()
    of_file = normdeploy.verify(right, written(module, tmp_path / "again.onnx"))
    assert of_file, of_file.table()


@pytest.mark.parametrize("row", [5, 6])
def test_a_stale_row_is_found(row: int, tmp_path: Path) -> None:
    module = made(by_logarithm)
    wrong = written(stale(module, row), tmp_path / "wrong.onnx")
    assert not normdeploy.verify(module, wrong, inputs=["x[2,12,4]"])
    assert not normdeploy.verify(written(module, tmp_path / "right.onnx"), wrong)
