"""numpy ↔ torch, bfloat16 included (numpy knows it through ml_dtypes, torch.from_numpy does not), and the check of what
is fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..model import InputSpec
from ..types import Arrays

# onnxruntime's runner needs ``check_names`` alone
if TYPE_CHECKING:
    import torch


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A copy of ``array`` as a tensor on the CPU."""
    import torch

    own = np.array(array, copy=True, order="C")
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def to_numpy(value: torch.Tensor | float) -> np.ndarray:
    """A copy of ``value`` (a Python number is a scalar of numpy's own type for it: int64, float64, bool)."""
    import torch

    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return value.numpy().copy()


def check_names(runner: str, feeds: Arrays, wanted: Sequence[str]) -> None:
    """
    Raises:
        InputError: an input is missing, or one is given that the model does not have.
    """
    missing = [name for name in wanted if name not in feeds]
    # A search in a list for each of thousands of inputs takes the time of their square.
    known = frozenset(wanted)
    unknown = [name for name in feeds if name not in known]
    if missing or unknown:
        if missing:
            complaint = f"is not given {missing}"
        else:
            complaint = f"has no inputs {unknown}"
        raise InputError(f"{runner}: the model {complaint}; it takes {list(wanted)}, it was given {list(feeds)}")


def advise_on_shape(name: str, wanted: Sequence[int | str | None], given: Sequence[int]) -> str:
    """Say how an array of the shape ``given`` becomes one of the shape ``wanted``.

    Args:
        name: the input.
        wanted: sizes; a name or None is a dim of any size.
        given: sizes of the array.

    Returns:
        The part of an error message behind the semicolon. It names an expression of numpy where one moves or adds a
        dim that fits, for example "the channels are last: x.transpose(0, 3, 1, 2)".
    """

    def is_broadcastable(shape: Sequence[int]) -> bool:
        if len(shape) != len(wanted):
            return False
        return all(not isinstance(want, int) or want == size for want, size in zip(wanted, shape, strict=True))

    rank = len(given)
    # Only images have channels; a row of features that was transposed has rank 2.
    if rank > 2:
        channels_first = (0, rank - 1, *range(1, rank - 1))
        channels_last = (0, *range(2, rank), 1)
        for order, side in ((channels_first, "last"), (channels_last, "first")):
            if is_broadcastable([given[axis] for axis in order]):
                return f"the channels are {side}: {name}.transpose({', '.join(map(str, order))})"
    if is_broadcastable([1, *given]):
        return f"the batch dim is missing: {name}[None]"
    return "reshape it"


def check_feeds(runner: str, feeds: Arrays, inputs: Sequence[InputSpec]) -> None:
    """
    Raises:
        InputError: the names, dtypes, ranks or static sizes differ from those of ``inputs``.
    """
    check_names(runner, feeds, [spec.name for spec in inputs])
    for spec in inputs:
        array = feeds[spec.name]
        if array.dtype.name != spec.dtype:
            raise InputError(
                f"{runner}: input {spec.name!r} is {spec.dtype}, it was given {array.dtype.name}; convert it"
            )
        fits = len(array.shape) == len(spec.shape) and all(
            d.is_dynamic or d.opt == n for d, n in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(d.name or str(d.opt) for d in spec.shape)
            sizes = [None if d.is_dynamic else d.opt for d in spec.shape]
            raise InputError(
                f"{runner}: input {spec.name!r} has shape [{shape}], it was given {list(array.shape)};"
                f" {advise_on_shape(spec.name, sizes, array.shape)}"
            )
