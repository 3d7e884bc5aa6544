"""Run every architecture through four verbs with default options.

The verbs are export, verify, optimize and build. The verb optimize gets the file that torch's exporter wrote, called
the plain file.

    python -m benchmarks.architectures [NAME ...] [--first N] [--count N] [--again]

Each row is stored in ``benchmarks/results/architectures.json`` as soon as it is measured, and ``architectures.md`` is
written from the rows. An interrupted run, or a run of a slice, continues after the last row. Existing rows are measured
again only if they are named, or with ``--again``. ``--for-seconds N`` starts no row after N seconds. ``--results
FILE.json`` stores the rows in another file.

Each architecture runs in a separate process with a limit on processor time (``--limit`` seconds), so that a crash ends
one row. The process is forked from this process, which has already imported the libraries and exported one model with
both exporters. This preparation takes longer than most architectures.

It needs transformers, diffusers, timm and torchvision besides normdeploy: the Makefile's ``test-architectures`` creates
an environment that has them. The exit code is 1 if a row is wrong (``table.wrong``).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from . import table
from .catalogue import ARCHITECTURES, AUTOMATIC, Architecture, Automatic, declare_torchvision
from .measure import Row, measured, warm_up

RESULTS = Path(__file__).resolve().parents[1] / "results" / "architectures.json"
_WARM = "ViT (torchvision)"
# Wall time may be so many times the limit on processor time, because other jobs share the machine.
_PATIENCE = 4
# Hand-made entries first, then the automatic ones in an order that samples all groups
EVERY: tuple[Architecture | Automatic, ...] = (*ARCHITECTURES, *AUTOMATIC)


def main() -> int:
    """Measure the chosen architectures and write the page.

    Returns:
        exit code.
    """
    wanted = _arguments()
    rows = _kept(wanted.results)
    chosen = EVERY[wanted.first :][: wanted.count]
    if wanted.names:
        chosen = tuple(a for name in wanted.names for a in EVERY if a.name == name)
    elif not wanted.again:
        chosen = tuple(a for a in chosen if a.name not in rows)
    if chosen:
        _warm_up()
    begun = time.perf_counter()
    for i, architecture in enumerate(chosen, 1):
        start = time.perf_counter()
        if start - begun > wanted.for_seconds:
            break
        rows[architecture.name] = row = in_a_process(architecture, wanted.limit)
        _write(wanted.results, rows)
        print(f"[{i}/{len(chosen)}] {table.any_line(row)} {time.perf_counter() - start:.0f} s", flush=True)
    every = [rows[a.name] for a in EVERY if a.name in rows]
    print(table.summary(every))
    return 1 if any(table.wrong(row) for row in every) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(EVERY))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--for-seconds", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    found = parser.parse_args()
    if unknown := set(found.names) - {a.name for a in EVERY}:
        parser.error(f"no architecture is called {', '.join(sorted(unknown))}")
    return found


def _kept(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}


def _write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    ordered = [rows[a.name] for a in EVERY if a.name in rows]
    part = path.with_suffix(".part")
    part.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)
    path.with_suffix(".md").write_text(table.page(ordered))


def _warm_up() -> None:
    """Import every library, and run both exporters once. The processes of the rows are forked from this state."""
    declare_torchvision()
    for library in ("transformers", "diffusers", "timm", "torchvision"):
        __import__(library)
    (architecture,) = (a for a in ARCHITECTURES if a.name == _WARM)
    with tempfile.TemporaryDirectory() as folder:
        warm_up(architecture, Path(folder))
    gc.collect()
    # Without this, each garbage collection in a child process would visit all imported objects and copy their memory
    # pages.
    gc.freeze()


def in_a_process(architecture: Architecture | Automatic, limit: float) -> dict[str, Any]:
    """Measure an architecture in a separate process.

    Returns:
        the row. If the process crashed or was stopped, the row has the results until then, and ``failed``.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "row.json"
        child = multiprocessing.get_context("fork").Process(
            target=_child, args=(architecture, Path(folder), kept, limit)
        )
        child.start()
        child.join(_PATIENCE * limit)
        end = "" if child.exitcode == 0 else f"its process ended with {child.exitcode}"
        if child.exitcode == -signal.SIGXCPU:
            end = f"no end after {limit:.0f} s of processor time"
        if child.is_alive():
            child.kill()
            child.join()
            end = f"no end after {_PATIENCE * limit:.0f} s"
        row = json.loads(kept.read_text()) if kept.exists() else _empty_row(architecture).to_json()
        row["failed"] = row["failed"] or end
    return row


def _empty_row(architecture: Architecture | Automatic) -> Row:
    return Row(architecture.name, architecture.library, automatic=isinstance(architecture, Automatic))


def _child(architecture: Architecture | Automatic, folder: Path, kept: Path, limit: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    last = _empty_row(architecture)

    def save(row: Row) -> None:
        nonlocal last
        last = row
        kept.write_text(json.dumps(row.to_json()))

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        save(measured(architecture, folder, save))
    except Exception as error:
        last.failed = f"{type(error).__name__}: {error} ({' '.join(traceback.format_exc(limit=-1).split())})"[:600]
        save(last)


if __name__ == "__main__":
    sys.exit(main())
