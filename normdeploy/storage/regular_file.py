"""Read a small file that a user wrote. Devices, endless pipes and large files are refused."""

from __future__ import annotations

import os
import select
import stat
import time

from ..errors import InputError
from ..types import PathLike

# Maximum seconds until a pipe must have ended.
PATIENCE = 10.0


def read_regular(path: PathLike, *, most: int) -> bytes:
    """Read a whole file, or a pipe that a shell made (``<(...)``).

    An endless device is refused before a byte is read.

    Args:
        most: largest number of bytes that is accepted.

    Returns:
        the content.

    Raises:
        InputError: the path is neither a file nor a pipe, or the content has more than ``most`` bytes. Or a pipe stays
            empty or does not end within `PATIENCE` seconds.
        OSError: the file can't be read.
    """
    # Without O_NONBLOCK, opening a pipe would block.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if stat.S_ISFIFO(status.st_mode):
            return _read_pipe(path, handle, most)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{os.fspath(path)!r} is not a regular file, so it is not read; pass the file itself")
        if status.st_size > most:
            raise _make_length_error(path, status.st_size, most)
        return file.read(most)


def _read_pipe(path: PathLike, handle: int, most: int) -> bytes:
    """Read a pipe until all of its writers have closed the pipe."""
    parts = list[bytes]()
    size = 0
    deadline = time.monotonic() + PATIENCE
    while (left := deadline - time.monotonic()) > 0:
        try:
            part = os.read(handle, 2**16)
        except BlockingIOError:
            select.select([handle], [], [], left)
            continue
        if not part:
            # A read from a pipe that no process has opened for writing also returns no bytes.
            if parts:
                return b"".join(parts)
            raise InputError(f"{os.fspath(path)!r} is a pipe without data; pass a file")
        parts.append(part)
        size += len(part)
        if size > most:
            raise _make_length_error(path, size, most)
    raise InputError(f"{os.fspath(path)!r} is a pipe that did not end in {PATIENCE:g} seconds; pass a file")


def _make_length_error(path: PathLike, size: int, most: int) -> InputError:
    return InputError(f"{os.fspath(path)!r} has {size} bytes or more; at most {most} are read")
