"""Draw ``speed.svg``, a chart of speed-ups, from the JSON of ``benchmarks/results``.

    PYTHONPATH=. python docs/images/speed.py

Each bar is the time of torch's export divided by the time of normdeploy's file, in onnxruntime on a CPU. An int8 bar
divides the time of normdeploy's float32 file instead. `claims` lists the same figures in the words of the README.
`tests/test_docs.py` compares the chart and the README with the current JSON. The colors follow the reader's light or
dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LEFT, TOP, ROW, SCALE, LIMIT = 280, 64, 22, 110, 4.5
"""Pixels: left end of the bars, first row, height of a row, length of a ratio of 1. The axis ends at a ratio of 4.5."""

BLOCKS = {
    "resnet_block": "ResNet block",
    "unet_block": "UNet block",
    "llama_block": "Llama block",
    "dit_block": "DiT block",
    "convnext_block": "ConvNeXt block",
}
# Names of two measured files: with all layers in int8, and with the least accurate layers kept in float32.
INT8 = ("normdeploy int8, onnxruntime", "normdeploy int8, onnxruntime, nearest:0.97 cosine:0.995")
STYLE = """
    svg { --ground: #ffffff; --line: #57606a; --text: #1f2328; --bar: #54aeff; --grid: #d0d7de }
    @media (prefers-color-scheme: dark) {
      svg { --ground: #0d1117; --line: #8b949e; --text: #e6edf3; --bar: #1f6feb; --grid: #30363d }
    }
    .ground { fill: var(--ground) }
    rect.bar { fill: var(--bar) }
    line.grid { stroke: var(--grid) }
    line.one { stroke: var(--line); stroke-width: 2 }
    text { fill: var(--text); font: 13px system-ui, sans-serif }
    text.name { text-anchor: end }
    text.small { font-size: 11px }
    text.title { font-size: 15px; font-weight: 600 }
    text.group { font-weight: 600; text-anchor: end }
    text.middle { font-size: 11px; text-anchor: middle }"""


@dataclass(frozen=True)
class Bar:
    """One measured ratio.

    Attributes:
        faster: time of the other file divided by the time of normdeploy's file.
    """

    name: str
    faster: float


def read_results(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


def single_norms() -> list[Bar]:
    """List the norms that were benchmarked alone at usual sizes, with the largest speed-up first."""
    alone = [row for row in read_results("race.json")["models"] if "×" in row["model"]]
    bars = [Bar(row["model"].replace(", wide", "").replace(" by hand", ""), row["faster"]) for row in alone]
    return sorted(bars, key=lambda bar: -bar.faster)


def torch_norm() -> Bar:
    """Return torch's own LayerNorm, which its exporter writes as one node."""
    rows = {row["model"]: row for row in read_results("race.json")["models"]}
    return Bar("nn.LayerNorm, one node already", rows["S2a_torch"]["faster"])


def blocks() -> list[Bar]:
    rows = {row["model"]: row for row in read_results("race.json")["models"]}
    return [Bar(title, rows[name]["faster"]) for name, title in BLOCKS.items()]


def whole_model_times() -> dict[str, float]:
    """Return the time of each whole model at batch 1, divided by the time of the plain export."""
    rows = read_results("whole_models.json")["rows"]
    return {row["model"]: row["ratios"]["--runtime onnxruntime"]["1"][0] for row in rows}


def whole_models() -> list[Bar]:
    times = whole_model_times()
    best, worst = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    return [
        Bar(f"fastest: {best}", 1 / times[best]),
        Bar(f"median of {len(times)}", 1 / median(times.values())),
        Bar(f"slowest: {worst}", 1 / times[worst]),
    ]


def int8_models() -> list[Bar]:
    files = read_results("quantization.json")["models"]["minilm"]
    return [
        Bar("MiniLM, {} of {} layers".format(*files[name]["linears"]), files[name]["faster"]["1"][0]) for name in INT8
    ]


def groups() -> dict[str, list[Bar]]:
    """Return the bars of the picture under their titles, top to bottom."""
    return {
        "One norm": [*single_norms(), torch_norm()],
        "One block": blocks(),
        "Whole model": whole_models(),
        "int8, against float32": int8_models(),
    }


def claims() -> list[str]:
    """List the phrases with figures that the README has to contain."""
    norms = [bar.faster for bar in single_norms()]
    times = sorted(whole_model_times().values())
    held = read_results("quantization.json")["models"]["minilm"][INT8[1]]
    return [
        f"{min(norms):.1f} to {max(norms):.1f} times faster",
        f"median of {median(times):.2f} of the plain export's time",
        f"{len(times)} models, {times[0]:.2f} to {times[-1]:.2f}",
        f"{held['faster']['1'][0]:.1f} times faster than float32",
        f"{held['linears'][0]} of {held['linears'][1]} layers",
        f"{held['measures']['nearest kept']:.0%} of nearest neighbors".replace("%", " %"),
    ]


def draw_group(title: str, bars: Iterable[Bar], top: float) -> list[str]:
    lines = [f'<text class="group" x="{LEFT - 10}" y="{top + 15:g}">{escape(title)}</text>']
    for i, bar in enumerate(bars, 1):
        y = top + ROW * i
        end = LEFT + SCALE * bar.faster
        lines += [
            f'<text class="name" x="{LEFT - 10}" y="{y + 15:g}">{escape(bar.name)}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y + 4:g}" width="{SCALE * bar.faster:.1f}" height="{ROW - 8}" rx="2"/>',
            f'<text class="small" x="{end + 6:.1f}" y="{y + 15:g}">{bar.faster:.2f}</text>',
        ]
    return lines


def picture() -> str:
    """Return the chart as SVG."""
    body: list[str] = []
    top = float(TOP)
    for title, bars in groups().items():
        body += draw_group(title, bars, top)
        top += ROW * (len(bars) + 1) + 8
    wide, high = LEFT + SCALE * LIMIT + 30, top + 30
    grid = []
    for ratio in range(5):
        x = LEFT + SCALE * ratio
        kind = "one" if ratio == 1 else "grid"
        grid.append(f'<line class="{kind}" x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{top:g}"/>')
        label = "1 (no gain)" if ratio == 1 else f"{ratio}"
        grid.append(f'<text class="middle" x="{x}" y="{top + 16:g}">{label}</text>')
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}"'
            f' height="{high:g}" role="img">'
        ),
        "<title>How many times faster normdeploy's files run in onnxruntime on a CPU</title>",
        f"<style>{STYLE}\n</style>",
        '<rect class="ground" width="100%" height="100%" rx="8"/>',
        '<text class="title" x="20" y="28">Times faster in onnxruntime on a CPU, one thread</text>',
        (
            '<text class="small" x="20" y="46">against the file of torch\'s exporter; int8 against normdeploy\'s'
            " float32 file; models at batch 1</text>"
        ),
        *grid,
        *body,
        "</svg>\n",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("speed.svg").write_text(picture())
