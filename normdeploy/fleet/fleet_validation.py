"""Validate a ``fleet.toml`` against its schema, and check that the names and files in it exist."""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, RuntimeUnavailable
from ..zoo_sources import parse_zoo_source
from .fleet_schema import ANY_TARGET, VERBS, Values, fleet_json_schema, is_file_option
from .source_patterns import MOST_SEEN, TooManyFiles, expand_pattern
from .toml_lines import line_of_key

# Maximum number of files and folders that one pattern may find.
_MOST_FOUND = 10_000


@dataclass(frozen=True)
class FleetModel:
    """One model of a fleet. ``told`` is the model's table in the file. The last part of ``source`` may be the name of a
    package's model, ``timm:resnet50``.
    """

    name: str
    source: Path
    told: Values


@dataclass(frozen=True)
class ValidatedFile:
    """Fleet file and its content. The methods raise InputError, whose message names the line of the error."""

    file: Path
    text: str
    told: Values

    def check_schema(self) -> None:
        """Check the file against its JSON Schema."""
        try:
            from jsonschema import Draft202012Validator
        except ImportError as error:
            raise RuntimeUnavailable(
                "jsonschema, which checks fleet.toml, is not installed; pip install 'normdeploy[fleet]'"
            ) from error
        errors = sorted(
            Draft202012Validator(fleet_json_schema()).iter_errors(self.told), key=lambda e: [str(p) for p in e.path]
        )
        if errors:
            told = [self._describe_schema_error(error) for error in errors[:10]]
            if len(errors) > 10:
                more = [f"and {len(errors) - 10} more"]
            else:
                more = []
            raise InputError("\n  ".join([*told, *more]))

    def check_references(self) -> None:
        """Check rules that the schema can't express: names and files must exist, and engines need compute
        capabilities.
        """
        variants = self.told.get("variants") or {"default": {}}
        targets = self.told.get("targets") or ANY_TARGET
        for name, target in targets.items():
            if target["runtime"] != "onnxruntime" and "compute_capability" not in target:
                self._add_error(
                    ("targets", name),
                    f"an engine of {target['runtime']} works only on one compute capability; add "
                    'compute_capability, for example "8.9"',
                )
            if target["runtime"] == "onnxruntime" and "compute_capability" in target:
                self._add_error(
                    ("targets", name, "compute_capability"),
                    "compute_capability does not apply to onnxruntime, which runs the ONNX file; remove it",
                )
        for name, model in self.told["models"].items():
            for kind, known in (("variants", variants), ("targets", targets)):
                for wanted in model.get(kind, ()):
                    if wanted not in known:
                        self._add_error(
                            ("models", name, kind), _describe_unknown_name(f"[{kind}.{wanted}]", wanted, known)
                        )
            for wanted in model.get("variant", {}):
                if wanted not in model.get("variants", variants):
                    self._add_error(
                        ("models", name, "variant", wanted),
                        _describe_unknown_name(
                            f"variant {wanted!r} of this model", wanted, model.get("variants", variants)
                        ),
                    )
        for path, verb, options in self._iter_tables():
            if options.get("part") == "all":
                self._add_error(
                    (*path, verb, "part"), 'a job makes one file, so part can\'t be "all"; add one model per part'
                )
            for option, value in options.items():
                for one in value if isinstance(value, list) and is_file_option(verb, option) else [value]:
                    if is_file_option(verb, option) and not (self.file.parent / one).exists():
                        self._add_error((*path, verb, option), f"file not found: {one!r}, relative to {self.file.name}")

    def _find_sources(self, name: str, source: str, folder: Path) -> list[Path]:
        """Find the sources of a pattern.

        Each further ``**`` would multiply the number of visited folders, so only one ``**`` is allowed.
        """
        if source.count("**") > 1:
            self._add_error(
                ("models", name, "source"), f"the pattern {source!r} contains ** more than once; use it once"
            )
        try:
            found = list(itertools.islice(expand_pattern(source, folder), _MOST_FOUND + 1))
        except TooManyFiles:
            self._add_error(
                ("models", name, "source"),
                f"the pattern {source!r} scans more than {MOST_SEEN} files and folders; use a narrower one",
            )
        if len(found) > _MOST_FOUND:
            self._add_error(
                ("models", name, "source"),
                f"the pattern {source!r} matches more than {_MOST_FOUND} files and folders; use a narrower one",
            )
        return sorted(found)

    def iter_models(self) -> Iterator[FleetModel]:
        """Yield the models: one for each file or folder that a pattern finds."""
        for name, told in self.told["models"].items():
            source = told["source"]
            folder = self.file.parent
            if not glob.has_magic(source):
                path = folder / source
                if not path.exists() and parse_zoo_source(source) is None:
                    self._add_error(
                        ("models", name, "source"), f"model not found: {source!r}, relative to {self.file.name}"
                    )
                yield FleetModel(name, Path(os.path.abspath(path)), told)
                continue
            found = self._find_sources(name, source, folder)
            if not found:
                self._add_error(
                    ("models", name, "source"), f"the pattern {source!r} matches no file, relative to {self.file.name}"
                )
            names: dict[str, Path] = {}
            for path in found:
                stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
                if stem in names:
                    self._add_error(
                        ("models", name, "source"),
                        f"{names[stem].name!r} and {path.name!r} would both be {name}.{stem}; add one of them as "
                        "its own model",
                    )
                names[stem] = path
                yield FleetModel(f"{name}.{stem}", path, told)

    def _iter_tables(self) -> Iterator[tuple[tuple[str, ...], str, Values]]:
        levels: list[tuple[tuple[str, ...], Values]] = [(("defaults",), self.told.get("defaults", {}))]
        for kind in ("variants", "targets", "models"):
            levels += [((kind, name), told) for name, told in self.told.get(kind, {}).items()]
        for name, told in self.told["models"].items():
            levels += [(("models", name, "variant", v), t) for v, t in told.get("variant", {}).items()]
        for path, level in levels:
            yield from ((path, verb, level[verb]) for verb in VERBS if verb in level)

    def _describe_schema_error(self, error: Any) -> str:
        path = list(error.absolute_path)
        where = ".".join(str(p) for p in path) or "the file"
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            unknown = sorted(set(error.instance) - set(known))
            path.append(unknown[0])
            return self._format_error(path, f"{where}: {_describe_unknown_name(repr(unknown[0]), unknown[0], known)}")
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return self._format_error(path, f"{where}: {missing[0]!r} is missing")
        if "propertyNames" in error.absolute_schema_path:
            return self._format_error(
                path, f"{where}: the name {error.instance!r} may contain only letters, digits, '.', '_' and '-'"
            )
        if error.validator == "pattern":
            return self._format_error(path, f"{where} is {error.instance!r}; expected {error.schema['description']}")
        if error.validator == "enum":
            return self._format_error(
                path, f"{where} is {error.instance!r}; expected one of {', '.join(map(repr, error.validator_value))}"
            )
        if error.validator == "type":
            if isinstance(error.validator_value, list):
                kinds = error.validator_value
            else:
                kinds = [error.validator_value]
            return self._format_error(
                path, f"{where} is {error.instance!r}; expected {' or '.join(_TYPES[k] for k in kinds)}"
            )
        return self._format_error(path, f"{where}: {error.message}")

    def _add_error(self, path: Sequence[str | int], message: str) -> None:
        raise InputError(self._format_error(path, f"{'.'.join(map(str, path))}: {message}"))

    def _format_error(self, path: Sequence[str | int], message: str) -> str:
        return f"{self.file.name}, line {line_of_key(self.text, list(path))}: {message}"


_TYPES = {
    **{"string": "a string in quotes", "integer": "an integer", "number": "a number", "boolean": "true or false"},
    **{"array": "a list in brackets", "object": "a table"},
}


def _describe_unknown_name(what: str, name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"unknown {what}; " + (
        f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(known) or 'none'}"
    )
