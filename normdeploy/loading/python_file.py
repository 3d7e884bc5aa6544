"""Load a model from the Python file that defines it: ``my_model.py:Net``, or ``my_model.py`` if the file defines only
one model.

By naming the file, the user requests that its code runs, as with ``--model``. So ``--trust-remote-code`` is not needed:
that option is for code inside other kinds of files.
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

from torch import nn

from ..errors import InputError, LoadError
from .model_factories import describe_user_error, require_factory_arguments
from .torch_pickles import join_names
from .torch_state import seed_torch

_SOURCE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[A-Za-z_][\w.]*))?")
_SHOWN = 10


@dataclass(frozen=True)
class PythonFile:
    """Python file with a model.

    Attributes:
        name: name of a class, of a function that returns a module, or of a module; "" to take the only model of the
            file.
    """

    path: Path
    name: str


def parse_python_source(source: str | Path) -> PythonFile | None:
    """Parse ``my_model.py:Net`` or ``my_model.py``.

    Returns:
        File and name; None for any other source.

    Raises:
        LoadError: the file does not exist.
    """
    match = _SOURCE.fullmatch(str(source))
    if match is None or Path(source).is_dir():
        return None
    path = Path(match["file"])
    if not path.is_file():
        raise LoadError(f"file not found: {path}; check the path (relative to {Path.cwd()})")
    return PythonFile(path, match["name"] or "")


def make_from_file(source: PythonFile, arguments: Mapping[str, Any]) -> nn.Module:
    """Run the file and make its model. torch's seed is set to 0, because the file may draw its weights at random.

    The file may import modules from its own folder, as a script does.

    Args:
        arguments: keyword arguments of the class or function.

    Returns:
        The module. It is switched to eval mode if all of its parts are in training mode.

    Raises:
        InputError: the file or the class fails, or the module is missing or ambiguous.
    """
    with seed_torch(), import_from_folder(source.path.resolve().parent):
        made = _make_named_model(source, _execute_file(source.path), arguments)
    if all(part.training for part in made.modules()):
        # Training mode is only the default of modules: neither the file nor the user has set a mode.
        made.eval()
    return made


@contextlib.contextmanager
def import_from_folder(folder: Path | None) -> Iterator[None]:
    """Make the modules in ``folder`` importable within the context.

    Args:
        folder: folder with the modules; None for no folder.
    """
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
    # Register the module, because dataclasses and torch.export look up a class's module by its name.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    # The user's own code may also end the process.
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
        raise InputError(f"{label} is {type(factory).__name__}; pass a torch.nn.Module, or a function that returns one")
    require_factory_arguments(label, factory, arguments)
    try:
        made = factory(**arguments)
    # The user's own code may also end the process.
    except (Exception, SystemExit) as error:
        raise InputError(f"{label} failed: {describe_user_error(error)}") from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"{label} returned {type(made).__name__}, not a torch.nn.Module; pass a function that returns one"
        )
    return made


def _module_names(held: Mapping[str, Any]) -> list[str]:
    """Return the names of the module classes that the file defines and of the modules that it makes."""
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
        raise InputError(f"{path} defines no torch.nn.Module; pass a function that returns one, {path}:FUNCTION")
    if len(names) > 1:
        choices = join_names([f"{path}:{name}" for name in names], _SHOWN)
        raise InputError(f"{path} defines {len(names)} modules; choose one: {choices}")
    return names[0]
