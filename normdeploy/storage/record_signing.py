"""Sign and verify the record of a file. A record must be signed because its flags may run code.

A signature is a small JSON document: HMAC-SHA256 over the record and over the hashes of the user's own modules that the
export imported. The signature is never inside the ONNX file, whose bytes are the same for everyone who exports the
model. There are two keys, and each has its own place for signatures:

- The user's key is created when it is first needed, and never leaves the machine. Its signatures are in the user's
  state folder, under the record's hash.
- A team's key is in the file that the environment variable ``NORMDEPLOY_KEY`` names. Its signature is next to the ONNX
  file, as ``m.onnx.sig``.

A signature states that a holder of the key ran these modules with these flags on the model file with this hash. So a
genuine signature is not valid for another record, another model file or a changed module.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError, NormdeployError
from ..types import PathLike
from .file_replacement import lock_folder, resolve_writable_path, write_bytes

TEAM_KEY = "NORMDEPLOY_KEY"
# Length in bytes of the user's key, and minimum length of a team's key.
_KEY_BYTES = 32
# Largest size of a signature or a team's key, in bytes.
_MOST = 1 << 20
# Schema number of the signature document.
_SIGNATURE = 1


def sign_record(
    content: Mapping[str, Any], path: PathLike | None = None, code: Mapping[str, str] | None = None
) -> None:
    """Sign a record: with the user's key in this user's store, and with a team's key in the folder of ``path``.

    If the user's key or store can't be written, the user's signature is not stored, and later commands need the flags
    again.

    Args:
        path: the exported file; None writes no team signature.
        code: hashes of the modules that the record imports, from ``find_signed_modules``; None takes the modules of the
            working directory that this process has imported.

    Raises:
        InputError: the team's key can't be used.
        NormdeployError: the team's signature can't be written to the file's folder.
    """
    if code is None:
        code = imported_module_hashes(Path.cwd())
    with suppress(OSError, NormdeployError):
        if (key := user_key(create=True)) is not None:
            stored = _stored_signature_path(content)
            stored.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(stored, signature_document(key, content, code))
    if path is not None and (key := read_team_key()) is not None:
        write_bytes(signature_path(path), signature_document(key, content, code))


def find_signed_modules(content: Mapping[str, Any], path: PathLike | None) -> tuple[dict[str, str] | None, str]:
    """Find the modules that a valid signature of this record covers.

    Returns:
        (modules, ""), where modules maps the path within the working directory → SHA-256. (None, reason) without a
        valid signature.

    Raises:
        InputError: the file has a team's signature, but the team's key can't be used.
    """
    if path is None:
        signature = None
    else:
        signature = _read_small_file(signature_path(path))
    if signature is not None:
        theirs = read_team_key()
    else:
        theirs = None
    own = user_key(create=False)
    both = ((own, _read_small_file(_stored_signature_path(content)) if own is not None else None), (theirs, signature))
    valid = [code for key, document in both if (code := _verify_document(key, content, document)) is not None]
    # Prefer a signature whose modules are unchanged. The user's signature may cover older modules, which the team has
    # since changed and signed again.
    if valid:
        return next((code for code in valid if not find_changed_module(code)), valid[0]), ""
    if signature is None or path is None:
        return None, "it was exported on another machine or by another user, and no team signature is next to it"
    if theirs is None:
        return (
            None,
            f"{signature_path(path).name!r} next to it is signed by another user, or by a team whose key is not in "
            f"{TEAM_KEY}",
        )
    return (
        None,
        f"{signature_path(path).name!r} next to it belongs to another record, or is signed with another key than the "
        f"one in {TEAM_KEY}",
    )


def find_changed_module(code: Mapping[str, str]) -> str:
    """Find the first module in the working directory that differs from its signed state.

    Args:
        code: path within the working directory → SHA-256.

    Returns:
        the module's path; "" if all modules are unchanged. A module that can't be read counts as changed.
    """
    for name, digest in code.items():
        try:
            if hashlib.sha256(Path(name).read_bytes()).hexdigest() != digest:
                return name
        except OSError:
            return name
    return ""


def signature_path(path: PathLike) -> Path:
    """Return the path of a team's signature for the file at ``path``.

    Returns:
        ``path`` with ".sig" appended.
    """
    return Path(f"{os.fspath(path)}.sig")


def require_usable_team_key(path: PathLike | None) -> None:
    """Check, before any work is done, that a configured team's key can be used and its signature can be written.

    Raises:
        InputError, NormdeployError: as ``sign_record``.
    """
    if read_team_key() is not None and path is not None:
        resolve_writable_path(signature_path(path))


def imported_module_hashes(folder: Path) -> dict[str, str]:
    """Hash the modules that this process has imported from ``folder``.

    Returns:
        path within the folder → SHA-256 of the source, sorted by path.
    """
    code: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        for place in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            if isinstance(file, str) and os.path.realpath(file) == os.path.realpath(folder / place):
                with suppress(OSError):
                    code[place] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return dict(sorted(code.items()))


# ------------------------------------------------------------------ the document


def signature_document(key: bytes, content: Mapping[str, Any], code: Mapping[str, str]) -> bytes:
    """Build the signature of a record and its modules.

    Returns:
        the JSON document as bytes.
    """
    return (
        json.dumps(
            {"normdeploy_signature": _SIGNATURE, "code": code, "hmac": _record_hmac(key, content, code)}, indent=1
        ).encode()
        + b"\n"
    )


def _record_hmac(key: bytes, content: Mapping[str, Any], code: Mapping[str, str]) -> str:
    return hmac.new(
        key, b"normdeploy signature 1\n" + _canonical_json({"record": content, "code": code}), hashlib.sha256
    ).hexdigest()


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _verify_document(key: bytes | None, content: Mapping[str, Any], document: bytes | None) -> dict[str, str] | None:
    """Verify a signature document.

    Returns:
        the module hashes that it covers; None if the document is malformed or was not made with this key for this
        record.
    """
    if key is None or document is None:
        return None
    try:
        value = json.loads(document)
        code = {str(name): str(digest) for name, digest in value["code"].items()}
        good = value["normdeploy_signature"] == _SIGNATURE and hmac.compare_digest(
            value["hmac"].encode(), _record_hmac(key, content, code).encode()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if good:
        return code
    return None


def _read_small_file(path: Path) -> bytes | None:
    """Read a regular file of at most `_MOST` bytes. Return None for a larger file and for a path that is not a regular
    file, because an attacker may have made them.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST:
            return file.read()
        return None


# ------------------------------------------------------------------ the keys


def read_team_key() -> bytes | None:
    """Read the key from the file that ``NORMDEPLOY_KEY`` names.

    Returns:
        the key without blanks at its ends; None if the variable is not set.

    Raises:
        InputError: the file can't be read or is too short. Or other users can read the file, so that they may know the
            key.
    """
    name = os.environ.get(TEAM_KEY, "")
    if not name:
        return None
    try:
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                key = file.read(_MOST).strip()
            else:
                key = b""
    except OSError as error:
        raise InputError(
            f"the team's key {name!r} ({TEAM_KEY}) can't be read: {error.strerror}; set it to another file, or unset it"
        ) from error
    if not is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise InputError(
            f"the team's key {name!r} ({TEAM_KEY}) can be read or changed by others (mode {mode:o}, owner "
            f"{status.st_uid}), who could sign code for you to run; use a copy that only you can access, with mode "
            "600"
        )
    if len(key) < _KEY_BYTES:
        raise InputError(
            f"the team's key {name!r} ({TEAM_KEY}) has {len(key)} bytes, but needs at least {_KEY_BYTES}; create one "
            "with openssl rand -hex 32"
        )
    return key


def is_private(status: os.stat_result) -> bool:
    """Return True if only this user can read or change the file.

    Returns:
        True on systems without POSIX permissions.
    """
    return os.name != "posix" or (not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and status.st_uid == os.getuid())


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "normdeploy"


def _stored_signature_path(content: Mapping[str, Any]) -> Path:
    return _state_folder() / "signed" / hashlib.sha256(_canonical_json(content)).hexdigest()


def user_key(*, create: bool) -> bytes | None:
    """Read or create this user's key.

    Args:
        create: True creates the key if it is missing or unusable.

    Returns:
        the key; None if no key exists and none could be created. A record is then not signed, and no signature of the
        user is found.
    """
    # A RuntimeError means that the user has no home folder.
    with suppress(OSError, RuntimeError):
        folder = _state_folder()
        path = folder / "key"
        if (key := _read_usable_key(path)) is not None or not create:
            return key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # If several processes find no key, only one creates it.
        with lock_folder(folder):
            if (key := _read_usable_key(path)) is None:
                fresh = folder / f".key.{secrets.token_hex(8)}.tmp"
                with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(key := secrets.token_bytes(_KEY_BYTES))
                os.replace(fresh, path)
        return key
    return None


def _read_usable_key(path: Path) -> bytes | None:
    """Read a key. Return None if the key is missing or truncated, or if other users could read it."""
    try:
        status = path.stat()
        key = path.read_bytes()
    except OSError:
        return None
    if is_private(status) and len(key) == _KEY_BYTES:
        return key
    return None
