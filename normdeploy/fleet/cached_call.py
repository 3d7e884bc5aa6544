"""Run one verb with a store: reuse a stored result for the same input, otherwise run the verb and store its result.

The call becomes a step like the steps of a fleet, so a fleet and single calls reuse each other's results.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, NormdeployError, RuntimeUnavailable
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

# Verb → its output file. All other verbs write model.onnx.
_MADE = {"build": "model.engine"}
# Maximum number of tries of a call whose stored result is damaged.
_TRIES = 3


@dataclass(frozen=True)
class CachedResult:
    """Result of a verb.

    Attributes:
        record: record of the step.
        cached: True if the result was in the store.
        log: output that the verb printed.
        report: JSON report without times. It uses the file names of the step's folder.
        notes: notes on damaged results that were computed again.
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

    Stored files are compared with their hashes. A damaged result is computed again.

    Args:
        sources: name in the step's folder → path, for the verb's arguments in their order.
        options: option → value. The names are those of the command line, with "_" for "-". The options for output and
            report are left out.
        store: path or URL of the store; None takes the default.
        output: path of the output file. Other files that the verb wrote are copied to its folder. None copies nothing.

    Returns:
        the result.

    Raises:
        NormdeployError: the verb or the store failed, or ``output`` can't be written. An existing file is kept.
        DamagedObject: the result in the store is damaged after each of several tries.
    """
    _require_one_file(options)
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


def _require_one_file(options: Values) -> None:
    """Refuse options with which ``export`` writes a folder.

    Raises:
        InputError: such an option is set.
    """
    if options.get("genai"):
        flag = "--genai"
    elif options.get("part") == "all":
        flag = "--part all"
    else:
        return
    raise InputError(
        f"{flag} writes a folder, but --store holds single files; omit --store, and unset NORMDEPLOY_STORE if it is set"
    )


def _output_name(record: StepRecord) -> str:
    """Return the name of the verb's output file."""
    return _MADE.get(record.depends["argv"][0], "model.onnx")


def _find_missing_output(record: StepRecord, output: Path | None) -> str:
    """Return a required file that the record does not name; "" if the record names all required files. A file may be
    missing because somebody changed the record.
    """
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

    Objects are stored under their hashes, so a damaged object would prevent the correct object from being stored.
    """
    with tempfile.TemporaryDirectory() as folder:
        for stored in (*record.outputs.values(), record.log):
            target = Path(folder) / stored.sha256
            with suppress(DamagedObject):
                store.get(stored, target)
            target.unlink(missing_ok=True)


def _write_outputs(store: StepStore, record: StepRecord, output: Path) -> None:
    """Copy the output file to ``output``, and its other files to the same folder.

    Raises:
        NormdeployError: a file can't be written. An existing file is kept.
        DamagedObject: a stored file is damaged. Nothing is written.
    """
    made = _output_name(record)
    others = [name for name in record.outputs if name not in (made, Path(REPORT).name)]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        for name in (*others, made):
            store.get(record.outputs[name], Path(folder) / Path(name).name)
        # The output file is written last, because it refers to the other files.
        for name in (*others, made):
            # Files of weights keep their names, because the output file refers to them. A signature is named after the
            # output file.
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
        runtime = str(options.get("library", "tensorrt-rtx"))
    else:
        runtime = ""
    needs = StepNeeds(runtime or ("onnxruntime" if verb == "verify" else ""))
    return JobStep(verb, tuple(words), files, Path.cwd() if any(options.get(n) for n in CODE) else None, needs=needs)
