"""Reads a small file that somebody wrote by hand, and nothing else that may stand under its name."""

from __future__ import annotations

import os
import select
import stat
import time

from ..errors import InputError
from ..types import PathLike

# seconds for which a pipe may say nothing and yet be read
PATIENCE = 10.0


def read_regular(path: PathLike, *, most: int) -> bytes:
    """Read a whole file, or a pipe that a shell made (``<(...)``). A device without end is refused before a byte is
    read.

    Raises:
        InputError: it is neither, or has more than ``most`` bytes; or nobody writes into the pipe.
        OSError: it can't be read.
    """
    # Without O_NONBLOCK the opening of a pipe itself waits.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if stat.S_ISFIFO(status.st_mode):
            return _read_pipe(path, handle, most)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{os.fspath(path)!r} is no regular file, and is not read; give the file itself")
        if status.st_size > most:
            raise _make_length_error(path, status.st_size, most)
        return file.read(most)


def _read_pipe(path: PathLike, handle: int, most: int) -> bytes:
    """Read until all who write into a pipe have closed it."""
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
            # Without a writer a pipe looks as if it had ended.
            if parts:
                return b"".join(parts)
            raise InputError(f"{os.fspath(path)!r} is a pipe into which nothing was written; give a file")
        parts.append(part)
        size += len(part)
        if size > most:
            raise _make_length_error(path, size, most)
    raise InputError(f"{os.fspath(path)!r} is a pipe that did not end in {PATIENCE:g} seconds; give a file")


def _make_length_error(path: PathLike, size: int, most: int) -> InputError:
    return InputError(f"{os.fspath(path)!r} has {size} bytes or more; at most {most} are read")
