"""Resolve the value of ``--preprocess``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...inputs.image_dataset import Preprocessing, read_preprocessing
from ...types import PathLike
from .user_functions import call_user_function, import_user_function, is_function_name


def resolve_preprocessing(value: PathLike | Callable[[Path], Any] | None, *, trust: bool) -> Preprocessing | None:
    """Resolve a config, ``MODULE:FUNCTION`` or a function.

    Args:
        value: config file or folder (`normdeploy.inputs.image_preprocessing`), or a function from the path of a file to
            the array of one sample. None for no preprocessing.
        trust: True if the user allows the module of ``MODULE:FUNCTION`` to run.

    Returns:
        the preprocessing, or None.

    Raises:
        InputError: the config or the function can't be used.
        TrustError: a module would run without ``trust``.
        RuntimeUnavailable: Pillow is not installed.
    """
    if value is None:
        return None
    if callable(value):
        return _preprocess_by_function(value, getattr(value, "__name__", "the function"))
    if is_function_name(value):
        name = os.fspath(value)
        return _preprocess_by_function(import_user_function(name, "--preprocess", trust=trust), name)
    return read_preprocessing(value)


def _preprocess_by_function(function: Callable[[Path], Any], name: str) -> Preprocessing:
    def prepare(file: Path) -> np.ndarray:
        """Call the user's function, and check that its result is an array of numbers."""
        array = np.asarray(call_user_function(function, f"--preprocess {name} for {os.fspath(file)!r}", file))
        if array.dtype.kind not in "fiub":
            raise InputError(
                f"--preprocess {name} for {os.fspath(file)!r} returned {array.dtype}, not an array of numbers; return"
                " the input of one sample, without the batch dim"
            )
        return array

    return Preprocessing(prepare, of_pictures=False)
