"""Runtimes beside eager and the float64 reference, case after case, and the verdict on each (the rule: ``normdeploy.parity.compare``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import ml_dtypes
import numpy as np
import torch

from ..errors import InputError
from ..model import Model
from ..runtimes import RunResult
from ..runtimes.eager import HALVES, EagerRunner, Float64Runner, HalfRunner
from .candidates import Candidate
from .cases import Case
from .parity import Tally, Ties

COLUMNS = ("output", "runtime", "max abs error", "max rel error", "allowed", "verdict", "worst case")


@dataclass(frozen=True)
class OutputResult:
    """One output in one runtime; true where it passes.

    ``max_abs_error`` and ``allowed`` are of the kind of cases in which it came nearest to failing, ``case`` the worst of these;
    ``max_rel_error`` is relative to each element, and informs only. ``near_ties`` counts integers that differ on a rounding.
    ``file`` is "" of eager; ``precision`` is "fp16" or "bf16" where it was judged by eager in that, else "". ``culprit`` names
    onnxruntime's optimizers without which the file passes.
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
    file: str = ""
    precision: str = ""
    culprit: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    def row(self) -> tuple[str, ...]:
        """The cells under COLUMNS."""
        said = self.reason or (f"{self.near_ties} near-ties" if self.near_ties else "")
        numbers = (f"{self.max_abs_error:.2e}", f"{self.max_rel_error:.2e}", f"{self.allowed:.2e}")
        return (self.output, self.runtime, *numbers, f"{self.verdict}: {said}" if said else self.verdict, self.case)


class Reference:
    """The model in float64: made when asked for, and given up when not needed for a while."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @cached_property
    def runner(self) -> Float64Runner:
        return Float64Runner(self._model)

    def free(self) -> None:
        self.__dict__.pop("runner", None)


@dataclass(frozen=True)
class Answer:
    """What the reference says of one case, and what else an integer of it may be."""

    case: Case
    feeds: dict[str, np.ndarray]
    reference: RunResult
    ties: Ties


class Trial:
    """Eager in one precision, what float64 says, and the runtimes that are judged by them.

    ``precision``: "" is the model's own. In half precision inputs are rounded to it, for the reference too.
    """

    def __init__(self, model: Model, reference: Reference, precision: str) -> None:
        self.model, self.precision, self.notes = model, precision, list[str]()
        self.answers: list[Answer] = []
        self.candidates: list[Candidate] = []
        self._reference = reference
        half = HALVES.get(precision)
        make = partial(EagerRunner, model) if half is None else partial(HalfRunner, model, half)
        self.eager = Candidate(EagerRunner.name, make)
        self._half = None if half is None else np.dtype(ml_dtypes.bfloat16 if half == torch.bfloat16 else np.float16)
        self._unit = 4 * (unit_roundoff(model) if half is None else torch.finfo(half).eps / 2)

    def prepare(self, cases: Sequence[Case]) -> Iterator[None]:
        """Run eager and the reference on every case, yielding before each."""
        with self.eager.make() as self.eager.runner:
            for case in cases:
                yield
                self._answer(case)
        self.eager.runner = None

    def _answer(self, case: Case) -> None:
        feeds = case.make()
        if self._half is not None:
            half = self._half
            feeds = {n: v.astype(half).astype(v.dtype) if v.dtype in (np.float32, np.float64) else v for n, v in feeds.items()}
        assert self.eager.runner is not None
        try:
            eager = self.eager.runner.infer(feeds)
        except InputError as error:
            if case.promised:
                raise InputError(f"{case.name}: {error}") from error
            self.notes.append(f"not run at {case.name}: {error}")
            return
        reference = self._reference.runner.infer(feeds)
        integers = {name: value for name, value in eager.items() if value.dtype.kind in "iub"}
        ties = Ties(lambda seed: self._reference.runner.perturbed(feeds, self._unit, seed), reference, integers)
        self.answers.append(Answer(case, feeds, reference, ties))
        for name, value in eager.items():
            self.eager.tallies.setdefault((name, case.kind), Tally(value.dtype))
        self._keep(self.eager, self.answers[-1], eager)

    def _dtype(self, output: str) -> np.dtype:
        return next(tally.dtype for (name, _), tally in self.eager.tallies.items() if name == output)

    def take(self, candidate: Candidate) -> None:
        """Run a loaded candidate on every case, and keep it to be judged."""
        self.candidates.append(candidate)
        self._run(candidate)
        if candidate.skipped and not candidate.tallies:
            candidate.unavailable = "every case lies outside the engine's profile; build it for the sizes that the model takes"
        candidate.runner = None

    def passes(self, fresh: Candidate, outputs: Collection[str], names: Sequence[str] = ()) -> bool:
        """Whether a candidate that is not loaded yet is right in ``outputs``, on every case or on those called ``names``."""
        with ExitStack() as stack:
            fresh.load(stack)
            self._run(fresh, names)
        mine = [(key, tally) for key, tally in fresh.tallies.items() if key[0] in outputs]
        sound = bool(mine) and not fresh.failure and not fresh.unavailable
        return sound and all(_badness(tally, self.eager.tallies[key]) <= 1 for key, tally in mine)

    def _run(self, candidate: Candidate, names: Sequence[str] = ()) -> None:
        for answer in self.answers:
            result = candidate.infer(answer.case, answer.feeds) if not names or answer.case.name in names else None
            if result is not None:
                self._keep(candidate, answer, {name: self._narrow(name, value) for name, value in result.items()})

    def _narrow(self, output: str, value: np.ndarray) -> np.ndarray:
        """Inputs and outputs of a half-precision file may have been kept in float32."""
        if self._half is None or output not in self.model.outputs or self._dtype(output) != self._half:
            return value
        return value.astype(self._half)

    def _keep(self, candidate: Candidate, answer: Answer, result: RunResult) -> None:
        for output in self.model.outputs:
            tally = candidate.tallies.setdefault((output, answer.case.kind), Tally(self._dtype(output)))
            tally.add(answer.case.name, result.get(output), answer.reference[output], partial(answer.ties.explained, output))

    def results(self, candidate: Candidate) -> list[OutputResult]:
        """One for each output, none where it was not run."""
        return [result for output in self.model.outputs for result in self._result(candidate, output)]

    def _result(self, candidate: Candidate, output: str) -> Iterator[OutputResult]:
        eager = {kind: tally for (name, kind), tally in self.eager.tallies.items() if name == output}
        mine = {kind: tally for (name, kind), tally in candidate.tallies.items() if name == output}
        if candidate.failure:
            dtype = str(self._dtype(output))
            found = OutputResult(output, candidate.name, dtype, 0.0, 0.0, 0.0, "fail", candidate.where, reason=candidate.failure)
        elif mine and not candidate.unavailable:
            found = judged(output, candidate.name, mine, eager)
        else:
            return
        if not found and candidate.advice:
            reason = f"{found.reason}; {candidate.advice}" if found.reason else candidate.advice
            found = replace(found, reason=reason, culprit=candidate.culprit)
        yield replace(found, file=candidate.file, precision=self.precision)


def _badness(tally: Tally, eager: Tally) -> float:
    """Above 1 it fails."""
    allowed = tally.allowed(eager)
    if tally.broken or not allowed:
        return np.inf if tally.broken or tally.absolute else 0.0
    return tally.absolute / allowed


def judged(output: str, runtime: str, mine: Mapping[str, Tally], eager: Mapping[str, Tally]) -> OutputResult:
    """The verdict on the tallies of one output by kind of case: the kind that comes nearest to failing, or fails most, speaks for it."""
    kind = max(mine, key=lambda kind: _badness(mine[kind], eager[kind]))
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
        "fail" if _badness(tally, eager[kind]) > 1 else "pass",
        tally.case,
        sum(t.ties for t in mine.values()),
        reason,
    )


def unit_roundoff(model: Model) -> float:
    """The unit roundoff of the coarsest floating type in the model's graph; 0 where it has none."""
    values = [node.meta.get("val") for node in model.program.graph.nodes]
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    return max((torch.finfo(dtype).eps / 2 for dtype in dtypes), default=0.0)
