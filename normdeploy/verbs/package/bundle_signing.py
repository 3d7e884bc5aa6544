"""Sign a bundle, check its signature, and list its signers.

A signed bundle contains two files that are not in its manifest: a bill of materials, and ``provenance.intoto.jsonl``.
The latter has one line: the envelope of a signed Statement about all other files of the bundle
(`normdeploy.evidence.slsa_provenance`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...environment import describe_environment
from ...errors import EvidenceError
from ...evidence import signed_envelope, slsa_provenance
from ...evidence.sbom import SbomSubject, make_sbom
from ...evidence.signing_keys import Signer
from ...storage.file_hash import hash_file
from ...types import PathLike
from .evidence_bundle import MANIFEST, PROVENANCE, SBOM, scan_folder

if TYPE_CHECKING:
    from securesystemslib.signer import Key

# Maximum size of a signed statement in bytes (64 MiB).
_MOST = 64 * 2**20
_NO_MODEL = frozenset({MANIFEST, SBOM, "README.md", "report.json", "report.html"})


def sign_bundle(folder: Path, signer: Signer, origin: slsa_provenance.ProvenanceRecord) -> None:
    """Write the bill of materials and the signed provenance into a bundle whose other files are complete.

    Raises:
        RuntimeUnavailable: a library is missing.
    """
    data = (folder / MANIFEST).read_bytes()
    manifest = json.loads(data)
    digest = hashlib.sha256(data).hexdigest()
    facts = manifest.get("versions") or describe_environment()
    hashes = {path: hash_file(folder / path) for path in scan_folder(folder)[0] if path not in (PROVENANCE, SBOM)}
    deployed = {p: h for p, h in hashes.items() if p not in _NO_MODEL and not p.startswith(("samples/", "certif"))}
    sbom = make_sbom(SbomSubject(manifest.get("name", "model"), digest, manifest.get("made", ""), deployed, facts))
    (folder / SBOM).write_bytes(sbom)
    subjects = hashes | {SBOM: hashlib.sha256(sbom).hexdigest()}
    payload = slsa_provenance.make_statement(subjects, origin, facts, signer.public_key.keyid)
    (folder / PROVENANCE).write_bytes(signed_envelope.seal_payload(payload, slsa_provenance.PAYLOAD, signer) + b"\n")


def require_signed(folder: PathLike, keys: Sequence[Key]) -> None:
    """Check that one of the keys has signed the bundle, and that the bundle has not changed since.

    Raises:
        EvidenceError: the bundle is not signed by any of the keys; or a file is changed, missing or new, or is a link.
    """
    root = Path(os.path.realpath(folder))
    if (data := _read_provenance(root)) is None:
        trusted = ", ".join(key.keyid[:16] for key in keys)
        raise EvidenceError(
            f"the bundle {os.fspath(folder)!r} is not signed: {PROVENANCE} not found; it must be signed by the"
            f" key {trusted}"
        )
    what = f"{PROVENANCE} of the bundle {os.fspath(folder)!r}"
    subjects = slsa_provenance.statement_subjects(
        signed_envelope.open_envelope(data, slsa_provenance.PAYLOAD, keys, what), what
    )
    present, others = scan_folder(root)
    del present[PROVENANCE]
    for path in sorted({*subjects, *present, *others, MANIFEST, SBOM}):
        if path in subjects:
            signed = f"sha256 {subjects[path]}"
        else:
            signed = "not signed"
        if path in present:
            now = f"sha256 {hash_file(root / path)}"
        elif path in others:
            now = "a link or special file"
        else:
            now = "gone"
        if signed != now:
            raise EvidenceError(
                f"the bundle {os.fspath(folder)!r} changed after it was signed: {path} was {signed}, and is {now}"
            )


def list_signers(root: Path) -> tuple[str, ...]:
    """List the signers that a bundle names, without verifying them.

    Returns:
        Names; empty if the bundle is not signed.
    """
    data = _read_provenance(root)
    if data is None:
        return ()
    return signed_envelope.signer_names(data)


def _read_provenance(root: Path) -> bytes | None:
    path = root / PROVENANCE
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST:
        return None
    return path.read_bytes()
