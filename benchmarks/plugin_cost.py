"""Measure what the plugin for pytest adds to a session that does not use it.

    python -m benchmarks.plugin_cost [PAIRS]        default: 15

Each pair runs pytest on one empty test, with the plugin and with ``-p no:normdeploy``, in turn, each time in a fresh
process. Writes ``benchmarks/results/plugin_cost.md``: the median processor time of both, and the median of the
differences with its 95 % interval (order statistics). Exits with 1 if the interval reaches above 0.2 s.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from normdeploy.verbs.bench.machine_info import describe_machine

RESULT = Path(__file__).parent / "results" / "plugin_cost.md"
# Largest processor time that the plugin may add to a session, in seconds
MOST = 0.2


@dataclass(frozen=True)
class Interval:
    """Median of numbers with its 95 % interval."""

    median: float
    low: float
    high: float


def measure_session(folder: Path, options: tuple[str, ...]) -> float:
    """Run pytest once.

    Returns:
        processor time of the process in seconds.
    """
    before = os.times()
    subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=folder, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def interval_of_median(numbers: list[float]) -> Interval:
    """Compute the median and the interval that contains the true median with a probability of at least 95 %.

    Each number is below the true median with a probability of 1/2, so ranks follow a binomial distribution.
    """
    ordered = sorted(numbers)
    count = len(ordered)
    missed = 0.0
    rank = 0
    while missed + math.comb(count, rank) / 2**count <= 0.025:
        missed += math.comb(count, rank) / 2**count
        rank += 1
    rank = max(rank - 1, 0)
    return Interval(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank])


def main() -> int:
    """Measure, and write the page.

    Returns:
        exit code.
    """
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with_plugin: list[float] = []
    without: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        for _ in range(pairs):
            with_plugin.append(measure_session(folder, ()))
            without.append(measure_session(folder, ("-p", "no:normdeploy")))
    added = interval_of_median([one - other for one, other in zip(with_plugin, without, strict=True)])
    lines = [
        "# What the plugin for pytest adds to a session that does not use it",
        "",
        f"Processor time of `pytest` on one empty test, {pairs} pairs of runs in turn. Written by",
        "`python -m benchmarks.plugin_cost`.",
        "",
        "| | seconds |",
        "|---|---|",
        f"| with the plugin, median | {statistics.median(with_plugin):.3f} |",
        f"| without the plugin, median | {statistics.median(without):.3f} |",
        f"| added, median and 95 % interval | {added.median:.3f} ({added.low:.3f} to {added.high:.3f}) |",
        "",
        f"{describe_machine()}.",
    ]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if added.high > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
