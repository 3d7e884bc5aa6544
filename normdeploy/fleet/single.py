"""One verb with a store: what was made of the same input before is taken from it, else made and kept.

The call becomes a step as a fleet has it, so that a fleet and single calls find what the other made.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import NormdeployError
from ..storage.atomic import atomic
from ..types import PathLike
from .fields import Values
from .fleet import open_store
from .hashes import Hashes
from .keys import Machine
from .places import Folder
from .pool import Local
from .sealed import keys_meant, require_signer
from .steps import CODE, REPORT, Needs, Step, option_words
from .store import Record, Store
from .tasks import found, task_of
from .work import StepFailed, sweep

_MADE = {"build": "model.engine"}  # what a verb writes as its output; the others write model.onnx


@dataclass(frozen=True)
class Kept:
    """What a verb made, and whether it was in the store."""

    store: Store
    record: Record
    cached: bool

    @property
    def log(self) -> str:
        """What the verb printed."""
        return self.store.bytes_of(self.record.log).decode(errors="replace")

    @property
    def report(self) -> bytes:
        """The verb's JSON report; files in it have the names that they had in the step's folder, and no times."""
        return self.store.bytes_of(self.record.outputs[Path(REPORT).name])

    def write(self, output: Path) -> None:
        """Put the file that was made where it is wanted, with what belongs to it beside it.

        Raises:
            NormdeployError: it can't be written; what stood there is left.
            Damaged: what the store holds is not what was made.
        """
        made = _MADE.get(self.record.depends["argv"][0], "model.onnx")
        others = [name for name in self.record.outputs if name not in (made, Path(REPORT).name)]
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            for name in (*others, made):
                self.store.get(self.record.outputs[name], Path(folder) / Path(name).name)
            for name in (*others, made):  # the file itself last: it refers to the others
                # weights keep the name by which the file knows them; a signature has that of its file
                target = output if name == made else output.with_name(name.replace(f"{made}.sig", f"{output.name}.sig"))
                with atomic(target) as written:
                    shutil.copyfile(Path(folder) / Path(name).name, written)


def kept(
    verb: str,
    sources: Mapping[str, Path],
    options: Values,
    store: PathLike | None,
) -> Kept:
    """What the verb makes of its files.

    Args:
        sources: the verb's arguments in their order, as they are named in the step's folder -> where they are.
        options: by their names on the command line, with "_" for "-"; without the output and the report.

    Raises:
        NormdeployError: the verb's own error, or one of the store.
    """
    sign, trust = keys_meant(None, ())
    require_signer(sign, trust)
    opened = open_store(None, store, sign=sign, trust=trust)
    sweep(opened)
    step = _step(verb, sources, options)
    hashes = Hashes(opened.place.root / "hashes.json" if isinstance(opened.place, Folder) else None)
    machine = Machine.here()
    task = task_of(step, {}, hashes, opened)
    before, _ = found(opened, task.key(machine)[0], void=True)
    if before is not None:
        return Kept(opened, before, True)
    hashes.save()
    pool = Local(opened, 1)
    try:
        record = pool.submit(task, machine).result()
    except StepFailed as error:
        raise NormdeployError(str(error)) from error
    finally:
        pool.close()
    return Kept(opened, record, False)


def _step(verb: str, sources: Mapping[str, Path], options: Values) -> Step:
    files = dict(sources)
    words = [verb, *sources]
    words += ["-o", f"out/{_MADE.get(verb, 'model.onnx')}"] if verb != "verify" else []
    words += [*option_words(options, files), "--report", REPORT]
    runtime = str(options.get("runtime", "tensorrt-rtx")) if verb == "build" else ""
    needs = Needs(runtime or ("onnxruntime" if verb == "verify" else ""))
    return Step(verb, tuple(words), files, Path.cwd() if any(options.get(n) for n in CODE) else None, needs=needs)
