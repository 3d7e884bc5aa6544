"""Define a bundle to publish: its files, its labels, and its name in a registry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .outcomes import CellOutcome
from .step_store import StoredFile

# Maximum length of a tag in characters, according to distribution-spec.
_TAG = 128


@dataclass(frozen=True)
class PublishedBundle:
    """Bundle in a folder of this machine.

    Attributes:
        files: path → content.
        digest: SHA-256 of all files together.
        manifest: SHA-256 of the bundle's manifest.
    """

    folder: Path
    cell: CellOutcome
    files: Mapping[str, StoredFile]
    digest: str
    manifest: str

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels under which the bundle is published.

        Returns:
            "normdeploy.cell", ".model", ".variant", ".target", ".status", ".manifest" and ".bundle" → value.
        """
        cell = self.cell
        named = {"cell": cell.name, "model": cell.model, "variant": cell.variant, "target": cell.target}
        told = named | {"status": cell.status, "manifest": f"sha256:{self.manifest}", "bundle": f"sha256:{self.digest}"}
        return {f"normdeploy.{name}": value for name, value in told.items()}


class BundleDestination(Protocol):
    """Registry to which bundles are published."""

    def push_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        """Publish a bundle.

        Returns:
            the bundle's address, and whether the bundle is new in the registry.

        Raises:
            PublishError: the registry can't be reached, or refuses the bundle.
        """


def cell_tag(cell: CellOutcome) -> str:
    """Build a unique name for a cell. It consists of letters, digits, ".", "-" and "_".

    Returns:
        the name, which no other cell has.
    """
    parts = (cell.model, cell.variant, cell.target)
    text = "__".join(parts)
    if len(text) > _TAG or text[0] in ".-" or any("__" in p or p[0] == "_" or p[-1] == "_" for p in parts):
        return f"_{text[: _TAG - 14]}.{hashlib.sha256(cell.name.encode()).hexdigest()[:12]}"
    return text
