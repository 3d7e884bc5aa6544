"""Command line of the corpus (see the package's docstring)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import traceback
from pathlib import Path

import onnx

from . import others, table
from .derived import derived
from .entry import MANIFEST, Entry, as_json, foreign, from_json
from .ours import Row, measured
from .torch_files import cases, written
from .worker import TOOLS


def write(folder: Path, every: int) -> None:
    """Export all files into ``folder``."""
    logging.disable(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    torch_made = list(written(cases()[::every]))
    entries: list[Entry] = []
    for entry, proto in (*torch_made, *foreign(), *derived(torch_made)):
        onnx.save(proto, folder / f"{entry.name}.onnx")
        entries.append(entry)
    (folder / MANIFEST).write_text(as_json(entries))
    print(f"{len(entries)} files in {folder}")


def run(folder: Path, tools: list[str], python: str) -> None:
    """Measure this project, or other tools, on the files in ``folder``, and write the rows there."""
    entries = from_json((folder / MANIFEST).read_text())
    paths = [(e, folder / f"{e.name}.onnx", folder / f"{e.reference}.onnx" if e.reference else None) for e in entries]
    if not tools:
        _save(folder / "rows-normdeploy.json", [_measured(*triple) for triple in paths])
    for tool in tools:
        rows = list(others.run(python, tool, paths))
        if rows:
            _save(folder / f"rows-{tool}.json", rows)


def _measured(entry: Entry, path: Path, reference: Path | None) -> Row:
    try:
        row = measured(entry, onnx.load(path), onnx.load(reference) if reference else None)
    # A crash of ours is also a result.
    except Exception:
        row = Row(entry.name, "normdeploy", False, False, (f"crash: {traceback.format_exc(limit=-2)}",))
    if row.faults:
        print(row.name, *row.faults, row.became, *row.reasons, sep=" | ", flush=True)
    return row


def _save(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1))
    print(f"{path.name}: {len(rows)} rows, {sum(bool(r.faults) for r in rows)} with faults", flush=True)


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("write", "run", "table"):
        stage = stages.add_parser(name)
        stage.add_argument("folder", type=Path)
        if name == "write":
            stage.add_argument("--every", type=int, default=1, help="take every n-th of torch's models only")
        elif name == "run":
            stage.add_argument(
                "--tools", nargs="+", default=[], choices=list(TOOLS), help="other tools, instead of this project"
            )
            stage.add_argument("--python", default=sys.executable, help="where they are installed")
    args = parser.parse_args()
    if args.stage == "write":
        write(args.folder, args.every)
    elif args.stage == "run":
        run(args.folder, args.tools, args.python)
    else:
        table.write(args.folder)


if __name__ == "__main__":
    main()
