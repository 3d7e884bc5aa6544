"""The JSON Schema of ``fleet.toml``: its tables, and in them the options of the verbs, read from the command line.

``python -m docs.schemas`` writes it beside the reports' schemas; `normdeploy.fleet.fields` reads it.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

import typer

from normdeploy.cli import bench, build, export, optimize, package, verbose, verify
from normdeploy.fleet.steps import ENGINES

VERBS = {
    "export": (export.export, optimize.optimize),
    "verify": (verify.verify,),
    "build": (build.build,),
    "bench": (bench.bench,),
    "package": (package.package,),
}
_SET = {  # by the fleet itself, or for people alone
    *("--output", "--report", "--html", "--quiet", "--verbose", "--no-extensions", "--compute-capability", "--engine"),
    *("--report-from", "--replace", "--source", "--name", "--timing-cache", "--sign"),
}
_LOADING = {"--model", "--model-arg", "--key", "--trust", "--import", "--input", "--dim", "--eval", "--task", "--part"}
_SET_OF = {"build": {"--runtime"}, "export": {"--no-simplify"}, "bench": {"--norms", "--norm-impl", *_LOADING}}
_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]*$"


def schema(dialect: str) -> dict[str, Any]:
    """The schema of the whole file."""
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
        "$defs": {verb: _options(verb, functions) for verb, functions in VERBS.items()},
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


def _options(verb: str, functions: tuple[Any, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for function in functions:
        for hint in typing.get_type_hints(verbose.logged(function), include_extras=True).values():
            found = _option(hint)
            if found is not None and found[0] not in _SET | _SET_OF.get(verb, set()):
                properties.setdefault(found[0].removeprefix("--").replace("-", "_"), found[1])
    return _table(dict(sorted(properties.items())), f"options of normdeploy {verb}")


def _option(hint: Any) -> tuple[str, dict[str, Any]] | None:
    """An option's name and the schema of its value; None where it is none."""
    if typing.get_origin(hint) is not typing.Annotated:
        return None
    kind, *marks = typing.get_args(hint)
    option = next((m for m in marks if isinstance(m, typer.models.OptionInfo)), None)
    if option is None:
        return None
    declared = (option.default, *(option.param_decls or ()))  # typer keeps the first of them as the default
    name = next((d for d in declared if isinstance(d, str) and d.startswith("--")), "")
    if not name:
        return None
    said = {} if not option.help else {"description": " ".join(inspect.cleandoc(option.help).split())}
    return name.split("/")[0], _of(kind, option) | said


def _of(kind: Any, option: Any) -> dict[str, Any]:
    arguments = [a for a in typing.get_args(kind) if a is not type(None)]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _of(arguments[0], option)
    if typing.get_origin(kind) is list:
        return {"type": ["array", "string"], "items": _of(arguments[0], option)}  # one alone needs no list
    if typing.get_origin(kind) is Literal:
        return {"enum": list(arguments)}
    if kind is Path:
        return {"type": "string", "format": "path"}
    simple = {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]
    least = {} if option.min is None else {"minimum": option.min}
    return {"type": simple} | least
