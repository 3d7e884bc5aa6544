"""Explain why no engine was built: the library's parser reported errors, or the builder process ended without a
result.
"""

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
# Maximum number of the parser's errors in a message. The log contains all of them.
_SHOWN = 5


def describe_unknown_capability(answer: Mapping[str, Any], runtime: str) -> str:
    """Describe which compute capabilities TensorRT-RTX does not build for.

    Returns:
        message.
    """
    asked = ", ".join(answer["unknown"])
    known = ", ".join(answer["known"])
    return (
        f"{TITLES[runtime]} does not support compute capability {asked}; it supports {known}. For another GPU, build"
        " on a machine that has it, with the full TensorRT: normdeploy build --library tensorrt, or trtexec --onnx=FILE"
        " --saveEngine=FILE"
    )


def explain_missing_fp8(proto: onnx.ModelProto, name: str, capabilities: Sequence[str]) -> str:
    """Explain that a file needs FP8 but some of ``capabilities`` lack FP8. GPUs support FP8 from compute capability 8.9
    on (NVIDIA, CUDA C++ Programming Guide).

    Args:
        name: file's name in the message.
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
        f"{name} computes in FP8 ({held!r} is one of its tensors), which needs compute capability {_FP8} or newer, "
        f"but {', '.join(older)} was requested; omit it, or quantize to int8"
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
        return f"{title} reads {name} as a network of 0 layers: the file computes nothing; pass the model itself"
    if answer["refused"] == "plugin layers":
        return (
            f"{title} made {answer['found']} plugin layers of the {answer['written']} plugin nodes in {name}: some "
            "norms would not run in our kernels. This should not happen; build with --norm-impl native and please "
            "report it"
        )
    if answer["refused"] == "types":
        wrong = "".join(f"\n  - {line}" for line in answer["wrong"][:_SHOWN])
        return (
            f"{title} reads {name} with other types than the file states:{wrong}\nNothing was built, because the "
            "engine would not use the file's types"
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
    """Describe why a worker ended without an answer: a timeout, lack of memory, a crash or an error.

    Args:
        log: everything that the worker printed.

    Returns:
        message.
    """
    title = TITLES[runtime]
    if end.late:
        return f"{title} was stopped: the build did not finish within the timeout; pass a longer timeout"
    log.seek(0)
    reason = _extract_log_errors(log.read().decode(errors="replace"))
    if os.name == "posix" and end.status == -signal.SIGKILL:
        return f"{title} was killed by the system, most likely because memory ran out{reason}"
    if end.status < 0:
        return f"{title} crashed ({signal.Signals(-end.status).name}){reason}"
    return f"{title} could not build the engine{reason}"


def _extract_log_errors(log: str) -> str:
    """Return the errors in the log; if the log contains no error, return its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for mark in ("[E]", "[!]"):
        if errors := list(dict.fromkeys(_clean_message(line[3:]) for line in lines if line.startswith(mark))):
            return ": " + "; ".join(filter(None, errors[:_SHOWN]))
    if lines:
        return f": {lines[-1]}"
    return ""


def _clean_message(reason: str) -> str:
    """Return the message on one line, without the remark that no GPU was found. TensorRT adds this remark to every
    error on a machine without a GPU.
    """
    return re.sub(
        r"\[checkMacros\.cpp[^\]]*\] Error Code 1: Cuda Runtime \(.*?\(cudaError \d+: [^()]*\)\)",
        "",
        " ".join(reason.split()),
    ).strip()
