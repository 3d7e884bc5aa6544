"""Start the server process `normdeploy.fleet.fork_server`, send calls to it, and restart it if it dies."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NormdeployError
from ..ort_sessions.child_process import child_environment, module_command

# Modules that most steps import, so the server imports them before it forks.
PRELOADED = (
    *(
        "normdeploy.verbs.export.export_function",
        "normdeploy.verbs.optimize.optimize_function",
        "normdeploy.verbs.verify.verify_function",
        "normdeploy.verbs.bench.bench_function",
    ),
    *(
        "normdeploy.verbs.build.build_function",
        "normdeploy.verbs.package.package_function",
        "normdeploy.verbs.recheck.recheck_function",
    ),
    *("normdeploy.cli.app", "normdeploy.reports.report_page", "normdeploy.reports.plots", "onnxruntime", "onnxscript"),
    *("torch.onnx._internal.exporter._core", "torch.export._trace", "torch._dynamo", "torch._inductor.decomposition"),
)


class ProcessVanished(NormdeployError):
    """Error for a step whose process ended, although the step itself probably did not cause this."""


@dataclass(frozen=True)
class CallEnd:
    """Result of a call.

    Attributes:
        code: exit code; if negative, the number of the signal that ended the call.
        why: "seconds" or "memory" if the limit of this name ended the call; "ended" if the server ended the call; else
            "".
        seconds: duration of the call.
        peak: maximum memory in bytes.
    """

    code: int
    why: str
    seconds: float
    peak: int


class ForkClient:
    """Manage one warm process: a server that has the libraries in memory. The first call starts it. All methods are
    safe to use from many threads.

    Args:
        module: module to run, as ``python -m`` runs it.
        preloaded: modules that are imported before any call.
    """

    def __init__(self, module: str = "normdeploy", preloaded: tuple[str, ...] = PRELOADED) -> None:
        self.module = module
        self._preloaded = preloaded
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._server: _ForkServer | None = None

    def run(self, argv: tuple[str, ...], folder: Path, log: Path, seconds: float = 0, memory: int = 0) -> CallEnd:
        """Run the module in a folder and wait until it ends.

        Args:
            argv: arguments of the module.
            log: file to which the output is appended.
            seconds: time limit; 0 for none.
            memory: memory limit in bytes; 0 for none.

        Returns:
            exit code and measurements.

        Raises:
            ProcessVanished: the warm process died, or another process killed the call.
        """
        future: Future[CallEnd] = Future()
        with self._lock:
            name = str(next(self._numbers))
            server = self._running_server()
            server.waiting[name] = future
            request = {"id": name, "module": self.module, "argv": list(argv), "folder": str(folder), "log": str(log)}
            server.send(request | {"seconds": seconds, "memory": memory})
        end = future.result()
        if end.code == -9 and not end.why:
            raise ProcessVanished(
                "it was killed by signal 9 from outside, possibly because the system ran out of memory"
            )
        return end

    def close(self) -> None:
        """End the process and its calls."""
        with self._lock:
            server = self._server
            self._server = None
        if server is not None:
            server.close()

    def _running_server(self) -> _ForkServer:
        if self._server is None or self._server.dead:
            self._server = _ForkServer([*module_command("normdeploy.fleet.fork_server"), *self._preloaded])
        return self._server


class _ForkServer:
    """One warm process and the calls that wait for its answers."""

    def __init__(self, words: list[str]) -> None:
        self.waiting: dict[str, Future[CallEnd]] = {}
        self.dead = False
        # The process gets a separate session, so that Ctrl-C reaches only the parent process.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Equal inputs must give equal files, so files contain no current time.
            env={"SOURCE_DATE_EPOCH": "0"} | child_environment(),
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._read_answers, daemon=True)
        self._listener.start()

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.dead = True
            self._fail_pending_calls(request["id"])

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._listener.join()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if (future := self.waiting.pop(told.get("id", ""), None)) is not None:
                future.set_result(CallEnd(told["code"], told["why"], told["seconds"], told["peak"]))
        self.dead = True
        self._process.wait()
        for name in list(self.waiting):
            self._fail_pending_calls(name)

    def _fail_pending_calls(self, name: str) -> None:
        if (future := self.waiting.pop(name, None)) is not None:
            future.set_exception(ProcessVanished("the process that preloads the libraries died"))
