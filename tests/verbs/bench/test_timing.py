"""The race by a made-up clock: the order of turns, what is counted, ratios and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from normdeploy.verbs.bench import timing as bench_timing
from normdeploy.verbs.bench.timing import Timing, is_steady, median_interval, race_calls


class Clock:
    """Time that passes only when a contestant runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """``seconds``: of its n-th call."""
        count = 0

        def call() -> None:
            nonlocal count
            self.now += seconds(count)
            self.calls.append(name)
            count += 1

        return call


def turns(calls: list[str]) -> list[str]:
    """The sequence of turns: a name for each run of calls."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_everyone_has_one_turn_in_every_round_in_random_order() -> None:
    clock = Clock()
    calls = [clock.contestant(name, lambda n: 1.0) for name in "abc"]
    timing = race_calls(calls, rounds=40, clock=clock)
    counted = clock.calls[-40 * 3 * 2 :]  # a call that is not counted and one that is
    orders = {tuple(dict.fromkeys(counted[i : i + 6])) for i in range(0, len(counted), 6)}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) == 6
    assert [len(t) for t in timing.turns] == [40] * 3
    again = Clock()
    race_calls([again.contestant(name, lambda n: 1.0) for name in "abc"], rounds=40, clock=again)
    assert again.calls == clock.calls
    other = Clock()
    race_calls([other.contestant(name, lambda n: 1.0) for name in "abc"], rounds=40, clock=other, seed=1)
    assert other.calls != clock.calls


def test_the_first_call_of_a_turn_is_not_counted() -> None:
    """It finds the caches as the others left them: here it takes a hundred times as long."""
    clock = Clock()
    other = clock.contestant("b", lambda n: 1.0)

    def cold() -> None:
        clock.now += 1.0 if clock.calls[-1:] == ["a"] else 100.0
        clock.calls.append("a")

    timing = race_calls([cold, other], rounds=20, clock=clock)
    assert set(timing.calls[0]) == {1.0}


def test_ratios_hold_where_the_machine_slows_down() -> None:
    """From the middle on everything takes ten times as long; the ratio is that of each round."""
    clock = Clock()

    def busy(seconds: float) -> Callable[[int], float]:
        return lambda n: seconds * (10.0 if clock.now > 1000 else 1.0)

    timing = race_calls([clock.contestant("a", busy(2.0)), clock.contestant("b", busy(5.0))], rounds=80, clock=clock)
    assert max(timing.turns[0]) == 20.0
    assert min(timing.turns[0]) == 2.0
    ratio, low, high = timing.round_ratio(1)
    assert ratio == low == high == 2.5
    assert timing.round_ratio(0) == (1.0, 1.0, 1.0)


def test_warm_up_ends_when_the_times_stand_still() -> None:
    clock = Clock()
    timing = race_calls(
        [clock.contestant("a", lambda n: max(1.0, 30.0 - n)), clock.contestant("b", lambda n: 3.0)],
        rounds=5,
        clock=clock,
    )
    assert set(timing.calls[0]) == {1.0}
    assert bench_timing.WINDOW * 2 < timing.warmup < bench_timing.MOST_WARMUP
    assert timing.unsteady == ()
    growing = race_calls(
        [clock.contestant("a", lambda n: 1.1**n), clock.contestant("b", lambda n: 3.0)], rounds=1, clock=clock
    )
    assert (growing.warmup, growing.unsteady) == (bench_timing.MOST_WARMUP, (0,))


def test_steady_compares_two_windows() -> None:
    assert not is_steady([1.0] * 9)
    assert is_steady([1.0] * 10)
    assert is_steady([9.0] * 5 + [1.0] * 5 + [1.04] * 5)
    assert not is_steady([1.0] * 5 + [1.06] * 5)


def test_short_calls_fill_a_turn() -> None:
    clock = Clock()
    timing = race_calls(
        [clock.contestant("a", lambda n: 0.001), clock.contestant("b", lambda n: 1e-9)], rounds=1, clock=clock
    )
    assert len(timing.calls[0]) in (4, 5)  # of 5 ms; a float's sum may fall below
    assert len(timing.calls[1]) == bench_timing.MOST_CALLS


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (10, 2, 9), (25, 8, 18), (100, 40, 61)]
)
def test_interval_of_the_median(count: int, low: int, high: int) -> None:
    """The ranks that tables of the sign test give for 95 % (Conover 1999, table A3)."""
    values = [float(n) for n in range(1, count + 1)]
    np.random.default_rng(0).shuffle(values)
    assert median_interval(values) == (low, high)


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = [
        low <= math.log(2) <= high
        for low, high in (median_interval(list(rng.exponential(size=30))) for _ in range(1000))
    ]
    assert 0.93 <= sum(held) / len(held) <= 0.99  # 95.7 % by the binomial, three standard errors around it


def test_samples_are_thinned_in_their_order() -> None:
    calls = tuple(float(n) for n in range(1000))
    timing = Timing((calls, calls[:7]), ((1.0,), (1.0,)), 0, ())
    kept = timing.sample_calls(0)
    assert len(kept) == bench_timing.KEPT
    assert list(kept) == sorted(set(kept))
    assert kept[-1] > 990
    assert timing.sample_calls(1) == calls[:7]
    assert timing.percentile(0, 50) == pytest.approx(499.5)
