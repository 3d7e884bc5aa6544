"""Load rules for ``check`` from installed packages.

A package registers its rules as an entry point of the group ``normdeploy.rules``:

    [project.entry-points."normdeploy.rules"]
    acme = "acme.rules:RULES"

The object is a `GuestRule`, a list or tuple of `GuestRule` objects, or a function without parameters that returns
either. Every ``check`` applies all registered rules, and ``--fail-on`` accepts their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import onnx

from ... import extensions
from ...extensions import Extension
from ...storage.proto_traversal import copy_model
from .norm_rules import IDS, Level, Problem, Rule

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class GuestFinding:
    """Violation of a rule, with a message and with the names that the file has for its location.

    Attributes:
        message: one line for people.
        tensor, node, module, place: names in the file. ``place`` is the body or function that has the node, "" for the
            main graph.
        kind: kind of the norm; "" if the problem does not concern a norm.
    """

    message: str
    tensor: str = ""
    node: str = ""
    module: str = ""
    place: str = ""
    kind: str = ""


@dataclass(frozen=True)
class GuestRule:
    """Rule of a package.

    Attributes:
        id: name of lower-case letters, digits and hyphens. It must differ from our ids ("decomposed", ...) and from the
            ids of other packages.
        short: one sentence that describes the problem.
        help: how to fix the problem.
        find: function that takes the model and returns its findings. The model is a copy for this rule. For a model
            that is not exported yet, it is the exporter's result. Large weights are missing: their tensors refer to
            external data that does not exist.
        level: "error", "warning" or "note". It is the level of a finding if the rule does not fail the check.
    """

    id: str
    short: str
    help: str
    find: Callable[[onnx.ModelProto], Iterable[GuestFinding]]
    level: Level = "warning"


@dataclass(frozen=True)
class ThirdPartyRule:
    """Rule of an installed package, after validation."""

    rule: Rule
    find: Callable[[onnx.ModelProto], Iterable[GuestFinding]]
    extension: Extension

    def find_problems(self, proto: onnx.ModelProto) -> Iterator[Problem]:
        """Find the violations of the rule in a file.

        Yields:
            Problems, with the rule's id and the message on one line.

        Raises:
            ExtensionError: the rule raises, or yields an object that is not a GuestFinding.
        """
        what = f"has a rule {self.rule.id!r} that fails"
        for problem in self.extension.run(what, lambda: [*self.find(copy_model(proto))]):
            texts = [getattr(problem, name, None) for name in GuestFinding.__dataclass_fields__]
            if not isinstance(problem, GuestFinding) or not all(isinstance(text, str) for text in texts):
                raise self.extension.make_error(
                    f"has a rule {self.rule.id!r} that returned {problem!r:.80}, not a GuestFinding"
                )
            yield Problem(
                self.rule.id,
                " ".join(problem.message.split()),
                problem.kind,
                problem.module,
                problem.place,
                problem.node,
                problem.tensor,
            )


def load_rules() -> tuple[ThirdPartyRule, ...]:
    """Load the rules of all packages.

    Returns:
        Rules in the order of the entry points.

    Raises:
        ExtensionError: a package is broken, or two rules have the same id.
    """
    every: dict[str, ThirdPartyRule] = {}
    for extension in extensions.installed_extensions(extensions.RULES):
        for rule in _rules_of_extension(extension):
            if rule.id in every:
                raise extension.make_error(
                    f"has a rule {rule.id!r}, but the package {every[rule.id].extension.package!r} also has one"
                )
            every[rule.id] = ThirdPartyRule(
                Rule(rule.id, rule.short, f"{rule.help} (A rule of the package {extension.package}.)", rule.level),
                rule.find,
                extension,
            )
    return tuple(every.values())


def _rules_of_extension(extension: Extension) -> list[GuestRule]:
    named: Any = extension.load()
    if callable(named) and not isinstance(named, GuestRule):
        named = extension.run("fails", named)
    if isinstance(named, GuestRule):
        several = [named]
    else:
        several = named
    if not isinstance(several, list | tuple) or not all(isinstance(rule, GuestRule) for rule in several):
        raise extension.make_error(f"is {named!r:.80}, not a GuestRule or a list of them")
    for rule in several:
        if not isinstance(rule.id, str) or not _ID.fullmatch(rule.id) or rule.id in (*IDS, "all", "none"):
            raise extension.make_error(
                f"has a rule {rule.id!r:.80}; an id consists of lowercase letters, digits and hyphens, and must not"
                " be one of normdeploy's rules"
            )
        if not (isinstance(rule.short, str) and isinstance(rule.help, str) and callable(rule.find)):
            raise extension.make_error(
                f"has a rule {rule.id!r} without texts, or without a function that finds problems"
            )
        if rule.level not in get_args(Level):
            raise extension.make_error(
                f"has a rule {rule.id!r} of the level {rule.level!r}; it is error, warning or note"
            )
    return [*several]
