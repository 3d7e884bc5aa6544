"""Run ``python -m benchmarks.attack``: generate, optimize and judge graphs, and print a table per family."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import onnx

from .families import FAMILIES
from .work import Outcome, attack

COLUMNS = (
    "graphs",
    "rewritten",
    "false",
    "numbers",
    "hidden",
    "runs",
    "accuracy",
    "exposed",
    "runtime",
    "skipped",
    "error",
    "invalid",
)


def table(counts: dict[str, Counter[str]]) -> str:
    """Format the counts.

    Returns:
        Markdown with a row per family and one for all.
    """
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    total: Counter[str] = Counter()
    for name in FAMILIES:
        if name in counts:
            total += counts[name]
            lines.append(f"| {name} | " + " | ".join(str(counts[name][c]) for c in COLUMNS) + " |")
    return "\n".join([*lines, "| all | " + " | ".join(str(total[c]) for c in COLUMNS) + " |"])


def save(outcome: Outcome, folder: Path) -> None:
    """Save the graph, its optimized form, and the input that distinguishes them."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{outcome.family}-{outcome.index}"
    if outcome.before is not None:
        onnx.save(outcome.before, f"{stem}.onnx")
    if outcome.after is not None:
        onnx.save(outcome.after, f"{stem}.after.onnx")
    if outcome.feed:
        np.savez(f"{stem}.npz", allow_pickle=False, **outcome.feed)
    Path(f"{stem}.txt").write_text(f"{outcome.name}\n{outcome.kind}: {outcome.detail}\n{outcome.became}\n")


def main() -> int:
    """Attack and print the table.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.attack", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="graphs")
    parser.add_argument("--first", type=int, default=0, help="index of the first graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inputs", type=int, default=12, help="inputs for each rewritten graph")
    parser.add_argument("--families", default="", help=f"comma-separated, of {', '.join(FAMILIES)}")
    parser.add_argument("--save", type=Path, help="folder for the false ones")
    parser.add_argument("--keep", type=int, default=20, help="saved for each family and kind at most")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    names = tuple(n for n in options.families.split(",") if n)
    unknown = [n for n in names if n not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    kept: Counter[tuple[str, str]] = Counter()
    jobs = ((options.seed, k, names, options.inputs) for k in range(options.first, options.first + options.count))
    began = time.perf_counter()
    # Start a new worker process after some thousand graphs, so that a memory leak of a runtime cannot end a long run.
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=100) as pool:
        for done, outcome in enumerate(pool.imap_unordered(attack, jobs, chunksize=20), 1):
            counts[outcome.family].update(outcome.counts())
            if outcome.worth_keeping and options.save is not None and kept[outcome.family, outcome.kind] < options.keep:
                kept[outcome.family, outcome.kind] += 1
                save(outcome, options.save)
            if done % 500 == 0:
                rate = done / (time.perf_counter() - began)
                wrong = sum(c["false"] for c in counts.values())
                print(f"{done} of {options.count}, {wrong} false, {rate:.0f} graphs/s", flush=True)
    text = table(counts)
    wrong = sum(c["false"] for c in counts.values())
    text += (
        f"\n\nseed {options.seed}, graphs {options.first} to {options.first + options.count - 1},"
        f" {time.perf_counter() - began:.0f} s"
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
