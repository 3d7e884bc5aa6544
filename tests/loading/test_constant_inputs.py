"""Inputs with constant values: they are constants of the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import InputError
from normdeploy.loading import from_module, from_program
from normdeploy.loading.constant_inputs import fix_inputs
from normdeploy.loading.default_inputs import infer_default_inputs
from normdeploy.loading.huggingface_tasks import find_task
from normdeploy.loading.input_request import parse_input_request
from normdeploy.loading.traceable_models import prepare_model


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: torch.Tensor, shift: Any = None, *, last: Any = None) -> torch.Tensor:
        return x * factor + (0 if shift is None else shift)


def test_constant_is_no_input_of_the_file() -> None:
    texts = ["x[batch,3]", "factor:int64[3]{2,3,4}", "shift[batch,3]"]
    result = normdeploy.export(Scaled().eval(), inputs=texts)
    assert [value.name for value in result.proto.graph.input] == ["x", "shift"]
    assert any("factor=[2, 3, 4]" in note for note in result.notes)
    comparison = normdeploy.verify(Scaled().eval(), result.proto, inputs=texts)
    assert comparison
    assert not any("not compared with its trace" in note for note in comparison.notes)


def test_scalar_and_bool_constants() -> None:
    request = parse_input_request(["x[2]", "a:bool[2]{1,0}", "b[]{0.5}"], ())
    assert [wish.name for wish in request.inputs] == ["x"]
    assert request.constants["a"].values == (1.0, 0.0)
    assert (request.constants["b"].shape, request.constants["b"].values) == ((), (0.5,))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n:int64[batch]{1,2}", "its sizes must be numbers"),
        ("n:int64[3]{1,2}", r"has 2 values, but its sizes \[3\] take 3"),
        ("n:int64[2]{1,b}", "can't be read"),
        ("n:int64[2]{1,2.5}", "can't be read"),
    ],
)
def test_constant_that_cannot_be_read_is_told(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_input_request([text], ())


def test_constant_of_no_parameter_is_told() -> None:
    with pytest.raises(InputError, match=r"'scale' has constant values, but it is not a parameter of Scaled"):
        from_module(Scaled().eval(), inputs=["x[3]", "scale[1]{2.0}"])


def test_finished_graph_keeps_its_inputs() -> None:
    program = torch.export.export(Scaled().eval(), (torch.ones(3), torch.ones(3)))
    with pytest.raises(InputError, match="an ExportedProgram keeps all its inputs"):
        from_program(program, inputs=["x[3]", "factor[3]{1,2,3}"])
    proto = normdeploy.export(program).proto
    with pytest.raises(InputError, match="an ONNX file keeps all its inputs"):
        normdeploy.inspect(proto, inputs=["factor[3]{1,2,3}"])


def test_fixed_module_takes_the_other_arguments_by_position() -> None:
    module = Scaled().eval()
    fix_inputs(module, {"shift": torch.ones(3)})
    torch.testing.assert_close(module(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0), rtol=0, atol=0)
    torch.testing.assert_close(
        module(torch.ones(3), torch.ones(3), shift=torch.zeros(3)), torch.ones(3), rtol=0, atol=0
    )


def test_files_of_other_constants_differ_from_the_model() -> None:
    texts = ["x[3]", "factor:int64[3]{2,3,4}"]
    result = normdeploy.export(Scaled().eval(), inputs=texts)
    assert not normdeploy.verify(Scaled().eval(), result.proto, inputs=["x[3]", "factor:int64[3]{2,3,5}"])


class Patches(nn.Module):
    """As the vision encoders of Qwen-VL and GLM-V."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="patches", image_size=56, patch_size=14, spatial_merge_size=2, temporal_patch_size=2
        )

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return hidden_states * grid_thw.sum()


def test_encoder_of_patches_gets_the_patches_of_one_image() -> None:
    inputs = infer_default_inputs(Patches(), None).specs
    assert inputs == ["hidden_states:float32[16,1176]", "grid_thw:int64[1,3]{1,4,4}"]
    model = from_module(Patches().eval())
    assert [spec.name for spec in model.inputs] == ["hidden_states"]
    assert model.constants["grid_thw"].tolist() == [[1, 4, 4]]


def test_task_of_an_encoder_of_patches_is_refused() -> None:
    with pytest.raises(InputError, match=r"Patches is exported with constant values of grid_thw.*omit --task"):
        prepare_model(Patches(), Path("folder"), find_task("feature-extraction"), None)
