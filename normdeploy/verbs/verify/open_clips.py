"""Files with a Clip that leaves out a bound, on infinite inputs.

PyTorch keeps Inf in ``clamp(min=0.01)``, and so does ONNX's reference implementation. The standard names the type's
largest number as the bound that is left out, and onnxruntime (1.31, CPU) makes 3.4e38 of Inf. torch's exporter writes
such a Clip, so the file is not wrong: it is judged with Max and Min in the place of the Clip, which keep Inf.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from ...errors import NormdeployError
from ...inputs.input_cases import INFINITE
from ...runtimes import RunResult
from ...runtimes.ort_runner import OrtRunner
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import nodes_with_bodies
from .case_answers import CaseAnswer
from .runtime_candidates import OFF, ON, RuntimeCandidate

_CLIP = "Clip"


class OpenClips:
    """Runs files whose Clips leave out a bound with that bound at Inf, and adds one note for each to ``notes``."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def result_without_clips(
        self,
        candidate: RuntimeCandidate,
        answer: CaseAnswer,
        result: RunResult,
    ) -> RunResult:
        """Return the result; where it is finite and the reference is not, what the file gives with open bounds."""
        subject = candidate.subject
        case = answer.case
        if case.kind != INFINITE or subject is None or _CLIP not in subject.ops or candidate.name not in (OFF, ON):
            return result
        if not any(_is_clipped(value, answer.reference[name]) for name, value in result.items()):
            return result
        if (proto := open_clip_bounds(load_onnx(subject.path))) is None:
            return result
        try:
            with OrtRunner(proto, optimize=candidate.optimize, provider=candidate.provider) as runner:
                open_result = replace(candidate, runner=runner).infer(case, answer.feeds)
        except NormdeployError:
            return result
        if open_result is None:
            return result
        note = (
            f"{candidate.file_label} holds a Clip without one of its bounds, at which onnxruntime makes the "
            "type's largest"
            f" number of Inf; at infinite inputs the file was judged with Max and Min, which keep it"
        )
        if note not in self._notes:
            self._notes.append(note)
        return {name: value for name, value in open_result.items() if name in result}


def open_clip_bounds(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Write each Clip with one bound as Max or Min, in place; None where there is none."""
    found = False
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes_with_bodies(nodes):
            # Below opset 11 the bounds are attributes, and a Clip has one input.
            low, high = (*node.input[1:], "", "")[:2]
            if node.op_type != _CLIP or node.domain or bool(low) == bool(high):
                continue
            found = True
            data = node.input[0]
            node.op_type = "Max" if low else "Min"
            node.input[:] = [data, low or high]
    if found:
        return proto
    return None


def _is_clipped(value: np.ndarray, reference: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return (
            value.dtype.kind not in "iub"
            and value.shape == reference.shape
            and bool((np.isfinite(value.astype(np.float64)) & ~np.isfinite(reference)).any())
        )
