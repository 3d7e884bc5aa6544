"""Replace a folder atomically (files: ``normdeploy.storage.file_replacement``)."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import NormdeployError
from ..types import PathLike
from .file_replacement import _FULL, _unfinished, _unwind_on_sigterm, lock_folder, lock_handle, matching_siblings

# Value of RENAME_EXCHANGE, a flag of Linux's renameat2.
_EXCHANGE = 2
# Value of AT_FDCWD: paths are relative to the working directory.
_HERE = -100


@contextmanager
def replace_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield a new folder next to ``target``. It replaces ``target`` if the block ends without an exception, else it is
    removed.

    The old folder is removed after it is replaced. On Linux the two folders exchange their names in one step. On other
    systems and on file systems without this operation, the old folder is renamed first. If the new folder can't get the
    old name, the old folder is renamed back. Leftovers of killed runs are removed.

    Raises:
        NormdeployError: the parent folder is missing or can't be written to, or the disk is full.
    """
    if not target.parent.is_dir():
        raise NormdeployError(
            f"can't write {str(target)!r}: the folder {target.parent.name!r} does not exist; create it first"
        )
    _remove_dead_folders(target)
    fresh = _temporary_path(target)
    handle = -1
    try:
        fresh.mkdir()
        _unfinished.add(fresh)
        if sys.platform != "win32":
            handle = os.open(fresh, os.O_RDONLY)
            lock_handle(handle)
        with _unwind_on_sigterm():
            yield fresh
            _flush_folder(fresh)
            with lock_folder(target.parent):
                _replace_folder(fresh, target)
    except OSError as error:
        if error.errno in _FULL:
            free = shutil.disk_usage(target.parent).free
            raise NormdeployError(
                f"can't write {target.name!r}: {error.strerror} ({free / 1e6:.0f} MB are free there); free space or "
                "choose another folder. An existing folder is unchanged"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NormdeployError(
                f"can't write {target.name!r} to the folder {str(target.parent)!r}: {error.strerror}"
            ) from error
        raise
    finally:
        _unfinished.discard(fresh)
        # After an exchange of names, ``fresh`` is the old folder.
        shutil.rmtree(fresh, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


def require_empty_dir(folder: PathLike) -> Path:
    """Check that a folder can be created at ``folder``.

    Returns:
        the path with links followed.

    Raises:
        NormdeployError: a file or a folder with content exists there, or the parent folder does not exist.
    """
    target = Path(os.path.realpath(folder))
    if not target.parent.is_dir():
        raise NormdeployError(
            f"can't write {os.fspath(folder)!r}: the folder {target.parent.name!r} does not exist; create it first"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NormdeployError(
            f"can't write {os.fspath(folder)!r}: it already exists and is not an empty folder; choose another name"
        )
    return target


def _temporary_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def _remove_dead_folders(target: Path) -> None:
    """Remove folders of killed runs: folders that no process has locked."""
    if sys.platform == "win32":
        return
    for path in matching_siblings(target, rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp"):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            # The entry was removed in the meantime, belongs to another user, or is not a folder.
            continue
        if lock_handle(handle, wait=False):
            shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def _flush_folder(folder: Path) -> None:
    """Flush all content of a folder to the disk, so that the folder is complete even after a loss of power."""
    if sys.platform == "win32":
        return
    for here, _, names in os.walk(folder):
        for path in (*(os.path.join(here, name) for name in names), here):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _replace_folder(fresh: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        if sys.platform == "win32" and target.exists():
            target.rmdir()
        os.rename(fresh, target)
    elif not exchange_names(fresh, target):
        old = _temporary_path(target)
        os.rename(target, old)
        try:
            os.rename(fresh, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step, with Linux's renameat2.

    Returns:
        True if the names were exchanged; False if the system or the file system has no such operation.
    """
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
