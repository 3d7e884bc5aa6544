"""One verb with a store: what was made of the same input before is taken from it, else made and kept.

The call becomes a step as a fleet has it, so that a fleet and single calls find what the other made.
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

# what a verb writes as its output; the others write model.onnx
_MADE = {"build": "model.engine"}
# of a call whose objects are damaged
_TRIES = 3


@dataclass(frozen=True)
class CachedResult:
    """What a verb made.

    ``log`` is what it printed; ``report`` its JSON report, in which files have the names that they had in the step's
    folder, and no times. ``cached``: it was in the store. ``notes`` say what was damaged there, and made again.
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
    """What the verb makes of its files. What the store has of it is compared with its hashes; if it is damaged, it is
    made again.

    Args:
        sources: the verb's arguments in their order, as they are named in the step's folder -> where they are.
        options: by their names on the command line, with "_" for "-"; without the output and the report.
        output: where the file that is made is put, with what belongs to it beside it.

    Raises:
        NormdeployError: the verb's own error, one of the store, or ``output`` can't be written; what stood there is
            left.
        Damaged: what was made is damaged in the store again and again.
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
            note = f"the record {key} does not name {lacking}, which {verb} makes; the step is run again"
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
            notes.append(f"{record.step} is run again: {error}")
        else:
            return CachedResult(record, cached, log, report, tuple(notes))
    raise AssertionError("unreachable")


def _output_name(record: StepRecord) -> str:
    """The file that the verb writes as its output."""
    return _MADE.get(record.depends["argv"][0], "model.onnx")


def _find_missing_output(record: StepRecord, output: Path | None) -> str:
    """A file that a record of this verb names, if nobody has changed it; "" where it names all."""
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
    """Objects are kept by their hashes: one that is damaged would stand in the place of what is made again."""
    with tempfile.TemporaryDirectory() as folder:
        for stored in (*record.outputs.values(), record.log):
            target = Path(folder) / stored.sha256
            with suppress(DamagedObject):
                store.get(stored, target)
            target.unlink(missing_ok=True)


def _write_outputs(store: StepStore, record: StepRecord, output: Path) -> None:
    """Put the file that was made where it is wanted, with what belongs to it beside it.

    Raises:
        NormdeployError: it can't be written; what stood there is left.
        Damaged: what the store holds is not what was made; nothing is written.
    """
    made = _output_name(record)
    others = [name for name in record.outputs if name not in (made, Path(REPORT).name)]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        for name in (*others, made):
            store.get(record.outputs[name], Path(folder) / Path(name).name)
        # the file itself last: it refers to the others
        for name in (*others, made):
            # weights keep the name by which the file knows them; a signature has that of its file
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
