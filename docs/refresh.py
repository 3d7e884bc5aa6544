"""Run the code and the commands of a page in an empty folder, and write the commands' output into the page.

    python -m docs.refresh docs/tutorials/custom-norm.md docs/tutorials/unet-block.md ...

All ```python blocks of a page run in one namespace. A block whose first line is a comment with a file name (``#
net.py``) is saved under that name instead. In a ```console block each line that begins with ``$`` is run by bash, and
its output replaces the text below it. Everything runs in the order of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w.-]+\.py)\n")


@dataclass(frozen=True)
class Block:
    """Fenced block of a page.

    Attributes:
        start: offset in the page at which the block's text begins.
            end: offset in the page at which the block's text ends.
    """

    language: str
    text: str
    start: int
    end: int

    @property
    def file(self) -> str:
        """Return the file name under which the block is saved; "" if the block is run."""
        named = _FILE.match(self.text) if self.language == "python" else None
        return named[1] if named else ""

    @property
    def commands(self) -> list[str]:
        """Return the commands of a console block, without the prompts."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> Iterator[Block]:
    """Find the fenced blocks of a page that begin at the left margin.

    Returns:
        iterator over the blocks.
    """
    return (Block(m[1], m[2], m.start(2), m.end(2)) for m in _FENCE.finditer(page))


def run_python(block: Block, names: dict[str, Any], where: str) -> None:
    """Run a block in the namespace ``names``, or save it in the working folder.

    Args:
        where: name of the code in tracebacks.
    """
    if block.file:
        Path(block.file).write_text(block.text)
    else:
        exec(compile(block.text, where, "exec"), names)


def refreshed(page: str, where: str) -> str:
    """Run a page in the working folder.

    Returns:
        the page with the output that its commands print now.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    parts, done = [], 0
    for block in blocks(page):
        if block.language == "python":
            run_python(block, names, where)
        if block.language == "console":
            parts += [page[done : block.start], "".join(f"$ {c}\n{_output(c)}" for c in block.commands)]
            done = block.end
    return "".join([*parts, page[done:]])


def _output(command: str) -> str:
    """Return the output of a command, ended by a newline; "" if it prints nothing.

    Raises:
        RuntimeError: the command failed in a way that no page should show.
    """
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": os.path.abspath(".state"),
        "OMP_NUM_THREADS": "1",
    }
    shell = ["bash", "-c", command]
    done = subprocess.run(
        shell, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if "Traceback (most recent call last)" in done.stdout:
        raise RuntimeError(f"{command} failed:\n{done.stdout}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    text = "\n".join(lines).strip("\n")
    return f"{text}\n" if text else ""


def main(pages: list[str]) -> None:
    """Refresh each page in a new temporary folder."""
    for name in pages:
        path = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            sys.path.insert(0, folder)
            text = refreshed(path.read_text(), name).replace(f"{folder}/", "")
            sys.path.remove(folder)
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
