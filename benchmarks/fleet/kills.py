"""Kill parts of toy fleets at random moments: the driver, the warm process, a step, a Ray worker, a Ray node.

    python -m benchmarks.fleet.kills

A fleet is run repeatedly with one store until it is complete. Each run, called a drive, is disturbed by one kill, or by
two if it continues after the first. After each drive, the content of every object must match its name, and every
record's objects must exist. No step may have been started if its record already existed. At the end, one more run must
complete the fleet and leave no remains of killed parts. Its manifest must equal the manifest of an undisturbed fleet,
byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normdeploy.fleet.run_history import list_runs
from normdeploy.fleet.step_store import StepStore
from normdeploy.fleet.store_backends import FolderBackend
from tests.fleet.clusters import add_node, nodes

from .counted import READY, RUNS
from .victims import ray_steps, target

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fleet_kills.md"
FLEET = """
[defaults]
steps = ["verify", "package"]
[variants.fp32]
[variants.fp16]
export = { precision = "fp16" }
[targets.cpu]
runtime = "onnxruntime"
[models.all]
source = "*.pt2"
"""
# Number of models and of steps of the fleet. Each step takes 0.2 s.
MODELS, STEPS = 3, 24
# Maximum number of kills in a drive that continues after a kill. With three kills, one step might be hit three times
# and fail.
PER_DRIVE = 2
LOCAL = ("driver", "warm process", "step")
ON_RAY = ("driver on Ray", "Ray worker", "Ray node")
SIGNALS = {
    **dict.fromkeys(("driver", "driver on Ray"), (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    **dict.fromkeys(("warm process", "step", "Ray worker"), (signal.SIGKILL, signal.SIGTERM)),
    "Ray node": (signal.SIGKILL,),
}

# A series ends after this number of misses, because a kind of process that never runs would keep it going forever.
MOST_MISSED = 20


@dataclass
class Tally:
    """Results for one kind of kill.

    Attributes:
        missed: number of kills without a target, because the fleet had ended or nothing of the kind ran at that moment.
        fleets: number of fleets that were run to their end.
    """

    kills: int = 0
    missed: int = 0
    signals: Counter[str] = field(default_factory=Counter)
    executions: int = 0
    fleets: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """Seconds of an undisturbed fleet: from the moment when its driver has its libraries, and from its first step
    on.
    """

    all: float
    steps: float


@dataclass
class Driven:
    """Fleet, its store, and its driver's address."""

    folder: Path
    address: str = "local"

    @property
    def store(self) -> Path:
        """Return the folder of the store."""
        return self.folder / "store"

    @property
    def noted(self) -> Path:
        """Return the file with a line for each execution."""
        return self.folder / RUNS

    @property
    def ready(self) -> Path:
        """Return the file that exists when the driver has its libraries."""
        return self.folder / READY

    def lines(self) -> int:
        """Count the executions so far.

        Returns:
            number.
        """
        return len(self.noted.read_text().splitlines()) if self.noted.exists() else 0

    def make(self) -> None:
        """Write the fleet's files."""
        self.folder.mkdir()
        (self.folder / "fleet.toml").write_text(FLEET)
        for number in range(MODELS):
            (self.folder / f"m{number}.pt2").write_text(f"slow {number}")

    def start(self) -> subprocess.Popen[str]:
        """Start the driver.

        Returns:
            the process.
        """
        self.ready.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.fleet.counted", "fleet", "run", str(self.folder / "fleet.toml")]
        return subprocess.Popen(
            [*words, "--on", self.address, "-q"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def manifest(self) -> bytes:
        """Read the manifest of the last run that ended.

        Returns:
            its bytes; b"" if none ended.
        """
        store = StepStore(FolderBackend(self.store))
        ended = list_runs(store)
        return (store.place.read(f"runs/{ended[-1]['id']}/manifest.jsonl") or b"") if ended else b""


def faults(driven: Driven) -> list[str]:
    """List violations that no kill may cause.

    Returns:
        a text for each.
    """
    store, found = StepStore(FolderBackend(driven.store)), []
    for path in (driven.store / "objects").glob("*/*"):
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
            found.append(f"the object {path.name} is not what its name says")
    written: dict[str, float] = {}
    for path in (driven.store / "steps").glob("*/*"):
        # Raises if it is malformed.
        record = store.read_record(path.name)
        if record is None or not store.has_all_outputs(record):
            found.append(f"the record {path.name} names objects that are not there")
            continue
        log = store.read_bytes(record.log).decode()
        written[next(line.split()[1] for line in log.splitlines() if line.startswith("digest "))] = path.stat().st_mtime
    for line in driven.noted.read_text().splitlines() if driven.noted.exists() else ():
        begun, digest = line.split()
        if float(begun) > written.get(digest, float("inf")):
            found.append(f"the step of {digest} was run though it was complete")
    return found


def disturb(driven: Driven, kind: str, tally: Tally, rng: random.Random, cluster: Any, pace: Pace, kills: int) -> None:
    """Run one drive with at most ``kills`` kills."""
    lines = driven.lines()
    driver = driven.start()
    wait_for(driver, driven.ready.exists)
    hits = 0
    for _ in range(kills):
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.9 * pace.all))
        # Steps take a small part of the time, and are the main target.
        else:
            wait_for(driver, lambda: driven.lines() > lines)
            time.sleep(rng.uniform(0, 0.9 * pace.steps))
        number = rng.choice(SIGNALS[kind])
        hit = driver.poll() is None and killed(kind, driver, rng, cluster, number)
        hits += hit
        tally.kills += hit
        tally.missed += not hit
        tally.signals.update([number.name] if hit else [])
    try:
        said, _ = driver.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        driver.kill()
        said, _ = driver.communicate()
        tally.broken.append(f"{kind}: the driver did not end in 300 s: {said[-500:]}")
    if "Traceback" in said:
        tally.broken.append(f"{kind}: {said[-500:]}")
    if kind == "driver on Ray":
        # Ray ends the processes of a dead driver.
        for _ in range(100):
            if not ray_steps():
                break
            time.sleep(0.1)
    tally.broken += faults(driven)


def killed(kind: str, driver: subprocess.Popen[str], rng: random.Random, cluster: Any, number: signal.Signals) -> bool:
    """Kill something of the kind.

    Returns:
        whether there was something to kill.
    """
    if kind == "Ray node":
        cluster.remove_node(rng.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False)
        add_node(cluster, num_cpus=2)
        return True
    with suppress(ProcessLookupError):
        if (pid := target(kind, driver.pid, rng)) is not None:
            os.kill(pid, number)
            return True
    return False


def wait_for(driver: subprocess.Popen[str], there: Callable[[], bool]) -> None:
    """Wait until ``there`` returns true, or the driver has ended."""
    while not there() and driver.poll() is None:
        time.sleep(0.01)


def complete(driven: Driven) -> bool:
    """Check that every step has its record.

    Returns:
        true if it has.
    """
    return len(list((driven.store / "steps").glob("*/*"))) == STEPS


def finish(driven: Driven, tally: Tally, wanted: bytes) -> None:
    """Run once more without kills, and check the result."""
    driver = driven.start()
    said, _ = driver.communicate(timeout=300)
    if driver.returncode:
        tally.broken.append(f"the last run ended with {driver.returncode}: {said[-500:]}")
    tally.broken += faults(driven)
    left = [p.name for part in ("work", "claims") for p in (driven.store / part).iterdir()]
    if left:
        tally.broken.append(f"left: {', '.join(left[:5])}")
    if driven.manifest() != wanted:
        tally.broken.append("the manifest is not that of an undisturbed fleet")
    tally.fleets += 1
    tally.executions += driven.lines()


def series(
    kinds: Sequence[str], kills: int, folder: Path, address: str, cluster: Any, rng: random.Random
) -> dict[str, Tally]:
    """Kill each kind ``kills`` times.

    Returns:
        kind -> results.
    """
    if not kinds:
        return {}
    quiet = Driven(folder / "undisturbed", address)
    quiet.make()
    driver = quiet.start()
    wait_for(driver, quiet.ready.exists)
    start = time.monotonic()
    wait_for(driver, lambda: quiet.lines() > 0)
    begun = time.monotonic()
    said, _ = driver.communicate(timeout=300)
    if driver.returncode:
        raise SystemExit(f"the fleet fails without a kill: {said[-2000:]}")
    pace, wanted = Pace(time.monotonic() - start, time.monotonic() - begun), quiet.manifest()
    tallies = {}
    for kind in kinds:
        tally = tallies[kind] = Tally()
        number = 0
        while tally.kills < kills:
            driven = Driven(folder / f"{kind.replace(' ', '_')}_{number}", address)
            driven.make()
            while not complete(driven) and tally.kills < kills:
                if tally.missed > MOST_MISSED * (kills + tally.kills):
                    raise SystemExit(f"{kind}: {tally.kills} of {tally.kills + tally.missed} kills found one to hit")
                disturb(driven, kind, tally, rng, cluster, pace, 1 if "driver" in kind else PER_DRIVE)
            finish(driven, tally, wanted)
            number += 1
        print(f"{kind}: {tally}", flush=True)
    return tallies


def table(tallies: dict[str, Tally], seed: int) -> str:
    """Format the results.

    Returns:
        Markdown.
    """
    rows = [
        f"| {kind} | {t.kills} | {', '.join(f'{n} {c}' for n, c in sorted(t.signals.items()))} | {t.fleets} |"
        f" {t.executions - STEPS * t.fleets} | {len(t.broken)} |"
        for kind, t in tallies.items()
    ]
    found = [f"\n- {kind}: {' '.join(fault.split())}" for kind, t in tallies.items() for fault in t.broken]
    # Without folders of this machine.
    told = "".join(re.sub(r"/[\w./-]*/", "", line)[:300] for line in found)
    return f"""# Kills of fleets

`python -m benchmarks.fleet.kills --seed {seed}`: toy fleets of {STEPS} steps, each driven until it is complete, those
on this machine beside those on Ray, where two nodes of 1 and 2 CPUs run here. A drive is disturbed by one kill of its
driver, or by up to {PER_DRIVE} of what it runs: half of them at a random moment of the whole drive, half while steps
run. After each drive every object of the store is compared with its name and every record with its objects, and what
was run with what was complete before. After the last one of a fleet one more run must find or do all of it, leave
nothing in `work/` and `claims/`, and write the manifest of an undisturbed fleet, byte for byte.

| killed | kills | by | fleets | executions that were cut short | faults |
|---|---|---|---|---|---|
{chr(10).join(rows)}
| all | {sum(t.kills for t in tallies.values())} | | {sum(t.fleets for t in tallies.values())} | \
{sum(t.executions - STEPS * t.fleets for t in tallies.values())} | {sum(len(t.broken) for t in tallies.values())} |

An execution that was cut short had no record yet: its step ran again. A fault is anything else than what is said above,
or a traceback of the driver's{"; those that were found:" if told else "."}
{told}"""


def main() -> None:
    """Kill all kinds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="of each kind on this machine")
    parser.add_argument("--ray-kills", type=int, default=27, help="of each kind on Ray, where all takes longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[*LOCAL, *ON_RAY], default=[*LOCAL, *ON_RAY])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    local, on_ray = [k for k in options.kinds if k in LOCAL], [k for k in options.kinds if k in ON_RAY]
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as other:
        (Path(name) / "local").mkdir()
        (Path(name) / "ray").mkdir()
        here = other.submit(
            series, local, options.kills, Path(name) / "local", "local", None, random.Random(options.seed)
        )
        if on_ray:
            with nodes({}, {"num_cpus": 2}) as cluster:
                folder = Path(name) / "ray"
                tallies = series(
                    on_ray, options.ray_kills, folder, cluster.address, cluster, random.Random(options.seed)
                )
        tallies = here.result() | tallies
    options.output.write_text(table(tallies, options.seed))
    for tally in tallies.values():
        print(*tally.broken[:10], sep="\n")
    sys.exit(any(t.broken for t in tallies.values()))


if __name__ == "__main__":
    main()
