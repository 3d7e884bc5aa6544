"""Find the certificates of a packaged file in the report of ``export`` or ``optimize``, and its certificate file.

A report records the SHA-256 of the file that the verb wrote. So a report is recognized by the file's bytes, not by its
name. A report with another hash belongs to another file, and is never used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ...errors import InputError
from ...reports.report import SCHEMA
from ...rewriting.certificate_document import SCHEMA as CERTIFICATE_SCHEMA
from ...storage.file_hash import hash_file
from ...types import PathLike
from .package_options import FoundReport, PackageCall

_REPORT_BYTES = 2**28
_CERTIFICATE_BYTES = 2**31


@dataclass(frozen=True)
class Certificates:
    """Certificates of a file, and the report that they were taken from.

    Attributes:
        norms: one JSON object for each norm with a certificate.
        report: None if no report was found.
        digest: SHA-256 of the packaged file.
    """

    norms: Sequence[dict[str, Any]]
    report: FoundReport | None
    digest: str

    @property
    def report_source(self) -> tuple[str, str] | None:
        """Return name and SHA-256 of the report; None if no report was found."""
        if self.report is None:
            return None
        return self.report.origin, hashlib.sha256(self.report.data).hexdigest()


def find_certificates(call: PackageCall, file: Path, proto: onnx.ModelProto) -> Certificates:
    """Take the certificates from the given report, else from one beside the file, else from ``call.find_report``.

    Args:
        file: the ONNX file.
        proto: its content.

    Returns:
        The certificates; none if no report records the file's hash.

    Raises:
        InputError: the given report can't be read, or belongs to another file.
    """
    digest = hash_file(file)
    if call.report_from is not None:
        report = _read_given_report(call.report_from)
        document = _parse_given_report(call.report_from, report.data)
        _require_report_of_file(call.report_from, document, digest, proto)
        return Certificates(_certified_norms(document), report, digest)
    folders = dict.fromkeys((Path(os.path.abspath(call.model_path)).parent, file.parent))
    found = next((report for folder in folders for report in _iter_reports(folder, digest)), None)
    if found is None and call.find_report is not None:
        found = call.find_report(digest)
    if found is None:
        return Certificates((), None, digest)
    return Certificates(_certified_norms(json.loads(found.data)), found, digest)


def find_certificate_file(call: PackageCall, file: Path, digest: str) -> Path | None:
    """Find the file that ``--certificate`` wrote, in the folder of the packaged file.

    Args:
        file: the ONNX file.
        digest: SHA-256 of the ONNX file.

    Returns:
        the newest certificate file that records this hash; None if there is none.
    """
    folders = dict.fromkeys((Path(os.path.abspath(call.model_path)).parent, file.parent))
    for folder in folders:
        for path, data in _iter_json_files(folder, _CERTIFICATE_BYTES):
            if _is_certificate_of_file(data, digest):
                return path
    return None


def _is_certificate_of_file(data: bytes, digest: str) -> bool:
    # Other JSON files beside a model, such as a tokenizer, may be large.
    if CERTIFICATE_SCHEMA.encode() not in data or digest.encode() not in data:
        return False
    try:
        document = json.loads(data)
        return bool(document["schema"] == CERTIFICATE_SCHEMA and document["model"]["sha256"] == digest)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def is_report_of_file(data: bytes, digest: str) -> bool:
    """Return True if ``data`` is a report of ``export`` or ``optimize`` that records this SHA-256 for its output."""
    # Other JSON files beside a model, such as a tokenizer, may be large.
    if digest.encode() not in data:
        return False
    try:
        document = json.loads(data)
        _certified_norms(document)
        return document["schema"] == SCHEMA and bool(_recorded_hash(document) == digest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _iter_reports(folder: Path, digest: str) -> Iterator[FoundReport]:
    """Yield the reports in ``folder`` that record the hash, the newest first."""
    for path, data in _iter_json_files(folder, _REPORT_BYTES):
        if is_report_of_file(data, digest):
            yield FoundReport(data, path.name)


def _iter_json_files(folder: Path, limit: int) -> Iterator[tuple[Path, bytes]]:
    """Yield the JSON files of up to ``limit`` bytes with their contents, the newest first."""
    files = [path for path in folder.glob("*.json") if path.is_file() and path.stat().st_size <= limit]
    for path in sorted(files, key=lambda path: (-path.stat().st_mtime_ns, path.name)):
        try:
            data = path.read_bytes()
        except OSError:
            # Another user's file, or one that is gone in the meantime.
            continue
        yield path, data


def _read_given_report(report: PathLike) -> FoundReport:
    path = Path(report)
    if not path.is_file() or path.stat().st_size > _REPORT_BYTES:
        raise InputError(
            f"the report {os.fspath(report)!r} is not a file, or exceeds {_REPORT_BYTES} bytes; pass the report that"
            " export wrote (--report)"
        )
    return FoundReport(path.read_bytes(), path.name)


def _parse_given_report(report: PathLike, data: bytes) -> dict[str, Any]:
    title = repr(os.fspath(report))
    try:
        document: dict[str, Any] = json.loads(data)
        _certified_norms(document)
        _fused_tensors(document)
        _recorded_hash(document)
        schema = document["schema"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{title} is not a report of normdeploy ({type(error).__name__}: {error}); pass the report that"
            " export wrote (--report)"
        ) from error
    if schema != SCHEMA:
        raise InputError(
            f"the report {title} has the schema {schema!r}, but this version reads {SCHEMA!r}; export again"
        )
    return document


def _require_report_of_file(report: PathLike, document: dict[str, Any], digest: str, proto: onnx.ModelProto) -> None:
    """Check the recorded hash; reports of older versions have none, so check the names of their norms."""
    title = repr(os.fspath(report))
    recorded = _recorded_hash(document)
    if recorded is not None and recorded != digest:
        raise InputError(
            f"the report {title} belongs to another file: it records the SHA-256 {recorded[:16]}…, but the packaged"
            f" file has {digest[:16]}…; pass the report that was written together with this file (--report)"
        )
    written = _fused_tensors(document)
    if recorded is None and written and not written & {o for node in proto.graph.node for o in node.output}:
        raise InputError(f"the report {title} belongs to another file: none of its fused norms is in this one")


def _recorded_hash(document: dict[str, Any]) -> str | None:
    recorded = document.get("sha256", {}).get("output")
    return None if recorded is None else str(recorded)


def _fused_tensors(document: dict[str, Any]) -> set[str]:
    return {norm["tensor"] for norm in document["norms"] if norm["status"] == "fused"}


def _certified_norms(document: dict[str, Any]) -> list[dict[str, Any]]:
    norms = [norm for norm in document["norms"] if norm["certificate"] is not None]
    return [{"schema": "normdeploy/certificate/1", **norm} for norm in norms]
