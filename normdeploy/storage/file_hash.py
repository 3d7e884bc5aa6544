"""Hash the bytes of a file."""

from __future__ import annotations

import hashlib

from ..types import PathLike


def hash_file(path: PathLike) -> str:
    """Compute the SHA-256 of a file.

    Returns:
        the digest in hexadecimal.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
