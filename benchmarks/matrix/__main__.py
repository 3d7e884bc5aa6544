"""Command line of ``benchmarks.matrix``, and its table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .cells import CORE, PYTHON, TORCH, Cell, run, tool, write_lock

RESULTS = Path(__file__).resolve().parents[1] / "results"
_HEAD = """# Versions

``make test-matrix`` (``python -m benchmarks.matrix``) writes this page: the core tests with each torch on each
Python, each installed in an environment of its own from the lock ``benchmarks/matrix/torch-VERSION.txt``, as the
package registry serves it (on Linux torch with CUDA; no GPU was there). A cell tells passed and skipped tests.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cells and write the page.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.matrix", description="The core tests on each torch and Python."
    )
    parser.add_argument("--torch", action="append", choices=TORCH, help="only these")
    parser.add_argument("--python", action="append", choices=PYTHON, help="only these")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .venv-matrix")
    parser.add_argument("--lock", action="store_true", help="write the locks anew and run nothing")
    chosen = parser.parse_args(arguments)
    uv = tool()
    if chosen.lock:
        for torch in chosen.torch or TORCH:
            write_lock(uv, torch)
        return 0
    file = RESULTS / "matrix.json"
    cells = {(cell.torch, cell.python): cell for cell in read(file)}
    ended = []
    for torch in chosen.torch or TORCH:
        for python in chosen.python or PYTHON:
            print(f"torch {torch}, Python {python}", flush=True)
            ended.append(run(uv, torch, python, keep=chosen.keep))
            cells[torch, python] = ended[-1]
            file.write_text(json.dumps([asdict(cells[key]) for key in sorted(cells)], indent=1) + "\n")
            file.with_suffix(".md").write_text(page(cells.values()))
    print(table(ended))
    return 0 if all(ended) else 1


def read(file: Path) -> list[Cell]:
    """Read the cells of earlier calls.

    Returns:
        cells.
    """
    if not file.is_file():
        return []
    return [Cell(**cell | {"failed": tuple(cell["failed"])}) for cell in json.loads(file.read_text())]


def page(cells: Iterable[Cell]) -> str:
    """Write the page: the table, failures and cells that were not run.

    Returns:
        Markdown.
    """
    held = list(cells)
    parts = [_HEAD, table(held)]
    parts += [f"- torch {c.torch}, Python {c.python}: `{name}` failed" for c in held for name in c.failed]
    parts += [f"- torch {c.torch}, Python {c.python} was not run: {c.reason}" for c in held if c.reason]
    parts += [""] if any(c.failed or c.reason for c in held) else []
    versions = sorted({f"torch {c.versions['torch']}: {_others(c)}" for c in held if c.versions})
    parts += ["Installed with:", "", *(f"- {text}" for text in versions), ""]
    parts += [f"The core tests: {', '.join(f'`{name}`' for name in CORE)} of `tests/`."]
    return "\n".join(parts) + "\n"


def table(cells: Iterable[Cell]) -> str:
    """Format one row for each torch and one column for each Python.

    Returns:
        Markdown.
    """
    held = {(cell.torch, cell.python): cell for cell in cells}
    torches, pythons = (
        [v for v in versions if any(key[i] == v for key in held)] for i, versions in enumerate((TORCH, PYTHON))
    )
    rows = [["torch", *(f"Python {p}" for p in pythons)], ["---"] * (len(pythons) + 1)]
    rows += [[torch, *(_cell(held.get((torch, p))) for p in pythons)] for torch in torches]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _cell(cell: Cell | None) -> str:
    if cell is None or cell.reason:
        return "not run"
    failed = f"**{len(cell.failed)} failed**, " if cell.failed else ""
    return f"{failed}{cell.passed} passed, {cell.skipped} skipped; {cell.seconds:.0f} s ({cell.day})"


def _others(cell: Cell) -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in cell.versions.items() if name not in ("torch", "python"))
        + f" (Python {cell.versions['python']})"
    )


if __name__ == "__main__":
    sys.exit(main())
