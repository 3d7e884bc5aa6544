"""``verify`` prepares the reference's images as the file states, and finds every fault of the preparation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.errors import InputError
from normdeploy.storage.image_metadata import KEY

CAMERA = {
    "normalize": "0.485,0.456,0.406/0.229,0.224,0.225",
    "input_layout": "nhwc",
    "input_type": "uint8",
}
EXAMPLE = (torch.rand(2, 3, 8, 8),)
Edit = Callable[[onnx.ModelProto], None]


def make_net(padding: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, padding), nn.ReLU(), nn.Conv2d(8, 4, 2)).eval()


def export_prepared(padding: int, path: Path) -> nn.Module:
    net = make_net(padding)
    normdeploy.export(net, EXAMPLE, output=path, **CAMERA)
    return net


def change_constant(op: str, index: int, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Return a function that changes a constant of the first node of a kind."""

    def edit(proto: onnx.ModelProto) -> None:
        node = next(node for node in proto.graph.node if node.op_type == op)
        (stored,) = (each for each in proto.graph.initializer if each.name == node.input[index])
        array = np.ascontiguousarray(change(numpy_helper.to_array(stored)), np.float32)
        stored.CopyFrom(numpy_helper.from_array(array, stored.name))

    return edit


def fold_shift_into_padded_convolution(proto: onnx.ModelProto) -> None:
    """Fold the shift as if the convolution had no padding."""
    constants = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    add = next(node for node in proto.graph.node if node.op_type == "Add")
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    shift, weight = constants[add.input[1]], constants[conv.input[1]]
    change_constant("Conv", 2, lambda bias: bias + (weight * shift).sum((1, 2, 3)))(proto)
    change_constant("Add", 1, np.zeros_like)(proto)


def swap_height_and_width(proto: onnx.ModelProto) -> None:
    node = next(node for node in proto.graph.node if node.op_type == "Transpose")
    node.attribute[0].ints[:] = [0, 3, 2, 1]


FAULTS: dict[str, tuple[int, Edit]] = {
    "blue and red swapped": (0, change_constant("Conv", 1, lambda weight: weight[:, ::-1])),
    "divided by 256": (0, change_constant("Conv", 1, lambda weight: weight * 255 / 256)),
    "mean not divided by std": (0, change_constant("Conv", 2, lambda bias: bias + 0.05)),
    "height and width swapped": (0, swap_height_and_width),
    "blue and red of the mean swapped": (1, change_constant("Add", 1, lambda shift: shift[::-1])),
    "mean divided by std twice": (1, change_constant("Add", 1, lambda shift: shift / 0.229)),
    "shift folded into padding": (1, fold_shift_into_padded_convolution),
}


@pytest.mark.parametrize("padding", [0, 1])
def test_a_right_file_is_verified_as_it_states(padding: int, tmp_path: Path) -> None:
    net = export_prepared(padding, tmp_path / "m.onnx")
    claimed = normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE)
    assert claimed
    assert "with images prepared as m.onnx states" in claimed.limits
    stated = normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, **CAMERA)
    assert stated
    assert not any("images prepared" in limit for limit in stated.limits)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_preparation_is_found(name: str, tmp_path: Path) -> None:
    padding, edit = FAULTS[name]
    net = export_prepared(padding, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    edit(proto)
    onnx.save(proto, tmp_path / "m.onnx")
    assert not normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, seeds=1)


def test_an_onnx_reference_is_prepared_too(tmp_path: Path) -> None:
    program = torch.onnx.export(make_net(1), EXAMPLE, verbose=False)
    assert program is not None
    program.save(tmp_path / "plain.onnx")
    normdeploy.optimize(tmp_path / "plain.onnx", tmp_path / "m.onnx", **CAMERA)
    assert normdeploy.verify(tmp_path / "plain.onnx", tmp_path / "m.onnx", seeds=1)
    # A reference that prepares its images needs no change.
    assert normdeploy.verify(tmp_path / "m.onnx", tmp_path / "m.onnx", seeds=1)
    with pytest.raises(InputError, match=r"takes images that are already prepared"):
        normdeploy.verify(tmp_path / "m.onnx", tmp_path / "plain.onnx")


def test_one_normalization_may_be_written_in_two_ways(tmp_path: Path) -> None:
    """Mean and deviation for pixels up to 1, and the same numbers for pixels up to 255."""
    net = export_prepared(0, tmp_path / "m.onnx")
    other = {**CAMERA, "normalize": "123.675,116.28,103.53/58.395,57.12,57.375/255"}
    assert normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, seeds=1, **other)
    with pytest.raises(InputError, match="options state"):
        normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, **{**other, "normalize": "124/58/255"})


def test_options_that_contradict_the_file_are_an_error_with_both(tmp_path: Path) -> None:
    net = export_prepared(0, tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"m\.onnx states .*mean 0\.485.*options state .*mean 0\.5,") as error:
        normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, **{**CAMERA, "normalize": "0.5/0.5"})
    assert "omit the options" in str(error.value)


def test_a_file_without_metadata_is_verified_by_the_options(tmp_path: Path) -> None:
    net = export_prepared(1, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    kept = [prop for prop in proto.metadata_props if prop.key != KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    onnx.save(proto, tmp_path / "m.onnx")
    assert normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, seeds=1, **CAMERA)
    swapped = {**CAMERA, "normalize": "0.406,0.456,0.485/0.225,0.224,0.229"}
    assert not normdeploy.verify(net, tmp_path / "m.onnx", args=EXAMPLE, seeds=1, **swapped)


def test_bench_gives_the_model_and_the_file_one_input(tmp_path: Path) -> None:
    net = export_prepared(0, tmp_path / "m.onnx")
    race = normdeploy.bench([net, tmp_path / "m.onnx"], args=EXAMPLE, rounds=1)
    timed = [entry for entry in race.entries if entry.median is not None]
    assert any(entry.file == "m.onnx" and entry.error is not None and entry.error < 1e-5 for entry in timed)
