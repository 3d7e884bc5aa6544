"""BatchNorms that an exporter folded: with another epsilon, of another state of the model, or left in training mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault

IMAGE = (torch.linspace(-2, 3, 2 * 3 * 12 * 12).sin().mul(2).reshape(2, 3, 12, 12),)
OPTIONS = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}}, "dynamo": False}


class Block(nn.Module):
    """Two convolutions with BatchNorms around a residual, whose stretch between right tensors holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm_one = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.two, self.norm_two = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        for norm in (self.norm, self.norm_one, self.norm_two):
            nn.init.uniform_(norm.running_var, 0.3, 2)
            nn.init.normal_(norm.running_mean, 0, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.norm_two(self.two(torch.relu(self.norm_one(self.one(x))))))
        return self.head(x.mean((2, 3)))


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(x).mean((2, 3)))


def made(module: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module().eval()


def faults(model: nn.Module, wrong: nn.Module, folder: Path, **options: object) -> tuple[Fault, ...]:
    torch.onnx.export(wrong, IMAGE, folder / "wrong.onnx", **OPTIONS, **options)
    return normdeploy.bisect(model, folder / "wrong.onnx", IMAGE, seeds=1).faults


@pytest.mark.parametrize("drift", [0.02, 0.0005], ids=["another epoch", "another step"])
def test_other_state_behind_folded_norms_is_stale_weights(drift: float, tmp_path: Path) -> None:
    wrong = made(Block)
    with torch.no_grad():
        for parameter in wrong.parameters():
            parameter.add_(torch.randn(parameter.shape) * parameter.std().clamp_min(1e-3) * drift)
    (fault,) = faults(made(Block), wrong, tmp_path)
    assert (fault.kind, fault.mended) == ("stale weights", True)


@pytest.mark.parametrize("epsilon", [1e-3, 0.02])
def test_epsilon_of_a_folded_norm_is_solved_for(epsilon: float, tmp_path: Path) -> None:
    wrong = made(Block)
    wrong.norm_two.eps = epsilon
    (fault,) = faults(made(Block), wrong, tmp_path)
    assert (fault.kind, fault.mended) == ("epsilon", True)
    assert f"folded with epsilon {epsilon:.3g}, but the model has 1e-05" in fault.cause


def test_epsilon_of_all_folded_norms_is_no_other_state(tmp_path: Path) -> None:
    wrong = made(Block)
    for norm in (wrong.norm, wrong.norm_one, wrong.norm_two):
        norm.eps = 1e-3
    found = faults(made(Block), wrong, tmp_path)
    assert {fault.kind for fault in found} == {"epsilon"}
    assert found[-1].mended


def test_weight_of_a_folded_norm_is_named(tmp_path: Path) -> None:
    wrong = made(Block)
    with torch.no_grad():
        wrong.two.weight[3] *= 1.5
    (fault,) = faults(made(Block), wrong, tmp_path)
    assert (fault.kind, fault.nodes, fault.mended) == ("weights", ("Conv /two/Conv",), True)
    assert "'two.weight with the BatchNorm norm_two folded'" in fault.cause


def test_all_norms_in_training_mode_are_one_fault(tmp_path: Path) -> None:
    options = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    (fault,) = faults(made(Dropping), made(Dropping).train(), tmp_path, **options)
    assert (fault.kind, len(fault.nodes), fault.mended) == ("training mode", 3, True)


def test_two_norms_of_a_stretch_in_training_mode_beside_another_fault(tmp_path: Path) -> None:
    options = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    wrong = made(Block).train()
    with torch.no_grad():
        wrong.head.bias += 0.5
    found = faults(made(Block), wrong, tmp_path, **options)
    assert [fault.kind for fault in found] == ["training mode", "training mode", "weights"]
    assert "and 1 more are in training mode" in found[1].cause


def test_average_pool_for_a_max_pool_is_the_operator(tmp_path: Path) -> None:
    wrong = made(Pooled)
    wrong.pool = nn.AvgPool2d(3, 2, 1)
    (fault,) = faults(made(Pooled), wrong, tmp_path)
    assert (fault.kind, fault.mended) == ("operator", True)
    assert "should be MaxPool" in fault.cause


KERAS = """<ir_version: 9, opset_import: ["" : 18]> net (float[n, 3, 8, 8] x) => (float[n, 8, 6, 6] y)
{ h = Conv (x, C, cb) [norm] y = BatchNormalization <epsilon = 0.001> (h, ga, be, mu, va) }"""
FOLDED = """<ir_version: 9, opset_import: ["" : 18]> net (float[n, 3, 8, 8] x) => (float[n, 8, 6, 6] y)
{ [conv] y = Conv (x, C, cb) }"""


def normalized() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a convolution with a BatchNorm behind it, and its weights."""
    rng = np.random.default_rng(0)
    values = {"C": rng.standard_normal((8, 3, 3, 3)) / 3, "cb": rng.standard_normal(8), "ga": rng.uniform(0.5, 2, 8)}
    values |= {"be": rng.standard_normal(8), "mu": rng.standard_normal(8), "va": rng.uniform(0.05, 2, 8)}
    model = onnx.parser.parse_model(KERAS)
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(v), n) for n, v in values.items())
    return model, values


def test_training_mode_of_a_file_is_no_mere_attribute(tmp_path: Path) -> None:
    right, _ = normalized()
    wrong, _ = normalized()
    wrong.graph.node[1].attribute.append(onnx.helper.make_attribute("training_mode", 1))
    wrong.graph.node[1].output.extend(["new_mean", "new_variance"])
    onnx.save(wrong, tmp_path / "wrong.onnx")
    (fault,) = normdeploy.bisect(right, tmp_path / "wrong.onnx", seeds=1).faults
    assert fault.kind == "training mode"


def test_epsilon_of_a_norm_of_a_reference_file_is_solved_for(tmp_path: Path) -> None:
    """A weight that a BatchNorm is folded into keeps its name."""
    right, values = normalized()
    wrong = onnx.parser.parse_model(FOLDED)
    scale = values["ga"] / np.sqrt(values["va"] + 1e-5)
    weight, bias = values["C"] * scale.reshape(-1, 1, 1, 1), (values["cb"] - values["mu"]) * scale + values["be"]
    wrong.graph.initializer.append(numpy_helper.from_array(np.float32(weight), "C"))
    wrong.graph.initializer.append(numpy_helper.from_array(np.float32(bias), "cb"))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    (fault,) = normdeploy.bisect(right, tmp_path / "wrong.onnx", seeds=1).faults
    assert fault.kind == "epsilon"
    assert fault.cause == "Conv 'conv' has a BatchNorm folded with epsilon 1e-05, but the model has 0.001"


def of_folded(layer: nn.Module, statistics: dict[str, float], folder: Path) -> tuple[Fault, ...]:
    """Bisect a file whose BatchNorm, folded into the layer before, has one number in all channels of a statistic."""
    torch.manual_seed(0)
    net = nn.Sequential(layer, nn.BatchNorm2d(8)).eval()
    for name in ("running_var", "running_mean", "weight"):
        nn.init.uniform_(getattr(net[1], name), 0.3, 2)
    wrong = copy.deepcopy(net)
    with torch.no_grad():
        for name, value in statistics.items():
            getattr(wrong[1], name).fill_(value)
    torch.onnx.export(wrong, IMAGE, folder / "wrong.onnx", dynamo=True, verbose=False)
    assert "BatchNormalization" not in [node.op_type for node in onnx.load(folder / "wrong.onnx").graph.node]
    return normdeploy.bisect(net, folder / "wrong.onnx", IMAGE, seeds=1).faults


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Conv2d(3, 8, 3), lambda: nn.Conv2d(3, 8, 3, bias=False), lambda: nn.ConvTranspose2d(3, 8, 3)],
    ids=["Conv", "Conv without bias", "ConvTranspose"],
)
@pytest.mark.parametrize(
    ("statistics", "told"),
    [
        ({"running_var": 1}, "folded with a running_var of 1 in every channel"),
        ({"weight": 1}, "folded with a weight of 1 in every channel"),
        ({"running_var": 1, "running_mean": 0}, "folded with a running_var of 1 in every channel"),
    ],
    ids=["variance", "gamma", "fresh"],
)
def test_a_norm_folded_from_fresh_statistics_is_named(
    layer: Callable[[], nn.Module], statistics: dict[str, float], told: str, tmp_path: Path
) -> None:
    (fault,) = of_folded(layer(), statistics, tmp_path)
    assert fault.kind == "weights"
    assert f"the BatchNorm 1 is {told}" in fault.cause
    assert fault.mended
