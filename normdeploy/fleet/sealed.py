"""A store whose records are signed, and believed only where somebody trusted has signed them.

A record is the payload of a DSSE envelope (`normdeploy.evidence.envelope`). It holds its key, the hash of all that the
step depended on, and the hashes of what it made: under another name, or beside another object, it is refused. The
account of a run is signed likewise; it holds the run's name and the hashes of its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import EvidenceError, InputError, StoreError
from ..evidence import envelope
from ..evidence.keys import Signer, trusted
from ..types import PathLike
from .places import Place
from .store import Store

if TYPE_CHECKING:
    from securesystemslib.signer import Key

KIND = "application/vnd.normdeploy.store+json"


@dataclass(frozen=True)
class Seal:
    """Signs a record."""

    signer: Signer

    def __call__(self, record: bytes) -> bytes:
        return envelope.sealed(record, KIND, self.signer)


@dataclass(frozen=True)
class Opener:
    """The record in an envelope that one of the keys has signed."""

    keys: tuple[Key, ...]

    def __call__(self, data: bytes) -> bytes:
        try:
            return envelope.opened(data, KIND, self.keys, "it")
        except EvidenceError as error:
            raise StoreError(str(error)) from error


def store_in(place: Place, sign: PathLike | None = None, trust: Sequence[PathLike] = ()) -> Store:
    """The store of a place.

    Args:
        sign: a private key's PEM file: what is written is signed by it, and what it has signed is believed.
        trust: PEM files of public keys: what they have signed is believed. With neither, everything is.

    Raises:
        InputError: a key can't be used.
        RuntimeUnavailable: a library is missing.
    """
    keys = trusted(trust)
    if sign is None:
        return Store(place, opened=Opener(keys) if keys else None)
    signer = Signer(sign)
    return Store(place, Seal(signer), Opener((signer.public, *keys)))


def require_signer(sign: PathLike | None, trust: Sequence[PathLike]) -> None:
    """
    Raises:
        InputError: what a run writes would not be believed by the run itself.
    """
    if trust and sign is None:
        raise InputError(
            "with --trust only signed records are believed, and without --sign this run's own would not be; give --sign"
            " KEY.pem, or leave --trust out"
        )
