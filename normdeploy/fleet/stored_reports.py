"""Find in a store the report of a file that a step wrote, by the file's SHA-256."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ..errors import StoreError
from ..types import PathLike
from ..verbs.package.certificate_search import is_report_of_file
from ..verbs.package.package_options import FoundReport
from .fleet_commands import STORE, open_fleet_store
from .job_steps import REPORT
from .signed_store import resolve_keys
from .step_store import StepRecord, StepStore, StoredFile
from .store_queries import AT_A_TIME

_REPORT_NAME = PurePosixPath(REPORT).name


def find_stored_report(digest: str, store: PathLike | None = None) -> FoundReport | None:
    """Find the report of the step that wrote a file.

    Args:
        digest: SHA-256 of the file.
        store: place of the store; None takes NORMDEPLOY_STORE, if that store exists.

    Returns:
        the report; None if no trusted step in the store wrote the file.

    Raises:
        InputError: the given store does not exist, or a key can't be used.
        StoreError: the store can't be reached.
        RuntimeUnavailable: a library is missing.
    """
    place = os.environ.get(STORE, "") if store is None else os.fspath(store)
    if not place or (store is None and "://" not in place and not Path(place).is_dir()):
        return None
    opened = open_fleet_store(None, place, make=False, trust=resolve_keys(None, ())[1])
    for report in _iter_reports_of_output(opened, digest):
        try:
            data = opened.read_bytes(report)
        except StoreError:
            # Damaged or removed: another step may have written the same file.
            continue
        if is_report_of_file(data, digest):
            return FoundReport(data, "the store")
    return None


def _iter_reports_of_output(store: StepStore, digest: str) -> Iterator[StoredFile]:
    """Yield the reports of the steps that wrote a file with this hash."""

    def read_trusted_record(key: str) -> StepRecord | None:
        try:
            return store.read_record(key)
        except StoreError:
            return None

    keys = [PurePosixPath(entry.name).name for entry in store.place.list_entries("steps/")]
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for record in threads.map(read_trusted_record, keys):
            if record is None or _REPORT_NAME not in record.outputs:
                continue
            if any(stored.sha256 == digest for stored in record.outputs.values()):
                yield record.outputs[_REPORT_NAME]
