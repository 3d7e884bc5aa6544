"""Replacing files so that nothing half-written ever stands under its final name.

An output is written under a temporary name in its own folder (a rename is atomic only within one file system), flushed
to the disk and renamed. The temporary is locked while its writer lives, so that what a killed run left behind is told
from what another process is writing now, and removed.
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

# the temporaries of this process
_unfinished: set[Path] = set()
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replace_atomically(path: PathLike) -> Iterator[Path]:
    """A temporary path beside ``path``; what the block writes there replaces ``path`` if the block ends without an
    exception.

    On any exception, Ctrl-C and SIGTERM included, ``path`` is what it was before and the temporary is gone. A symbolic
    link is followed, the permissions of a file that is replaced are kept.

    Raises:
        NormdeployError: the folder is missing or can't be written to, ``path`` is no regular file, or the disk is full.
    """
    target = resolve_writable_path(path)
    with temporary_beside(target) as written:
        yield written
        commit_temporary(written, target)


def write_bytes(path: PathLike, data: bytes) -> None:
    """``data`` under ``path``, whole or not at all (see ``replace_atomically``)."""
    with replace_atomically(path) as written:
        written.write_bytes(data)


def resolve_writable_path(path: PathLike) -> Path:
    """Where the output is to stand, links followed; refused where it can't be replaced by a rename."""
    target = Path(os.path.realpath(path))
    try:
        if not target.parent.is_dir():
            raise NormdeployError(
                f"can't write {str(path)!r}: there is no folder {target.parent.name!r}; make it first"
            )
        if target.exists() and not target.is_file():
            raise NormdeployError(f"can't write {str(path)!r}: it exists and is not a regular file; give another name")
    except OSError as error:
        # the name is too long
        raise NormdeployError(f"can't write {str(path)!r}: {error.strerror}; give another name") from error
    return target


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """A locked temporary beside ``target``, gone after the block unless the block renamed it."""
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
            f"can't write {target.name!r}: {error.strerror} ({free / 1e6:.0f} MB are free in its folder); make room or"
            " choose another folder. What stood there before is untouched"
        ) from error
    finally:
        path.unlink(missing_ok=True)
        _unfinished.discard(path)
        os.close(handle)


def remove_unfinished() -> None:
    """Remove the temporaries of this process, which is about to end without leaving their blocks."""
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
        # another process may have taken it for a left-over before it was locked
        if path.exists():
            return handle, path
        os.close(handle)


def _remove_dead_temporaries(target: Path) -> None:
    """Remove the temporaries of runs that are dead: those whose lock nobody holds."""
    for path in matching_siblings(target, rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp"):
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            # gone in the meantime, or another user's
            continue
        if lock_handle(handle, wait=False):
            path.unlink(missing_ok=True)
        os.close(handle)


def matching_siblings(target: Path, pattern: str) -> Sequence[Path]:
    """What stands in the target's folder under a name of this form."""
    return [entry for entry in target.parent.iterdir() if re.fullmatch(pattern, entry.name)]


def lock_handle(handle: int, *, wait: bool = True) -> bool:
    """Take the file's lock, which the kernel gives back when the process ends; False where that is not possible."""
    # has no such lock: there left-overs are not removed
    if sys.platform == "win32":
        return wait
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        # held, or a file system without locks
        return False
    return True


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """One writer at a time in ``folder``, for the moment of the renames."""
    if sys.platform == "win32" or Path(os.path.realpath(folder)) in _unfinished:
        # a new folder of ours is locked as long as it is written
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_handle(handle)
        yield
    finally:
        os.close(handle)


def commit_temporary(temporary: Path, target: Path) -> None:
    """Flush ``temporary`` to the disk and rename it; the rename itself is flushed with the folder."""
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
    """Let SIGTERM run the cleanup, as Ctrl-C does; a program's own handler is left alone."""
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
