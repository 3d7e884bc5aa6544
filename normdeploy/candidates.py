"""The runtimes that a file is compared in, and what became of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from .build import Engine
from .cases import Case
from .errors import GraphError, InputError, RuntimeUnavailable
from .files import load_onnx
from .parity import Tally
from .runtimes import Runner, RunResult
from .runtimes.ort import OrtRunner, no_cuda
from .runtimes.trt import TITLES, TrtRunner, missing, runtime_of
from .stepwise import stepwise

OFF, ON = "onnxruntime (optimizer off)", "onnxruntime (optimizer on)"
STEPWISE = "each node in float32, rounded"  # a file in half precision as a GPU computes it; the CPU has few half kernels


@dataclass(frozen=True)
class NotRun:
    """A runtime that was not run, and why. It has not passed."""

    runtime: str
    reason: str


@dataclass
class Candidate:
    """A runtime under test, and what became of it."""

    name: str
    make: Callable[[], Runner]
    runner: Runner | None = None
    unavailable: str = ""  # why it can't be run here
    failure: str = ""  # why it does not run the model, which it should
    where: str = ""  # the case in which it failed
    skipped: int = 0  # cases outside an engine's profile
    types: Mapping[str, np.dtype] = field(default_factory=dict)  # of its inputs, where they differ from the model's
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # (output, kind of case)

    def load(self, stack: ExitStack) -> None:
        try:
            self.runner = stack.enter_context(self.make())
        except RuntimeUnavailable as error:
            self.unavailable = str(error)
        except GraphError as error:
            self.failure = str(error)

    def infer(self, case: Case, feeds: Mapping[str, np.ndarray]) -> RunResult | None:
        """None where it does not run (any more), or this case is none for it."""
        if self.runner is None:
            return None
        feeds = {name: value.astype(self.types.get(name, value.dtype), copy=False) for name, value in feeds.items()}
        if isinstance(self.runner, TrtRunner) and not self.runner.fits(feeds):
            self.skipped += 1
            return None
        try:
            return self.runner.infer(feeds)
        except RuntimeUnavailable as error:
            self.runner, self.unavailable = None, str(error)
        except InputError as error:
            self.runner, self.failure, self.where = None, str(error), case.name
        return None


def candidates_for(
    path: Path, engines: Sequence[Engine | str | os.PathLike[str]], types: Mapping[str, np.dtype] | None = None
) -> tuple[list[Candidate], list[NotRun]]:
    """
    Args:
        types: of the inputs of a file in half precision (`normdeploy.precision`).

    Raises:
        InputError: an engine file is missing, or none.
    """
    candidates = [
        Candidate(OFF, partial(OrtRunner, path, optimize=False)),
        Candidate(ON, partial(OrtRunner, path, optimize=True)),
    ]
    if types is not None:
        candidates.append(Candidate(STEPWISE, lambda: OrtRunner(stepwise(load_onnx(path)), optimize=False)))
    not_run = []
    if reason := no_cuda():
        not_run.append(NotRun("onnxruntime CUDA", reason))
    else:
        candidates.append(Candidate("onnxruntime CUDA (optimizer on)", partial(OrtRunner, path, provider="cuda")))
    if not engines:
        not_run.append(NotRun("TensorRT", "no engine was given"))
    for engine in engines:
        file = Path(engine.path if isinstance(engine, Engine) else engine)
        runtime = runtime_of(file)
        name = f"{TITLES[runtime]} ({file.name})"
        if reason := missing(runtime):
            not_run.append(NotRun(name, reason))
        else:
            candidates.append(Candidate(name, partial(TrtRunner, file)))
    for candidate in candidates:
        wide = candidate.name == STEPWISE
        candidate.types = {n: np.dtype(np.float32) if wide and t.kind in "fV" else t for n, t in (types or {}).items()}
    return candidates, not_run
