"""Make inputs of a module constant: they are part of the trace, and not inputs of the file.

An example is the number of patches of each image in a vision encoder. The encoder loops over these numbers, so a trace
can contain only one choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .input_request import InputConstant

# Number of values that a note shows.
_SHOWN = 12


def make_constant_tensors(constants: Mapping[str, InputConstant]) -> dict[str, torch.Tensor]:
    """Convert constants that the user stated to tensors.

    Returns:
        Input name -> tensor of the constant's dtype and shape.
    """
    return {
        name: torch.tensor(constant.values, dtype=getattr(torch, constant.dtype or "float32")).reshape(constant.shape)
        for name, constant in constants.items()
    }


def fix_inputs(module: nn.Module, constants: Mapping[str, Any]) -> None:
    """Give ``module`` a forward that passes ``constants`` to the old forward; ``module`` is changed in place.

    Args:
        constants: parameter of forward -> value. A caller may still pass another value for them.

    Raises:
        InputError: forward has no such parameter.
    """
    original = module.forward
    parameters = inspect.signature(original).parameters
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not is_open and (unknown := sorted(constants.keys() - parameters.keys())):
        raise InputError(
            f"the input {unknown[0]!r} has constant values, but it is not a parameter of {type(module).__name__}: "
            f"use one of {', '.join(parameters)}"
        )
    # A parameter behind a constant may have a value by keyword alone.
    free = [
        parameter.replace(kind=parameter.KEYWORD_ONLY) if place >= _first_place(parameters, constants) else parameter
        for place, (name, parameter) in enumerate(parameters.items())
        if name not in constants and parameter.kind is not parameter.VAR_KEYWORD
    ]
    free += [parameter for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    names = [parameter.name for parameter in free]

    def forward_with_constants(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return original(**{**constants, **given})

    forward_with_constants.__signature__ = inspect.Signature(free)  # type: ignore[attr-defined]
    module.forward = forward_with_constants


def _first_place(parameters: Mapping[str, Any], constants: Mapping[str, Any]) -> int:
    """Return the place of the first constant among the parameters."""
    places = [place for place, name in enumerate(parameters) if name in constants]
    return min(places, default=len(parameters))


def note_constants(constants: Mapping[str, torch.Tensor]) -> str:
    """Write the note for a user that inputs are constants of the file."""
    shown = ", ".join(f"{name}={_shorten(value)}" for name, value in constants.items())
    return (
        f"the file has no input for {shown}: these values are constants of the file. For others, export another file "
        "with --input 'NAME:DTYPE[SIZE,...]{VALUE,...}'"
    )


def _shorten(value: torch.Tensor) -> str:
    """Return the values as text, or dtype and shape if there are many."""
    if value.numel() <= _SHOWN:
        return str(value.tolist())
    return f"{value.numel()} values"
