"""Which PEM files are keys, and which are refused before they are used."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519

from normdeploy.errors import InputError
from normdeploy.evidence.signing_keys import Signer, load_public_keys
from tests.keys import key_pair, private_file, public_file


@pytest.mark.parametrize("ecdsa", [False, True])
def test_a_key_is_named_by_the_hash_of_its_public_half(tmp_path: Path, ecdsa: bool) -> None:
    private, public = key_pair(tmp_path, ecdsa=ecdsa)
    der = serialization.load_pem_public_key(public.read_bytes()).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert Signer(private).public_key.keyid == hashlib.sha256(der).hexdigest()
    assert [key.keyid for key in load_public_keys([public])] == [Signer(private).public_key.keyid]


def test_another_process_gets_the_name_of_the_file_alone(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    sent = pickle.dumps(Signer(private))
    secret = serialization.load_pem_private_key(private.read_bytes(), None)
    assert isinstance(secret, ed25519.Ed25519PrivateKey)
    assert secret.private_bytes_raw() not in sent
    assert private.read_bytes().splitlines()[1] not in sent
    assert pickle.loads(sent).public_key == Signer(private).public_key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_private_key_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    private, _ = key_pair(tmp_path)
    private.chmod(mode)
    with pytest.raises(InputError, match=f"mode {mode:o}.*600"):
        Signer(private)


def certificate(path: Path) -> Path:
    """One that ended yesterday."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    ended = made.not_valid_before(now - timedelta(9)).not_valid_after(now - timedelta(1)).sign(key, hashes.SHA256())
    path.write_bytes(ended.public_bytes(serialization.Encoding.PEM))
    return path


def locked(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return path


def text(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path, 0o600)
    return path


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (locked, "protected by a password"),
        (lambda p: private_file(p, rsa.generate_private_key(65537, 2048)), "of kind RSA"),
        (lambda p: private_file(p, ec.generate_private_key(ec.SECP384R1())), "of kind secp384r1"),
        (lambda p: private_file(p, x25519.X25519PrivateKey.generate()), "of kind X25519"),
        (lambda p: text(p, b""), "no private key"),
        (lambda p: text(p, b"\x00" * 100), "no private key"),
        (lambda p: text(p, b"x" * 2**20), "not a file, or has more"),
        (lambda p: public_file(text(p, b""), ed25519.Ed25519PrivateKey.generate().public_key()), "no private key"),
        (pipe, "not a file"),
        (lambda p: p, "can't be read"),
    ],
)
def test_what_does_not_sign_is_refused(tmp_path: Path, made: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Signer(made(tmp_path / "odd.pem"))


def two(path: Path) -> Path:
    pairs = [key_pair(path.parent, name)[1].read_bytes() for name in "ab"]
    path.write_bytes(b"".join(pairs))
    return path


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda p: private_file(p, ed25519.Ed25519PrivateKey.generate()), "contains a private key"),
        (certificate, "is a certificate"),
        (two, "holds 2 PEM blocks"),
        (lambda p: public_file(p, rsa.generate_private_key(65537, 2048).public_key()), "of kind RSA"),
        (lambda p: text(p, b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"), "no public key"),
        (lambda p: text(p, b""), "holds 0 PEM blocks"),
    ],
)
def test_what_does_not_verify_is_refused(tmp_path: Path, made: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_public_keys([made(tmp_path / "odd.pem")])


def test_keys_that_openssl_makes(tmp_path: Path) -> None:
    """As docs/reference/evidence.md says; the hash too."""
    for words in (
        "genpkey -algorithm ed25519 -out k.pem",
        "pkey -in k.pem -pubout -out p.pem",
        "pkey -in k.pem -pubout -outform DER -out p.der",
    ):
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, umask=0o077)
    digest = hashlib.sha256((tmp_path / "p.der").read_bytes()).hexdigest()
    assert load_public_keys([tmp_path / "p.pem"])[0].keyid == Signer(tmp_path / "k.pem").public_key.keyid == digest
