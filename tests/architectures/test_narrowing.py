"""Rows whose dims our export refuses: the proposed sizes are taken, and the plain file is run at the others."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import normdeploy
from benchmarks.architectures import table
from benchmarks.architectures.catalogue import Architecture
from benchmarks.architectures.measure import Row
from benchmarks.architectures.narrowing import ProposedSizes, describe_plain_sizes, proposed_sizes
from normdeploy.errors import InputError
from normdeploy.loading.dim_constraints import DimRangeError, FixedDimError
from normdeploy.model import Dim


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


ARCHITECTURE = Architecture("doubled", "none", Doubled, ("x:float32[batch,seq]",))
EIGHT = ProposedSizes(Dim("seq", 2, 8, 16), Dim("seq", 8, 8, 8))


class Fixed(nn.Module):
    """Loop over the sequence, so that the trace has one length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[:, 0]
        for place in range(1, x.shape[1]):
            total = total.relu() + x[:, place]
        return total


def plain_file(folder: Path, shape: list[str | int], output: str = "y", op: str = "Add") -> Path:
    values = [helper.make_tensor_value_info(name, 1, shape) for name in ("x", output)]
    node = helper.make_node(op, ["x", "x"], [output])
    graph = helper.make_graph([node], "plain", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "p.onnx")
    return folder / "p.onnx"


@pytest.mark.parametrize(
    ("shape", "op", "expected"),
    [
        (["batch", 8], "Add", "the plain file fixes it too"),
        (["batch", "seq"], "Add", "the plain file is right at 2, is right at 16"),
        (["batch", "seq"], "Mul", "the plain file is wrong at 2, is wrong at 16"),
    ],
)
def test_plain_file_is_run_at_the_refused_sizes(shape: list[str | int], op: str, expected: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert describe_plain_sizes(EIGHT, ARCHITECTURE, Doubled(), plain_file(tmp_path, shape, op=op)) == expected


def test_proposed_size_replaces_the_dim() -> None:
    assert EIGHT.applied_to(ARCHITECTURE).inputs == ("x:float32[batch,8]",)
    ranged = ProposedSizes(Dim("seq", 2, 8, 16), Dim("seq", 4, 8, 16, step=4))
    assert ranged.applied_to(ARCHITECTURE).dims == ("batch=1:2:3", "seq=4:8:16:4")
    assert ranged.refused == [2]


def test_error_of_export_proposes_sizes() -> None:
    with pytest.raises(FixedDimError) as raised:
        normdeploy.export(Fixed().eval(), inputs=ARCHITECTURE.inputs, dims=ARCHITECTURE.dims)
    assert proposed_sizes(raised.value, ARCHITECTURE) == EIGHT
    assert proposed_sizes(raised.value, EIGHT.applied_to(ARCHITECTURE)) is None


@pytest.mark.parametrize("error", [None, InputError("no"), DimRangeError("no", None), FixedDimError("no", "seq")])
def test_error_without_sizes_proposes_none(error: Exception | None) -> None:
    assert proposed_sizes(error, ARCHITECTURE) is None


@pytest.mark.parametrize(("does", "count"), [("the plain file fixes it too", 0), ("the plain file is right at 16", 1)])
def test_size_that_only_the_plain_file_takes_is_wrong(does: str, count: int) -> None:
    row = Row("doubled", "none", automatic=True, verify="passes", narrowed={"seq": f"8 ({does})"}).to_json()
    assert len(table.wrong(row)) == count
    assert "dynamic, seq=8" in table.automatic_line(row)
