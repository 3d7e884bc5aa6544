"""Pictures of norms as SVG, in the page's own colours: boxes and arrows, each node one row below the lowest of those that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDE, _HIGH, _ACROSS, _DOWN = 150, 26, 166, 46  # of a box, and from one to the next
_BEND = 8
_LETTERS = 22  # that fit a box


def svg(boxes: Sequence[Mapping[str, Any]], head: str) -> str:
    """The picture of ``boxes`` (``records.Box`` as JSON). ``head``: an id of its own for the arrow's head."""
    row: list[int] = []
    for box in boxes:
        row.append(max((row[i] + 1 for i in box["inputs"] if i < len(row)), default=0))
    rows: dict[int, list[int]] = {}
    for i, at in enumerate(row):
        rows.setdefault(at, []).append(i)
    columns = max(map(len, rows.values()), default=1)
    width, height = columns * _ACROSS + 40, (max(row, default=0) + 1) * _DOWN
    place: dict[int, tuple[float, float]] = {}
    for at, members in rows.items():
        left = (width - len(members) * _ACROSS) / 2 + _ACROSS / 2
        place |= {i: (left + k * _ACROSS, at * _DOWN + _DOWN / 2) for k, i in enumerate(members)}
    arrows = [_arrow(place[i], place[k], width / 2, head) for k, box in enumerate(boxes) for i in box["inputs"] if i < k]
    marker = (
        f'<defs><marker id="{head}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    drawn = [_box(box, *place[i]) for i, box in enumerate(boxes)]
    size = f'viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px"'
    return f'<svg class="graph" {size} aria-hidden="true">{marker}{"".join(arrows)}{"".join(drawn)}</svg>'


def said(boxes: Sequence[Mapping[str, Any]]) -> str:
    """The norm's own ops in words, for who does not see the picture."""
    return " ".join(box["op"] for box in boxes if box["own"]) or "nothing is left of it"


def _arrow(start: tuple[float, float], end: tuple[float, float], center: float, head: str) -> str:
    """From the lower edge of a box to the upper edge of another; around the outside of the boxes in rows between."""
    (x, y), (to_x, to_y) = (start[0], start[1] + _HIGH / 2), (end[0], end[1] - _HIGH / 2 - 3)
    side = 0.0 if to_y - y < _DOWN else 1.0 if x + to_x > 2 * center else -1.0
    to_x += side * _WIDE / 4
    aside = side * _WIDE * 0.6
    bends = f"{x + aside:g} {y + _BEND:g} {to_x + aside:g} {to_y - _BEND:g}"
    return f'<path d="M{x:g} {y:g} C{bends} {to_x:g} {to_y:g}" marker-end="url(#{head})"/>'


def _box(box: Mapping[str, Any], x: float, y: float) -> str:
    name = str(box["op"] or box["name"])
    text = escape(name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…")
    said = f'<text x="{x:g}" y="{y + 4:g}">{text}<title>{escape(name)}</title></text>'
    if not box["op"]:
        return said
    kind = "own" if box["own"] else "beside"
    return f'<rect class="{kind}" x="{x - _WIDE / 2:g}" y="{y - _HIGH / 2:g}" width="{_WIDE}" height="{_HIGH}" rx="6"/>{said}'
