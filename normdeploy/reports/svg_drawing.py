"""Convert matplotlib drawings to SVG elements of a page, with the page's colors and fonts and with unique ids.

Each color of a drawing stands for a CSS variable of the page, so the same drawing works in light and dark mode. Each
drawing is as wide as the page; on a phone it scrolls. Equal numbers always give equal SVG text.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

INK, MUTED, RULE, FIRST, SECOND, BAD = (f"#00000{i}" for i in range(1, 7))
_CSS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    BAD: "var(--bad)",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "normdeploy",
    # Names come from files, so matplotlib must not read them as formulas.
    "text.parse_math": False,
    "path.simplify": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
}
# Width of a figure in inches: 720 points, the width of the page
_WIDTH = 10


@contextmanager
def open_figure(height: float) -> Iterator[tuple[Figure, Axes]]:
    """Open a figure of the page's width, in the page's style.

    Args:
        height: height in inches.

    Yields:
        the figure and its axes.
    """
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # matplotlib warns if its font lacks a letter, but the page's fonts have it.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        yield figure, axes


def set_signed_scale(axes: Axes, linear: float) -> None:
    """Scale the y axis for values of both signs: linear up to ``linear``, logarithmic beyond."""
    axes.set_yscale("symlog", linthresh=linear)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def set_log_scale(axes: Axes, values: Iterable[float]) -> float:
    """Set a logarithmic y axis for ``values``.

    Zeros are drawn at the lower end of the axis, and values that are not finite at the upper end.

    Returns:
        the lower end of the axis.
    """
    positive = [v for v in values if 0 < v < math.inf] or [1.0]
    low = min(positive) / 4
    high = max(positive) * 4
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"1e{round(math.log10(v))}"))
    return low


def set_ordered_axes(axes: Axes, x: str, y: str) -> None:
    """Label the axes of values that are ordered by number, and draw the legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.04)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(False, axis="x")
    draw_legend(axes)


def draw_legend(axes: Axes) -> None:
    """Draw the legend above the axes."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=3,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=9,
    )


def draw_ticks(axes: Axes, values: Sequence[float], colour: str, label: str) -> None:
    """Draw a short horizontal line at each value."""
    x = range(1, len(values) + 1)
    draw_segments(axes, [i - 0.4 for i in x], values, [i + 0.4 for i in x], values, colour, 1.2, label)


def draw_dots(
    axes: Axes, values: Sequence[float], bad: Sequence[bool], colour: str, label: str, shift: float = 0.0
) -> None:
    """Draw a dot for each value. Bad values have larger dots in another color.

    Args:
        bad: mask of the bad values, of the same length.
        shift: offset along the x axis.
    """
    low, high = axes.get_ylim()
    placed = [
        (i + shift, min(max(v, low), high) if math.isfinite(v) else high, b)
        for i, (v, b) in enumerate(zip(values, bad, strict=True), 1)
    ]
    if len(values) <= 100:
        size = 4.5
    else:
        size = 2.5
    draw_points(axes, [x for x, _, b in placed if not b], [y for _, y, b in placed if not b], colour, size, label)
    draw_points(axes, [x for x, _, b in placed if b], [y for _, y, b in placed if b], BAD, size + 2)


def draw_points(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, size: float, label: str = "") -> None:
    """Draw a round dot at each (x, y)."""
    draw_segments(axes, x, y, x, y, colour, size, label)


def draw_segments(
    axes: Axes,
    x0: Sequence[float],
    y0: Sequence[float],
    x1: Sequence[float],
    y1: Sequence[float],
    colour: str,
    width: float,
    label: str = "",
) -> None:
    """Draw lines with round ends as a single SVG element, so that thousands of lines take little space."""
    x = [v for a, b in zip(x0, x1, strict=True) for v in (a, b, math.nan)]
    y = [v for a, b in zip(y0, y1, strict=True) for v in (a, b, math.nan)]
    axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="round", label=label or "_", clip_on=False)


def figure_to_svg(figure: Figure, name: str) -> str:
    """Convert a figure to an element of an HTML document.

    Args:
        name: prefix of the ids in the element.

    Returns:
        SVG text.
    """
    text = io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_tag(child.tag) in ("metadata", "style"):
                parent.remove(child)
    used = {m for element in root.iter() for value in element.attrib.values() for m in re.findall(r"#([\w-]+)", value)}
    for element in root.iter():
        element.tag = _local_tag(element.tag)
        attributes = {_local_tag(key): value for key, value in element.attrib.items()}
        if attributes.pop("id", None) in used:
            attributes["id"] = f"{name}-{element.attrib['id']}"
        element.attrib.clear()
        element.attrib.update({key: _rewrite_attribute(key, value, name) for key, value in attributes.items()})
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": view, "aria-hidden": "true", "class": "plot"})
    return re.sub(r"\s*\n\s*", "\n", ElementTree.tostring(root, encoding="unicode"))


def _rewrite_attribute(key: str, value: str, name: str) -> str:
    """Rewrite the value of an SVG attribute for the page: short paths, prefixed ids, CSS variables."""
    if key == "d":
        return _shorten_path(value)
    if key == "href" or value.startswith("url(#"):
        return value.replace("#", f"#{name}-")
    if key != "style":
        return value
    value = re.sub(r"font: ([\d.]+)px [^;]*", r"font-size: \1px", value)
    return re.sub("|".join(_CSS), lambda colour: _CSS[colour[0]], value)


def _shorten_path(path: str) -> str:
    """Shorten an SVG path.

    Numbers are rounded to a hundredth of a point. Dots and horizontal lines, of which there may be thousands, get their
    shortest form.
    """
    path = " ".join(re.sub(r"(\.\d\d)\d+", r"\1", path).split())
    path = re.sub(r"M (\S+) (\S+) L \1 \2(?= M|$)", r"M\1 \2h0", path)
    return re.sub(r"M (\S+) (\S+) L (\S+) \2(?= M|$)", r"M\1 \2H\3", path)


def _local_tag(tag: str) -> str:
    return tag.rpartition("}")[2]
