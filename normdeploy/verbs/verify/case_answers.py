"""What the reference says of one input, and which runtimes are judged there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...compare.error_bounds import ErrorBounds
from ...compare.rounding_ties import RoundingTies
from ...inputs.input_cases import LENIENT, NAN, NONFINITE, InputCase
from ...runtimes import RunResult
from ...types import Array
from .runtime_candidates import DYNAMIC_QUANTIZING, FINITE_ALONE, NAN_BLIND, RuntimeCandidate


@dataclass(frozen=True)
class CaseAnswer:
    """What the reference says of one case, what else an integer of it may be, and what each floating element may be off
    by.

    ``eager``: its answer where what is not finite is judged by it too. ``feeds`` of a sample of the user's dataset are
    made when needed.
    """

    case: InputCase
    feeds: dict[str, Array]
    reference: RunResult
    ties: RoundingTies
    bounds: ErrorBounds | None = None
    eager: RunResult | None = None


def is_comparable(candidate: RuntimeCandidate, answer: CaseAnswer, compares_inside: bool) -> bool:
    """Whether a candidate is judged on this input.

    Engines promise nothing of numbers that are not finite, and ONNX nothing of a NaN in a maximum, an order or a
    coordinate, given or made inside of an infinity; the ranges of a quantized file are for usual numbers, and so
    are those that an op takes from its input, where one infinity is the scale of all numbers.

    Args:
        compares_inside: the model has an operator that compares in its kernel, where a NaN goes either way.
    """
    case = answer.case
    subject = candidate.subject
    if subject is not None and case.kind in LENIENT:
        dynamic = any(op.startswith(DYNAMIC_QUANTIZING) for op in subject.ops)
        if dynamic or subject.steps is not None:
            return False
    if case.kind not in NONFINITE or subject is None:
        return True
    has_nan = case.kind == NAN or any(v.dtype.kind == "f" and np.isnan(v).any() for v in answer.reference.values())
    blind = bool(subject.ops & NAN_BLIND) or compares_inside
    return not subject.runtime and not (has_nan and blind) and not subject.ops & FINITE_ALONE


def divides_zero_by_zero(eager: RunResult, reference: RunResult) -> bool:
    """Whether a reference file as it runs divides 0 by 0 where float64 does not, or the other way round.

    A kernel may lack the epsilon of the standard (onnxruntime's MeanVarianceNormalization of equal elements), and of a
    mean of no elements ONNX says nothing.
    """
    with np.errstate(invalid="ignore"):
        return any(
            value.shape == reference[name].shape
            and value.dtype.kind == "f"
            and bool((np.isnan(value) != np.isnan(reference[name])).any())
            for name, value in eager.items()
        )
