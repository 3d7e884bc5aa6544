"""TensorRT-RTX's runtime cache: the kernels that it compiles for this GPU when an engine first runs, kept in a file
beside the engine.

The library compares the file with the GPU, the driver and its own version, and takes none that differs
(``IRuntimeCache.deserialize``). The file is replaced whole, and only where there is something new to keep; of two
runners that write at once the last one's stays.
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
    """Where the cache of an engine lies unless another place is named."""
    path = Path(engine)
    return path.with_name(path.name + SUFFIX)


class RuntimeCache:
    """The cache of one engine that is being run.

    Args:
        engine: its file.
        runtime: "tensorrt-rtx", or "tensorrt", which has no such cache.
        wanted: None reads the file beside the engine where there is one and writes nothing; True writes it too, when
            the runner is closed; a path is another file, read and written; False is no cache.

    Raises:
        InputError: a cache is asked for with an engine for TensorRT, or would replace the engine.
        NormdeployError: it could not be written.
    """

    def __init__(self, engine: PathLike, runtime: str, wanted: Wanted) -> None:
        if wanted and runtime != "tensorrt-rtx":
            raise InputError(
                f"{Path(engine).name} is an engine for TensorRT, whose kernels are compiled when it is built: it has no"
                " runtime cache; leave runtime_cache out"
            )
        if isinstance(wanted, bool | None):
            self.path = default_cache_path(engine)
        else:
            self.path = Path(wanted)
        if os.path.realpath(self.path) == os.path.realpath(engine):
            raise InputError(f"the runtime cache {str(self.path)!r} would replace the engine; give another name")
        self._writes = bool(wanted)
        if self._writes:
            resolve_writable_path(self.path)
        self._reads = runtime == "tensorrt-rtx" and wanted is not False
        self._cache: Any = None
        self._before = b""

    def attach(self, config: Any) -> str | None:
        """Give the cache to an IRuntimeConfig; why the file was not used, None where it was or there is none."""
        if not self._reads or not (self._writes or self.path.is_file()):
            return None
        self._cache = config.create_runtime_cache()
        warning = ""
        if self.path.is_file():
            self._before = self.path.read_bytes()
            if not self._cache.deserialize(self._before):
                warning = (
                    f"the runtime cache {self.path.name} was not used: it is damaged, or was made on another GPU, with"
                    " another driver or by another version"
                )
        config.set_runtime_cache(self._cache)
        return warning

    def save(self) -> None:
        """Write what has been compiled, where it is to be kept and is new."""
        if self._cache is None or not self._writes:
            return
        now = bytes(self._cache.serialize())
        if now and now != self._before:
            write_bytes(self.path, now)
            self._before = now
