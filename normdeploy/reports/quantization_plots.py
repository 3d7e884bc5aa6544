"""Draw the plots of a quantized model: the range of each layer's input, and the error that each layer causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plots import Plot, parse_number
from .svg_drawing import (
    BAD,
    FIRST,
    SECOND,
    draw_dots,
    draw_segments,
    figure_to_svg,
    open_figure,
    set_log_scale,
    set_ordered_axes,
    set_signed_scale,
)

# Maximum number of layers in a plot
_LAYERS = 1000


def plot_ranges(layers: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Plot the calibrated range of each quantized layer's input, from its smallest to its largest value.

    The axis is linear around zero and logarithmic beyond the median width, so that one wide layer does not hide the
    others.

    Returns:
        a plot, or None if no range is known.
    """
    told = [layer for layer in layers if layer["low"] is not None and layer["high"] is not None]
    if not told:
        return None
    shown = told[:_LAYERS]
    low, high = ([parse_number(layer[end]) for layer in shown] for end in ("low", "high"))
    widths = sorted(max(abs(a), abs(b)) for a, b in zip(low, high, strict=True))
    with open_figure(2.6) as (figure, axes):
        set_signed_scale(axes, widths[len(widths) // 2] or 1.0)
        x = [float(i) for i in range(1, len(shown) + 1)]
        if len(shown) <= 60:
            width = 5.0
        else:
            width = 2.0
        draw_segments(axes, x, low, x, high, FIRST, width, "range of the input")
        set_ordered_axes(axes, "quantized layers, in the graph's order", "value")
        widest = max(told, key=lambda layer: max(abs(parse_number(layer["low"])), abs(parse_number(layer["high"]))))
        ends = f"{parse_number(widest['low']):.3g} to {parse_number(widest['high']):.3g}"
        title = f"{len(told)} ranges; the widest is {ends}, of {_layer_label(widest)}."
        caption = "What calibration gave the input of each quantized layer: the wider, the coarser its steps."
        return Plot(caption + _left_out_note(shown, told), title, figure_to_svg(figure, "ranges"))


def plot_costs(layers: Sequence[Mapping[str, Any]]) -> Plot | None:
    """For each layer, plot the relative error of the outputs when only this layer is quantized.

    Layers that were left in float are marked.

    Returns:
        a plot, or None if no error was measured.
    """
    told = [layer for layer in layers if layer["error"] is not None]
    if not told:
        return None
    shown = told[:_LAYERS]
    errors = [parse_number(layer["error"]) for layer in shown]
    left = [layer["status"] == "float" for layer in shown]
    with open_figure(2.6) as (figure, axes):
        set_log_scale(axes, errors)
        draw_dots(axes, errors, left, FIRST, "quantized")
        if any(left):
            axes.plot([], [], color=BAD, marker="o", linewidth=0, markersize=4, label="left in float")
        typical = sorted(errors)[len(errors) // 2]
        axes.axhline(typical, color=SECOND, linewidth=1, label="median")
        set_ordered_axes(axes, "layers, in the graph's order", "relative error of the output")
        worst = max(told, key=lambda layer: parse_number(layer["error"]))
        title = (
            f"{len(told)} layers, each quantized alone: {_layer_label(worst)} costs most, "
            f"{parse_number(worst['error']):.1e}; the"
            f" median is {typical:.1e}; {sum(left)} were left in float."
        )
        caption = "What each layer costs when it alone is quantized, as the output's relative error on the samples."
        return Plot(caption + _left_out_note(shown, told), title, figure_to_svg(figure, "costs"))


def _layer_label(layer: Mapping[str, Any]) -> str:
    return str(layer["module"] or layer["tensor"])


def _left_out_note(shown: Sequence[Any], every: Sequence[Any]) -> str:
    if len(shown) < len(every):
        return f" {len(shown)} of {len(every)} are drawn."
    return ""
