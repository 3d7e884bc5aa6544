"""Start Node.js with onnxruntime-web, and exchange models and tensors with it.

`web_session.mjs` describes the frames. Each runner has a process of its own, which lives until the runner is closed,
or until this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..environment import NODE, find_web_package
from ..errors import NormdeployError, RuntimeUnavailable

_PROGRAM = Path(__file__).with_name("web_session.mjs")
_LENGTH = struct.Struct("<I")
# Maximum number of characters of the log that an error shows.
_MOST_CHARACTERS = 300
# Maximum seconds for the process to end after its input is closed.
_FAREWELL = 5.0

# The pipe for answers has a file descriptor that only other systems pass on.
UNSUPPORTED = "normdeploy does not run onnxruntime-web on Windows; use WSL"
MISSING_NODE = "Node.js is not installed; install it, then run `npm install onnxruntime-web` in the working folder"
MISSING_PACKAGE = (
    "onnxruntime-web was not found; run `npm install onnxruntime-web` in the working folder, or set NODE_PATH to the"
    " node_modules folder that contains it"
)


class WebProcessError(NormdeployError):
    """onnxruntime-web reports an error, or its process ended.

    Attributes:
        ended: True if the process ended.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


def explain_missing_web() -> str | None:
    """Explain why onnxruntime-web can't be used here, without starting Node.js.

    Returns:
        One line that says what to install; None if both are installed.
    """
    if sys.platform == "win32":
        return UNSUPPORTED
    if shutil.which(NODE) is None:
        return MISSING_NODE
    if find_web_package() is None:
        return MISSING_PACKAGE
    return None


class WebProcess:
    """Node.js with onnxruntime-web and one model.

    Args:
        threads: number of threads of WebAssembly.
        seconds: time limit of one request, which may be changed between requests.

    Raises:
        RuntimeUnavailable: Node.js or onnxruntime-web is missing or broken.
    """

    def __init__(self, threads: int, seconds: float) -> None:
        if reason := explain_missing_web():
            raise RuntimeUnavailable(reason)
        self.seconds = seconds
        self._is_late = False
        self._lock = threading.Lock()
        # Length of the log after the last answer.
        self._logged = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_end_process`)
        reading, writing = os.pipe()
        package = os.path.abspath(str(find_web_package()))
        command = [str(shutil.which(NODE)), str(_PROGRAM), package, str(writing), str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[writing]
            )
        except OSError as error:
            os.close(reading)
            self._log.close()
            raise RuntimeUnavailable(f"Node.js can't be started: {error}") from error
        finally:
            os.close(writing)
        self._answers = os.fdopen(reading, "rb")
        # Also ends the process of a runner that is never closed.
        self.close = weakref.finalize(self, _end_process, self._process, self._answers, self._log)
        try:
            self.request({"do": "start"})
        except WebProcessError as error:
            self.close()
            raise RuntimeUnavailable(f"onnxruntime-web can't be started: {error}") from error

    def request(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray | bytes] = ()) -> dict[str, Any]:
        """Send a request, and wait for its answer.

        Returns:
            Header of the answer. Its key "values" holds the bytes of each array.

        Raises:
            WebProcessError: onnxruntime-web reports an error, the process ended, or the time limit passed.
        """
        with self._lock:
            answer = self._exchange(header, arrays)
        if "error" in answer:
            raise WebProcessError(str(answer["error"]))
        return answer

    def _exchange(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray | bytes]) -> dict[str, Any]:
        if not self.close.alive:
            raise WebProcessError("the runner is closed", ended=True)
        timer = threading.Timer(self.seconds, self._stop_late)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._write_request(header, arrays)
            answer = self._read_answer()
        except BaseException:
            # After Ctrl-C the answer would be read as that of the next request.
            self._process.kill()
            raise
        finally:
            timer.cancel()
        self._logged = os.fstat(self._log.fileno()).st_size
        return answer

    def _write_request(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray | bytes]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        views = [_as_bytes(array) for array in arrays]
        text = json.dumps({**header, "sizes": [view.nbytes for view in views]}).encode()
        pipe.write(_LENGTH.pack(len(text)) + text)
        for view in views:
            pipe.write(view)
        pipe.flush()

    def _read_answer(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read_bytes(_LENGTH.size))
        answer = json.loads(self._read_bytes(length))
        answer["values"] = [self._read_bytes(size) for size in answer["sizes"]]
        return dict(answer)

    def _read_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            count = self._answers.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise WebProcessError(self._describe_end(), ended=True)
            done += count
        return data

    def _stop_late(self) -> None:
        self._is_late = True
        self._process.kill()

    def _describe_end(self) -> str:
        """Describe why the process ended."""
        status = self._process.wait()
        if self._is_late:
            return f"Node.js was stopped after {self.seconds:g} s, the time limit of a load or a run"
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with the exit code {status}"
        self._log.seek(self._logged)
        return f"Node.js ended {how}{_find_error(self._log.read().decode(errors='replace'))}"


def _as_bytes(array: np.ndarray | bytes) -> memoryview:
    if isinstance(array, bytes):
        return memoryview(array)
    return array.reshape(-1).view(np.uint8).data


def _find_error(log: str) -> str:
    """Find the line of a log that names the error.

    Returns:
        ": line", or "".
    """
    lines = [line.strip() for line in log.splitlines()]
    named = [line for line in lines if "rror" in line or "emory" in line] or [line for line in lines if line]
    return f": {named[0]}"[:_MOST_CHARACTERS] if named else ""


def _end_process(process: subprocess.Popen[bytes], answers: IO[bytes], log: IO[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_FAREWELL)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    answers.close()
    log.close()
