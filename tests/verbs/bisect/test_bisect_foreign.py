"""Files of torch's own exporters: outputs of other names, and nodes that were left in training mode."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import normdeploy
from normdeploy.errors import InputError
from normdeploy.verbs.bisect.fault_search import FaultSearch
from normdeploy.verbs.bisect.file_bisection import Bisection

X = torch.ones(2, 3, 4, 4)


class Pair(torch.nn.Module):
    """Two outputs of one shape."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    return torch.nn.Sequential(*layers).eval()


def written(model: torch.nn.Module, path: Path, *names: str) -> Path:
    torch.onnx.export(
        model,
        (X,),
        path,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING if model.training else torch.onnx.TrainingMode.EVAL,
        do_constant_folding=False,
        input_names=["images"],
        output_names=names,
    )
    return path


def bisected(model: torch.nn.Module, path: Path, **keywords: list[str]) -> Bisection:
    return normdeploy.bisect(model, path, (X,), seeds=1, **keywords)


def test_other_names_of_a_right_file_are_no_fault(tmp_path: Path) -> None:
    found = bisected(net(), written(net(), tmp_path / "right.onnx", "logits"))
    assert found
    assert not found.faults
    assert not found.not_searched


def test_a_damaged_bias_is_found_behind_another_name(tmp_path: Path) -> None:
    damaged = net()
    with torch.no_grad():
        damaged[3].bias[1] += 0.1
    (fault,) = bisected(net(), written(damaged, tmp_path / "damaged.onnx", "logits")).faults
    assert (fault.kind, fault.module, fault.output, fault.mended) == ("weights", "3", "output", True)


def test_a_batch_norm_in_training_mode_is_the_cause(tmp_path: Path) -> None:
    path = written(net().train(), tmp_path / "training.onnx", "logits")
    (fault,) = bisected(net(), path).faults
    assert (fault.kind, fault.mended) == ("training mode", True)
    assert fault.nodes[0].startswith("BatchNormalization")
    assert "export the model after eval()" in fault.cause


def test_a_dropout_in_training_mode_is_the_cause(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Dropout(0.5), torch.nn.Flatten())
    path = written(model.train(), tmp_path / "training.onnx", "logits")
    assert "Dropout" in {node.op_type for node in onnx.load(path).graph.node}
    fault = bisected(model.eval(), path).faults[0]
    assert fault.kind == "training mode"
    assert fault.nodes[0].startswith("Dropout")


def test_a_map_swaps_outputs_that_their_order_would_confuse(tmp_path: Path) -> None:
    model = Pair().eval()
    a, b = "output_0", "output_1"
    path = written(model, tmp_path / "swapped.onnx", b, a)
    assert not bisected(model, path)
    assert bisected(model, path, map=[f"{a}={b}", f"{b}={a}"])


def test_a_map_of_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not an input or output of the model"):
        bisected(net(), written(net(), tmp_path / "right.onnx", "logits"), map=["logits=other"])


def test_an_error_without_a_node_is_told_with_the_tensors_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = net()
    with torch.no_grad():
        damaged[3].bias[1] += 0.1
    path = written(damaged, tmp_path / "damaged.onnx", "logits")
    # A hunt that names nothing stands for an error that shows in the whole file alone.
    monkeypatch.setattr(FaultSearch, "faults", lambda self: [])
    found = bisected(net(), path)
    told = " ".join(found.notes)
    assert "'output' in onnxruntime (optimizer off) is off by 0.1, allowed" in told
    assert "tensors were compared ('" in told
    assert "no smaller wrong graph was found" in told
    assert "the weight '3.bias' differs from the model's" in told
    assert "no fault was found" not in str(found)


def test_an_output_of_another_shape_and_name_is_compared_and_its_pool_named(tmp_path: Path) -> None:
    def pooled(*, ceil_mode: bool) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.MaxPool2d(3, ceil_mode=ceil_mode), torch.nn.ReLU()).eval()

    found = bisected(pooled(ceil_mode=False), written(pooled(ceil_mode=True), tmp_path / "ceil.onnx", "pooled"))
    told = str(found)
    assert "its shape is [2, 3, 2, 2], but the reference's is [2, 3, 1, 1]" in told
    assert "MaxPool" in found.faults[0].nodes[0]


class Collected(torch.nn.Module):
    """Sums messages at the nodes of a graph."""

    def forward(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x)
        return hidden + torch.zeros_like(hidden).index_add(0, to, hidden[to] * 2)


def test_inner_tensors_are_read_where_one_name_stands_for_two_dims(tmp_path: Path) -> None:
    # onnxruntime gave one buffer to tensors of both.
    args = torch.arange(24.0).reshape(6, 4), torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5])
    torch.onnx.export(
        Collected().eval(),
        args,
        tmp_path / "overwrites.onnx",
        dynamo=False,
        input_names=["x", "to"],
        dynamic_axes={"x": {0: "n"}, "to": {0: "n"}},
    )
    proto = onnx.load(tmp_path / "overwrites.onnx")
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(proto, tmp_path / "overwrites.onnx")
    found = normdeploy.bisect(Collected().eval(), tmp_path / "overwrites.onnx", args, seeds=1)
    assert found.faults
    assert any("ScatterElements" in node for node in found.faults[0].nodes)
