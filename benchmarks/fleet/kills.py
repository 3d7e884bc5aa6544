"""Kills at random moments of toy fleets: of the driver, the warm process, a step, a Ray worker, a Ray node.

    python -m benchmarks.fleet.kills

A fleet is driven into a store until it is complete, each drive disturbed by one kill. After each kill every object must
be what its name says, every record's objects must be there, and no step may have been begun whose record stood there
already. At the end one more run must find all of it done, leave nothing of what was killed, and give the manifest of a
fleet that nobody disturbed, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normdeploy.fleet.places import Folder
from normdeploy.fleet.runs import runs_of
from normdeploy.fleet.store import Store
from tests.fleet.clusters import add_node, nodes

from .counted import RUNS

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
MODELS, STEPS = 3, 24  # of the fleet; its models are "slow": a step takes 0.2 s
LOCAL = ("driver", "warm process", "step")
ON_RAY = ("driver on Ray", "Ray worker", "Ray node")
SIGNALS = {
    **dict.fromkeys(("driver", "driver on Ray"), (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    **dict.fromkeys(("warm process", "step", "Ray worker"), (signal.SIGKILL, signal.SIGTERM)),
    "Ray node": (signal.SIGKILL,),
}


@dataclass
class Tally:
    """What was seen of one kind of kill."""

    kills: int = 0
    missed: int = 0  # the fleet had ended, or nothing of the kind ran at that moment
    signals: Counter[str] = field(default_factory=Counter)
    executions: int = 0
    fleets: int = 0  # driven to their end
    broken: list[str] = field(default_factory=list)


@dataclass
class Driven:
    """A fleet, its store, and what drives it."""

    folder: Path
    address: str = "local"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def noted(self) -> Path:
        return self.folder / "runs.txt"

    def make(self) -> None:
        self.folder.mkdir()
        (self.folder / "fleet.toml").write_text(FLEET)
        for number in range(MODELS):
            (self.folder / f"m{number}.pt2").write_text(f"slow {number}")

    @property
    def ready(self) -> Path:
        """Is there when the driver has its libraries."""
        return self.noted.with_name(f"{self.noted.name}.ready")

    def start(self) -> subprocess.Popen[str]:
        self.ready.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.fleet.counted", "fleet", "run", str(self.folder / "fleet.toml")]
        return subprocess.Popen(
            [*words, "--on", self.address, "-q"],
            cwd=ROOT,
            env=os.environ | {RUNS: str(self.noted)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def manifest(self) -> bytes:
        """Of the last run that ended; b"" where none has."""
        store = Store(Folder(self.store))
        ended = runs_of(store)
        return (store.place.read(f"runs/{ended[-1]['id']}/manifest.jsonl") or b"") if ended else b""


def faults(driven: Driven) -> list[str]:
    """What must not be, whatever was killed."""
    store, found = Store(Folder(driven.store)), []
    for path in (driven.store / "objects").glob("*/*"):
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
            found.append(f"the object {path.name} is not what its name says")
    written: dict[str, float] = {}
    for path in (driven.store / "steps").glob("*/*"):
        record = store.record(path.name)  # raises where it is malformed
        if record is None or not store.complete(record):
            found.append(f"the record {path.name} names objects that are not there")
            continue
        log = store.bytes_of(record.log).decode()
        written[next(line.split()[1] for line in log.splitlines() if line.startswith("digest "))] = path.stat().st_mtime
    for line in driven.noted.read_text().splitlines() if driven.noted.exists() else ():
        begun, digest = line.split()
        if float(begun) > written.get(digest, float("inf")):
            found.append(f"the step of {digest} was run though it was complete")
    return found


def children(pid: int) -> list[int]:
    """Any of its threads may have started them, so every process is asked for its parent."""
    return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _parent(int(e.name)) == pid]


def ray_steps() -> list[int]:
    """Ray's processes that run a step at this moment, on nodes that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _words(int(entry.name)).startswith(b"ray::all."):
            above = int(entry.name)
            while above > 1 and above != os.getpid():
                above = _parent(above)
            found += [int(entry.name)] if above == os.getpid() else []
    return found


def target(kind: str, driver: int, rng: random.Random) -> int | None:
    """A process of the kind that runs now."""
    if kind in ("driver", "driver on Ray"):
        return driver
    if kind == "Ray worker":
        return rng.choice(found) if (found := ray_steps()) else None
    warm = [c for c in children(driver) if b"normdeploy.fleet.warm" in _words(c)]
    if kind == "warm process":
        return warm[0] if warm else None
    steps = [s for w in warm for s in children(w)]
    return rng.choice(steps) if steps else None


def _words(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def disturb(driven: Driven, kind: str, tally: Tally, rng: random.Random, cluster: Any, seconds: float) -> None:
    """One drive with one kill."""
    driver = driven.start()
    wait_for(driven, driver)
    time.sleep(rng.uniform(0, seconds))
    number = rng.choice(SIGNALS[kind])
    hit = False
    if kind == "Ray node":
        if driver.poll() is None and (doomed := sorted(cluster.worker_nodes, key=id)):
            cluster.remove_node(doomed[0], allow_graceful=False)
            hit = True
    elif driver.poll() is None and (pid := target(kind, driver.pid, rng)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            hit = True
    try:
        said, _ = driver.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        driver.kill()
        said, _ = driver.communicate()
        tally.broken.append(f"{kind}, {number.name}: the driver did not end in 180 s")
    if "Traceback" in said:
        tally.broken.append(f"{kind}, {number.name}: {said[-500:]}")
    if kind == "Ray node" and hit:
        add_node(cluster, num_cpus=2)
    if kind == "driver on Ray":
        for _ in range(100):  # Ray ends what belongs to a driver that is gone
            if not ray_steps():
                break
            time.sleep(0.1)
    tally.kills += hit
    tally.missed += not hit
    tally.signals.update([number.name] if hit else [])
    tally.broken += faults(driven)


def wait_for(driven: Driven, driver: subprocess.Popen[str]) -> None:
    """Until it has imported its libraries."""
    while not driven.ready.exists() and driver.poll() is None:
        time.sleep(0.01)


def complete(driven: Driven) -> bool:
    """Whether every step has its record."""
    return len(list((driven.store / "steps").glob("*/*"))) == STEPS


def finish(driven: Driven, tally: Tally, wanted: bytes) -> None:
    """One more run, which nobody disturbs."""
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
    tally.executions += len(driven.noted.read_text().splitlines())


def series(
    kinds: Sequence[str], kills: int, folder: Path, address: str, cluster: Any, rng: random.Random
) -> dict[str, Tally]:
    """``kills`` kills of each kind."""
    quiet = Driven(folder / "undisturbed", address)
    quiet.make()
    driver = quiet.start()
    wait_for(quiet, driver)
    start = time.monotonic()
    said, _ = driver.communicate(timeout=300)
    if driver.returncode:
        raise SystemExit(f"the fleet fails without a kill: {said[-2000:]}")
    seconds, wanted = time.monotonic() - start, quiet.manifest()
    tallies = {}
    for kind in kinds:
        tally = tallies[kind] = Tally()
        number = 0
        while tally.kills < kills:
            driven = Driven(folder / f"{kind.replace(' ', '_')}_{number}", address)
            driven.make()
            while not complete(driven) and tally.kills < kills:
                disturb(driven, kind, tally, rng, cluster, 0.9 * seconds)
            finish(driven, tally, wanted)
            number += 1
        print(f"{kind}: {tally}", flush=True)
    return tallies


def table(tallies: dict[str, Tally], seed: int) -> str:
    rows = [
        f"| {kind} | {t.kills} | {', '.join(f'{n} {c}' for n, c in sorted(t.signals.items()))} | {t.fleets} |"
        f" {t.executions - STEPS * t.fleets} | {len(t.broken)} |"
        for kind, t in tallies.items()
    ]
    return f"""# Kills of fleets

`python -m benchmarks.fleet.kills --seed {seed}`: toy fleets of {STEPS} steps, two at a time, each driven until it is
complete. Each drive is disturbed by one kill at a random moment. After each kill every object of the store is compared
with its name and every record with its objects, and what was run since with what was complete. After the last one of a
fleet, one more run must find all done, leave nothing in `work/` and `claims/`, and write the manifest of an undisturbed
fleet, byte for byte.

| killed | kills | by | fleets | executions that were cut short | faults |
|---|---|---|---|---|---|
{chr(10).join(rows)}
| all | {sum(t.kills for t in tallies.values())} | | {sum(t.fleets for t in tallies.values())} | \
{sum(t.executions - STEPS * t.fleets for t in tallies.values())} | {sum(len(t.broken) for t in tallies.values())} |

An execution that was cut short had no record yet: its step ran again. No step ran again whose record was there.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="of each kind on this machine")
    parser.add_argument("--ray-kills", type=int, default=27, help="of each kind on Ray, where all takes longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[*LOCAL, *ON_RAY], default=[*LOCAL, *ON_RAY])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    tallies: dict[str, Tally] = {}
    parts: list[tuple[list[str], Callable[[ExitStack], Any]]] = [
        ([k for k in options.kinds if k in LOCAL], lambda stack: None),
        ([k for k in options.kinds if k in ON_RAY], lambda stack: stack.enter_context(nodes({}, {"num_cpus": 2}))),
    ]
    with tempfile.TemporaryDirectory() as name:
        for number, (kinds, started) in enumerate(parts):
            folder = Path(name) / str(number)
            folder.mkdir()
            with ExitStack() as stack:
                if kinds:
                    cluster = started(stack)
                    address, each = (
                        ("local", options.kills) if cluster is None else (cluster.address, options.ray_kills)
                    )
                    tallies |= series(kinds, each, folder, address, cluster, random.Random(options.seed))
    options.output.write_text(table(tallies, options.seed))
    for tally in tallies.values():
        print(*tally.broken[:10], sep="\n")
    sys.exit(any(t.broken for t in tallies.values()))


if __name__ == "__main__":
    main()
