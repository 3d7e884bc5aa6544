"""What the processes of a Ray node do (`normdeploy.fleet.on_ray`): say what machine it is, and run steps there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..errors import NormdeployError, StoreError
from .keys import Machine
from .store import Record, Store
from .tasks import Task
from .work import perform
from .workers import PRELOADED, Warm


@dataclass(frozen=True)
class Moved:
    """The answer of a node that is not the machine any more which it was when it was probed."""

    machine: Machine
    node: str


@dataclass(frozen=True)
class Refused:
    """The answer of a step that came to no record. An exception as such would be raised by Ray, with more around it."""

    error: NormdeployError


@dataclass(frozen=True)
class Worker:
    """What a node's processes use: the module that a step runs, what is imported before, and how a machine is read."""

    module: str = "normdeploy"
    preloaded: tuple[str, ...] = PRELOADED
    machine: Callable[[], Machine] = Machine.here


def probe(store: bytes, worker: Worker, seen: str) -> tuple[Machine, bool] | Refused:
    """On a node: what it is, and whether it sees what the driver wrote into the store (pickled: `opened`)."""
    try:
        return _here(worker.machine), opened(store).place.read(seen) is not None
    except StoreError:
        return _here(worker.machine), False
    except NormdeployError as error:
        return Refused(error)


def run(task: Task, packed: bytes, worker: Worker, key: str) -> Record | Moved | Refused:
    """On a node: a step that has this key."""
    import ray

    try:
        store = opened(packed)
        machine = _here(worker.machine)
        if machine.lacks(task.step.needs) or task.key(machine)[0] != key:
            return Moved(machine, ray.get_runtime_context().get_node_id())
        return perform(task, store, _warm(worker, os.environ.get("CUDA_VISIBLE_DEVICES")), machine)
    except NormdeployError as error:
        return Refused(error)


@cache
def opened(store: bytes) -> Store:
    """The driver's store, once in a process. Ray would open it by itself, for each step anew, and where that fails, for
    want of a key's file or of a library, as an error of its own; with Ray Client in the cluster's head too.

    Raises:
        InputError: the key that signs can't be used here.
        RuntimeUnavailable: a library is missing.
        StoreError: it can't be used.
    """
    found = pickle.loads(store)
    assert isinstance(found, Store)
    return found


@cache
def _here(machine: Callable[[], Machine]) -> Machine:
    """Read once in a process, whose libraries stay what they were when it began."""
    return machine()


_warmed: dict[tuple[Worker, str | None], Warm] = {}


def _warm(worker: Worker, devices: str | None) -> Warm:
    """This process's warm one. The GPU that Ray gives to a step is in its environment from the start."""
    if (worker, devices) not in _warmed:
        while _warmed:
            _warmed.popitem()[1].close()
        _warmed[worker, devices] = Warm(worker.module, worker.preloaded)
    return _warmed[worker, devices]
