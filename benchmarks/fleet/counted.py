"""The stand-in for the command line of the fleet's tests, which also notes when it ran and on what.

It notes that beside the store, in whose work folder a step runs: so processes of Ray nodes, whose environment was set
before any fleet was made, note it in the right place too.

``python -m benchmarks.fleet.counted fleet run ...`` drives a fleet of it: in processes of this machine, or on a Ray
cluster with ``--on``.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

RUNS = "runs.txt"  # beside the store: a line "time digest" for each execution
READY = "ready"  # beside fleet.toml: is there when the driver has its libraries


def main(argv: list[str]) -> int:
    """One step: a line "time digest" is added to the file, and the digest of all that it depends on is printed."""
    from tests.fleet import toy

    digest = hashlib.sha256(repr(argv).encode())
    for path in sorted(p for p in Path().rglob("*") if p.is_file() and not p.name.startswith(".")):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    with open(Path.cwd().parents[2] / RUNS, "a") as file:  # the step is in STORE/work/FOLDER
        file.write(f"{time.time()} {digest.hexdigest()}\n")
    print("digest", digest.hexdigest())
    return toy.main(argv)


def drive(argv: list[str]) -> None:
    """The command line, with this stand-in in the place of the verbs."""
    from normdeploy.cli.app import main as command
    from normdeploy.fleet import fleet_commands
    from normdeploy.fleet.fork_client import ForkClient
    from normdeploy.fleet.local_pool import LocalPool
    from normdeploy.fleet.ray_node import WorkerSettings
    from normdeploy.fleet.ray_pool import RayPool

    module = "benchmarks.fleet.counted"

    def pool(on: str, jobs: int | None, wait: float = 0.0):  # type: ignore[no-untyped-def]
        if on == "local":
            return lambda store: LocalPool(store, jobs or 2, ForkClient(module, ()))
        return lambda store: RayPool(store, on, WorkerSettings(module, ()))

    fleet_commands.pool_factory = pool
    (Path(argv[2]).parent / READY).touch()
    sys.argv = ["normdeploy", *argv]
    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["fleet"]:
        drive(sys.argv[1:])
    else:
        sys.exit(main(sys.argv[1:]))
