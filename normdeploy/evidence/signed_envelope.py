"""A signed text: a DSSE envelope (github.com/secure-systems-lab/dsse), in JSON.

What is signed are the text's type and its bytes, so that neither can be taken for another.
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

# of every envelope that is written here
_HEAD = b'{"payload": '
# characters of a key's name that are shown
_KEYID = 16


def seal_payload(payload: bytes, kind: str, signer: Signer) -> bytes:
    """The envelope of ``payload``, one line of JSON.

    Args:
        kind: its media type.
    """
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, kind, {})
    envelope.sign(signer.signer)
    return json.dumps(envelope.to_dict()).encode()


def open_envelope(data: bytes, kind: str, keys: Sequence[Key], what: str) -> bytes:
    """The payload of an envelope that one of the keys has signed.

    Args:
        what: is in the envelope, for errors.

    Raises:
        EvidenceError: it is none, of another kind, of no trusted key, or changed since it was signed.
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
    """The names of the keys that an envelope says it is signed by, shortened; none where it is no envelope."""
    try:
        return tuple(str(s["keyid"])[:_KEYID] for s in json.loads(data)["signatures"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def unverified_payload(data: bytes) -> bytes:
    """The payload of an envelope that was written here, whoever signed it; anything else as it is."""
    if not data.startswith(_HEAD):
        return data
    told: Any = json.loads(data)
    return base64.b64decode(told["payload"], validate=True)
