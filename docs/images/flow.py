"""Draw ``flow.svg``: the path of a model through the folders of ``normdeploy/`` (docs/explanation/architecture.md).

    PYTHONPATH=. python docs/images/flow.py

Each box is a folder or a file; `tests/test_docs.py` checks that it exists. The colors follow the reader's light or dark
mode.
"""

from __future__ import annotations

from pathlib import Path

WIDE, HIGH, ACROSS, DOWN = 176, 46, 200, 84
# (folders, their work) of each box, in the order of a model's path; four boxes per line.
WAY = (
    ("loading/", "a file told from its bytes"),
    ("exporting/", "torch's program to ONNX"),
    ("storage/ graphs/", "a graph, weights held once"),
    ("recognition/", "asks values, proposes norms"),
    ("forms/", "the forms of a norm"),
    ("proof/", "one function? decides"),
    ("rewriting/", "writes, runs, seals"),
    ("storage/", "written whole or not at all"),
)
# Boxes next to the path: folders that support it, and folders that use the resulting file.
BESIDE = (
    ("evaluate/", "ops in float64"),
    ("norms/ contrib/", "tables of norm ops"),
    ("precision/", "half precision"),
    ("runtimes/ engines/", "runs it, builds engines"),
    ("verbs/", "a folder for each verb"),
    ("cli/", "the verbs as commands"),
    ("reports/", "JSON, the page, charts"),
)
STYLE = """
    svg { --ground: #ffffff; --line: #57606a; --text: #1f2328; --box: #f6f8fa; --way: #ddf4ff; --edge: #0969da }
    @media (prefers-color-scheme: dark) {
      svg { --ground: #0d1117; --line: #8b949e; --text: #e6edf3; --box: #21262d; --way: #12324f; --edge: #58a6ff }
    }
    .ground { fill: var(--ground) }
    rect.box { fill: var(--box); stroke: var(--line) }
    rect.way { fill: var(--way); stroke: var(--edge) }
    path { fill: none; stroke: var(--line) }
    marker path { fill: var(--line); stroke: none }
    text { fill: var(--text); font: 13px system-ui, sans-serif; text-anchor: middle }
    text.small { font-size: 11px }
    text.title { font-size: 13px; font-weight: 600; text-anchor: start }"""


def box(kind: str, folders: str, said: str, x: float, y: float) -> str:
    """Draw a box with its upper left corner at (x, y).

    Returns:
        SVG elements.
    """
    middle = x + WIDE / 2
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="6"/><text x="{middle:g}"'
        f' y="{y + 19:g}">{folders}</text><text class="small" x="{middle:g}" y="{y + 36:g}">{said}</text>'
    )


def arrow(points: str) -> str:
    """Draw an arrow along a path.

    Returns:
        SVG element.
    """
    return f'<path d="{points}" marker-end="url(#head)"/>'


def picture() -> str:
    """Draw the whole diagram.

    Returns:
        SVG text.
    """
    left, top, beside = 20.0, 44.0, 44.0 + 2 * DOWN + 34
    body = [f'<text class="title" x="{left:g}" y="28">The way of a model</text>']
    for i, (folders, said) in enumerate(WAY):
        x, y = left + ACROSS * (i % 4), top + DOWN * (i // 4)
        body.append(box("way", folders, said, x, y))
        if i % 4:
            body.append(arrow(f"M{x - ACROSS + WIDE:g} {y + HIGH / 2:g}H{x - 4:g}"))
        elif i:
            turn = y - (DOWN - HIGH) / 2
            body.append(
                arrow(f"M{left + 3 * ACROSS + WIDE / 2:g} {y - DOWN + HIGH:g}V{turn:g}H{x + WIDE / 2:g}V{y - 4:g}")
            )
    body.append(
        f'<text class="title" x="{left:g}" y="{beside - 14:g}">What it leans on, and what is done with the file</text>'
    )
    for i, (folders, said) in enumerate(BESIDE):
        body.append(box("box", folders, said, left + ACROSS * (i % 4), beside + (HIGH + 14) * (i // 4)))
    wide, high = 2 * left + 3 * ACROSS + WIDE, beside + 2 * HIGH + 34
    head = 'viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}"'
            f' height="{high:g}" role="img">'
        ),
        "<title>The way of a model through the folders of normdeploy</title>",
        f"<style>{STYLE}\n</style>",
        f'<defs><marker id="head" {head}><path d="M0 0L8 4L0 8z"/></marker></defs>',
        '<rect class="ground" width="100%" height="100%" rx="8"/>',
        *body,
        "</svg>\n",
    ]
    return "\n".join(lines)


def folders() -> list[str]:
    """List every folder and file named in the diagram.

    Returns:
        paths below ``normdeploy/``.
    """
    return [name for named, _ in (*WAY, *BESIDE) for name in named.split()]


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(picture())
