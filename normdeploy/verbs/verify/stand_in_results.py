"""Replace results of a runtime whose errors are known not to be the file's fault. There are two cases.

Half-precision files on extreme inputs: an inner value may exceed float16's range. For example, a square or a sum of
squares exceeds 65504 for inputs of a few hundred. torch's kernels keep it in float32, but a file of half-precision
nodes does not. A note states this limit of the inputs, and the file is judged by its float64 evaluation. An overflow on
the user's inputs or on random inputs still fails.

Files with a Clip without one of its bounds, on infinite inputs: PyTorch keeps Inf in ``clamp(min=0.01)``, and so does
ONNX's reference implementation. By the standard, however, a missing bound is the type's largest number, and onnxruntime
(1.31, CPU) turns Inf into 3.4e38. torch's exporter writes such a Clip, so the file is not wrong. It is judged with Max
or Min instead of the Clip, because these ops keep Inf.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from ...compare.error_bounds import has_lost_all_digits
from ...errors import NormdeployError
from ...inputs.input_cases import EXTREME, INFINITE
from ...runtimes import RunResult
from ...runtimes.onnx_float64 import OnnxFloat64Runner
from ...runtimes.ort_runner import OrtRunner
from ...storage.onnx_files import load_onnx
from ...storage.proto_traversal import nodes_with_bodies
from ...types import Array
from .case_answers import CaseAnswer
from .runtime_candidates import OFF, ON, ComparedFile, RuntimeCandidate

_FLOAT16 = "fp16"
_CLIP = "Clip"


class StandInResults:
    """Replace results whose errors are not the file's fault. For each file, one note of each kind is added to
    ``notes``.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._noted: set[tuple[str, str]] = set()
        self._in_float64: dict[Path, OnnxFloat64Runner] = {}

    def replace_excused(self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult) -> RunResult:
        """Replace outputs whose errors are not the file's fault.

        Returns:
            ``result`` with replaced outputs, or unchanged if there is nothing to replace.
        """
        subject = candidate.subject
        if subject is None:
            return result
        try:
            if answer.case.kind == EXTREME and not subject.runtime and _FLOAT16 in subject.computing.halves:
                return self._replace_overflow(subject, answer, result)
            if answer.case.kind == INFINITE and _CLIP in subject.ops and candidate.name in (OFF, ON):
                return self._replace_clipped(candidate, subject, answer, result)
        except NormdeployError:
            # The outputs can't be computed in another way, so they are kept.
            return result
        return result

    def _note_once(self, kind: str, subject: ComparedFile, text: str) -> None:
        if (kind, subject.label) not in self._noted:
            self._noted.add((kind, subject.label))
            self._notes.append(f"{subject.label} {text}")

    def _replace_overflow(self, subject: ComparedFile, answer: CaseAnswer, result: RunResult) -> RunResult:
        """Replace outputs that lost all digits by an inner overflow by the float64 results of the file."""
        reference = answer.reference
        floats = [n for n, v in result.items() if v.dtype.kind == "f" and v.shape == reference[n].shape]
        lost = [name for name in floats if has_lost_all_digits(result[name], reference[name])]
        if not lost:
            return result
        if subject.path not in self._in_float64:
            self._in_float64[subject.path] = OnnxFloat64Runner(load_onnx(subject.path))
        own, beyond = self._in_float64[subject.path].run_and_find_overflow(subject.own_feeds(answer.feeds))
        if not beyond:
            return result
        name, largest = next(iter(beyond.items()))
        self._note_once(
            "overflow",
            subject,
            f"does not fit inputs as large as {answer.case.name!r}: {name!r} reaches {largest:.3g}, beyond"
            f" float16's {np.finfo(np.float16).max:.0f}, and {', '.join(lost)} keeps no digits; there the"
            " file's computation was judged in float64",
        )
        wide = subject.model_results(own)
        with np.errstate(over="ignore"):
            return result | {n: wide[n].astype(result[n].dtype) for n in lost if n in wide}

    def _replace_clipped(
        self, candidate: RuntimeCandidate, subject: ComparedFile, answer: CaseAnswer, result: RunResult
    ) -> RunResult:
        """If a result is finite where the reference is not, return the results of the file with Max or Min instead of
        Clip.
        """
        if not any(_is_clipped(value, answer.reference[name]) for name, value in result.items()):
            return result
        if (proto := open_clip_bounds(load_onnx(subject.path))) is None:
            return result
        with OrtRunner(proto, optimize=candidate.optimize, provider=candidate.provider) as runner:
            open_result = replace(candidate, runner=runner).infer(answer.case, answer.feeds)
        if open_result is None:
            return result
        self._note_once(
            "clip",
            subject,
            "has a Clip without one of its bounds, for which onnxruntime turns Inf into the dtype's largest"
            " number; at infinite inputs the file was judged with Max and Min, which keep Inf",
        )
        return result | {name: value for name, value in open_result.items() if name in result}


def open_clip_bounds(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Replace each Clip with one bound by Max or Min, in place.

    Returns:
        ``proto``, or None if it has no such Clip.
    """
    found = False
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes_with_bodies(nodes):
            # Before opset 11 the bounds are attributes, and a Clip has one input.
            low, high = (*node.input[1:], "", "")[:2]
            if node.op_type != _CLIP or node.domain or bool(low) == bool(high):
                continue
            found = True
            data = node.input[0]
            if low:
                node.op_type = "Max"
            else:
                node.op_type = "Min"
            node.input[:] = [data, low or high]
    if found:
        return proto
    return None


def _is_clipped(value: Array, reference: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return (
            value.dtype.kind not in "iub"
            and value.shape == reference.shape
            and bool((np.isfinite(value.astype(np.float64)) & ~np.isfinite(reference)).any())
        )
