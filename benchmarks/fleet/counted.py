"""Replace the command line in the fleet's tests, and record when each step ran and on which inputs.

A step runs in the work folder of the store, and the record is next to the store. So processes of Ray nodes find the
record without an environment variable, which would have to be set before the fleet exists.

``python -m benchmarks.fleet.counted fleet run ...`` drives a fleet with it: in processes of this machine, or on a Ray
cluster with ``--on``.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

# Name of the file next to the store with a line "time digest" per execution
RUNS = "runs.txt"
# Name of the file next to fleet.toml that exists when the driver has imported its libraries
READY = "ready"


def main(argv: list[str]) -> int:
    """Run one step: add a line "time digest" to the file, and print the digest of everything that the step depends on.

    Returns:
        exit code.
    """
    from tests.fleet import toy

    digest = hashlib.sha256(repr(argv).encode())
    for path in sorted(p for p in Path().rglob("*") if p.is_file() and not p.name.startswith(".")):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    # The step runs in STORE/work/FOLDER.
    with open(Path.cwd().parents[2] / RUNS, "a") as file:
        file.write(f"{time.time()} {digest.hexdigest()}\n")
    print("digest", digest.hexdigest())
    return toy.main(argv)


def drive(argv: list[str]) -> None:
    """Run the command line with this stand-in instead of the verbs."""
    from normdeploy.cli.app import main as command
    from normdeploy.fleet import fleet_commands
    from normdeploy.fleet.fork_client import ForkClient
    from normdeploy.fleet.local_pool import LocalPool
    from normdeploy.fleet.ray_node import WorkerSettings
    from normdeploy.fleet.ray_pool import RayPool

    module = "benchmarks.fleet.counted"

    def pool(on: str, jobs: int | None, wait: float = 0.0):  # type: ignore[no-untyped-def]
        """Make a factory of pools.

        Returns:
            function from a store to a pool.
        """
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
