"""Read arrays by name from .npz files as untrusted input, and write them atomically."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections import Counter

import numpy as np

from ..errors import InputError
from ..types import Arrays, PathLike
from .file_replacement import replace_atomically

# Errors that numpy, zipfile and Python's parser (which reads the headers of arrays) raise for files of unknown origin.
_DAMAGED = (
    *(OSError, ValueError, TypeError, EOFError, OverflowError, MemoryError, RuntimeError, NotImplementedError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
# Maximum size in bytes of all arrays together. A zip of a few kilobytes can claim any size.
LIMIT = 8 * 2**30

# Maximum number of names that an error lists, and maximum number of characters that it quotes from a message.
_SHOWN = 4
_LONGEST = 200


def read_npz(path: PathLike, *, limit: int = LIMIT) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file.

    Nothing in the file is executed. Before any entry is read, the total size that the entries state is compared with
    ``limit``. .npy files have no name for bfloat16, so such arrays are returned as numpy writes them: two-byte voids
    ("V2").

    Args:
        limit: largest total size of the arrays in bytes.

    Returns:
        name → array.

    Raises:
        InputError: the file does not exist, is not an .npz of plain arrays, or is larger than ``limit`` bytes when
            unpacked.
    """
    label = repr(os.fspath(path))
    if not os.path.isfile(path):
        if os.path.lexists(path):
            wrong = f"{label} is not a regular file"
        else:
            wrong = f"file not found: {label}"
        raise InputError(f"{wrong}; write it with numpy.savez(file, name=array)")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _require_plain_members(label, members, limit)
            return {m.filename.removesuffix(".npy"): _read_member(archive, m) for m in members}
    except _DAMAGED as error:
        raise InputError(
            f"{label} is not an .npz file of arrays ({_shorten_error(error)}); write it with numpy.savez(file, "
            "name=array)"
        ) from error


def _require_plain_members(label: str, members: list[zipfile.ZipInfo], limit: int) -> None:
    total = sum(m.file_size for m in members)
    if total > limit:
        raise InputError(
            f"{label} unpacks to {total} bytes, but at most {limit} are read; pass smaller arrays, or use open_runner"
        )
    names = [m.filename for m in members]
    if twice := sorted(n for n, count in Counter(names).items() if count > 1):
        raise InputError(f"{label} holds {_abbreviate_names(twice)} twice; write each array once")
    if other := [n for n in names if not n.endswith(".npy")]:
        raise InputError(
            f"{label} holds {_abbreviate_names(other)}, which are not arrays; write it with numpy.savez(file, "
            "name=array)"
        )


def _abbreviate_names(names: list[str]) -> str:
    return f"{names[:_SHOWN]}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"


def _shorten_error(error: Exception) -> str:
    """Return the start of a library's message, because the message may quote an array's whole header."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} …"


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read one array. Its header is checked against the size of its entry before memory is allocated."""
    with archive.open(member) as file:
        major, _ = np.lib.format.read_magic(file)
        if major == 1:
            read = np.lib.format.read_array_header_1_0
        else:
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds pickled objects, which are never loaded")
        if (claimed := math.prod(shape) * dtype.itemsize) > member.file_size:
            raise ValueError(f"{member.filename} claims {claimed} bytes, but contains {member.file_size}")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def write_npz(path: PathLike, arrays: Arrays) -> None:
    """Write ``arrays`` as an uncompressed .npz file. An existing file is replaced only when the new file is complete.

    Raises:
        NormdeployError: as ``normdeploy.storage.file_replacement.replace_atomically``.
    """
    with replace_atomically(path) as written, zipfile.ZipFile(written, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def read_npy(path: PathLike, *, limit: int = LIMIT) -> np.ndarray:
    """Read the array of an .npy file. Nothing in the file is executed.

    Args:
        limit: largest size of the file in bytes.

    Returns:
        the array.

    Raises:
        InputError: the file does not exist, holds no plain array, or is larger than ``limit`` bytes.
    """
    label = repr(os.fspath(path))
    if not os.path.isfile(path):
        raise InputError(f"file not found: {label}; write it with numpy.save(file, array)")
    size = os.path.getsize(path)
    if size > limit:
        raise InputError(f"{label} has {size} bytes, but at most {limit} are read; pass a smaller array")
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except _DAMAGED as error:
        raise InputError(
            f"{label} is not a plain array ({_shorten_error(error)}); write it with numpy.save(file, array)"
        ) from error
