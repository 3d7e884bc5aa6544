"""Build the JSON Schema of ``fleet.toml``. Its tables contain the options of the verbs (`normdeploy.verb_options`).

``python -m docs.schemas`` writes it next to the reports' schemas; `normdeploy.fleet.fleet_schema` reads it.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal

from normdeploy.fleet.job_steps import ENGINES
from normdeploy.verb_options import LoadingOptions, Option, command_line_type, iter_options
from normdeploy.verbs.bench.bench_options import BenchOptions
from normdeploy.verbs.build.build_options import EngineOptions
from normdeploy.verbs.export.export_options import EveryPartOptions, ExportOptions
from normdeploy.verbs.optimize.optimize_options import OptimizeOptions
from normdeploy.verbs.package.package_options import PackageOptions
from normdeploy.verbs.verify.verify_options import StrictOption, VerifyOptions

VERBS: dict[str, tuple[type, ...]] = {
    "export": (EveryPartOptions, ExportOptions, OptimizeOptions),
    "verify": (VerifyOptions, StrictOption, LoadingOptions),
    "build": (EngineOptions,),
    "bench": (BenchOptions,),
    "package": (PackageOptions, LoadingOptions),
}
# Verb → options that ``fleet.toml`` does not accept: options that the fleet sets, and options that benchmark single
# norms.
_SET = {
    "export": {"no_simplify"},
    "build": {"library", "compute_capability", "timing_cache", "minShapes", "optShapes", "maxShapes"},
    "bench": {"norms", "norm_impl"},
    "package": {"engine", "report_from", "replace", "source", "name", "sign"},
}
_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]*$"


def schema(dialect: str) -> dict[str, Any]:
    """Build the schema of the whole file.

    Args:
        dialect: URL of the JSON Schema dialect.

    Returns:
        the schema.
    """
    tables = {verb: {"$ref": f"#/$defs/{verb}"} for verb in VERBS}
    limits = {
        "seconds": {"type": "number", "exclusiveMinimum": 0, "description": "the most that one step may take"},
        "memory": {"type": "string", "pattern": "^[0-9]+[KMGT]?$", "description": "a size such as 512M or 8G"},
    }
    steps = {
        "type": "array",
        "items": {"enum": ["verify", "bench", "package"]},
        "uniqueItems": True,
        "description": "what is done besides export and build; without it verify",
    }
    level = tables | limits | {"steps": steps}
    variant = dict(tables)
    target = {name: table for name, table in tables.items() if name != "export"} | {
        "runtime": {"enum": ["onnxruntime", *ENGINES]},
        "version": {"type": "string", "minLength": 1, "description": "of the runtime, a pattern such as 1.7.*"},
        "compute_capability": {
            "type": "string",
            "pattern": "^[0-9]+\\.[0-9]+$",
            "description": "a compute capability such as 8.9",
        },
        "bundle": {"type": "boolean", "description": "whether package makes a bundle of it; without it true"},
    }
    names = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 1}
    model = level | {
        "source": {
            "type": "string",
            "minLength": 1,
            "description": "a file, a Hugging Face folder, or a pattern of them",
        },
        "variants": names | {"description": "those of [variants] that it is made in; without it all"},
        "targets": names | {"description": "those of [targets] that it is made for; without it all"},
        "variant": _named(_table(variant, "what differs in one variant")),
    }
    return {
        "$schema": dialect,
        "$id": "urn:normdeploy:fleet:1",
        "title": "fleet.toml",
        **_table(
            {
                "store": {"type": "string", "minLength": 1},
                "defaults": _table(level, "of every model; variants, targets, models and their variants go before it"),
                "variants": _named(_table(variant, "a way to make a model")),
                "targets": _named(_table(target, "where it runs", ["runtime"])),
                "models": _named(_table(model, "a model, or several by a pattern", ["source"])),
            },
            "models, the variants in which they are made, and the targets that they are made for",
            ["models"],
        ),
        "$defs": {verb: _options(verb, groups) for verb, groups in VERBS.items()},
    }


def _table(properties: dict[str, Any], said: str, required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "description": said,
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


def _named(table: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"pattern": _NAME}, "additionalProperties": table, "minProperties": 1}


def _options(verb: str, groups: tuple[type, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for group in groups:
        for name, spelled, _ in iter_options(group):
            if spelled.toml_key not in _SET.get(verb, ()):
                schema = _of(command_line_type(group, name), spelled) | {"description": spelled.help}
                properties.setdefault(spelled.toml_key, schema)
    return _table(dict(sorted(properties.items())), f"options of normdeploy {verb}")


def _of(kind: Any, spelled: Option) -> dict[str, Any]:
    """Return the schema of a value."""
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _of(arguments[0], spelled)
    if typing.get_origin(kind) is list:
        # A list of one value may be written as this value alone.
        return {"type": ["array", "string"], "items": _of(arguments[0], spelled)}
    if typing.get_origin(kind) is Literal:
        return {"enum": list(arguments)}
    if kind is Path:
        return {"type": "string", "format": "path"}
    simple = {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]
    least = {} if spelled.minimum is None else {"minimum": spelled.minimum}
    return {"type": simple} | least
