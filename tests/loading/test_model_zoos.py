"""Models that a package knows by name. Small packages stand in for timm and torchvision, which the tests don't need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import normdeploy
from normdeploy.errors import ExportError, InputError, LoadError, RuntimeUnavailable
from normdeploy.loading import load
from normdeploy.model import LoadedModel

TIMM = """
import fnmatch

import torch
from torch import nn

from . import data

TAGS = {"tiny_net": ["tiny_net.a1_in1k", "tiny_net.b2_in1k"], "square_net": ["square_net.a1_in1k"]}


class Net(nn.Module):
    def __init__(self, size, classes, channels, pretrained):
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, size, size)}
        self.conv = nn.Conv2d(channels, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, classes)
        if pretrained:
            nn.init.ones_(self.head.weight)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class Square(Net):
    def forward(self, x):
        # The batch size is fixed to 8.
        return super().forward(x).reshape(8, 10)


class Table(Net):
    def forward(self, x):
        # A dynamic size can't be a key, and torch's error names no dim.
        return super().forward(x) * {1: 1.0, 8: 2.0}[x.shape[0]]


def list_models():
    return ["tiny_net", "square_net", "table_net"]


def list_pretrained(pattern="*"):
    return [tag for tags in TAGS.values() for tag in tags if fnmatch.fnmatch(tag, pattern)]


def create_model(model_name, pretrained=False, num_classes=10, in_chans=3, img_size=8):
    base, _, tag = model_name.partition(".")
    if tag and model_name not in TAGS[base]:
        raise RuntimeError(f"Invalid pretrained tag ({tag}) for {base}.")
    model_class = {"tiny_net": Net, "square_net": Square, "table_net": Table}[base]
    return model_class(img_size, num_classes, in_chans, pretrained)
"""
DATA = """
def resolve_data_config(args, model):
    size = model.pretrained_cfg["input_size"]
    if "img_size" in args:
        size = (args.get("in_chans", 3), args["img_size"], args["img_size"])
    return {"input_size": size}
"""
TORCHVISION = """
from types import SimpleNamespace

from torch import nn


class ImageClassification:
    crop_size = [6]
    resize_size = [7]


class SemanticSegmentation:
    resize_size = [5]


class ObjectDetection:
    pass


PRESETS = {"tiny_net": ImageClassification, "tiny_mask": SemanticSegmentation, "tiny_detector": ObjectDetection}


def tiny_net(*, weights=None):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def tiny_mask(*, weights=None, weights_backbone="downloads"):
    assert weights_backbone is None
    return tiny_net()


def list_models():
    return [*PRESETS]


def get_model_builder(name):
    return {"tiny_net": tiny_net, "tiny_mask": tiny_mask, "tiny_detector": tiny_net}[name]


def get_model(name, **arguments):
    return get_model_builder(name)(**arguments)


def get_model_weights(name):
    return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=PRESETS[name]))
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make packages called timm and torchvision importable. The working directory is an empty folder."""
    site = tmp_path / "site"
    for name, text in (
        ("timm/__init__.py", TIMM),
        ("timm/data.py", DATA),
        ("torchvision/__init__.py", "from . import models\n"),
        ("torchvision/models.py", TORCHVISION),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    names = ("timm", "torchvision")
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(held)


def shapes(model: LoadedModel) -> list[str]:
    return [f"{spec.name}{[str(dim) for dim in spec.shape]}" for spec in model.inputs]


@pytest.mark.parametrize(
    ("source", "arguments", "inputs"),
    [
        ("timm:tiny_net", {}, ["x['batch=1:8:64', '3', '8', '8']"]),
        ("timm:tiny_net.b2_in1k", {"img_size": 12}, ["x['batch=1:8:64', '3', '12', '12']"]),
        ("timm:tiny_net", {"img_size": (12, 10), "in_chans": 1}, ["x['batch=1:8:64', '1', '12', '10']"]),
        ("torchvision:tiny_net", {}, ["input['batch=1:8:64', '3', '6', '6']"]),
        ("torchvision:tiny_mask", {}, ["input['batch=1:8:64', '3', '5', '5']"]),
    ],
)
def test_load_name_takes_inputs_of_the_preprocessing(
    source: str, arguments: dict[str, object], inputs: list[str]
) -> None:
    state = torch.get_rng_state()
    model = load(source, model_args=arguments)
    assert shapes(model) == inputs
    assert [note for note in model.notes if f"the weights of {source} are random (seed 0)" in note]
    assert torch.equal(torch.get_rng_state(), state)


def test_export_name_is_verified_by_the_name_with_recorded_options() -> None:
    normdeploy.export("timm:tiny_net", dims="batch=1:2:4", model_args={"num_classes": 3}, output="m.onnx")
    # Without the recorded num_classes, the outputs would have another shape.
    assert normdeploy.verify("timm:tiny_net", "m.onnx", seeds=1)


def test_load_weights_of_a_zoo_model_needs_no_inputs() -> None:
    trained = load("timm:tiny_net", model_args={"pretrained": True})
    assert not trained.notes
    torch.save(trained.program.state_dict, "w.pt")
    model = load("w.pt", model="timm:tiny_net", dims=["batch=1:2:4"])
    assert shapes(model) == ["x['batch=1:2:4', '3', '8', '8']"]
    assert torch.equal(model.program.state_dict["head.weight"], torch.ones(10, 4))
    assert not model.notes
    old = load("w.pt", model="timm:create_model", model_args={"model_name": "tiny_net"}, inputs=["x[2,3,9,9]"])
    assert shapes(old) == ["x['2', '3', '9', '9']"]


def test_load_model_that_fixes_its_batch_gets_a_static_batch() -> None:
    model = load("timm:square_net")
    assert shapes(model) == ["x['8', '3', '8', '8']"]
    assert any("the file has the fixed size batch=8" in note for note in model.notes)


def test_load_model_that_torch_traces_only_at_fixed_sizes_gets_static_dims() -> None:
    model = load("timm:table_net")
    assert shapes(model) == ["x['1', '3', '8', '8']"]
    note = next(note for note in model.notes if "fixed size" in note)
    assert note.startswith("the file has the fixed size batch=1: torch can't trace the model with dynamic sizes: ")
    assert note.endswith("Choose another with --dim batch=N:N:N")
    assert shapes(load("timm:table_net", dims=["batch=8:8:8"])) == ["x['8', '3', '8', '8']"]
    # A range that the user states is still an error.
    with pytest.raises(ExportError, match="hash"):
        load("timm:table_net", dims=["batch=1:8:8"])


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("timm:tiny_nett", {}, "timm has no model 'tiny_nett'; similar names are tiny_net"),
        ("torchvision:tinynet", {}, "torchvision has no model 'tinynet'; similar names are tiny_net"),
        ("timm:zzz", {}, r"timm has no model 'zzz'; timm\.list_models\(\) lists the names"),
        ("timm:tiny_net.a1", {}, r"Invalid pretrained tag \(a1\).*; its tags are tiny_net\.a1_in1k, tiny_net\.b2_in1k"),
        ("timm:tiny_net", {"model_args": {"width": 3}}, r"timm:tiny_net\(width=3\) failed: TypeError"),
        ("timm:tiny_net", {"model": "a:b"}, "not a file: omit --model, or pass a file of weights with --model timm:ti"),
        ("torchvision:tiny_detector", {}, "needs example inputs: describe them with --input"),
    ],
)
def test_load_wrong_name_or_option_is_refused(source: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load(source, **options)  # type: ignore[arg-type]


def test_load_name_of_a_missing_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("site")])
    if any((Path(entry) / "timm").exists() for entry in sys.path):
        pytest.skip("timm is installed")
    with pytest.raises(RuntimeUnavailable, match="timm is not installed: pip install timm"):
        load("timm:tiny_net")


def test_existing_file_of_that_name_is_read() -> None:
    Path("timm:tiny_net").write_bytes(b"no model")
    with pytest.raises(LoadError, match="has an unrecognized model format"):
        load("timm:tiny_net")
