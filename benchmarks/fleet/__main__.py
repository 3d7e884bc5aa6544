"""Measure the cost of the fleet's driver: a second run of 300 models for 6 targets, one changed model, 10,000 models.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --bucket    # only the second table, with the libraries of make test-clusters
    python -m benchmarks.fleet --first COMMIT    # the third: first runs in a bucket, compared with that commit's

The steps run a stand-in (`tests.fleet.toy`) that takes milliseconds, so that the driver is measured. The largest fleets
are simulated: a pool writes each step's record at once, without a process. The bucket is a stand-in too
(`benchmarks.fleet.bucket`), which delays each answer by 20 ms. Writes `benchmarks/results/fleet.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.job_steps import JobStep
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.step_inputs import StepTask
from normdeploy.fleet.step_keys import FleetMachine
from normdeploy.fleet.step_store import StepRecord, StepStore

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fleet.md"
_TARGETS = """
[targets.cpu]
runtime = "onnxruntime"
""" + "".join(
    f'[targets.cc{cc.replace(".", "")}]\nruntime = "tensorrt-rtx"\ncompute_capability = "{cc}"\n'
    for cc in ("7.5", "8.0", "8.6", "8.9", "12.0")
)
_FLEET = f"""
[defaults]
steps = [STEPS]
{_TARGETS}
[models.all]
source = "models/*.pt2"
"""
HERE = """# The driver of a fleet

`python -m benchmarks.fleet`: the steps are a stand-in's, which takes milliseconds; a simulated one's end at
once. Each run is a process of its own; ms is the whole run's time for each of its steps, peak its memory.
"""
FAR = "## In a bucket"
# Milliseconds.
LATE = 20
ABOUT_FAR = f"""`python -m benchmarks.fleet --bucket`: the store is a bucket of S3's kind on this machine, which answers
each question {LATE} ms late, many at a time. What it holds was written by a first run into a folder."""
FIRSTS = "## First runs in a bucket"
# Models, and runs of each.
FIRST, PAIRS = 12, 5
HEADS = "| fleet | cells | steps run | from the store | seconds | of them CPU | ms a step | peak MB |"
HEADS_OF_FIRSTS = "| steps are run by | steps | s before | s now | before / now | CPU s before | CPU s now |"
BUCKET = "far"
ABOUT_FIRSTS = f"""`python -m benchmarks.fleet --first {{commit}}`: {FIRST} models × 6 targets into an empty bucket
of that kind, by the driver of commit {{commit}} and by this one in turn, {PAIRS} times each. Processes run a stand-in;
nodes are threads whose steps end at once, and read what they need through the bucket. Seconds are medians; of the
ratios the smallest and the largest are told too. What is saved is waiting; the driver's CPU seconds stand beside it."""
CHECKSUMS = ("REQUEST_CHECKSUM_CALCULATION", "RESPONSE_CHECKSUM_VALIDATION")


class Simulated:
    """Pool whose steps end at once, each with one small output."""

    def __init__(self, store: StepStore, folder: Path, nodes: int = 0) -> None:
        """Open the pool.

        Args:
            nodes: number of threads that run steps and read this machine's files from the store, as nodes of a cluster
                do; 0 for steps one after the other in the driver's thread, which reads files.
        """
        self.machines: Sequence[FleetMachine] = (FleetMachine.this_machine(),)
        self.size, self.shares_files = nodes or 2, not nodes
        self._store, self._folder = store, folder
        self._threads = ThreadPoolExecutor(nodes) if nodes else None

    def submit(self, task: StepTask, machine: FleetMachine) -> Future[StepRecord]:
        """Run a step.

        Returns:
            its record.
        """
        if self._threads is not None:
            return self._threads.submit(self._record, task, machine)
        future: Future[StepRecord] = Future()
        future.set_result(self._record(task, machine))
        return future

    def _record(self, task: StepTask, machine: FleetMachine) -> StepRecord:
        key, depends = task.key_on(machine)
        made = self._folder / f"{key}.made"
        made.write_text(key)
        stored = self._store.put(made)
        made.unlink()
        names = {"export": "model.onnx", "build": "model.engine"}
        outputs = {names.get(task.step.verb, "report.json"): stored}
        return self._store.commit(StepRecord(key, task.step.name, "ok", depends, outputs, stored))

    def set_waiting_steps(self, steps: Sequence[JobStep]) -> None:
        """Ignore the steps, because nothing waits."""

    def close(self) -> None:
        """Stop the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _write(folder: Path, models: int, steps: str) -> Path:
    (folder / "models").mkdir()
    for number in range(models):
        (folder / "models" / f"m{number:05}.pt2").write_text(f"model {number}")
    (folder / "fleet.toml").write_text(_FLEET.replace("STEPS", steps))
    return folder / "fleet.toml"


def _run(file: Path, simulated: bool, place: str | None, nodes: int = 0) -> dict[str, Any]:
    """Run once in this process; return seconds, CPU seconds of the driver, steps and peak memory."""
    told = read_fleet(file)
    store = fleet_commands.open_fleet_store(told, place)
    pool = (
        Simulated(store, file.parent, nodes)
        if simulated or nodes
        else LocalPool(store, 2, ForkClient("tests.fleet.toy", ()))
    )
    start, cpu = time.monotonic(), time.process_time()
    try:
        found = fleet_commands.schedule_fleet(told, store, pool)
    finally:
        pool.close()
    return {
        "seconds": time.monotonic() - start,
        "cpu": time.process_time() - cpu,
        "ran": found.ran,
        "cached": found.cached,
        "cells": len(found.cells),
        "models": sorted({c.model for c in found.cells if c.ran})[:5],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _measured(
    file: Path, *, simulated: bool = False, place: str = "", nodes: int = 0, root: Path | None = None
) -> dict[str, Any]:
    """Run in a separate process, as the command line does; with the packages in ``root`` if it is given."""
    words = [sys.executable, "-m", "benchmarks.fleet", "--one", str(file), *(["--simulated"] if simulated else [])]
    words += [*(["--store", place] if place else []), "--nodes", str(nodes)]
    answer = subprocess.run(words, check=True, capture_output=True, text=True, cwd=root)
    told: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return told


def _row(name: str, told: dict[str, Any]) -> str:
    each = 1000 * told["seconds"] / max(1, told["ran"] + told["cached"])
    return (
        f"| {name} | {told['cells']:,} | {told['ran']:,} | {told['cached']:,} | {told['seconds']:.1f} |"
        f" {told['cpu']:.1f} | {each:.2f} | {told['peak'] / 1e6:.0f} |"
    )


@contextmanager
def _far(folder: Path) -> Iterator[str]:
    """Serve a store's folder as a bucket that answers late; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.fleet.bucket", str(port), str(folder), str(LATE)]
    server = subprocess.Popen(words)
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "toy", "AWS_SECRET_ACCESS_KEY": "toy"}
    os.environ |= {f"AWS_{name}": "when_required" for name in CHECKSUMS}
    try:
        while server.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()


def _in_a_bucket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        file = _write(Path(name), 300, '"verify", "package"')
        # Into a folder, which the bucket serves.
        _measured(file, simulated=True)
        with _far(file.parent / "store") as place:
            yield _row("300 models × 6 targets again", _measured(file, place=place))
            (file.parent / "models" / "m00123.pt2").write_text("changed")
            changed = _measured(file, place=place)
            yield _row(f"one model changed (ran: {', '.join(changed['models'])})", changed)


def _first_runs(commit: str) -> Iterator[str]:
    """Yield first runs in a bucket, by that commit's driver and by this one in turn."""
    with tempfile.TemporaryDirectory() as name:
        before = Path(name) / "before"
        before.mkdir()
        kept = subprocess.run(["git", "archive", commit, "normdeploy"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=before, check=True, input=kept.stdout)
        for other in ("benchmarks", "tests"):
            (before / other).symlink_to(ROOT / other)
        (Path(name) / "fleet").mkdir()
        file = _write(Path(name) / "fleet", FIRST, '"verify"')
        (Path(name) / "bucket").mkdir()
        with _far(Path(name) / "bucket") as place:
            for told, nodes in (("2 processes here", 0), ("2 nodes", 2), ("16 nodes", 16)):
                pairs = []
                for number in range(PAIRS):
                    seconds = {}
                    for root in ((before, ROOT), (ROOT, before))[number % 2]:
                        at = f"{place}/{nodes}-{number}-{root.name}"
                        seconds[root] = _measured(file, place=at, nodes=nodes, root=root)
                        assert seconds[root]["cached"] == 0
                    pairs.append((seconds[before], seconds[ROOT]))
                yield _first_row(told, pairs)


def _first_row(pool: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    before, now = (sorted(pair[n]["seconds"] for pair in pairs) for n in range(2))
    cpu = [median(pair[n]["cpu"] for pair in pairs) for n in range(2)]
    ratios = sorted(b["seconds"] / n["seconds"] for b, n in pairs)
    return (
        f"| {pool} | {pairs[0][1]['ran']} | {median(before):.1f} | {median(now):.1f} | {median(ratios):.2f}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {cpu[0]:.1f} | {cpu[1]:.1f} |"
    )


def _here() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        file = _write(Path(name), 300, '"verify", "package"')
        yield _row("300 models × 6 targets, first run", _measured(file))
        yield _row("again", _measured(file))
        (file.parent / "models" / "m00123.pt2").write_text("changed")
        changed = _measured(file)
        yield _row(f"one model changed (ran: {', '.join(changed['models'])})", changed)
    for models in (1000, 3000, 10_000):
        with tempfile.TemporaryDirectory() as name:
            file = _write(Path(name), models, '"verify"')
            yield _row(f"{models:,} models × 6 targets, simulated", _measured(file, simulated=True))
            yield _row("again", _measured(file, simulated=True))


def _table(rows: Iterable[str], heads: str = HEADS) -> str:
    lines = [heads, "|---" * (heads.count("|") - 1) + "|"]
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=Path)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--store")
    parser.add_argument("--bucket", action="store_true", help="the second table alone")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--first", metavar="COMMIT", help="the third table alone, beside that commit's driver")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(_run(given.one, given.simulated, given.store, given.nodes)))
        return
    rest, _, third = RESULTS.read_text().partition(FIRSTS)
    first, _, second = rest.partition(FAR)
    load = os.getloadavg()[0]
    if given.first:
        table = _table(_first_runs(given.first), HEADS_OF_FIRSTS)
        third = f"\n\n{ABOUT_FIRSTS.format(commit=given.first)} {_beside(load)}\n\n{table}"
    else:
        first = first if given.bucket else f"{HERE}\n{_table(_here())}\n"
        table = _table(_in_a_bucket())
        second = f"\n\n{ABOUT_FAR} {_beside(load)}\n\n{table}\n"
    RESULTS.write_text(f"{first}{FAR}{second.rstrip()}\n\n{FIRSTS}{third}")


def _beside(load: float) -> str:
    return f"The {os.cpu_count()} CPUs were shared: the load was {load:.0f} before, {os.getloadavg()[0]:.0f} after."


if __name__ == "__main__":
    main()
