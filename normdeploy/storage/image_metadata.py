"""Record in a file's metadata which images it takes (`normdeploy.image_input`), and convert descriptions of inputs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from ..errors import GraphError
from ..image_input import UINT8, ImageInput
from ..model import InputSpec
from .proto_traversal import set_metadata

KEY = "normdeploy.image_inputs"
_DTYPES = (UINT8, "float16", "float32", "float64", "bfloat16")
# Maximum number of characters of a name.
_LONGEST = 4096


def write_image_inputs(proto: onnx.ModelProto, images: Iterable[ImageInput]) -> None:
    """Write the image inputs into the file's metadata."""
    set_metadata(proto, KEY, [dataclasses.asdict(image) for image in images])


def read_image_inputs(proto: onnx.ModelProto) -> tuple[ImageInput, ...]:
    """Read the image inputs that `write_image_inputs` wrote. Anybody may have written them.

    Returns:
        the image inputs; () if the file records none.

    Raises:
        GraphError: the metadata is malformed, or names an input that the file does not have.
    """
    text = next((p.value for p in proto.metadata_props if p.key == KEY), None)
    if text is None:
        return ()
    try:
        images = tuple(_parse_image_input(entry) for entry in json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise GraphError(
            f"the file's metadata {KEY!r} is malformed ({type(error).__name__}: {error}); remove it, or write the file"
            " again"
        ) from error
    names = {value.name for value in proto.graph.input}
    if missing := next((image.name for image in images if image.name not in names), None):
        raise GraphError(f"the file's metadata {KEY!r} names the input {missing!r}, but the file has {sorted(names)}")
    return images


def _parse_image_input(entry: Mapping[str, Any]) -> ImageInput:
    image = ImageInput(
        name=str(entry["name"])[:_LONGEST],
        dtype=entry["dtype"],
        channels_last=entry["channels_last"],
        peak=float(entry["peak"]),
        mean=tuple(map(float, entry["mean"])),
        std=tuple(map(float, entry["std"])),
    )
    if image.dtype not in _DTYPES:
        raise ValueError(f"the dtype {image.dtype!r} is none of {', '.join(_DTYPES)}")
    if not isinstance(image.channels_last, bool):
        raise ValueError("channels_last is neither true nor false")
    if not all(map(math.isfinite, (image.peak, *image.mean, *image.std))):
        raise ValueError("a number is not finite")
    if image.peak <= 0 or 0.0 in image.std or len(image.mean) != len(image.std):
        raise ValueError("peak, mean and std do not fit together")
    return image


def image_ranges(proto: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Read the ranges of the pixels from the file's metadata.

    Returns:
        input name -> half-open interval; {} if the metadata is missing or malformed.
    """
    try:
        images = read_image_inputs(proto)
    except GraphError:
        return {}
    return {image.name: image.range for image in images if image.range is not None}


def record_image_inputs(proto: onnx.ModelProto, images: Sequence[ImageInput]) -> None:
    """Write the image inputs of a finished file. Half precision may have changed the dtypes of its inputs."""
    if not images:
        return
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(elem_type).name for name, elem_type in types.items()}
    write_image_inputs(proto, [replace(image, dtype=dtypes[image.name]) for image in images])


def convert_specs(specs: Sequence[InputSpec], images: Iterable[ImageInput]) -> tuple[InputSpec, ...]:
    """Describe the inputs of a model after its image inputs were changed.

    Returns:
        the specs, with the dtype, the layout and the values of the images.
    """
    by_name = {image.name: image for image in images}
    return tuple(_convert_spec(spec, by_name[spec.name]) if spec.name in by_name else spec for spec in specs)


def _convert_spec(spec: InputSpec, image: ImageInput) -> InputSpec:
    shape = spec.shape
    if image.channels_last:
        shape = (shape[0], *shape[2:], shape[1])
    return replace(spec, dtype=image.dtype, shape=shape, range=image.range or spec.range)
