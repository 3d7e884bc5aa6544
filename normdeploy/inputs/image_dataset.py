"""Read a folder of pictures as a dataset: each picture becomes one sample of the model's only input."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, RuntimeUnavailable
from ..image_input import ImageInput
from ..types import Array, PathLike
from .image_preprocessing import ImageSteps, read_image_steps

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm"})


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of the user's files.

    Attributes:
        prepare: function from a file to the array of one sample.
        of_pictures: True if the files are pictures; False if the user's own function reads them.
        steps: steps from a picture to the array; None if the user's own function makes the array.
    """

    prepare: Callable[[Path], Array]
    of_pictures: bool = True
    steps: ImageSteps | None = None

    def for_images(self, images: Sequence[ImageInput]) -> Preprocessing:
        """Leave the steps out that a model does itself.

        Args:
            images: image inputs that the model prepares itself. A model that gets its samples from pictures has only
                one input.

        Returns:
            the preprocessing; unchanged if the model gets prepared images, or if the user's own function makes them.
        """
        steps = self.steps
        if steps is None or not images:
            return self
        image = images[0]
        return Preprocessing(lambda file: _prepare_picture(file, lambda opened: steps.apply_for(opened, image)))


def read_preprocessing(path: PathLike) -> Preprocessing:
    """Read the preprocessing of a config (`read_image_steps`).

    Returns:
        the preprocessing of pictures.

    Raises:
        InputError: the config can't be read or is not supported.
        RuntimeUnavailable: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise RuntimeUnavailable("pictures are read with Pillow, which is not installed: pip install pillow")
    steps = read_image_steps(path)
    return Preprocessing(lambda file: _prepare_picture(file, steps.apply), steps=steps)


def _prepare_picture(file: Path, apply: Callable[[Any], Array]) -> Array:
    """Open one picture, turn it as its EXIF data says, and prepare it.

    Raises:
        InputError: the file is broken, is not a picture, or has too many pixels.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow warns of pictures with very many pixels, and refuses twice as many.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                return apply(ImageOps.exif_transpose(image))
    # Broken files raise errors of many types.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the picture {os.fspath(file)!r} can't be read: {reason}; repair or remove it") from error


def list_sample_files(folder: Path, *, pictures: bool) -> list[Path]:
    """List the files of a folder and its subfolders, sorted by path. Names that begin with a dot are skipped.

    Args:
        pictures: list only files with the suffix of a picture.

    Returns:
        the files.

    Raises:
        InputError: there is no such file.
    """
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and (not pictures or file.suffix.lower() in _SUFFIXES)
    )
    if not files:
        kinds = f" with a suffix of {', '.join(sorted(_SUFFIXES))}" if pictures else ""
        raise InputError(f"the folder {os.fspath(folder)!r} has no file{kinds}; pass a folder with samples")
    return files


def stack_samples(files: Sequence[Path], preprocessing: Preprocessing) -> Array:
    """Prepare files and join their arrays.

    Returns:
        array [files, ...].

    Raises:
        InputError: a file can't be read, the user's function fails, or two arrays have different shapes.
    """
    arrays: list[Array] = []
    for file in files:
        array = np.asarray(preprocessing.prepare(file))
        if arrays and array.shape != arrays[0].shape:
            raise InputError(
                f"{os.fspath(files[0])!r} becomes an array of shape {list(arrays[0].shape)}, but {os.fspath(file)!r}"
                f" one of {list(array.shape)}; the preprocessing must give one shape, for example with a center crop"
            )
        arrays.append(array)
    return np.stack(arrays)
