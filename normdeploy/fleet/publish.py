"""Puts the bundles of a fleet where others take them from: an OCI registry, or MLflow.

Only what the store says is right is published, and it is copied out of the store, hash by hash, before a byte is sent.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from ..arguments import called_with
from ..errors import InputError
from ..evidence.keys import trusted
from ..storage.files import sha256
from ..types import PathLike, Progress
from ..verbs.package.attest import require_signed
from ..verbs.package.bundle import MANIFEST, scan
from . import runs
from .bundles import Bundle, Destination
from .description import only as chosen
from .drive import Driver
from .ends import Cell, JobEnd
from .fleet import explained, machines_of, open_store, read
from .options import PublishOptions
from .sealed import keys_meant
from .store import Store, Stored
from .to_mlflow import Mlflow
from .to_oci import Oci

_FOLDER = "bundle/"  # of the outputs of a package step


@dataclass(frozen=True)
class Item:
    """What became of one cell: ``where`` it is, or the ``reason`` why it was refused."""

    cell: str
    outcome: Literal["published", "there", "refused"]
    where: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Published:
    """What ``publish`` did. True where nothing was refused."""

    to: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return not any(item.outcome == "refused" for item in self.items)


@dataclass(frozen=True)
class PublishCall(PublishOptions):
    """What ``publish`` is called with."""

    file: PathLike
    to: str
    _: KW_ONLY
    progress: Progress | None = None


@called_with(PublishCall)
def publish(call: PublishCall) -> Published:
    """Publish the bundles of a fleet's cells that are verified; what is there already is left as it is.

    Args:
        file: fleet.toml.
        to: "oci://HOST/REPOSITORY" or "mlflow://HOST/EXPERIMENT"; by http "oci+http://" and "mlflow+http://".
        only: patterns of models or of model/variant.
        built: cells whose engine was built and not run on its GPU are published too.
        trust: PEM files of public keys: records and bundles that none of them has signed are refused.
        progress: called with (cell, done, total).

    Raises:
        InputError: the file is wrong, there is no store, or ``to`` is no such place.
        StoreError: the store can't be read.
        PublishError: the place can't be reached, or refuses a bundle; those before it are published.
        RuntimeUnavailable: a library is missing.
    """
    fleet = read(call.file)
    trust = keys_meant(None, call.trust)[1]
    keys = trusted(trust)
    destination = _destination(call.to)
    opened = open_store(fleet, call.store, make=False, trust=trust)
    last = runs.last_of(opened, fleet.path.name)
    driver = Driver(opened, None, machines_of(last), explain=explained(opened, last))
    items, total = list[Item](), 0
    if call.progress is not None:
        total = sum(len(job.targets) for job in chosen(fleet.jobs(), call.only))
    for end in driver.run(chosen(fleet.jobs(), call.only)):
        for cell in end.cells():
            if call.progress is not None:
                call.progress(cell.name, len(items), total)
            outputs = _outputs(end, cell)
            if reason := _refused(cell, outputs, built=call.built):
                items.append(Item(cell.name, "refused", reason=reason))
                continue
            with tempfile.TemporaryDirectory(prefix="publish.") as folder:
                bundle = _copied(opened, outputs, Path(folder) / "bundle", cell)
                if keys:
                    require_signed(bundle.folder, keys)
                where, new = destination.put(bundle)
            items.append(Item(cell.name, "published" if new else "there", where))
    if call.only and not items:
        raise InputError(f"no model of {fleet.path.name} matches {', '.join(map(repr, call.only))}")
    return Published(call.to, tuple(items), tuple(dict.fromkeys(driver.notes)))


def _destination(to: str) -> Destination:
    """
    Raises:
        InputError: it is no address that is known.
        RuntimeUnavailable: a library is missing.
    """
    kind, _, rest = to.partition("://")
    for known, made in (("oci", Oci), ("mlflow", Mlflow)):
        if rest and kind in (known, f"{known}+http"):
            host, _, path = rest.rstrip("/").partition("/")
            return made(host, path, secure=kind == known)
    raise InputError(f"--to is {to!r}; give oci://HOST/REPOSITORY or mlflow://HOST/EXPERIMENT (by http: oci+http://)")


def _outputs(end: JobEnd, cell: Cell) -> dict[str, Stored]:
    """The files of the cell's bundle."""
    name = f"{cell.name}/package"
    outputs = next((step.outputs for step in end.steps if step.step == name), {})
    return {path.removeprefix(_FOLDER): file for path, file in outputs.items() if path.startswith(_FOLDER)}


def _refused(cell: Cell, outputs: Mapping[str, Stored], *, built: bool) -> str:
    """Why a cell is not published; "" where it is."""
    if cell.status != "verified" and not (built and cell.status == "built"):
        hint = "; --built publishes it" if cell.status == "built" else ""
        return f"it is {cell.status}" + (f": {cell.reason}" if cell.reason else "") + hint
    if MANIFEST not in outputs:
        return 'it has no bundle; put "package" into its steps, and bundle = true into its target'
    return ""


def _copied(store: Store, outputs: Mapping[str, Stored], folder: Path, cell: Cell) -> Bundle:
    for path, stored in outputs.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        store.get(stored, folder / path)
    return _described(folder, cell)


def _described(folder: Path, cell: Cell) -> Bundle:
    files = {path: Stored(sha256(folder / path), size) for path, size in sorted(scan(folder)[0].items())}
    digest = hashlib.sha256("".join(f"{f.sha256}  {path}\n" for path, f in files.items()).encode()).hexdigest()
    return Bundle(folder, cell, files, digest, files[MANIFEST].sha256)
