"""Import only signed modules from the working directory, compiled from the bytes whose hash was checked.

If options come from a record, a stranger may have provided the current folder together with signed files. Three kinds
of code in this folder must not run: a changed module, an added module that shadows a library, and a cached ``.pyc``
next to the correct source.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..errors import InputError


@contextlib.contextmanager
def import_only_signed(code: Mapping[str, str]) -> Iterator[None]:
    """Restrict imports from the working directory to signed modules within the context.

    Args:
        code: path within the working directory -> SHA-256 of the source.
    """
    here = Path.cwd()
    saved = list(sys.path)
    finder = _SignedFinder(Path.cwd(), code)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(here)]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = saved


class _SignedFinder(importlib.abc.MetaPathFinder):
    """Find only those modules of the working directory that the signature names."""

    def __init__(self, folder: Path, code: Mapping[str, str]) -> None:
        self.folder = folder
        self.code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a signed module or package.

        Returns:
            The module's spec; None if the signature does not name the module.
        """
        place = name.replace(".", "/")
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if file in self.code:
                loader = _HashedLoader(name, str(self.folder / file), self.code[file])
                # A package gets an empty search path, so that its unsigned modules are not found.
                locations: list[str] | None
                if file.endswith("/__init__.py"):
                    locations = []
                else:
                    locations = None
                return importlib.util.spec_from_file_location(
                    name, self.folder / file, loader=loader, submodule_search_locations=locations
                )
        # A folder without __init__.py is a namespace package.
        if any(file.startswith(f"{place}/") for file in self.code):
            return ModuleSpec(name, None, is_package=True)
        return None


class _HashedLoader(SourceFileLoader):
    """Compile exactly the source that was hashed, without a cached ``.pyc``."""

    def __init__(self, name: str, path: str, digest: str) -> None:
        super().__init__(name, path)
        self.digest = digest

    def get_code(self, fullname: str) -> CodeType:
        """Read, check and compile the source.

        Returns:
            The compiled code of the module.

        Raises:
            InputError: the source's hash differs from the signed hash.
        """
        source = self.get_data(self.path)
        if hashlib.sha256(source).hexdigest() != self.digest:
            raise InputError(
                f"{self.path} differs from the signed module of this name; if you trust it, pass --model or --import"
            )
        compiled: Any = compile(source, self.path, "exec", dont_inherit=True)
        assert isinstance(compiled, CodeType)
        return compiled
