"""Draw norms as SVG diagrams of boxes and arrows.

Each node is one row below the lowest of its inputs. The diagrams use the page's colors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Place = tuple[float, float]

# Size of an arrow's bend in pixels: half the length of the shortest arrow. A larger bend would overlap the arrow
# itself.
_BEND = 8
# Number of letters that fit into a box
_LETTERS = 22


@dataclass(frozen=True)
class DiagramLayout:
    """Sizes of a diagram in pixels.

    Attributes:
        wide: width of a box.
        high: height of a box.
        across: distance between the centers of neighboring boxes in a row.
        down: distance between the centers of neighboring rows.
        gap: space between the head of an arrow and the box that it points to.
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
            columns: largest number of boxes in a row.

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
        """Draw an arrow from the lower edge of one box to the upper edge of another box.

        The arrow goes around the boxes of the rows between them.

        Args:
            start: center of the first box.
            end: center of the second box.
            center: x of the diagram's middle. The arrow goes around other boxes on the side of the middle on which most
                of the arrow lies.
            head: id of the SVG marker for the arrow's head.

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
        """Draw the frame of a box.

        Args:
            kind: CSS class.
            x: x of the center.
            y: y of the center.
            more: additional width.

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
        boxes: boxes as JSON (`normdeploy.findings.records.DiagramBox`), each after its inputs.
        head: id of the SVG marker for the arrows' heads, unique on the page.

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
    """Describe a diagram in words, for screen readers.

    Returns:
        ops of the nodes that belong to the norm, separated by spaces.
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
