"""Runs a model in a child process first, where a node might end the process (`normdeploy.crashing`)."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import processes
from .errors import RuntimeCrash

# Seconds. A child that takes longer is ended, and the run goes on here, where it can be interrupted.
_PATIENCE = 120.0
_CHILD = processes.command("normdeploy.rehearsed")


class Rehearsal:
    """A child process with the same model open.

    Args:
        request: what the child needs to open the session (`normdeploy.rehearsed`).
        model: its bytes, b"" where the request names a file.
        initializers: values of external weights.
        risks: the nodes that the error names if the child dies.

    Raises:
        RuntimeCrash: the child was ended by a signal while it opened the model.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        model: bytes,
        initializers: Mapping[str, np.ndarray],
        risks: Sequence[str],
    ) -> None:
        self._risks = risks
        self._crash = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._process = subprocess.Popen(
            _CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=processes.environment() | {"ORT_DISABLE_TELEMETRY": "1"},
        )
        self._ask({**request, "model": len(model), "initializers": list(initializers)}, model, *initializers.values())

    def run(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Run the model on the feeds in the child. Refusals are not looked at: the run here meets them, too.

        Raises:
            RuntimeCrash: the child was ended by a signal, now or in an earlier run; names the nodes that may do so.
        """
        if self._crash:
            raise RuntimeCrash(self._crash)
        self._ask({"feeds": list(feeds)}, *feeds.values())

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()

    def __del__(self) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], *parts: bytes | np.ndarray) -> None:
        """Send a request, and wait for the line that answers it."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            for part in parts:
                _send(process.stdin, part)
            process.stdin.flush()
        except BrokenPipeError:
            # How the child ended is read below.
            pass
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(_PATIENCE)
        if ready and process.stdout.readline():
            return
        if not ready:
            self.close()
            return
        code = process.wait()
        self.close()
        if code < 0:
            name = signal.Signals(-code).name
            self._crash = (
                f"onnxruntime ends its process here ({name}): {'; '.join(self._risks)}; change the node, or give inputs"
                " on which it does not"
            )
            raise RuntimeCrash(self._crash)


def _send(pipe: Any, part: bytes | np.ndarray) -> None:
    if isinstance(part, bytes):
        pipe.write(part)
        return
    # Texts of any length have no bytes of their own.
    part = part.astype(str) if part.dtype.kind == "O" else part
    # numpy's own text of a type of ml_dtypes says its size alone.
    kind = part.dtype.name if part.dtype.kind == "V" else part.dtype.str
    pipe.write(json.dumps({"dtype": kind, "shape": part.shape, "bytes": part.nbytes}).encode() + b"\n")
    pipe.write(part.tobytes())
