"""Inputs with constant values: they are constants of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from normdeploy.loading.live_module import copy_module
from normdeploy.loading.traceable_models import prepare_model
from normdeploy.runtimes.torch_runners import ModuleRunner


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
        ("n:int64[2]{1,2.5}", "can't be read as int64"),
        ("n:int8[1]{300}", "can't be read as int8"),
        ("n:uint8[1]{-1}", "can't be read as uint8"),
        ("n:int64[1]{99999999999999999999}", "can't be read as int64"),
        ("n:int32[1]{1_0}", "can't be read as int32"),
        ("n:bool[1]{2}", "can't be read as bool"),
        ("n:float16[1]{1e9}", "can't be read as float16"),
        ("n:bfloat16[1]{nan}", "can't be read as bfloat16"),
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


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x.view(x.shape[0], -1, 2) * n + self.count


def test_copy_of_a_fixed_module_writes_its_own_buffers() -> None:
    module = Counting().eval()
    fix_inputs(module, {"n": torch.tensor([5.0])})
    copy_module(module)(torch.ones(1, 2))
    assert module.count.item() == 0
    # torch guesses that the size is even, and the module is tried at other sizes.
    model = from_module(Counting().eval(), inputs=["x[batch,s]", "n[1]{5}"])
    assert model.program.state_dict["count"].item() == 0


def test_constants_alone_leave_the_default_inputs() -> None:
    model = from_module(Patches().eval(), inputs=["grid_thw:int64[1,3]{1,2,8}"])
    assert [spec.name for spec in model.inputs] == ["hidden_states"]
    assert model.constants["grid_thw"].tolist() == [[1, 2, 8]]


class Reader(nn.Module):
    config = SimpleNamespace(model_type="reader")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids * attention_mask * 0.5


def test_constant_takes_the_place_of_a_default_input() -> None:
    model = from_module(Reader().eval(), inputs=["attention_mask:int64[1,1]{1}"])
    assert [spec.name for spec in model.inputs] == ["input_ids"]
    assert model.constants["attention_mask"].tolist() == [[1]]


def test_examples_do_not_contain_the_constants() -> None:
    class Shifted(nn.Module):
        def forward(self, n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return x + n

    model = from_module(Shifted().eval(), (torch.ones(3),), inputs=["x[3]", "n:int64[1]{5}"])
    assert [spec.name for spec in model.inputs] == ["x"]
    with pytest.raises(InputError, match=r"2 example arguments were passed, but without n .* the parameters x"):
        from_module(Shifted().eval(), (torch.ones(3), torch.ones(3)), inputs=["x[3]", "n:int64[1]{5}"])
    with pytest.raises(InputError, match="'n' is passed twice, also as an example argument"):
        from_module(Shifted().eval(), kwargs={"n": torch.ones(1), "x": torch.ones(3)}, inputs=["x[3]", "n[1]{5}"])


def test_file_without_an_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"the file of Scaled would have no input.*\(x, factor\)"):
        from_module(Scaled().eval(), inputs=["x[2]{1,2}", "factor[2]{1,2}"])


def test_parameter_without_a_name_is_refused() -> None:
    class Open(nn.Module):
        def forward(self, x: torch.Tensor, *rest: torch.Tensor, n: Any = None) -> torch.Tensor:
            return x + sum(rest) + n

    with pytest.raises(InputError, match="the parameter 'rest' of Open can't be passed by name"):
        from_module(Open().eval(), inputs=["x[3]", "n:int64[1]{5}"])


def test_module_that_writes_into_a_constant_gets_the_same_constant_again() -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            n += 1
            return x + n

    model = from_module(Scaled().eval(), inputs=["x[3]", "factor[3]{1,2,3}"])
    constants = replace(model, constants={"n": torch.ones(3)})
    runner = ModuleRunner(constants, Adding().eval())
    first, second = (runner.infer({"x": np.zeros(3, np.float32)}) for _ in range(2))
    assert [value.tolist() for value in first.values()] == [value.tolist() for value in second.values()]


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
