"""Time contestants so that the ratios of their times are reliable on a busy machine.

A round gives each contestant one turn, in random order. A turn begins with one call that is not counted, because the
other contestants have replaced the contents of the caches. As many calls follow as fit into a few milliseconds.

A slowdown of the machine that lasts longer than a round affects all contestants. Ratios are taken between the turns of
one round, so the slowdown cancels.

The warm-up consists of the same rounds. It ends when no contestant gets faster or slower any more.
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

# Length of a turn in seconds: as many calls as fit, but at least one.
TURN = 0.005
# Maximum number of calls in a turn.
MOST_CALLS = 1000
# The warm-up ends when the median time of the last WINDOW rounds differs by at most the fraction DRIFT from that of the
# WINDOW rounds before them, and after MOST_WARMUP rounds at the latest.
WINDOW, DRIFT, MOST_WARMUP = 5, 0.05, 60
# Maximum number of single times per contestant in a report.
KEPT = 400


@dataclass(frozen=True)
class Timing:
    """Times of a benchmark in seconds.

    Attributes:
        calls: ``calls[i]`` has the time of each counted call of contestant i, in the order of the calls.
        turns: ``turns[i]`` has the median time of contestant i in each round.
        warmup: number of warm-up rounds, which are not counted.
        unsteady: indices of contestants whose times still changed at the end of the longest warm-up.
    """

    calls: tuple[tuple[float, ...], ...]
    turns: tuple[tuple[float, ...], ...]
    warmup: int
    unsteady: tuple[int, ...]

    def percentile(self, i: int, share: float) -> float:
        """Compute a percentile of contestant i's calls.

        Args:
            share: the percentile, from 0 to 100.

        Returns:
            Seconds.
        """
        return float(np.percentile(self.calls[i], share))

    def sample_calls(self, i: int) -> tuple[float, ...]:
        """Choose at most `KEPT` of contestant i's calls, evenly.

        Returns:
            Seconds, in the order of the calls.
        """
        calls = self.calls[i]
        if len(calls) > KEPT:
            return tuple(calls[n * len(calls) // KEPT] for n in range(KEPT))
        return calls

    def round_ratio(self, i: int, base: int = 0) -> tuple[float, float, float]:
        """Compare the times of contestant i with those of contestant ``base`` in the same rounds.

        Returns:
            Median over the rounds of the ratio of the two times, and the ends of the 95 % interval of this median.
        """
        ratios = [own / other for own, other in zip(self.turns[i], self.turns[base], strict=True)]
        return (statistics.median(ratios), *median_interval(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute a 95 % confidence interval of the median for any distribution.

    The number of n values below the median is binomial(n, 1/2). With fewer than six values, even the outermost two
    contain the median with less than 95 % probability.

    Source: Conover, Practical Nonparametric Statistics, 3rd ed. 1999, section 3.2.

    Returns:
        Two of the values: the ends of the interval.
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
        rounds: number of counted rounds, after the warm-up.
        seed: seed of the order within the rounds.
        clock: returns seconds.
        progress: called with (stage, done, total).
        most_warmup: maximum number of warm-up rounds. Counting then begins even if times still change.

    Returns:
        The times of all calls.
    """
    rng, counts = random.Random(seed), [1] * len(calls)
    turns: list[list[float]] = [[] for _ in calls]
    made: list[list[float]] = [[] for _ in calls]

    def run_round() -> None:
        """Give each contestant a turn, in random order."""
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
                progress("measure", done, rounds)
            run_round()
    return Timing(tuple(map(tuple, made)), tuple(map(tuple, turns)), warmup, unsteady)


def is_steady(turns: Sequence[float]) -> bool:
    """Check that the last `WINDOW` rounds took as long as the `WINDOW` rounds before them.

    Returns:
        False if the times differ, or if there are fewer than two windows of rounds.
    """
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
    """Turn off Python's cyclic garbage collector, so that its pauses do not count as a contestant's time."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
