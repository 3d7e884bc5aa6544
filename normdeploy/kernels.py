"""Asks runtimes how they take a norm: each gets it as a small model (`normdeploy.graphs.cuts`). Nothing is looked up in
a list of ours.

onnxruntime makes a session of it and says which ops it will run, before and after its own optimizations; TensorRT's
parser makes a network of it, in a process of its own, since some of its failures abort the process.
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

from . import processes
from .domains import qualified
from .records import Verdict
from .runtimes.ort import no_cuda
from .runtimes.trt import PACKAGES, TITLES, missing
from .sessions import PROVIDERS, open_session

_TRANSPARENT = {
    "Constant",
    "Identity",
    "Cast",
    "CastLike",
}  # no norm's op, and onnxruntime puts in and takes out Casts of its own
_SECONDS = 60  # for the parser to read the norms of a file, which takes it a tenth of one


@dataclass(frozen=True)
class Answer:
    """What one runtime makes of one model; the fields are those of `normdeploy.records.Support`."""

    verdict: Verdict
    parts: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """One runtime and its answer to each model."""

    runtime: str
    answers: tuple[Answer, ...]


def ask(models: Sequence[onnx.ModelProto]) -> tuple[list[Asked], list[str]]:
    """Show ``models`` to every runtime that is here; also why others were not asked."""
    asked, notes = [Asked(f"onnxruntime {ort.__version__} CPU", tuple(_onnxruntime(m, "cpu") for m in models))], []
    if reason := no_cuda():
        notes.append(f"onnxruntime's CUDA provider was not asked: {reason}")
    else:
        asked.append(Asked(f"onnxruntime {ort.__version__} CUDA", tuple(_onnxruntime(m, "cuda") for m in models)))
    for runtime in PACKAGES:
        if reason := missing(runtime, gpu=runtime == "tensorrt"):
            notes.append(f"{TITLES[runtime]} was not asked: {reason}")
        else:
            asked.append(_tensorrt(models, runtime))
    return asked, notes


# ------------------------------------------------------------------ onnxruntime


def _onnxruntime(model: onnx.ModelProto, provider: str) -> Answer:
    try:
        plain, places = _session(model, provider, optimize=False)
        optimized, _ = _session(model, provider, optimize=True)
    except Exception as error:  # onnxruntime's exceptions share no base class
        message = " ".join(str(error).split("Bad node spec")[0].split())
        return Answer(
            "missing", reason=re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", message).removeprefix("Fatal error: ")
        )
    parts = tuple(name for name in map(qualified, optimized.graph.node) if name != "Constant")
    if elsewhere := sorted({op for op, place in places if place != PROVIDERS[provider]} - _TRANSPARENT):
        return Answer("missing", parts, f"{', '.join(elsewhere)} would run on the CPU")
    ran, given = Counter(map(qualified, plain.graph.node)), Counter(map(qualified, model.graph.node))
    inlined = sorted(op for op, n in given.items() if ran[op] < n and op not in _TRANSPARENT)
    if inlined:
        return Answer("function", parts, f"no kernel of {', '.join(inlined)}: the body of primitives is run")
    if ran["Cast"] > given["Cast"] + given["CastLike"]:
        return Answer(
            "kernel", parts, "it has none in the type of this norm and puts Casts to float32 around some nodes"
        )
    return Answer("kernel", parts)


def _session(model: onnx.ModelProto, provider: str, *, optimize: bool) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """The graph that onnxruntime makes of ``model``, and where it runs each op."""
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


def parse(model: onnx.ModelProto, runtime: str) -> Asked | str:
    """Show a whole file to the parser of TensorRT or TensorRT-RTX; the reason where it is not installed here."""
    return missing(runtime, gpu=runtime == "tensorrt") or _tensorrt([model], runtime)


def _tensorrt(models: Sequence[onnx.ModelProto], runtime: str) -> Asked:
    """The parser's layers; where it takes its process down, another one goes on behind the model that did it."""
    answers: list[Answer] = []
    version = ""
    while len(answers) < len(models):
        lines, status = _parser(models[len(answers) :], runtime)
        version = lines[0]["version"] if lines else version
        for layers, refused in ((s.get("layers", ()), s.get("refused", "")) for s in lines[1:]):
            answers.append(
                Answer("missing", reason=" ".join(refused.split())) if refused else Answer("layers", tuple(layers))
            )
        if len(answers) < len(models):
            answers.append(Answer("missing", reason=f"its parser ends with {status} on it"))
    return Asked(f"{TITLES[runtime]} {version}".strip(), tuple(answers))


def _parser(models: Sequence[onnx.ModelProto], runtime: str) -> tuple[list[dict[str, Any]], str]:
    request = {"runtime": runtime, "models": [base64.b64encode(m.SerializeToString()).decode() for m in models]}
    command, environment = processes.command("normdeploy.runtimes.parser"), processes.environment()
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, env=environment, timeout=_SECONDS
        )
        lines, status = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        lines, status = late.stdout or b"", f"no answer within {_SECONDS} s"
    return [json.loads(line) for line in lines.splitlines() if line.endswith(b"}")], status
