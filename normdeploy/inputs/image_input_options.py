"""Read the options ``--normalize``, ``--input-layout`` and ``--input-type`` (`normdeploy.image_input`).

    [IN=]MEAN/STD[/PEAK]    numbers of each channel, separated by commas; PEAK is 1 (default) or 255
    [IN=]CONFIG             config file or folder, as `normdeploy.inputs.image_preprocessing` reads them
    [IN=]LAYOUT, [IN=]TYPE  "nhwc", "uint8"

IN is the input's name. It can be omitted if the model has only one image input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..dtypes import is_float_dtype
from ..errors import InputError
from ..image_input import BRIGHTEST, LAYOUTS, UINT8, ImageInput
from ..model import InputSpec
from ..verb_options import ImageInputOptions
from .image_preprocessing import read_image_steps

_PEAKS = (1.0, BRIGHTEST)
_HOW = "write MEAN/STD with one number for each channel, such as 0.485,0.456,0.406/0.229,0.224,0.225, or a config file"
_FLAGS = {"normalize": "--normalize", "input_layout": "--input-layout", "input_type": "--input-type"}


@dataclass(frozen=True, kw_only=True)
class _Normalization:
    """Mean and standard deviation of each channel, for pixels from 0 to ``peak``."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    peak: float = 1.0


def has_image_options(options: ImageInputOptions) -> bool:
    """Return whether the user passed an option for images."""
    return any(getattr(options, name) for name in _FLAGS)


def resolve_image_inputs(
    options: ImageInputOptions, inputs: Sequence[InputSpec], present: Sequence[ImageInput], label: str
) -> tuple[ImageInput, ...]:
    """Combine the options with the inputs of a model.

    Args:
        inputs: inputs of the model.
        present: image inputs that the model already prepares itself.
        label: name of the model, for messages.

    Returns:
        one image for each input that an option changes, in the order of ``inputs``.

    Raises:
        InputError: a value can't be read; an input is missing, not an image or already prepared; an option is passed
            twice for one input; or the numbers do not fit the channels.
    """
    specs = {spec.name: spec for spec in inputs}
    values = {name: _values_by_input(getattr(options, name), _FLAGS[name], inputs, label) for name in _FLAGS}
    images: list[ImageInput] = []
    for spec in inputs:
        chosen = {name: texts[spec.name] for name, texts in values.items() if spec.name in texts}
        if not chosen:
            continue
        _require_unprepared(spec, chosen, present, label)
        image = ImageInput(name=spec.name, dtype=spec.dtype)
        if "input_type" in chosen:
            image = replace(image, dtype=_parse_type(chosen["input_type"]))
        if "input_layout" in chosen:
            image = replace(image, channels_last=_parse_layout(chosen["input_layout"], specs[spec.name]))
        if "normalize" in chosen:
            normalization = _parse_normalization(chosen["normalize"])
            _require_channels(normalization.mean, spec, label)
            image = replace(image, mean=normalization.mean, std=normalization.std, peak=normalization.peak)
            if not image.mean and image.dtype != UINT8:
                raise InputError(
                    f"--normalize {chosen['normalize']}: it states no mean and deviation (do_normalize is false), so"
                    f" nothing changes for pixels in {image.dtype}; omit it, or also pass --input-type uint8"
                )
        if image.mean or image.channels_last or image.dtype != spec.dtype:
            images.append(image)
    return tuple(images)


def require_images(images: Iterable[ImageInput], inputs: Sequence[InputSpec], label: str) -> None:
    """Refuse images that do not fit the inputs of a model.

    Args:
        images: images that a file states.
        label: name of the model, for messages.

    Raises:
        InputError: an input is missing, is not an image, or has another number of channels.
    """
    specs = {spec.name: spec for spec in inputs}
    for image in images:
        if image.name not in specs:
            raise InputError(
                f"the image input {image.name!r} ({image}) is missing in {label}, which has {sorted(specs)}"
            )
        spec = specs[image.name]
        _require_image(spec, f"the image input {image.name!r} ({image})", label)
        _require_channels(image.mean, spec, label)


# ------------------------------------------------------------------ inputs


def _values_by_input(given: str | Sequence[str], flag: str, inputs: Sequence[InputSpec], label: str) -> dict[str, str]:
    """Assign the values of one option to inputs.

    Returns:
        input name -> value.

    Raises:
        InputError: the input is not an image, unclear, or passed twice.
    """
    values: dict[str, str] = {}
    names = sorted((spec.name for spec in inputs), key=len, reverse=True)
    for text in [given] if isinstance(given, str) else given:
        name = next((each for each in names if text.startswith(f"{each}=")), None)
        if name is None:
            head, separator, _ = text.partition("=")
            if separator and not os.path.exists(text):
                raise InputError(f"{flag} {text}: {label} has no input {head!r}; it has {sorted(names)}")
            spec = _only_image(inputs, flag, text, label)
            value = text
        else:
            spec = next(each for each in inputs if each.name == name)
            value = text.removeprefix(f"{name}=")
        if spec.name in values:
            raise InputError(
                f"{flag} is passed twice for the input {spec.name!r}, with {values[spec.name]!r} and {value!r}; pass"
                " one of them"
            )
        values[spec.name] = value
    return values


def _only_image(inputs: Sequence[InputSpec], flag: str, text: str, label: str) -> InputSpec:
    """Find the only image among the inputs: the only one of rank 4, or else the only one of rank 3 or 5.

    Raises:
        InputError: there is none, or there are several.
    """
    floats = [spec for spec in inputs if _is_float(spec) and len(spec.shape) in LAYOUTS]
    images = [spec for spec in floats if len(spec.shape) == 4] or floats
    if len(images) == 1:
        return images[0]
    if len(inputs) == 1:
        return inputs[0]
    if images:
        raise InputError(
            f"{flag} {text}: {label} has several image inputs, {', '.join(spec.name for spec in images)}; write"
            f" {images[0].name}={text}"
        )
    described = ", ".join(_describe_spec(spec) for spec in inputs)
    raise InputError(f"{flag} {text}: {label} has no image input, which has 3 to 5 axes of floats; it has {described}")


def _require_unprepared(spec: InputSpec, chosen: dict[str, str], present: Sequence[ImageInput], label: str) -> None:
    """Refuse an input that is not an image, or that the model already prepares itself.

    Raises:
        InputError: it is.
    """
    wish = ", ".join(f"{_FLAGS[name]} {value}" for name, value in chosen.items())
    existing = next((image for image in present if image.name == spec.name), None)
    if existing is not None:
        raise InputError(
            f"{label} already prepares the input {spec.name!r} ({existing}), so {wish} would prepare it twice; omit the"
            " options, or begin with the file without them"
        )
    _require_image(spec, wish, label)


def _require_image(spec: InputSpec, wish: str, label: str) -> None:
    """Refuse an input that is not an image.

    Raises:
        InputError: it has another dtype or rank.
    """
    if not _is_float(spec):
        raise InputError(
            f"{wish}: the input {_describe_spec(spec)} of {label} holds {spec.dtype}, not floats, so it is not a"
            " prepared image; omit the options"
        )
    if len(spec.shape) not in LAYOUTS:
        raise InputError(
            f"{wish}: the input {_describe_spec(spec)} of {label} has {len(spec.shape)} axes, but an image has 3 to 5,"
            " with the channels on axis 1; omit the options, or name another input"
        )


def _is_float(spec: InputSpec) -> bool:
    return spec.dtype == "bfloat16" or is_float_dtype(np.dtype(spec.dtype))


def _describe_spec(spec: InputSpec) -> str:
    return f"{spec.name}:{spec.dtype}[{','.join(dim.name or str(dim.opt) for dim in spec.shape)}]"


def _require_channels(mean: Sequence[float], spec: InputSpec, label: str) -> None:
    count = len(mean)
    channels = spec.shape[1]
    if count > 1 and channels.is_dynamic:
        raise InputError(
            f"the mean has {count} channels, but axis 1 of the input {_describe_spec(spec)} of {label} is the dim"
            f" {channels.name}, which may have any size from {channels.min} to {channels.max}; give axis 1 the size"
            f" {count}"
        )
    if count > 1 and channels.opt != count:
        raise InputError(
            f"the mean has {count} channels, but the input {_describe_spec(spec)} of {label} has"
            f" {channels.name or channels.opt} on axis 1; pass one number for each channel"
        )


# ------------------------------------------------------------------ values


def _parse_type(text: str) -> str:
    if text != UINT8:
        raise InputError(f"--input-type {text}: unknown type of pixels; pass uint8, or omit the option for floats")
    return UINT8


def _parse_layout(text: str, spec: InputSpec) -> bool:
    """Read a layout.

    Returns:
        True if the channels are on the last axis.
    """
    rank = len(spec.shape)
    if text.lower() not in LAYOUTS[rank]:
        first, last = LAYOUTS[rank]
        raise InputError(
            f"--input-layout {text}: the input {_describe_spec(spec)} has {rank} axes, so its layout is {first} or"
            f" {last}"
        )
    return text.lower() == LAYOUTS[rank][1]


def _parse_normalization(text: str) -> _Normalization:
    """Read MEAN/STD, or a config.

    Raises:
        InputError: the text is neither, a number is out of range, or a deviation is 0.
    """
    if os.path.exists(text):
        return _read_config(text)
    parts = text.split("/")
    try:
        numbers = [tuple(float(number) for number in part.split(",")) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3):
        raise InputError(f"--normalize {text}: neither numbers nor an existing file; {_HOW}")
    mean, std = numbers[:2]
    if len(mean) != len(std):
        raise InputError(f"--normalize {text}: {len(mean)} means, but {len(std)} deviations; {_HOW}")
    if not all(map(math.isfinite, (*mean, *std))):
        raise InputError(f"--normalize {text}: every number must be finite")
    if (smallest := min(std)) <= 0:
        raise InputError(
            f"--normalize {text}: the deviation {smallest:g} is not above 0; no channel can be divided by it"
        )
    peak = 1.0
    if len(numbers) == 3:
        if numbers[2] not in [(each,) for each in _PEAKS]:
            raise InputError(f"--normalize {text}: the brightest pixel is 1 or 255, not {parts[2]}; {_HOW}")
        peak = numbers[2][0]
    else:
        for word, largest in (("mean", max(map(abs, mean))), ("deviation", max(std))):
            if largest > 1:
                raise InputError(
                    f"--normalize {text}: the {word} {largest:g} is above 1, but pixels are from 0 to 1; for the mean"
                    f" and the deviation of pixels from 0 to 255, write {text}/255; otherwise write {text}/1"
                )
    return _Normalization(mean=mean, std=std, peak=peak)


def _read_config(path: str) -> _Normalization:
    """Read scale, mean and deviation of a config. Its other steps stay outside of the file.

    Raises:
        InputError: the config can't be read.
    """
    steps = read_image_steps(path)
    if steps.divisor is not None:
        peak = BRIGHTEST / steps.divisor
    elif steps.factor is not None:
        # 255 · 0.00392156862745098, the factor of most configs, is 1 up to the last digit.
        peak = round(BRIGHTEST * steps.factor, 12)
    else:
        peak = BRIGHTEST
    if peak <= 0:
        raise InputError(f"--normalize {path}: its rescale_factor is {steps.factor}; expected a number above 0")
    return _Normalization(mean=steps.mean or (), std=steps.std or (), peak=peak)
