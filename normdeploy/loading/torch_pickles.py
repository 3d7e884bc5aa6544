"""Read files of torch.save. Weights are data, and they are read without running code. Anything else in a pickle counts
as code.

A pickle is a program for a small stack machine: its GLOBAL instructions import, and its REDUCE instructions call.
torch's weights_only reader allows only a fixed list of globals, which is enough for tensors in dicts and lists.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from ..errors import LoadError, TrustError
from .file_kinds import FileKind, archive_root, open_torch_archive, read_entry
from .pickle_entries import find_foreign_entries

# Number of pickles in a file of the legacy format: magic number, version, system, object, storage keys.
_PICKLES = 5
# Prefix of names that were defined in a notebook or in the running script.
_OF_A_SCRIPT = "__main__."
_LOST = re.compile(r"Can't get attribute '(?P<name>[^']+)' on <module '(?P<module>[^']+)'")
# Matches the globals of an ordinary state_dict. The message of a refusal omits these names, so that it shows only the
# unusual names.
_ORDINARY = re.compile(r"collections\.OrderedDict|torch(\.\w+)*\.(_rebuild_\w+|\w*Storage|Size|dtype|device)")
# Containers of training options. They hold attributes and run no code of their own when they are unpickled.
_PLAIN_DATA = (argparse.Namespace, SimpleNamespace)
_PLAIN_NAMES = frozenset(f"{cls.__module__}.{cls.__qualname__}" for cls in _PLAIN_DATA)


def unpickle_data(path: Path, kind: FileKind) -> Any:
    """Read a torch.save file as data: CPU tensors in dicts and lists, and training options in a namespace.

    Nothing is imported or called.

    Returns:
        The saved object.

    Raises:
        TrustError: unpickling would import more than tensors need. The message names the imports.
        LoadError: the file is broken, or needs classes of the script that saved it.
    """
    try:
        with torch.serialization.safe_globals([*_PLAIN_DATA]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = _find_file_globals(path, kind)
        # If no foreign global is found, the pickle itself is broken.
        if not named:
            raise LoadError(
                f"{path} can't be read as weights: {first_line(error)}; it is broken: copy or save it again"
            ) from error
        lost = [name.removeprefix(_OF_A_SCRIPT) for name in named if name.startswith(_OF_A_SCRIPT)]
        if lost and not all(hasattr(sys.modules["__main__"], name.partition(".")[0]) for name in lost):
            # Trust would not help, because the class can't be found.
            raise LoadError(_describe_script_globals(path, lost)) from error
        raise TrustError(
            f"{path} is not loaded: it is a pickle that contains more than tensors{_describe_entries(path, kind)}, and"
            f" unpickling would import and may call {join_names(named)}. If you trust its author, pass"
            " --trust-remote-code; a file with only weights (torch.save(model.state_dict(), ...), with --model) or a"
            " program (torch.export.save) is safer"
        ) from error
    except Exception as error:
        # torch's errors for a broken file have no common base class: RuntimeError, EOFError, ValueError, and others.
        raise LoadError(
            f"{path} can't be read: {first_line(error)}; it is truncated or broken: copy or save it again"
        ) from error


def _describe_entries(path: Path, kind: FileKind) -> str:
    """Name the entries of a checkpoint that hold more than tensors; "" if they are unknown."""
    if kind is FileKind.LEGACY_PICKLE:
        return ""
    entries = find_foreign_entries(_read_main_pickle(path), lambda name: not _is_data(name))
    if not entries:
        return ""
    return f" in its {'entry' if len(entries) == 1 else 'entries'} {join_names([repr(e) for e in entries], 3)}"


def _is_data(name: str) -> bool:
    """Return True for a global that tensors need, or that holds training options."""
    return _ORDINARY.fullmatch(name) is not None or name in _PLAIN_NAMES


def _describe_script_globals(path: Path, names: Sequence[str]) -> str:
    return (
        f"{path} contains objects of classes defined in the notebook or script that saved it ({join_names(names)}), "
        "and no other process can find them: save the weights there, torch.save(model.state_dict(), 'weights.pt'), "
        "put the model's class into a file, net.py, and pass weights.pt with --model net:CLASS; or save the program "
        "with torch.export.save"
    )


def unpickle_fully(path: Path) -> Any:
    """Unpickle a torch.save file in full, which runs any code in the pickle.

    Returns:
        The saved object.

    Raises:
        LoadError: a class can't be imported, or the code of a class fails.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{path} contains a whole model whose class is in the module {error.name!r}, which can't be imported "
            "here: run in the folder that contains it, or pass --import with the module that defines the class"
        ) from error
    except AttributeError as error:
        lost = _LOST.search(str(error))
        if lost:
            what = f"an object of {lost['module']}.{lost['name']}, which that module"
        else:
            what = "a class that its module"
        raise LoadError(
            f"{path} contains {what} does not define here{'' if lost else f' ({first_line(error)})'}: run with the "
            "code that saved it, or save the state_dict there and pass it with --model"
        ) from error
    except Exception as error:
        raise LoadError(f"{path} can't be unpickled: {type(error).__name__}: {first_line(error)}") from error


def _find_file_globals(path: Path, kind: FileKind) -> list[str]:
    """Find the names that unpickling would import beyond those that ``unpickle_data`` allows."""
    if kind is FileKind.LEGACY_PICKLE:
        with path.open("rb") as stream:
            return [name for name in find_pickle_globals(stream) if not _is_data(name)]
    return [name for name in find_pickle_globals(io.BytesIO(_read_main_pickle(path))) if not _is_data(name)]


def _read_main_pickle(path: Path) -> bytes:
    with open_torch_archive(path) as archive:
        return read_entry(archive, f"{archive_root(archive)}/data.pkl", path)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first nonempty line of an error's message.

    Returns:
        The line; if all are empty, ``otherwise`` or the name of the error's type.
    """
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__ if otherwise is None else otherwise)


def find_foreign_globals(stream: IO[bytes]) -> list[str]:
    """Find the names that unpickling would import, without those that tensors need. Nothing is executed.

    Returns:
        Dotted names.
    """
    return [name for name in find_pickle_globals(stream) if not _ORDINARY.fullmatch(name)]


def join_names(names: Sequence[str], shown: int = 12) -> str:
    """Join names for a message.

    Returns:
        The first ``shown`` names and the number of the others.
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def describe_type(value: Any) -> str:
    """Name the type of a value for a message, with the length of a dict.

    Returns:
        "a dict of 3" or the qualified name of the type.
    """
    if isinstance(value, Mapping):
        return f"a dict of {len(value)}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def find_pickle_globals(stream: IO[bytes]) -> list[str]:
    """Find the names in the GLOBAL instructions of a series of pickles. A broken end of the series is ignored.

    Returns:
        Dotted names in order of first use.
    """
    names: dict[str, None] = {}
    try:
        for _ in range(_PICKLES):
            _collect_globals(stream, names)
    except Exception:
        # pickletools raises ValueError, UnicodeDecodeError and other errors for invalid bytes. The names found so far
        # are returned.
        pass
    return list(names)


def _collect_globals(stream: IO[bytes], names: dict[str, None]) -> None:
    # Strings that were pushed on the stack: STACK_GLOBAL takes its module and name from the stack.
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "GLOBAL" | "INST":
                names[str(argument).replace(" ", ".", 1)] = None
            case "STACK_GLOBAL":
                names[".".join(strings[-2:])] = None
            case "MEMOIZE":
                memo[len(memo)] = strings[-1] if strings else "?"
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[int(str(argument))] = strings[-1] if strings else "?"
            case "BINGET" | "LONG_BINGET" | "GET":
                strings.append(memo.get(int(str(argument)), "?"))
            case _ if isinstance(argument, str):
                strings.append(argument)
