"""Find extensions: entry points of installed packages, loaded only when a verb needs them.

    group                     extension                                      contract
    normdeploy.norms          norm ops of the package's own domain           `normdeploy.norms.third_party`
    normdeploy.runtimes       a runtime, by name                             `normdeploy.runtimes.third_party_runner`
    normdeploy.rules          rules for ``check``                            `normdeploy.verbs.check.third_party_rules`
    normdeploy.translations   operators of torch in ONNX                     `normdeploy.translations`

An entry point is code that the user added to this Python by installing its package. The code runs with all of the
user's rights. A model file can't contain an extension. An extension is imported when its name is used: by a domain in a
file, or by an option. ``fuse="portable"`` imports all norms, because it tries every form, and ``check`` imports all
rules. ``-v`` logs the names of imported extensions. ``import normdeploy`` alone imports no extension.

``--no-extensions``, the environment variable NORMDEPLOY_NO_EXTENSIONS, or `disabled` in Python turn all extensions off.
Nothing is registered globally, so calls with and without extensions in one process do not affect each other. Each
folder of ``sys.path`` is scanned once per process. A package that is installed later is found only by the next process.
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
from typing import TYPE_CHECKING, Any

from .errors import ExtensionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NORMS, RUNTIMES, RULES, TRANSLATIONS = (f"normdeploy.{kind}" for kind in ("norms", "runtimes", "rules", "translations"))
VARIABLE = "NORMDEPLOY_NO_EXTENSIONS"

_OFF: ContextVar[bool] = ContextVar("normdeploy.extensions.disabled", default=False)
_log = logging.getLogger("normdeploy")


@dataclass(frozen=True)
class Extension:
    """One entry point.

    Attributes:
        name: name by which users select the extension.
        value: "module:attribute" of the object.
        package: name of the package in pip.
        folder: folder in which the package is installed; "" if unknown.
    """

    group: str
    name: str
    value: str
    package: str
    point: EntryPoint
    folder: str = ""

    def load(self) -> Any:
        """Import the package.

        Returns:
            the object of the entry point.

        Raises:
            ExtensionError: the package can't be imported or lacks the object.
        """
        _log.info("%s %s is provided by %s of %s, whose code is run", self.group, self.name, self.value, self.package)
        return self.run("can't be imported", self.point.load)

    def run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)``, where ``function`` is code of the package.

        Args:
            what: description of the failure, for the error message.

        Returns:
            result of the function.

        Raises:
            ExtensionError: the function raised an exception.
        """
        try:
            return function(*args)
        except ExtensionError:
            raise
        except (Exception, SystemExit) as error:
            # The package's code may call exit. Its exit code must not become that of the verb.
            raise self.make_error(f"{what}: {type(error).__name__}: {error}") from error

    def make_error(self, what: str) -> ExtensionError:
        """Make an error that names the package.

        Returns:
            the error.
        """
        return ExtensionError(
            f"the package {self.package!r} provides {self.value!r} for {self.group} {self.name!r}, and it {what}; "
            "fix or remove the package, or ignore all such packages with --no-extensions"
        )


def installed_extensions(group: str) -> tuple[Extension, ...]:
    """List the entry points of a group without importing them.

    Returns:
        entry points sorted by name; empty if extensions are off.
    """
    if _OFF.get() or os.environ.get(VARIABLE):
        return ()
    return _scan_entry_points(group, tuple(sys.path))


def find_extension(group: str, name: str) -> Extension | None:
    """Find an extension by name.

    Returns:
        the extension, or None.

    Raises:
        ExtensionError: two packages have an extension of this name.
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
    """Turn extensions off within a block: ``with disabled(): normdeploy.export(...)``."""
    token = _OFF.set(off or _OFF.get())
    try:
        yield
    finally:
        _OFF.reset(token)


@lru_cache(maxsize=16)
def _scan_entry_points(group: str, path: tuple[str, ...]) -> tuple[Extension, ...]:
    """Scan the installed packages; ``path`` is ``sys.path``, so that a changed path is scanned again."""
    # The command line imports this module at its start. Importing importlib.metadata at the top of the file would make
    # the start 10 % slower.
    from importlib.metadata import entry_points

    brought = []
    for point in entry_points(group=group):
        if point.dist is None:
            package = "an installed package"
            folder = ""
        else:
            package = point.dist.name
            folder = str(point.dist.locate_file(""))
        brought.append(Extension(group, point.name, point.value, package, point, folder))
    # A package may be on the path twice, so duplicates of its entry points are dropped.
    once = {(e.name, e.package, e.value): e for e in brought}
    return tuple(once[key] for key in sorted(once))
