"""Publish the bundles of a fleet to an OCI registry or to MLflow.

A bundle is published only if the store has right results for its cell. Before anything is sent, the bundle is copied
out of the store and every hash is checked.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import InputError
from ..evidence.signing_keys import load_public_keys
from ..storage.file_hash import hash_file
from ..types import PathLike, Progress
from ..verbs.arguments.argument_validation import take_fields_as_arguments
from ..verbs.package.bundle_signing import require_signed
from ..verbs.package.evidence_bundle import MANIFEST, scan_folder
from . import run_history
from .fleet_commands import machines_of_run, open_fleet_store, read_fleet_file, stale_step_explainer
from .fleet_file import filter_jobs as chosen
from .fleet_options import PublishOptions
from .mlflow_destination import MlflowDestination
from .oci_destination import OciDestination
from .outcomes import CellOutcome, JobEnd
from .published_bundle import BundleDestination, PublishedBundle
from .scheduler import Scheduler
from .signed_store import resolve_keys
from .step_store import StepStore, StoredFile

# Folder of the bundle among the outputs of a package step.
_FOLDER = "bundle/"


@dataclass(frozen=True)
class PublishedCell:
    """Outcome of publishing one cell: ``where`` is the address of the published bundle, and ``reason`` tells why the
    cell was refused. The outcome "there" means that the registry already had the bundle.
    """

    cell: str
    outcome: Literal["published", "there", "refused"]
    where: str = ""
    reason: str = ""


@dataclass(frozen=True)
class PublishResult:
    """Result of ``publish_bundles``. The record is true if no cell was refused."""

    to: str
    items: tuple[PublishedCell, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return not any(item.outcome == "refused" for item in self.items)


@dataclass(frozen=True)
class PublishCall(PublishOptions):
    """Arguments of ``publish_bundles``."""

    file: PathLike
    to: str
    _: KW_ONLY
    progress: Progress | None = None


@take_fields_as_arguments(PublishCall)
def publish_bundles(call: PublishCall) -> PublishResult:
    """Publish the bundles of a fleet's verified cells. Bundles that are already in the registry are left unchanged.

    Args:
        file: fleet.toml.
        to: "oci://HOST/REPOSITORY" or "mlflow://HOST/EXPERIMENT". The forms for http instead of https are "oci+http://"
            and "mlflow+http://".
        store: path or URL of the store (`normdeploy.fleet.fleet_options`).
        only: patterns of models or of model/variant.
        built: True to also publish cells whose engine was built but not run on its GPU.
        trust: PEM files of public keys; records and bundles that none of these keys has signed are refused.
        progress: called with (cell, done, total).

    Returns:
        the outcome of each cell.

    Raises:
        InputError: the file is wrong, the store does not exist, or ``to`` is not a valid address.
        StoreError: the store can't be read.
        PublishError: the registry can't be reached, or refuses a bundle. Earlier bundles are then already published.
        RuntimeUnavailable: a library is missing.
    """
    fleet = read_fleet_file(call.file)
    trust = resolve_keys(None, call.trust)[1]
    keys = load_public_keys(trust)
    destination = open_destination(call.to)
    opened = open_fleet_store(fleet, call.store, make=False, trust=trust)
    last = run_history.find_last_run(opened, fleet.path.name)
    driver = Scheduler(opened, None, machines_of_run(last), explain=stale_step_explainer(opened, last))
    items = list[PublishedCell]()
    total = 0
    if call.progress is not None:
        total = sum(len(job.targets) for job in chosen(fleet.iter_jobs(), call.only))
    for end in driver.run(chosen(fleet.iter_jobs(), call.only)):
        for cell in end.cell_outcomes():
            outputs = _bundle_outputs(end, cell)
            if reason := _publish_refusal(cell, outputs, built=call.built):
                items.append(PublishedCell(cell.name, "refused", reason=reason))
            else:
                with tempfile.TemporaryDirectory(prefix="publish.") as folder:
                    bundle = _copy_bundle(opened, outputs, Path(folder) / "bundle", cell)
                    if keys:
                        require_signed(bundle.folder, keys)
                    where, new = destination.push_bundle(bundle)
                items.append(PublishedCell(cell.name, "published" if new else "there", where))
            if call.progress is not None:
                call.progress(cell.name, len(items), total)
    if call.only and not items:
        raise InputError(f"no model of {fleet.path.name} matches {', '.join(map(repr, call.only))}")
    return PublishResult(call.to, tuple(items), tuple(dict.fromkeys(driver.notes)))


def open_destination(to: str) -> BundleDestination:
    """Open the registry of an address.

    Returns:
        the registry.

    Raises:
        InputError: the address is not valid.
        RuntimeUnavailable: a library is missing.
    """
    kind, _, rest = to.partition("://")
    for known, made in (("oci", OciDestination), ("mlflow", MlflowDestination)):
        if rest and kind in (known, f"{known}+http"):
            host, _, path = rest.rstrip("/").partition("/")
            return made(host, path, secure=kind == known)
    raise InputError(
        f"--to is {to!r}; expected oci://HOST/REPOSITORY or mlflow://HOST/EXPERIMENT (for http: oci+http://)"
    )


def _bundle_outputs(end: JobEnd, cell: CellOutcome) -> dict[str, StoredFile]:
    """Select the files of a cell's bundle."""
    name = f"{cell.name}/package"
    outputs = next((step.outputs for step in end.steps if step.step == name), {})
    return {path.removeprefix(_FOLDER): file for path, file in outputs.items() if path.startswith(_FOLDER)}


def _publish_refusal(cell: CellOutcome, outputs: Mapping[str, StoredFile], *, built: bool) -> str:
    """Return the reason why a cell can't be published; "" if it can."""
    if cell.status != "verified" and not (built and cell.status == "built"):
        if cell.status == "built":
            hint = "; --built publishes it"
        else:
            hint = ""
        return f"it is {cell.status}" + (f": {cell.reason}" if cell.reason else "") + hint
    if MANIFEST not in outputs:
        return 'it has no bundle; add "package" to its steps and bundle = true to its target'
    return ""


def _copy_bundle(
    store: StepStore, outputs: Mapping[str, StoredFile], folder: Path, cell: CellOutcome
) -> PublishedBundle:
    for path, stored in outputs.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        store.get(stored, folder / path)
    return describe_bundle(folder, cell)


def describe_bundle(folder: Path, cell: CellOutcome) -> PublishedBundle:
    """Hash the files of a bundle's folder.

    Returns:
        the bundle with its digests.
    """
    files = {path: StoredFile(hash_file(folder / path), size) for path, size in sorted(scan_folder(folder)[0].items())}
    digest = hashlib.sha256("".join(f"{f.sha256}  {path}\n" for path, f in files.items()).encode()).hexdigest()
    return PublishedBundle(folder, cell, files, digest, files[MANIFEST].sha256)
