"""Read a policy file, ``verify.toml``, with the rules, names and limits that ``verify`` takes as options.

# For every output: ABS:REL, or [1e-3, 1e-2], or { abs = 1e-3, rel = 1e-2 }.
tolerance = "1e-3:1e-2"

# One metric or several, for every output.
metric = ["cosine>=0.995"]

# The default rule must hold as well; the other rules may come from options instead.
also-default = true

# Array or column of the dataset's labels, for accuracy_drop and accuracy5_drop.
labels = "label"

max-elements = 100000

# The file's name = the model's name.
map = { "input.1" = "x" }

# One output: a rule here replaces the rule of its kind for all outputs.
[outputs.logits]
tolerance = { abs = 1e-3, rel = 1e-2 }
metric = "top1>=0.99"
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...compare.metrics import Metric
from ...compare.policy import ALL, Policy, Rule, parse_threshold, parse_tolerance
from ...errors import InputError
from ...storage.regular_file import read_regular
from ...storage.toml_parsing import parse_toml
from ...types import PathLike

_KEYS = ("tolerance", "metric", "also-default", "labels", "max-elements", "map", "outputs")
_OF_OUTPUT = ("tolerance", "metric")
_OF_TOLERANCE = ("abs", "rel")
# Maximum size of a policy file in bytes (1 MiB).
_LONGEST = 2**20


@dataclass(frozen=True)
class PolicyFile:
    """Content of a policy file.

    Attributes:
        names: the file's name of an input or output -> the model's.
        most: value of ``max-elements``; None if missing.
        labels: name of the dataset's labels; None if missing.
    """

    policy: Policy = field(default_factory=Policy)
    names: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    labels: str | None = None


def read_policy(path: PathLike, own: Callable[[str], Metric] | None = None) -> PolicyFile:
    """Read a policy file.

    Args:
        own: function that imports the user's metric ``MODULE:FUNCTION``; None if there are no such metrics.

    Returns:
        its rules, names and limits.

    Raises:
        InputError: the file is missing, is not TOML, or has an unknown key or an invalid value. The message gives the
            line if it is known.
    """
    name = os.fspath(path)
    try:
        raw = read_regular(path, most=_LONGEST)
    except OSError as error:
        raise InputError(f"can't read the policy {name!r}: {error.strerror}") from error
    try:
        text = raw.decode()
        content = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the policy {name!r} is not valid TOML: {error}") from error
    return _PolicyReader(name, text, own).read_policy_table(content)


class _PolicyReader:
    """Read the tables of one policy file, and locate errors in its text."""

    def __init__(self, name: str, text: str, own: Callable[[str], Metric] | None) -> None:
        self._name = name
        self._text = text
        self._own = own

    def read_policy_table(self, table: Mapping[str, Any]) -> PolicyFile:
        self._require_known_keys(table, _KEYS, ())
        outputs = self._require_table(table, "outputs", ())
        rules: dict[str, dict[str, Rule]] = {ALL: self._read_rules(table, ())}
        for output, own in outputs.items():
            where = ("outputs", output)
            if not isinstance(own, Mapping):
                raise self._policy_error(
                    where, f"is {own!r}, not a table: write [outputs.{output}] and the rules below it"
                )
            self._require_known_keys(own, _OF_OUTPUT, where)
            if not output:
                raise self._policy_error(where, "has no name; put rules for every output at the top of the file")
            rules[output] = self._read_rules(own, where)
        required = table.get("also-default", False)
        if not isinstance(required, bool):
            raise self._policy_error(("also-default",), f"is {required!r}; write true or false")
        policy = Policy({name: rule for name, rule in rules.items() if rule}, required)
        most = table.get("max-elements")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise self._policy_error(("max-elements",), f"is {most!r}; write a whole number of 1 or more")
        labels = table.get("labels")
        if labels is not None and not (isinstance(labels, str) and labels):
            raise self._policy_error(("labels",), f"is {labels!r}; write the name of the dataset's array or column")
        names = self._require_table(table, "map", ())
        for theirs, ours in names.items():
            if not isinstance(ours, str) or not ours or not theirs:
                raise self._policy_error(
                    ("map", theirs), f'is {ours!r}; write the model\'s name, as in map = {{ "input.1" = "x" }}'
                )
        return PolicyFile(policy, dict(names), most, labels)

    def _read_rules(self, table: Mapping[str, Any], where: tuple[str, ...]) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        if "tolerance" in table:
            rules["tolerance"] = self._add_location(
                (*where, "tolerance"),
                lambda: parse_tolerance(self._read_tolerance_pair(table["tolerance"], (*where, "tolerance"))),
            )
        texts = table.get("metric", [])
        for text in [texts] if not isinstance(texts, list) else texts:
            rule = self._add_location((*where, "metric"), lambda text=text: parse_threshold(text, own=self._own))  # type: ignore[misc]
            if rules.setdefault(rule.kind, rule) != rule:
                raise self._policy_error(
                    (*where, "metric"), f"has two values, {rules[rule.kind]} and {rule}; write one"
                )
        return rules

    def _read_tolerance_pair(self, value: Any, where: tuple[str, ...]) -> Any:
        if not isinstance(value, Mapping):
            return value
        self._require_known_keys(value, _OF_TOLERANCE, where)
        return [value.get("abs", 0.0), value.get("rel", 0.0)]

    def _add_location(self, where: tuple[str, ...], make: Any) -> Any:
        try:
            return make()
        except InputError as error:
            raise InputError(f"{self._describe_location(where)}: {error}") from None

    def _require_table(self, table: Mapping[str, Any], key: str, where: tuple[str, ...]) -> Mapping[str, Any]:
        value = table.get(key, {})
        if not isinstance(value, Mapping):
            raise self._policy_error((*where, key), f"is {value!r}, not a table")
        return value

    def _require_known_keys(self, table: Mapping[str, Any], keys: tuple[str, ...], where: tuple[str, ...]) -> None:
        if unknown := [key for key in table if key not in keys]:
            raise self._policy_error(
                (*where, unknown[0]),
                f"is not a key of {'a policy' if not where else '.'.join(where)}; choose from {', '.join(keys)}",
            )

    def _policy_error(self, where: tuple[str, ...], what: str) -> InputError:
        return InputError(f"{self._describe_location(where)}: {'.'.join(where)} {what}")

    def _describe_location(self, where: tuple[str, ...]) -> str:
        line = _line_of_key(self._text, where)
        return f"the policy {self._name!r}{f', line {line}' if line else ''}"


def _line_of_key(text: str, where: tuple[str, ...]) -> int:
    """Find the line of a key, or of the table around the key, in the text. (tomllib does not keep line numbers.)

    Returns:
        the line number; 0 if neither is found.
    """
    table: tuple[str, ...] = ()
    best = 0
    deepest = 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(#.*)?", line):
            table = _split_dotted_key(header[1])
            place = table
        elif (
            key := re.match(r'\s*((?:[\w\-]+|"[^"]*"|\'[^\']*\')(?:\s*\.\s*(?:[\w\-]+|"[^"]*"|\'[^\']*\'))*)\s*=', line)
        ) is not None:
            place = (*table, *_split_dotted_key(key[1]))
        else:
            continue
        if place == where[: len(place)] and len(place) > deepest:
            best = number
            deepest = len(place)
    return best


def _split_dotted_key(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r'[\w\-]+|"[^"]*"|\'[^\']*\'', key))
