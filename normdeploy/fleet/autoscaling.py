"""Tell Ray's autoscaler which resources steps wait for.

Ray starts new nodes for tasks that existing nodes can't run. But the driver submits a step only to existing nodes, so
Ray does not see a step that no node can run. A placeholder task represents such a step. It does nothing and requires
the resource that a suitable node states: ``cc89``, ``builder``, or a CPU. Placeholder tasks end when the driver ends.
In contrast, a request by ``ray.autoscaler.sdk.request_resources`` would stay in force until somebody revokes it.
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
    """Return the resource that a node with GPUs of the required compute capability states.

    Returns:
        for example "cc89".
    """
    return f"cc{needs.capability.replace('.', '')}"


def resource_of_step(step: JobStep) -> str:
    """Return the resource that Ray must find for a step in addition to a CPU.

    Returns:
        a GPU resource or "builder"; "CPU" if a CPU is enough.
    """
    if step.needs.capability:
        return gpu_resource(step.needs)
    if step.verb == "build":
        return BUILDER
    return CPU


class ResourceDemand:
    """Keep placeholder tasks for resources that steps wait for.

    Args:
        ray: the module of Ray, connected to a cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray, self._task = ray, ray.remote(max_retries=0)(_run_placeholder)
        # Resource → its placeholder tasks.
        self._pending: dict[str, list[Any]] = {}

    def set_pending_resources(self, wanted: Iterable[str], offered: Iterable[str]) -> None:
        """Keep one placeholder task for each wanted resource.

        A resource that an existing node offers gets no task, because a new node of the same kind could not run the step
        either.

        Args:
            wanted: resource that each waiting step needs.
            offered: resources of the existing nodes.
        """
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
                # Ray raises if the task has ended or the cluster is gone.
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
    """Do nothing. Ray runs this task when a new node offers its resource."""
