"""Run steps on the nodes of a Ray cluster.

Each node with CPUs is probed once. The probe is a task that reports the node's machine and whether the node can read
the store. The driver chooses a machine for each step. The step may then run on every node on which the step's key is
the same as on this machine, and Ray picks one of these nodes. A node states its GPUs (``num_gpus``, which Ray detects).
It may also state custom resources: ``cc89`` for GPUs of compute capability 8.9, ``builder`` for machines that build
engines. A step that needs a GPU takes one unit of each GPU resource that its nodes state, so that two steps never share
a GPU.
"""

from __future__ import annotations

import pickle
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..errors import NormdeployError, RuntimeUnavailable, StoreError
from .autoscaling import BUILDER, CPU, ResourceDemand, gpu_resource, resource_of_step
from .fork_client import ProcessVanished
from .job_steps import JobStep
from .ray_connection import connect_ray
from .ray_node import MachineChanged, StepRefused, WorkerSettings, probe_node, run_on_node
from .step_inputs import StepTask
from .step_keys import FleetMachine
from .step_store import StepRecord, StepStore

# Seconds between two checks of the nodes.
_LOOK = 1.0
# Maximum seconds until a new node has started a process and answered its probe.
_PROBE = 300.0


@dataclass(frozen=True)
class RayNode:
    """Node that was probed. ``resources`` maps the names of the node's resources to amounts."""

    id: str
    machine: FleetMachine
    resources: Mapping[str, float]


@dataclass
class _PendingStep:
    """Step that was submitted to Ray and has not ended."""

    task: StepTask
    nodes: frozenset[str]
    future: Future[StepRecord]
    reference: Any


class RayPool:
    """Run steps on a Ray cluster. Each step runs in a fork of a warm process, which a Ray process of the node keeps.

    Args:
        address: "auto" for this machine's own cluster, "HOST:PORT", or "ray://HOST:10001".
        worker: settings of the nodes' processes; None for the defaults.
        wait: seconds to wait for a first node with a CPU, if the cluster has no such node.

    Raises:
        RuntimeUnavailable: Ray is not installed, the cluster can't be reached, or no node has normdeploy.
        StoreError: a node can't read the store.
    """

    shares_files = False

    def __init__(self, store: StepStore, address: str, worker: WorkerSettings | None = None, wait: float = 0.0) -> None:
        self._ray = connect_ray(address)
        self._url, self._sent, self._worker = store.place.url, pickle.dumps(store), worker or WorkerSettings()
        self._lock = threading.Lock()
        self._nodes: dict[str, RayNode] = {}
        self._probes: dict[str, tuple[Any, float, Mapping[str, float]]] = {}
        self._useless: dict[str, NormdeployError] = {}
        self._waiting: list[_PendingStep] = []
        seen = f"{secrets.token_hex(8)}.seen"
        self._seen, self._unclaim = f"claims/{seen}", store.place.claim(seen) or (lambda: None)
        self._run = self._ray.remote(max_retries=0)(run_on_node)
        self._probe = self._ray.remote(max_retries=0, num_cpus=0)(probe_node)
        self._demand, self._offered = ResourceDemand(self._ray), set[str]()
        try:
            self._refresh_nodes(_PROBE)
            self._await_first_node(wait)
            for error in self._useless.values():
                raise error
            if not self._nodes:
                raise RuntimeUnavailable(
                    f"no node of the Ray cluster {address!r} with a CPU responds; start one with ray start"
                )
        except BaseException as error:
            self._disconnect()
            if isinstance(error, NormdeployError) or not isinstance(error, Exception):
                raise
            raise RuntimeUnavailable(f"the Ray cluster {address!r} stopped responding ({error})") from error
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_nodes, daemon=True)
        self._watch.start()

    @property
    def size(self) -> int:
        """Return the number of CPUs of all nodes, at least 1."""
        return max(1, int(sum(node.resources["CPU"] for node in self._list_nodes())))

    @property
    def machines(self) -> Sequence[FleetMachine]:
        """Return the machines of all nodes.

        Returns:
            the machines, without duplicates.
        """
        return tuple({repr(node.machine): node.machine for node in self._list_nodes()}.values())

    def submit(self, task: StepTask, machine: FleetMachine) -> Future[StepRecord]:
        """Submit a step to the nodes that may run it.

        Returns:
            a future of the step's record. It fails with ProcessVanished if no node can run the step any more.
        """
        future: Future[StepRecord] = Future()
        key = task.key_on(machine)[0]
        able, amounts = find_nodes_for(self._list_nodes(), task, key)
        if not able:
            future.set_exception(ProcessVanished("the machine assigned to it is gone"))
            return future
        gpus = amounts.pop("GPU", 0.0)
        reference = self._run.options(
            num_cpus=1,
            num_gpus=gpus,
            resources=amounts,
            label_selector={"ray.io/node-id": f"in({','.join(node.id for node in able)})"},
            name=task.step.name,
        ).remote(task, self._sent, self._worker, key)
        waiting = _PendingStep(task, frozenset(node.id for node in able), future, reference)
        with self._lock:
            self._waiting.append(waiting)
        reference.future().add_done_callback(lambda answer: self._handle_answer(waiting, answer))
        return future

    def set_waiting_steps(self, steps: Sequence[JobStep]) -> None:
        """Tell Ray's autoscaler which resources the waiting steps need."""
        with self._lock:
            offered = set(self._offered)
        # Ray raises if the cluster is gone; the thread that watches the nodes reports that.
        with suppress(Exception):
            self._demand.set_pending_resources(map(resource_of_step, steps), offered)

    def close(self) -> None:
        """Cancel the running steps and disconnect."""
        self.set_waiting_steps(())
        self._ended.set()
        self._watch.join()
        with self._lock:
            waiting = self._waiting
            self._waiting = []
        for one in waiting:
            # The step may have ended, or the cluster may be gone.
            with suppress(Exception):
                self._ray.cancel(one.reference, force=True)
        self._disconnect()

    def _disconnect(self) -> None:
        self._unclaim()
        self._ray.shutdown()

    def _await_first_node(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not (self._nodes or self._useless) and time.monotonic() < until:
            self._demand.set_pending_resources([CPU], self._offered)
            time.sleep(_LOOK)
            self._refresh_nodes(_PROBE)
        self._demand.set_pending_resources((), ())

    def _list_nodes(self) -> list[RayNode]:
        with self._lock:
            return list(self._nodes.values())

    def _handle_answer(self, waiting: _PendingStep, answer: Future[StepRecord | MachineChanged | StepRefused]) -> None:
        with self._lock:
            # The step's nodes were lost, or the run has ended.
            if waiting not in self._waiting:
                return
            self._waiting.remove(waiting)
        try:
            told = answer.result()
        except self._ray.exceptions.RayTaskError as error:
            # The step raised an unexpected error.
            waiting.future.set_exception(error)
        except Exception as error:
            # Ray raises if the node, its process or the connection is gone.
            lines = str(error).strip().splitlines()
            waiting.future.set_exception(
                ProcessVanished(f"the machine that ran it is gone ({lines[0] if lines else error})")
            )
        else:
            if isinstance(told, MachineChanged):
                with self._lock:
                    if (node := self._nodes.get(told.node)) is not None:
                        self._nodes[told.node] = replace(
                            node, machine=drop_unsharable_gpus(told.machine, node.resources)
                        )
                waiting.future.set_exception(ProcessVanished("the machine assigned to it has changed"))
            elif isinstance(told, StepRefused):
                waiting.future.set_exception(told.error)
            else:
                waiting.future.set_result(told)

    def _watch_nodes(self) -> None:
        while not self._ended.wait(_LOOK):
            try:
                self._refresh_nodes()
            except Exception as error:
                # Ray raises if the whole cluster is gone.
                lost = f"the Ray cluster is unreachable ({error})"
                with self._lock:
                    self._nodes.clear()
                self._fail_orphaned_steps(frozenset(), lost)

    def _refresh_nodes(self, seconds: float = 0.0) -> None:
        """Find new and lost nodes, and wait up to ``seconds`` for the answers of new nodes."""
        alive = {n["NodeID"]: n["Resources"] for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}
        with self._lock:
            self._offered = {name for resources in alive.values() for name, amount in resources.items() if amount}
            self._nodes = {name: node for name, node in self._nodes.items() if name in alive}
            known = {*self._nodes, *self._probes, *self._useless}
        for name in alive.keys() - known:
            reference = self._probe.options(label_selector={"ray.io/node-id": name}).remote(
                self._sent, self._worker, self._seen
            )
            self._probes[name] = reference, time.monotonic(), alive[name]
        references = [reference for reference, _, _ in self._probes.values()]
        if references:
            done = self._ray.wait(references, num_returns=len(references), timeout=seconds)[0]
        else:
            done = []
        for name, (reference, since, resources) in list(self._probes.items()):
            if reference in done:
                self._register_node(name, reference, resources)
            elif name not in alive or time.monotonic() - since > _PROBE:
                self._useless[name] = RuntimeUnavailable(f"the Ray node {name[:8]} did not respond")
            else:
                continue
            del self._probes[name]
        self._fail_orphaned_steps(frozenset(alive), "the machine assigned to it is gone")

    def _register_node(self, name: str, reference: Any, resources: Mapping[str, float]) -> None:
        try:
            answer = self._ray.get(reference)
        except Exception as error:
            # Ray failed, or normdeploy could not be imported on the node.
            if not any(node["NodeID"] == name and node["Alive"] for node in self._ray.nodes()):
                # The node was lost while it was probed.
                return
            lines = [line for line in str(error).strip().splitlines() if line.strip()]
            self._useless[name] = RuntimeUnavailable(
                f"the Ray node {name[:8]} can't run normdeploy ({lines[-1].strip() if lines else error}); "
                "install the same version there"
            )
            return
        if isinstance(answer, StepRefused):
            self._useless[name] = RuntimeUnavailable(f"the Ray node {name[:8]} can't use the store: {answer.error}")
            return
        machine, told = answer
        if not told:
            self._useless[name] = StoreError(
                f"the Ray node {name[:8]} can't access the store {self._url!r}; use a folder that all "
                "nodes mount at this path, or a URL such as s3://bucket/folder"
            )
            return
        with self._lock:
            self._nodes[name] = RayNode(name, drop_unsharable_gpus(machine, resources), resources)

    def _fail_orphaned_steps(self, alive: frozenset[str], why: str) -> None:
        """Fail steps whose nodes are all lost, because such steps would wait forever."""
        with self._lock:
            lost = [one for one in self._waiting if not one.nodes & alive]
            self._waiting = [one for one in self._waiting if one.nodes & alive]
        for one in lost:
            with suppress(Exception):
                self._ray.cancel(one.reference, force=True)
            one.future.set_exception(ProcessVanished(why))


def find_nodes_for(nodes: Sequence[RayNode], task: StepTask, key: str) -> tuple[Sequence[RayNode], dict[str, float]]:
    """Find the nodes that may run a step.

    Args:
        key: key of the step on the machine that the driver chose.

    Returns:
        the nodes, and the resources that the step takes besides a CPU: name → amount.
    """
    needs = task.step.needs
    able = [n for n in nodes if not n.machine.describe_missing(needs) and task.key_on(n.machine)[0] == key]
    names = ("GPU", gpu_resource(needs)) if needs.capability else ()
    amounts: dict[str, float] = {}
    for name in (BUILDER,) if task.step.verb == "build" and not names else names:
        stating = [n for n in able if n.resources.get(name)]
        if stating and (not amounts or len(stating) == len(able)):
            able, amounts[name] = stating, 1.0
    return able, amounts


def drop_unsharable_gpus(machine: FleetMachine, resources: Mapping[str, float]) -> FleetMachine:
    """Remove the GPUs from a machine's description if steps can't use them safely.

    If the node states no GPU, its GPUs are not safe, because Ray can't keep two steps from sharing a GPU. If the node
    has several kinds of GPUs, they are not safe either, because it is unknown which kind a step would get.

    Returns:
        the machine, or a copy without GPUs.
    """
    kinds = set(machine.gpu_capabilities)
    stated = resources.get("GPU") or any(resources.get(f"cc{kind.replace('.', '')}") for kind in kinds)
    if len(kinds) == 1 and stated:
        return machine
    facts = {name: value for name, value in machine.facts.items() if not name.startswith("capability ")}
    return replace(machine, facts=facts)
