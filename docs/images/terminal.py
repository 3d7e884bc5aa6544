"""Record ``terminal.svg``: the output of `bisect` on two wrong files.

    PYTHONPATH=. python docs/images/terminal.py

The model is the model of the README. The first file is torch's export, which has lost the norm's epsilon. The second
file is normdeploy's export, with one weight changed by 0.1 %. `tests/test_docs.py` runs the commands again and compares
the text.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from xml.etree import ElementTree

import onnx
from rich.console import Console
from rich.text import Text

import normdeploy
from docs.refresh import ROOT, blocks, run_python

PICTURE = Path(__file__).with_name("terminal.svg")
COMMANDS = ("normdeploy bisect model.pt2 plain.onnx", "normdeploy bisect model.pt2 damaged.onnx")
COLUMNS = 112
# SVG template: rich's template, without the font that it loads from a server.
TEMPLATE = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>normdeploy bisect finds a lost epsilon and a changed weight</title>
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def prepare() -> None:
    """Write model.pt2, plain.onnx and damaged.onnx to the working folder."""
    page = (ROOT / "README.md").read_text()
    first = next(block for block in blocks(page) if block.language == "python")
    run_python(first, {"__name__": "__main__"}, "README.md")
    normdeploy.export("model.pt2", output="damaged.onnx")
    damage(Path("damaged.onnx"))


def damage(file: Path) -> None:
    """Change one element of the linear layer's weight by 0.1 %."""
    proto = onnx.load(file)
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "head.weight")
    values = onnx.numpy_helper.to_array(weight).copy()
    values[2, 5] *= 1.001
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, file)


def run(command: str) -> str:
    """Run a command as in a terminal of `COLUMNS` columns.

    Returns:
        its standard output with the escape codes of colors.
    """
    terminal = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": os.path.abspath(".state"),
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
    }
    done = subprocess.run(command.split(), env=os.environ | terminal, capture_output=True, text=True, check=False)
    return done.stdout.strip("\n")


def record() -> str:
    """Run the commands in an empty folder.

    Returns:
        the picture as SVG text.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder), open(os.devnull, "w") as nowhere:
        prepare()
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, highlight=False)
        for i, command in enumerate(COMMANDS):
            if i:
                console.print()
            console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            console.print(Text.from_ansi(run(command)))
    return console.export_svg(title="normdeploy", code_format=TEMPLATE, unique_id="terminal")


def read_text(svg: str) -> str:
    """Read a recorded picture.

    Returns:
        the lines of the terminal, without its title.
    """
    matrix = next(group for group in ElementTree.fromstring(svg).iter() if group.get("class") == "terminal-matrix")
    lines: dict[float, list[tuple[float, str]]] = {}
    for part in matrix.iter():
        if part.text and part.text.strip():
            lines.setdefault(float(part.attrib["y"]), []).append((float(part.attrib["x"]), part.text))
    rows = (" ".join(text for _, text in sorted(parts)) for _, parts in sorted(lines.items()))
    return "\n".join(rows).replace("\xa0", " ")


if __name__ == "__main__":
    PICTURE.write_text(record())
