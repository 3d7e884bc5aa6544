"""Does what was made of a model give what the model gives? Every runtime's error against float64, next to eager's own.

The rule, for each floating output, over all cases of one kind (random at several seeds and sizes; small; zeros):

    error ≤ 4 · (eager's own error) + 4 ulp(max |reference|)

Errors are against the model run in float64. Eager's error is what one correct evaluation in the model's type costs; another evaluation
sums in another order and fuses other operators, so its error is another draw of the same size, not the same number. The 4 is the room
between two such draws (in 560 exports of the project's own models, in float32 and float16, onnxruntime's error was at most 0.41 of
what is allowed), the 4 ulp are for outputs that eager happens to get exactly. There is no tolerance besides. NaN and infinities must
stand where the reference has them once it is rounded to the output's type. A file in half precision (``--precision``) is compared with
eager run in half, both on inputs that are half numbers.

Integers and bools must be equal, except where the answer hangs on a rounding: they may also be what eager answers, or what the
reference itself answers when every parameter and input is off by up to 4 units of the model's type. These are counted and reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
import torch

from .build import Engine
from .candidates import OFF, ON, Candidate, NotRun, candidates_for
from .cases import Case, generated, given
from .errors import InputError
from .files import load_onnx
from .model import Model
from .parity import EAGER_MULTIPLE, ULPS, Tally, Ties
from .precision import asked
from .runtimes import RunResult
from .runtimes.eager import HALVES, EagerRunner, Float64Runner, HalfRunner

Progress = Callable[[str, int, int], None]
Inputs = Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]]

COLUMNS = ("output", "runtime", "max abs error", "max rel error", "allowed", "verdict", "worst case")


@dataclass(frozen=True)
class OutputResult:
    """One output in one runtime; true where it passes.

    ``max_abs_error`` and ``allowed`` are of the kind of cases in which it came nearest to failing, ``case`` the worst of these;
    ``max_rel_error`` is relative to each element, and informs only. ``near_ties`` counts integers that differ on a rounding.
    """

    output: str
    runtime: str
    dtype: str
    max_abs_error: float
    max_rel_error: float
    allowed: float
    verdict: Literal["pass", "fail"]
    case: str
    near_ties: int = 0
    reason: str = ""

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    def row(self) -> tuple[str, ...]:
        """The cells under COLUMNS."""
        said = self.reason or (f"{self.near_ties} near-ties" if self.near_ties else "")
        numbers = (f"{self.max_abs_error:.2e}", f"{self.max_rel_error:.2e}", f"{self.allowed:.2e}")
        return (self.output, self.runtime, *numbers, f"{self.verdict}: {said}" if said else self.verdict, self.case)


@dataclass(frozen=True)
class Comparison:
    """What ``verify`` found."""

    results: tuple[OutputResult, ...]
    not_run: tuple[NotRun, ...]
    cases: tuple[str, ...]  # that were run
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Something besides eager was run, and all of it passes. Where eager itself fails, the model leaves its type's range: its row
        and a note say so, but what was made of the model may be right all the same."""
        made = [r for r in self.results if r.runtime != EagerRunner.name]
        return bool(made) and all(made)

    def __bool__(self) -> bool:
        return self.ok

    def table(self) -> list[tuple[str, ...]]:
        """One row for each output and runtime, under COLUMNS; runtimes that were not run last."""
        rows = [result.row() for result in self.results]
        return rows + [("", missed.runtime, "", "", "", f"not run: {missed.reason}", "") for missed in self.not_run]

    def to_json(self) -> dict[str, Any]:
        """The same as values of JSON."""
        rule = {"eager_multiple": EAGER_MULTIPLE, "ulps": ULPS, "reference": Float64Runner.name}
        return {"ok": self.ok, "rule": rule, **asdict(self)}


def verify(
    model: Model,
    onnx_path: str | os.PathLike[str],
    *,
    engines: Sequence[Engine | str | os.PathLike[str]] = (),
    seeds: int = 3,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare what the runtimes make of ``onnx_path`` and of ``engines`` with ``model`` in float64.

    Run are: eager in the model's own type, onnxruntime with its optimizer off and on, on the CPU and on CUDA where that works, and
    each engine where a GPU is present. What is not run is listed with the reason.

    Args:
        seeds: random inputs at the opt sizes, besides those at other sizes, small ones and zeros.
        inputs: the user's own, one mapping or several; only these are run then.
        progress: called with (stage, done, total).

    Raises:
        GraphError: the ONNX file is broken.
        InputError: the file has other inputs than the model, the model does not run on an input that it was said to take, or an
            engine file is none.
        NormdeployError: an operator of the model does not run in float64.
    """
    start = time.perf_counter()
    proto = load_onnx(onnx_path, external_data=False)
    notes = _check_file(model, proto.graph, Path(onnx_path).name)
    half = HALVES.get(asked(proto))
    if half is not None:
        notes.append(f"the file is in half precision: eager was run in {str(half).removeprefix('torch.')} too, on inputs rounded to it")
    if inputs is not None:
        cases = given([inputs] if isinstance(inputs, Mapping) else inputs)
    else:
        cases, left_out = generated(model, seeds)
        notes += left_out
    if not cases:
        raise InputError("there is nothing to compare on; give at least one seed or input")
    with ExitStack() as stack:
        candidates, not_run = candidates_for(Path(onnx_path), engines, None if half is None else _types(proto.graph))
        for candidate in candidates:
            candidate.load(stack)
        trial = _Trial(model, candidates, notes, half)
        for done, case in enumerate(cases):
            if progress is not None:
                progress("verify", done, len(cases))
            trial.run(case)
    results = _with_culprit(trial.results())
    not_run += [NotRun(c.name, c.unavailable) for c in candidates if c.unavailable]
    notes += [
        f"the model itself leaves the range of {r.dtype}, {r.case}: {r.output} is {r.reason}"
        for r in results
        if r.runtime == "eager" and not r
    ]
    if all(r.runtime == "eager" for r in results):
        notes.append("no runtime could be run on the file: nothing is shown about it")
    return Comparison(tuple(results), tuple(not_run), tuple(trial.done), tuple(notes), time.perf_counter() - start)


def _types(graph: onnx.GraphProto) -> dict[str, np.dtype]:
    """The types of the file's inputs."""
    return {v.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)) for v in graph.input}


def _check_file(model: Model, graph: onnx.GraphProto, file: str) -> list[str]:
    """Notes on the file; raises where it can't be one of this model."""
    initializers = {t.name for t in graph.initializer}
    found, wanted = [v.name for v in graph.input if v.name not in initializers], [spec.name for spec in model.inputs]
    if set(found) != set(wanted):
        raise InputError(f"{file} takes the inputs {found}, the model takes {wanted}; is it a file of this model?")
    extra = [v.name for v in graph.output if v.name not in model.outputs]
    return [f"{file} has outputs that the model has not, which nothing can be compared with: {extra}"] if extra else []


# ------------------------------------------------------------------ the trial


class _Trial:
    """Runs case after case, the reference and eager first, and keeps the tallies.

    ``half``: the type of a file in half precision. Inputs are rounded to it, for the reference too.
    """

    def __init__(self, model: Model, candidates: Sequence[Candidate], notes: list[str], half: torch.dtype | None) -> None:
        self._model, self._candidates, self._notes = model, candidates, notes
        self._reference = Float64Runner(model)
        make = partial(EagerRunner, model) if half is None else partial(HalfRunner, model, half)
        self._eager = Candidate(EagerRunner.name, make, make())
        self._half = None if half is None else np.dtype(ml_dtypes.bfloat16 if half == torch.bfloat16 else np.float16)
        self._unit = 4 * (_unit(model) if half is None else torch.finfo(half).eps / 2)
        self.done: list[str] = []

    def run(self, case: Case) -> None:
        feeds = case.make()
        if self._half is not None:
            half = self._half
            feeds = {n: v.astype(half).astype(v.dtype) if v.dtype in (np.float32, np.float64) else v for n, v in feeds.items()}
        assert self._eager.runner is not None
        try:
            eager = self._eager.runner.infer(feeds)
        except InputError as error:
            if case.promised:
                raise InputError(f"{case.name}: {error}") from error
            self._notes.append(f"not run at {case.name}: {error}")
            return
        reference = self._reference.infer(feeds)
        ties = Ties(lambda seed: self._reference.perturbed(feeds, self._unit, seed), reference, eager)
        self._take(self._eager, case, eager, eager, reference, ties)
        for candidate in self._candidates:
            result = candidate.infer(case, feeds)
            if result is not None and self._half is not None:  # inputs and outputs may have been kept in float32
                result = {n: v.astype(eager[n].dtype) if n in eager and eager[n].dtype == self._half else v for n, v in result.items()}
            if result is not None:
                self._take(candidate, case, result, eager, reference, ties)
        self.done.append(case.name)

    def _take(self, candidate: Candidate, case: Case, result: RunResult, eager: RunResult, reference: RunResult, ties: Ties) -> None:
        for output in self._model.outputs:
            tally = candidate.tallies.setdefault((output, case.kind), Tally(eager[output].dtype))
            tally.add(case.name, result.get(output), reference[output], partial(ties.explained, output))

    def results(self) -> list[OutputResult]:
        """One for each output and runtime that was run."""
        results = []
        for output in self._model.outputs:
            eager = {kind: tally for (name, kind), tally in self._eager.tallies.items() if name == output}
            for candidate in (self._eager, *self._candidates):
                mine = {kind: tally for (name, kind), tally in candidate.tallies.items() if name == output}
                if candidate.failure:
                    dtype = str(next(iter(eager.values())).dtype)
                    results.append(
                        OutputResult(output, candidate.name, dtype, 0.0, 0.0, 0.0, "fail", candidate.where, reason=candidate.failure)
                    )
                elif mine and not candidate.unavailable:
                    results.append(_judged(output, candidate.name, mine, eager))
        for candidate in self._candidates:
            if candidate.skipped and candidate.tallies:
                self._notes.append(
                    f"{candidate.name}: {candidate.skipped} of {len(self.done)} cases lie outside the engine's profile and were not run"
                )
            elif candidate.skipped:
                candidate.unavailable = "every case lies outside the engine's profile; build it for the sizes that the model takes"
        return results


def _judged(output: str, runtime: str, mine: Mapping[str, Tally], eager: Mapping[str, Tally]) -> OutputResult:
    """The kind of cases that comes nearest to failing, or fails most, speaks for the output."""

    def badness(kind: str) -> float:
        allowed = mine[kind].allowed(eager[kind])
        return np.inf if mine[kind].broken else mine[kind].absolute / allowed if allowed else 0.0

    kind = max(mine, key=badness)
    tally = mine[kind]
    reason = tally.broken
    if reason and runtime != EagerRunner.name and eager[kind].broken:
        reason += f"; eager fails here too ({eager[kind].broken}): the model itself leaves the range of {tally.dtype}"
    return OutputResult(
        output,
        runtime,
        str(tally.dtype),
        tally.absolute,
        max(t.relative for t in mine.values()),
        tally.allowed(eager[kind]),
        "fail" if badness(kind) > 1 else "pass",
        tally.case,
        sum(t.ties for t in mine.values()),
        reason,
    )


def _with_culprit(results: Sequence[OutputResult]) -> list[OutputResult]:
    """Where the same file is right with onnxruntime's optimizer off, the optimizer is what broke it."""
    right = {r.output for r in results if r.runtime == OFF and r}
    blame = "onnxruntime's optimizer is the culprit: with it off the same file passes"
    return [
        replace(r, reason=f"{r.reason}; {blame}" if r.reason else blame) if r.runtime == ON and not r and r.output in right else r
        for r in results
    ]


def _unit(model: Model) -> float:
    """The unit roundoff of the coarsest floating type in the model's graph; 0 where it has none."""
    values = [node.meta.get("val") for node in model.program.graph.nodes]
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)
