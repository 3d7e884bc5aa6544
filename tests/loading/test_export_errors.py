"""What a newcomer reads where torch.export, or torch's exporter, can't take a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normdeploy
from normdeploy.errors import ExportError, LoadError, NormdeployError
from normdeploy.loading import from_module

# Words of torch's own that say nothing to whoever wrote the model.
FOREIGN = (
    "Eq(u",
    "zuf",
    "has no attribute",
    "module ''",
    "TORCH_LOGS",
    "http",
    "SymbolicTensor",
    "AssertionError",
    "\n",
)


@dataclasses.dataclass
class Answer:
    value: torch.Tensor


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def by_value(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x


def until(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 10:
        x = x + 1
    return x


def windows(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % 4)).view(-1, 4, 8).sum(1)


def checked(x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x)


CASES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "number": (lambda x: (x * 2, 3), r"returns 3 \(int\).*omit it, or make it a tensor"),
    "text": (lambda x: (x * 2, "ok"), r"returns 'ok' \(str\)"),
    "number alone": (lambda x: 3.0, r"returns 3.0 \(float\)"),
    "None": (lambda x: None, "returns no tensor"),
    "nothing": (lambda x: (), "returns no tensor"),
    "dataclass": (lambda x: Answer(x), "returns Answer, but a file can return only tensors"),
    "set": (lambda x: {x}, "returns set, but a file can return only tensors"),
    "distribution": (
        lambda x: torch.distributions.Normal(x, 1.0),
        "returns Normal, but a file can return only tensors",
    ),
    "complex": (lambda x: torch.fft.fft(x), "tensor of complex64, but ONNX has no complex tensors"),
    "if of a value": (by_value, r"module 'part', line \d+ of test_export_errors.py \(if x.sum\(\) > 0:\).*torch.where"),
    "while of a value": (until, r"line \d+ of test_export_errors.py \(while x.sum\(\) < 10:\)"),
    "size of a value": (
        lambda x: torch.zeros(int(x.abs().sum())),
        r"int\(x.abs\(\).sum\(\)\).*an if, while, assert",
    ),
    "checked distribution": (checked, r"a distribution validates its values in .*line \d+ of .*validate_args=False"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "calls numpy in module 'part'"),
    "sparse": (
        lambda x: torch.sparse.mm(x.to_sparse(), x.T),
        r"does not support the operator aten._to_sparse.default in",
    ),
    "slice": (lambda x: x[1:-1] * 1, "sizes below 4: start there, with --dim b=4:5:9"),
    "longer slice": (lambda x: x[2:-2].sum(0), "the size 5, or computes differently at that size.*another size"),
    "multiples": (windows, "which sizes of b=2:5:9 the model accepts.*pass a range of multiples with --dim"),
    "remainder": (lambda x: (x * 9).long() % x.shape[0], "can't write an argument that depends on a dynamic size"),
}


def export(function: Callable[[torch.Tensor], Any]) -> Any:
    model = nn.Sequential()
    model.add_module("part", Calls(function))
    return normdeploy.export(model.eval(), torch.randn(5, 8), inputs="x[b,8]", dims="b=2:5:9")


@pytest.mark.parametrize(("function", "said"), CASES.values(), ids=CASES)
def test_export_what_torch_can_not_take_is_told_in_one_line(
    function: Callable[[torch.Tensor], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    with pytest.raises(NormdeployError, match=said) as caught:
        export(function)
    assert not [words for words in FOREIGN if words in str(caught.value)]
    assert capfd.readouterr() == ("", "")


def test_export_stated_slice_works_from_the_size_that_the_error_names() -> None:
    model = Calls(lambda x: x[1:-1] * 1)
    assert normdeploy.export(model.eval(), torch.randn(5, 8), inputs="x[b,8]", dims="b=4:5:9")


def test_export_distributions_are_not_checked_in_the_trace() -> None:
    torch.manual_seed(0)
    checks = torch.distributions.Distribution._validate_args
    assert export(lambda x: torch.distributions.Normal(x, 1.0).log_prob(x * 2))
    assert export(lambda x: torch.distributions.Categorical(logits=x).entropy())
    assert torch.distributions.Distribution._validate_args is checks


@pytest.mark.filterwarnings("ignore")
def test_export_integer_modules_of_torch_ao_are_refused_by_name(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)
    with pytest.raises(ExportError, match=r"torch\.ao stores the weights of 0 \(Linear\).*--quantize int8"):
        normdeploy.export(quantized, torch.randn(5, 8))
    torch.save(quantized.state_dict(), tmp_path / "w.pt")
    with pytest.raises(LoadError, match=r"contains weights that torch.ao has packed as integers.*--quantize int8"):
        normdeploy.export(tmp_path / "w.pt", model="torch.nn:Identity", inputs="x[b,8]")


def batched_nms(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Keep boxes by their scores, as torchvision's function of this name."""
    if (scores > 0.5).sum() == 0:
        return boxes[:0]
    return boxes[scores > 0.5]


class Head(nn.Module):
    """Head that suppresses boxes itself, as torchvision's RPN."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def filter_proposals(self, boxes: torch.Tensor) -> torch.Tensor:
        return batched_nms(boxes, boxes.amax(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter_proposals(self.head(x))


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Identity()
        self.backbone = nn.Linear(4, 4)
        self.rpn = Head()
        self.box_head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.box_head(self.rpn(self.backbone(self.scale(x))))


class OneStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxes = self.head(self.backbone(x))
        return batched_nms(boxes, boxes.amax(-1))


class Wrapped(nn.Module):
    """Detector inside another module. Its modules after the suppression are no parts before it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TwoStages()
        self.after = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.model(x))


@pytest.mark.parametrize(
    ("detector", "parts"),
    [
        (OneStage, "head: --part ..head"),
        (TwoStages, "rpn.head: --part ..rpn.head"),
        (Wrapped, "model.rpn.head: --part ..model.rpn.head"),
    ],
)
def test_export_suppression_of_boxes_names_the_parts_before_it(detector: type[nn.Module], parts: str) -> None:
    with pytest.raises(ExportError) as raised:
        from_module(detector().eval(), torch.ones(3, 4))
    assert "the number of boxes that non-maximum suppression keeps depends on the values" in str(raised.value)
    assert str(raised.value).endswith(f"export the part before it, which ends with {parts}")
