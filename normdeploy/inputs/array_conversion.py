"""Convert arrays between numpy and torch, and check the arrays that are passed to a model.

The conversions include bfloat16. numpy supports bfloat16 only through ml_dtypes, and ``torch.from_numpy`` rejects
arrays of this type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..model import InputSpec, require_multiples
from ..types import Arrays
from .shape_advice import advise_on_shape

# onnxruntime's runner imports ``check_names`` from here and must not load torch.
if TYPE_CHECKING:
    import torch


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Copy ``array`` into a tensor on the CPU.

    Returns: a contiguous tensor of the same dtype, including bfloat16.
    """
    import torch

    own = np.array(array, copy=True, order="C")
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def to_numpy(value: torch.Tensor | float) -> np.ndarray:
    """Copy ``value`` into an array.

    Returns:
        An array of the same dtype. A Python number becomes a numpy scalar of type int64, float64 or bool.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return value.numpy().copy()


def check_names(runner: str, feeds: Arrays, wanted: Sequence[str]) -> None:
    """Check that the feeds are exactly the model's inputs.

    Args:
        runner: name of the runner, for messages.
        wanted: names of the model's inputs.

    Raises:
        InputError: an input of the model is missing, or the model has no input of a given name.
    """
    missing = [name for name in wanted if name not in feeds]
    # With thousands of inputs, list lookups would take quadratic time.
    known = frozenset(wanted)
    unknown = [name for name in feeds if name not in known]
    if missing or unknown:
        if missing:
            complaint = f"needs the inputs {missing}"
        else:
            complaint = f"has no inputs {unknown}"
        raise InputError(f"{runner}: the model {complaint}; expected {list(wanted)}, got {list(feeds)}")


def check_feeds(runner: str, feeds: Arrays, inputs: Sequence[InputSpec]) -> None:
    """Check names, dtypes and shapes of the arrays that are passed to a model.

    Args:
        runner: name of the runner, for messages.

    Raises:
        InputError: a name, dtype, rank or static size differs from ``inputs``.
    """
    check_names(runner, feeds, [spec.name for spec in inputs])
    for spec in inputs:
        array = feeds[spec.name]
        if array.dtype.name != spec.dtype:
            raise InputError(f"{runner}: input {spec.name!r} is {spec.dtype}, but got {array.dtype.name}; convert it")
        fits = len(array.shape) == len(spec.shape) and all(
            d.is_dynamic or d.opt == n for d, n in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(d.name or str(d.opt) for d in spec.shape)
            sizes = [None if d.is_dynamic else d.opt for d in spec.shape]
            raise InputError(
                f"{runner}: input {spec.name!r} has shape [{shape}], but got {list(array.shape)}; "
                f"{advise_on_shape(spec.name, sizes, array.shape)}"
            )
        for dim, size in zip(spec.shape, array.shape, strict=True):
            require_multiples(f"{runner}: the dim {dim.name!r} of input {spec.name!r}", [size], dim.step)
