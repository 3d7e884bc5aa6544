"""Draw the plots of an engine's layers: the time of each norm, and the norms' share of the whole time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import NullLocator

from .plots import Plot, parse_number
from .svg_drawing import FIRST, INK, MUTED, RULE, SECOND, draw_legend, figure_to_svg, open_figure

# Maximum number of norms in a plot
_NORMS = 12
# Maximum number of letters of a name in a plot
_NAME = 48


def plot_engine_share(builds: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Plot the time of each engine as one bar: layers of norms, reformats around them, and all other layers.

    Returns:
        a plot with one bar per engine that was timed; None if no engine was timed.
    """
    timed = [build for build in builds if build["total_ms"]]
    if not timed:
        return None
    with open_figure(0.7 + 0.7 * len(timed)) as (figure, axes):
        titles = []
        for row, build in enumerate(timed):
            total, norms, reformats = (parse_number(build[key] or 0) for key in ("total_ms", "norm_ms", "reformat_ms"))
            others = max(0.0, total - norms - reformats)
            start = 0.0
            for label, ms, color in (
                ("norms", norms, FIRST),
                ("reformats", reformats, SECOND),
                ("others", others, RULE),
            ):
                axes.barh(-row, ms, 0.4, left=start, color=color, linewidth=0, label=label if row == 0 else None)
                start += ms
            title = f"{_shorten(build['path'])}: norms {norms:.3g} of {total:.3g} ms ({100 * norms / total:.1f} %)"
            axes.annotate(
                title, (0, -row + 0.27), (2, 2), textcoords="offset points", va="bottom", fontsize=9, color=INK
            )
            titles.append(title)
        _fit_rows(axes, len(timed))
        axes.set_xlabel("mean ms of one run")
        draw_legend(axes)
        return Plot("The norms' share of the time.", "; ".join(titles), figure_to_svg(figure, "engines"))


def plot_norm_times(builds: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Plot the mean time of the slowest norms of the first engine that was timed.

    Returns:
        a plot with one bar per norm, slowest first; None if no norm was timed.
    """
    timed = [build for build in builds if any(norm["ms"] is not None for norm in build["norms"])]
    if not timed:
        return None
    norms = [norm for norm in timed[0]["norms"] if norm["ms"] is not None]
    shown = sorted(norms, key=lambda norm: -parse_number(norm["ms"]))[:_NORMS]
    with open_figure(0.6 + 0.5 * len(shown)) as (figure, axes):
        titles = []
        for row, norm in enumerate(shown):
            ms = parse_number(norm["ms"])
            axes.barh(-row, ms, 0.3, color=FIRST, alpha=0.5, linewidth=0)
            title = f"{_shorten(norm['module'] or norm['tensor'])}: {ms:.3g} ms, {norm['form']}"
            axes.annotate(
                title, (0, -row + 0.2), (2, 2), textcoords="offset points", va="bottom", fontsize=9, color=MUTED
            )
            titles.append(title)
        _fit_rows(axes, len(shown))
        axes.set_xlabel("mean ms of one run, with all that is fused with the norm")
        caption = f"The slowest norms of {_shorten(timed[0]['path'])}"
        left = f"; {len(norms) - len(shown)} faster ones are not shown." if len(norms) > len(shown) else "."
        return Plot(caption + left, "; ".join(titles), figure_to_svg(figure, "norms"))


def _fit_rows(axes: Any, count: int) -> None:
    """Fit the vertical axis to ``count`` bars at 0, -1, -2, … with their titles above, and hide it."""
    axes.set_ylim(-count + 0.6, 0.72)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set_visible(False)


def _shorten(name: str) -> str:
    if len(name) <= _NAME:
        return name
    return f"{name[: _NAME // 2]}…{name[-_NAME // 2 + 1 :]}"
