"""Dims whose sizes are multiples of a step: stated, found by torch, recorded, and kept by the verbs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import InputError
from normdeploy.inputs.input_cases import generate_cases
from normdeploy.loading import from_module, from_program
from normdeploy.loading.input_request import parse_input_request
from normdeploy.model import Dim, InputSpec, LoadedModel, TensorSpec, named_dims_of
from normdeploy.runtimes.optimization_profiles import resolve_profile
from normdeploy.storage.export_record import read_record
from normdeploy.verbs.bench.benchmark_inputs import check_sizes


class Strided(nn.Module):
    """Net whose height and width must be multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 4, stride=4)
        self.up = nn.ConvTranspose2d(4, 3, 4, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


class Plain(nn.Module):
    """Net that accepts any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() - x.mean(-1, keepdim=True)


INPUT = "x[batch,3,height,8]"


class Halves(nn.Module):
    """Net that adds two halves. torch suggests 2*n for the size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], 2, -1).sum(1)


def dims_of(model: LoadedModel) -> dict[str, str]:
    return {name: str(dim) for name, dim in named_dims_of(model.inputs).items()}


@pytest.mark.parametrize("net", [Strided(), Plain()], ids=["needed", "stated alone"])
def test_export_stated_step_is_recorded_and_verified_at_multiples(net: nn.Module, tmp_path: Path) -> None:
    made = normdeploy.export(
        net.eval(), inputs=INPUT, dims=["batch=1:2:3", "height=8:16:40:8"], output=tmp_path / "m.onnx"
    )
    proto = onnx.load(tmp_path / "m.onnx")
    (spec,) = read_record(proto)["inputs"]
    assert [str(dim) for dim in spec.shape] == ["batch=1:2:3", "3", "height=8:16:40:8", "8"]
    assert [dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim] == ["batch", "", "height", ""]
    shapes = [value.type.tensor_type.shape.dim for value in (*proto.graph.value_info, *proto.graph.output)]
    assert not [dim.dim_param for shape in shapes for dim in shape if dim.dim_param.startswith("s")]
    result = normdeploy.verify(made, seeds=1)
    assert result
    heights = {case.split("height=")[1].split(",")[0] for case in map(str, result.notes) if "height=" in case}
    assert not [height for height in heights if height.isdecimal() and int(height) % 8]
    feeds = {"x": np.zeros((1, 3, 20, 8), np.float32)}
    with pytest.raises(InputError, match=r"the dim 'height' .* size 20, .* multiples of 8: use 16 or 24"):
        normdeploy.run(tmp_path / "m.onnx", feeds)


def test_generate_cases_draws_only_multiples() -> None:
    model = from_module(Plain().eval(), inputs=[INPUT], dims=["batch=1:2:9", "height=64:512:1024:32"])
    cases, _ = generate_cases(model, seeds=2)
    heights = {case.make()["x"].shape[2] for case in cases}
    assert {64, 512} < heights
    assert not [height for height in heights if height % 32]


def test_load_step_that_torch_finds_is_taken_up_with_a_note() -> None:
    model = from_module(Strided().eval(), inputs=["x[batch,3,height,width]"])
    assert dims_of(model) == {
        "batch": "batch=1:8:64",
        "height": "height=4:8:64:4",
        "width": "width=4:8:64:4",
    }
    assert [note for note in model.notes if "the sizes of 'height' are multiples of 4" in note]
    narrow = from_module(Strided().eval(), inputs=[INPUT], dims=["height=8:16:32"])
    assert dims_of(narrow)["height"] == "height=8:16:32:4"
    both = from_module(Strided().eval(), inputs=[INPUT], dims=["height=12:24:48:6"])
    assert dims_of(both)["height"] == "height=12:24:48:12"


def test_profile_and_benchmark_sizes_must_be_multiples() -> None:
    dim = Dim("height", 8, 16, 64, step=8)
    spec = InputSpec("x", "float32", (dim,))
    tensor = TensorSpec("x", "float32", ("height",))
    assert resolve_profile([tensor], [spec], {"height": (8, 16, 32)}) == {"x": ((8,), (16,), (32,))}
    with pytest.raises(InputError, match=r"profile of the dim 'height' has the size 12, .* 8: use 8 or 16"):
        resolve_profile([tensor], [spec], {"height": (8, 12, 32)})
    check_sizes({"height": 24}, {"height"}, [dim])
    with pytest.raises(InputError, match=r"the dim 'height' has the size 20, .* 8: use 16 or 24"):
        check_sizes({"height": 20}, {"height"}, [dim])


def test_load_step_of_torchs_suggested_fixes_is_taken_up() -> None:
    model = from_module(Halves().eval(), inputs=["x[1,n]"])
    assert dims_of(model) == {"n": "n=4:8:64:2"}


def test_load_stated_range_outside_the_models_multiples_is_refused() -> None:
    with pytest.raises(InputError, match="contains the size 30, at which"):
        from_module(Strided().eval(), inputs=[INPUT], dims=["height=4:16:30:2"])


def test_saved_program_with_a_derived_dim_has_its_step(tmp_path: Path) -> None:
    height = 4 * torch.export.Dim("h", min=2, max=8)
    program = torch.export.export(Strided().eval(), (torch.ones(1, 3, 16, 8),), dynamic_shapes=({2: height},))
    assert dims_of(from_program(program)) == {"d0": "d0=8:16:32:4"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n=10:512:1024:32", r"n=10:512:1024 has the size 10, but its sizes must be multiples of 32: use 32"),
        ("n=64:500:1024:32", "has the size 500, .*: use 480 or 512"),
        ("n=1:2:4:0", "has the step 0: write a step from 1 to 4"),
        ("n=1:2:4:8", "has the step 8"),
        ("n=1:2:4:x", "NAME=|write n=MIN:OPT:MAX"),
    ],
)
def test_parse_wrong_step_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_input_request(["x[n]"], [text])


def test_range_of_a_file_keeps_the_recorded_step(tmp_path: Path) -> None:
    normdeploy.export(Strided().eval(), inputs=INPUT, dims=["height=8:16:32:4"], output=tmp_path / "m.onnx")
    wider = normdeploy.optimize(tmp_path / "m.onnx", dims=["batch=1:2:4", "height=4:8:64"])
    assert str(read_record(wider.proto)["inputs"][0].shape[2]) == "height=4:8:64:4"
    for verb in (normdeploy.optimize, normdeploy.inspect):
        with pytest.raises(InputError, match="has the size 10, but its sizes must be multiples of 4: use 8 or 12"):
            verb(tmp_path / "m.onnx", dims=["height=4:10:64"])


def test_run_refuses_a_stated_size_between_the_multiples(tmp_path: Path) -> None:
    """Also where the user describes the input again, by its sizes, a dim's name or an array."""
    normdeploy.export(Strided().eval(), inputs=INPUT, dims=["height=8:16:32:4"], output=tmp_path / "m.onnx")
    array = np.zeros((1, 3, 10, 8), np.float32)
    np.save(tmp_path / "x.npy", array)
    said = "has the size 10, but its sizes must be multiples of 4"
    for options in ({"stated_inputs": ["x[1,3,10,8]"]}, {"stated_inputs": [f"x={tmp_path / 'x.npy'}"]}):
        with pytest.raises(InputError, match=said):
            normdeploy.run(tmp_path / "m.onnx", **options)
    with pytest.raises(InputError, match=said):
        normdeploy.run(tmp_path / "m.onnx", {"x": array})


def test_dim_sizes() -> None:
    dim = Dim("n", 64, 128, 1024, step=32)
    assert (dim.allowed_sizes()[:2], dim.allowed_sizes(65)[0]) == (range(64, 128, 32), 96)
    assert [dim.nearest_size(size) for size in (1, 100, 115, 5000)] == [64, 96, 128, 1024]
