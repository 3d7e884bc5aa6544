"""The bars of an engine's norms have the numbers of the report."""

from __future__ import annotations

from typing import Any

from normdeploy.reports.engine_plots import plot_engine_share, plot_norm_times


def build(count: int, **changes: Any) -> dict[str, Any]:
    """An engine with ``count`` norms of 1, 2, ... ms."""
    norms = [
        {"module": f"norm.{i}", "tensor": "", "ms": float(i + 1), "form": "one compiled kernel"} for i in range(count)
    ]
    total = sum(norm["ms"] for norm in norms)
    return {
        "path": "e.json",
        "norms": norms,
        "total_ms": 4 * total,
        "norm_ms": total,
        "reformat_ms": None,
    } | changes


def test_share_of_norms_is_drawn_for_each_engine() -> None:
    plot = plot_engine_share([build(2), build(2, path="other.json", total_ms=6.0, reformat_ms=1.0)])
    assert plot is not None
    assert plot.alt == "e.json: norms 3 of 12 ms (25.0 %); other.json: norms 3 of 6 ms (50.0 %)"


def test_slowest_norms_are_drawn_first() -> None:
    plot = plot_norm_times([build(20)])
    assert plot is not None
    assert plot.alt.startswith("norm.19: 20 ms")
    assert plot.alt.count(";") == 11
    assert plot.caption.endswith("; 8 faster ones are not shown.")


def test_engine_without_times_has_no_plot() -> None:
    untimed = build(1, total_ms=None, norm_ms=None)
    untimed["norms"][0]["ms"] = None
    assert plot_engine_share([untimed]) is None
    assert plot_norm_times([untimed]) is None
