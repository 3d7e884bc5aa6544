"""A file's answers on the judged samples, and files' times against each other, in the same onnxruntime."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort

from normdeploy.verbs.bench.timing import Timing, race_calls

from .subjects import Feeds, Subject, batched

SESSIONS = 3  # of each file: two sessions of one file differ by up to 4 % for as long as they live
STUDENT = 2.776  # 97.5 % of Student's t for 2 * SESSIONS - 2 degrees of freedom
BATCHES = (1, 8)
Ratio = tuple[float, float, float]  # and its 95 % interval


def session(path: Path, *, optimized: bool = True) -> ort.InferenceSession:
    """One thread, everything else as users have it; without onnxruntime's optimizer where ``optimized`` is False."""
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measured(subject: Subject, path: Path, reference: np.ndarray) -> dict[str, float]:
    """The subject's measures of a file, on all judged samples.

    Where onnxruntime's optimizer makes of it what it can't load (FP8: MatMulIntegerToFloat, Clip), without optimizer.
    """
    try:
        made = session(path)
    except Exception:  # of ONNX Runtime's making, or the file's own: then it is raised again
        made = session(path, optimized=False)
    answers = batched(lambda feeds: made.run(None, feeds)[0], subject.judged_inputs())
    return subject.measures(answers, reference, subject.judged)


def loads(path: Path) -> bool:
    """Whether onnxruntime loads a file as users have it, with its optimizer."""
    try:
        session(path)
    except Exception:  # whatever its optimizer makes of the file
        return False
    return True


def speeds(
    subject: Subject, files: Mapping[str, Path], rounds: int
) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Of each file and batch: how many times as fast as the first file, with a 95 % interval, on judged samples; files
    that do not load are left out.

    Processor time of one thread; all sessions of all files in turns in random order. A session's ratio is the median
    over the rounds of its time over the mean of the first file's sessions in the same round.
    """
    files = {name: path for name, path in files.items() if loads(path)}
    sessions = [session(path) for path in files.values() for _ in range(SESSIONS)]
    told: dict[str, dict[int, Ratio]] = {name: {} for name in files}
    for batch in BATCHES:
        feeds = _first(subject.judged_inputs(), batch)
        timing = race_calls(
            [partial(made.run, None, feeds) for made in sessions],
            rounds=rounds,
            clock=time.process_time,
            most_warmup=4,
        )
        for i, name in enumerate(files):
            told[name][batch] = _faster(timing, i)
    return told


def _first(feeds: Feeds, count: int) -> Feeds:
    return {name: np.ascontiguousarray(array[:count]) for name, array in feeds.items()}


def _faster(timing: Timing, file: int) -> Ratio:
    """The first file's time over that of another, and the 95 % interval (Student's t for two groups of sessions)."""
    turns = np.array(timing.turns).reshape(-1, SESSIONS, len(timing.turns[0]))
    of_sessions = np.median(turns / turns[0].mean(0), axis=2)
    own, first = of_sessions[[file, 0]] / of_sessions[0].mean()
    middle, error = own.mean(), STUDENT * math.sqrt((own.var(ddof=1) + first.var(ddof=1)) / SESSIONS)
    return float(1 / middle), float(1 / (middle + error)), float(1 / max(middle - error, 1e-9))
