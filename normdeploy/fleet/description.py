"""``fleet.toml``: which models, in which variants, for which targets, checked as a whole before any work.

The tables of options are those of the verbs' command lines; where several hold one option, the later of these goes
before: ``defaults``, ``variants.V``, ``models.M``, ``models.M.variant.V``, and of what is done for one target
``targets.T`` before them all. The file's JSON Schema is ``normdeploy/reports/schemas/fleet.json``.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError, RuntimeUnavailable
from .lines import line_of

Values = Mapping[str, Any]
VERBS = ("export", "verify", "build", "bench", "package")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Target:
    """Where models run: a runtime, for engines the GPU that they are for.

    ``version`` is a pattern that the runtime's has to match, "" any; ``bundle`` says whether ``package`` makes a bundle
    for it.
    """

    name: str
    runtime: str
    version: str = ""
    capability: str = ""
    bundle: bool = True
    options: Mapping[str, Values] | None = None

    def over(self, options: Mapping[str, Values]) -> dict[str, Values]:
        """``options`` with the target's own before them."""
        return {verb: {**values, **(self.options or {}).get(verb, {})} for verb, values in options.items()}


@dataclass(frozen=True)
class Job:
    """One model in one variant, for its targets."""

    model: str
    variant: str
    source: Path
    folder: Path  # of fleet.toml
    targets: tuple[Target, ...]
    options: Mapping[str, Values]  # verb -> option -> value; files are absolute paths
    steps: tuple[str, ...]
    seconds: float
    memory: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.variant}"


@dataclass(frozen=True)
class _Model:
    name: str
    source: Path
    told: Values


@dataclass(frozen=True)
class Fleet:
    """A checked file."""

    path: Path
    store: str  # "" where it names none
    models: tuple[_Model, ...]
    told: Values

    def __len__(self) -> int:
        """The number of jobs."""
        return sum(len(m.told.get("variants", self._variants)) for m in self.models)

    def where(self, job: Job) -> str:
        """The line of a job's model, for an error."""
        name = next(n for n in self.told["models"] if job.model == n or job.model.startswith(f"{n}."))
        line = line_of(self.path.read_text(encoding="utf-8"), ["models", name])
        return f"{self.path.name}, line {line}: models.{name} in variant {job.variant}"

    @property
    def _variants(self) -> Values:
        return self.told.get("variants") or {"default": {}}

    def jobs(self) -> Iterator[Job]:
        """Every model in each of its variants, in the file's order."""
        folder, defaults = self.path.parent, self.told.get("defaults", {})
        targets = {name: _target(name, told, folder) for name, told in self.told.get("targets", _ANY).items()}
        for model in self.models:
            for name in model.told.get("variants", self._variants):
                levels = (defaults, self._variants[name], model.told, model.told.get("variant", {}).get(name, {}))
                yield Job(
                    model.name,
                    name,
                    model.source,
                    folder,
                    tuple(targets[t] for t in model.told.get("targets", targets)),
                    {verb: _resolved(verb, [level.get(verb, {}) for level in levels], folder) for verb in VERBS},
                    tuple(model.told.get("steps", defaults.get("steps", ("verify",)))),
                    float(model.told.get("seconds", defaults.get("seconds", 0))),
                    _bytes(model.told.get("memory", defaults.get("memory", "0"))),
                )


_ANY = {"onnxruntime": {"runtime": "onnxruntime"}}


def read(path: str | os.PathLike[str]) -> Fleet:
    """The file, checked.

    Raises:
        InputError: it can't be read, is no TOML, or says what can't be; with the line.
        RuntimeUnavailable: what checks it is not installed.
    """
    file = Path(os.path.abspath(path))
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"can't read {str(path)!r}: {error.strerror}; give a fleet.toml") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is no text in UTF-8 (byte {error.start}); give a fleet.toml") from error
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file.name} is no TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{file.name} is no TOML that can be read: it is nested too deeply") from error
    checked = _Checked(file, text, told)
    checked.by_schema()
    checked.by_sense()
    models = tuple(checked.models())
    return Fleet(file, told.get("store", ""), models, told)


@cache
def schema() -> dict[str, Any]:
    """The file's JSON Schema."""
    text = resources.files("normdeploy.reports").joinpath("schemas/fleet.json").read_text(encoding="utf-8")
    told: dict[str, Any] = json.loads(text)
    return told


@dataclass(frozen=True)
class _Checked:
    file: Path
    text: str
    told: Values

    def by_schema(self) -> None:
        try:
            from jsonschema import Draft202012Validator
        except ImportError as error:
            raise RuntimeUnavailable("fleet.toml is checked by jsonschema; pip install 'normdeploy[fleet]'") from error
        errors = sorted(Draft202012Validator(schema()).iter_errors(self.told), key=lambda e: [str(p) for p in e.path])
        if errors:
            told = [self._said(error) for error in errors[:10]]
            more = [f"and {len(errors) - 10} more"] if len(errors) > 10 else []
            raise InputError("\n".join([*told, *more]))

    def by_sense(self) -> None:
        """What a schema can't say: names that must be there, capabilities that engines need."""
        variants, targets = self.told.get("variants") or {"default": {}}, self.told.get("targets") or _ANY
        for name, target in targets.items():
            if target["runtime"] != "onnxruntime" and "compute_capability" not in target:
                self._refuse(
                    ("targets", name),
                    f"an engine of {target['runtime']} is for one kind of GPU; give its compute_capability, such as"
                    ' "8.9"',
                )
            if target["runtime"] == "onnxruntime" and "compute_capability" in target:
                self._refuse(
                    ("targets", name, "compute_capability"),
                    "onnxruntime runs the ONNX file, which is for no kind of GPU; leave compute_capability out",
                )
        for name, model in self.told["models"].items():
            for kind, known in (("variants", variants), ("targets", targets)):
                for wanted in model.get(kind, ()):
                    if wanted not in known:
                        self._refuse(("models", name, kind), _unknown(f"[{kind}.{wanted}]", wanted, known))
            for wanted in model.get("variant", {}):
                if wanted not in model.get("variants", variants):
                    self._refuse(
                        ("models", name, "variant", wanted),
                        _unknown(f"variant {wanted!r} of this model", wanted, model.get("variants", variants)),
                    )
        for path, verb, options in self._tables():
            if options.get("part") == "all":
                self._refuse((*path, verb, "part"), "a job makes one file; list each part as a model of its own")
            for option, value in options.items():
                for one in value if isinstance(value, list) and _is_file(verb, option) else [value]:
                    if _is_file(verb, option) and not (self.file.parent / one).exists():
                        self._refuse((*path, verb, option), f"there is no {one!r} beside {self.file.name}")

    def models(self) -> Iterator[_Model]:
        """One for each file or folder that a pattern finds."""
        for name, told in self.told["models"].items():
            source, folder = told["source"], self.file.parent
            if not glob.has_magic(source):
                path = folder / source
                if not path.exists():
                    self._refuse(("models", name, "source"), f"there is no model {source!r} beside {self.file.name}")
                yield _Model(name, Path(os.path.abspath(path)), told)
                continue
            found = [
                Path(os.path.abspath(folder / p)) for p in sorted(glob.glob(source, root_dir=folder, recursive=True))
            ]
            if not found:
                self._refuse(
                    ("models", name, "source"), f"the pattern {source!r} finds nothing beside {self.file.name}"
                )
            names: dict[str, Path] = {}
            for path in found:
                stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
                if stem in names:
                    self._refuse(
                        ("models", name, "source"),
                        f"{names[stem].name!r} and {path.name!r} would both be {name}.{stem}; list one by itself",
                    )
                names[stem] = path
                yield _Model(f"{name}.{stem}", path, told)

    def _tables(self) -> Iterator[tuple[tuple[str, ...], str, Values]]:
        levels: list[tuple[tuple[str, ...], Values]] = [(("defaults",), self.told.get("defaults", {}))]
        for kind in ("variants", "targets", "models"):
            levels += [((kind, name), told) for name, told in self.told.get(kind, {}).items()]
        for name, told in self.told["models"].items():
            levels += [(("models", name, "variant", v), t) for v, t in told.get("variant", {}).items()]
        for path, level in levels:
            yield from ((path, verb, level[verb]) for verb in VERBS if verb in level)

    def _said(self, error: Any) -> str:
        path = list(error.absolute_path)
        where = ".".join(str(p) for p in path) or "the file"
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            unknown = sorted(set(error.instance) - set(known))
            path.append(unknown[0])
            return self._line(path, f"{where}: {_unknown(repr(unknown[0]), unknown[0], known)}")
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return self._line(path, f"{where}: {missing[0]!r} is missing")
        if "propertyNames" in error.absolute_schema_path:
            return self._line(path, f"{where}: the name {error.instance!r} may hold letters, digits, '.', '_' and '-'")
        if error.validator == "pattern":
            return self._line(path, f"{where} is {error.instance!r}; give {error.schema['description']}")
        if error.validator == "enum":
            return self._line(
                path, f"{where} is {error.instance!r}; give one of {', '.join(map(repr, error.validator_value))}"
            )
        if error.validator == "type":
            kinds = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
            return self._line(path, f"{where} is {error.instance!r}; give {' or '.join(_TYPES[k] for k in kinds)}")
        return self._line(path, f"{where}: {error.message}")

    def _refuse(self, path: Sequence[str | int], message: str) -> None:
        raise InputError(self._line(path, f"{'.'.join(map(str, path))}: {message}"))

    def _line(self, path: Sequence[str | int], message: str) -> str:
        return f"{self.file.name}, line {line_of(self.text, list(path))}: {message}"


_TYPES = {
    **{"string": "a text in quotes", "integer": "a whole number", "number": "a number", "boolean": "true or false"},
    **{"array": "a list in brackets", "object": "a table"},
}


def _unknown(what: str, name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"there is no {what}; " + (
        f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}"
    )


def _is_file(verb: str, option: str) -> bool:
    told = schema()["$defs"][verb]["properties"].get(option, {})
    return told.get("items", told).get("format") == "path"


def _target(name: str, told: Values, folder: Path) -> Target:
    return Target(
        name,
        told["runtime"],
        told.get("version", ""),
        told.get("compute_capability", ""),
        told.get("bundle", True),
        {verb: _resolved(verb, [told[verb]], folder) for verb in VERBS if verb in told},
    )


def _resolved(verb: str, levels: Sequence[Values], folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in levels:
        merged |= level
    for option, value in merged.items():
        if _is_file(verb, option):
            paths = [Path(os.path.abspath(folder / v)) for v in (value if isinstance(value, list) else [value])]
            merged[option] = paths if isinstance(value, list) else paths[0]
    return merged


def _bytes(text: str) -> int:
    return int(text.rstrip("KMGT")) * _SIZES[text.lstrip("0123456789")]


def only(jobs: Iterator[Job], patterns: Sequence[str]) -> Iterator[Job]:
    """The jobs whose name, or model, matches one of the patterns; all where there are none."""
    for job in jobs:
        if not patterns or any(fnmatchcase(n, p) for p in patterns for n in (job.name, job.model)):
            yield job
