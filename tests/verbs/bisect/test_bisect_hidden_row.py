"""Files of torch's own exporter, whose guard does not know a row that the mask hides whole: ``bisect`` calls the cause
by its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import normdeploy
from tests.loading.test_huggingface_folder import Attention

INPUTS = ["ids:int64[2,5]", "segment:int64[2,5]", "mask:int64[2,5]"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("raw") / "raw.onnx"
    example = tuple(torch.ones(2, 5, dtype=torch.int64) for _ in INPUTS)
    torch.onnx.export(Attention().eval(), example, path, dynamo=True, verbose=False, output_names=["output"])
    return path


def net() -> Attention:
    torch.manual_seed(0)
    return Attention().eval()


def test_a_row_that_the_mask_hides_whole_is_the_cause(raw: Path) -> None:
    found = normdeploy.bisect(net(), raw, inputs=INPUTS, seeds=1)
    (fault,) = found.faults
    assert (fault.kind, fault.operator, fault.case) == (
        "hidden row",
        "aten.scaled_dot_product_attention",
        "mask hides a whole row",
    )
    assert fault.mended
    assert len(fault.nodes) == 1
    assert fault.nodes[0].startswith("Softmax")
    assert (
        "the mask hides 5 of 10 rows completely; there the model gives 0 and the file the mean of all values"
        in fault.cause
    )
    assert "hidden row: Softmax" in " ".join(str(found).split())


def test_a_mask_of_minus_infinity_without_a_guard_gives_nan(raw: Path, tmp_path: Path) -> None:
    proto = onnx.load(raw)
    for holder in (
        *proto.graph.initializer,
        *(a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute),
    ):
        value = onnx.numpy_helper.to_array(holder)
        if value.dtype == np.float32 and value.size == 1 and value == np.finfo(np.float32).min:
            holder.CopyFrom(onnx.numpy_helper.from_array(np.full_like(value, -np.inf), holder.name))
    weights = next(n for n in proto.graph.node if n.op_type == "Softmax").output[0]
    guard = next(n for n in proto.graph.node if n.op_type == "Where" and weights in n.input)
    for node in proto.graph.node:
        node.input[:] = [weights if name == guard.output[0] else name for name in node.input]
    proto.graph.node.remove(guard)
    onnx.save(proto, tmp_path / "nan.onnx")
    (fault,) = normdeploy.bisect(net(), tmp_path / "nan.onnx", inputs=INPUTS, seeds=1).faults
    assert fault.kind == "hidden row"
    assert "there the model gives 0 and the file NaN" in fault.cause


def test_rows_that_are_not_hidden_have_other_causes(raw: Path, tmp_path: Path) -> None:
    proto = onnx.load(raw)
    next(n for n in proto.graph.node if n.op_type == "Softmax").attribute[0].i = 2
    onnx.save(proto, tmp_path / "axis.onnx")
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 2, (2, 5)) for name in ("ids", "segment")} | {"mask": np.ones((2, 5), np.int64)}
    found = normdeploy.bisect(net(), tmp_path / "axis.onnx", inputs=INPUTS, feeds=feeds)
    assert [fault.kind for fault in found.faults] == ["axis"]
