"""Functions that Ray runs in the processes of a node (`normdeploy.fleet.ray_pool`). They describe the node's machine
and run steps.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..errors import NormdeployError, StoreError
from .fork_client import PRELOADED, ForkClient
from .step_execution import execute_step
from .step_inputs import StepTask
from .step_keys import FleetMachine
from .step_store import StepRecord, StepStore


@dataclass(frozen=True)
class MachineChanged:
    """Answer of a node whose machine has changed since the node was probed."""

    machine: FleetMachine
    node: str


@dataclass(frozen=True)
class StepRefused:
    """Answer for a step that made no record. It is not an exception, because Ray would add text to the message of an
    exception.
    """

    error: NormdeployError


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a node's processes.

    Attributes:
        module: module that a step runs.
        preloaded: modules that are imported before any step.
        machine: function that describes the node's machine.
    """

    module: str = "normdeploy"
    preloaded: tuple[str, ...] = PRELOADED
    machine: Callable[[], FleetMachine] = FleetMachine.this_machine


def probe_node(store: bytes, worker: WorkerSettings, seen: str) -> tuple[FleetMachine, bool] | StepRefused:
    """Describe the machine of this node, and check that the node can read the store. The function runs on the node.

    Args:
        store: pickled store for `open_node_store`.
        seen: object that the driver wrote into the store.

    Returns:
        the machine, and whether the node can read the object ``seen``; a refusal if the store can't be opened.
    """
    try:
        return _current_machine(worker.machine), open_node_store(store).place.read(seen) is not None
    except StoreError:
        return _current_machine(worker.machine), False
    except NormdeployError as error:
        return StepRefused(error)


def run_on_node(
    task: StepTask, packed: bytes, worker: WorkerSettings, key: str
) -> StepRecord | MachineChanged | StepRefused:
    """Run a step on this node if the step's key on this node is ``key``. The function runs on the node.

    Returns:
        the record, the changed machine, or the error.
    """
    import ray

    try:
        store = open_node_store(packed)
        machine = _current_machine(worker.machine)
        if machine.describe_missing(task.step.needs) or task.key_on(machine)[0] != key:
            return MachineChanged(machine, ray.get_runtime_context().get_node_id())
        return execute_step(task, store, _node_process(worker, os.environ.get("CUDA_VISIBLE_DEVICES")), machine)
    except NormdeployError as error:
        return StepRefused(error)


@cache
def open_node_store(store: bytes) -> StepStore:
    """Open the driver's store. A process opens it only once.

    The store is passed as bytes, because Ray itself would unpickle it for each step. If the file of a key or a library
    is missing, Ray's unpickling would fail with an error of Ray. With Ray Client, Ray would also open the store in the
    cluster's head.

    Returns:
        the store.

    Raises:
        InputError: the signing key can't be used here.
        RuntimeUnavailable: a library is missing.
        StoreError: the store can't be used.
    """
    found = pickle.loads(store)
    assert isinstance(found, StepStore)
    return found


@cache
def _current_machine(machine: Callable[[], FleetMachine]) -> FleetMachine:
    """Describe the machine. Each process does this only once, because the libraries of a process do not change after
    its start.
    """
    return machine()


_warmed: dict[tuple[WorkerSettings, str | None], ForkClient] = {}


def _node_process(worker: WorkerSettings, devices: str | None) -> ForkClient:
    """Return the warm process that this process of Ray uses.

    Ray sets the GPU of a step in the environment. A warm process keeps the environment that it had at its start, so a
    step with other devices needs a new warm process.
    """
    if (worker, devices) not in _warmed:
        while _warmed:
            _warmed.popitem()[1].close()
        _warmed[worker, devices] = ForkClient(worker.module, worker.preloaded)
    return _warmed[worker, devices]
