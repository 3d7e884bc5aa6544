"""The modules that a signature names, and no others of the working directory, compiled from the very bytes that were
compared.

Where flags come from a record, the folder at hand may come from a stranger together with files that were signed: a
changed module in it must not run, nor one that was not there and takes the place of a library, nor a cached ``.pyc``
beside the right source.
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
    """Within the block the working directory is importable as far as ``code`` says, path within it -> SHA-256 of the
    source."""
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
    def __init__(self, folder: Path, code: Mapping[str, str]) -> None:
        self.folder = folder
        self.code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = name.replace(".", "/")
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if file in self.code:
                loader = _HashedLoader(name, str(self.folder / file), self.code[file])
                # no search path: a module of the package that is not named is not found
                locations: list[str] | None
                if file.endswith("/__init__.py"):
                    locations = []
                else:
                    locations = None
                return importlib.util.spec_from_file_location(
                    name, self.folder / file, loader=loader, submodule_search_locations=locations
                )
        # a folder without __init__.py
        if any(file.startswith(f"{place}/") for file in self.code):
            return ModuleSpec(name, None, is_package=True)
        return None


class _HashedLoader(SourceFileLoader):
    """Compiles what it has hashed, and takes nothing from a cache."""

    def __init__(self, name: str, path: str, digest: str) -> None:
        super().__init__(name, path)
        self.digest = digest

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if hashlib.sha256(source).hexdigest() != self.digest:
            raise InputError(
                f"{self.path} is not the module of this name that was signed; give --model or --import, if you trust it"
            )
        compiled: Any = compile(source, self.path, "exec", dont_inherit=True)
        assert isinstance(compiled, CodeType)
        return compiled
