"""A folder of pictures is a dataset, for ``verify`` and for quantization."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer.testing
from PIL import Image

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, RuntimeUnavailable, TrustError
from normdeploy.inputs.dataset import open_dataset
from normdeploy.inputs.image_dataset import list_sample_files, read_preprocessing
from normdeploy.model import Dim, InputSpec, ModelSignature

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 3, 4, 4] pixels) => (float[n, 2] y) { h = Conv<kernel_shape = [4, 4]>(pixels, w) y = Flatten(h) }"""
CONFIG = {"do_resize": True, "size": {"height": 4, "width": 4}, "resample": 2, "do_rescale": True}
CONFIG |= {"rescale_factor": 1 / 255, "do_normalize": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six pictures, a preprocessing and a model."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for place in range(6):
        file = Path("photos", "cats" if place % 2 else "dogs", f"{place}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5 + place, 7, 3), np.uint8)).save(file)
    Path("photos", "readme.txt").write_text("no picture")
    Path("photos", ".hidden.png").write_bytes(b"no picture")
    Path("config.json").write_text(json.dumps(CONFIG))
    proto = onnx.parser.parse_model(MODEL)
    weight = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, "m.onnx")
    return tmp_path


def signature(*names: str) -> ModelSignature:
    shape = (Dim("n", 1, 4, 8), *map(Dim.from_size, (3, 4, 4)))
    return ModelSignature(inputs=tuple(InputSpec(name, "float32", shape) for name in names), outputs=("y",), kind="")


def test_each_picture_is_one_sample_in_the_order_of_the_paths(folder: Path) -> None:
    files = list_sample_files(Path("photos"), pictures=True)
    assert [file.name for file in files] == ["1.png", "3.png", "5.png", "0.png", "2.png", "4.png"]
    preprocessing = read_preprocessing("config.json")
    cases = open_dataset("photos", signature("pixels"), preprocessing=preprocessing)
    assert [case.name for case in cases] == ["photos, files 0 to 3", "photos, files 4 to 5"]
    arrays = np.concatenate([case.make()["pixels"] for case in cases])
    for file, array in zip(files, arrays, strict=True):
        resized = Image.open(file).resize((4, 4), Image.Resampling.BILINEAR)
        expected = (np.asarray(resized).astype(np.float64) * (1 / 255)).astype(np.float32).transpose(2, 0, 1)
        np.testing.assert_array_equal(array, expected)


def test_a_picture_is_turned_as_its_exif_data_says(folder: Path) -> None:
    image = Image.new("RGB", (4, 4))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180°
    Path("turned").mkdir()
    image.save("turned/a.png", exif=exif)
    (case,) = open_dataset("turned", signature("pixels"), preprocessing=read_preprocessing("config.json"))
    pixels = case.make()["pixels"][0, 0]
    assert pixels[3, 3] == 1
    assert pixels[0, 0] == 0


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n", "cut"])
def test_a_broken_picture_is_named(folder: Path, content: bytes | str) -> None:
    broken = Path("photos", "cats", "3.png")
    broken.write_bytes(broken.read_bytes()[:60] if content == "cut" else content)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        verify_pictures()
    assert "'photos/cats/3.png' can't be read" in str(caught.value)


def test_a_bomb_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(InputError, match=r"1\.png' can't be read: Image size"):
        open_dataset("photos", signature("pixels"), preprocessing=read_preprocessing("config.json"))[0].make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": "config.json"}, "pass the folder with --dataset"),
        ({"dataset": "photos"}, "also pass --preprocess"),
        ({"dataset": "m.onnx", "preprocess": "config.json"}, "'m.onnx' is not a folder"),
        ({"dataset": "photos", "preprocess": "missing.json"}, "missing.json"),
        ({"dataset": "photos", "preprocess": "config.json", "labels": "label"}, "the labels 'label'"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        normdeploy.verify("m.onnx", "m.onnx", dims=["n=1:2:8"], metric="snr>=60", **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_model_with_two_inputs_needs_arrays(folder: Path) -> None:
    with pytest.raises(InputError, match=r"the model has the inputs \['a', 'b'\]"):
        open_dataset("photos", signature("a", "b"), preprocessing=read_preprocessing("config.json"))


def test_a_picture_of_another_size_is_an_error_of_its_shape(folder: Path) -> None:
    Path("config.json").write_text(json.dumps({**CONFIG, "size": {"height": 5, "width": 4}}))
    (case, _) = open_dataset("photos", signature("pixels"), preprocessing=read_preprocessing("config.json"))
    with pytest.raises(InputError, match=r"pixels.*\[4, 3, 5, 4\]"):
        case.make()
    Path("config.json").write_text(json.dumps({**CONFIG, "do_resize": False}))
    (case, _) = open_dataset("photos", signature("pixels"), preprocessing=read_preprocessing("config.json"))
    with pytest.raises(InputError, match=r"1\.png' becomes an array of shape .*3\.png'"):
        case.make()


def test_without_pillow_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RuntimeUnavailable, match="pip install pillow"):
        read_preprocessing("config.json")


def run(line: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, line.split())


def test_pictures_quantize_and_judge_a_file(folder: Path) -> None:
    words = "optimize m.onnx -o int8.onnx --dim n=1:2:8 --quantize int8 --runtime onnxruntime --metric snr:20"
    done = run(f"{words} --calibrate photos --preprocess config.json")
    assert done.exit_code == 0, done.output
    # Batches have two pictures. The first and the third are for calibration. The range begins at 0.
    files = list_sample_files(Path("photos"), pictures=True)
    used = [Image.open(files[i]).resize((4, 4), Image.Resampling.BILINEAR) for i in (0, 1, 4, 5)]
    brightest = max(int(np.asarray(image).max()) for image in used) / 255
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("int8.onnx").graph.initializer}
    (reads,) = (
        n for n in onnx.load("int8.onnx").graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "pixels"
    )
    assert float(weights[reads.input[1]]) == pytest.approx(brightest / 255, rel=1e-5)
    done = run("verify m.onnx int8.onnx --metric snr:20 --samples photos --preprocess config.json")
    assert done.exit_code == 0, done.output


READ = """
import pathlib
import numpy
pathlib.Path("ran").touch()
def read(path):
    assert path.name != "5.png", "the fifth"
    return numpy.full((3, 4, 4), int(path.stem), numpy.float32)
def text(path):
    return "no array"
"""


def test_a_function_of_the_user_reads_the_files_only_with_trust(folder: Path) -> None:
    Path("own_reader.py").write_text(READ)
    given = {"dims": ["n=1:2:8"], "dataset": "photos/dogs", "metric": "snr>=60", "preprocess": "own_reader:read"}
    with pytest.raises(TrustError, match=r"--preprocess: own_reader:read runs the code .*--trust-remote-code"):
        normdeploy.verify("m.onnx", "m.onnx", **given)  # type: ignore[arg-type]
    assert not Path("ran").exists()
    assert normdeploy.verify("m.onnx", "m.onnx", trust=True, **given)  # type: ignore[arg-type]
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("own_reader:missing", "has no function 'missing'"),
        ("no_such_reader:read", "module not found: no_such_reader"),
        ("own_reader:read", "photos/cats/5.png' failed: AssertionError: the fifth"),
        ("own_reader:text", "not an array of numbers"),
    ],
)
def test_errors_of_a_function_name_it(folder: Path, value: str, message: str) -> None:
    Path("own_reader.py").write_text(READ)
    with pytest.raises(InputError) as caught:
        normdeploy.verify(
            "m.onnx", "m.onnx", dims=["n=1:2:8"], dataset="photos/cats", metric="snr>=60", preprocess=value, trust=True
        )
    assert message in str(caught.value)


def test_a_function_in_memory_needs_no_trust(folder: Path) -> None:
    def read(path: Path) -> np.ndarray:
        return np.full((3, 4, 4), float(path.stem))

    Path("photos", "readme.txt").unlink()
    result = normdeploy.optimize(
        "m.onnx", dims=["n=1:2:8"], quantize="int8", runtime="onnxruntime", calibrate="photos", preprocess=read
    )
    assert result.quantization is not None
    with pytest.raises(InputError, match="--preprocess prepares pictures for --quantize"):
        normdeploy.optimize("m.onnx", preprocess=read)


def verify_pictures() -> object:
    return normdeploy.verify(
        "m.onnx", "m.onnx", dims=["n=1:2:8"], dataset="photos", preprocess="config.json", metric="snr>=60"
    )
