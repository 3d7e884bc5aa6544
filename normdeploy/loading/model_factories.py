"""Import and call the factory that the user names, ``package.module:factory``."""

from __future__ import annotations

import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError
from .size_conditions import OURS, TORCH
from .torch_pickles import describe_type, join_names

_SHOWN = 10
_STANDARD = sysconfig.get_paths()["stdlib"]
_FILLED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def make_model(model: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call the user's factory, ``package.module:factory``.

    Args:
        arguments: keyword arguments of the factory.

    Returns:
        The module that the factory returns.

    Raises:
        InputError: the factory can't be imported or called, or does not return a module.
    """
    module_name, separator, attribute = model.partition(":")
    if not separator or not attribute:
        raise InputError(
            f"the model {model!r} can't be read: write package.module:factory, for example models.encoder:Encoder"
        )
    if module_name.endswith(".py"):
        dotted = ".".join(Path(module_name.removesuffix(".py")).parts)
        raise InputError(
            f"the model {model!r} names a file, but an importable module is expected: write {dotted}:{attribute}"
        )
    factory = import_user_module(module_name, f"the model {model!r}")
    for name in attribute.split("."):
        if not hasattr(factory, name):
            public = [
                other for other in vars(factory) if not other.startswith("_") and callable(getattr(factory, other))
            ]
            raise InputError(f"{module_name} has no {attribute!r}; it has {join_names(public, _SHOWN)}")
        factory = getattr(factory, name)
    if not isinstance(arguments, Mapping):
        raise InputError(
            f"the arguments of {model} are a {describe_type(arguments)}; pass them by name, as in {{'size': 3}}"
        )
    require_factory_arguments(model, factory, arguments)  # type: ignore[arg-type]
    try:
        made = factory(**arguments)  # type: ignore[operator]
    # The user's code may even call exit.
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{model}({', '.join(f'{name}={value!r}' for name, value in arguments.items())}) failed: "
            f"{describe_user_error(error)}"
        ) from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"{model} returned {describe_type(made)}, not a torch.nn.Module: pass the class, or a function that "
            "returns the model"
        )
    return made


def describe_user_error(error: BaseException) -> str:
    """Describe an error of the user's own code.

    Returns:
        The error and the line that raised it, with advice for known causes.
    """
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} of {Path(error.filename or '').name} is not valid Python: {error.msg}"
    lines = traceback.extract_tb(error.__traceback__)
    last = next((line for line in reversed(lines) if _is_user_code(line.filename)), None)
    if last:
        where = f" (line {last.lineno} of {Path(last.filename).name})"
    else:
        where = ""
    if isinstance(error, SystemExit):
        return (
            f"it exits the process{where}, as sys.exit and argparse do: move the lines of a script below if __name__ "
            "== '__main__':"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"it imports {error.name!r}{where}, which can't be found: install it, or run in the folder that contains it"
        )
    if isinstance(error, ImportError) and "relative import" in str(error):
        return (
            f"it is part of a package and imports from it{where}: pass a file next to the package that imports the "
            "model, for example with the line `from package.module import Net`"
        )
    return f"{type(error).__name__}: {error}{where}"


def _is_user_code(file: str) -> bool:
    """Return whether the file belongs to the user or a package, not to Python, torch or normdeploy."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and not file.startswith((TORCH, OURS, "<frozen"))


def import_user_module(name: str, purpose: str) -> Any:
    """Import a module that the user named.

    Args:
        purpose: the option that names the module, for the message.

    Returns:
        The module.

    Raises:
        InputError: the module can't be imported.
    """
    try:
        return importlib.import_module(name)
    # The user's code runs at the import, and may even call exit.
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        told = f"module not found: {name}; check the name, or run in the folder that contains it"
        if absent:
            why = told
        else:
            why = describe_user_error(error)
        raise InputError(f"{purpose}: {name} can't be imported from {Path.cwd()}: {why}") from error


def require_factory_arguments(label: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit the signature of ``factory``; one message names all of them.

    Raises:
        InputError: arguments are missing or unknown.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        # Some callables written in C have no signature. The call itself checks their arguments.
        return
    parameters = signature.parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind in _FILLED}
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty} & known
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = sorted(required - arguments.keys())
    if takes_any:
        unknown = []
    else:
        unknown = sorted(arguments.keys() - known)
    problems = [
        f"{problem} {join_names([repr(name) for name in names], _SHOWN)}"
        for problem, names in (("it needs", missing), ("it does not accept", unknown))
        if names
    ]
    if problems:
        raise InputError(
            f"{label}{signature} can't be called: {', and '.join(problems)}; pass its arguments with --model-arg "
            "NAME=VALUE"
        )
