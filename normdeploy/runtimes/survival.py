"""Opens a file in a child process first, where onnxruntime might take the process with it.

onnxruntime 1.31 ends with a segmentation fault on some files while its optimizer rewrites them: half precision of the
TorchScript exporter, and a LayerNormalization with an empty bias. A child that dies says so, and the verb goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ..errors import RuntimeCrash
from ..graphs.omitted import leaves_inputs_out

_LARGEST = 2**26  # bytes of a file that is parsed only to find out whether a child has to open it
_PATIENCE = 120.0  # seconds; a file that takes longer is opened here, where it can be interrupted
_OPEN = """
import sys
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""


def require_survival(path: str | os.PathLike[str]) -> None:
    """Open an ONNX file in a child process, onnxruntime's optimizer on.

    Refusals are not looked at: whoever opens the file next meets them, too.

    Raises:
        RuntimeCrash: the child was ended by a signal.
    """
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, os.fspath(path)],
            env=environment,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise RuntimeCrash(
            f"onnxruntime crashes ({name}) when it opens the file with its optimizer on; write the file anew with"
            " normdeploy optimize, set graph_optimization_level to ORT_DISABLE_ALL, or export the model by another"
            " exporter or opset"
        )


def require_survival_if_risky(path: str | os.PathLike[str]) -> None:
    """Open a file in a child first where a LayerNormalization in it may crash onnxruntime.

    Raises:
        RuntimeCrash: as ``require_survival``.
    """
    if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST:
        return
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(Path(path).read_bytes())
    except (OSError, DecodeError):
        # Whoever opens the file next meets that, too.
        return
    if leaves_inputs_out(proto):
        require_survival(path)
