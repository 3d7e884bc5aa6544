"""Steps in processes of this machine: the default, beside which there is Ray (`normdeploy.fleet.on_ray`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .keys import Machine
from .steps import Step
from .store import Record, Store
from .tasks import Task
from .work import perform
from .workers import Warm


class Local:
    """Up to ``size`` steps at a time, each in a fork of one warm process.

    Steps that need a GPU run one at a time on it: a race beside another one measures both.
    """

    shares_files = True

    def __init__(self, store: Store, size: int | None = None, warm: Warm | None = None) -> None:
        self.size = size or os.cpu_count() or 1
        self._store, self._warm = store, warm or Warm()
        self._threads = ThreadPoolExecutor(self.size)
        self._gpu = ThreadPoolExecutor(1)
        self._machines = (Machine.here(),)

    @property
    def machines(self) -> Sequence[Machine]:
        return self._machines

    def submit(self, task: Task, machine: Machine) -> Future[Record]:
        threads = self._gpu if task.step.needs.capability else self._threads
        return threads.submit(perform, task, self._store, self._warm, machine)

    def want(self, steps: Sequence[Step]) -> None:
        """This machine stays what it is."""

    def close(self) -> None:
        """End what runs."""
        for threads in (self._threads, self._gpu):
            threads.shutdown(wait=False, cancel_futures=True)
        self._warm.close()
        for threads in (self._threads, self._gpu):
            threads.shutdown(wait=True)
