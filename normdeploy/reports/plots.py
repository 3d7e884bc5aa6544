"""Draw the plots of the report's page; `normdeploy.reports.svg_drawing` converts them to SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator, NullLocator

from .svg_drawing import (
    FIRST,
    INK,
    MUTED,
    SECOND,
    draw_dots,
    draw_legend,
    draw_points,
    draw_segments,
    draw_ticks,
    figure_to_svg,
    open_figure,
    set_log_scale,
    set_ordered_axes,
)

# Maximum number of op types with a separate bar
_OPS = 12
# Maximum number of letters of a name in a plot
_NAME = 28
# Minimum bits of an exact proof: its error probability is at most 2^-80
_LEAST = 80
# Maximum number of certificates in a plot; more would make the page too large.
_CERTIFICATES = 10_000
# The axis of a race ends at this multiple of the slowest median. Otherwise outliers of a busy machine would compress
# all other times.
_FARTHEST = 3
# Maximum number of points in the drift plot of one runtime
_POINTS = 1000


@dataclass(frozen=True)
class Plot:
    """Plot of the page.

    Attributes:
        caption: sentence below the plot.
        alt: description of the plot in words, for screen readers.
        svg: SVG element for an HTML document.
    """

    caption: str
    alt: str
    svg: str


def parse_number(value: Any) -> float:
    """Parse a number of the JSON report, which may be a string ("nan", "inf", "-inf") or null.

    Returns:
        the number; NaN for null.
    """
    if value is None:
        return math.nan
    return float(value)


def plot_identity_errors(certificates: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot each certificate's error in float64 and its bound, both relative.

    Returns:
        a plot with one x position per certificate, in the graph's order.
    """
    shown = _select_values(certificates, [not c["identity"] for c in certificates], _CERTIFICATES)
    errors, bounds = ([parse_number(c[key]) for c in shown] for key in ("error", "bound"))
    with open_figure(2.6) as (figure, axes):
        set_log_scale(axes, errors + bounds)
        draw_ticks(axes, bounds, INK, "bound")
        draw_dots(axes, errors, [not c["identity"] for c in shown], FIRST, "error")
        set_ordered_axes(axes, "norms with a certificate, in the graph's order", "relative error, float64")
        passed = sum(bool(c["identity"]) for c in certificates)
        title = (
            f"{len(certificates)} certificates, {passed} passed; the largest error is "
            f"{_format_maximum(errors)}, the least bound"
            f" {min(bounds):.1e}."
        )
        caption = "Before and after are the same function: error in float64 against the bound."
        return Plot(caption + _left_out_note(shown, certificates), title, figure_to_svg(figure, "identity"))


def plot_proof_errors(certificates: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot the error probability of each exact proof in bits (−log₂), above the required minimum of 80.

    Returns:
        a plot with one x position per proof, in the graph's order.
    """
    shown = _select_values(certificates, [False for _ in certificates], _CERTIFICATES)
    bits = [parse_number(c["bits"]) for c in shown]
    with open_figure(2.6) as (figure, axes):
        axes.set_ylim(0, max(bits) * 1.15)
        draw_ticks(axes, [float(_LEAST)] * len(bits), INK, "least")
        draw_dots(axes, bits, [b < _LEAST for b in bits], FIRST, "proof")
        set_ordered_axes(axes, "norms with an exact proof, in the graph's order", "−log₂ of the error probability")
        title = (
            f"{len(certificates)} exact proofs; the probability that one of them is wrong is at most"
            f" 2^-{int(min(bits))} each."
        )
        caption = (
            "Before and after are the same function at every input and size: how unlikely it is that a proof is wrong."
        )
        return Plot(caption + _left_out_note(shown, certificates), title, figure_to_svg(figure, "proofs"))


def plot_rounding(certificates: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Plot onnxruntime's error against float64 for each norm, before and after the rewrite, in the model's type.

    Returns:
        a plot, or None if no norm was run.
    """
    ran = [c for c in certificates if c["rounding_after"] is not None and c["rounding_bound"] is not None]
    if not ran:
        return None
    shown = _select_values(ran, [not c["rounding_ok"] for c in ran], _CERTIFICATES)
    before, after, bounds = (
        [parse_number(c[f"rounding_{key}"]) for c in shown] for key in ("before", "after", "bound")
    )
    with open_figure(2.6) as (figure, axes):
        set_log_scale(axes, before + after + bounds)
        draw_ticks(axes, bounds, INK, "bound")
        draw_dots(axes, before, [False] * len(shown), SECOND, "before", shift=-0.16)
        draw_dots(axes, after, [not c["rounding_ok"] for c in shown], FIRST, "after", shift=0.16)
        set_ordered_axes(axes, "norms that onnxruntime ran, in the graph's order", "largest |error|")
        failed = sum(not c["rounding_ok"] for c in ran)
        title = (
            f"{len(ran)} norms in onnxruntime: the largest error is {_format_maximum(before)} before and "
            f"{_format_maximum(after)} after;"
            f" {failed} exceed."
        )
        caption = "Rounding in onnxruntime, in the model's own type, against float64."
        return Plot(caption + _left_out_note(shown, ran), title, figure_to_svg(figure, "rounding"))


def plot_op_counts(before: Mapping[str, int], after: Mapping[str, int]) -> Plot:
    """Plot the number of nodes by op type, before and after.

    The types with the largest change have their own bars.

    Returns:
        a plot with at most 12 types. One more bar has the sum of all other types.
    """
    names = sorted(
        before.keys() | after.keys(), key=lambda op: (-abs(before.get(op, 0) - after.get(op, 0)), -after.get(op, 0), op)
    )
    rows = [(_shorten_text(op), before.get(op, 0), after.get(op, 0)) for op in names[:_OPS]]
    if rest := names[_OPS:]:
        rows.append(
            (f"{len(rest)} other types", sum(before.get(op, 0) for op in rest), sum(after.get(op, 0) for op in rest))
        )
    with open_figure(0.7 + 0.3 * len(rows)) as (figure, axes):
        places = [-i for i in range(len(rows))]
        axes.barh(
            [p + 0.19 for p in places],
            [b for _, b, _ in rows],
            0.34,
            color=SECOND,
            label=f"before: {sum(before.values())} nodes",
        )
        axes.barh(
            [p - 0.19 for p in places],
            [a for _, _, a in rows],
            0.34,
            color=FIRST,
            label=f"after: {sum(after.values())} nodes",
        )
        for place, (_, b, a) in zip(places, rows, strict=True):
            axes.annotate(
                f"{b} → {a}",
                (max(a, b), place),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=MUTED,
                fontsize=9,
            )
        axes.set_yticks(places, [name for name, _, _ in rows])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.18, y=0.01)
        axes.set_xlim(left=0)
        draw_legend(axes)
        title = "; ".join(f"{name} {b} before, {a} after" for name, b, a in rows)
        return Plot("Nodes by op type.", title, figure_to_svg(figure, "ops"))


def plot_drift(runtime: str, points: Sequence[Mapping[str, Any]], place: int) -> Plot:
    """Plot a runtime's error at each tensor from the first to the last, with eager's error and the allowed error.

    Args:
        runtime: name of the runtime for texts.
        points: points of ``parity.drift``, in the file's order.
        place: number of the plot on the page, for unique ids.

    Returns:
        a plot with up to about 1,000 points. Failed points are marked.
    """
    wrong = [bool(p.get("reason")) or not parse_number(p["error"]) <= parse_number(p["allowed"]) for p in points]
    shown = _select_values(points, wrong, _POINTS)
    error, eager, allowed = ([parse_number(p[key]) for p in shown] for key in ("error", "eager", "allowed"))
    with open_figure(2.8) as (figure, axes):
        low = set_log_scale(axes, error + eager + allowed)
        x = range(1, len(shown) + 1)
        axes.plot(x, allowed, color=INK, linewidth=1, linestyle=(0, (4, 2)), label="allowed")
        axes.plot(x, [max(e, low) for e in eager], color=SECOND, linewidth=1.4, label="eager")
        axes.plot(x, [max(e, low) for e in error], color=FIRST, linewidth=1.4, label="this runtime")
        draw_dots(
            axes,
            error,
            [bool(p.get("reason")) or not e <= a for p, e, a in zip(shown, error, allowed, strict=True)],
            FIRST,
            "",
        )
        set_ordered_axes(axes, "boundaries of modules, from input to output", "largest |error|")
        first = next((p for p, w in zip(points, wrong, strict=True) if w), None)
        title = f"{len(points)} tensors in {runtime}: {sum(wrong)} exceed what is allowed"
        if first:
            title += f", the first is {_drift_point_label(first)}."
        else:
            title += f"; the last is off by {error[-1]:.1e}, allowed are {allowed[-1]:.1e}."
        caption = f"Error by layer in {runtime}, against float64."
        return Plot(caption + _left_out_note(shown, points), title, figure_to_svg(figure, f"drift{place}"))


def plot_race(norm: str, entries: Sequence[Mapping[str, Any]], place: int) -> Plot:
    """Plot median latencies as bars, samples as dots and the 95th percentile as a line, in milliseconds.

    Args:
        norm: norm that was timed; "" for whole models.
        entries: entries of ``race``.
        place: number of the plot on the page, for unique ids.

    Returns:
        a plot with one bar per entry.
    """
    with open_figure(0.6 + 0.62 * len(entries)) as (figure, axes):
        right = min(
            max(parse_number(e["p99"]) for e in entries) * 1.1,
            max(parse_number(e["median"]) for e in entries) * _FARTHEST,
        )
        for row, entry in enumerate(entries):
            median = parse_number(entry["median"])
            p95 = parse_number(entry["p95"])
            axes.barh(-row, median, 0.4, color=FIRST, alpha=0.35, linewidth=0)
            shown = [
                (parse_number(t), -row + _jitter_offset(i))
                for i, t in enumerate(entry["samples"])
                if parse_number(t) <= right
            ]
            draw_points(axes, [t for t, _ in shown], [y for _, y in shown], FIRST, 1.6)
            lines = [t for t in (median, p95) if t <= right]
            draw_segments(axes, lines, [-row - 0.27] * len(lines), lines, [-row + 0.27] * len(lines), INK, 1.2)
            title = f"{_shorten_text(_entry_label(entry), 48)}: {median:.3g} ms"
            axes.annotate(
                title, (0, -row + 0.27), (2, 2), textcoords="offset points", va="bottom", fontsize=9, color=INK
            )
        axes.set_xlim(0, right)
        axes.set_ylim(-len(entries) + 0.6, 0.72)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("ms; lines at the median and at 95 %")
        title = "; ".join(
            f"{_entry_label(e)}: median {parse_number(e['median']):.3g} ms, 95 % below {parse_number(e['p95']):.3g} ms"
            for e in entries
        )
        outside = sum(parse_number(t) > right for e in entries for t in e["samples"])
        caption = f"{norm or 'Latency'}, each call a dot" + (
            f"; {outside} slower ones are not shown." if outside else "."
        )
        return Plot(caption, title, figure_to_svg(figure, f"race{place}"))


def _select_values(values: Sequence[Mapping[str, Any]], bad: Sequence[bool], most: int) -> Sequence[Mapping[str, Any]]:
    """Return all values if there are few, or about ``most`` of them.

    The selection has evenly spaced values, and in addition up to half as many bad values.
    """
    if len(values) <= most:
        return values
    kept = {*range(0, len(values), math.ceil(len(values) / most)), *[i for i, b in enumerate(bad) if b][: most // 2]}
    return [values[i] for i in sorted(kept)]


def _left_out_note(shown: Sequence[Any], every: Sequence[Any]) -> str:
    if len(shown) < len(every):
        return f" {len(shown)} of {len(every)} are drawn."
    return ""


def _entry_label(entry: Mapping[str, Any]) -> str:
    return " · ".join(part for part in (entry["runtime"], entry.get("form"), entry.get("file")) if part)


def _drift_point_label(point: Mapping[str, Any]) -> str:
    return point.get("module") or point["tensor"]


def _format_maximum(values: Iterable[float]) -> str:
    known = [v for v in values if not math.isnan(v)]
    if known:
        return f"{max(known):.1e}"
    return "not known"


def _shorten_text(text: str, most: int = _NAME) -> str:
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def _jitter_offset(i: int) -> float:
    """Return an offset from -0.16 to 0.16 for sample ``i``.

    The offsets are multiples of the golden ratio, which spread any number of samples evenly.
    """
    return (i * 0.6180339887 % 1 - 0.5) * 0.32
