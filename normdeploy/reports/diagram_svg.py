"""Pictures of norms as SVG, in the page's own colours: boxes and arrows, each node one row below the lowest of those
that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Place = tuple[float, float]

# half the length of the shortest arrow: with more it would run back over itself
_BEND = 8
# that fit a box
_LETTERS = 22


@dataclass(frozen=True)
class DiagramLayout:
    """Width and height of a box, the steps from one to the next, and the gap between an arrow's head and its box."""

    wide: float = 150
    high: float = 26
    across: float = 166
    down: float = 46
    gap: float = 3

    def box_centers(self, rows: Sequence[int], left: float, top: float, columns: int) -> list[Place]:
        """The centres of boxes that stand in ``rows``, each row in the middle of as many ``columns``; ``top``: the
        first row's centre."""
        seen: dict[int, int] = {}
        boxes = []
        for at in rows:
            seen[at] = seen.get(at, -1) + 1
            boxes.append(
                (
                    left + (columns - rows.count(at)) * self.across / 2 + self.across / 2 + seen[at] * self.across,
                    top + at * self.down,
                )
            )
        return boxes

    def draw_arrow(self, start: Place, end: Place, center: float, head: str) -> str:
        """From the lower edge of a box to the upper edge of another; around the outside of the boxes in rows
        between."""
        (x, y), (to_x, to_y) = (start[0], start[1] + self.high / 2), (end[0], end[1] - self.high / 2 - self.gap)
        if to_y - y < self.down:
            side = 0.0
        elif x + to_x > 2 * center:
            side = 1.0
        else:
            side = -1.0
        to_x += side * self.wide / 4
        aside = side * self.wide * 0.6
        bends = f"{x + aside:g} {y + _BEND:g} {to_x + aside:g} {to_y - _BEND:g}"
        return f'<path d="M{x:g} {y:g} C{bends} {to_x:g} {to_y:g}" marker-end="url(#{head})"/>'

    def draw_frame(self, kind: str, x: float, y: float, more: float = 0) -> str:
        """A box around a place, ``more`` wider than others."""
        wide = self.wide + more
        return (
            f'<rect class="{kind}" x="{x - wide / 2:g}" y="{y - self.high / 2:g}" width="{wide:g}"'
            f' height="{self.high:g}" rx="6"/>'
        )


_PAGE = DiagramLayout()


def draw_diagram(boxes: Sequence[Mapping[str, Any]], head: str) -> str:
    """The picture of ``boxes`` (``records.Box`` as JSON). ``head``: an id of its own for the arrow's head."""
    row: list[int] = []
    for box in boxes:
        row.append(max((row[i] + 1 for i in box["inputs"] if i < len(row)), default=0))
    columns = max(map(row.count, row), default=1)
    width = columns * _PAGE.across + 40
    height = (max(row, default=0) + 1) * _PAGE.down
    place = _PAGE.box_centers(row, 20, _PAGE.down / 2, columns)
    arrows = [
        _PAGE.draw_arrow(place[i], place[k], width / 2, head)
        for k, box in enumerate(boxes)
        for i in box["inputs"]
        if i < k
    ]
    marker = (
        f'<defs><marker id="{head}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    drawn = [_draw_box(box, *place[i]) for i, box in enumerate(boxes)]
    size = f'viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px"'
    return f'<svg class="graph" {size} aria-hidden="true">{marker}{"".join(arrows)}{"".join(drawn)}</svg>'


def diagram_caption(boxes: Sequence[Mapping[str, Any]]) -> str:
    """The norm's own ops in words, for who does not see the picture."""
    return " ".join(box["op"] for box in boxes if box["own"]) or "nothing is left of it"


def _draw_box(box: Mapping[str, Any], x: float, y: float) -> str:
    name = str(box["op"] or box["name"])
    text = escape(name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…")
    label = f'<text x="{x:g}" y="{y + 4:g}">{text}<title>{escape(name)}</title></text>'
    if not box["op"]:
        return label
    if box["own"]:
        kind = "own"
    else:
        kind = "beside"
    return f"{_PAGE.draw_frame(kind, x, y)}{label}"
