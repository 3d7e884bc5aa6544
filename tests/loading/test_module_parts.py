"""Parts of models by the names of their modules: detectors as torchvision writes them, and models of packages."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import ExportError, InputError
from normdeploy.loading import from_module, load
from normdeploy.loading.module_parts import ModulePart, parse_module_part

# A detector with the interface of torchvision's detectors: a list of images, their scaling, and suppressed boxes.
DETECTOR = """
import torch
from torch import nn


class GeneralizedRCNNTransform(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.strict = True
        self.min_size, self.image_mean = (size,), [0.5, 0.5, 0.5]

    def forward(self, images):
        batch = torch.stack([(image - 0.5) / 0.25 for image in images])
        sizes = torch.tensor([image.shape[-2:] for image in images])
        # A trace of this line fails, because the values of a tensor decide.
        assert not self.strict or sizes.min().item() > 0
        return batch, [image.shape[-2:] for image in images]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))

    def forward(self, pixels):
        fine = self.first(pixels)
        return {"0": fine, "1": self.second(fine)}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, features):
        return {
            "boxes": torch.cat([self.boxes(level).flatten(2) for level in features], 2),
            "scores": torch.cat([self.scores(level).flatten(2) for level in features], 2),
        }


def batched_nms(boxes, scores):
    if not (scores > 0).any():
        return boxes
    return boxes[:, :, scores.amax((0, 1)) > 0]


class Proposals(nn.Module):
    def __init__(self):
        super().__init__()
        self.anchors = 3
        self.head = Head()

    def forward(self, images, features):
        found = self.head(list(features.values()))
        return batched_nms(found["boxes"] * self.anchors, found["scores"])


class RoiHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.box_head = nn.Linear(4, 6)

    def forward(self, boxes):
        return self.box_head(boxes.mT)


class OneStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.backbone, self.head = GeneralizedRCNNTransform(), Backbone(), Head()

    def forward(self, images, targets=None):
        batch, sizes = self.transform(images)
        # The code between the two modules belongs to the part.
        features = [level * 2 for level in self.backbone(batch).values()]
        found = self.head(features)
        return batched_nms(found["boxes"], found["scores"])


class TwoStages(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.backbone, self.rpn = GeneralizedRCNNTransform(), Backbone(), Proposals()
        self.roi_heads = RoiHeads()

    def forward(self, images, targets=None):
        batch, sizes = self.transform(images)
        return self.roi_heads(self.rpn(batch, self.backbone(batch)))
"""
PACKAGE = """
from types import SimpleNamespace

import detectors
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x, mask=None):
        return self.head(self.stem(x).mean((2, 3)))


class ImageClassification:
    crop_size = [8]


class Detection:
    pass


MODELS = {"one_stage": detectors.OneStage, "two_stages": detectors.TwoStages, "plain": Plain}


def list_models():
    return list(MODELS)


def get_model_weights(name):
    preset = ImageClassification if name == "plain" else Detection
    return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=preset))


def get_model_builder(name):
    return lambda weights=None: MODELS[name]()


def get_model(name, weights=None):
    return MODELS[name]()
"""


@pytest.fixture
def detectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The detectors as a module, and a package that stands in for torchvision."""
    (tmp_path / "detectors.py").write_text(DETECTOR)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("from . import models\n")
    (tmp_path / "torchvision" / "models.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = ("detectors", "torchvision")
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    yield importlib.import_module("detectors")
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(held)


def run_file(path: Path, feeds: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [torch.as_tensor(value) for value in normdeploy.run(path, feeds).arrays.values()]


@pytest.mark.parametrize(("name", "part"), [("one_stage", "backbone..head"), ("two_stages", "backbone..rpn.head")])
def test_a_detector_of_a_package_exports_before_its_boxes_are_suppressed(
    name: str, part: str, detectors: Any, tmp_path: Path
) -> None:
    source = f"torchvision:{name}"
    with pytest.raises(InputError, match=f"export the part between them with --part {part}"):
        load(source)
    normdeploy.export(source, part=part, output="part.onnx")
    with normdeploy.open_runner("part.onnx") as runner:
        assert [str(spec) for spec in runner.inputs] == ["pixels:float32[batch, 3, 16, 16]"]
    # The record of the file names the part, so verify compares with the same part.
    assert normdeploy.verify(source, "part.onnx", seeds=1)


def test_the_part_has_the_results_of_the_model_with_other_images(detectors: Any, tmp_path: Path) -> None:
    detector = detectors.OneStage().eval()
    images = torch.rand(3, 3, 16, 16)
    seen = {}
    detector.head.register_forward_hook(lambda _, __, result: seen.update(result))
    with torch.no_grad():
        detector(list(images))
    normdeploy.export(detectors_copy(detector), part="backbone..head", output="part.onnx")
    boxes, scores = run_file(Path("part.onnx"), {"pixels": (images - 0.5) / 0.25})
    torch.testing.assert_close(boxes, seen["boxes"])
    torch.testing.assert_close(scores, seen["scores"])


def detectors_copy(detector: nn.Module) -> nn.Module:
    """Return a detector of the same weights without hooks."""
    fresh = type(detector)().eval()
    fresh.load_state_dict(detector.state_dict())
    return fresh


def test_a_live_model_names_its_own_part(detectors: Any) -> None:
    detector = detectors.OneStage().eval()
    detector.transform.strict = False
    with pytest.raises(ExportError, match=r"from backbone to head: --part backbone\.\.head"):
        from_module(detector, inputs=["images[2,3,16,16]"])


def test_one_module_takes_its_recorded_inputs(detectors: Any) -> None:
    loaded = from_module(detectors.OneStage().eval(), part="head")
    described = {spec.name: [dim.name or dim.opt for dim in spec.shape] for spec in loaded.inputs}
    assert described == {"features_0": ["batch", 4, 8, 8], "features_1": ["batch", 4, 4, 4]}
    assert len(loaded.outputs) == 2


def test_a_part_from_the_inputs_of_the_model_needs_no_example(detectors: Any, tmp_path: Path) -> None:
    """A model in the user's own file, whose suppression follows its head."""
    own = """
    from detectors import Backbone, Head, batched_nms
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Backbone(), Head()

        def forward(self, images, threshold=0.5):
            found = self.head(list(self.backbone(images).values()))
            return batched_nms(found["boxes"], found["scores"] > threshold)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(own))
    inputs = ["images[batch,3,height,width]"]
    dims = ["height=16:32:64:4", "width=16:32:64:4"]
    with pytest.raises(ExportError, match=r"which ends with head: --part \.\.head"):
        load("own.py:Net", inputs=inputs, dims=dims)
    loaded = load("own.py:Net", inputs=inputs, dims=dims, part="..head")
    assert [str(dim.name) for dim in loaded.inputs[0].shape] == ["batch", "None", "height", "width"]
    assert len(loaded.outputs) == 2
    with pytest.raises(InputError, match=r"write --part \.\.head, and describe the inputs of the model with --input"):
        load("own.py:Net", inputs=inputs, dims=dims, part="backbone..head")


def test_a_classifier_of_a_package_records_the_inputs_of_its_head(detectors: Any) -> None:
    (spec,) = load("torchvision:plain", part="head").inputs
    assert [dim.name or dim.opt for dim in spec.shape] == ["batch", 4]


@pytest.mark.parametrize("text", ["neck", "backbone..neck", "neck..head", "..", "", "backbone.."])
def test_an_unknown_module_is_refused(text: str, detectors: Any) -> None:
    with pytest.raises(InputError, match="its modules are transform, backbone, head and their parts"):
        parse_module_part(text, detectors.OneStage())


def test_a_part_prints_as_it_is_written(detectors: Any) -> None:
    detector = detectors.TwoStages()
    for text in ("backbone", "..rpn.head", "backbone..rpn.head"):
        assert str(parse_module_part(text, detector)) == text
    assert parse_module_part("..rpn", detector) == ModulePart("", "rpn")


def test_a_module_that_is_not_called_is_refused(detectors: Any) -> None:
    detector = detectors.OneStage()
    detector.unused = nn.Linear(2, 2)
    detector.eval()
    with pytest.raises(InputError, match="does not call 'unused', so its inputs are unknown"):
        from_module(detector, part="unused")
    with pytest.raises(InputError, match="does not call 'unused' as a module"):
        from_module(detector, part="backbone..unused")


def test_a_program_has_no_modules_to_choose(detectors: Any) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), "linear.pt2")
    with pytest.raises(InputError, match="is an ExportedProgram, which can't be divided"):
        load("linear.pt2", part="head")
