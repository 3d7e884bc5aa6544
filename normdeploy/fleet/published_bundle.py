"""A bundle on its way to a registry: its files, what is said of it, and its name there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .outcomes import CellOutcome
from .step_store import StoredFile

# characters that a tag of distribution-spec may have
_TAG = 128


@dataclass(frozen=True)
class PublishedBundle:
    """A bundle on this disk: ``files`` are path -> content, ``digest`` is that of all of them, ``manifest`` that of its
    manifest."""

    folder: Path
    cell: CellOutcome
    files: Mapping[str, StoredFile]
    digest: str
    manifest: str

    @property
    def labels(self) -> dict[str, str]:
        """What is said of it where it is published."""
        cell = self.cell
        named = {"cell": cell.name, "model": cell.model, "variant": cell.variant, "target": cell.target}
        told = named | {"status": cell.status, "manifest": f"sha256:{self.manifest}", "bundle": f"sha256:{self.digest}"}
        return {f"normdeploy.{name}": value for name, value in told.items()}


class BundleDestination(Protocol):
    """Where bundles go."""

    def push_bundle(self, bundle: PublishedBundle) -> tuple[str, bool]:
        """Where the bundle is now, and whether it is new there.

        Raises:
            PublishError: it can't be reached, or refuses.
        """


def cell_tag(cell: CellOutcome) -> str:
    """A name for a cell, of letters, digits, ".", "-" and "_" alone, that no other cell has."""
    parts = (cell.model, cell.variant, cell.target)
    text = "__".join(parts)
    if len(text) > _TAG or text[0] in ".-" or any("__" in p or p[0] == "_" or p[-1] == "_" for p in parts):
        return f"_{text[: _TAG - 14]}.{hashlib.sha256(cell.name.encode()).hexdigest()[:12]}"
    return text
