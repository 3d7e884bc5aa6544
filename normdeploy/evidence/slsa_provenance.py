"""What was made by whom, of what, and how: an in-toto Statement v1 whose predicate is SLSA's provenance v1.

    subject                  each file: its path, and its SHA-256
    buildDefinition
      buildType              ``BUILD``
      externalParameters     what was asked for: the command, its options
      internalParameters     the versions of what it ran with
      resolvedDependencies   each file that it was made of, by SHA-256
    runDetails
      builder.id             ``BUILDER`` and the name of the key that signs: nothing else is known of who it is
      metadata               invocationId; startedOn and finishedOn where times may be told
      byproducts             what else was made on the way

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
# its media type in an envelope
PAYLOAD = "application/vnd.in-toto+json"
BUILD = "urn:normdeploy:package:1"
BUILDER = "urn:normdeploy:key:"


@dataclass(frozen=True)
class ProvenanceRecord:
    """Where something comes from.

    ``parameters`` are what was asked for, ``dependencies`` name -> SHA-256 of the files that it was made of,
    ``byproducts`` name -> URI; ``started`` and ``finished`` are UTC in ISO 8601, "" where no time may be told.
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
    """The Statement, as JSON that is the same for the same values.

    Args:
        subjects: path -> SHA-256.
        versions: of the libraries and the machine.
        key: the name of the key that is to sign it.
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
    """Path -> SHA-256 of what a signed Statement of ours is about.

    Raises:
        EvidenceError: it is another kind of statement, or malformed.
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
