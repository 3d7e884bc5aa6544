"""Record who made an artifact, from which files, and how.

The record is an in-toto Statement v1 with SLSA's provenance v1 as predicate:

    subject                  each file: its path and its SHA-256 buildDefinition buildType              ``BUILD``
    externalParameters     the request: the command and its options internalParameters     versions of the libraries and
    the machine resolvedDependencies   each source file, by SHA-256 runDetails builder.id             ``BUILDER`` and
    the name of the signing key; nothing else is known of the builder metadata               invocationId; startedOn and
    finishedOn if times may be recorded byproducts             other files that were made on the way

https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EvidenceError

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# Media type of a Statement in an envelope
PAYLOAD = "application/vnd.in-toto+json"
BUILD = "urn:normdeploy:package:1"
BUILDER = "urn:normdeploy:key:"


@dataclass(frozen=True)
class ProvenanceRecord:
    """Origin of an artifact.

    Attributes:
        parameters: the request: the command and its options.
        dependencies: SHA-256 of each source file, by name.
        byproducts: URI of each other file that was made, by name.
        started: time of the start, UTC in ISO 8601; "" if times must not be recorded.
        finished: time of the end, in the same format.
    """

    parameters: Mapping[str, Any]
    dependencies: Mapping[str, str]
    invocation: str = ""
    byproducts: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    finished: str = ""


def make_statement(
    subjects: Mapping[str, str], origin: ProvenanceRecord, versions: Mapping[str, str], key: str
) -> bytes:
    """Write the Statement.

    Args:
        subjects: SHA-256 of each file that was made, by path.
        versions: versions of the libraries, and names of the machine.
        key: name of the key that will sign the Statement.

    Returns:
        JSON text; equal arguments give equal texts.
    """
    metadata = {"invocationId": origin.invocation, "startedOn": origin.started, "finishedOn": origin.finished}
    details: dict[str, Any] = {
        "builder": {"id": f"{BUILDER}{key}"},
        "metadata": {name: value for name, value in metadata.items() if value},
        "byproducts": [{"name": name, "uri": uri} for name, uri in sorted(origin.byproducts.items())],
    }
    definition = {
        "buildType": BUILD,
        "externalParameters": dict(origin.parameters),
        "internalParameters": {"versions": dict(versions)},
        "resolvedDependencies": _digest_entries(origin.dependencies),
    }
    value = {
        "_type": STATEMENT,
        "subject": _digest_entries(subjects),
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }
    return json.dumps(value, sort_keys=True).encode()


def statement_subjects(payload: bytes, what: str) -> dict[str, str]:
    """Read the subjects of a signed Statement that `make_statement` wrote.

    Args:
        what: name of the statement for error messages.

    Returns:
        SHA-256 of each file, by path.

    Raises:
        EvidenceError: the statement is malformed or of another kind.
    """
    try:
        told = json.loads(payload)
        kinds = (told["_type"], told["predicateType"], told["predicate"]["buildDefinition"]["buildType"])
        subjects = {str(s["name"]): str(s["digest"]["sha256"]) for s in told["subject"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EvidenceError(f"{what} is not an in-toto Statement ({type(error).__name__}: {error})") from error
    if kinds != (STATEMENT, PREDICATE, BUILD):
        raise EvidenceError(f"{what} states {kinds}, but {(STATEMENT, PREDICATE, BUILD)} is expected")
    if len(subjects) != len(told["subject"]):
        raise EvidenceError(f"{what} names a file twice")
    return subjects


def _digest_entries(hashes: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(hashes.items())]
