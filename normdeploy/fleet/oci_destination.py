"""Publish bundles in an OCI registry with the library oras. A bundle becomes an artifact manifest with one layer for
each file.

    artifactType   ``ARTIFACT``; the config is the empty config of the specification

    layers         one file each; org.opencontainers.image.title is the path at which `oras pull` writes it

    annotations    the labels of `PublishedBundle.labels`

    referrers      the signed provenance and the bill of materials, each an artifact whose subject is the manifest

The manifest contains no time, so the same bundle has the same digest. The manifest is written last, so a tag never
names an incomplete bundle. (OCI image-spec and distribution-spec 1.1.)
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ..errors import InputError, PublishError, RuntimeUnavailable
from ..evidence import slsa_provenance
from ..verbs.package.evidence_bundle import PROVENANCE, SBOM
from .published_bundle import PublishedBundle, cell_tag

ARTIFACT = "application/vnd.normdeploy.bundle.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"
_EMPTY = b"{}"
_REFERRERS = {PROVENANCE: slsa_provenance.PAYLOAD, SBOM: "application/vnd.cyclonedx+json"}
_KINDS = {
    **{".json": "application/json", ".jsonl": "application/jsonl", ".md": "text/markdown", ".html": "text/html"},
    **{".onnx": "application/vnd.normdeploy.onnx.v1", ".npz": "application/vnd.normdeploy.arrays.v1"},
    **{".engine": "application/vnd.normdeploy.engine.v1", ".plan": "application/vnd.normdeploy.engine.v1"},
}
# Size in bytes of a chunk. Larger files are uploaded in chunks.
_CHUNKED = 64 * 2**20
# Maximum seconds until a registry answers the first request.
_SECONDS = 20
# Matches repository names as distribution-spec defines them.
_NAME = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


class OciDestination:
    """Repository of an OCI registry. The credentials come from `docker login` or `oras login`.

    Args:
        secure: True to use https, False to use http.

    Raises:
        InputError: the repository's name is not valid.
        PublishError: the registry can't be reached.
        RuntimeUnavailable: oras is not installed.
    """

    def __init__(self, host: str, repository: str, *, secure: bool) -> None:
        try:
            import oras.provider
        except ImportError as error:
            raise RuntimeUnavailable(
                f"publishing to a registry needs a library that is not installed ({error}); pip install "
                "'normdeploy[publish]'"
            ) from error
        if not _NAME.fullmatch(repository):
            raise InputError(
                f"{repository!r} is not a valid repository name (lowercase letters, digits, '.', '_', "
                "'-', '/'); expected oci://HOST/REPOSITORY"
            )
        self._host = host
        self._repository = repository
        self._base = f"http{'s' * secure}://{host}/v2/{repository}"
        basic = self._asks_for_password(f"http{'s' * secure}://{host}/v2/")
        self._registry = oras.provider.Registry(host, insecure=not secure, auth_backend="basic" if basic else "token")
        self._container = self._registry.get_container(f"{host}/{repository}")
        self._registry.auth.load_configs(self._container)

    def push_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        """Publish a bundle, unless its tag already has the same manifest.

        Returns:
            the bundle's address with tag and digest, and whether the bundle is new in the registry.

        Raises:
            PublishError: the registry can't be reached, or refuses the bundle.
        """
        layers = [
            self._make_descriptor(_media_type(path), f.sha256, f.bytes, **{TITLE: path})
            for path, f in bundle.files.items()
        ]
        body = _encode_manifest(ARTIFACT, layers, bundle.labels)
        digest = _sha256_digest(body)
        name = cell_tag(bundle.cell)
        where = f"{self._host}/{self._repository}:{name}@{digest}"
        present = self._send_request("HEAD", f"manifests/{name}", accept=MANIFEST)
        if present.status_code == 200 and present.headers.get("Docker-Content-Digest") == digest:
            return where, False
        with tempfile.TemporaryDirectory(prefix="oci.") as folder:
            empty = Path(folder) / "empty"
            empty.write_bytes(_EMPTY)
            self._upload(empty, _empty_descriptor())
            for path, layer in zip(bundle.files, layers, strict=True):
                self._upload(bundle.folder / path, layer)
        subject = self._make_descriptor(MANIFEST, digest.removeprefix("sha256:"), len(body))
        for path, kind in _REFERRERS.items():
            if path in bundle.files:
                found = bundle.files[path]
                layer = self._make_descriptor(kind, found.sha256, found.bytes, **{TITLE: path})
                self._attach(_encode_manifest(kind, [layer], {}, subject), kind, subject)
        self._put_manifest(digest, body, MANIFEST)
        self._put_manifest(name, body, MANIFEST)
        return where, True

    def _attach(self, body: bytes, kind: str, subject: dict[str, Any]) -> None:
        """Write an artifact that refers to another artifact, its subject.

        If the registry does not list referrers itself, add the artifact to the index that the specification defines as
        a fallback.
        """
        answer = self._put_manifest(_sha256_digest(body), body, MANIFEST)
        if "OCI-Subject" in answer.headers:
            return
        name = subject["digest"].replace(":", "-")
        present = self._send_request("GET", f"manifests/{name}", accept=INDEX)
        if present.status_code == 200:
            known = present.json()["manifests"]
        else:
            known = []
        mine = self._make_descriptor(MANIFEST, _sha256_digest(body).removeprefix("sha256:"), len(body)) | {
            "artifactType": kind
        }
        if mine not in known:
            index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*known, mine]}
            self._put_manifest(name, json.dumps(index, sort_keys=True).encode(), INDEX)

    def _put_manifest(self, name: str, body: bytes, kind: str) -> Any:
        answer = self._send_request("PUT", f"manifests/{name}", body, kind)
        if answer.status_code not in (200, 201, 202):
            raise self._refusal_error(answer)
        return answer

    def _upload(self, file: Path, layer: dict[str, Any]) -> None:
        if self._send_request("HEAD", f"blobs/{layer['digest']}").status_code == 200:
            return
        if hasattr(self._registry.auth, "token"):
            # Delete the token for reading, because it may not allow writing.
            self._registry.auth.token = None
        long = layer["size"] > _CHUNKED
        try:
            if long:
                answer = self._registry.chunked_upload(str(file), self._container, layer, chunk_size=_CHUNKED)
            else:
                answer = self._registry.put_upload(str(file), self._container, layer)
        except Exception as error:
            # Errors of oras, requests and urllib3.
            raise self._unreachable_error(error) from error
        if answer.status_code not in (200, 201, 202):
            raise self._refusal_error(answer)

    def _send_request(self, method: str, path: str, body: bytes | None = None, kind: str = "", accept: str = "") -> Any:
        if kind:
            headers = {"Content-Type": kind}
        elif accept:
            headers = {"Accept": accept}
        else:
            headers = {}
        try:
            return self._registry.do_request(f"{self._base}/{path}", method, data=body, headers=headers)
        except Exception as error:
            # Errors of oras, requests and urllib3.
            raise self._unreachable_error(error) from error

    def _asks_for_password(self, url: str) -> bool:
        """Return True if the registry asks for basic authentication.

        The request does not use oras, because oras would retry for a minute.
        """
        import requests

        try:
            answer = requests.get(url, timeout=_SECONDS)
        except requests.RequestException as error:
            raise self._unreachable_error(error) from error
        return answer.headers.get("WWW-Authenticate", "").lower().startswith("basic")

    def _unreachable_error(self, error: Exception) -> PublishError:
        return PublishError(
            f"can't use the registry {self._host!r}: {type(error).__name__}: {error}; check the address (for "
            "http: oci+http://), and log in with docker login"
        )

    def _refusal_error(self, answer: Any) -> PublishError:
        return PublishError(
            f"the registry {self._host!r} rejected {self._repository!r} with status {answer.status_code}: "
            f"{answer.text[:300].strip()}"
        )

    @staticmethod
    def _make_descriptor(kind: str, sha256: str, size: int, **annotations: str) -> dict[str, Any]:
        told = {"mediaType": kind, "digest": f"sha256:{sha256}", "size": size}
        return told | ({"annotations": annotations} if annotations else {})


def _encode_manifest(
    kind: str, layers: list[dict[str, Any]], annotations: dict[str, str], subject: dict[str, Any] | None = None
) -> bytes:
    told = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": kind,
        "config": _empty_descriptor(),
        "layers": layers,
    }
    if annotations:
        told |= {"annotations": annotations}
    return json.dumps(told | ({"subject": subject} if subject else {}), sort_keys=True).encode()


def _empty_descriptor() -> dict[str, Any]:
    """Return the specification's descriptor of an empty config."""
    return {"mediaType": "application/vnd.oci.empty.v1+json", "digest": _sha256_digest(_EMPTY), "size": len(_EMPTY)}


def _sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _media_type(path: str) -> str:
    if path in _REFERRERS:
        return _REFERRERS[path]
    return _KINDS.get(Path(path).suffix, "application/octet-stream")
