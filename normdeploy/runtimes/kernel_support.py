"""Find out from the runtimes how they run a norm. Each runtime gets the norm as a small model
(`normdeploy.graphs.norm_extraction`), so this module needs no table of kernels.

onnxruntime opens a session and reports the ops it will run, before and after its own optimizations. TensorRT's parser
builds a network in a separate process, since some failures of the parser abort the process.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from ..findings.records import Verdict
from ..ort_sessions import child_process
from ..ort_sessions.session import PROVIDERS, open_session
from ..storage.onnx_domains import qualified_op
from .ort_runner import explain_missing_cuda
from .trt_runner import PACKAGES, TITLES, describe_missing_runtime

# Ops that are not reported: they are not part of a norm's computation, and onnxruntime adds and removes Casts itself.
_TRANSPARENT = {
    "Constant",
    "Identity",
    "Cast",
    "CastLike",
}
# Maximum seconds for TensorRT's parser to read the norms of a file. It usually takes a tenth of a second.
_SECONDS = 60


@dataclass(frozen=True)
class KernelSupport:
    """Report of one runtime on how it runs one model. The fields have the meaning of those in
    `normdeploy.findings.records.RuntimeSupport`.
    """

    verdict: Verdict
    parts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class RuntimeAnswers:
    """Reports of one runtime on how it runs each model, in the order of the models."""

    runtime: str
    answers: tuple[KernelSupport, ...]


def query_runtimes(models: Sequence[onnx.ModelProto]) -> tuple[list[RuntimeAnswers], list[str]]:
    """Ask every installed runtime about ``models``.

    Returns:
        The answers of each runtime, and the reasons why other runtimes were not asked.
    """
    asked = [RuntimeAnswers(f"onnxruntime {ort.__version__} CPU", tuple(_query_onnxruntime(m, "cpu") for m in models))]
    notes = []
    if reason := explain_missing_cuda():
        notes.append(f"onnxruntime's CUDA provider was not checked: {reason}")
    else:
        asked.append(
            RuntimeAnswers(f"onnxruntime {ort.__version__} CUDA", tuple(_query_onnxruntime(m, "cuda") for m in models))
        )
    for runtime in PACKAGES:
        if reason := describe_missing_runtime(runtime, gpu=runtime == "tensorrt"):
            notes.append(f"{TITLES[runtime]} was not checked: {reason}")
        else:
            asked.append(query_tensorrt(models, runtime))
    return asked, notes


# ------------------------------------------------------------------ onnxruntime


def _query_onnxruntime(model: onnx.ModelProto, provider: str) -> KernelSupport:
    try:
        plain, places = _optimize_in_session(model, provider, optimize=False)
        optimized, _ = _optimize_in_session(model, provider, optimize=True)
    except Exception as error:
        # onnxruntime's exceptions share no base class.
        message = " ".join(str(error).split("Bad node spec")[0].split())
        return KernelSupport(
            "missing", reason=re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", message).removeprefix("Fatal error: ")
        )
    parts = tuple(name for name in map(qualified_op, optimized.graph.node) if name != "Constant")
    if elsewhere := sorted({op for op, place in places if place != PROVIDERS[provider]} - _TRANSPARENT):
        return KernelSupport("missing", parts, f"{', '.join(elsewhere)} would run on the CPU")
    ran = Counter(map(qualified_op, plain.graph.node))
    given = Counter(map(qualified_op, model.graph.node))
    inlined = sorted(op for op, n in given.items() if ran[op] < n and op not in _TRANSPARENT)
    if inlined:
        return KernelSupport("function", parts, f"no kernel for {', '.join(inlined)}: its body of primitives runs")
    if ran["Cast"] > given["Cast"] + given["CastLike"]:
        return KernelSupport(
            "kernel", parts, "it has no kernel in this norm's type and adds Casts to float32 around some nodes"
        )
    return KernelSupport("kernel", parts)


def _optimize_in_session(
    model: onnx.ModelProto, provider: str, *, optimize: bool
) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """Open ``model`` in a session.

    Returns:
        The graph into which onnxruntime turns the model, and (op, execution provider) of each node.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "norm.onnx"
        made = open_session(
            model.SerializeToString(),
            optimize=optimize,
            provider=provider,
            threads=1,
            entries={"session.record_ep_graph_assignment_info": "1"},
            saved=path,
        )
        assigned = made.get_provider_graph_assignment_info()
        places = [(node.op_type, part.ep_name) for part in assigned for node in part.get_nodes()]
        return onnx.load(path), places


# ------------------------------------------------------------------ TensorRT


def query_tensorrt(models: Sequence[onnx.ModelProto], runtime: str) -> RuntimeAnswers:
    """Parse each model with TensorRT's parser and list the layers. If a model ends the parser's process, a new process
    continues after that model.

    Returns:
        The runtime with its version and an answer for each model.
    """
    answers: list[KernelSupport] = []
    version = ""
    while len(answers) < len(models):
        lines, status = run_parser(models[len(answers) :], runtime)
        if lines:
            version = lines[0]["version"]
        for layers, refused in ((s.get("layers", ()), s.get("refused", "")) for s in lines[1:]):
            answers.append(
                KernelSupport("missing", reason=" ".join(refused.split()))
                if refused
                else KernelSupport("layers", tuple(layers))
            )
        if len(answers) < len(models):
            answers.append(KernelSupport("missing", reason=f"its parser ends with {status}"))
    return RuntimeAnswers(f"{TITLES[runtime]} {version}".strip(), tuple(answers))


def run_parser(models: Sequence[onnx.ModelProto], runtime: str) -> tuple[list[dict[str, Any]], str]:
    """Run the parser's process on ``models`` (`parser_process`).

    Returns:
        The JSON objects that the process wrote before it ended, and how the process ended: its exit code or a timeout.
    """
    request = {"runtime": runtime, "models": [base64.b64encode(m.SerializeToString()).decode() for m in models]}
    command = child_process.module_command("normdeploy.runtimes.parser_process")
    environment = child_process.child_environment()
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, env=environment, timeout=_SECONDS
        )
        lines = done.stdout
        status = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        lines = late.stdout or b""
        status = f"no answer within {_SECONDS} s"
    return [json.loads(line) for line in lines.splitlines() if line.endswith(b"}")], status
