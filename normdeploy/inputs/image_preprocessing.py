"""Prepare pictures as a model's own preprocessing does (``--preprocess``).

The steps are read from a ``preprocessor_config.json`` of transformers or from the ``config.json`` of a timm model. They
are: resize, cut out the center, multiply by a factor, subtract the mean and divide by the standard deviation of each
channel. A config with any other step is refused, so that no step is left out silently. The arithmetic is the one of
transformers' image processors with Pillow (``image_transforms.py``) and of timm's evaluation transform
(``timm.data.create_transform``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..image_input import BRIGHTEST, UINT8, ImageInput
from ..storage.regular_file import read_regular
from ..types import Array, PathLike

if TYPE_CHECKING:
    from PIL.Image import Image

# Maximum size of a config in bytes (1 MiB).
_LONGEST = 2**20
_OWN_CODE = "write a function of one file, and pass it as --preprocess MODULE:FUNCTION"
# Pillow's numbers of the interpolations.
_RESAMPLES = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
# Fields of transformers' configs that do not change the pixels of one RGB picture.
_HARMLESS = frozenset(
    {
        *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "_processor_class"),
        *("do_convert_rgb", "data_format", "input_data_format", "return_tensors", "device", "default_to_square"),
        *("disable_grouping", "num_channels", "image_seq_length", "_valid_processor_keys", "transformers_version"),
    }
)
_STEPS = frozenset({"do_resize", "do_center_crop", "do_rescale", "do_normalize"})
_VALUES = frozenset({"size", "resample", "crop_size", "rescale_factor", "image_mean", "image_std"})
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_SQUARE = {"do_center_crop": False, "image_mean": _HALF, "image_std": _HALF, "default_to_square": True}
# Defaults of a class of transformers for fields that its old configs do not state.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_SQUARE, "resample": 2},
    "Siglip": {**_SQUARE, "resample": 3},
    "CLIP": {
        "do_center_crop": True,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "default_to_square": False,
        "resample": 3,
    },
}


@dataclass(frozen=True, kw_only=True)
class ImageSteps:
    """Steps from a picture to an array of the model.

    Attributes:
        resize: new (height, width); None to keep the size or to use ``shortest_edge``.
        shortest_edge: new size of the shorter edge. The other edge keeps the ratio, rounded down.
        resample: Pillow's number of the interpolation.
        crop: (height, width) of the center that is cut out; None for the whole picture.
        crop_rounds: True to round an odd margin half to even, as torchvision does; False to round it down.
        factor: factor of the 8-bit values; None to keep them.
        divisor: divisor of the 8-bit values in float32; None if ``factor`` is used.
        mean: subtracted from each channel; None to skip the normalization.
        std: divides each channel.
    """

    resize: tuple[int, int] | None = None
    shortest_edge: int | None = None
    resample: int = 2
    crop: tuple[int, int] | None = None
    crop_rounds: bool = False
    factor: float | None = None
    divisor: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def apply(self, image: Image) -> Array:
        """Prepare one picture.

        Args:
            image: picture of any mode.

        Returns:
            float32 [3, height, width].
        """
        image = image.convert("RGB")
        width, height = image.size
        if self.resize is not None:
            image = image.resize((self.resize[1], self.resize[0]), self.resample)
        elif self.shortest_edge is not None:
            long = int(self.shortest_edge * max(width, height) / min(width, height))
            size = (self.shortest_edge, long) if width <= height else (long, self.shortest_edge)
            image = image.resize(size, self.resample)
        pixels: Array = np.asarray(image).transpose(2, 0, 1)
        if self.crop is not None:
            pixels = self._cut_center(pixels, self.crop)
        if self.factor is not None:
            # transformers multiplies in float64 and rounds once.
            pixels = (pixels.astype(np.float64) * self.factor).astype(np.float32)
        elif self.divisor is not None:
            pixels = pixels.astype(np.float32) / np.float32(self.divisor)
        pixels = pixels.astype(np.float32)
        if self.mean is not None and self.std is not None:
            mean = np.asarray(self.mean, np.float32)[:, None, None]
            std = np.asarray(self.std, np.float32)[:, None, None]
            pixels = (pixels - mean) / std
        return np.ascontiguousarray(pixels)

    def apply_for(self, image: Image, wanted: ImageInput) -> Array:
        """Prepare one picture for a model that does some of the steps itself.

        Args:
            image: picture of any mode.
            wanted: image input of the model.

        Returns:
            array in the layout of ``wanted``: 8-bit values, or float32.
        """
        bare = replace(self, factor=None, divisor=None, mean=None, std=None)
        pixels: Array
        if wanted.dtype == UINT8:
            pixels = bare.apply(image).astype(np.uint8)
        elif wanted.mean:
            pixels = bare.apply(image) * np.float32(wanted.peak / BRIGHTEST)
        else:
            pixels = self.apply(image)
        if wanted.channels_last:
            pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        return pixels

    def _cut_center(self, pixels: Array, crop: tuple[int, int]) -> Array:
        """Cut out the center. A smaller picture gets a border of zeros.

        Args:
            pixels: [3, height, width].

        Returns:
            [3, *crop].
        """
        for axis, wanted in zip((1, 2), crop, strict=True):
            have = pixels.shape[axis]
            if have < wanted:
                before = math.ceil((wanted - have) / 2)
                border = [(0, 0)] * 3
                border[axis] = (before, wanted - have - before)
                pixels = np.pad(pixels, border)
                continue
            start = round((have - wanted) / 2) if self.crop_rounds else (have - wanted) // 2
            pixels = np.take(pixels, range(start, start + wanted), axis)
        return pixels


def read_image_steps(path: PathLike) -> ImageSteps:
    """Read the steps of a config.

    Args:
        path: ``preprocessor_config.json``, the ``config.json`` of a timm model, or a folder with one of them.

    Returns:
        the steps.

    Raises:
        InputError: the file can't be read, or has a step or a value that is not supported.
    """
    file = Path(path)
    if file.is_dir():
        found = [file / name for name in ("preprocessor_config.json", "config.json") if (file / name).is_file()]
        if not found:
            raise InputError(
                f"the folder {os.fspath(path)!r} has no preprocessor_config.json and no config.json of a timm model;"
                f" pass one, or {_OWN_CODE}"
            )
        file = found[0]
    name = repr(os.fspath(file))
    try:
        config = json.loads(read_regular(file, most=_LONGEST))
    except OSError as error:
        raise InputError(f"can't read the preprocessing {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"the preprocessing {name} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise InputError(f"the preprocessing {name} is not a JSON object")
    reader = _ConfigReader(name, config)
    if isinstance(config.get("pretrained_cfg"), Mapping):
        return _ConfigReader(name, config["pretrained_cfg"]).read_timm()
    if "input_size" in config:
        return reader.read_timm()
    if not (_STEPS | _VALUES) & config.keys():
        raise InputError(
            f"{name} describes no preprocessing of pictures; pass the preprocessor_config.json of transformers, the"
            f" config.json of a timm model, or {_OWN_CODE}"
        )
    return reader.read_transformers()


@dataclass(frozen=True)
class _ConfigReader:
    """Read the fields of one config. Errors name the file and the field."""

    name: str
    config: Mapping[str, Any]

    def read_transformers(self) -> ImageSteps:
        """Read the fields of a ``preprocessor_config.json``."""
        for field, value in self.config.items():
            unused = value is None or value is False or field in _HARMLESS
            if field not in _STEPS | _VALUES and not unused:
                raise self._error(field, f"is {value!r}, which is not supported; {_OWN_CODE}")
        kind = str(self.config.get("image_processor_type") or self.config.get("feature_extractor_type") or "")
        defaults = next((known for start, known in _DEFAULTS.items() if kind.startswith(start)), {})
        steps: dict[str, Any] = {}
        if self._flag("do_resize", default=True):
            steps |= self._read_size(defaults)
            steps["resample"] = self._whole("resample", self.config.get("resample", defaults.get("resample")), 0, 5)
        if self._flag("do_center_crop", default=defaults.get("do_center_crop", False)):
            crop = self.config.get("crop_size")
            if isinstance(crop, Mapping):
                steps["crop"] = self._height_and_width("crop_size", crop)
            else:
                steps["crop"] = (self._whole("crop_size", crop, 1),) * 2
        if self._flag("do_rescale", default=True):
            steps["factor"] = self._number("rescale_factor", self.config.get("rescale_factor", 1 / 255))
        if self._flag("do_normalize", default=True):
            for field, target in (("image_mean", "mean"), ("image_std", "std")):
                steps[target] = self._channels(field, self.config.get(field, defaults.get(field)))
        return ImageSteps(**steps)

    def read_timm(self) -> ImageSteps:
        """Read the fields of a timm model's ``pretrained_cfg``."""
        sizes = self.config.get("input_size")
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) != 3 or sizes[0] != 3:
            raise self._error("input_size", f"is {sizes!r}; expected [3, height, width]")
        height, width = (self._whole("input_size", size, 1) for size in sizes[1:])
        if height != width:
            raise self._error("input_size", f"is {sizes!r}, not a square; {_OWN_CODE}")
        if (mode := self.config.get("crop_mode") or "center") != "center":
            raise self._error("crop_mode", f"is {mode!r}, which is not supported; {_OWN_CODE}")
        interpolation = self.config.get("interpolation")
        if interpolation not in _RESAMPLES:
            raise self._error("interpolation", f"is {interpolation!r}; expected one of {', '.join(_RESAMPLES)}")
        share = self._number("crop_pct", self.config.get("crop_pct"))
        if not 0 < share <= 1:
            raise self._error("crop_pct", f"is {share}; expected a number above 0, and at most 1")
        return ImageSteps(
            shortest_edge=math.floor(height / share),
            resample=_RESAMPLES[interpolation],
            crop=(height, width),
            crop_rounds=True,
            divisor=255.0,
            mean=self._channels("mean", self.config.get("mean")),
            std=self._channels("std", self.config.get("std")),
        )

    def _read_size(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        size = self.config.get("size")
        if isinstance(size, Mapping):
            if set(size) == {"shortest_edge"}:
                return {"shortest_edge": self._whole("size.shortest_edge", size["shortest_edge"], 1)}
            return {"resize": self._height_and_width("size", size)}
        square = self.config.get("default_to_square", defaults.get("default_to_square"))
        if not isinstance(square, bool):
            raise self._error(
                "size",
                f'is {size!r}; write {{"height": H, "width": W}} or {{"shortest_edge": N}}, because a number means'
                " one or the other for different classes",
            )
        edge = self._whole("size", size, 1)
        return {"resize": (edge, edge)} if square else {"shortest_edge": edge}

    def _height_and_width(self, field: str, size: Mapping[str, Any]) -> tuple[int, int]:
        if set(size) != {"height", "width"}:
            raise self._error(field, f"is {dict(size)!r}, which is not supported; {_OWN_CODE}")
        return self._whole(f"{field}.height", size["height"], 1), self._whole(f"{field}.width", size["width"], 1)

    def _flag(self, field: str, *, default: bool) -> bool:
        value = self.config.get(field, default)
        if not isinstance(value, bool):
            raise self._error(field, f"is {value!r}; expected true or false")
        return value

    def _whole(self, field: str, value: Any, least: int, most: int = 2**15) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(field, f"is {value!r}; expected a whole number from {least} to {most}")
        return value

    def _number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._error(field, f"is {value!r}; expected a number")
        return float(value)

    def _channels(self, field: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
            raise self._error(field, f"is {value!r}; expected a list of 3 numbers, one for each channel")
        numbers = tuple(self._number(field, each) for each in value)
        if field.endswith("std") and 0.0 in numbers:
            raise self._error(field, f"is {list(value)!r}; no channel can be divided by 0")
        return numbers

    def _error(self, field: str, what: str) -> InputError:
        return InputError(f"the preprocessing {self.name}: {field} {what}")
