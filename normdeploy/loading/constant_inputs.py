"""Make inputs of a module constant: they are part of the trace, and not inputs of the file.

An example is the number of patches of each image in a vision encoder. The encoder loops over these numbers, so a trace
can contain only one choice.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Mapping, Sequence
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

    A copy of the module calls its own forward, because ``copy.deepcopy`` binds a method to the copy.

    Args:
        constants: parameter of forward -> value. A caller may still pass another value for them.

    Raises:
        InputError: forward has no such parameter, or it has parameters that take no name.
    """
    original = module.forward
    parameters = inspect.signature(original).parameters
    _require_named_parameters(module, parameters, constants)
    # A caller of the old forward can't pass a parameter behind a constant by position.
    places = [place for place, name in enumerate(parameters) if name in constants]
    first = min(places, default=len(parameters))
    free = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        if place > first and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for place, (name, parameter) in enumerate(parameters.items())
        if name not in constants
    ]
    names = [parameter.name for parameter in free]
    own = original.__func__ if inspect.ismethod(original) and original.__self__ is module else None

    def forward_with_constants(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**constants, **dict(zip(names, args, strict=False)), **kwargs}
        return original(**given) if own is None else own(self, **given)

    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward_with_constants.__signature__ = inspect.Signature([owner, *free])  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward_with_constants, module)


def name_free_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Collection[str]
) -> dict[str, Any]:
    """Name example arguments that are passed by position, in the order of the parameters without the constants.

    Returns:
        Parameter -> value.

    Raises:
        InputError: there are more arguments than parameters, or an argument is a constant or is passed twice.
    """
    parameters = inspect.signature(module.forward).parameters
    names = [name for name, p in parameters.items() if name not in constants and p.kind is not p.VAR_KEYWORD]
    if len(args) > len(names):
        raise InputError(
            f"{len(args)} example arguments were passed, but without {', '.join(sorted(constants))} the forward of"
            f" {type(module).__name__} has the parameters {', '.join(names) or 'none'}"
        )
    named = dict(zip(names, args, strict=False))
    if twice := sorted((named.keys() | constants) & kwargs.keys()):
        raise InputError(f"the input {twice[0]!r} is passed twice, also as an example argument: pass it once")
    return {**named, **kwargs}


def _require_named_parameters(module: nn.Module, parameters: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    name = type(module).__name__
    is_open = inspect.Parameter.VAR_KEYWORD in kinds.values()
    if not is_open and (unknown := sorted(constants.keys() - parameters.keys())):
        raise InputError(
            f"the input {unknown[0]!r} has constant values, but it is not a parameter of {name}: "
            f"use one of {', '.join(parameters)}"
        )
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if found := [each for each, kind in kinds.items() if kind in unnamed]:
        raise InputError(
            f"the input {next(iter(constants))!r} has constant values, but the parameter {found[0]!r} of {name} can't "
            "be passed by name: give forward named parameters alone"
        )


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
