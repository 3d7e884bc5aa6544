"""Sign a text in a DSSE envelope (github.com/secure-systems-lab/dsse), in JSON.

The signature covers the type of the text and its bytes, so a change of either is detected.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EvidenceError
from .signing_keys import Signer

if TYPE_CHECKING:
    from securesystemslib.signer import Key

# First bytes of every envelope that `seal_payload` writes
_HEAD = b'{"payload": '
# Number of characters of a key's name that are shown
_KEYID = 16


def seal_payload(payload: bytes, kind: str, signer: Signer) -> bytes:
    """Sign ``payload``.

    Args:
        kind: media type of the payload.

    Returns:
        the envelope, one line of JSON.
    """
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, kind, {})
    envelope.sign(signer.signer)
    return json.dumps(envelope.to_dict()).encode()


def open_envelope(data: bytes, kind: str, keys: Sequence[Key], what: str) -> bytes:
    """Verify that one of ``keys`` signed an envelope.

    Args:
        kind: expected media type.
        what: name of the content for error messages.

    Returns:
        the payload.

    Raises:
        EvidenceError: the data is not an envelope, has another type, has no signature of a trusted key, or was changed
            after signing.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error

    trusted = ", ".join(key.keyid[:_KEYID] for key in keys)
    try:
        told = json.loads(data)
        if not isinstance(told, dict) or "signatures" not in told:
            raise EvidenceError(f"{what} is not signed, but must be signed by the key {trusted}")
        envelope = Envelope.from_dict(told)
        signers = [str(keyid) for keyid in envelope.signatures]
        if not isinstance(envelope.payload_type, str) or envelope.payload_type != kind:
            raise EvidenceError(
                f"{what} is signed as {str(envelope.payload_type)[:100]!r}, but should be signed as {kind!r}"
            )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, Error) as error:
        raise EvidenceError(f"{what} is not a signed text ({type(error).__name__}: {str(error)[:200]})") from error
    if not (by := [key for key in keys if key.keyid in signers]):
        names = ", ".join(keyid[:_KEYID] for keyid in signers[:10]) or "nobody"
        raise EvidenceError(f"{what} is signed by {names}, but the trusted key is {trusted}")
    try:
        envelope.verify(by, 1)
    except Error as error:
        raise EvidenceError(
            f"{what} differs from the text that {by[0].keyid[:_KEYID]} signed: it was changed afterwards"
        ) from error
    return envelope.payload


def signer_names(data: bytes) -> tuple[str, ...]:
    """List the keys that signed an envelope, as the envelope itself claims.

    Returns:
        shortened names; empty if the data is not an envelope.
    """
    try:
        return tuple(str(s["keyid"])[:_KEYID] for s in json.loads(data)["signatures"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def unverified_payload(data: bytes) -> bytes:
    """Return the payload of an envelope that `seal_payload` wrote, without verifying the signature.

    Returns:
        the payload; any other data unchanged.
    """
    if not data.startswith(_HEAD):
        return data
    told: Any = json.loads(data)
    return base64.b64decode(told["payload"], validate=True)
