"""Half files on inputs far beyond the usual ones, where a value inside leaves float16's range.

A square or a sum of squares reaches 65504 at inputs of a few hundred. torch's kernels hold it in float32, a file whose
nodes are half does not. That limits the inputs for which the file is fit, and is told; what the file computes is judged
in float64. On inputs as the model's user states them, and on random ones, an overflow fails as before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...compare.error_bounds import has_lost_all_digits
from ...errors import NormdeployError
from ...inputs.input_cases import EXTREME
from ...runtimes import RunResult
from ...runtimes.onnx_float64 import OnnxFloat64Runner
from ...storage.onnx_files import load_onnx
from .case_answers import CaseAnswer
from .runtime_candidates import RuntimeCandidate

_FLOAT16 = "fp16"


class HalfOverflows:
    """Runs half files in float64, each opened once, and adds one note for each file that overflows to ``notes``."""

    def __init__(self, notes: list[str]) -> None:
        self._files: dict[Path, OnnxFloat64Runner] = {}
        self._notes = notes
        self._noted: set[str] = set()

    def result_without_overflow(
        self,
        candidate: RuntimeCandidate,
        answer: CaseAnswer,
        result: RunResult,
    ) -> RunResult:
        """Return the result, with the file's in float64 in the place of outputs that an overflow inside loses."""
        subject = candidate.subject
        case = answer.case
        reference = answer.reference
        if case.kind != EXTREME or subject is None or subject.runtime or _FLOAT16 not in subject.computing.halves:
            return result
        floats = [n for n, v in result.items() if v.dtype.kind == "f" and v.shape == reference[n].shape]
        lost = [name for name in floats if has_lost_all_digits(result[name], reference[name])]
        if not lost:
            return result
        if subject.path not in self._files:
            self._files[subject.path] = OnnxFloat64Runner(load_onnx(subject.path))
        theirs = {ours: name for name, ours in subject.inputs.items()}
        given = {
            theirs.get(n, n): v.astype(subject.types.get(theirs.get(n, n), v.dtype)) for n, v in answer.feeds.items()
        }
        try:
            wide, beyond = self._files[subject.path].run_and_find_overflow(given)
        except NormdeployError:
            return result
        if not beyond:
            return result
        name, largest = next(iter(beyond.items()))
        if candidate.file_label not in self._noted:
            self._noted.add(candidate.file_label)
            self._notes.append(
                f"{candidate.file_label} is not fit for inputs as large as {case.name!r}: {name!r} reaches "
                f"{largest:.3g},"
                f" beyond float16's {np.finfo(np.float16).max:.0f}, and {', '.join(lost)} keeps no digit; what the file"
                " computes was judged in float64 there"
            )
        named = {subject.outputs.get(name, name): value for name, value in wide.items()}
        with np.errstate(over="ignore"):
            return {n: named[n].astype(v.dtype) if n in lost and n in named else v for n, v in result.items()}
