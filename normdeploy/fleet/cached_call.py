"""Run one verb with a store: reuse the stored result for the same input, otherwise run and store it.

The call becomes a step like those of a fleet, so a fleet and single calls reuse each other's results.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import NormdeployError, RuntimeUnavailable
from ..storage.file_replacement import replace_atomically, resolve_writable_path
from ..types import PathLike
from .file_hashes import FileHashes
from .fleet_commands import open_fleet_store
from .fleet_schema import Values
from .job_steps import CODE, REPORT, JobStep, StepNeeds, command_line_options
from .local_pool import LocalPool
from .signed_store import require_signer, resolve_keys
from .step_execution import StepFailed, StepNotRun, remove_leftovers
from .step_inputs import StepTask, lookup_record, resolve_inputs
from .step_keys import FleetMachine
from .step_store import DamagedObject, StepRecord, StepStore

# Output file of a verb; all others write model.onnx.
_MADE = {"build": "model.engine"}
# Tries of a call whose objects are damaged.
_TRIES = 3


@dataclass(frozen=True)
class CachedResult:
    """Result of a verb.

    Attributes:
        record: record of the step.
        cached: the result was in the store.
        log: output that the verb printed.
        report: JSON report, without times and with the file names of the step's folder.
        notes: notes on damaged results that were made again.
    """

    record: StepRecord
    cached: bool
    log: str
    report: bytes
    notes: tuple[str, ...] = ()


def call_with_cache(
    verb: str,
    sources: Mapping[str, Path],
    options: Values,
    store: PathLike | None,
    output: Path | None = None,
) -> CachedResult:
    """Call a verb, or take its result from the store.

    Stored files are compared with their hashes; damaged results are made again.

    Args:
        sources: the verb's arguments in their order: name in the step's folder → path.
        options: options by their command-line names, with "_" for "-", without the output and the report.
        store: place of the store; None takes the default.
        output: path of the output file; further files are put beside it. None writes nothing.

    Returns:
        the result.

    Raises:
        NormdeployError: an error of the verb or of the store, or ``output`` can't be written; an existing file is kept.
        DamagedObject: the result is damaged in the store again and again.
    """
    if output is not None:
        resolve_writable_path(output)
    sign, trust = resolve_keys(None, ())
    require_signer(sign, trust)
    opened = open_fleet_store(None, store, sign=sign, trust=trust)
    remove_leftovers(opened)
    step = _step_of_call(verb, sources, options)
    hashes = FileHashes.load_cache(opened)
    machine = FleetMachine.this_machine()
    task = resolve_inputs(step, {}, hashes, opened)
    key, _ = task.key_on(machine)
    hashes.save()
    notes = list[str]()
    for tries in range(1, _TRIES + 1):
        record, note = lookup_record(opened, key, void=True)
        if record is not None and (lacking := _find_missing_output(record, output)):
            opened.void_record(key)
            record = None
            note = f"the record {key} lacks {lacking}, an output of {verb}; rerunning the step"
        notes += [note] if note else []
        cached = record is not None
        if record is None:
            record = _run_now(task, opened, machine)
        try:
            log = opened.read_bytes(record.log).decode(errors="replace")
            report = opened.read_bytes(record.outputs[Path(REPORT).name])
            if output is not None:
                _write_outputs(opened, record, output)
        except DamagedObject as error:
            opened.void_record(key)
            _remove_damaged_objects(opened, record)
            if tries == _TRIES:
                raise
            notes.append(f"rerunning {record.step}: {error}")
        else:
            return CachedResult(record, cached, log, report, tuple(notes))
    raise AssertionError("unreachable")


def _output_name(record: StepRecord) -> str:
    """Return the name of the verb's output file."""
    return _MADE.get(record.depends["argv"][0], "model.onnx")


def _find_missing_output(record: StepRecord, output: Path | None) -> str:
    """Return a required file that the record does not name; "" if it names all. A changed record may lack files."""
    wanted = [Path(REPORT).name, *([_output_name(record)] if output is not None else [])]
    return next((name for name in wanted if name not in record.outputs), "")


def _run_now(task: StepTask, store: StepStore, machine: FleetMachine) -> StepRecord:
    pool = LocalPool(store, 1)
    try:
        return pool.submit(task, machine).result()
    except StepNotRun as error:
        raise RuntimeUnavailable(str(error)) from error
    except StepFailed as error:
        raise NormdeployError(str(error)) from error
    finally:
        pool.close()


def _remove_damaged_objects(store: StepStore, record: StepRecord) -> None:
    """Remove damaged objects of a record.

    Objects are stored by their hashes, so a damaged object would block the new one.
    """
    with tempfile.TemporaryDirectory() as folder:
        for stored in (*record.outputs.values(), record.log):
            target = Path(folder) / stored.sha256
            with suppress(DamagedObject):
                store.get(stored, target)
            target.unlink(missing_ok=True)


def _write_outputs(store: StepStore, record: StepRecord, output: Path) -> None:
    """Copy the output file to its place, with further files beside it.

    Raises:
        NormdeployError: it can't be written; an existing file is kept.
        DamagedObject: a stored file is damaged; nothing is written.
    """
    made = _output_name(record)
    others = [name for name in record.outputs if name not in (made, Path(REPORT).name)]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        for name in (*others, made):
            store.get(record.outputs[name], Path(folder) / Path(name).name)
        # The output file is last, because it refers to the others.
        for name in (*others, made):
            # Weights keep their names, to which the output file refers; a signature is named after the
            # output.
            if name == made:
                target = output
            else:
                target = output.with_name(name.replace(f"{made}.sig", f"{output.name}.sig"))
            with replace_atomically(target) as written:
                shutil.copyfile(Path(folder) / Path(name).name, written)


def _step_of_call(verb: str, sources: Mapping[str, Path], options: Values) -> JobStep:
    files = dict(sources)
    words = [verb, *sources]
    if verb != "verify":
        words += ["-o", f"out/{_MADE.get(verb, 'model.onnx')}"]
    words += [*command_line_options(options, files), "--report", REPORT]
    if verb == "build":
        runtime = str(options.get("runtime", "tensorrt-rtx"))
    else:
        runtime = ""
    needs = StepNeeds(runtime or ("onnxruntime" if verb == "verify" else ""))
    return JobStep(verb, tuple(words), files, Path.cwd() if any(options.get(n) for n in CODE) else None, needs=needs)
