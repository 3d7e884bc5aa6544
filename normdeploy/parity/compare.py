"""Does what was made of a model give what the model gives? Every runtime's error against float64, next to eager's own.

The rule, for each floating output, over all cases of one kind (random at several seeds and sizes; small; zeros):

    error ≤ 4 · (eager's own error) + 4 ulp(max |reference|)

Errors are against the model run in float64. Eager's error is what one correct evaluation in the model's type costs; another evaluation
sums in another order and fuses other operators, so its error is another draw of the same size, not the same number. The 4 is the room
between two such draws (in 560 exports of the project's own models, in float32 and float16, onnxruntime's error was at most 0.41 of
what is allowed), the 4 ulp are for outputs that eager happens to get exactly. There is no tolerance besides. NaN and infinities must
stand where the reference has them once it is rounded to the output's type. A file in half precision (``--precision``) is compared with
eager run in half, both on inputs that are half numbers. Files of several precisions may be compared at once, each by its own eager.

Integers and bools must be equal, except where the answer hangs on a rounding: they may also be what eager answers, or what the
reference itself answers when every parameter and input is off by up to 4 units of the model's type. These are counted and reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..engines.build import Engine
from ..errors import InputError
from ..model import Model
from ..runtimes.eager import EagerRunner, Float64Runner
from ..storage.files import load_onnx
from ..storage.record import recorded
from .candidates import FLOATS, Candidate, File, NotRun, Subject, candidates_of, subjects
from .cases import Case, Inputs, generated, given_to, read
from .culprit import accuse
from .drift import Point
from .drift_files import drift_of_file
from .judging import COLUMNS, OutputResult, Reference, Trial
from .parity import EAGER_MULTIPLE, ULPS

__all__ = ["COLUMNS", "Comparison", "Inputs", "NotRun", "OutputResult", "verify"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """What ``verify`` found. ``drift``: in the files' order, one runtime after the other; None where it was not asked for."""

    results: tuple[OutputResult, ...]
    not_run: tuple[NotRun, ...]
    cases: tuple[str, ...]  # that were run
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    drift: tuple[Point, ...] | None = None

    @property
    def ok(self) -> bool:
        """Something besides eager was run, every ONNX file in some runtime, and all of it passes; engines are not run without a GPU. Where
        eager itself fails, the model leaves its type's range: its row and a note say so, but what was made of it may be right."""
        made = [r for r in self.results if r.runtime != EagerRunner.name]
        ran = {r.file for r in made} | {""}
        return bool(made) and all(made) and all(m.file in ran for m in self.not_run if m.runtime.startswith("onnxruntime"))

    def __bool__(self) -> bool:
        return self.ok

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of ``table``; where there are several files, each row names its own."""
        return ("file", *COLUMNS) if self._several else COLUMNS

    @property
    def _several(self) -> bool:
        return len(({r.file for r in self.results} | {m.file for m in self.not_run}) - {""}) > 1

    def rows(self) -> list[tuple[str, ...]]:
        """One row for each output and runtime, under ``columns``."""
        if not self._several:
            return [r.row() for r in self.results]
        return [(r.file or (f"(in {FLOATS[r.precision]})" if r.precision else ""), *r.row()) for r in self.results]

    def table(self) -> list[tuple[str, ...]]:
        """``rows``, and the runtimes that were not run last."""
        missed = [(m.file, "", m.runtime, "", "", "", f"not run: {m.reason}", "") for m in self.not_run]
        return self.rows() + (missed if self._several else [row[1:] for row in missed])

    def to_json(self) -> dict[str, Any]:
        """The same as values of JSON."""
        rule = {"eager_multiple": EAGER_MULTIPLE, "ulps": ULPS, "reference": Float64Runner.name}
        return {"ok": self.ok, "rule": rule, **asdict(self)}


def verify(
    model: Model,
    files: File | Iterable[File],
    *,
    engines: Iterable[File] = (),
    seeds: int = 3,
    inputs: Inputs | None = None,
    drift: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare what the runtimes make of ``files`` with ``model`` in float64.

    Run are: eager in the model's own type (and in half precision where a file is), onnxruntime with its optimizer off and on, on the CPU
    and on CUDA where that works, and each engine where a GPU is present. What is not run is listed with the reason. Where only
    onnxruntime's optimizer breaks a file, the optimizers to blame are searched for and named.

    Args:
        files: ONNX files and engines, told apart by their content.
        engines: more of them.
        seeds: random inputs at the opt sizes, besides those at other sizes, small ones and zeros.
        inputs: the user's own, name -> array or an .npz file, one or several; only these are run then.
        drift: look into the ONNX files too: the error of every tensor that a file and the model share.
        progress: called with (stage, done, total).

    Raises:
        GraphError: an ONNX file is broken.
        InputError: a file is missing or has other inputs than the model, an input does not fit the model, or it does not run on it.
        NormdeployError: an operator of the model does not run in float64.
    """
    start = time.perf_counter()
    tell = progress or (lambda stage, done, total: None)
    own = None if inputs is None else read(inputs)
    found, notes = subjects([*([files] if isinstance(files, Engine | str | os.PathLike) else files), *engines], model)
    cases, left_out = generated(model, seeds) if own is None else (given_to(model, own, _halves(found)), [])
    if not cases:
        raise InputError("there is nothing to compare on; give at least one seed or input")
    candidates, not_run = candidates_of(found)
    trials = _tried(model, candidates, _usual(found), cases, tell)
    results = _ordered(model, trials, candidates)
    not_run += [NotRun(c.name, c.unavailable, c.file) for c in candidates if c.unavailable]
    notes += left_out + _remarks(trials, candidates, results) + _other_forms(found, results)
    points = None
    if drift:
        points, more = _drifts(model, found, trials, results, tell)
        notes += more
    done = dict.fromkeys(answer.case.name for trial in trials.values() for answer in trial.answers)
    seconds = time.perf_counter() - start
    return Comparison(tuple(results), tuple(not_run), tuple(done), tuple(notes), seconds, None if points is None else tuple(points))


def _halves(found: Sequence[Subject]) -> dict[str, set[np.dtype]]:
    """Input -> the half types in which a file takes it."""
    kinds: dict[str, set[np.dtype]] = {}
    for name, kind in (pair for subject in found for pair in subject.types.items()):
        if kind.name in FLOATS.values():
            kinds.setdefault(name, set()).add(kind)
    return kinds


def _usual(found: Sequence[Subject]) -> str:
    """The precision of an engine of which nothing else tells it: that of the ONNX files, where they agree."""
    kinds = {s.precision for s in found if not s.runtime}
    return kinds.pop() if len(kinds) == 1 else ""


def _tried(model: Model, candidates: Sequence[Candidate], usual: str, cases: Sequence[Case], tell: Progress) -> dict[str, Trial]:
    """Precision -> its trial. Of the reference and the runtimes one at a time is in memory: each may be as large as the model."""
    reference = Reference(model)
    trials: dict[str, Trial] = {}

    def trial_in(precision: str) -> Trial:
        if precision not in trials:
            trials[precision] = Trial(model, reference, precision)
            for done, _ in enumerate(trials[precision].prepare(cases)):
                tell("reference", done, len(cases))
            reference.free()
        return trials[precision]

    for precision in dict.fromkeys(c.precision(usual) for c in candidates) or [usual]:
        trial_in(precision)
    for done, candidate in enumerate(candidates):
        tell("verify", done, len(candidates))
        with ExitStack() as stack:
            candidate.load(stack)
            trial = trial_in(candidate.precision(usual))
            trial.take(candidate)
    for trial in trials.values():
        accuse(trial, tell)
    return trials


def _ordered(model: Model, trials: Mapping[str, Trial], candidates: Sequence[Candidate]) -> list[OutputResult]:
    """Output by output: eager first, then the files as they were given."""
    eager = [result for _, trial in sorted(trials.items()) for result in trial.results(trial.eager)]
    of = {id(candidate): trial for trial in trials.values() for candidate in trial.candidates}
    every = eager + [result for candidate in candidates for result in of[id(candidate)].results(candidate)]
    return [result for output in model.outputs for result in every if result.output == output]


def _remarks(trials: Mapping[str, Trial], candidates: Sequence[Candidate], results: Sequence[OutputResult]) -> list[str]:
    notes = []
    for precision, trial in trials.items():
        if precision and trial.candidates:
            files = ", ".join(dict.fromkeys(c.file for c in trial.candidates))
            notes.append(f"{files}: in half precision; eager was run in {FLOATS[precision]} too, on inputs rounded to it")
        notes += trial.notes
        for candidate in trial.candidates:
            if candidate.skipped and candidate.ran:
                of = f"{candidate.skipped} of {len(trial.answers)} cases"
                notes.append(f"{candidate.name}: {of} lie outside the engine's profile and were not run")
    notes += [
        f"the model itself leaves the range of {r.dtype}, {r.case}: {r.output} is {r.reason}"
        for r in results
        if r.runtime == EagerRunner.name and not r
    ]
    for names in dict.fromkeys(c.culprit for c in candidates if c.culprit):
        setting = f'add_session_config_entry("optimization.disable_specified_optimizers", "{";".join(names)}")'
        notes.append(f"to run it in onnxruntime without {', '.join(names)}: SessionOptions.{setting}")
    made = {r.file for r in results if r.runtime != EagerRunner.name}
    for file in dict.fromkeys(c.file for c in candidates if c.file not in made):
        notes.append(f"no runtime could be run on {file}: nothing is shown about it")
    return notes


def _other_forms(found: Sequence[Subject], results: Sequence[OutputResult]) -> list[str]:
    """Of a file that failed in onnxruntime and was exported for its speed: that there are forms of its norms with smaller errors."""
    failed = {r.file for r in results if r.runtime.startswith("onnxruntime") and not r}
    return [
        f"{s.label} has the fastest forms of its norms (--runtime onnxruntime); --runtime onnxruntime-accurate writes those with the "
        "smallest errors"
        for s in found
        if s.label in failed and recorded(load_onnx(s.path, external_data=False)).get("export", {}).get("runtime") == "onnxruntime"
    ]


def _drifts(
    model: Model, found: Sequence[Subject], trials: Mapping[str, Trial], results: Sequence[OutputResult], tell: Progress
) -> tuple[list[Point], list[str]]:
    """The inner tensors of each ONNX file, on the case in which it fails, else on the first."""
    points, notes = list[Point](), list[str]()
    for subject in found:
        if subject.runtime:
            notes.append(f"no drift of {subject.label}: an engine can't be looked into")
            continue
        failed = [r.case for r in results if r.file == subject.label and not r]
        answers = trials[subject.precision].answers
        answer = next((a for a in answers if a.case.name in failed), answers[0])
        seen, more = drift_of_file(model, subject.path, answer.feeds, subject.precision, subject.label, tell)
        points += seen
        notes += [f"drift of {subject.label}: seen at {answer.case.name}", *more]
    return points, notes
