"""Run the node tests of onnx in onnxruntime-web and in onnxruntime, and compare them.

``python -m benchmarks.onnxruntime_web_ops`` runs each model of ``onnx.backend.test`` with its inputs in both, with one
thread and graph optimizations, and writes ``benchmarks/results/onnxruntime_web_ops.md``. Numbers are equal if they
differ by at most 1e-5 (float16: 1e-3), relative and absolute. Integers must be identical. It needs Node.js and
onnxruntime-web, and takes some minutes.
"""

from __future__ import annotations

import datetime
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.backend.test.case.node import collect_testcases

from normdeploy.ort_sessions.session import open_session
from normdeploy.runtimes.web_process import WebProcess, WebProcessError
from normdeploy.runtimes.web_runner import TYPES, describe_error
from normdeploy.verbs.bench.machine_info import describe_machine

PAGE = Path(__file__).with_name("results") / "onnxruntime_web_ops.md"
SECONDS = 60.0
EQUAL, DIFFERS, NEITHER = "ran in both, equal", "ran in both, not equal", "load or run in neither"
ONLY_ORT, ONLY_WEB = "only onnxruntime loads or runs it", "only onnxruntime-web loads or runs it"
NOT_PASSED = "load in both, with inputs that are not passed"
KINDS = (EQUAL, DIFFERS, ONLY_ORT, ONLY_WEB, NEITHER, NOT_PASSED)


def compared(process: WebProcess, case: Any) -> tuple[str, str]:
    """Run a test in both.

    Returns:
        one of ``KINDS``, and the reason or the difference.
    """
    model = case.model.SerializeToString()
    inputs, _ = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    passes = len(inputs) == len(names) and all(
        isinstance(array, np.ndarray | np.generic) and np.asarray(array).dtype.name in TYPES for array in inputs
    )
    arrays = [np.ascontiguousarray(array) for array in inputs] if passes else []
    web = web_error = usual = usual_error = None
    try:
        process.request({"do": "open", "external": []}, [model])
        if passes:
            web = run_web(process, names, arrays)
    except WebProcessError as error:
        web_error = describe_error(str(error))
    try:
        session = open_session(model, optimize=True, threads=1)
        if passes:
            usual = session.run([v.name for v in case.model.graph.output], dict(zip(names, arrays, strict=True)))
    except Exception as error:
        # onnxruntime's errors share no base class.
        usual_error = str(error)
    if web_error and usual_error:
        return NEITHER, ""
    if web_error:
        return ONLY_ORT, web_error
    if usual_error:
        return ONLY_WEB, usual_error[:200]
    if web is None or usual is None:
        return NOT_PASSED, ""
    difference = largest_difference(web, usual)
    return (DIFFERS, difference) if difference else (EQUAL, "")


def run_web(process: WebProcess, names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the open model.

    Returns:
        the outputs in the order of the file.
    """
    described = [{"name": n, "type": a.dtype.name, "dims": list(a.shape)} for n, a in zip(names, arrays, strict=True)]
    answer = process.request({"do": "run", "inputs": described}, arrays)
    return [
        np.frombuffer(value, output["type"]).reshape(output["dims"])
        for output, value in zip(answer["outputs"], answer["values"], strict=True)
    ]


def largest_difference(web: Sequence[np.ndarray], usual: Sequence[np.ndarray]) -> str:
    """Describe the first output that differs.

    Returns:
        "" if all are equal.
    """
    for ours, theirs in zip(web, usual, strict=True):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return f"{ours.dtype}{list(ours.shape)} and {theirs.dtype}{list(theirs.shape)}"
        if ours.dtype.kind != "f":
            if count := int((ours != theirs).sum()):
                return f"{count} of {ours.size} elements differ"
            continue
        allowed = 1e-3 if ours.dtype == np.float16 else 1e-5
        if not np.allclose(ours, theirs, rtol=allowed, atol=allowed, equal_nan=True):
            with np.errstate(invalid="ignore"):
                return f"off by {np.nanmax(np.abs(ours.astype(np.float64) - theirs.astype(np.float64))):.1e}"
    return ""


def main() -> None:
    """Compare all tests, and write the page."""
    warnings.simplefilter("ignore")
    ort.set_default_logger_severity(4)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    cases = collect_testcases(None)
    process = WebProcess(1, SECONDS)
    for case in cases:
        kind, reason = compared(process, case)
        found[kind].append((case.name.removeprefix("test_"), reason))
    process.close()
    told = f"{datetime.date.today().isoformat()}; onnx {onnx.__version__}; {describe_machine()}"
    lines = ["# Node tests of onnx in onnxruntime-web", "", str(__doc__).strip(), "", told, ""]
    lines += ["| result | tests |", "| --- | --- |", *(f"| {kind} | {len(found[kind])} |" for kind in KINDS)]
    for kind in (DIFFERS, ONLY_ORT, ONLY_WEB):
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in found[kind]:
            reasons[reason].append(name)
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"- {reason}: {', '.join(names)}" for reason, names in reasons.items()] or ["None."]
    PAGE.write_text("\n".join(lines) + "\n")
    print({kind: len(found[kind]) for kind in KINDS})


if __name__ == "__main__":
    main()
