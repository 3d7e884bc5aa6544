"""Run steps in processes of this machine. This pool is the default; the alternative is Ray
(`normdeploy.fleet.ray_pool`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .fork_client import ForkClient
from .job_steps import JobStep
from .step_execution import execute_step
from .step_inputs import StepTask
from .step_keys import FleetMachine
from .step_store import StepRecord, StepStore


class LocalPool:
    """Run up to ``size`` steps at a time, each in a fork of one warm process.

    Steps that need a GPU run one at a time, because two benchmarks at the same time would disturb each other.
    """

    shares_files = True

    def __init__(self, store: StepStore, size: int | None = None, warm: ForkClient | None = None) -> None:
        self.size = size or os.cpu_count() or 1
        self._store, self._warm = store, warm or ForkClient()
        self._threads = ThreadPoolExecutor(self.size)
        self._gpu = ThreadPoolExecutor(1)
        self._machines = (FleetMachine.this_machine(),)

    @property
    def machines(self) -> Sequence[FleetMachine]:
        """Return this machine."""
        return self._machines

    def submit(self, task: StepTask, machine: FleetMachine) -> Future[StepRecord]:
        """Queue a step.

        Returns:
            a future of its record.
        """
        if task.step.needs.capability:
            threads = self._gpu
        else:
            threads = self._threads
        return threads.submit(execute_step, task, self._store, self._warm, machine)

    def set_waiting_steps(self, steps: Sequence[JobStep]) -> None:
        """Do nothing, because no machine can be added to this pool."""

    def close(self) -> None:
        """End the running steps."""
        for threads in (self._threads, self._gpu):
            threads.shutdown(wait=False, cancel_futures=True)
        self._warm.close()
        for threads in (self._threads, self._gpu):
            threads.shutdown(wait=True)
