"""``fleet.toml``: which models, in which variants, for which targets, checked as a whole before any work.

The tables of options are those of the verbs' command lines; where several hold one option, the later of these goes
before: ``defaults``, ``variants.V``, ``models.M``, ``models.M.variant.V``, and of what is done for one target
``targets.T`` before them all. The file's JSON Schema is ``normdeploy/reports/schemas/fleet.json``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.regular_file import read_regular
from ..storage.toml_parsing import parse_toml
from ..types import PathLike
from .fleet_schema import ANY_TARGET, VERBS, Values, is_file_option
from .fleet_validation import FleetModel, ValidatedFile
from .toml_lines import line_of_key

# Bytes of a fleet.toml.
_LONGEST = 2**22
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class FleetTarget:
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

    def merge_options(self, options: Mapping[str, Values]) -> dict[str, Values]:
        """``options`` with the target's own before them."""
        return {verb: {**values, **(self.options or {}).get(verb, {})} for verb, values in options.items()}


@dataclass(frozen=True)
class FleetJob:
    """One model in one variant, for its targets."""

    model: str
    variant: str
    source: Path
    # of fleet.toml
    folder: Path
    targets: tuple[FleetTarget, ...]
    # verb -> option -> value; files are absolute paths
    options: Mapping[str, Values]
    steps: tuple[str, ...]
    seconds: float
    memory: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.variant}"


@dataclass(frozen=True)
class Fleet:
    """A checked file."""

    path: Path
    # "" where it names none
    store: str
    models: tuple[FleetModel, ...]
    told: Values

    def __len__(self) -> int:
        """The number of jobs."""
        return sum(len(m.told.get("variants", self._variant_options)) for m in self.models)

    def describe_location(self, job: FleetJob) -> str:
        """The line of a job's model, for an error."""
        name = next(n for n in self.told["models"] if job.model == n or job.model.startswith(f"{n}."))
        line = line_of_key(self.path.read_text(encoding="utf-8"), ["models", name])
        return f"{self.path.name}, line {line}: models.{name} in variant {job.variant}"

    @property
    def _variant_options(self) -> Values:
        return self.told.get("variants") or {"default": {}}

    def iter_jobs(self) -> Iterator[FleetJob]:
        """Every model in each of its variants, in the file's order."""
        folder = self.path.parent
        defaults = self.told.get("defaults", {})
        targets = {
            name: _read_target(name, told, folder) for name, told in self.told.get("targets", ANY_TARGET).items()
        }
        for model in self.models:
            for name in model.told.get("variants", self._variant_options):
                levels = (
                    defaults,
                    self._variant_options[name],
                    model.told,
                    model.told.get("variant", {}).get(name, {}),
                )
                yield FleetJob(
                    model.name,
                    name,
                    model.source,
                    folder,
                    tuple(targets[t] for t in model.told.get("targets", targets)),
                    {verb: _resolve_options(verb, [level.get(verb, {}) for level in levels], folder) for verb in VERBS},
                    tuple(model.told.get("steps", defaults.get("steps", ("verify",)))),
                    float(model.told.get("seconds", defaults.get("seconds", 0))),
                    _parse_bytes(model.told.get("memory", defaults.get("memory", "0"))),
                )


def read_fleet(path: PathLike) -> Fleet:
    """The file, checked.

    Raises:
        InputError: it can't be read, is no TOML, or says what can't be; with the line.
        RuntimeUnavailable: what checks it is not installed.
    """
    file = Path(os.path.abspath(path))
    try:
        text = read_regular(file, most=_LONGEST).decode()
    except OSError as error:
        raise InputError(f"can't read {str(path)!r}: {error.strerror}; give a fleet.toml") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is no text in UTF-8 (byte {error.start}); give a fleet.toml") from error
    try:
        told = parse_toml(text)
    # An integer of too many digits is a bare ValueError.
    except ValueError as error:
        raise InputError(f"{file.name} is no TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{file.name} is no TOML that can be read: it is nested too deeply") from error
    checked = ValidatedFile(file, text, told)
    checked.check_schema()
    checked.check_references()
    models = tuple(checked.iter_models())
    return Fleet(file, told.get("store", ""), models, told)


def _read_target(name: str, told: Values, folder: Path) -> FleetTarget:
    return FleetTarget(
        name,
        told["runtime"],
        told.get("version", ""),
        told.get("compute_capability", ""),
        told.get("bundle", True),
        {verb: _resolve_options(verb, [told[verb]], folder) for verb in VERBS if verb in told},
    )


def _resolve_options(verb: str, levels: Sequence[Values], folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in levels:
        merged |= level
    for option, value in merged.items():
        if is_file_option(verb, option):
            paths = [Path(os.path.abspath(folder / v)) for v in (value if isinstance(value, list) else [value])]
            merged[option] = paths if isinstance(value, list) else paths[0]
    return merged


def _parse_bytes(text: str) -> int:
    return int(text.rstrip("KMGT")) * _SIZES[text.lstrip("0123456789")]


def filter_jobs(jobs: Iterator[FleetJob], patterns: Sequence[str]) -> Iterator[FleetJob]:
    """The jobs whose name, or model, matches one of the patterns; all where there are none."""
    for job in jobs:
        if not patterns or any(fnmatchcase(n, p) for p in patterns for n in (job.name, job.model)):
            yield job
