"""Let a reference prepare images as the compared files do (`normdeploy.image_input`).

A file that prepares its images itself states the preparation in its metadata. The metadata is a claim: the reference
follows it, and a note says so. The user's own options for images must agree with the claim.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import GraphError, InputError
from ...graphs.image_nodes import insert_image_nodes
from ...image_input import UINT8, ImageInput
from ...inputs.image_input_options import has_image_options, require_images, resolve_image_inputs
from ...loading.image_programs import with_image_inputs
from ...model import LoadedModel
from ...runtimes.trt_runner import is_engine
from ...storage.image_metadata import convert_specs, read_image_inputs
from ...storage.onnx_files import load_onnx
from ...types import PathLike
from ...verb_options import ImageInputOptions
from .reference_models import Original

# Relative difference of numbers that are equal except for float64's rounding, such as 0.485 · 255 and 123.675
_ROUNDED = 1e-12
_CHECK = "to check this claim, pass --normalize, --input-layout or --input-type"


@dataclass(frozen=True)
class _Claim:
    """Images that a file states in its metadata."""

    label: str
    images: tuple[ImageInput, ...]


def prepare_reference(
    model: Original, files: Sequence[PathLike], options: ImageInputOptions | None = None
) -> tuple[Original, list[str]]:
    """Let ``model`` take the images that the files take.

    Args:
        model: the reference. It may already prepare its images itself.
        files: the compared files.
        options: the user's options for images, which must agree with the metadata of the files.

    Returns:
        (model, notes).

    Raises:
        InputError: two files, or a file and the options, disagree; or the images do not fit the model.
        GraphError: the metadata of a file is malformed.
    """
    own = model.images
    read = (_read_claim(file, model) for file in files if os.path.isfile(file) and not is_engine(file))
    claims = [claim for claim in read if claim is not None]
    if options is not None and has_image_options(options):
        stated = resolve_image_inputs(options, model.inputs, own, "the reference")
        for claim in claims:
            if claim.images and not _agree(claim.images, stated):
                raise InputError(
                    f"{claim.label} states {_describe_images(claim.images)}, but the options state"
                    f" {_describe_images(stated)}; omit the options, or write the file again"
                )
        return _with_images(model, stated), []
    if not claims:
        return model, []
    first = claims[0]
    for claim in claims:
        if not _agree(claim.images, first.images):
            raise InputError(
                f"{first.label} takes {_describe_images(first.images)}, but {claim.label} takes"
                f" {_describe_images(claim.images)}, so they can't get the same inputs; verify them one at a time"
            )
    if _agree(first.images, own):
        return model, []
    if own:
        raise InputError(
            f"the reference takes {_describe_images(own)}, but {first.label} takes {_describe_images(first.images)}, so"
            " they can't get the same inputs; pass a reference without prepared images"
        )
    require_images(first.images, model.inputs, f"the reference of {first.label}")
    note = (
        f"{first.label} prepares its images itself ({_describe_images(first.images)}), and so does the reference;"
        f" {_CHECK}"
    )
    return replace(_with_images(model, first.images), image_claim=first.label), [note]


def _read_claim(file: PathLike, model: Original) -> _Claim | None:
    """Read the images of a file, with the model's names of the inputs.

    Returns:
        the claim; None for a file that can't be read, which the comparison names.
    """
    try:
        proto = load_onnx(file, external_data=False)
    except GraphError:
        return None
    images = read_image_inputs(proto)
    ours = [spec.name for spec in model.inputs]
    theirs = [value.name for value in proto.graph.input]
    if len(ours) == len(theirs) and not set(theirs) <= set(ours):
        # Inputs with other names are matched by order.
        names = dict(zip(theirs, ours, strict=True))
        images = tuple(replace(image, name=names[image.name]) for image in images)
    return _Claim(os.path.basename(os.fspath(file)), images)


def _agree(one: Sequence[ImageInput], other: Sequence[ImageInput]) -> bool:
    """Return whether both state the same preparation. The dtype of floats may differ, as in half precision."""
    ours, theirs = ({image.name: image for image in images} for images in (one, other))
    return ours.keys() == theirs.keys() and all(_prepare_alike(image, theirs[name]) for name, image in ours.items())


def _prepare_alike(one: ImageInput, other: ImageInput) -> bool:
    """Return whether two images are prepared alike. Mean and std may be stated for pixels up to 1 or up to 255."""
    if (one.dtype == UINT8) != (other.dtype == UINT8) or one.channels_last != other.channels_last:
        return False
    pairs = ((one.mean or (0.0,), other.mean or (0.0,)), (one.std or (1.0,), other.std or (1.0,)))
    for ours, theirs in pairs:
        # One number holds for all channels.
        count = max(len(ours), len(theirs))
        scaled = zip(_repeat(ours, count, one.divisor), _repeat(theirs, count, other.divisor), strict=True)
        if not all(math.isclose(a, b, rel_tol=_ROUNDED) for a, b in scaled):
            return False
    return True


def _repeat(numbers: Sequence[float], count: int, factor: float) -> list[float]:
    return [factor * number for number in (numbers if len(numbers) == count else [*numbers] * count)]


def _describe_images(images: Sequence[ImageInput]) -> str:
    return "; ".join(f"{image.name}: {image}" for image in images) or "images that are already prepared"


def _with_images(model: Original, images: Sequence[ImageInput]) -> Original:
    """Let the reference prepare the images. Floats keep the model's dtype."""
    if not images:
        return model
    dtypes = {spec.name: spec.dtype for spec in model.inputs}
    own = [image if image.dtype == UINT8 else replace(image, dtype=dtypes[image.name]) for image in images]
    if isinstance(model, LoadedModel):
        return with_image_inputs(model, own)
    return replace(
        model,
        proto=insert_image_nodes(model.proto, own),
        inputs=convert_specs(model.inputs, own),
        images=tuple(own),
        path=None,
        session=None,
    )
