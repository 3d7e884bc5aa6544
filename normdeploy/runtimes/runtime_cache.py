"""Keep TensorRT-RTX's runtime cache in a file in the engine's folder. The cache holds the kernels that the library
compiles for this GPU at an engine's first run.

The library compares the file with the GPU, the driver and its own version, and rejects a file that differs
(``IRuntimeCache.deserialize``). The file is replaced whole, and only if there are new kernels. If two runners write at
the same time, the file of the last writer remains.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.file_replacement import resolve_writable_path, write_bytes
from ..types import PathLike

SUFFIX = ".runtime-cache"
Wanted = bool | PathLike | None


def default_cache_path(engine: PathLike) -> Path:
    """Return the default path of an engine's cache: the engine's path with the suffix ".runtime-cache".

    Returns:
        Path in the engine's folder.
    """
    path = Path(engine)
    return path.with_name(path.name + SUFFIX)


class RuntimeCache:
    """Cache of one engine that is being run.

    Args:
        engine: the engine file.
        runtime: "tensorrt-rtx", or "tensorrt", which has no such cache.
        wanted: None reads the cache at the default path if the file exists, and writes nothing. True reads that file
            too, and writes it when the runner is closed. A path names another file to read and write. False uses no
            cache.

    Raises:
        InputError: a cache is requested with an engine for TensorRT, or would replace the engine.
        NormdeployError: the cache's path can't be written.
    """

    def __init__(self, engine: PathLike, runtime: str, wanted: Wanted) -> None:
        if wanted and runtime != "tensorrt-rtx":
            raise InputError(
                f"{Path(engine).name} is a TensorRT engine, whose kernels were compiled during its build: it has no "
                "runtime cache; omit runtime_cache"
            )
        if isinstance(wanted, bool | None):
            self.path = default_cache_path(engine)
        else:
            self.path = Path(wanted)
        if os.path.realpath(self.path) == os.path.realpath(engine):
            raise InputError(f"the runtime cache {str(self.path)!r} would replace the engine; pass another path")
        self._writes = bool(wanted)
        if self._writes:
            resolve_writable_path(self.path)
        self._reads = runtime == "tensorrt-rtx" and wanted is not False
        self._cache: Any = None
        self._before = b""

    def attach(self, config: Any) -> str | None:
        """Give the cache to an IRuntimeConfig.

        Returns:
            The reason why the file was not used; "" or None if the file was used or does not exist.
        """
        if not self._reads or not (self._writes or self.path.is_file()):
            return None
        self._cache = config.create_runtime_cache()
        warning = ""
        if self.path.is_file():
            self._before = self.path.read_bytes()
            if not self._cache.deserialize(self._before):
                warning = (
                    f"the runtime cache {self.path.name} was not used: it is damaged, or was written on another GPU, "
                    "with another driver or by another version"
                )
        config.set_runtime_cache(self._cache)
        return warning

    def save(self) -> None:
        """Write the compiled kernels to the file, if the user requested this and the cache has changed."""
        if self._cache is None or not self._writes:
            return
        now = bytes(self._cache.serialize())
        if now and now != self._before:
            write_bytes(self.path, now)
            self._before = now
