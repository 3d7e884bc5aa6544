"""Judge a file's outputs on the samples, and race files against each other, in the same onnxruntime."""

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

# Number of sessions per file. The times of two sessions of one file differ by up to 4 %, for as long as the sessions
# exist.
SESSIONS = 3
# 97.5 % of Student's t for 2 * SESSIONS - 2 degrees of freedom.
STUDENT = 2.776
BATCHES = (1, 8)
# A ratio with its 95 % interval
Ratio = tuple[float, float, float]


def session(path: Path, *, optimized: bool = True) -> ort.InferenceSession:
    """Open a session with one thread and otherwise default settings; ``optimized`` false turns onnxruntime's optimizer
    off.

    Returns:
        the session.
    """
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measured(subject: Subject, path: Path, reference: np.ndarray) -> dict[str, float]:
    """Compute the subject's measures of a file on all judged samples.

    If onnxruntime's optimizer writes something that it can't load (FP8: MatMulIntegerToFloat, Clip), the file runs
    without the optimizer.

    Returns:
        name -> number.
    """
    try:
        made = session(path)
    # The fault may be the optimizer's or the file's; in the second case the next call raises again.
    except Exception:
        made = session(path, optimized=False)
    answers = batched(lambda feeds: made.run(None, feeds)[0], subject.judged_inputs())
    return subject.measures(answers, reference, subject.judged)


def loads(path: Path) -> bool:
    """Check if onnxruntime loads a file with its optimizer, as users have it.

    Returns:
        true if it does.
    """
    try:
        session(path)
    # Whatever the optimizer raises.
    except Exception:
        return False
    return True


def speeds(
    subject: Subject, files: Mapping[str, Path], rounds: int
) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Measure the speed of each file relative to the first file, on judged samples; files that do not load are left
    out.

    Times are processor time of one thread; all sessions of all files run in turns in random order. A session's ratio is
    the median over the rounds of its time over the mean of the first file's sessions in the same round.

    Returns:
        file -> batch -> speedup with a 95 % interval.
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
    """Return the first file's time over another's, and the 95 % interval (Student's t for two groups of sessions)."""
    turns = np.array(timing.turns).reshape(-1, SESSIONS, len(timing.turns[0]))
    of_sessions = np.median(turns / turns[0].mean(0), axis=2)
    own, first = of_sessions[[file, 0]] / of_sessions[0].mean()
    middle, error = own.mean(), STUDENT * math.sqrt((own.var(ddof=1) + first.var(ddof=1)) / SESSIONS)
    return float(1 / middle), float(1 / (middle + error)), float(1 / max(middle - error, 1e-9))
