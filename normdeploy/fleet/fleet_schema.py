"""Load the JSON Schema of ``fleet.toml``, which is generated from the verbs' own options (``docs/fleet_schema.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

Values = Mapping[str, Any]
VERBS = ("export", "verify", "build", "bench", "package")
# Targets of a fleet file that names no targets.
ANY_TARGET = {"onnxruntime": {"runtime": "onnxruntime"}}


@cache
def fleet_json_schema() -> dict[str, Any]:
    """Load the JSON Schema of fleet.toml.

    Returns:
        the schema.
    """
    text = resources.files("normdeploy.reports").joinpath("schemas/fleet.json").read_text(encoding="utf-8")
    told: dict[str, Any] = json.loads(text)
    return told


def is_file_option(verb: str, option: str) -> bool:
    """Return True if the option's value is a path, or a list of paths.

    Returns:
        False for unknown options.
    """
    told = fleet_json_schema()["$defs"][verb]["properties"].get(option, {})
    return told.get("items", told).get("format") == "path"
