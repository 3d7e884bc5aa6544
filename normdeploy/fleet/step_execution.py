"""Run one step: copy its files to an empty folder, call the verb in this folder, and store the outputs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..compare.number_text import format_number
from ..errors import NEITHER, NOT_RUN, InputError, NormdeployError, StoreError
from ..storage.file_hash import hash_file
from ..storage.file_replacement import lock_handle
from ..verbs.package.bundle_signing import sign_bundle
from .bundle_provenance import bundle_origin
from .fork_client import CallEnd, ForkClient
from .job_steps import JobStep
from .remote_backend import RemoteBackend
from .signed_store import RecordSigner
from .step_inputs import StepTask
from .step_keys import FleetMachine
from .step_store import StepRecord, StepStore, StoredFile
from .store_backends import FolderBackend, locked_temporary_folder

# Verbs whose result is complete even if an engine in the bundle was not run.
_WITHOUT_GPU = ("package", "recheck")
# Number of characters at the end of a log in which to search for the reason of a failure.
_TAIL = 4000


class StepFailed(NormdeployError):
    """Error for a step without a result that can be stored. ``log`` is the stored text that the step printed, or
    None.
    """

    def __init__(self, reason: str, log: StoredFile | None = None) -> None:
        super().__init__(reason)
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.log)


class StepNotRun(StepFailed):
    """Error for a step whose verb reported that a package or a GPU is missing here. The result is neither right nor
    wrong.
    """


def execute_step(task: StepTask, store: StepStore, warm: ForkClient, machine: FleetMachine) -> StepRecord:
    """Run a step and store its outputs.

    Returns:
        the step's record, or the record that another driver wrote during the run.

    Raises:
        StepFailed: the step ended without a result, because of an error of the verb, a crash, or a limit.
        StepNotRun: a package or a GPU that the verb needs is missing here.
        ProcessVanished: another process killed the step's process. The step may be retried.
        DamagedObject: an input in the store is damaged.
        StoreError: the store can't be reached or written.
    """
    key, depends = task.key_on(machine)
    step = task.step
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with _work_folder(store) as folder:
        _place_inputs(task, store, folder)
        (folder / "out").mkdir()
        log = folder / ".log"
        log.touch()
        end = warm.run(step.argv, folder, log, step.seconds, step.memory)
        kept = store.put(log)
        evidence = folder / step.evidence
        if end.code == NOT_RUN and not (step.verb in _WITHOUT_GPU and evidence.is_file()):
            raise StepNotRun(_describe_end(end, step, log), kept)
        if end.code not in (0, NOT_RUN) and not (end.code == 1 and evidence.is_file()):
            raise StepFailed(_describe_end(end, step, log), kept)
        if not evidence.is_file():
            raise StepFailed(f"{step.verb} ended without writing {step.evidence}", kept)
        if step.verb == "package" and isinstance(store.seal, RecordSigner):
            inputs = {path: file.stored.sha256 for path, file in task.inputs.items()}
            sign_bundle(evidence.parent, store.seal.signer, bundle_origin(step, key, inputs, task.made, store))
        outputs = {
            path.relative_to(folder / "out").as_posix(): store.put(path)
            for path in sorted((folder / "out").rglob("*"))
            if path.is_file()
        }
        told = json.loads(evidence.read_bytes())
        wrong = end.code == 1
        measures = extract_measures(told)
        reason = describe_wrong_result(told) if wrong else ""
    record = StepRecord(
        key,
        step.name,
        "wrong" if wrong else "ok",
        depends,
        outputs,
        kept,
        measures,
        reason,
        dict(machine.facts),
        started,
        end.seconds,
        end.peak,
    )
    return store.commit(record)


def extract_measures(report: Mapping[str, Any]) -> dict[str, float]:
    """Extract from a verb's report the numbers that a page shows.

    Returns:
        "error", the largest used share of an allowed error; "milliseconds", the smallest median time of a run; "engine
        bytes". Keys whose numbers the report lacks are left out.
    """
    found: dict[str, float] = {}
    shares = [
        r["max_abs_error"] / r["allowed"]
        for r in _result_rows(report)
        if _is_number(r.get("max_abs_error")) and _is_number(r.get("allowed")) and r["allowed"] > 0
    ]
    if shares:
        found["error"] = max(shares)
    race = report.get("race") or {}
    times = [e["median"] for e in race.get("entries", ()) if _is_number(e.get("median"))]
    if times:
        found["milliseconds"] = min(times)
    engine = report.get("engine") or {}
    if _is_number(engine.get("bytes")):
        found["engine bytes"] = float(engine["bytes"])
    return found


def describe_wrong_result(report: Mapping[str, Any]) -> str:
    """Describe the wrong result that a verb reported.

    Returns:
        one line. It describes the first wrong row or weight, and gives the number of further wrong rows or weights.
    """
    failed = [r for r in _result_rows(report) if r.get("verdict") == "fail"]
    if failed:
        first = failed[0]
        error, allowed = (format_number(first[name], 3) for name in ("max_abs_error", "allowed"))
        off = f"differs by {error}; the allowed error is {allowed}"
        if len(failed) > 1:
            more = f" ({len(failed)} rows fail)"
        else:
            more = ""
        if first.get("reason"):
            said = f": {first['reason']}"
        else:
            said = f" {off}"
        return f"{first['runtime']}: output {first['output']!r}{said}{more}"
    altered = [w for w in _weight_rows(report) if w.get("origin") == "altered"]
    if altered:
        if len(altered) > 1:
            more = f" ({len(altered)} weights are altered)"
        else:
            more = ""
        return f"weight {altered[0].get('name')}: {altered[0].get('reason')}{more}"
    worse = [c for c in report.get("changes", ()) if isinstance(c, Mapping) and c.get("worse")]
    if worse:
        return f"{worse[0]['name']}: {worse[0]['was']} → {worse[0]['now']}"
    return "the verb ended with exit code 1; see its log"


def _weight_rows(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parity = report.get("parity")
    if isinstance(parity, Mapping):
        weights = parity.get("weights", ())
    else:
        weights = ()
    return [w for w in weights if isinstance(w, Mapping)]


def _result_rows(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "parity" in report:
        parity = report.get("parity")
    else:
        parity = report
    if isinstance(parity, Mapping):
        results = parity.get("results", ())
    else:
        results = ()
    return [r for r in results if isinstance(r, Mapping)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe_end(end: CallEnd, step: JobStep, log: Path) -> str:
    if end.why == "seconds":
        return f"it exceeded its limit of {step.seconds:g} s; raise seconds"
    if end.why == "memory":
        return f"it exceeded its limit of {step.memory / 2**20:.0f} MB; raise memory"
    if end.why:
        return "it was stopped with the run"
    if end.code < 0:
        return f"{step.verb} crashed (signal {-end.code}); see its log"
    lines = log.read_text(errors="replace")[-_TAIL:].strip().splitlines()
    if end.code == NOT_RUN:
        opening = f"{NEITHER}: "
    else:
        opening = "error: "
    errors = [n for n, line in enumerate(lines) if line.startswith(opening)]
    if errors:
        told = " ".join(lines[errors[-1] :])[len(opening) :]
    elif lines:
        told = lines[-1]
    else:
        told = ""
    return told or f"{step.verb} ended with exit code {end.code}"


def _place_inputs(task: StepTask, store: StepStore, folder: Path) -> None:
    for path, file in task.inputs.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.path is None:
            store.get(file.stored, target)
        elif not (file.copied is False and _try_link(file.path, target)):
            shutil.copyfile(file.path, target)
            if hash_file(target) != file.stored.sha256:
                raise _changed_error(file.path)
        elif target.stat().st_size != file.stored.bytes:
            raise _changed_error(file.path)


def _changed_error(path: Path) -> InputError:
    return InputError(f"{path.name!r} changed while the fleet ran; run it again")


def _try_link(file: Path, target: Path) -> bool:
    try:
        os.link(os.path.realpath(file), target)
    except OSError:
        # The folder is on another file system, or its file system has no hard links.
        return False
    return True


@contextlib.contextmanager
def _work_folder(store: StepStore) -> Iterator[Path]:
    """Create a temporary folder, on the disk of the store if the store is a folder.

    Raises:
        StoreError: the disk is full, or can't be written to.
    """
    if isinstance(store.place, FolderBackend):
        base = store.place.root / "work"
    else:
        base = None
    try:
        with locked_temporary_folder(base) as folder:
            yield folder
    except OSError as error:
        where = base or tempfile.gettempdir()
        raise StoreError(
            f"can't write a step's files to {str(where)!r}: {error.strerror or error}; free up space there. "
            "Stored results are intact, and the next run resumes from them"
        ) from error


def remove_leftovers(store: StepStore) -> None:
    """Clean up a store before a run.

    Leftovers of killed runs are removed: step folders, claims and incomplete objects. For a remote store, also check
    that it can be written.
    """
    if isinstance(store.place, RemoteBackend):
        store.place.check_writable()
    if not isinstance(store.place, FolderBackend):
        return
    root = store.place.root
    for path in (*(root / "work").glob("step.*"), *(root / "claims").iterdir()):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        if lock_handle(handle, wait=False):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        os.close(handle)
