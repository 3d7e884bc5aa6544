"""What waits for a machine is seen by Ray's autoscaler, which starts one: its fake provider, whose nodes are here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import RuntimeUnavailable
from normdeploy.fleet.autoscaling import ResourceDemand, resource_of_step
from normdeploy.fleet.job_steps import JobStep, StepNeeds

from .clusters import CAPABILITY, ROOT
from .test_ray_pool import run_on
from .toys import CPU, cells, toy_fleet


def test_what_a_step_waits_for_has_the_name_that_a_node_states() -> None:
    assert resource_of_step(JobStep("m/verify", ("verify",), needs=StepNeeds("tensorrt", "", "8.9"))) == "cc89"
    assert resource_of_step(JobStep("m/build", ("build",), needs=StepNeeds("tensorrt", "", "12.0"))) == "cc120"
    assert resource_of_step(JobStep("m/build", ("build",), needs=StepNeeds("tensorrt-rtx"))) == "builder"
    assert resource_of_step(JobStep("m/verify", ("verify",), needs=StepNeeds("onnxruntime"))) == "CPU"


class FakeRay:
    """Tasks that wait until they are ended."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.asked: list[dict[str, Any]] = []

    def remote(self, **options: Any) -> Any:
        return lambda function: self

    def options(self, **asked: Any) -> Any:
        ray = self

        class Given:
            def remote(self) -> Any:
                ray.asked.append(asked)
                ray.waiting.append(task := object())
                return task

        return Given()

    def wait(self, tasks: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [t for t in tasks if t not in self.waiting], [t for t in tasks if t in self.waiting]

    def cancel(self, task: Any, force: bool) -> None:
        self.waiting.remove(task)


def test_as_many_tasks_stand_in_the_queue_as_steps_wait_for_what_no_node_has() -> None:
    ray = FakeRay()
    demand = ResourceDemand(ray)
    demand.set_pending_resources(["cc89", "cc89", "cc90", "CPU"], ["CPU", "memory"])
    demand.set_pending_resources(["cc89", "cc90", "cc89"], ["CPU"])
    assert sorted(json.dumps(a["resources"]) for a in ray.asked) == ['{"cc89": 1.0}', '{"cc89": 1.0}', '{"cc90": 1.0}']
    assert {a["num_cpus"] for a in ray.asked} == {1}
    demand.set_pending_resources(["cc89", "cc90"], ["CPU"])
    assert len(ray.waiting) == 2
    ray.waiting.pop()  # Ray ran one, and the node is gone again
    demand.set_pending_resources(["cc89", "cc90"], ["CPU"])
    assert len(ray.waiting) == 2
    demand.set_pending_resources(["cc89", "cc90"], ["CPU", "cc89", "cc90"])
    assert ray.waiting == []


@contextmanager
def autoscaled(folder: Path, head: dict[str, float], group: dict[str, float]) -> Iterator[str]:
    """A cluster of a head and of up to two nodes which Ray starts where they are asked for: its address.

    `ray.cluster_utils.AutoscalingCluster` ends every Ray of the machine first, and reads a file that the wheel lacks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    settings = {
        "cluster_name": "fake",
        "max_workers": 2,
        "provider": {"type": "fake_multinode", "gcs_address": address},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": head, "node_config": {}, "max_workers": 0},
            "group": {"resources": group, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{f"{name}_commands": [] for name in commands},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    }
    (folder / "autoscaler.json").write_text(json.dumps(settings))
    words = [
        *(
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--node-ip-address=127.0.0.1",
        ),
        *(f"--num-cpus={head['CPU']}", "--object-store-memory=80000000", "--include-dashboard=false"),
        f"--autoscaling-config={folder / 'autoscaler.json'}",
    ]
    environment = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", CAPABILITY: "8.9"}
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with open(folder / "ray.log", "w") as log:
        ray = subprocess.Popen(
            words,
            env=os.environ | environment | {"PYTHONPATH": python, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for _ in range(600):
                with open(folder / "ray.log") as said:
                    if "Ray runtime started" in said.read():
                        break
                assert ray.poll() is None, (folder / "ray.log").read_text()
                time.sleep(0.1)
            yield address
        finally:
            ray.send_signal(signal.SIGTERM)
            ray.wait(60)


@pytest.mark.clusters
def test_a_group_without_nodes_gets_one_when_a_step_waits_for_it(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="a")
    with autoscaled(tmp_path, {"CPU": 2}, {"CPU": 1, "cc89": 1, "object_store_memory": 80_000_000}) as address:
        run = run_on(address, file, tmp_path / "store", wait=120.0)
    assert {cell.status for cell in run.cells} == {"verified"}, cells(run)


@pytest.mark.clusters
def test_a_cluster_that_has_a_head_alone_gets_its_first_node(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    with autoscaled(tmp_path, {"CPU": 0}, {"CPU": 2, "object_store_memory": 80_000_000}) as address:
        with pytest.raises(RuntimeUnavailable, match="with a CPU responds; start one with ray start"):
            run_on(address, file, tmp_path / "store")
        run = run_on(address, file, tmp_path / "store", wait=120.0)
    assert {cell.status for cell in run.cells} == {"verified"}, cells(run)
