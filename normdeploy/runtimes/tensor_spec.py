"""Check a runner's arrays against their `TensorSpec` and view any array as a torch tensor over the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..inputs.array_conversion import check_names
from ..inputs.shape_advice import advise_on_shape
from ..model import TensorSpec
from ..types import Tensors

# torch takes seconds to import and is not needed for numpy arrays on the CPU.
if TYPE_CHECKING:
    import torch

DTYPES = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
"""Dtypes that can be passed or returned; torch has a type of each name."""


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """View an array as a torch tensor over the same memory.

    Only numpy arrays that torch can't view are copied: big-endian arrays and arrays with negative strides.

    Args:
        name: the input's name, for errors.
        value: a torch tensor, a numpy array, or an object that supports DLPack or __cuda_array_interface__.

    Returns:
        Detached tensor on the array's device.

    Raises:
        InputError: ``value`` is none of these, or has a dtype that torch lacks.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        if isinstance(value, np.ndarray | np.generic):
            return _tensor_over_array(np.asarray(value))
        if hasattr(value, "__dlpack__"):
            return torch.from_dlpack(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(f"input {name!r} can't be used: {error}; pass a numpy array or a torch tensor") from error
    raise InputError(
        f"input {name!r} is a {type(value).__name__}; pass a numpy array, a torch tensor, or an array that supports "
        "DLPack"
    )


class _WritableArray:
    """View of a numpy array without its read-only flag, because torch warns about the flag. Runners do not write to
    their inputs.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


def _tensor_over_array(array: np.ndarray) -> torch.Tensor:
    import torch

    bfloat16 = array.dtype == ml_dtypes.bfloat16
    plain = np.asarray(
        array.view(np.int16) if bfloat16 else array, dtype=None if bfloat16 else array.dtype.newbyteorder("=")
    )
    if any(stride < 0 for stride in plain.strides):
        plain = np.ascontiguousarray(plain)
    tensor = torch.from_numpy(plain if plain.flags.writeable else np.asarray(_WritableArray(plain)))
    if bfloat16:
        return tensor.view(torch.bfloat16)
    return tensor


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View a CPU tensor as a numpy array over the same memory.

    Returns:
        The array; bfloat16 as ``ml_dtypes.bfloat16``.
    """
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def check_tensor_feeds(runner: str, feeds: Mapping[str, Any], specs: Sequence[TensorSpec]) -> Tensors:
    """Check the feeds and view them as tensors over the same memory.

    Args:
        runner: its name, for errors.

    Returns:
        Input name -> tensor, in the order of ``specs``.

    Raises:
        InputError: names, dtypes, ranks or static sizes differ from those of ``specs``, or one named dim has two sizes.
    """
    check_names(runner, feeds, [spec.name for spec in specs])
    tensors = {spec.name: as_tensor(spec.name, feeds[spec.name]) for spec in specs}
    _require_matching_specs(
        runner, specs, {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    )
    return tensors


def are_numpy_arrays(feeds: Mapping[str, Any]) -> bool:
    """Return whether all values are numpy arrays or scalars."""
    return all(isinstance(value, np.ndarray | np.generic) for value in feeds.values())


def check_array_feeds(runner: str, feeds: Mapping[str, Any], specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Check numpy feeds as ``check_tensor_feeds`` does, without torch.

    Returns:
        Input name -> array; a copy if the array was not contiguous or in another byte order.

    Raises:
        InputError: as for ``check_tensor_feeds``.
    """
    check_names(runner, feeds, [spec.name for spec in specs])
    given = {spec.name: np.asarray(feeds[spec.name]) for spec in specs}
    if strange := next((name for name, array in given.items() if array.dtype.name not in DTYPES), ""):
        kind = given[strange].dtype
        raise InputError(f"input {strange!r} can't be used: it is an array of {kind}; pass one of {', '.join(DTYPES)}")
    _require_matching_specs(
        runner, specs, {name: (array.dtype.name, list(array.shape)) for name, array in given.items()}
    )
    return {
        name: np.asarray(a, a.dtype if a.dtype.isnative else a.dtype.newbyteorder("="), order="C")
        for name, a in given.items()
    }


def _require_matching_specs(
    runner: str, specs: Sequence[TensorSpec], given: Mapping[str, tuple[str, list[int]]]
) -> None:
    known: dict[str, tuple[int, str]] = {}
    for spec in specs:
        dtype, shape = given[spec.name]
        if dtype != spec.dtype:
            raise InputError(f"{runner}: input {spec.name!r} is {spec.dtype}, but got {dtype}; convert it")
        if len(shape) != len(spec.shape) or any(
            isinstance(d, int) and d != n for d, n in zip(spec.shape, shape, strict=True)
        ):
            advice = advise_on_shape(spec.name, spec.shape, shape)
            raise InputError(f"{runner}: the input is {spec}, but got the shape {shape}; {advice}")
        for dim, size in zip(spec.shape, shape, strict=True):
            if isinstance(dim, str) and (first := known.setdefault(dim, (size, spec.name)))[0] != size:
                raise InputError(
                    f"{runner}: the dim {dim!r} is {first[0]} in input {first[1]!r}, but {size} in input "
                    f"{spec.name!r}; use one size for both"
                )


def select_profile(
    runner: str, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], count: int, named: int | None
) -> int:
    """Select the optimization profile for the given shapes.

    Args:
        runner: its name, for errors.
        count: number of profiles.
        named: index of the profile that the user selected, or None.

    Returns:
        ``named``, or the first of ``count`` profiles that admits every shape.

    Raises:
        InputError: the named profile, or every profile, excludes a shape.
    """
    candidates = range(count) if named is None else [named]
    outside: list[str] = []
    for profile in candidates:
        wrong = [s for s in specs if s.profiles and not s.accepts_shape(tensors[s.name].shape, profile)]
        if not wrong:
            return profile
        for spec in wrong:
            low, _, high = spec.profiles[profile]
            outside.append(
                f"input {spec.name!r} has shape {list(tensors[spec.name].shape)}, but profile {profile} accepts "
                f"{list(low)} to {list(high)}"
            )
    raise InputError(
        f"{runner}: {'; '.join(outside)}; change the shape, or build the engine with a profile that contains it"
    )


def match_input_types(feeds: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Convert outputs to numpy arrays if every input was a numpy array.

    Returns:
        Output name -> numpy array or tensor.
    """
    if are_numpy_arrays(feeds):
        return {name: as_numpy(tensor) for name, tensor in outputs.items()}
    return dict(outputs)
