"""Write a bill of materials (CycloneDX 1.6) that lists the model and the libraries that produced its report.

https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import RuntimeUnavailable

# Namespace of the UUIDs that serve as serial numbers
_NAMESPACE = uuid.UUID("b9a3a5a2-7d5c-5c0e-9a57-64a6f8f1c3d1")


@dataclass(frozen=True)
class SbomSubject:
    """Model that the bill describes.

    Attributes:
        sha256: SHA-256 that identifies the model as a whole.
        made: time at which the model was made, UTC in ISO 8601.
        files: SHA-256 of each deployed file, by path.
        facts: versions of the libraries, and names that describe the machine, from
            `normdeploy.environment.describe_environment`.
    """

    name: str
    sha256: str
    made: str
    files: Mapping[str, str]
    facts: Mapping[str, str]


@dataclass(frozen=True)
class InstalledLibrary:
    """Installed distribution.

    Attributes:
        needs: installed distributions that this distribution requires.
        hashes: algorithm -> hash of the archive from which pip installed the distribution; empty if pip recorded no
            hash.
    """

    name: str
    version: str
    needs: tuple[str, ...]
    hashes: Mapping[str, str]


def make_sbom(model: SbomSubject) -> bytes:
    """Write the bill.

    Returns:
        JSON text; equal models and libraries give equal texts.

    Raises:
        RuntimeUnavailable: a library is missing.
    """
    try:
        from cyclonedx.model import HashAlgorithm, HashType, Property
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError as error:
        raise RuntimeUnavailable(
            f"a bill of materials needs a library that is not installed ({error}); pip install 'normdeploy[sign]'"
        ) from error

    algorithms = {algorithm.value.replace("-", "").lower(): algorithm for algorithm in HashAlgorithm}

    def make_hashes(hashes: Mapping[str, str]) -> list[HashType]:
        """Convert hashes to CycloneDX; unknown algorithms are left out.

        Returns:
            CycloneDX hashes.
        """
        known = {algorithms[name]: value for name, value in hashes.items() if name in algorithms}
        return [HashType(alg=algorithm, content=value) for algorithm, value in known.items()]

    def file_component(path: str, digest: str) -> Component:
        """Describe a file.

        Returns:
            CycloneDX component.
        """
        return Component(
            name=path, type=ComponentType.FILE, bom_ref=f"file:{path}", hashes=make_hashes({"sha256": digest})
        )

    whole = Component(
        name=model.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"model:{model.name}",
        hashes=make_hashes({"sha256": model.sha256}),
        components=[file_component(path, digest) for path, digest in model.files.items()],
    )
    libraries = {
        library.name: Component(
            name=library.name,
            version=library.version,
            bom_ref=f"{library.name}=={library.version}",
            purl=PackageURL("pypi", None, library.name, library.version),
            hashes=make_hashes(library.hashes),
        )
        for library in find_libraries(model.facts).values()
    }
    facts = {name: value for name, value in model.facts.items() if _normalize_name(name) not in libraries}
    python = facts.pop("python", "")
    interpreter = Component(name="python", version=python, type=ComponentType.PLATFORM, bom_ref="python")
    bom = Bom(
        components=[*libraries.values(), interpreter],
        serial_number=uuid.uuid5(_NAMESPACE, json.dumps([model.sha256, sorted(model.facts.items())])),
        metadata=BomMetaData(
            component=whole,
            timestamp=_parse_time(model.made),
            properties=[Property(name=f"normdeploy:{name}", value=value) for name, value in facts.items()],
        ),
    )
    for name, library in find_libraries(model.facts).items():
        bom.register_dependency(libraries[name], [libraries[need] for need in library.needs])
    bom.register_dependency(whole, [libraries[n] for n in map(_normalize_name, model.facts) if n in libraries])
    told: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return (json.dumps(told, sort_keys=True, indent=1) + "\n").encode()


def find_libraries(facts: Mapping[str, str]) -> dict[str, InstalledLibrary]:
    """Find the installed libraries that ``facts`` names, and all libraries that these libraries require. Requirements
    of extras are ignored.

    Returns:
        normalized name -> library, sorted.
    """
    installed = {_normalize_name(d.name): d for d in reversed(list(importlib.metadata.distributions())) if d.name}
    found: dict[str, InstalledLibrary] = {}
    stack = [name for name in map(_normalize_name, facts) if name in installed]
    while stack:
        name = stack.pop()
        if name not in found:
            needs = tuple(sorted(n for n in _required_names(installed[name]) if n in installed and n != name))
            found[name] = InstalledLibrary(name, installed[name].version, needs, _archive_hashes(installed[name]))
            stack += needs
    return dict(sorted(found.items()))


def _required_names(distribution: importlib.metadata.Distribution) -> set[str]:
    texts = [text for text in distribution.requires or () if not re.search(r";.*\bextra\b", text)]
    return {_normalize_name(match[0]) for text in texts if (match := re.match(r"[A-Za-z0-9._-]+", text))}


def _archive_hashes(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Return the hashes of the archive that pip installed, recorded as PEP 610 describes."""
    try:
        hashes = json.loads(distribution.read_text("direct_url.json") or "{}")["archive_info"]["hashes"]
        return {str(name): str(value) for name, value in hashes.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _normalize_name(name: str) -> str:
    """Normalize a distribution's name by PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _parse_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
