"""Draw ``norm.svg``: a hand-written layer norm as torch exports it, and normdeploy's result.

    PYTHONPATH=. python docs/images/norm.py

The nodes and tensors of the two ONNX graphs are drawn as boxes and arrows; nothing is drawn by hand. A node is drawn
one row below the lowest of its inputs. The colors follow the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch

import normdeploy
from models.layer import Norm
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.reports.diagram_svg import DiagramLayout

LAYOUT = DiagramLayout(wide=128, high=28, across=150, down=48, gap=4)
STYLE = """
    svg { --ground: #ffffff; --line: #57606a; --text: #1f2328; --box: #f6f8fa; --norm: #ddf4ff; --edge: #0969da }
    @media (prefers-color-scheme: dark) {
      svg { --ground: #0d1117; --line: #8b949e; --text: #e6edf3; --box: #21262d; --norm: #12324f; --edge: #58a6ff }
    }
    .ground { fill: var(--ground) }
    rect.box { fill: var(--box); stroke: var(--line) }
    rect.norm { fill: var(--norm); stroke: var(--edge); stroke-width: 2 }
    path { fill: none; stroke: var(--line) }
    marker path { fill: var(--line); stroke: none }
    text { fill: var(--text); font: 13px system-ui, sans-serif; text-anchor: middle }
    text.small { font-size: 11px }
    text.title { font-size: 15px; font-weight: 600 }"""


def rows_of(graph: onnx.GraphProto) -> tuple[dict[str, int], list[list[str]]]:
    """Assign a row to every tensor that is data; the graph's input has row 0.

    Returns:
        tensor -> row, and the tensors of each row.
    """
    row = {graph.input[0].name: 0}
    for node in graph.node:
        above = [row[name] for name in node.input if name in row]
        if above:
            row[node.output[0]] = max(above) + 1
    rows: list[list[str]] = [[] for _ in range(max(row.values()) + 1)]
    for name, at in row.items():
        rows[at].append(name)
    return row, rows


def drawn(graph: onnx.GraphProto, left: float, top: float, columns: int) -> list[str]:
    """Draw a graph that is ``columns`` boxes wide.

    Returns:
        SVG elements.
    """
    maker = {node.output[0]: node for node in graph.node}
    row, rows = rows_of(graph)
    names = [name for members in rows for name in members]
    place = dict(zip(names, LAYOUT.box_centers([row[name] for name in names], left, top, columns), strict=True))
    center = left + columns * LAYOUT.across / 2
    edges = [
        (name, to) for to, node in maker.items() if to in place for name in dict.fromkeys(node.input) if name in place
    ]
    lines = [LAYOUT.draw_arrow(place[name], place[to], center, "head") for name, to in edges]
    return lines + [
        box(maker[name].op_type if name in maker else name, *at, name in maker) for name, at in place.items()
    ]


def box(text: str, x: float, y: float, node: bool) -> str:
    """Draw a node as a box, or the name of a tensor.

    Returns:
        SVG elements.
    """
    if not node:
        return f'<text x="{x:g}" y="{y + 5:g}">{text}</text>'
    norm = text.endswith("Normalization")
    frame = LAYOUT.draw_frame("box norm" if norm else "box", x, y, 22 if norm else 0)
    return f'{frame}<text x="{x:g}" y="{y + 5:g}">{text}</text>'


def picture(before: onnx.GraphProto, after: onnx.GraphProto, said: str) -> str:
    """Draw both graphs.

    Args:
        said: text below the second graph.

    Returns:
        SVG text.
    """
    rows = rows_of(before)[1]
    columns, data, top = max(map(len, rows)), sum(map(len, rows)) - 1, 92
    center, middle = columns * LAYOUT.across / 2 + 20, columns * LAYOUT.across + 40
    right, height = middle + 2 * LAYOUT.across, top - 16 + LAYOUT.down * len(rows)
    body = [
        f'<text class="title" x="{center:g}" y="28">torch\'s exporter: {len(before.node)} nodes</text>',
        (
            f'<text class="small" x="{center:g}" y="48">{data} on the data; {len(before.node) - data} constants and'
            " shapes not drawn</text>"
        ),
        f'<text class="title" x="{middle + LAYOUT.across:g}" y="28">normdeploy: {len(after.node)} node</text>',
        *drawn(before, 20, top, columns),
        *drawn(after, middle, top, 2),
    ]
    for i, line in enumerate(said.split("\n")):
        body.append(
            f'<text class="small" x="{middle + LAYOUT.across:g}" y="{top + 2 * LAYOUT.down + 4 + 18 * i}">{line}</text>'
        )
    head = 'viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:g} {height:g}" width="{right:g}"'
            f' height="{height:g}" role="img">'
        ),
        "<title>A layer norm written by hand: the graph before and after</title>",
        f"<style>{STYLE}\n</style>",
        f'<defs><marker id="head" {head}><path d="M0 0L8 4L0 8z"/></marker></defs>',
        '<rect class="ground" width="100%" height="100%" rx="8"/>',
        *body,
        "</svg>\n",
    ]
    return "\n".join(lines)


def graphs() -> tuple[onnx.GraphProto, onnx.GraphProto, str]:
    """Export a norm and optimize it.

    Returns:
        the exported graph, the optimized graph, and a sentence about the proof.
    """
    model = from_module(
        Norm(24).eval(), (torch.randn(2, 5, 24),), {}, inputs=["x[batch,seq,24]"], dims=["batch=1:2:8", "seq=1:5:16"]
    )
    raw = export_to_proto(model)
    result = normdeploy.optimize(raw)
    (finding,) = result.summary.findings
    proof = finding.certificate
    assert proof is not None
    assert proof.method == "exact"
    told = f"epsilon {finding.epsilon:g}, scale and shift inside\nproved equal; only rounding differs"
    return raw.graph, result.proto.graph, told


if __name__ == "__main__":
    Path(__file__).with_name("norm.svg").write_text(picture(*graphs()))
