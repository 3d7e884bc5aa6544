"""What a signature holds for, against the library's own reading and a computation by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from normdeploy.errors import EvidenceError
from normdeploy.evidence.signed_envelope import open_envelope, seal_payload, signer_names, unverified_payload
from normdeploy.evidence.signing_keys import Signer, load_public_keys
from tests.keys import key_pair

KIND = "application/vnd.test+json"


def test_what_is_signed_is_what_the_specification_says(tmp_path: Path) -> None:
    """PAE(type, body) = "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body."""
    private, public = key_pair(tmp_path)
    told = json.loads(seal_payload(b'{"a": 1}', KIND, Signer(private)))
    key = load_pem_public_key(public.read_bytes())
    assert isinstance(key, Ed25519PublicKey)
    body = base64.b64decode(told["payload"])
    signed = b"DSSEv1 %d %s %d %s" % (len(KIND), KIND.encode(), len(body), body)
    key.verify(base64.b64decode(told["signatures"][0]["sig"]), signed)
    assert (body, told["payloadType"]) == (b'{"a": 1}', KIND)


@pytest.mark.parametrize("ecdsa", [False, True])
def test_it_comes_back_with_the_key_of_one_of_several(tmp_path: Path, ecdsa: bool) -> None:
    private, public = key_pair(tmp_path, ecdsa=ecdsa)
    _, other = key_pair(tmp_path, "other")
    data = seal_payload(b"text", KIND, Signer(private))
    assert open_envelope(data, KIND, load_public_keys([other, public]), "it") == unverified_payload(data) == b"text"
    assert signer_names(data) == (Signer(private).public_key.keyid[:16],)


def test_by_ed25519_the_same_is_the_same(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    assert seal_payload(b"text", KIND, Signer(private)) == seal_payload(b"text", KIND, Signer(private))


def change(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    def changed(told: dict[str, Any]) -> dict[str, Any]:
        return told | {name: value(told[name])}

    return changed


def signature(**new: Any) -> Callable[[dict[str, Any]], Any]:
    return change("signatures", lambda s: [{**s[0], **new}])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change("payload", lambda p: base64.b64encode(b"other").decode()), "changed afterwards"),
        (change("payload", lambda p: "!" + p), "not a signed text|changed afterwards"),
        (change("payloadType", lambda t: "application/other"), "signed as 'application/other'"),
        (change("payloadType", lambda t: 7), "signed as '7'"),
        (change("signatures", lambda s: []), "signed by nobody"),
        (change("signatures", lambda s: s * 2), "not a signed text"),
        (change("signatures", lambda s: None), "not a signed text"),
        (signature(sig="AAAA"), "changed afterwards"),
        (signature(keyid="0" * 64), "signed by 0000000000000000, but the trusted key is"),
        (signature(keyid=["x"]), "not a signed text|signed by"),
        (lambda told: [told], "is not signed"),
        (lambda told: {"schema": "normdeploy/step/1"}, "is not signed"),
        (lambda told: told["payload"], "is not signed"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], said: str) -> None:
    private, public = key_pair(tmp_path)
    told = spoil(json.loads(seal_payload(b"text", KIND, Signer(private))))
    with pytest.raises(EvidenceError, match=said):
        open_envelope(json.dumps(told).encode(), KIND, load_public_keys([public]), "it")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"payload": "", "signatures": [{}]}'])
def test_what_is_no_envelope_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(EvidenceError):
        open_envelope(data, KIND, load_public_keys([key_pair(tmp_path)[1]]), "it")


def test_another_key_with_the_name_of_a_trusted_one_signs_nothing(tmp_path: Path) -> None:
    _, public = key_pair(tmp_path)
    forger, _ = key_pair(tmp_path, "forger")
    told = json.loads(seal_payload(b"text", KIND, Signer(forger)))
    told["signatures"][0]["keyid"] = load_public_keys([public])[0].keyid
    with pytest.raises(EvidenceError, match="changed afterwards"):
        open_envelope(json.dumps(told).encode(), KIND, load_public_keys([public]), "it")
