"""Fleets on Ray nodes of this machine: placing, equality, nodes that die, change, or can't see the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.counted import RUNS
from normdeploy.errors import InputError, RuntimeUnavailable, StoreError
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.job_steps import JobStep, StepNeeds
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.outcomes import FleetRun
from normdeploy.fleet.ray_node import WorkerSettings
from normdeploy.fleet.ray_pool import RayNode, RayPool, drop_unsharable_gpus, find_nodes_for
from normdeploy.fleet.step_inputs import StepTask
from normdeploy.fleet.step_keys import FleetMachine
from normdeploy.fleet.step_store import StepStore
from normdeploy.fleet.store_backends import FolderBackend

from .clusters import CAPABILITY, ROOT, add_node, nodes, pretended
from .toys import cells, manifest, toy_fleet

TOY = WorkerSettings("tests.fleet.toy", (), pretended)


def machine(*capabilities: str, **facts: str) -> FleetMachine:
    gpus = {f"capability {n}": c for n, c in enumerate(capabilities)}
    return FleetMachine({"cpu": "a toy", "onnxruntime": "1.31", **facts, **gpus}, "code", "installed")


def task(verb: str = "verify", **needs: str) -> StepTask:
    return StepTask(JobStep(f"m/{verb}", (verb,), needs=StepNeeds(**needs)), {})


def able(nodes: list[RayNode], asked: StepTask) -> tuple[list[str], dict[str, float]]:
    found, amounts = find_nodes_for(nodes, asked, asked.key_on(next(n.machine for n in nodes))[0])
    return [n.id for n in found], amounts


def test_a_step_goes_to_nodes_with_its_key_and_takes_what_they_state() -> None:
    ada = machine("8.9", **{"gpu 0": "L4", "driver": "580"})
    plain, with_gpu = RayNode("plain", machine(), {"CPU": 4}), RayNode("ada", ada, {"CPU": 4, "GPU": 1, "cc89": 1})
    other = RayNode("other", machine(onnxruntime="1.32"), {"CPU": 4})
    newer = RayNode("newer", machine("8.9", **{"gpu 0": "L4", "driver": "590"}), {"CPU": 4, "GPU": 1})
    assert able([plain, with_gpu, other, newer], task(runtime="onnxruntime")) == (["plain", "ada", "newer"], {})
    gpu = task(runtime="onnxruntime", capability="8.9")
    assert able([with_gpu, newer, plain], gpu) == (["ada"], {"GPU": 1, "cc89": 1})  # another driver is another key
    unmarked = RayNode("unmarked", ada, {"CPU": 4, "GPU": 2})
    marked = RayNode("marked", ada, {"CPU": 4, "cc89": 1})
    assert able([with_gpu, unmarked], gpu) == (["ada", "unmarked"], {"GPU": 1})
    assert able([marked, with_gpu], gpu) == (["ada"], {"GPU": 1, "cc89": 1})
    assert able([marked], gpu) == (["marked"], {"cc89": 1})


def test_builds_go_to_builders_where_there_are_any() -> None:
    plain, builder = RayNode("plain", machine(), {"CPU": 4}), RayNode("builder", machine(), {"CPU": 4, "builder": 2})
    assert able([plain, builder], task("build")) == (["builder"], {"builder": 1})
    assert able([plain], task("build")) == (["plain"], {})
    assert able([plain, builder], task("export")) == (["plain", "builder"], {})


def test_gpus_that_two_steps_might_share_are_not_used() -> None:
    one, two = machine("8.9"), machine("8.9", "9.0")
    assert drop_unsharable_gpus(one, {"CPU": 4, "GPU": 1}).gpu_capabilities == ("8.9",)
    assert drop_unsharable_gpus(one, {"CPU": 4, "cc89": 1}).gpu_capabilities == ("8.9",)
    assert drop_unsharable_gpus(one, {"CPU": 4}).gpu_capabilities == ()
    assert (
        drop_unsharable_gpus(two, {"CPU": 4, "GPU": 2}).gpu_capabilities == ()
    )  # which of them a step would get is not known


def test_jobs_are_for_this_machine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--jobs applies only to local runs"):
        fleet_commands.run_fleet(toy_fleet(tmp_path, a="a"), on="auto", jobs=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, of which one pretends to have a GPU."""
    with nodes({}, {"capability": "8.9", "resources": {"cc89": 1}}) as made:
        yield made


def run_on(address: str, file: Path, store: Path, wait: float = 0.0) -> FleetRun:
    opened = StepStore(FolderBackend(store))
    pool = RayPool(opened, address, TOY, wait)
    try:
        return fleet_commands.schedule_fleet(read_fleet(file), opened, pool, (), wait)
    finally:
        pool.close()


@pytest.mark.clusters
def test_two_nodes_and_this_machine_give_equal_manifests(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toy_fleet(tmp_path, a="a", b="b", c="wrong", d="fails", e="crashes")
    run = run_on(cluster.address, file, tmp_path / "ray")
    status = {name: cell.status for name, cell in cells(run).items()}
    assert {status[f"all.{m}/fp32/ada"] for m in "ab"} == {"verified"}
    assert status["all.c/fp32/ada"] == "wrong"
    assert {status[f"all.{m}/fp32/ada"] for m in "de"} == {"failed"}
    assert not list((tmp_path / "ray" / "work").iterdir())
    assert not list((tmp_path / "ray" / "claims").iterdir())
    monkeypatch.setenv(CAPABILITY, "8.9")
    monkeypatch.setattr(FleetMachine, "this_machine", staticmethod(_pretended_here(FleetMachine.this_machine())))
    opened = StepStore(FolderBackend(tmp_path / "local"))
    pool = LocalPool(opened, 2, ForkClient("tests.fleet.toy", ()))
    try:
        fleet_commands.schedule_fleet(read_fleet(file), opened, pool)
    finally:
        pool.close()
    assert manifest(opened) == manifest(StepStore(FolderBackend(tmp_path / "ray")))


def _pretended_here(here: FleetMachine) -> Any:
    facts = {"tensorrt-rtx": "1.7.1", "gpu 0": "a toy", "capability 0": "8.9", "driver": "1"}
    return lambda: replace(here, facts={**here.facts, **facts})


@pytest.mark.clusters
def test_steps_for_a_gpu_run_on_its_node_one_at_a_time(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, **{f"m{n}": f"slow {n}" for n in range(3)})
    opened = StepStore(FolderBackend(tmp_path / "store"))
    with nodes({"capability": "8.9", "resources": {"cc89": 1}, "num_cpus": 4}) as made:
        pool = RayPool(opened, made.address, replace(TOY, module="benchmarks.fleet.counted"))
        try:
            assert fleet_commands.schedule_fleet(read_fleet(file), opened, pool)
        finally:
            pool.close()
    begun = {line.split()[1]: float(line.split()[0]) for line in (tmp_path / RUNS).read_text().splitlines()}
    times: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for told in manifest(opened):
        record = opened.read_record(told["key"])
        assert record is not None
        digest = opened.read_bytes(record.log).decode().split("digest ")[1].split()[0]
        times["gpu" in record.depends].append((begun[digest], record.depends["argv"][0]))
    assert len(times[True]) == 3 * 2 * 2  # verify and bench of the engine, for each model and variant
    for one, other in pairwise(sorted(times[True])):
        assert one[1] == "bench" or other[0] - one[0] > 0.2, (one, other)  # what verifying a slow model takes
    assert any(other[0] - one[0] < 0.2 for one, other in pairwise(sorted(times[False])))


@pytest.mark.clusters
def test_a_step_without_its_gpu_is_not_run(cluster: Any, tmp_path: Path) -> None:
    text = toy_fleet(tmp_path, a="a").read_text().replace('"8.9"', '"9.0"')
    (tmp_path / "fleet.toml").write_text(text)
    run = run_on(cluster.address, tmp_path / "fleet.toml", tmp_path / "store", wait=1.0)
    cell = cells(run)["all.a/fp32/ada"]
    assert cell.status == "built"  # and nothing more
    assert "no GPU of compute capability 9.0" in cell.reason
    assert cells(run)["all.a/fp32/cpu"].status == "verified"


@pytest.mark.clusters
def test_a_step_waits_for_a_node_that_comes(cluster: Any, tmp_path: Path) -> None:
    text = toy_fleet(tmp_path, a="a").read_text().replace('"8.9"', '"9.0"')
    (tmp_path / "fleet.toml").write_text(text)
    added: list[Any] = []
    later = threading.Timer(5.0, lambda: added.append(add_node(cluster, capability="9.0", resources={"cc90": 1})))
    later.start()
    try:
        run = run_on(cluster.address, tmp_path / "fleet.toml", tmp_path / "store", wait=90.0)
    finally:
        later.join()
        cluster.remove_node(added[0])
    assert cells(run)["all.a/fp32/ada"].status == "verified"


@pytest.mark.clusters
def test_a_node_that_dies_loses_no_step(cluster: Any, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, **{f"m{n}": f"slow {n}" for n in range(4)})
    node = add_node(cluster, num_cpus=2)
    store = tmp_path / "store"
    killer = threading.Thread(target=lambda: (_records(store, 6), cluster.remove_node(node, allow_graceful=False)))
    killer.start()
    run = run_on(cluster.address, file, store)
    killer.join()
    assert {cell.status for cell in run.cells} == {"verified"}
    quiet = run_on(cluster.address, file, tmp_path / "undisturbed")
    assert quiet
    assert manifest(StepStore(FolderBackend(store))) == manifest(StepStore(FolderBackend(tmp_path / "undisturbed")))


def _records(store: Path, count: int) -> None:
    """Wait until so many steps are done."""
    for _ in range(600):
        if len(list((store / "steps").glob("*/*"))) >= count:
            return
        time.sleep(0.1)


@pytest.mark.clusters
def test_a_node_that_has_changed_is_asked_anew(cluster: Any, tmp_path: Path) -> None:
    opened = StepStore(FolderBackend(tmp_path / "store"))
    pool = RayPool(opened, cluster.address, TOY)
    try:
        right = pool.machines
        for name, node in list(pool._nodes.items()):  # as if they were probed before an update
            pool._nodes[name] = replace(node, machine=node.machine.with_updates({"onnx": "0.1"}))
        run = fleet_commands.schedule_fleet(read_fleet(toy_fleet(tmp_path, a="a")), opened, pool)
        assert {cell.status for cell in run.cells} == {"verified"}
        assert pool.machines == right
    finally:
        pool.close()
    keys = [opened.read_record(told["key"]) for told in manifest(opened)]
    assert all(record is not None and record.depends["versions"].get("onnx") != "0.1" for record in keys)


@pytest.mark.clusters
def test_a_node_that_does_not_see_the_store_is_an_error(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = StepStore(FolderBackend(tmp_path / "store"))
    monkeypatch.setattr(
        FolderBackend, "__getstate__", lambda self: {"root": tmp_path / "elsewhere", "url": self.url}, False
    )
    with pytest.raises(StoreError, match=r"can't access the store .*; use a folder that all nodes mount"):
        RayPool(opened, cluster.address, TOY)
    assert not list((tmp_path / "store" / "claims").iterdir())


@pytest.mark.clusters
def test_no_cluster_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="can't reach a Ray cluster at 'nonsense'"):
        RayPool(StepStore(FolderBackend(tmp_path / "store")), "nonsense")


@pytest.mark.clusters
def test_a_real_model_through_the_command_line_is_the_same_on_two_nodes_and_here(cluster: Any, tmp_path: Path) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.relu(self.linear(x)))

    torch.manual_seed(0)
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(2, 8),)), tmp_path / "net.pt2")
    text = '[defaults]\nsteps = ["verify", "package"]\n[variants.fp32]\n[models.net]\nsource = "net.pt2"\n'
    (tmp_path / "fleet.toml").write_text(text)
    manifests = []
    for on in (cluster.address, "local"):
        words = ["fleet", "run", str(tmp_path / "fleet.toml"), "--on", on, "--store", str(tmp_path / on[:5])]
        done = subprocess.run(
            [sys.executable, "-m", "normdeploy", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""  # Ray prints nothing
        manifests.append(next((tmp_path / on[:5] / "runs").glob("*/manifest.jsonl")).read_bytes())
    assert manifests[0] == manifests[1]


@pytest.mark.clusters
def test_a_driver_that_is_killed_leaves_what_the_next_run_goes_on_from(cluster: Any, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, **{f"m{n}": f"slow {n}" for n in range(3)})
    program = (
        "from pathlib import Path; from tests.fleet.test_ray_pool import run_on;"
        f" run_on({cluster.address!r}, Path({str(file)!r}), Path({str(tmp_path / 'store')!r}))"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)})
    _records(tmp_path / "store", 5)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = len(list((tmp_path / "store" / "steps").glob("*/*")))
    assert 5 <= done < 3 * 16
    time.sleep(3.0)  # Ray ends what a dead driver started
    fleet_commands.remove_leftovers(StepStore(FolderBackend(tmp_path / "store")))
    assert not list((tmp_path / "store" / "work").iterdir())
    assert not list((tmp_path / "store" / "claims").iterdir())
    run = run_on(cluster.address, file, tmp_path / "store")
    assert {cell.status for cell in run.cells} == {"verified"}
    assert run.cached >= done
