"""Start the worker, the process that builds an engine (``normdeploy.engines.builder_process``), and read its answers.
The worker ends when this process ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from ..ort_sessions import child_process
from ..types import Progress

COMMAND = child_process.module_command("normdeploy.engines.builder_process")


@dataclass(frozen=True)
class WorkerEnd:
    """Last answer and exit of a worker that ended.

    Attributes:
        answer: last answer of the worker; empty if it gave no answer.
        status: exit status of the worker.
        late: True if the timeout stopped the worker.
    """

    answer: dict[str, Any]
    status: int
    late: bool


def run_worker(request: Mapping[str, Any], log: IO[bytes], progress: Progress, timeout: float | None) -> WorkerEnd:
    """Run the worker until it ends or the timeout passes.

    Args:
        request: see ``normdeploy.engines.builder_process``.
        log: file for standard error.
        timeout: seconds; None for no timeout.

    Returns:
        last answer, exit status and whether the timeout passed.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=log, env=child_process.child_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def stop_worker() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout or 0, stop_worker)
    if timeout is not None:
        timer.start()
    answer: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        progress("build", 0, 0)
        for line in process.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                progress("build", *answer["progress"])
        return WorkerEnd(answer, process.wait(), late.is_set())
    finally:
        # The timer is cancelled also on Ctrl-C.
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
