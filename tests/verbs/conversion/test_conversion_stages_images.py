"""Files that prepare images themselves compute the model's outputs for torchvision's preprocessing in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import normdeploy
from normdeploy.errors import GraphError, InputError
from normdeploy.storage.image_metadata import KEY, read_image_inputs
from normdeploy.storage.proto_traversal import set_metadata

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
NORMALIZE = "0.485,0.456,0.406/0.229,0.224,0.225"
CAMERA = {"normalize": NORMALIZE, "input_layout": "nhwc", "input_type": "uint8"}
# float32 rounds each of a few dozen sums of numbers below 10.
ROUNDING = 3e-6


class Patches(nn.Module):
    """Embed patches by a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(48, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = image.shape
        tiles = image.reshape(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 1, 3, 5)
        return self.embedding(tiles.reshape(batch, -1, 48))


class Pair(nn.Module):
    """Read the image with two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(3, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.first(image) + self.second(image)


# Name -> model, rank of the image, and the nodes that remain of the preparation.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, list[str]]] = {
    "no padding": (lambda: nn.Conv2d(3, 8, 4, 4), 4, []),
    "padding": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)), 4, ["Add"]),
    "groups": (lambda: nn.Conv2d(3, 6, 3, groups=3), 4, []),
    "transposed": (lambda: nn.ConvTranspose2d(3, 6, 3, 2), 4, ["Add"]),
    "resize": (lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 6, 3)), 4, ["Mul", "Add"]),
    "reflected": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 6, 3)), 4, ["Mul", "Add"]),
    "two readers": (Pair, 4, ["Mul", "Add"]),
    "patches": (Patches, 4, []),
    "sequence": (lambda: nn.Conv1d(3, 6, 3), 3, []),
    "volume": (lambda: nn.Conv3d(3, 6, 3), 5, []),
}
LAYOUTS = {3: "nwc", 4: "nhwc", 5: "ndhwc"}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make().eval()


def camera_frames(rank: int) -> np.ndarray:
    """Draw frames whose first one is black and whose second one is white."""
    frames = np.random.default_rng(3).integers(0, 256, (3, *[8] * (rank - 2), 3)).astype(np.uint8)
    frames[0], frames[1] = 0, 255
    return frames


def expected_outputs(net: nn.Module, frames: np.ndarray, mean: Any = MEAN, std: Any = STD) -> np.ndarray:
    """Prepare the frames as torchvision does, and run the model in float64."""
    pixels = torch.from_numpy(frames).movedim(-1, 1).double() / 255
    shape = (1, -1, *[1] * (frames.ndim - 2))
    pixels = (pixels - torch.tensor(mean).double().reshape(shape)) / torch.tensor(std).double().reshape(shape)
    with torch.no_grad():
        outputs = net.double()(pixels).numpy()
    net.float()
    return outputs


def run_everywhere(proto: onnx.ModelProto, image: np.ndarray) -> list[np.ndarray]:
    """Run a file in onnxruntime and in onnx's reference evaluator."""
    feeds = {proto.graph.input[0].name: image}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return [session.run(None, feeds)[0], ReferenceEvaluator(proto).run(None, feeds)[0]]


def plain_export(net: nn.Module, rank: int) -> onnx.ModelProto:
    """Export with torch's own exporter."""
    program = torch.onnx.export(net, (torch.rand(3, 3, *[8] * (rank - 2)),), verbose=False)
    assert program is not None
    return program.model_proto


@pytest.mark.parametrize("name", MODELS)
def test_export_computes_what_torchvision_and_the_model_compute(name: str) -> None:
    make, rank, remaining = MODELS[name]
    net = seeded(make)
    options = {**CAMERA, "input_layout": LAYOUTS[rank]}
    result = normdeploy.export(net, (torch.rand(3, 3, *[8] * (rank - 2)),), **options)
    assert result.model is not None
    ops = [node.op_type for node in result.model.graph.node]
    assert ops[: 2 + len(remaining)] == ["Cast", "Transpose", *remaining]
    assert all("Div" not in op and "Sub" not in op for op in ops)
    frames = camera_frames(rank)
    expected = expected_outputs(net, frames)
    for outputs in run_everywhere(result.model, frames):
        np.testing.assert_allclose(outputs, expected, atol=ROUNDING * np.abs(expected).max())
    folds = [finding for finding in result.summary.findings if finding.kind == "scale and shift"]
    assert [fold.status for fold in folds] == ["folded"]
    assert all(fold.certificate is not None and fold.certificate.method == "exact" for fold in folds)


@pytest.mark.parametrize("name", ["no padding", "padding", "patches", "resize"])
def test_optimize_computes_what_export_computes(name: str) -> None:
    make, rank, remaining = MODELS[name]
    net = seeded(make)
    result = normdeploy.optimize(plain_export(net, rank), **CAMERA)
    assert result.model is not None
    assert sum(node.op_type in ("Mul", "Add", "Sub", "Div") for node in result.model.graph.node) <= len(remaining) + 1
    frames = camera_frames(rank)
    expected = expected_outputs(net, frames)
    for outputs in run_everywhere(result.model, frames):
        np.testing.assert_allclose(outputs, expected, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(
    ("text", "mean", "std"), [("0.5,0.5,0.5/0.5,0.5,0.5", 0.5, 0.5), ("0.5/0.25", 0.5, 0.25), ("", 0, 1)]
)
def test_a_scale_by_one_number_is_folded_too(text: str, mean: float, std: float, padding: int) -> None:
    net = seeded(lambda: nn.Conv2d(3, 4, 3, padding=padding))
    result = normdeploy.export(net, (torch.rand(3, 3, 8, 8),), normalize=text or (), input_type="uint8")
    assert result.model is not None
    shift = ["Add"] if padding and mean else []
    assert [node.op_type for node in result.model.graph.node] == ["Cast", *shift, "Conv"]
    frames = camera_frames(4)
    expected = expected_outputs(net, frames, [mean] * 3, [std] * 3)
    for outputs in run_everywhere(result.model, np.moveaxis(frames, -1, 1)):
        np.testing.assert_allclose(outputs, expected, atol=ROUNDING * np.abs(expected).max())


def test_floats_are_normalized_without_a_division_by_255() -> None:
    net = seeded(lambda: nn.Conv2d(3, 4, 3))
    frames = camera_frames(4)
    expected = expected_outputs(net, frames)
    images = np.moveaxis(frames, -1, 1).astype(np.float32)
    of_255 = "/".join([",".join(str(255 * n) for n in numbers) for numbers in (MEAN, STD)]) + "/255"
    for text, image in ((NORMALIZE, images / np.float32(255)), (of_255, images)):
        result = normdeploy.export(net, (torch.rand(3, 3, 8, 8),), normalize=text)
        assert result.model is not None
        assert [node.op_type for node in result.model.graph.node] == ["Conv"]
        for outputs in run_everywhere(result.model, image):
            np.testing.assert_allclose(outputs, expected, atol=ROUNDING * np.abs(expected).max())


def test_dynamic_sizes_stay_dynamic(tmp_path: Path) -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()))
    result = normdeploy.export(
        net,
        (torch.rand(2, 3, 8, 8),),
        output=tmp_path / "m.onnx",
        inputs=["image[n,3,h,w]"],
        dims=["n=1:2:4", "h=8:16:32", "w=8:16:32"],
        **CAMERA,
    )
    proto = onnx.load(tmp_path / "m.onnx")
    dims = [dim.dim_param or dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["n", "h", "w", 3]
    frames = np.random.default_rng(0).integers(0, 256, (4, 9, 21, 3)).astype(np.uint8)
    for outputs in run_everywhere(proto, frames):
        np.testing.assert_allclose(outputs, expected_outputs(net, frames), atol=1e-5)
    assert any("the file takes image as uint8, channels last" in note for note in result.notes)
    assert normdeploy.run(tmp_path / "m.onnx").outputs


def test_the_metadata_survives_another_optimize_and_half_precision(tmp_path: Path) -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    example = (torch.rand(2, 3, 8, 8),)
    first = normdeploy.export(net, example, normalize=NORMALIZE)
    second = normdeploy.optimize(first, precision="fp16")
    assert second.model is not None
    (image,) = read_image_inputs(second.model)
    assert (image.dtype, image.mean, image.std) == ("float16", MEAN, STD)
    third = normdeploy.export(net, example, precision="fp16", **CAMERA)
    assert third.model is not None
    assert third.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    frames = camera_frames(4)
    session = onnxruntime.InferenceSession(third.model.SerializeToString())
    outputs = session.run(None, {session.get_inputs()[0].name: frames[:2]})[0]
    expected = expected_outputs(net, frames[:2])
    np.testing.assert_allclose(outputs, expected, atol=2**-8 * np.abs(expected).max())


def test_a_quantized_file_is_calibrated_on_8_bit_samples(tmp_path: Path) -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    samples = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype(np.uint8)
    result = normdeploy.export(
        net, (torch.rand(2, 3, 8, 8),), input_names=["image"], quantize="int8", calibrate=[{"image": samples}], **CAMERA
    )
    assert result.model is not None
    outputs = run_everywhere(result.model, samples[:2])[0]
    expected = expected_outputs(net, samples[:2])
    assert np.abs(outputs - expected).max() < 0.05 * np.abs(expected).max()
    with pytest.raises(InputError, match="float32, which can't become uint8"):
        normdeploy.export(
            net,
            (torch.rand(2, 3, 8, 8),),
            input_names=["image"],
            quantize="int8",
            calibrate=[{"image": samples.astype(np.float32) + 0.5}],
            **CAMERA,
        )


def test_a_prepared_file_is_not_prepared_again() -> None:
    net = seeded(lambda: nn.Conv2d(3, 8, 3))
    prepared = normdeploy.export(net, (torch.rand(2, 3, 8, 8),), **CAMERA)
    with pytest.raises(InputError, match=r"already prepares the input .*mean 0.485.*would prepare it twice"):
        normdeploy.optimize(prepared, normalize="0.5/0.5")


def test_an_image_that_is_also_an_output_is_refused() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "g (float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] x, float[1, 3, 4, 4] y) { y = Relu(x) }"
    )
    with pytest.raises(InputError, match="'x' is also an output"):
        normdeploy.optimize(proto, input_type="uint8")


def test_an_image_without_a_stated_shape_is_refused() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Relu(x) }'
    )
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InputError, match="does not state the shape of the input 'x'"):
        normdeploy.optimize(proto, inputs="x[1,3,4,4]", **CAMERA)


@pytest.mark.parametrize(
    "entry",
    [
        "text",
        {"name": "x"},
        {"name": "x", "dtype": "int64", "channels_last": False, "peak": 1, "mean": [], "std": []},
        {"name": "x", "dtype": "uint8", "channels_last": 1, "peak": 1, "mean": [], "std": []},
        {"name": "x", "dtype": "uint8", "channels_last": False, "peak": 0, "mean": [], "std": []},
        {"name": "x", "dtype": "uint8", "channels_last": False, "peak": 1, "mean": [0.5], "std": [0.0]},
        {"name": "x", "dtype": "uint8", "channels_last": False, "peak": 1, "mean": [float("inf")], "std": [1.0]},
        {"name": "z", "dtype": "uint8", "channels_last": False, "peak": 1, "mean": [], "std": []},
    ],
)
def test_malformed_metadata_is_an_error(entry: object) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) { y = Relu(x) }'
    )
    set_metadata(proto, KEY, [entry])
    with pytest.raises(GraphError, match=r"normdeploy\.image_inputs"):
        read_image_inputs(proto)
