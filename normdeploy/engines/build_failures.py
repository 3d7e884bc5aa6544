"""Explain why no engine was built: errors of the library's parser, or the end of its process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import IO, Any

import onnx

from ..graphs.proto_queries import module_path
from ..runtimes.trt_runner import TITLES
from .builder_client import WorkerEnd

_FP8 = 8.9
# Most errors of the parser in a message; the log has all.
_SHOWN = 5


def describe_unknown_capability(answer: Mapping[str, Any], runtime: str) -> str:
    """Describe compute capabilities that TensorRT-RTX does not build for.

    Returns:
        message.
    """
    asked = ", ".join(answer["unknown"])
    known = ", ".join(answer["known"])
    return f"{TITLES[runtime]} does not build for compute capability {asked}; it builds for {known}"


def explain_missing_fp8(proto: onnx.ModelProto, name: str, capabilities: Sequence[str]) -> str:
    """Explain that a file needs FP8 and some of ``capabilities`` lack it. GPUs have FP8 from 8.9 on (NVIDIA, CUDA C++
    Programming Guide).

    Args:
        name: file's name for the message.
        capabilities: requested compute capabilities, for example "8.6".

    Returns:
        message, or "" if the file has no FP8 weights or all GPUs have FP8.
    """
    kinds = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2
    held = next((t.name for t in proto.graph.initializer if t.data_type in kinds), None)
    older = [c for c in capabilities if float(c) < _FP8]
    if held is None or not older:
        return ""
    return (
        f"{name} computes in FP8 ({held!r} is one of its tensors), which GPUs have from compute capability {_FP8} on,"
        f" and {', '.join(older)} is asked for; leave that out, or quantize to int8"
    )


def describe_refusal(answer: Mapping[str, Any], proto: onnx.ModelProto, name: str, runtime: str) -> str:
    """Describe a refusal of the builder process.

    Args:
        answer: last answer of the process.
        proto: model that was parsed.
        name: file's name.

    Returns:
        message, with the module of each node that the parser refused.
    """
    title = TITLES[runtime]
    if answer["refused"] == "empty":
        return f"{title} reads {name} as a network of 0 layers: the file computes nothing; give the model itself"
    if answer["refused"] == "plugin layers":
        return (
            f"{title} made {answer['found']} plugin layers of the {answer['written']} plugin nodes in {name}: some"
            " norms would not run in our kernels. This should not happen; build with --norm-impl native and tell us"
        )
    if answer["refused"] == "types":
        wrong = "".join(f"\n  - {line}" for line in answer["wrong"][:_SHOWN])
        return (
            f"{title} reads {name} in other types than the file states:{wrong}\nNothing was built, since the engine"
            " would not be in them"
        )
    if answer["refused"] == "shape inputs":
        return (
            f"{title} needs the values of {answer['inputs']} to know the shapes in {name}; export the model with these"
            " as constants"
        )
    errors = [_describe_parser_error(error, proto) for error in answer["errors"]]
    if len(errors) > _SHOWN:
        more = f"\n  - and {len(errors) - _SHOWN} more"
    else:
        more = ""
    lines = "".join(f"\n  - {line}" for line in errors[:_SHOWN]) or " its parser gives no reason"
    return f"{title} can't read {name}:{lines}{more}\nNothing was built"


def _describe_parser_error(error: Mapping[str, Any], proto: onnx.ModelProto) -> str:
    node = next((n for n in proto.graph.node if error["node"] and n.name == error["node"]), None)
    if node is not None:
        path = module_path(node)
    else:
        path = ""
    if path:
        place = [f"module {path}"]
    else:
        place = []
    if error["functions"]:
        place += [f"in function {' > '.join(error['functions'])}"]
    if place:
        where = f" ({', '.join(place)})"
    else:
        where = ""
    return (
        f"node {error['node']!r}, {error['operator'] or 'unknown operator'}{where}: {_clean_message(error['reason'])}"
    )


def describe_worker_end(end: WorkerEnd, log: IO[bytes], runtime: str) -> str:
    """Describe the end of a worker that gave no answer: timeout, lack of memory, crash or error.

    Args:
        log: everything that the worker printed.

    Returns:
        message.
    """
    title = TITLES[runtime]
    if end.late:
        return f"{title} was stopped: the build was not done within the timeout; give it more time"
    log.seek(0)
    reason = _extract_log_errors(log.read().decode(errors="replace"))
    if os.name == "posix" and end.status == -signal.SIGKILL:
        return f"{title} was killed by the system, most likely for want of memory{reason}"
    if end.status < 0:
        return f"{title} crashed ({signal.Signals(-end.status).name}){reason}"
    return f"{title} could not build the engine{reason}"


def _extract_log_errors(log: str) -> str:
    """Return the errors in the log, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for mark in ("[E]", "[!]"):
        if errors := list(dict.fromkeys(_clean_message(line[3:]) for line in lines if line.startswith(mark))):
            return ": " + "; ".join(filter(None, errors[:_SHOWN]))
    if lines:
        return f": {lines[-1]}"
    return ""


def _clean_message(reason: str) -> str:
    """Return the message on one line, without the remark that no GPU was found. TensorRT adds it to every error on a
    machine without a GPU.
    """
    return re.sub(
        r"\[checkMacros\.cpp[^\]]*\] Error Code 1: Cuda Runtime \(.*?\(cudaError \d+: [^()]*\)\)",
        "",
        " ".join(reason.split()),
    ).strip()
