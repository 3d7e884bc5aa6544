"""Pictures are prepared as transformers and timm prepare them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from normdeploy.errors import InputError
from normdeploy.inputs.image_preprocessing import ImageSteps, read_image_steps

NO_STEP = {"do_resize": False, "do_rescale": False, "do_normalize": False}
CLIP = {
    "crop_size": {"height": 3, "width": 2},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.25, 0.0],
    "image_std": [0.5, 0.25, 2.0],
    "image_processor_type": "CLIPImageProcessor",
    "resample": 0,
    "rescale_factor": 0.5,
    "size": {"shortest_edge": 4},
}
VIT = ImageSteps(resize=(8, 8), factor=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3)
TIMM = {
    "input_size": [3, 2, 2],
    "interpolation": "nearest",
    "crop_pct": 0.5,
    "crop_mode": "center",
    "mean": [0.0, 0.5, 1.0],
    "std": [1.0, 0.5, 2.0],
}


def saved(folder: Path, config: Any, name: str = "preprocessor_config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def picture(height: int, width: int) -> Image.Image:
    """Red is 10 · row + column, green is row, blue is 100."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([10 * rows + columns, rows, np.full_like(rows, 100)], -1).astype(np.uint8))


def test_without_a_step_the_pixels_stay(tmp_path: Path) -> None:
    array = read_image_steps(saved(tmp_path, NO_STEP)).apply(picture(2, 3))
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, [[[0, 1, 2], [10, 11, 12]], [[0, 0, 0], [1, 1, 1]], [[100] * 3] * 2])


def test_each_step_of_a_config_of_transformers(tmp_path: Path) -> None:
    """8 × 6 becomes 5 × 4: the longer edge is 5.33, rounded down. Rows 1 to 3 and columns 1 and 2 are kept."""
    array = read_image_steps(saved(tmp_path, CLIP)).apply(picture(8, 6))
    # Nearest: the middle of row i of 5 is at 8 / 5 · (i + 0.5), and of column j of 4 at 6 / 4 · (j + 0.5).
    rows, columns = np.array([2, 4, 5]), np.array([2, 3])
    red = 10 * rows[:, None] + columns
    np.testing.assert_array_equal(array[0], (0.5 * red - 0.5) / 0.5)
    np.testing.assert_array_equal(array[1], np.repeat((0.5 * rows - 0.25) / 0.25, 2).reshape(3, 2))
    np.testing.assert_array_equal(array[2], np.full((3, 2), 25.0))


def test_a_box_averages_and_a_square_ignores_the_ratio(tmp_path: Path) -> None:
    config = {**NO_STEP, "do_resize": True, "size": {"height": 1, "width": 2}, "resample": 4}
    array = read_image_steps(saved(tmp_path, config)).apply(picture(2, 4))
    # Red: the means of 0, 1, 10, 11 and of 2, 3, 12, 13 are 5.5 and 7.5. Pillow rounds halves up.
    np.testing.assert_array_equal(array[0], [[6, 8]])


def test_a_picture_below_the_crop_gets_a_border_of_zeros(tmp_path: Path) -> None:
    config = {**NO_STEP, "do_center_crop": True, "crop_size": {"height": 3, "width": 5}}
    array = read_image_steps(saved(tmp_path, config)).apply(picture(2, 2))
    np.testing.assert_array_equal(array[0], [[0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 10, 11, 0]])


def test_the_factor_is_multiplied_in_float64_and_rounded_once(tmp_path: Path) -> None:
    config = {**NO_STEP, "do_rescale": True, "rescale_factor": 1 / 255}
    values = np.arange(256, dtype=np.uint8)
    image = Image.fromarray(np.repeat(values[None, :, None], 3, -1))
    array = read_image_steps(saved(tmp_path, config)).apply(image)
    np.testing.assert_array_equal(array[0, 0], (values.astype(np.float64) * (1 / 255)).astype(np.float32))


def test_the_evaluation_transform_of_timm(tmp_path: Path) -> None:
    """6 × 4 becomes 6 × 4 (2 / 0.5 = 4). The margins are (6 − 2) / 2 and (4 − 2) / 2."""
    for config in ({"architecture": "net", "pretrained_cfg": TIMM}, TIMM):
        array = read_image_steps(saved(tmp_path, config, "config.json")).apply(picture(6, 4))
        red = np.array([[21, 22], [31, 32]], np.float32) / np.float32(255)
        np.testing.assert_array_equal(array[0], red)
        np.testing.assert_array_equal(array[1][:, 0], (np.float32([2, 3]) / np.float32(255) - np.float32(0.5)) / 0.5)
        np.testing.assert_array_equal(array[2], (np.full((2, 2), np.float32(100) / np.float32(255)) - 1) / 2)


@pytest.mark.parametrize(("height", "start", "start_of_torchvision"), [(4, 1, 1), (5, 1, 2), (7, 2, 2), (9, 3, 4)])
def test_an_odd_margin_is_rounded_as_each_library_does(height: int, start: int, start_of_torchvision: int) -> None:
    """transformers rounds down. torchvision's round() takes halves to the even number: 1.5 → 2, 2.5 → 2, 3.5 → 4."""
    for rounds, first in ((False, start), (True, start_of_torchvision)):
        array = ImageSteps(crop=(2, 2), crop_rounds=rounds).apply(picture(height, 2))
        assert array[1, 0, 0] == first


def test_gray_pictures_and_pictures_with_transparency_become_rgb(tmp_path: Path) -> None:
    steps = read_image_steps(saved(tmp_path, NO_STEP))
    for mode in ("L", "RGBA", "P", "1"):
        assert steps.apply(picture(2, 3).convert(mode)).shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("ViTFeatureExtractor", VIT),
        (
            "SiglipImageProcessor",
            replace(VIT, resample=3),
        ),
    ],
)
def test_an_old_config_takes_the_defaults_of_its_class(tmp_path: Path, kind: str, steps: ImageSteps) -> None:
    assert read_image_steps(saved(tmp_path, {"feature_extractor_type": kind, "size": 8, "do_normalize": True})) == steps


def test_a_number_as_size_means_the_shorter_edge_for_clip(tmp_path: Path) -> None:
    config = {key: value for key, value in CLIP.items() if key != "resample"} | {"size": 4, "crop_size": 4}
    steps = read_image_steps(saved(tmp_path, config))
    assert (steps.resize, steps.shortest_edge, steps.crop, steps.resample) == (None, 4, (4, 4), 3)


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    saved(tmp_path, {"pretrained_cfg": TIMM}, "config.json")
    assert read_image_steps(tmp_path).divisor == 255
    # A folder of transformers has both files.
    saved(tmp_path, NO_STEP)
    assert read_image_steps(tmp_path) == ImageSteps()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CLIP, "do_pad": True}, "do_pad is True, which is not supported"),
        ({**CLIP, "crop_pct": 0.875}, "crop_pct is 0.875, which is not supported"),
        ({**CLIP, "patch_size": 14}, "patch_size is 14"),
        ({**CLIP, "size": {"shortest_edge": 4, "longest_edge": 9}}, "which is not supported"),
        ({**CLIP, "size": {"height": 4}}, "which is not supported"),
        ({**CLIP, "size": {"shortest_edge": 0}}, "size.shortest_edge is 0; expected a whole number from 1"),
        ({**CLIP, "size": {"shortest_edge": True}}, "size.shortest_edge is True"),
        ({"do_resize": True, "size": 8, "resample": 2}, "size is 8; write"),
        ({**CLIP, "resample": 9}, "resample is 9; expected a whole number from 0 to 5"),
        ({**CLIP, "resample": "bicubic"}, "resample is 'bicubic'"),
        ({**CLIP, "do_resize": "yes"}, "do_resize is 'yes'; expected true or false"),
        ({**CLIP, "image_std": [1, 0, 1]}, "image_std is [1, 0, 1]; no channel can be divided by 0"),
        ({**CLIP, "image_mean": [0.5]}, "image_mean is [0.5]; expected a list of 3 numbers"),
        ({**CLIP, "image_mean": 0.5}, "image_mean is 0.5; expected a list"),
        ({**NO_STEP, "do_normalize": True}, "image_mean is None; expected a list"),
        ({**NO_STEP, "do_center_crop": True}, "crop_size is None"),
        ({**TIMM, "interpolation": "random"}, "interpolation is 'random'; expected one of nearest"),
        ({**TIMM, "crop_pct": 1.5}, "crop_pct is 1.5; expected a number above 0, and at most 1"),
        ({**TIMM, "crop_mode": "squash"}, "crop_mode is 'squash'"),
        ({**TIMM, "input_size": [3, 2, 4]}, "not a square"),
        ({**TIMM, "input_size": [1, 2, 2]}, "expected [3, height, width]"),
        ({"architectures": ["BertModel"]}, "describes no preprocessing of pictures"),
        ([], "is not a JSON object"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    path = saved(tmp_path, config)
    with pytest.raises(InputError) as caught:
        read_image_steps(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_image_steps(tmp_path / "broken.json")
    with pytest.raises(InputError, match=r"can't read the preprocessing .*: No such file"):
        read_image_steps(tmp_path / "missing.json")
    with pytest.raises(InputError, match=r"has no preprocessor_config\.json"):
        read_image_steps(tmp_path)
