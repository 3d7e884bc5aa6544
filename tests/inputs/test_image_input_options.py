"""The options for images are resolved to one image for each input; wrong values are errors that name both values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.image_input import ImageInput
from normdeploy.inputs.image_input_options import resolve_image_inputs
from normdeploy.model import Dim, InputSpec
from normdeploy.verb_options import ImageInputOptions

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"


def spec(name: str, *sizes: int, dtype: str = "float32") -> InputSpec:
    return InputSpec(name, dtype, tuple(map(Dim.from_size, sizes)))


PIXELS = spec("pixels", 1, 3, 8, 8)


def resolve(
    *inputs: InputSpec, present: tuple[ImageInput, ...] = (), **options: str | list[str]
) -> tuple[ImageInput, ...]:
    return resolve_image_inputs(ImageInputOptions(**options), inputs or (PIXELS,), present, "the model")


def test_all_three_options_make_one_image() -> None:
    (image,) = resolve(normalize=IMAGENET, input_layout="nhwc", input_type="uint8")
    assert image == ImageInput(name="pixels", dtype="uint8", channels_last=True, mean=MEAN, std=STD)
    assert (image.divisor, image.range) == (255, (0, 256))


def test_no_option_changes_no_input() -> None:
    assert resolve() == ()
    assert resolve(input_layout="nchw") == ()


def test_statistics_of_8_bit_pixels_divide_nothing_before() -> None:
    (image,) = resolve(normalize="123.675,116.28,103.53/58.395,57.12,57.375/255", input_type="uint8")
    assert image.divisor == 1
    (image,) = resolve(normalize="127.5/127.5/255")
    assert (image.divisor, image.range, image.mean) == (1, (0.0, 255.0), (127.5,))


def test_a_stated_peak_allows_any_deviation() -> None:
    (image,) = resolve(normalize="0/2/1")
    assert (image.peak, image.std) == (1, (2.0,))


def test_the_only_image_is_found_among_other_inputs() -> None:
    ids = spec("ids", 1, 16, dtype="int64")
    points = spec("points", 1, 4, 2)
    (image,) = resolve(ids, points, PIXELS, input_type="uint8")
    assert image.name == "pixels"


def test_several_images_are_named() -> None:
    left, right = spec("left", 1, 3, 8, 8), spec("right", 1, 1, 8, 8)
    images = resolve(left, right, normalize=[f"left={IMAGENET}", "right=0.1307/0.3081"], input_type="right=uint8")
    assert [(image.name, image.dtype, len(image.mean)) for image in images] == [
        ("left", "float32", 3),
        ("right", "uint8", 1),
    ]


@pytest.mark.parametrize(
    ("field", "value", "divisor"), [("rescale_factor", 0.00392156862745098, 255.0), ("do_rescale", False, 1.0)]
)
def test_a_config_of_transformers_states_scale_mean_and_deviation(
    field: str, value: object, divisor: float, tmp_path: Path
) -> None:
    config = {"do_resize": False, "do_normalize": True, "image_mean": MEAN, "image_std": STD, field: value}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "preprocessor_config.json"):
        (image,) = resolve(normalize=str(path), input_type="uint8")
        assert (image.mean, image.std, image.divisor) == (MEAN, STD, divisor)


def test_a_config_that_does_not_normalize_changes_bytes_alone(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_resize": False, "do_normalize": False}))
    (image,) = resolve(normalize=str(tmp_path), input_type="uint8")
    assert (image.mean, image.divisor) == ((), 255.0)
    with pytest.raises(
        InputError, match=r"states no mean .*nothing changes for pixels in float32; .*--input-type uint8"
    ):
        resolve(normalize=str(tmp_path))


def test_an_open_number_of_channels_takes_one_number_alone() -> None:
    axes = (Dim.from_size(1), Dim("c", 1, 3, 4), Dim.from_size(8), Dim.from_size(8))
    pixels = InputSpec("pixels", "float32", axes)
    with pytest.raises(
        InputError, match=r"3 channels, but axis 1 .* is the dim c, .* from 1 to 4; give axis 1 the size 3"
    ):
        resolve(pixels, normalize=IMAGENET)
    (image,) = resolve(pixels, normalize="0.5/0.5")
    assert image.mean == (0.5,)


def test_a_config_of_timm_states_mean_and_deviation(tmp_path: Path) -> None:
    config = {"input_size": [3, 8, 8], "interpolation": "bicubic", "crop_pct": 0.9, "mean": MEAN, "std": STD}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": config}))
    (image,) = resolve(normalize=str(tmp_path), input_type="uint8")
    assert (image.mean, image.std, image.divisor) == (MEAN, STD, 255.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "0.4,0.5/0.2,0.2"}, "2 channels, but the input pixels:float32[1,3,8,8] of the model has 3"),
        ({"normalize": "0.4,0.5,0.4/0.2,0.2"}, "3 means, but 2 deviations"),
        ({"normalize": "0.4,0.5,0.4/0.2,0,0.2"}, "the deviation 0 is not above 0"),
        ({"normalize": "0.4,0.5,0.4/0.2,-1,0.2"}, "the deviation -1 is not above 0"),
        ({"normalize": "nan/0.5"}, "every number must be finite"),
        ({"normalize": "0.5"}, "neither numbers nor an existing file"),
        ({"normalize": "0.5/0.5/128"}, "the brightest pixel is 1 or 255, not 128"),
        ({"normalize": "103.53/57.375"}, "the mean 103.53 is above 1, but pixels are from 0 to 1"),
        ({"normalize": "0,0,0/255,255,255"}, "the deviation 255 is above 1, but pixels are from 0 to 1"),
        ({"normalize": "other=0.5/0.5"}, "the model has no input 'other'; it has ['pixels']"),
        ({"normalize": ["0.5/0.5", "pixels=0.4/0.4"]}, "twice for the input 'pixels', with '0.5/0.5' and '0.4/0.4'"),
        ({"input_layout": "ndhwc"}, "has 4 axes, so its layout is nchw or nhwc"),
        ({"input_type": "int8"}, "unknown type of pixels; pass uint8"),
    ],
)
def test_a_wrong_value_is_an_error_with_both_values(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((spec("ids", 1, 3, 8, 8, dtype="int64"),), "holds int64, not floats"),
        ((spec("row", 1, 8),), "has 2 axes, but an image has 3 to 5"),
        ((spec("a", 1, 8), spec("b", 1, 8)), "has no image input"),
        ((spec("a", 1, 3, 8, 8), spec("b", 1, 3, 8, 8)), "several image inputs, a, b; write a=uint8"),
        ((spec("frames", 1, 3, 8, 8, dtype="uint8"),), "holds uint8, not floats"),
    ],
)
def test_an_input_that_is_no_image_is_an_error(inputs: tuple[InputSpec, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(*inputs, input_type="uint8")
    assert message in str(error.value)


def test_an_image_is_not_prepared_twice() -> None:
    present = ImageInput(name="pixels", dtype="float32", mean=(0.5,), std=(0.25,))
    with pytest.raises(InputError, match=r"mean 0.5, std 0.25.*--normalize 0.4/0.2 would prepare it twice"):
        resolve(present=(present,), normalize="0.4/0.2")
