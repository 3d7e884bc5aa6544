"""A model named by the Python file that defines it: ``my_model.py:Net``, or ``my_model.py`` where it holds one alone.

Who names the file asks for its code to run, as with ``--model``; ``--trust`` is for what other files bring along.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, LoadError
from .model_factories import describe_user_error, require_factory_arguments
from .torch_pickles import join_names

_SOURCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[A-Za-z_][\w.]*))?")
_SHOWN = 10


@dataclass(frozen=True)
class PythonFile:
    """``name``: of a class, a function that returns a module, or a module; "" where the file holds one alone."""

    path: Path
    name: str


def parse_python_source(source: str | Path) -> PythonFile | None:
    """Read ``my_model.py:Net`` and ``my_model.py``; None of any other source.

    Raises:
        LoadError: there is no such file.
    """
    match = _SOURCE.fullmatch(str(source))
    if match is None or Path(source).is_dir():
        return None
    path = Path(match["file"])
    if not path.is_file():
        raise LoadError(f"there is no file {path}: check the path (seen from {Path.cwd()})")
    return PythonFile(path, match["name"] or "")


def make_from_file(source: PythonFile, arguments: Mapping[str, Any]) -> nn.Module:
    """Run the file and make its model, with the random numbers of seed 0 where the file draws its weights.

    The file may import what lies beside it, as a script does.

    Args:
        arguments: of the class or function.

    Raises:
        InputError: the file or the class fails, or it does not hold the one module that is meant.
    """
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        with import_from_folder(source.path.resolve().parent):
            made = _make_named_model(source, _execute_file(source.path), arguments)
    finally:
        torch.set_rng_state(state)
    if all(part.training for part in made.modules()):
        # As constructed: nobody said anything of a mode.
        made.eval()
    return made


@contextlib.contextmanager
def import_from_folder(folder: Path | None) -> Iterator[None]:
    """Let the modules in ``folder`` be imported within it; None: no others than before."""
    saved = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = saved


def _execute_file(path: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    # Dataclasses and torch.export look a class's module up by its name.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    # The user's own code, which may end the process too.
    except (Exception, SystemExit) as error:
        raise InputError(f"{path} can't be run: {describe_user_error(error)}") from error
    finally:
        if known is not None:
            sys.modules[path.stem] = known
    return vars(module)


def _make_named_model(source: PythonFile, held: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    name = source.name or _require_only_module(source.path, held)
    item: Any = held.get(name.partition(".")[0])
    for part in name.split(".")[1:]:
        item = getattr(item, part, None)
    if item is None:
        modules = ", ".join(f"{source.path}:{other}" for other in _module_names(held))
        raise InputError(f"{source.path} has no {name!r}; its modules are {modules or 'none'}")
    if not isinstance(item, nn.Module):
        item = _call_factory(f"{source.path}:{name}", item, arguments)
    return item


def _call_factory(label: str, factory: Any, arguments: Mapping[str, Any]) -> nn.Module:
    if not callable(factory):
        raise InputError(f"{label} is {type(factory).__name__}; name a torch.nn.Module, or a function that returns one")
    require_factory_arguments(label, factory, arguments)
    try:
        made = factory(**arguments)
    # The user's own code, which may end the process too.
    except (Exception, SystemExit) as error:
        raise InputError(f"{label} failed: {describe_user_error(error)}") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{label} returned {type(made).__name__}, not a torch.nn.Module; name a function that does")
    return made


def _module_names(held: Mapping[str, Any]) -> list[str]:
    """Return the names of the module classes that the file defines, and of the modules that it makes."""
    own = held["__name__"]
    return [
        name
        for name, item in held.items()
        if isinstance(item, nn.Module)
        or (isinstance(item, type) and issubclass(item, nn.Module) and item.__module__ == own)
    ]


def _require_only_module(path: Path, held: Mapping[str, Any]) -> str:
    names = _module_names(held)
    if not names:
        raise InputError(f"{path} holds no torch.nn.Module; name a function that returns one, {path}:FUNCTION")
    if len(names) > 1:
        choices = join_names([f"{path}:{name}" for name in names], _SHOWN)
        raise InputError(f"{path} holds {len(names)} modules; say which: {choices}")
    return names[0]
