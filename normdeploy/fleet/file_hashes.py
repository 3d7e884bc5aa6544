"""Hash files outside the store, and reuse a file's hash until the file changes.

A file counts as unchanged if its size, modification time (nanoseconds), inode and status change time are the same. If a
file changed less than two seconds before it was hashed, it is hashed again next time, because a second change could go
unnoticed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onnx.external_data_helper import uses_external_data

from ..errors import InputError, NormdeployError, StoreError
from ..storage.file_hash import hash_file
from ..storage.file_replacement import write_bytes
from ..storage.onnx_files import iter_tensors, load_onnx
from .step_store import StepStore, StoredFile
from .store_backends import FolderBackend

# Folders that are not hashed, because they differ between copies of the same model (docs/reference/teams.md).
_SKIPPED = frozenset({".git", ".cache", "__pycache__"})
# Minimum time in nanoseconds since a file's last change for its hash to be remembered.
_YOUNG = 2_000_000_000


class FileHashes:
    """Remember the hashes of files.

    Other users may write to the store. Suppose that they could replace a model's remembered hash by the hash of another
    model. The user of the first model would then get the results of the other model, even with a signature. So
    remembered hashes are sealed in the same way as records.

    Args:
        memory: file with the remembered hashes, which is read now and written by ``save``. None remembers nothing.
        seal: as for `normdeploy.fleet.step_store.StepStore`.
        opened: as for `normdeploy.fleet.step_store.StepStore`.
    """

    def __init__(
        self,
        memory: Path | None = None,
        seal: Callable[[bytes], bytes] = bytes,
        opened: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._memory = memory
        self._seal = seal
        self._changed = False
        self._known: dict[str, list[object]] = {}
        self._seen: dict[Path, dict[str, tuple[Path, StoredFile]]] = {}
        if memory is not None and memory.is_file():
            with suppress(OSError, ValueError, TypeError, AttributeError, StoreError):
                told = json.loads(opened(memory.read_bytes()))
                self._known = {str(k): list(v) for k, v in told.items()}

    @classmethod
    def load_cache(cls, store: StepStore) -> FileHashes:
        """Load the hashes that a store remembers.

        Returns:
            the hashes. A store that is not a folder of this machine remembers none.
        """
        if not isinstance(store.place, FolderBackend):
            return cls()
        return cls(store.place.root / "hashes.json", store.seal, store.opened)

    def hash_path(self, place: str, path: Path) -> dict[str, tuple[Path, StoredFile]]:
        """Hash a file, or all files of a folder. Each file is hashed only once in a run.

        For an ONNX file, the result includes the files with its external weights.

        Args:
            place: path of the file or folder in the step's folder.

        Returns:
            path in the step's folder → (file, content).

        Raises:
            InputError: a file can't be read.
        """
        if path not in self._seen:
            try:
                self._seen[path] = {name: (file, self._hash_file(file)) for name, file in _list_files(path)}
            except OSError as error:
                raise InputError(f"can't read {str(path)!r}: {error.strerror}") from error
        return {os.path.normpath(f"{place}/{name}") if name else place: told for name, told in self._seen[path].items()}

    def save(self) -> None:
        """Write the hashes to ``memory`` if there are new hashes."""
        if self._memory is not None and self._changed:
            # Remembered hashes only save time, so errors are ignored.
            with suppress(NormdeployError):
                write_bytes(self._memory, self._seal(json.dumps(self._known).encode()))

    def _hash_file(self, file: Path) -> StoredFile:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"{str(file)!r} is not a regular file, but would be read as one; remove it from the folder"
            )
        state: list[object] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(str(file))
        if known is not None and known[:-1] == state:
            return StoredFile(str(known[-1]), status.st_size)
        digest = hash_file(file)
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _YOUNG:
            self._known[str(file)] = [*state, digest]
            self._changed = True
        return StoredFile(digest, status.st_size)


def _list_files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [("", path), *_list_external_data(path)]
    found = []
    walked = set[str]()
    for here, folders, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(here)) in walked:
            raise InputError(f"{here!r} links to a folder that contains it or was already visited; remove the link")
        walked.add(real)
        folders[:] = sorted(f for f in folders if f not in _SKIPPED)
        found += [((Path(here) / n).relative_to(path).as_posix(), Path(here) / n) for n in sorted(names)]
    return found


def _list_external_data(path: Path) -> list[tuple[str, Path]]:
    """List the files with an ONNX file's external weights. Each file is returned as "../NAME", because it is in the
    same folder as the ONNX file.
    """
    if path.suffix != ".onnx":
        return []
    names = set[str]()
    for tensor in iter_tensors(load_onnx(path, external_data=False)):
        if uses_external_data(tensor):
            names |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    for name in names:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise InputError(
                f"{path.name} stores weights in {name!r}, outside its folder; write it again with the weights beside it"
            )
    return [(f"../{name}", path.parent / name) for name in sorted(names)]
