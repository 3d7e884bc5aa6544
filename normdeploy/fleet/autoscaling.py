"""What tells Ray's autoscaler that steps wait for a machine which no node is.

Ray starts nodes for tasks that no node has room for. A step is given to nodes that are there, so one without a machine
is not among them; a task stands for it that does nothing and takes what the node would state: ``cc89``, ``builder``, a
CPU. Such tasks end with the driver, however that ends, unlike ``ray.autoscaler.sdk.request_resources``, which holds
until somebody takes it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .job_steps import JobStep, StepNeeds

BUILDER = "builder"
CPU = "CPU"


def gpu_resource(needs: StepNeeds) -> str:
    """What a node for GPUs of that kind states: "cc89"."""
    return f"cc{needs.capability.replace('.', '')}"


def resource_of_step(step: JobStep) -> str:
    """The resource by which Ray finds a machine for a step, besides a CPU; "CPU" where that is all."""
    if step.needs.capability:
        return gpu_resource(step.needs)
    if step.verb == "build":
        return BUILDER
    return CPU


class ResourceDemand:
    """Args:
    ray: the module, connected.
    """

    def __init__(self, ray: Any) -> None:
        self._ray, self._task = ray, ray.remote(max_retries=0)(_run_placeholder)
        # resource -> tasks
        self._pending: dict[str, list[Any]] = {}

    def set_pending_resources(self, wanted: Iterable[str], offered: Iterable[str]) -> None:
        """Have one task wait for each of the resources, but none for those that a node has: what a step lacks there,
        another node of the kind would lack too."""
        counts = Counter(wanted)
        for name in offered:
            counts.pop(name, None)
        for name in {*counts, *self._pending}:
            tasks = self._pending.pop(name, [])
            if tasks:
                ended = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]
            else:
                ended = []
            tasks = [task for task in tasks if task not in ended]
            for task in tasks[counts[name] :]:
                # of Ray: it may have ended, or the cluster may be gone
                with suppress(Exception):
                    self._ray.cancel(task, force=True)
            kept = tasks[: counts[name]]
            kept += [self._submit_placeholder(name) for _ in range(counts[name] - len(kept))]
            if kept:
                self._pending[name] = kept

    def _submit_placeholder(self, resource: str) -> Any:
        if resource == CPU:
            amounts = {}
        else:
            amounts = {resource: 1.0}
        return self._task.options(num_cpus=1, resources=amounts, name=f"a step waits for {resource}").remote()


def _run_placeholder() -> None:
    """Runs when the node is there."""
