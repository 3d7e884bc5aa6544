"""Check JSON against torch's export schema. torch itself does not check types: it would accept a string as a size."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema

from ..errors import LoadError


def require_schema(hint: Any, value: Any, where: str, path: Path) -> None:
    """Require that ``value`` has the types that torch's schema declares.

    Args:
        hint: type that the schema declares.
        where: name of the JSON entry, for messages.

    Raises:
        LoadError: a type differs. The message names the place in the JSON.
    """
    try:
        _require_type(hint, value, where)
    except (TypeError, RecursionError) as error:
        raise LoadError(
            f"{path}: {error}; the file is damaged, or was saved by a torch newer than {torch.__version__}"
        ) from error


def _require_type(hint: Any, value: Any, where: str) -> None:
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if isinstance(hint, str):
        hint = getattr(schema, hint)
    origin = typing.get_origin(hint)
    parameters = typing.get_args(hint)
    if origin is typing.Annotated:
        _require_type(parameters[0], value, where)
    elif origin in (typing.Union, types.UnionType):
        if value is not None:
            _require_type(next(p for p in parameters if p is not type(None)), value, where)
    elif origin is list:
        for index, item in enumerate(_require_instance(list, value, where)):
            _require_type(parameters[0], item, f"{where}[{index}]")
    elif origin is dict:
        for key, item in _require_instance(dict, value, where).items():
            _require_type(parameters[1], item, f"{where}.{key}")
    elif dataclasses.is_dataclass(hint):
        _require_fields(hint, _require_instance(dict, value, where), where)
    elif hint is float:
        if value not in ("Infinity", "-Infinity", "NaN"):
            _require_instance((int, float), value, where)
    elif isinstance(hint, type):
        _require_instance(int if issubclass(hint, enum.IntEnum) else hint, value, where)
    else:
        raise TypeError(f"{where} has an unknown type {hint}")


@functools.cache
def _schema_type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, globalns=vars(schema))


def _require_fields(hint: Any, value: dict[str, Any], where: str) -> None:
    hints = _schema_type_hints(hint)
    if issubclass(hint, schema._Union) and (len(value) != 1 or next(iter(value)) not in hints):
        raise TypeError(f"{where} must hold one of {', '.join(hints)}, not {', '.join(value) or 'nothing'}")
    for name, item in value.items():
        if name in hints:
            _require_type(hints[name], item, f"{where}.{name}")


def _require_instance(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        names = " or ".join(t.__name__ for t in (wanted if isinstance(wanted, tuple) else (wanted,)))
        raise TypeError(f"{where} is {value!r:.60}, but {names} is expected")
    return value
