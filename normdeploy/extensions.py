"""What installed packages bring: entry points, found when a verb needs them and not before.

    group                     what it brings                                 its contract
    normdeploy.norms          norm ops of a domain of the package's own      `normdeploy.norms.third_party`
    normdeploy.runtimes       a runtime, by name                             `normdeploy.runtimes.third_party_runner`
    normdeploy.rules          rules for ``check``                            `normdeploy.verbs.check.third_party_rules`
    normdeploy.translations   operators of torch in ONNX                     `normdeploy.translations`

An entry point is code that whoever installed the package has put into this Python: nothing here makes it safer or less
safe. A file can't bring one along. It is imported when it is asked for by its name (a domain that a file uses, an
option), and all of the norms where ``fuse="portable"`` asks for every form there is, all of the rules by ``check``;
``-v`` names it. Nothing is imported at ``import normdeploy``.

``--no-extensions``, the environment variable NORMDEPLOY_NO_EXTENSIONS, or in Python `disabled` let a verb work as
though none were installed. Nothing is registered anywhere, so two calls of one process, one with and one without, do
not see each other. A folder of ``sys.path`` is looked through once: what is installed into it later is found by the
next process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import ExtensionError

NORMS, RUNTIMES, RULES, TRANSLATIONS = (f"normdeploy.{kind}" for kind in ("norms", "runtimes", "rules", "translations"))
VARIABLE = "NORMDEPLOY_NO_EXTENSIONS"

_OFF: ContextVar[bool] = ContextVar("normdeploy.extensions.disabled", default=False)
_log = logging.getLogger("normdeploy")


@dataclass(frozen=True)
class Extension:
    """One entry point. ``name`` is what it is asked for by, ``value`` the object that it names, "module:attribute"."""

    group: str
    name: str
    value: str
    # as pip names it
    package: str
    point: EntryPoint
    # in which the package is installed
    folder: str = ""

    def load(self) -> Any:
        """The object that the entry point names; its package is imported.

        Raises:
            ExtensionError: it can't be imported, or does not hold the object.
        """
        _log.info("%s %s is provided by %s of %s, whose code is run", self.group, self.name, self.value, self.package)
        return self.run("can't be imported", self.point.load)

    def run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, a part of the package.

        Raises:
            ExtensionError: whatever it raises. ``what`` says what went wrong then.
        """
        try:
            return function(*args)
        except ExtensionError:
            raise
        except (Exception, SystemExit) as error:
            # the package's own code; its exit is no verdict of ours
            raise self.make_error(f"{what}: {type(error).__name__}: {error}") from error

    def make_error(self, what: str) -> ExtensionError:
        """An error that names the package."""
        return ExtensionError(
            f"the package {self.package!r} provides {self.value!r} for {self.group} {self.name!r}, and it {what}; "
            "fix or remove the package, or ignore all such packages with --no-extensions"
        )


def installed_extensions(group: str) -> tuple[Extension, ...]:
    """The entry points of a group in the order of their names, none of them imported; none where extensions are off."""
    if _OFF.get() or os.environ.get(VARIABLE):
        return ()
    return _scan_entry_points(group, tuple(sys.path))


def find_extension(group: str, name: str) -> Extension | None:
    """The one that is called so; None where there is none.

    Raises:
        ExtensionError: two packages bring one of this name.
    """
    matching = [e for e in installed_extensions(group) if e.name == name]
    if len(matching) > 1:
        raise ExtensionError(
            f"the packages {matching[0].package!r} and {matching[1].package!r} both provide {group} {name!r}; remove "
            "one of them, or ignore all such packages with --no-extensions"
        )
    if matching:
        return matching[0]
    return None


@contextmanager
def disabled(off: bool = True) -> Iterator[None]:
    """Within it, verbs work as though no package brought anything: ``with disabled(): normdeploy.export(...)``."""
    token = _OFF.set(off or _OFF.get())
    try:
        yield
    finally:
        _OFF.reset(token)


@lru_cache(maxsize=16)
def _scan_entry_points(group: str, path: tuple[str, ...]) -> tuple[Extension, ...]:
    """``path``: where they are looked for, ``sys.path``; another one is looked through anew."""
    brought = []
    for point in entry_points(group=group):
        if point.dist is not None:
            package = point.dist.name
        else:
            package = "an installed package"
        if point.dist is not None:
            folder = str(point.dist.locate_file(""))
        else:
            folder = ""
        brought.append(Extension(group, point.name, point.value, package, point, folder))
    # a package may be seen twice on a path
    once = {(e.name, e.package, e.value): e for e in brought}
    return tuple(once[key] for key in sorted(once))
