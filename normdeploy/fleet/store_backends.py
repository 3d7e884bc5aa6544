"""Access the backend of a store: a folder, or a remote file system of fsspec (S3, GCS, Azure, ...).

A backend stores bytes under names. It guarantees two things: an object appears only when it is complete, and if several
drivers ``create`` the same name, only one driver succeeds. A folder achieves both guarantees by a temporary name and a
hard link. A remote object store writes an object whole or not at all, and its conditional put refuses a second object
of the same name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import StoreError

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True)
class ObjectEntry:
    """Object in a backend: name, size in bytes, and time of writing in seconds since 1970."""

    name: str
    bytes: int
    written: float


class StoreBackend(Protocol):
    """Backend of a store. Every method raises StoreError if the backend can't be reached or written.

    Attributes:
        url: path or URL of the backend.
        local: True if a query takes only microseconds, as in a folder.
    """

    url: str
    local: bool

    def read(self, name: str) -> bytes | None:
        """Read a whole object.

        Returns:
            its bytes; None if the object does not exist.
        """

    def fetch(self, name: str, target: Path) -> bool:
        """Copy an object into a new file. The file is a real copy, not a link.

        Returns:
            False if the object does not exist.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object, whole or not at all.

        Returns:
            False if an object of this name exists. The existing object is left unchanged.
        """

    def store_file(self, name: str, file: Path) -> None:
        """Store the bytes of ``file`` as an object, unless it exists.

        The object may be a hard link to ``file``, so ``file`` must not be changed afterwards.
        """

    def size(self, name: str) -> int | None:
        """Return the size of an object.

        Returns:
            bytes; None if the object does not exist.
        """

    def list_entries(self, prefix: str) -> Iterator[ObjectEntry]:
        """List all objects under a prefix that ends with "/".

        Returns:
            an iterator over the entries.
        """

    def delete(self, name: str) -> None:
        """Remove an object if it exists."""

    def claim(self, name: str) -> Callable[[], None] | None:
        """Claim a name exclusively, until it is released or this process ends.

        Returns:
            a function that releases the claim; None if the name is claimed already.
        """


class FolderBackend:
    """Backend in a folder of this machine, or of a network file system with locks and hard links."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)
        with self._convert_os_errors():
            for part in ("objects", "steps", "runs", "claims", "work"):
                (root / part).mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """Read a whole object, which must be a regular file.

        Returns:
            its bytes; None if the object does not exist.
        """
        with self._convert_os_errors():
            try:
                # Without O_NONBLOCK, opening a pipe would block.
                handle = os.open(self.root / name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            except FileNotFoundError:
                self._require_folder()
                return None
            with open(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise StoreError(f"{name} in the store {self.url!r} is not a regular file; remove it")
                return file.read()

    def fetch(self, name: str, target: Path) -> bool:
        with self._convert_os_errors():
            try:
                shutil.copyfile(self.root / name, target)
            except FileNotFoundError:
                self._require_folder()
                return False
            return True

    def create(self, name: str, data: bytes) -> bool:
        with self._convert_os_errors(), self._temporary_file(name) as written:
            with open(written, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return self._link_new_file(written, name)

    def store_file(self, name: str, file: Path) -> None:
        with self._convert_os_errors():
            if (self.root / name).exists():
                return
            with self._temporary_file(name) as written:
                try:
                    os.link(file, written)
                except OSError as error:
                    # The file is on another file system, or its file system has no hard links.
                    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
                        raise
                    shutil.copyfile(file, written)
                with open(written, "rb+") as opened:
                    os.fsync(opened.fileno())
                self._link_new_file(written, name)

    def size(self, name: str) -> int | None:
        with self._convert_os_errors():
            try:
                return (self.root / name).stat().st_size
            except FileNotFoundError:
                self._require_folder()
                return None

    def list_entries(self, prefix: str) -> Iterator[ObjectEntry]:
        self._require_folder()
        for here, _, names in os.walk(self.root / prefix):
            for name in names:
                path = Path(here) / name
                # The object may have been garbage-collected in the meantime.
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    yield ObjectEntry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def delete(self, name: str) -> None:
        with self._convert_os_errors():
            (self.root / name).unlink(missing_ok=True)

    def claim(self, name: str) -> Callable[[], None] | None:
        """Take a lock on a name. The kernel releases the lock when the process ends in any way.

        Returns:
            a function that releases the lock; None if another process has the lock.
        """
        # Windows has no lock that ends with the process, so leftovers are not removed there.
        if sys.platform == "win32":
            return lambda: None
        path = self.root / "claims" / name
        with self._convert_os_errors():
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(handle)
                    return None
                if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                    break
                # The process that had the lock removed the file between the two calls.
                os.close(handle)

        def release_lock() -> None:
            path.unlink(missing_ok=True)
            os.close(handle)

        return release_lock

    @contextlib.contextmanager
    def _temporary_file(self, name: str) -> Iterator[Path]:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        with locked_temporary_folder(self.root / "work") as folder:
            yield folder / "written"

    def _link_new_file(self, written: Path, name: str) -> bool:
        try:
            os.link(written, self.root / name)
        except FileExistsError:
            return False
        return True

    def _require_folder(self) -> None:
        if not self.root.is_dir():
            raise StoreError(f"the store {self.url!r} no longer exists; mount it again, or pass another one")

    @contextlib.contextmanager
    def _convert_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.root.is_dir():
                free = shutil.disk_usage(self.root).free / 1e6
            else:
                free = None
            if free is None:
                room = ""
            else:
                room = f" ({free:.0f} MB are free)"
            raise StoreError(
                f"the store {self.url!r} can't be used: {error.strerror or error}{room}; stored results are "
                "intact, and the next run resumes from them"
            ) from error


@contextlib.contextmanager
def locked_temporary_folder(base: Path | None) -> Iterator[Path]:
    """Yield a new temporary folder, locked while its owner lives and removed afterwards.

    A folder without a lock is a leftover of a killed run (`normdeploy.fleet.step_execution.remove_leftovers`).

    Args:
        base: parent folder; None for the system's temporary folder.
    """
    while True:
        made = tempfile.TemporaryDirectory(prefix="step.", dir=base, ignore_cleanup_errors=True)
        with made as name:
            # Windows has no lock that ends with the process, so leftovers are not removed there.
            if sys.platform == "win32":
                yield Path(name)
                return
            handle = -1
            try:
                # Another process may have removed the new folder as a leftover before this process locked it.
                with contextlib.suppress(FileNotFoundError):
                    handle = os.open(name, os.O_RDONLY)
                    fcntl.flock(handle, fcntl.LOCK_EX)
                if handle >= 0 and os.path.isdir(name):
                    yield Path(name)
                    return
            finally:
                if handle >= 0:
                    os.close(handle)
