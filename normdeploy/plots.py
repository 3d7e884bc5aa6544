"""The plots of the report's page, as SVG that belongs to the page: its colours, its fonts, no ids of its own that could meet others.

matplotlib draws them in colours that stand for the page's CSS variables, so that one drawing serves light and dark. Each is narrow enough
for a phone; a wide screen shows it larger. The same numbers always give the same text.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    "text.parse_math": False,  # names come from files
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
_WIDTH = 4.2  # inches: 302 points, a phone's width
_OPS = 12  # op types shown one by one
_NAME = 28  # letters of a name


@dataclass(frozen=True)
class Plot:
    """``svg`` is an element for an HTML document; ``alt`` says in words what it shows."""

    caption: str
    alt: str
    svg: str


def number(value: Any) -> float:
    """A number of the JSON report: "nan", "inf" and "-inf" are texts there, null is not known."""
    return math.nan if value is None else float(value)


def identity(certificates: Sequence[Mapping[str, Any]]) -> Plot:
    """Every certificate's error in float64 under its bound, both relative."""
    errors, bounds = ([number(c[key]) for c in certificates] for key in ("error", "bound"))
    passed = [bool(c["identity"]) for c in certificates]
    with _drawn(2.6) as (figure, axes):
        _scale(axes, errors + bounds)
        _ticks(axes, bounds, INK, "bound")
        _dots(axes, errors, [not p for p in passed], FIRST, "error")
        _order(axes, "norms with a certificate, in the graph's order", "relative error, float64")
        said = f"{len(errors)} certificates, {sum(passed)} passed: the largest error is {max(errors):.1e}, its bound {min(bounds):.1e}."
        return Plot("Before and after are the same function: error in float64 against the bound.", said, _inline(figure, "identity"))


def rounding(certificates: Sequence[Mapping[str, Any]]) -> Plot | None:
    """What onnxruntime makes of each norm before and after, in the model's own type; None where nothing was run."""
    ran = [c for c in certificates if c["rounding_after"] is not None and c["rounding_bound"] is not None]
    if not ran:
        return None
    before, after, bounds = ([number(c[f"rounding_{key}"]) for c in ran] for key in ("before", "after", "bound"))
    failed = [not c["rounding_ok"] for c in ran]
    with _drawn(2.6) as (figure, axes):
        _scale(axes, before + after + bounds)
        _ticks(axes, bounds, INK, "bound")
        _dots(axes, before, [False] * len(ran), SECOND, "before", shift=-0.16)
        _dots(axes, after, failed, FIRST, "after", shift=0.16)
        _order(axes, "norms that onnxruntime ran, in the graph's order", "largest |error|")
        said = (
            f"{len(ran)} norms in onnxruntime: the largest error is {_most(before)} before and {_most(after)} after; {sum(failed)} exceed."
        )
        return Plot("Rounding in onnxruntime, in the model's own type, against float64.", said, _inline(figure, "rounding"))


def ops(before: Mapping[str, int], after: Mapping[str, int]) -> Plot:
    """Nodes by op type; the types whose number changed most are named."""
    names = sorted(before.keys() | after.keys(), key=lambda op: (-abs(before.get(op, 0) - after.get(op, 0)), -after.get(op, 0), op))
    rows = [(_short(op), before.get(op, 0), after.get(op, 0)) for op in names[:_OPS]]
    if rest := names[_OPS:]:
        rows.append((f"{len(rest)} other types", sum(before.get(op, 0) for op in rest), sum(after.get(op, 0) for op in rest)))
    with _drawn(0.7 + 0.3 * len(rows)) as (figure, axes):
        places = [-i for i in range(len(rows))]
        axes.barh([p + 0.19 for p in places], [b for _, b, _ in rows], 0.34, color=SECOND, label=f"before: {sum(before.values())} nodes")
        axes.barh([p - 0.19 for p in places], [a for _, _, a in rows], 0.34, color=FIRST, label=f"after: {sum(after.values())} nodes")
        for place, (_, b, a) in zip(places, rows, strict=True):
            axes.annotate(f"{b} → {a}", (max(a, b), place), (5, 0), textcoords="offset points", va="center", color=MUTED, fontsize=9)
        axes.set_yticks(places, [name for name, _, _ in rows])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.18, y=0.01)
        axes.set_xlim(left=0)
        _legend(axes)
        said = "; ".join(f"{name} {b} before, {a} after" for name, b, a in rows)
        return Plot("Nodes by op type.", said, _inline(figure, "ops"))


def drift(runtime: str, points: Sequence[Mapping[str, Any]], place: int) -> Plot:
    """One runtime's error from the first tensor to the last, beside eager's and what is allowed."""
    error, eager, allowed = ([number(p[key]) for p in points] for key in ("error", "eager", "allowed"))
    wrong = [bool(p.get("reason")) or not e <= a for p, e, a in zip(points, error, allowed, strict=True)]
    with _drawn(2.8) as (figure, axes):
        low = _scale(axes, error + eager + allowed)
        x = range(1, len(points) + 1)
        axes.plot(x, allowed, color=INK, linewidth=1, linestyle=(0, (4, 2)), label="allowed")
        axes.plot(x, [max(e, low) for e in eager], color=SECOND, linewidth=1.4, label="eager")
        axes.plot(x, [max(e, low) for e in error], color=FIRST, linewidth=1.4, label="this runtime")
        _dots(axes, error, wrong, FIRST, "")
        _order(axes, "boundaries of modules, from input to output", "largest |error|")
        first = next((p for p, w in zip(points, wrong, strict=True) if w), None)
        said = f"{len(points)} tensors in {runtime}: {sum(wrong)} exceed what is allowed"
        said += f", the first is {_where(first)}." if first else f"; the last is off by {error[-1]:.1e}, allowed are {allowed[-1]:.1e}."
        return Plot(f"Error by layer in {runtime}, against float64.", said, _inline(figure, f"drift{place}"))


def race(entries: Sequence[Mapping[str, Any]]) -> Plot:
    """Median latencies as bars, every sample a dot, the 95th percentile a line; milliseconds."""
    with _drawn(0.6 + 0.62 * len(entries)) as (figure, axes):
        right = max(number(e["p99"]) for e in entries) * 1.1
        for place, entry in enumerate(entries):
            median, p95 = number(entry["median"]), number(entry["p95"])
            axes.barh(-place, median, 0.4, color=FIRST, alpha=0.35, linewidth=0)
            shown = [(number(t), -place + _jitter(i)) for i, t in enumerate(entry["samples"]) if number(t) <= right]
            _points(axes, [t for t, _ in shown], [y for _, y in shown], FIRST, 1.6)
            _segments(axes, [median, p95], [-place - 0.27] * 2, [median, p95], [-place + 0.27] * 2, INK, 1.2)
            said = f"{_short(_entry(entry), 48)}: {median:.3g} ms"
            axes.annotate(said, (0, -place + 0.27), (2, 2), textcoords="offset points", va="bottom", fontsize=9, color=INK)
        axes.set_xlim(0, right)
        axes.set_ylim(-len(entries) + 0.6, 0.72)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("ms; lines at the median and at 95 %")
        said = "; ".join(f"{_entry(e)}: median {number(e['median']):.3g} ms, 95 % below {number(e['p95']):.3g} ms" for e in entries)
        return Plot("Latency, each call a dot; the slowest one in a hundred may lie outside.", said, _inline(figure, "race"))


def _entry(entry: Mapping[str, Any]) -> str:
    return " · ".join(part for part in (entry["runtime"], entry.get("form"), entry.get("file")) if part)


def _where(point: Mapping[str, Any]) -> str:
    return point.get("module") or point["tensor"]


def _most(values: Iterable[float]) -> str:
    known = [v for v in values if not math.isnan(v)]
    return f"{max(known):.1e}" if known else "not known"


def _short(text: str, most: int = _NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _jitter(i: int) -> float:
    """From -0.16 to 0.16, spread evenly whatever the number of samples: multiples of the golden ratio."""
    return (i * 0.6180339887 % 1 - 0.5) * 0.32


@contextmanager
def _drawn(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of the page's width and its axes, in the page's style. ``height`` in inches."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that matplotlib's font lacks: the page's fonts have them
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        yield figure, axes


def _scale(axes: Axes, values: Iterable[float]) -> float:
    """A logarithmic y axis for ``values``; returns its lower end, where zeros are drawn. What is not finite is drawn at the upper."""
    positive = [v for v in values if 0 < v < math.inf] or [1.0]
    low, high = min(positive) / 4, max(positive) * 4
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"1e{round(math.log10(v))}"))
    return low


def _order(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(x=0.04)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(False, axis="x")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, borderpad=0, handlelength=1.2, columnspacing=1.2, fontsize=9)


def _ticks(axes: Axes, values: Sequence[float], colour: str, label: str) -> None:
    """A short horizontal line at each value."""
    x = range(1, len(values) + 1)
    _segments(axes, [i - 0.4 for i in x], values, [i + 0.4 for i in x], values, colour, 1.2, label)


def _dots(axes: Axes, values: Sequence[float], bad: Sequence[bool], colour: str, label: str, shift: float = 0.0) -> None:
    """A dot for each value; those that are ``bad`` stand out."""
    low, high = axes.get_ylim()
    placed = [
        (i + shift, min(max(v, low), high) if math.isfinite(v) else high, b) for i, (v, b) in enumerate(zip(values, bad, strict=True), 1)
    ]
    size = 4.5 if len(values) <= 100 else 2.5
    _points(axes, [x for x, _, b in placed if not b], [y for _, y, b in placed if not b], colour, size, label)
    _points(axes, [x for x, _, b in placed if b], [y for _, y, b in placed if b], BAD, size + 2)


def _points(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, size: float, label: str = "") -> None:
    _segments(axes, x, y, x, y, colour, size, label)


def _segments(
    axes: Axes,
    x0: Sequence[float],
    y0: Sequence[float],
    x1: Sequence[float],
    y1: Sequence[float],
    colour: str,
    width: float,
    label: str = "",
) -> None:
    """Lines with round ends; all of them are one element, so that thousands stay small."""
    x = [v for a, b in zip(x0, x1, strict=True) for v in (a, b, math.nan)]
    y = [v for a, b in zip(y0, y1, strict=True) for v in (a, b, math.nan)]
    axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="round", label=label or "_", clip_on=False)


def _inline(figure: Figure, name: str) -> str:
    """The figure as an element of an HTML document; ``name`` begins its ids."""
    text = io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    used = {m for element in root.iter() for value in element.attrib.values() for m in re.findall(r"#([\w-]+)", value)}
    for element in root.iter():
        element.tag = _local(element.tag)
        held = {_local(key): value for key, value in element.attrib.items()}
        if held.pop("id", None) in used:
            held["id"] = f"{name}-{element.attrib['id']}"
        element.attrib.clear()
        element.attrib.update({key: _own(key, value, name) for key, value in held.items()})
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": view, "aria-hidden": "true", "class": "plot"})
    return re.sub(r"\s*\n\s*", "\n", ElementTree.tostring(root, encoding="unicode"))


def _own(key: str, value: str, name: str) -> str:
    """An attribute in the page's terms."""
    if key == "href" or value.startswith("url(#"):
        return value.replace("#", f"#{name}-")
    if key != "style":
        return value
    value = re.sub(r"font: ([\d.]+)px [^;]*", r"font-size: \1px", value)
    return re.sub("|".join(_CSS), lambda colour: _CSS[colour[0]], value)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
