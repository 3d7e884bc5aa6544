"""Replace files atomically, so that an incomplete file never appears under its final name.

An output is written under a temporary name in its own folder (a rename is atomic only within one file system), flushed
to the disk and renamed. The process that writes the temporary file locks it. So a temporary file without a lock is a
leftover of a killed run, and is removed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..errors import NormdeployError
from ..types import PathLike

if sys.platform != "win32":
    import fcntl

# Temporary files and folders of this process.
_unfinished: set[Path] = set()
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_atomically(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path in the same folder. It replaces ``path`` if the block ends without an exception.

    After any exception, including Ctrl-C and SIGTERM, ``path`` is unchanged and the temporary file is removed. Symbolic
    links are followed. The new file gets the permissions of the file that it replaces.

    Raises:
        NormdeployError: the folder is missing or can't be written to, ``path`` is not a regular file, or the disk is
            full.
    """
    target = resolve_writable_path(path)
    with temporary_beside(target) as written:
        yield written
        commit_temporary(written, target)


def write_bytes(path: PathLike, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically (see ``replace_atomically``)."""
    with replace_atomically(path) as written:
        written.write_bytes(data)


def resolve_writable_path(path: PathLike) -> Path:
    """Follow links in ``path`` and check that a file can be renamed to the result.

    Returns:
        the final path of the output.

    Raises:
        NormdeployError: the folder is missing, or ``path`` exists and is not a regular file.
    """
    target = Path(os.path.realpath(path))
    try:
        if not target.parent.is_dir():
            raise NormdeployError(
                f"can't write {str(path)!r}: the folder {target.parent.name!r} does not exist; create it first"
            )
        if target.exists() and not target.is_file():
            raise NormdeployError(
                f"can't write {str(path)!r}: it exists and is not a regular file; choose another name"
            )
    except OSError as error:
        # This happens if, for example, the name is too long.
        raise NormdeployError(f"can't write {str(path)!r}: {error.strerror}; choose another name") from error
    return target


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """Yield a locked temporary file in the folder of ``target``. After the block, the file is removed unless the block
    renamed it.

    Raises:
        NormdeployError: the folder can't be written to, or the disk is full.
    """
    _remove_dead_temporaries(target)
    try:
        handle, path = _create_temporary(target)
    except OSError as error:
        raise NormdeployError(
            f"can't write {target.name!r} to the folder {str(target.parent)!r}: {error.strerror}"
        ) from error
    _unfinished.add(path)
    try:
        with _unwind_on_sigterm():
            yield path
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(target.parent).free
        raise NormdeployError(
            f"can't write {target.name!r}: {error.strerror} ({free / 1e6:.0f} MB are free in its folder); free space "
            "or choose another folder. An existing file is unchanged"
        ) from error
    finally:
        path.unlink(missing_ok=True)
        _unfinished.discard(path)
        os.close(handle)


def remove_unfinished() -> None:
    """Remove the temporary files of this process. Call this before the process ends without leaving the blocks that use
    the files.
    """
    for path in list(_unfinished):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _create_temporary(target: Path) -> tuple[int, Path]:
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock_handle(handle)
        # Another process may have removed the new file as a leftover before this process locked it.
        if path.exists():
            return handle, path
        os.close(handle)


def _remove_dead_temporaries(target: Path) -> None:
    """Remove temporary files of killed runs: files that no process has locked."""
    for path in matching_siblings(target, rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp"):
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            # The file was removed in the meantime, or belongs to another user.
            continue
        if lock_handle(handle, wait=False):
            path.unlink(missing_ok=True)
        os.close(handle)


def matching_siblings(target: Path, pattern: str) -> Sequence[Path]:
    """List the entries of the target's folder whose whole name matches the regular expression ``pattern``.

    Returns:
        the paths of files and folders.
    """
    return [entry for entry in target.parent.iterdir() if re.fullmatch(pattern, entry.name)]


def lock_handle(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file exclusively; the kernel releases the lock when the process ends.

    Args:
        wait: True waits until the lock is free, False fails at once.

    Returns:
        True if the lock was taken. On Windows nothing is locked, and the result is ``wait``.
    """
    # Windows has no lock that ends with the process, so leftovers are not removed there.
    if sys.platform == "win32":
        return wait
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        # Another process holds the lock, or the file system has no locks.
        return False
    return True


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` within the context, so that only one process at a time renames files in it."""
    if sys.platform == "win32" or Path(os.path.realpath(folder)) in _unfinished:
        # No lock is needed in a new folder of this process, which is locked as long as the process writes it.
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_handle(handle)
        yield
    finally:
        os.close(handle)


def commit_temporary(temporary: Path, target: Path) -> None:
    """Flush ``temporary`` to the disk and rename it to ``target``. Then flush the folder, because the rename changes
    the folder.
    """
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    if target.exists():
        os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
    os.replace(temporary, target)
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _unwind_on_sigterm() -> Iterator[None]:
    """Let SIGTERM run the cleanup as Ctrl-C does, unless the program has its own handler of SIGTERM."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
