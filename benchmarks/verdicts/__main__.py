"""Command line of the verdicts (see the package's docstring)."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from .faults import FAULTS
from .judge import OPENING, judge
from .pairs import LEFT_OUT, Pair, pairs
from .rows import RESULTS, Row, append, current_commit, read, write
from .table import PAGE, page

# Time limit for one pair in seconds of wall time
SECONDS = 900
# Maximum address space of a child process in bytes
MEMORY = 8 << 30


def child(pair: Pair, sink: Connection, folder: Path, faults: Collection[str]) -> None:
    """Judge a pair in the child process, with limited memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge(pair, sink.send, folder, faults)
    sink.close()


def run(pair: Pair, limit: float = SECONDS, faults: Collection[str] = tuple(FAULTS)) -> Row:
    """Judge ``pair`` in a separate process; a crash or the time limit ends only that pair.

    Returns:
        the row.
    """
    row = Row(pair.name, pair.kind, pair.made_by, commit=current_commit())
    context = multiprocessing.get_context("fork")
    source, sink = context.Pipe(duplex=False)
    until = time.monotonic() + limit
    # The child may be killed, so the parent deletes its folder.
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=child, args=(pair, sink, Path(folder), faults))
        process.start()
        sink.close()
        while True:
            if not source.poll(max(0.0, until - time.monotonic())):
                process.kill()
                row.broken = f"{row.stage}: nothing after {limit:g} s"
                break
            try:
                row.take(source.recv())
            except EOFError:
                break
        process.join()
    if row.stage == OPENING and process.exitcode:
        # The tool wrote a file that can't run, so there is no right file.
        row.not_made, row.broken = f"onnxruntime crashes when it opens the file ({process.exitcode})", ""
    elif not row.broken and process.exitcode:
        row.broken = f"{row.stage}: the process ended with {process.exitcode}"
    return row


def chosen(given: argparse.Namespace, done: dict[str, Row]) -> list[Pair]:
    """Select the pairs to judge.

    Returns:
        pairs.
    """
    listed = [pair for pair in pairs() if given.only in pair.name][: given.count]
    if given.part:
        part, parts = map(int, given.part.split("/"))
        listed = listed[part - 1 :: parts]
    wanted = () if given.no_faults else FAULTS
    return [pair for pair in listed if given.update or pair.name not in done or not done[pair.name].has_run(wanted)]


def main() -> None:
    """Judge the pairs and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts")
    parser.add_argument("--only", default="", metavar="NAME", help="pairs with this text in their name")
    parser.add_argument("--count", type=int, metavar="N", help="the first N pairs")
    parser.add_argument("--part", metavar="I/N", help="every N-th pair from the I-th on, for several processes")
    parser.add_argument("--update", action="store_true", help="judge pairs again that stand in the results")
    parser.add_argument("--no-faults", action="store_true", help="judge the right files alone, and plant nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="wall time for one pair")
    parser.add_argument("--list", action="store_true", help="list the pairs and end")
    parser.add_argument("--table", action="store_true", help="write the results of what was run so far, and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(pair.name for pair in pairs()))
        return
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # Each process appends to its own file; the results are merged from all of them.
    kept = Path(tempfile.gettempdir()) / "normdeploy-verdicts"
    mine = kept / f"rows-{(given.part or 'all').replace('/', '-of-')}.jsonl"
    left = [] if given.table else chosen(given, gathered(kept))
    for number, pair in enumerate(left, 1):
        began = time.monotonic()
        row = run(pair, given.seconds, () if given.no_faults else tuple(FAULTS))
        append(mine, row)
        print(f"{number} of {len(left)}, {time.monotonic() - began:.0f} s: {pair.name} {row.not_made}", flush=True)
        for line in row.wrong:
            print(f"    {line}", flush=True)
    rows = gathered(kept)
    save(rows)
    sys.exit(1 if any(row.wrong for row in rows.values()) else 0)


def gathered(kept: Path) -> dict[str, Row]:
    """Collect the rows of the results and of all processes; newer ones replace older ones.

    Returns:
        name -> row.
    """
    rows = read(RESULTS)
    for path in sorted(kept.glob("rows-*.jsonl"), key=lambda path: path.stat().st_mtime):
        rows |= read(path)
    return rows


def save(rows: dict[str, Row]) -> None:
    """Write the results and the page."""
    listed = [pair.name for pair in pairs()]
    # Rows stay if the package of their pair is not installed here.
    ordered = sorted((row for row in rows.values() if row.name not in LEFT_OUT), key=lambda row: row.name)
    write(RESULTS, ordered)
    PAGE.write_text(page(ordered, len({*listed, *rows})))


if __name__ == "__main__":
    main()
