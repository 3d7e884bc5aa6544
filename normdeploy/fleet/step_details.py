"""Find details of one cell or step in the last run of a fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from ..errors import InputError
from ..storage.folder_replacement import replace_folder_atomically, require_empty_dir
from ..types import PathLike
from . import run_history
from .fleet_commands import open_fleet_store, read_fleet_file
from .remote_backend import open_backend
from .signed_store import resolve_keys
from .step_store import DamagedObject, StepRecord, StepStore, StoredFile
from .store_backends import FolderBackend


class FoundSteps:
    """Steps with their records, and the store that contains the records.

    Args:
        steps: (name, outcome, record); record is None if the step has none.
    """

    def __init__(self, store: StepStore, steps: Sequence[tuple[str, str, StepRecord | None]]) -> None:
        self.store, self.steps = store, steps


def find_steps(
    file: PathLike, name: str, *, store: PathLike | None = None, trust: Sequence[PathLike] = ()
) -> FoundSteps:
    """Find the steps that a name selects in the last run of a fleet.

    Args:
        name: name of a cell, a job or a step, or the start of a step's key.
        trust: PEM files of public keys; records that none of these keys has signed are refused.

    Returns:
        the steps with their records.

    Raises:
        InputError: the fleet has no run, or its last run has no such step.
        StoreError: the store can't be read, or holds an untrusted record.
    """
    fleet = read_fleet_file(file)
    opened = open_fleet_store(fleet, store, make=False, trust=resolve_keys(None, trust)[1])
    mine = [r for r in run_history.list_runs(opened) if r["file"] == fleet.path.name]
    if not mine:
        raise InputError(
            f"the store {opened.place.url!r} has no run of {fleet.path.name}; start one with normdeploy fleet run"
        )
    # The latest runs may have left out this model, so go back as far as the last run of all models.
    for run in reversed(mine):
        wanted = [t for t in run_history.iter_run_steps(opened, run["id"]) if _matches_step(name, t["step"], t["key"])]
        if wanted or not run.get("only"):
            break
    if not wanted:
        cells = sorted(run_history.cells_by_name(opened, run["id"]))
        raise InputError(
            f"the last run has no step named {name!r}; its cells are {', '.join(cells[:10])}"
            + (", …" if len(cells) > 10 else "")
        )
    return FoundSteps(
        opened, [(t["step"], t["outcome"], opened.read_record(t["key"]) if t["key"] else None) for t in wanted]
    )


def _matches_step(name: str, step: str, key: str) -> bool:
    """Return True if ``name`` selects a step.

    A step is selected by its own name, by its cell or job, or by at least eight characters of its key. A step that is
    shared by all targets belongs to every cell of its job.
    """
    job = step.rsplit("/", 1)[0]
    return (
        step == name
        or step.startswith(f"{name}/")
        or (name.startswith(f"{job}/") and name.count("/") == job.count("/") + 1 and name.rsplit("/", 1)[0] == job)
        or (len(name) >= 8 and key.startswith(name))
    )


def read_log(found: FoundSteps, record: StepRecord) -> str:
    """Read the output that a step printed.

    Returns:
        the text.
    """
    return found.store.read_bytes(record.log).decode(errors="replace")


def log_readers(url: str, page: Path) -> tuple[Callable[[str], str], Callable[[str], str] | None]:
    """Build functions that return logs, and links to logs, for a page.

    Args:
        url: path or URL of the store.
        page: path of the page.

    Returns:
        two functions of a log's SHA-256. The first returns the log's text, "" if it is missing or damaged. The second
        returns the link from the page; it is None if the store is not a folder.
    """
    store = StepStore(open_backend(url))

    def read_log_text(digest: str) -> str:
        try:
            return store.read_bytes(StoredFile(digest, 0)).decode(errors="replace")
        except DamagedObject:
            return ""

    if not isinstance(store.place, FolderBackend):
        return read_log_text, None
    root = os.path.relpath(store.place.root, Path(os.path.abspath(page)).parent)
    return read_log_text, lambda digest: quote(f"{Path(root).as_posix()}/objects/{digest[:2]}/{digest}")


def copy_outputs(found: FoundSteps, output: Path) -> None:
    """Copy the outputs of steps into a new folder, with a subfolder for each step.

    Raises:
        NormdeployError: the folder exists and is not empty, or can't be written.
        DamagedObject: an object is damaged. Nothing is written then.
    """
    with replace_folder_atomically(require_empty_dir(output)) as folder:
        for name, _, record in found.steps:
            for path, stored in (record.outputs if record is not None else {}).items():
                target = folder / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                found.store.get(stored, target)
