"""A race names its fastest contestant only if the measurement can tell."""

from __future__ import annotations

from typing import Any

from normdeploy.reports.race_summary import describe_fastest


def entry(name: str, median: float, interval: tuple[float, float] | None, reason: str = "") -> dict[str, Any]:
    return {"runtime": name, "file": "", "form": "", "median": median, "interval": interval, "reason": reason}


def test_intervals_apart_name_the_fastest() -> None:
    entries = [entry("eager", 2.0, (1.0, 1.0)), entry("onnxruntime CPU", 1.0, (0.4, 0.6))]
    assert describe_fastest(entries) == "fastest: onnxruntime CPU"


def test_intervals_that_overlap_name_nobody() -> None:
    entries = [entry("eager", 2.0, (1.0, 1.0)), entry("compiled", 1.9, (0.9, 1.05)), entry("slow", 9.0, (4.0, 5.0))]
    assert describe_fastest(entries) == "no clear winner: the 95 % intervals of compiled, eager overlap"


def test_contestants_that_were_not_timed_do_not_count() -> None:
    assert not describe_fastest([entry("eager", 2.0, (1.0, 1.0)), entry("broken", 0.0, None, "wrong answer")])
