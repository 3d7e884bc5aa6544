"""What a ``fleet.toml`` may hold: its JSON Schema, made of the verbs' own options (``docs/fleet_schema.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

Values = Mapping[str, Any]
VERBS = ("export", "verify", "build", "bench", "package")
# of a file that names no targets
ANY_TARGET = {"onnxruntime": {"runtime": "onnxruntime"}}


@cache
def fleet_json_schema() -> dict[str, Any]:
    """The file's JSON Schema."""
    text = resources.files("normdeploy.reports").joinpath("schemas/fleet.json").read_text(encoding="utf-8")
    told: dict[str, Any] = json.loads(text)
    return told


def is_file_option(verb: str, option: str) -> bool:
    """Is the option's value the path of a file, or several?"""
    told = fleet_json_schema()["$defs"][verb]["properties"].get(option, {})
    return told.get("items", told).get("format") == "path"
