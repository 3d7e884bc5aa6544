"""Load keys from PEM files: private keys to sign, and public keys of trusted signers.

Keys are Ed25519 and ECDSA on P-256, as ``openssl genpkey`` writes them. Ed25519 signatures of equal data are equal.
ECDSA signatures differ, because they contain a random number.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RuntimeUnavailable
from ..storage.record_signing import is_private

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, Key

# Maximum number of bytes that are read from a PEM file
_MOST = 1 << 16
_MAKE = "openssl genpkey -algorithm ed25519 -out KEY.pem; openssl pkey -in KEY.pem -pubout -out PUBLIC.pem"


class Signer:
    """Private key that signs. A pickled `Signer` contains the path of the file, never the key."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load the key.

        Args:
            path: PEM file of a private key.

        Raises:
            InputError: the file can't be read, other users can read it, or it has no private key of a supported type.
            RuntimeUnavailable: a library is missing.
        """
        self.path = os.path.abspath(path)
        self.signer = _load_signer(self.path)

    @property
    def public_key(self) -> Key:
        """Return the public key that verifies the signatures of this key.

        Returns:
            public key.
        """
        return self.signer.public_key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


def load_public_keys(paths: Sequence[str | os.PathLike[str]]) -> tuple[Key, ...]:
    """Load the public keys of PEM files.

    Returns:
        one key per file.

    Raises:
        InputError: a file can't be read, or has no public key of a supported type.
        RuntimeUnavailable: a library is missing.
    """
    if paths:
        require_signing_libraries()
    return tuple(_load_public_key(os.fspath(path)) for path in paths)


def require_signing_libraries() -> None:
    """Check that the libraries for signatures are installed.

    Raises:
        RuntimeUnavailable: a library is missing.
    """
    try:
        for name in ("cryptography", "securesystemslib.dsse"):
            importlib.import_module(name)
    except ImportError as error:
        raise RuntimeUnavailable(
            f"signatures need a library that is not installed ({error}); pip install 'normdeploy[sign]'"
        ) from error


def _load_signer(path: str) -> CryptoSigner:
    require_signing_libraries()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    data, status = _read_pem(path, "private key")
    if not is_private(status):
        raise InputError(
            f"the private key {path!r} can be read or changed by others (mode {stat.S_IMODE(status.st_mode):o}, "
            f"owner {status.st_uid}), who could sign in your name; use a key that only you could ever read, with "
            "mode 600"
        )
    try:
        key = load_pem_private_key(data, None)
    except TypeError as error:
        raise InputError(
            f"the private key {path!r} is protected by a password; pass one without, with mode 600"
        ) from error
    except ValueError as error:
        raise InputError(f"{path!r} contains no private key in PEM format; create one with {_MAKE}") from error
    return CryptoSigner(key, _name_key(key.public_key(), path))


def _load_public_key(path: str) -> Key:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data, _ = _read_pem(path, "public key")
    if b"PRIVATE KEY" in data:
        raise InputError(
            f"{path!r} contains a private key, which nobody else should have; pass its public half: openssl pkey -in "
            f"{path} -pubout -out PUBLIC.pem"
        )
    if b"BEGIN CERTIFICATE" in data:
        raise InputError(
            f"{path!r} is a certificate, whose dates and issuer are not checked here; pass only its key: openssl "
            f"x509 -in {path} -pubkey -noout"
        )
    if (count := data.count(b"-----BEGIN ")) != 1:
        raise InputError(
            f"{path!r} holds {count} PEM blocks; pass files with one public key each, with one --trust-key per file"
        )
    try:
        return _name_key(load_pem_public_key(data), path)
    except ValueError as error:
        raise InputError(f"{path!r} contains no public key in PEM format; create one with {_MAKE}") from error


def _name_key(key: Any, path: str) -> Key:
    """Compute the name of a key: the SHA-256 of the DER form that ``openssl pkey -pubout -outform DER`` writes."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import SSlibKey

    on_p256 = isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    if not (on_p256 or isinstance(key, Ed25519PublicKey)):
        kind = getattr(getattr(key, "curve", None), "name", type(key).__name__.lstrip("_").removesuffix("PublicKey"))
        raise InputError(
            f"{path!r} is a key of kind {kind}, but only ed25519 and P-256 are supported; create one with {_MAKE}"
        )
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SSlibKey.from_crypto(key, keyid=hashlib.sha256(der).hexdigest())


def _read_pem(path: str, what: str) -> tuple[bytes, os.stat_result]:
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InputError(f"the {what} {path!r} can't be read: {error.strerror}; create one with {_MAKE}") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST:
            raise InputError(
                f"the {what} {path!r} is not a file, or has more than {_MOST} bytes; create one with {_MAKE}"
            )
        return file.read(), status
