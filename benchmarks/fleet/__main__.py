"""What the driver of a fleet costs: a second run of 300 models for 6 targets, one changed model, 10,000 models.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --bucket    # the second table alone, with the libraries of make test-clusters

The steps are a stand-in's (`tests.fleet.toy`), which takes milliseconds: what is measured is the driver. The largest
fleets are simulated: a pool that writes each step's record at once, without a process. The bucket is a stand-in too
(`benchmarks.fleet.bucket`), which answers each question 20 ms late. Writes `benchmarks/results/fleet.md`.
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
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from normdeploy.fleet import fleet
from normdeploy.fleet.description import read
from normdeploy.fleet.keys import Machine
from normdeploy.fleet.pool import Local
from normdeploy.fleet.steps import Step
from normdeploy.fleet.store import Record, Store
from normdeploy.fleet.tasks import Task
from normdeploy.fleet.workers import Warm

RESULTS = Path(__file__).parents[1] / "results" / "fleet.md"
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
LATE = 20  # milliseconds
ABOUT_FAR = f"""`python -m benchmarks.fleet --bucket`: the store is a bucket of S3's kind on this machine, which answers
each question {LATE} ms late, many at a time. What it holds was written by a first run into a folder."""
BUCKET = "far"
CHECKSUMS = ("REQUEST_CHECKSUM_CALCULATION", "RESPONSE_CHECKSUM_VALIDATION")


class Simulated:
    """A pool whose steps end at once, each with one small output."""

    size, shares_files = 2, True

    def __init__(self, store: Store, folder: Path) -> None:
        self.machines: Sequence[Machine] = (Machine.here(),)
        self._store, self._folder = store, folder

    def submit(self, task: Task, machine: Machine) -> Future[Record]:
        key, depends = task.key(machine)
        made = self._folder / "made"
        made.write_text(key)
        stored = self._store.put(made)
        made.unlink()
        names = {"export": "model.onnx", "build": "model.engine"}
        outputs = {names.get(task.step.verb, "report.json"): stored}
        future: Future[Record] = Future()
        future.set_result(self._store.commit(Record(key, task.step.name, "ok", depends, outputs, stored)))
        return future

    def want(self, steps: Sequence[Step]) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing runs."""


def _write(folder: Path, models: int, steps: str) -> Path:
    (folder / "models").mkdir()
    for number in range(models):
        (folder / "models" / f"m{number:05}.pt2").write_text(f"model {number}")
    (folder / "fleet.toml").write_text(_FLEET.replace("STEPS", steps))
    return folder / "fleet.toml"


def _run(file: Path, simulated: bool, place: str | None) -> dict[str, Any]:
    """One run in this process: seconds, CPU seconds of the driver, steps, peak memory."""
    told = read(file)
    store = fleet.open_store(told, place)
    pool = Simulated(store, file.parent) if simulated else Local(store, 2, Warm("tests.fleet.toy", ()))
    start, cpu = time.monotonic(), time.process_time()
    try:
        found = fleet.driven(told, store, pool)
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


def _measured(file: Path, *, simulated: bool = False, place: str = "") -> dict[str, Any]:
    """A run in a process of its own, as the command line is one."""
    words = [sys.executable, "-m", "benchmarks.fleet", "--one", str(file), *(["--simulated"] if simulated else [])]
    words += ["--store", place] if place else []
    answer = subprocess.run(words, check=True, capture_output=True, text=True)
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
    """A store's folder as a bucket that answers late: its URL."""
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
        _measured(file, simulated=True)  # into a folder, which the bucket shows
        with _far(file.parent / "store") as place:
            yield _row("300 models × 6 targets again", _measured(file, place=place))
            (file.parent / "models" / "m00123.pt2").write_text("changed")
            changed = _measured(file, place=place)
            yield _row(f"one model changed (ran: {', '.join(changed['models'])})", changed)


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


def _table(rows: Iterable[str]) -> str:
    lines = [
        "| fleet | cells | steps run | from the store | seconds | of them CPU | ms a step | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=Path)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--store")
    parser.add_argument("--bucket", action="store_true", help="the second table alone")
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(_run(given.one, given.simulated, given.store)))
        return
    first = RESULTS.read_text().partition(FAR)[0] if given.bucket else f"{HERE}\n{_table(_here())}\n"
    load = os.getloadavg()[0]
    second = _table(_in_a_bucket())
    beside = f"The {os.cpu_count()} CPUs were shared: the load was {load:.0f} before, {os.getloadavg()[0]:.0f} after."
    RESULTS.write_text(f"{first}{FAR}\n\n{ABOUT_FAR} {beside}\n\n{second}")


if __name__ == "__main__":
    main()
