"""Draw norms as SVG in the page's colors: boxes and arrows, each node one row below the lowest of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Place = tuple[float, float]

# Half the length of the shortest arrow; a larger bend would run back over the arrow.
_BEND = 8
# Letters that fit in a box.
_LETTERS = 22


@dataclass(frozen=True)
class DiagramLayout:
    """Sizes of a diagram in pixels.

    Attributes:
        wide: width of a box.
        high: height of a box.
        across: step from one box to the next in a row.
        down: step from one row to the next.
        gap: space between an arrow's head and its box.
    """

    wide: float = 150
    high: float = 26
    across: float = 166
    down: float = 46
    gap: float = 3

    def box_centers(self, rows: Sequence[int], left: float, top: float, columns: int) -> list[Place]:
        """Compute the centers of boxes, with each row centered.

        Args:
            rows: row of each box, 0 at the top.
            left: left edge of the diagram.
            top: center of the first row.
            columns: most boxes in a row.

        Returns:
            (x, y) of each box.
        """
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
        """Draw an arrow from the lower edge of one box to the upper edge of another. It goes around the boxes of rows
        between them.

        Args:
            start: center of the first box.
            end: center of the second box.
            center: x of the diagram's middle; the arrow passes on its own side of it.
            head: id of the arrow's head.

        Returns:
            an SVG path.
        """
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
        """Draw the frame of a box around a center.

        Args:
            kind: CSS class.
            x: of the center.
            y: of the center.
            more: extra width.

        Returns:
            an SVG rectangle.
        """
        wide = self.wide + more
        return (
            f'<rect class="{kind}" x="{x - wide / 2:g}" y="{y - self.high / 2:g}" width="{wide:g}"'
            f' height="{self.high:g}" rx="6"/>'
        )


_PAGE = DiagramLayout()


def draw_diagram(boxes: Sequence[Mapping[str, Any]], head: str) -> str:
    """Draw boxes and their arrows.

    Args:
        boxes: ``records.DiagramBox`` as JSON, each after its inputs.
        head: id of the arrow's head, unique on the page.

    Returns:
        an SVG element.
    """
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
    """Describe a diagram for readers who can't see it.

    Returns:
        the norm's own ops, separated by spaces.
    """
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
