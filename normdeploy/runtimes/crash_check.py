"""Open a file in a child process first if onnxruntime might crash on it.

onnxruntime 1.31 ends with a segmentation fault on some files while its optimizer rewrites them: half-precision files of
the TorchScript exporter, and a LayerNormalization with an empty bias. With a child process, only the child dies: the
crash is reported, and the verb goes on.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ..errors import RuntimeCrash
from ..graphs.omitted_inputs import has_omitted_inputs
from ..ort_sessions.child_process import REHEARSE_ALL
from ..storage.onnx_files import iter_tensors
from ..storage.proto_traversal import iter_bodies
from ..types import PathLike

# Maximum seconds for the child. If the file takes longer, it is opened in this process, which the user can interrupt.
_PATIENCE = 120.0
_HALVES = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
# Program of the child. onnxruntime writes its log directly to stderr, not through Python, so only a separate process
# can capture the log.
OPEN = """
import sys
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = int(sys.argv[2])
options.intra_op_num_threads = 1
source = sys.argv[1] or sys.stdin.buffer.read()
providers = ["CPUExecutionProvider"]
onnxruntime.InferenceSession(source, options, providers=providers, disabled_optimizers=sys.argv[3:])
"""
_QUIET = "4"
_VERBOSE = "0"
_BEGUN = re.compile(r"Applying graph transformer (\w+) on step")


def require_no_crash(model: PathLike | bytes) -> None:
    """Open a risky model in a child process with onnxruntime's optimizer on.

    Errors that onnxruntime raises are ignored here: they recur when the file is opened for use.

    Args:
        model: an ONNX file or a model's bytes.

    Raises:
        RuntimeCrash: a signal ended the child. If the file opens without the optimizer that was running, the message
            names that optimizer.
    """
    # The child takes a third of a second, so only risky models are opened in it.
    if isinstance(model, bytes):
        if _is_risky(model):
            reason = _describe_crash("", model)
        else:
            reason = ""
    else:
        status = os.stat(model)
        reason = _describe_crash_of_file(os.path.realpath(model), status.st_mtime_ns, status.st_size)
    if reason:
        raise RuntimeCrash(reason)


@functools.lru_cache(maxsize=64)
def _describe_crash_of_file(path: str, changed: int, size: int) -> str | None:
    """Describe how the file crashes onnxruntime; cached for each version of the file.

    Args:
        changed: modification time in ns; together with ``size`` it identifies the version of the file.

    Returns:
        The message, or None if the file does not crash.
    """
    if _is_risky(Path(path).read_bytes()):
        return _describe_crash(path, b"")
    return None


def _is_risky(model: bytes) -> bool:
    """Return whether the model has omitted inputs or half precision: crashes occurred only on such models."""
    if REHEARSE_ALL in os.environ:
        return True
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError:
        return False
    return has_omitted_inputs(proto) or _has_half_types(proto)


def _has_half_types(proto: onnx.ModelProto) -> bool:
    if any(tensor.data_type in _HALVES for tensor in iter_tensors(proto)):
        return True
    for body in iter_bodies(proto):
        if any(a.i in _HALVES for node in body.node for a in node.attribute if a.name in ("to", "dtype")):
            return True
        if isinstance(body, onnx.GraphProto) and any(
            value.type.tensor_type.elem_type in _HALVES for value in (*body.input, *body.output)
        ):
            return True
    return False


def _describe_crash(path: str, model: bytes) -> str | None:
    code, _ = _open_in_child(path, model, _QUIET)
    if code >= 0:
        return None
    _, log = _open_in_child(path, model, _VERBOSE)
    begun = _BEGUN.findall(log)
    advice = "set graph_optimization_level to ORT_DISABLE_ALL"
    if begun and _open_in_child(path, model, _QUIET, begun[-1])[0] == 0:
        advice = f"disable its optimizer {begun[-1]} (disabled_optimizers=[{begun[-1]!r}])"
    return (
        f"onnxruntime crashes ({signal.Signals(-code).name}) when it opens {os.path.basename(path) or 'the model'} "
        f"with its optimizer on; {advice}, rewrite the file with normdeploy optimize, or export the model with "
        "another exporter or opset"
    )


def _open_in_child(path: str, model: bytes, severity: str, *disabled: str) -> tuple[int, str]:
    """Open the model in a child process.

    Returns:
        The exit code (0 if it took too long) and onnxruntime's log.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", OPEN, path, severity, *disabled],
            env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
            input=model,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, ""
    return done.returncode, done.stderr.decode(errors="replace")
