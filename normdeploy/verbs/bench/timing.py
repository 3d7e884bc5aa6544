"""Timing whose ratios hold on a busy machine: every contestant in every round, in random order, compared within the
round.

A round gives each contestant one turn: a call that is not counted (the others have had the caches since its last one),
then as many calls as fit into a few milliseconds. What slows the machine down for longer than a round slows all of
them, and a ratio is taken between the turns of one round, so that it cancels. The warm-up is made of such rounds too,
and ends when no contestant gets faster or slower.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ...types import Progress

Call = Callable[[], object]

# seconds
TURN = 0.005
# of a turn
MOST_CALLS = 1000
# rounds, share, rounds
WINDOW, DRIFT, MOST_WARMUP = 5, 0.05, 60
# samples that a report holds
KEPT = 400


@dataclass(frozen=True)
class Timing:
    """Times in seconds. ``calls[i]`` are those of contestant i in the order made, ``turns[i]`` its median call of each
    round.

    ``warmup``: rounds that are not in them; ``unsteady``: the contestants whose times still moved after the longest
    warm-up.
    """

    calls: tuple[tuple[float, ...], ...]
    turns: tuple[tuple[float, ...], ...]
    warmup: int
    unsteady: tuple[int, ...]

    def percentile(self, i: int, share: float) -> float:
        """Of contestant i's calls, in seconds; ``share`` from 0 to 100."""
        return float(np.percentile(self.calls[i], share))

    def sample_calls(self, i: int) -> tuple[float, ...]:
        """At most `KEPT` of contestant i's calls, evenly taken, in the order made; seconds."""
        calls = self.calls[i]
        if len(calls) > KEPT:
            return tuple(calls[n * len(calls) // KEPT] for n in range(KEPT))
        return calls

    def round_ratio(self, i: int, base: int = 0) -> tuple[float, float, float]:
        """Contestant i's time over that of ``base`` in the same round: the median over the rounds, and its 95 %
        interval."""
        ratios = [own / other for own, other in zip(self.turns[i], self.turns[base], strict=True)]
        return (statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, whatever the distribution: two of the values themselves.

    How many of n values lie below the median is binomial(n, 1/2); of fewer than six values even the outermost two hold
    it less often.
    Source: Conover, Practical Nonparametric Statistics, 3rd ed. 1999, section 3.2.
    """
    n = len(values)
    ordered = sorted(values)
    outside = 0.0
    below = 0
    while below < n // 2 and (outside := outside + math.comb(n, below) * 0.5**n) <= 0.025:
        below += 1
    low = max(0, below - 1)
    return ordered[low], ordered[n - 1 - low]


def race_calls(
    calls: Sequence[Call],
    *,
    rounds: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
    most_warmup: int = MOST_WARMUP,
) -> Timing:
    """Time ``calls`` against each other.

    Args:
        rounds: that are counted; the warm-up comes before them.
        seed: of the order in which they take their turns.
        clock: seconds.
        progress: called with (stage, done, total).
        most_warmup: rounds after which the counted ones begin although times still move.
    """
    rng, counts = random.Random(seed), [1] * len(calls)
    turns: list[list[float]] = [[] for _ in calls]
    made: list[list[float]] = [[] for _ in calls]

    def run_round() -> None:
        order = list(range(len(calls)))
        rng.shuffle(order)
        for i in order:
            times = _time_turn(calls[i], counts[i], clock)
            made[i] += times
            turns[i].append(statistics.median(times))

    with _pause_garbage_collector():
        warmup = 0
        while warmup < most_warmup and not (warmup and all(map(is_steady, turns))):
            if progress is not None:
                progress("warm-up", warmup, most_warmup)
            run_round()
            counts = [max(1, min(MOST_CALLS, int(TURN / max(t[-1], 1e-9)))) for t in turns]
            warmup += 1
        unsteady = tuple(i for i, t in enumerate(turns) if not is_steady(t))
        turns = [[] for _ in calls]
        made = [[] for _ in calls]
        for done in range(rounds):
            if progress is not None:
                progress("race", done, rounds)
            run_round()
    return Timing(tuple(map(tuple, made)), tuple(map(tuple, turns)), warmup, unsteady)


def is_steady(turns: Sequence[float]) -> bool:
    """Whether the last rounds took as long as those before them."""
    if len(turns) < 2 * WINDOW:
        return False
    before = statistics.median(turns[-2 * WINDOW : -WINDOW])
    last = statistics.median(turns[-WINDOW:])
    return abs(last - before) <= DRIFT * before


def _time_turn(call: Call, count: int, clock: Callable[[], float]) -> list[float]:
    call()
    times = []
    for _ in range(count):
        start = clock()
        call()
        times.append(clock() - start)
    return times


@contextmanager
def _pause_garbage_collector() -> Iterator[None]:
    """Without Python's cycle collector, whose pauses belong to nobody's latency."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
