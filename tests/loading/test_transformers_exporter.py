"""Models that torch.export alone can't trace, and a stand-in for transformers' own exporter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import ExportError
from normdeploy.loading import from_module
from normdeploy.loading.transformers_exporter import require_same_outputs
from normdeploy.storage.export_record import read_record

WIDTH = 8


class PreTrainedModel(nn.Module):
    """Stand-in for the base class of transformers' models."""


class Encoder(PreTrainedModel):
    """Encoder of images in one list of patches. It centers the patches of each image, in a loop over the images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def center(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.cat([part - part.mean(0) for part in x.split([int(n) for n in lengths.tolist() if n > 0])])

    def forward(self, hidden_states: torch.Tensor, grid: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        return self.center(self.norm(hidden_states), grid[:, 0] * grid[:, 1] if lengths is None else lengths)


class Branching(PreTrainedModel):
    """Model with a Python condition on a value, which the exporter replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def positive(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool((x > 0).all()) else x.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positive(self.norm(x))


class Reader(PreTrainedModel):
    """Model whose exporter computes positions from the text."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Branching()

    def forward(self, input_ids: torch.Tensor, x: torch.Tensor, positions: Any = None) -> Any:
        return self.body(x) + input_ids[..., None]


def _center_equal_images(encoder: Encoder, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Center images that have equal numbers of patches; the numbers themselves are not read."""
    images = x.reshape(len(lengths), -1, WIDTH)
    return (images - images.mean(1, keepdim=True)).reshape(x.shape)


@dataclass
class DynamoConfig:
    dynamic_shapes: Any = None
    prefer_deferred_runtime_asserts_over_guards: bool = False


class DynamoExporter:
    """Stand-in for the exporter: it replaces code of the models while torch.export runs."""

    def export(self, model: nn.Module, inputs: Mapping[str, Any], config: DynamoConfig) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Encoder, "center", _center_equal_images)
            patch.setattr(Branching, "positive", lambda _, x: x.relu())
            program = torch.export.export(model, (), dict(inputs), dynamic_shapes=config.dynamic_shapes, strict=False)
        return SimpleNamespace(program=program)


def prepare_for_export(model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Compute arguments from others, as transformers does."""
    if "grid" in inputs:
        inputs["lengths"] = inputs["grid"][:, 0] * inputs["grid"][:, 1]
    if "input_ids" in inputs:
        inputs["positions"] = torch.arange(inputs["input_ids"].shape[1]) + int(inputs["input_ids"][0, 0])
    return model, inputs, {}


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A transformers without an exporter, as before 5.23."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    library = ModuleType("transformers")
    library.__dict__.update(__version__="9.8.7", PreTrainedModel=PreTrainedModel, __path__=[])
    monkeypatch.setitem(sys.modules, "transformers", library)
    return library


@pytest.fixture
def exporter(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter for this transformers."""
    dynamo = ModuleType("transformers.exporters.exporter_dynamo")
    dynamo.__dict__.update(DynamoConfig=DynamoConfig, DynamoExporter=DynamoExporter)
    utils = ModuleType("transformers.exporters.utils")
    utils.__dict__.update(prepare_for_export=prepare_for_export)
    package = ModuleType("transformers.exporters")
    package.__dict__.update(exporter_dynamo=dynamo, utils=utils, __path__=[])
    for module in (package, dynamo, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def _call(*grid: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = torch.tensor(grid)
    return {"hidden_states": torch.randn(int(sizes.prod(1).sum()), WIDTH), "grid": sizes}


@pytest.mark.usefixtures("exporter")
def test_model_that_torch_cannot_trace_is_traced_by_transformers() -> None:
    module, call = Encoder().eval(), _call([2, 3], [3, 2])
    result = normdeploy.export(module, kwargs=call)
    assert [node.name for node in result.proto.graph.input] == ["hidden_states"]
    assert "LayerNormalization" in {node.op_type for node in result.proto.graph.node}
    told = next(note for note in result.notes if note.startswith("traced by"))
    assert told.startswith("traced by transformers' exporter 9.8.7, because torch.export alone failed: torch.export")
    assert any("grid=[[2, 3], [3, 2]]" in note for note in result.notes)
    assert read_record(result.proto)["model"]["traced_by"] == "transformers' exporter 9.8.7"
    comparison = normdeploy.verify(module, result.proto, kwargs=call)
    assert comparison
    # The module itself runs with the constants, too.
    assert not any("not compared with its trace" in note for note in comparison.notes)


@pytest.mark.usefixtures("exporter")
def test_stated_constants_are_the_values_that_the_exporter_reads() -> None:
    texts = ["hidden_states:float32[12,8]", "grid:int64[2,2]{2,3,3,2}"]
    result = normdeploy.export(Encoder().eval(), inputs=texts)
    assert [node.name for node in result.proto.graph.input] == ["hidden_states"]
    assert normdeploy.verify(Encoder().eval(), result.proto, inputs=texts)


@pytest.mark.usefixtures("exporter")
def test_dynamic_dims_and_names_stay_those_of_the_request() -> None:
    model = from_module(Branching().eval(), inputs=["x[batch,8]"], dims=["batch=1:4:9"])
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:4:9", "8"]
    assert model.traced_by == "transformers' exporter 9.8.7"
    result = normdeploy.export(Branching().eval(), inputs=["x[batch,8]"], dims=["batch=1:4:9"])
    assert normdeploy.verify(Branching().eval(), result.proto, inputs=["x[batch,8]"], dims=["batch=1:4:9"])


@pytest.mark.usefixtures("exporter")
def test_trace_that_computes_something_else_is_refused() -> None:
    # The exporter's code supports only images of equal sizes, and splits 6 + 2 patches into 4 + 4.
    with pytest.raises(ExportError, match=r"torch.export can't trace Encoder.*its trace differs from the module"):
        from_module(Encoder().eval(), kwargs=_call([2, 3], [2, 1]))


@pytest.mark.usefixtures("exporter")
def test_random_values_never_become_constants() -> None:
    with pytest.raises(ExportError, match="from the values of grid: pass all values, for example --input 'grid:int64"):
        from_module(Encoder().eval(), inputs=["hidden_states:float32[8,8]", "grid:int64[2,2]{2:3}"])


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs from the module in 1 elements"),
        (torch.ones(2, 1), torch.ones(2), "returns torch.float32"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0]), "NaN or infinities"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "differs from the module by 0.1"),
    ],
)
def test_other_results_are_refused(one: torch.Tensor, other: torch.Tensor, told: str) -> None:
    class Result(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return one.clone() + 0 * x.to(one.dtype)

    x = torch.zeros(one.shape)
    program = torch.export.export(Result().eval(), (), {"x": x})
    require_same_outputs(program, {"x": x}, [one])
    with pytest.raises(ExportError, match=told):
        require_same_outputs(program, {"x": x}, [other])


@pytest.mark.usefixtures("exporter")
def test_text_never_becomes_a_constant() -> None:
    call = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "x": torch.randn(2, 3, WIDTH)}
    with pytest.raises(ExportError, match=r"computes positions outside of the file from input_ids"):
        from_module(Reader().eval(), kwargs=call)


@pytest.mark.usefixtures("exporter")
def test_model_that_torch_traces_does_not_ask_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Simple(PreTrainedModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    monkeypatch.setattr(DynamoExporter, "export", None)
    model = from_module(Simple().eval(), kwargs={"x": torch.ones(2)})
    assert model.traced_by == ""
    assert not model.notes


@pytest.mark.usefixtures("exporter")
def test_failure_of_both_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("export() takes other arguments\nin this version")

    monkeypatch.setattr(DynamoExporter, "export", fail)
    with pytest.raises(ExportError, match=r"can't trace Branching: .*exporter 9.8.7 does not help: ") as caught:
        from_module(Branching().eval(), kwargs={"x": torch.randn(2, WIDTH)})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("exporter")
def test_module_of_another_library_does_not_ask_the_exporter() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if bool((x > 0).all()) else x.relu()

    with pytest.raises(ExportError) as caught:
        from_module(Own().eval(), kwargs={"x": torch.randn(2)})
    assert "transformers' exporter" not in str(caught.value)


@pytest.mark.usefixtures("transformers")
def test_older_transformers_has_no_exporter() -> None:
    with pytest.raises(ExportError, match="can't trace Encoder") as caught:
        from_module(Encoder().eval(), kwargs=_call([2, 3]))
    assert "transformers' exporter" not in str(caught.value)
