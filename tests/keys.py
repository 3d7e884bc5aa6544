"""Pairs of keys in PEM files, as ``openssl genpkey`` and ``openssl pkey -pubout`` write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def key_pair(folder: Path, name: str = "key", *, ecdsa: bool = False) -> tuple[Path, Path]:
    """The private and the public key's file."""
    key: Any = ec.generate_private_key(ec.SECP256R1()) if ecdsa else ed25519.Ed25519PrivateKey.generate()
    return private_file(folder / f"{name}.pem", key), public_file(folder / f"{name}.pub.pem", key.public_key())


def private_file(path: Path, key: Any) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def public_file(path: Path, key: Any) -> Path:
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path
