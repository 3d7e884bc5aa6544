"""Open a store with signed records. A record is trusted only if a trusted key has signed it.

A record is the payload of a DSSE envelope (`normdeploy.evidence.signed_envelope`). The record contains its key, which
is the hash of everything that the step depended on, and the hashes of the outputs. So a record is refused if it is
stored under the key of another step or if its outputs were changed. The summary of a run is signed too; it contains the
run's name and the hashes of its files.
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

# Environment variables that name files of keys. os.pathsep separates several files.
SIGN, TRUST = "NORMDEPLOY_SIGN", "NORMDEPLOY_TRUST"
KIND = "application/vnd.normdeploy.store+json"


@dataclass(frozen=True)
class RecordSigner:
    """Function that signs a record."""

    signer: Signer

    def __call__(self, record: bytes) -> bytes:
        return signed_envelope.seal_payload(record, KIND, self.signer)


@dataclass(frozen=True)
class EnvelopeOpener:
    """Function that returns the record of an envelope, if one of the keys has signed it."""

    keys: tuple[Key, ...]

    def __call__(self, data: bytes) -> bytes:
        try:
            return signed_envelope.open_envelope(data, KIND, self.keys, "it")
        except EvidenceError as error:
            raise StoreError(str(error)) from error


def open_signed_store(place: StoreBackend, sign: PathLike | None = None, trust: Sequence[PathLike] = ()) -> StepStore:
    """Open the store in a backend.

    Args:
        sign: PEM file of a private key that signs everything that is written. Signatures of this key are trusted.
        trust: PEM files of public keys whose signatures are trusted. Without any key, all records are trusted.

    Returns:
        the store.

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
    """Take the keys from the environment variables if no keys are given.

    Returns:
        the private key or None, and the public keys.
    """
    named = [path for path in os.environ.get(TRUST, "").split(os.pathsep) if path]
    return sign or os.environ.get(SIGN) or None, trust or named


def require_signer(sign: PathLike | None, trust: Sequence[PathLike]) -> None:
    """Check that this driver would trust the records that it writes.

    Raises:
        InputError: only signed records are trusted, but no key signs new records.
    """
    if trust and sign is None:
        raise InputError(
            f"--trust-key (or {TRUST}) accepts only signed records, but without --sign (or {SIGN}) new records would "
            "be unsigned; pass --sign, or omit --trust-key"
        )
