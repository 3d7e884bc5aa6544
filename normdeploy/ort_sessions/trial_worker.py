"""Open a session in a child process and run it on each set of feeds that `normdeploy.ort_sessions.trial_process` sends.

A request is a line of JSON, followed by arrays. Each array is sent as a line of JSON and its bytes. The answer is
always an empty line, even if onnxruntime raised an error: the parent process only needs to know whether this process
ends.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from .session import open_session, to_ort


def main() -> None:
    """Answer requests until standard input ends."""
    opening = _read_request()
    model = sys.stdin.buffer.read(opening["model"]) or opening["path"]
    held = {name: to_ort(_read_array()) for name in opening["initializers"]}
    session = None
    # Errors are ignored here: the parent process gets the same error when it opens the session.
    with contextlib.suppress(Exception):
        session = open_session(
            model,
            optimize=opening["optimize"],
            threads=1,
            entries=opening["entries"],
            initializers=held,
            rehearsed=False,
        )
    _write_answer()
    while request := _read_request():
        feeds = {name: _read_array() for name in request["feeds"]}
        if session is not None:
            with contextlib.suppress(Exception):
                _run_session(session, feeds)
        _write_answer()


def _run_session(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> None:
    # onnxruntime accepts texts only as arrays, and bfloat16 only as OrtValues.
    if any(array.dtype.kind == "U" for array in feeds.values()):
        session.run(None, feeds)
    else:
        session.run_with_ort_values(None, {name: to_ort(array) for name, array in feeds.items()})


def _read_request() -> dict[str, Any]:
    line = sys.stdin.buffer.readline()
    if line:
        return json.loads(line)
    return {}


def _write_answer() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def _read_array() -> np.ndarray:
    told = _read_request()
    own = getattr(ml_dtypes, told["dtype"], None)
    flat = np.frombuffer(sys.stdin.buffer.read(told["bytes"]), np.dtype(own or told["dtype"]))
    return flat.reshape(told["shape"])


if __name__ == "__main__":
    main()
