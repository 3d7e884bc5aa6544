"""Find the processes of a fleet that a kill may hit: driver, warm process, step, and the process that runs a step on a
Ray node.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

from normdeploy.fleet import fork_server


def children(pid: int) -> list[int]:
    """List the children of a process. Any of its threads may have started them, so every process is asked for its
    parent.

    Returns:
        process ids.
    """
    return [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _parent(int(e.name)) == pid]


def ray_steps() -> list[int]:
    """List Ray's processes that run a step now, on nodes that this process started.

    Returns:
        process ids.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _words(int(entry.name)).startswith(b"ray::all."):
            above = int(entry.name)
            while above > 1 and above != os.getpid():
                above = _parent(above)
            found += [int(entry.name)] if above == os.getpid() else []
    return found


def target(kind: str, driver: int, rng: random.Random) -> int | None:
    """Pick a running process of a kind.

    Returns:
        process id, or None if there is none.
    """
    if kind in ("driver", "driver on Ray"):
        return driver
    if kind == "Ray worker":
        return rng.choice(found) if (found := ray_steps()) else None
    warm = [c for c in children(driver) if fork_server.__name__.encode() in _words(c)]
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
