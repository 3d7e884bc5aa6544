"""What the processes of a Ray node do (`normdeploy.fleet.ray_pool`): say what machine it is, and run steps there."""

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
    """The answer of a node that is not the machine any more which it was when it was probed."""

    machine: FleetMachine
    node: str


@dataclass(frozen=True)
class StepRefused:
    """The answer of a step that came to no record. An exception as such would be raised by Ray, with more around it."""

    error: NormdeployError


@dataclass(frozen=True)
class WorkerSettings:
    """What a node's processes use: the module that a step runs, what is imported before, and how a machine is read."""

    module: str = "normdeploy"
    preloaded: tuple[str, ...] = PRELOADED
    machine: Callable[[], FleetMachine] = FleetMachine.this_machine


def probe_node(store: bytes, worker: WorkerSettings, seen: str) -> tuple[FleetMachine, bool] | StepRefused:
    """On a node: what it is, and whether it sees what the driver wrote into the store (pickled: `open_node_store`)."""
    try:
        return _current_machine(worker.machine), open_node_store(store).place.read(seen) is not None
    except StoreError:
        return _current_machine(worker.machine), False
    except NormdeployError as error:
        return StepRefused(error)


def run_on_node(
    task: StepTask, packed: bytes, worker: WorkerSettings, key: str
) -> StepRecord | MachineChanged | StepRefused:
    """On a node: a step that has this key."""
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
    """The driver's store, once in a process. Ray would open it by itself, for each step anew, and where that fails, for
    want of a key's file or of a library, as an error of its own; with Ray Client in the cluster's head too.

    Raises:
        InputError: the key that signs can't be used here.
        RuntimeUnavailable: a library is missing.
        StoreError: it can't be used.
    """
    found = pickle.loads(store)
    assert isinstance(found, StepStore)
    return found


@cache
def _current_machine(machine: Callable[[], FleetMachine]) -> FleetMachine:
    """Read once in a process, whose libraries stay what they were when it began."""
    return machine()


_warmed: dict[tuple[WorkerSettings, str | None], ForkClient] = {}


def _node_process(worker: WorkerSettings, devices: str | None) -> ForkClient:
    """This process's warm one. The GPU that Ray gives to a step is in its environment from the start."""
    if (worker, devices) not in _warmed:
        while _warmed:
            _warmed.popitem()[1].close()
        _warmed[worker, devices] = ForkClient(worker.module, worker.preloaded)
    return _warmed[worker, devices]
