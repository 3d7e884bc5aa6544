"""Read ``fleet.toml``, which lists models, variants and targets. The whole file is checked before any work.

The tables of options contain the options of the verbs' command lines. If several tables set one option, the later one
in this order wins: ``defaults``, ``variants.V``, ``models.M``, ``models.M.variant.V``. For the steps of one target,
``targets.T`` overrides all of these tables. The file's JSON Schema is ``normdeploy/reports/schemas/fleet.json``.
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
from .former_keys import rename_former_keys
from .toml_lines import line_of_key

# Maximum size of a fleet.toml in bytes.
_LONGEST = 2**22
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class FleetTarget:
    """Target of a fleet: a runtime and, for engines, the GPU for which they are built.

    Attributes:
        version: pattern that the runtime's version must match; "" for any.
        capability: compute capability of the GPU; "" for onnxruntime.
        bundle: True if ``package`` makes a bundle for the target.
        options: the target's own options: verb → option → value.
    """

    name: str
    runtime: str
    version: str = ""
    capability: str = ""
    bundle: bool = True
    options: Mapping[str, Values] | None = None

    def merge_options(self, options: Mapping[str, Values]) -> dict[str, Values]:
        """Override ``options`` with the target's own options.

        Returns:
            verb → option → value.
        """
        return {verb: {**values, **(self.options or {}).get(verb, {})} for verb, values in options.items()}


@dataclass(frozen=True)
class FleetJob:
    """One model in one variant, for all of its targets.

    Attributes:
        folder: folder that contains fleet.toml.
        options: verb → option → value. Paths of files are absolute.
        steps: verbs that are requested besides the export.
        seconds: time limit of a step; 0 for none.
        memory: memory limit of a step in bytes; 0 for none.
    """

    model: str
    variant: str
    source: Path
    folder: Path
    targets: tuple[FleetTarget, ...]
    options: Mapping[str, Values]
    steps: tuple[str, ...]
    seconds: float
    memory: int

    @property
    def name(self) -> str:
        """Return "model/variant"."""
        return f"{self.model}/{self.variant}"


@dataclass(frozen=True)
class Fleet:
    """Content of a checked file.

    Attributes:
        store: path or URL of the store; "" if the file does not name a store.
        told: the file as parsed TOML.
        notes: notes on former keys in the file.
    """

    path: Path
    store: str
    models: tuple[FleetModel, ...]
    told: Values
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of jobs."""
        return sum(len(m.told.get("variants", self._variant_options)) for m in self.models)

    def describe_location(self, job: FleetJob) -> str:
        """Describe where the file defines a job's model, for an error message.

        Returns:
            text with file, line, model and variant.
        """
        name = next(n for n in self.told["models"] if job.model == n or job.model.startswith(f"{n}."))
        line = line_of_key(self.path.read_text(encoding="utf-8"), ["models", name])
        return f"{self.path.name}, line {line}: models.{name} in variant {job.variant}"

    @property
    def _variant_options(self) -> Values:
        return self.told.get("variants") or {"default": {}}

    def iter_jobs(self) -> Iterator[FleetJob]:
        """Yield every model in each of its variants, in the file's order."""
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
    """Read and check a fleet file.

    Returns:
        the checked fleet.

    Raises:
        InputError: the file can't be read, is not TOML, or is invalid. The message names the line.
        RuntimeUnavailable: the library that checks the file is not installed.
    """
    file = Path(os.path.abspath(path))
    try:
        text = read_regular(file, most=_LONGEST).decode()
    except OSError as error:
        raise InputError(f"can't read {str(path)!r}: {error.strerror}; pass a fleet.toml") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); pass a fleet.toml") from error
    try:
        told = parse_toml(text)
    # An integer with too many digits raises a ValueError that is not a TOMLDecodeError.
    except ValueError as error:
        raise InputError(f"{file.name} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{file.name} is not readable TOML: it is nested too deeply") from error
    try:
        told, notes = rename_former_keys(told)
    except InputError as error:
        raise InputError(f"{file.name}: {error}") from None
    checked = ValidatedFile(file, text, told)
    checked.check_schema()
    checked.check_references()
    models = tuple(checked.iter_models())
    return Fleet(file, told.get("store", ""), models, told, notes)


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
    """Yield the jobs whose name or model matches one of the patterns; all jobs for an empty list of patterns."""
    for job in jobs:
        if not patterns or any(fnmatchcase(n, p) for p in patterns for n in (job.name, job.model)):
            yield job
