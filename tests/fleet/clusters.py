"""What the tests of fleets on several machines share: a server of S3's kind, Ray nodes, and a pretended machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from normdeploy.fleet.keys import Machine

ROOT = Path(__file__).resolve().parents[2]
CAPABILITY = "TOY_CAPABILITY"  # of a node's environment: the compute capability of the GPU that it pretends to have


class Bucket:
    """A bucket on a moto server of this machine, which can be stopped and started again (its objects are then gone)."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.url = "s3://fleet-bucket/store"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "toy",
            "AWS_SECRET_ACCESS_KEY": "toy",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_MAX_ATTEMPTS": "1",
        }
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/").close()
                break
            except OSError:
                time.sleep(0.1)
        self.request("PUT", "/fleet-bucket")

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def request(self, method: str, path: str) -> bytes:
        """What the server says; it checks no signature."""
        asked = urllib.request.Request(f"{self.endpoint}{path}", method=method)
        with urllib.request.urlopen(asked) as answer:
            return bytes(answer.read())


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


def pretended() -> Machine:
    """This machine with TensorRT-RTX, and with a GPU where the environment says so."""
    here = Machine.here()
    facts = {**here.facts, "tensorrt-rtx": "1.7.1"}
    if capability := os.environ.get(CAPABILITY):
        facts |= {"gpu 0": "a toy", "capability 0": capability, "driver": "1"}
    return replace(here, facts=facts)
