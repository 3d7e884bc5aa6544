"""Reads a small file that somebody wrote by hand, and nothing else that may stand under its name."""

from __future__ import annotations

import os
import stat

from ..errors import InputError


def read_regular(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Read a whole file. A pipe, of which nobody may ever write the other end, and a device without end are refused
    before a byte is read.

    Raises:
        InputError: it is no regular file, or has more than ``most`` bytes.
        OSError: it can't be read.
    """
    # Without O_NONBLOCK the opening of a pipe itself waits.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{os.fspath(path)!r} is no regular file, and is not read; give the file itself")
        if status.st_size > most:
            raise InputError(f"{os.fspath(path)!r} has {status.st_size} bytes; at most {most} are read")
        return file.read(most)
