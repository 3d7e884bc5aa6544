"""Files of torch.save: weights are data and are read as such; whatever needs more than that is code.

A pickle is a program for a small stack machine whose GLOBAL instructions import and whose REDUCE instructions call.
torch's weights_only reader runs it with a fixed list of globals, enough for tensors in dicts and lists.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import LoadError, TrustError
from .file_kinds import FileKind, archive_root, open_torch_archive, read_entry

# the legacy format is a row of five: magic number, version, system, object, storage keys
_PICKLES = 5
# How pickles name what is defined in a notebook or in the script that runs.
_OF_A_SCRIPT = "__main__."
_LOST = re.compile(r"Can't get attribute '(?P<name>[^']+)' on <module '(?P<module>[^']+)'")
# What an ordinary state_dict names; left out of refusals, so that the reader sees what is special.
_ORDINARY = re.compile(r"collections\.OrderedDict|torch(\.\w+)*\.(_rebuild_\w+|\w*Storage|Size|dtype|device)")


def unpickle_data(path: Path, kind: FileKind) -> Any:
    """What torch.save wrote, read as data: tensors, on the CPU, in dicts and lists. Nothing is imported or called.

    Raises:
        TrustError: unpickling would import more than tensors need; the message names it.
        LoadError: the file is broken.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = _find_file_globals(path, kind)
        # nothing foreign is asked for: the pickle itself is broken
        if not named:
            raise LoadError(
                f"{path} can't be read as weights: {first_line(error)}; it is broken: copy or save it again"
            ) from error
        lost = [name.removeprefix(_OF_A_SCRIPT) for name in named if name.startswith(_OF_A_SCRIPT)]
        if lost and not all(hasattr(sys.modules["__main__"], name.partition(".")[0]) for name in lost):
            # Trust would not help: the class is found nowhere.
            raise LoadError(_describe_script_globals(path, lost)) from error
        raise TrustError(
            f"{path} is not loaded: it is a pickle with more than tensors in it, and unpickling would import and may"
            f" call {join_names(named)}. If you trust who made the file, pass --trust; safer is a file of weights alone"
            " (torch.save(model.state_dict(), ...), with --model), or a program (torch.export.save)"
        ) from error
    except Exception as error:
        # RuntimeError, EOFError, ValueError, ...: torch names no common class for a broken file
        raise LoadError(
            f"{path} can't be read: {first_line(error)}; it is truncated or broken: copy or save it again"
        ) from error


def _describe_script_globals(path: Path, names: Sequence[str]) -> str:
    return (
        f"{path} holds objects of classes that were defined in the notebook or script that saved it "
        f"({join_names(names)}),"
        " and no other process finds them: save the weights there, torch.save(model.state_dict(), 'weights.pt'), put"
        " the model's class into a file, net.py, and give weights.pt with --model net:CLASS; or save the program with"
        " torch.export.save"
    )


def unpickle_fully(path: Path) -> Any:
    """What torch.save wrote, in full: this runs whatever the pickle says.

    Raises:
        LoadError: a class that it names is not importable, or its code fails.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise LoadError(
            f"{path} holds a whole model whose class is in the module {error.name!r}, which can't be imported here: run"
            " in the folder that has it, or pass --import with the module that defines the class"
        ) from error
    except AttributeError as error:
        lost = _LOST.search(str(error))
        if lost:
            what = f"an object of {lost['module']}.{lost['name']}, which that module"
        else:
            what = "a class that its module"
        raise LoadError(
            f"{path} holds {what} does not define here{'' if lost else f' ({first_line(error)})'}: run with the code"
            " that saved it, or save the state_dict there and give it with --model"
        ) from error
    except Exception as error:
        raise LoadError(f"{path} can't be unpickled: {type(error).__name__}: {first_line(error)}") from error


def _find_file_globals(path: Path, kind: FileKind) -> list[str]:
    if kind is FileKind.LEGACY_PICKLE:
        with path.open("rb") as stream:
            return find_foreign_globals(stream)
    with open_torch_archive(path) as archive:
        return find_foreign_globals(io.BytesIO(read_entry(archive, f"{archive_root(archive)}/data.pkl", path)))


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """Return the first line of an error that is not empty; ``otherwise``, or the name of its type, where none is."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    return next(lines, type(error).__name__ if otherwise is None else otherwise)


def find_foreign_globals(stream: IO[bytes]) -> list[str]:
    """What unpickling would import beyond what tensors need; nothing is executed."""
    return [name for name in find_pickle_globals(stream) if not _ORDINARY.fullmatch(name)]


def join_names(names: Sequence[str], shown: int = 12) -> str:
    """Names in a message: the first of them, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def describe_type(value: Any) -> str:
    """Name the type of a value for a message, with the length of a dict."""
    if isinstance(value, Mapping):
        return f"a dict of {len(value)}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def find_pickle_globals(stream: IO[bytes]) -> list[str]:
    """The dotted names of the GLOBAL instructions in a row of pickles, in order of first use; a broken tail is left
    out."""
    names: dict[str, None] = {}
    try:
        for _ in range(_PICKLES):
            _collect_globals(stream, names)
    except Exception:
        # pickletools raises ValueError, UnicodeDecodeError, ... on junk; what was found until then counts
        pass
    return list(names)


def _collect_globals(stream: IO[bytes], names: dict[str, None]) -> None:
    # those pushed lately: STACK_GLOBAL takes its module and name from the stack
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
