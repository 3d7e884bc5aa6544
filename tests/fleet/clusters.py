"""What the tests of fleets on several machines share: Ray nodes, and a pretended machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from normdeploy.fleet.step_keys import FleetMachine

ROOT = Path(__file__).resolve().parents[2]
CAPABILITY = "TOY_CAPABILITY"  # of a node's environment: the compute capability of the GPU that it pretends to have


@contextmanager
def nodes(*told: dict[str, Any]) -> Iterator[Any]:
    """A Ray cluster of this machine with these nodes, the first of which is its head."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    cluster = Cluster(shutdown_at_exit=False)
    try:
        for node in told:
            add_node(cluster, **node)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, capability: str = "", **told: Any) -> Any:
    environment = {CAPABILITY: capability} if capability else {}
    return cluster.add_node(
        object_store_memory=80 * 2**20, include_dashboard=False, env_vars=environment, **{"num_cpus": 1, **told}
    )


def pretended() -> FleetMachine:
    """This machine with TensorRT-RTX, and with a GPU where the environment says so."""
    here = FleetMachine.this_machine()
    facts = {**here.facts, "tensorrt-rtx": "1.7.1"}
    if capability := os.environ.get(CAPABILITY):
        facts |= {"gpu 0": "a toy", "capability 0": capability, "driver": "1"}
    return replace(here, facts=facts)
