"""Run a model in a child process first if a node might end the process (`normdeploy.ort_sessions.crash_risks`)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..errors import RuntimeCrash
from ..types import Arrays
from . import child_process
from .crash_risks import node_label

# Maximum seconds of one run in the child. A slower child is ended, and the model runs in this process, where the user
# can interrupt it.
_PATIENCE = 120.0
_CHILD = child_process.module_command("normdeploy.ort_sessions.trial_worker")


class TrialProcess:
    """Child process with the same model open.

    Args:
        request: options with which the child opens the session (`normdeploy.ort_sessions.trial_worker`).
        model: bytes of the model; b"" if the request names a file.
        initializers: values of external weights.
        risks: labels of the nodes that the error names if the child dies. If empty, a search finds the node.

    Raises:
        RuntimeCrash: a signal ended the child while it opened the model.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        model: bytes,
        initializers: Arrays,
        risks: Sequence[str],
    ) -> None:
        self._risks = risks
        self._request = dict(request)
        self._model = model
        self._initializers = initializers
        self._crash = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._process = subprocess.Popen(
            _CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_process.child_environment() | {"ORT_DISABLE_TELEMETRY": "1"},
        )
        self._send_request(
            {**request, "model": len(model), "initializers": list(initializers)},
            model,
            *initializers.values(),
            feeds={},
        )

    def run(self, feeds: Arrays) -> None:
        """Run the model on the feeds in the child.

        Errors of onnxruntime are ignored here, because the run in this process raises them too.

        Raises:
            RuntimeCrash: a signal ended the child, now or in an earlier run; the message names the nodes that may cause
                it.
        """
        if self._crash:
            raise RuntimeCrash(self._crash)
        self._send_request({"feeds": list(feeds)}, *feeds.values(), feeds=feeds)

    def close(self) -> None:
        """End the child."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.communicate()

    def __del__(self) -> None:
        self.close()

    def _send_request(self, request: Mapping[str, Any], *parts: bytes | np.ndarray, feeds: Arrays) -> None:
        """Send a request and wait for the line that answers it.

        Args:
            parts: the model's bytes and the arrays that follow the request.
            feeds: inputs of this run; {} for the request that opens the model.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            for part in parts:
                _write_part(process.stdin, part)
            process.stdin.flush()
        except BrokenPipeError:
            # The child has ended. Its exit code is read below.
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
            risks = self._risks or [self._find_crashing_node(feeds)]
            self._crash = (
                f"onnxruntime crashes here ({name}): {'; '.join(risks)}; change the node, or pass inputs on which it "
                "does not"
            )
            raise RuntimeCrash(self._crash)

    def _find_crashing_node(self, feeds: Arrays) -> str:
        """Return the label of the node that ends the process.

        A binary search finds the shortest prefix of the graph that crashes; the last node of this prefix ends the
        process.
        """
        path = self._request["path"]
        if path:
            proto = onnx.load(path, load_external_data=False)
        else:
            proto = onnx.ModelProto.FromString(self._model)
        entries = dict(self._request["entries"])
        if path:
            entries["session.model_external_initializers_file_folder_path"] = os.path.dirname(path)
        request = {**self._request, "path": "", "entries": entries}

        def crashes_within(count: int) -> bool:
            """Return whether a child that runs the first ``count`` nodes crashes.

            Returns: False also if onnxruntime refuses the model of these nodes.
            """
            try:
                child = TrialProcess(request, _first_nodes_model(proto, count), self._initializers, ["some node"])
                if feeds:
                    child.run(feeds)
            except RuntimeCrash:
                return True
            child.close()
            return False

        survives = 0
        ends = len(proto.graph.node)
        if not crashes_within(ends):
            return "a node that could not be found"
        while ends - survives > 1:
            middle = (survives + ends) // 2
            if crashes_within(middle):
                ends = middle
            else:
                survives = middle
        return node_label(proto.graph.node[ends - 1])


def _first_nodes_model(proto: onnx.ModelProto, count: int) -> bytes:
    """Return a model of the first ``count`` nodes; the model's outputs are the values that none of these nodes
    reads.
    """
    beginning = onnx.ModelProto()
    beginning.CopyFrom(proto)
    nodes = proto.graph.node[:count]
    read = {name for node in nodes for name in node.input}
    made = [name for node in nodes for name in node.output if name and name not in read]
    stated = {value.name: value for value in (*proto.graph.output, *proto.graph.value_info)}
    del beginning.graph.node[count:]
    del beginning.graph.output[:]
    beginning.graph.output.extend(stated.get(name, onnx.ValueInfoProto(name=name)) for name in made)
    return beginning.SerializeToString()


def _write_part(pipe: Any, part: bytes | np.ndarray) -> None:
    if isinstance(part, bytes):
        pipe.write(part)
        return
    # An array of objects has no bytes to send, so it is converted to texts of fixed width.
    if part.dtype.kind == "O":
        part = part.astype(str)
    # For types of ml_dtypes, numpy's dtype string contains only the size, so the name is sent instead.
    if part.dtype.kind == "V":
        kind = part.dtype.name
    else:
        kind = part.dtype.str
    pipe.write(json.dumps({"dtype": kind, "shape": part.shape, "bytes": part.nbytes}).encode() + b"\n")
    pipe.write(part.tobytes())
