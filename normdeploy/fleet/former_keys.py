"""Rename former keys of ``fleet.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError
from .fleet_schema import VERBS, Values

# Former key of a verb's table -> present key.
_RENAMED = {"trust": "trust_remote_code"}


def rename_former_keys(told: Values) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rename former keys in the tables of the verbs.

    Args:
        told: the file as parsed TOML. It is not checked yet and not changed.

    Returns:
        the file with present keys, and notes.

    Raises:
        InputError: a table has a key under both names.
    """
    renamed = _copy_tables(told)
    notes = dict[str, None]()
    for table in _iter_verb_tables(renamed):
        for former, present in _RENAMED.items():
            if former not in table:
                continue
            if present in table:
                raise InputError(f"{former} and {present} are the same key; write only {present}")
            table[present] = table.pop(former)
            notes[f"the key {former} is now {present}"] = None
    return renamed, tuple(notes)


def _copy_tables(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy_tables(inner) for key, inner in value.items()}
    return value


def _iter_verb_tables(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each table of a verb's options."""
    levels = [told.get("defaults")]
    for kind in ("variants", "targets", "models"):
        levels += _inner_tables(told.get(kind))
    for model in _inner_tables(told.get("models")):
        levels += _inner_tables(model.get("variant"))
    for level in levels:
        if isinstance(level, dict):
            yield from (level[verb] for verb in VERBS if isinstance(level.get(verb), dict))


def _inner_tables(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        return []
    return [table for table in value.values() if isinstance(table, dict)]
