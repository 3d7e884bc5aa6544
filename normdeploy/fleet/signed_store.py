"""A store whose records are signed, and believed only where somebody trusted has signed them.

A record is the payload of a DSSE envelope (`normdeploy.evidence.signed_envelope`). It holds its key, the hash of all
that the
step depended on, and the hashes of what it made: under another name, or beside another object, it is refused. The
account of a run is signed likewise; it holds the run's name and the hashes of its files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import EvidenceError, InputError, StoreError
from ..evidence import signed_envelope
from ..evidence.signing_keys import Signer, load_public_keys
from ..types import PathLike
from .step_store import StepStore
from .store_backends import StoreBackend

if TYPE_CHECKING:
    from securesystemslib.signer import Key

# environment variables that name keys; several by os.pathsep
SIGN, TRUST = "NORMDEPLOY_SIGN", "NORMDEPLOY_TRUST"
KIND = "application/vnd.normdeploy.store+json"


@dataclass(frozen=True)
class RecordSigner:
    """Signs a record."""

    signer: Signer

    def __call__(self, record: bytes) -> bytes:
        return signed_envelope.seal_payload(record, KIND, self.signer)


@dataclass(frozen=True)
class EnvelopeOpener:
    """The record in an envelope that one of the keys has signed."""

    keys: tuple[Key, ...]

    def __call__(self, data: bytes) -> bytes:
        try:
            return signed_envelope.open_envelope(data, KIND, self.keys, "it")
        except EvidenceError as error:
            raise StoreError(str(error)) from error


def open_signed_store(place: StoreBackend, sign: PathLike | None = None, trust: Sequence[PathLike] = ()) -> StepStore:
    """The store of a place.

    Args:
        sign: a private key's PEM file: what is written is signed by it, and what it has signed is believed.
        trust: PEM files of public keys: what they have signed is believed. With neither, everything is.

    Raises:
        InputError: a key can't be used.
        RuntimeUnavailable: a library is missing.
    """
    keys = load_public_keys(trust)
    if sign is None:
        return StepStore(place, opened=EnvelopeOpener(keys) if keys else None)
    signer = Signer(sign)
    return StepStore(place, RecordSigner(signer), EnvelopeOpener((signer.public_key, *keys)))


def resolve_keys(sign: PathLike | None, trust: Sequence[PathLike]) -> tuple[PathLike | None, Sequence[PathLike]]:
    """The keys that are given, or else those that the environment names."""
    named = [path for path in os.environ.get(TRUST, "").split(os.pathsep) if path]
    return sign or os.environ.get(SIGN) or None, trust or named


def require_signer(sign: PathLike | None, trust: Sequence[PathLike]) -> None:
    """
    Raises:
        InputError: what is written would not be believed by whoever writes it.
    """
    if trust and sign is None:
        raise InputError(
            f"with --trust (or {TRUST}) only signed records are believed, and without --sign (or {SIGN}) those that are"
            " written now would not be; give a key that signs too, or leave --trust out"
        )
