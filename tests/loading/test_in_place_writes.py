"""State that forward writes is named: a file keeps nothing between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normdeploy


class Cell(nn.Module):
    h: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(8, 4))


class Copies(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h.copy_(self.h * 0.9 + x)
        return x + self.h


class WritesAView(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h[2:].view(-1)[:4].add_(x[0])
        return x + self.h


class WritesAnItem(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.h.split(4)
        first.mul_(2)
        return x + self.h


class Assigns(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + x
        return x + self.h


class Reads(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.h.clone()
        own.add_(x)
        return own + torch.zeros(4).add_(1)


X = torch.ones(8, 4)
NOTE = "the buffer 'h' of module '0' is written in forward; the file does not keep it between runs"


def _notes(result: normdeploy.ExportResult) -> list[str]:
    return [note for note in result.notes if "is written in forward" in note]


@pytest.mark.parametrize("cell", [Copies(), WritesAView(), WritesAnItem(), Assigns()])
def test_a_written_buffer_is_named_with_its_module(cell: nn.Module) -> None:
    (note,) = _notes(normdeploy.export(nn.Sequential(cell).eval(), X))
    assert note.startswith(NOTE)


def test_a_buffer_that_is_read_alone_is_not_named() -> None:
    assert not _notes(normdeploy.export(nn.Sequential(Reads()).eval(), X))


def test_a_written_buffer_of_a_saved_program_is_named(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Sequential(Copies()).eval(), (X,)), tmp_path / "m.pt2")
    (note,) = _notes(normdeploy.export(tmp_path / "m.pt2"))
    assert note.startswith(NOTE)


def test_the_users_module_keeps_its_buffer() -> None:
    cell = Assigns().eval()
    normdeploy.export(cell, X)
    assert torch.equal(cell.h, torch.zeros(8, 4))


class ChangesInput(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0
        return x + y.clone().add_(1)


def test_inputs_changed_in_place_are_named() -> None:
    made = normdeploy.export(ChangesInput().eval(), (torch.ones(2, 3), torch.ones(2, 3)))
    told = [note for note in made.notes if "in place" in note]
    assert [note.partition(";")[0] for note in told] == ["forward changes its input 'x' in place"]
    assert normdeploy.verify(made)
