"""Hold the reference's outputs for one input, and decide which runtimes are judged on it."""

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
    """Reference outputs for one input case, with the values and errors that they allow.

    Attributes:
        feeds: inputs by name; those of a sample of the user's dataset are made when needed.
        ties: other integers that an output may have because of rounding.
        bounds: allowed error of each floating-point element; None if it was not computed.
        eager: eager outputs, if non-finite values are judged by them too; otherwise None.
    """

    case: InputCase
    feeds: dict[str, Array]
    reference: RunResult
    ties: RoundingTies
    bounds: ErrorBounds | None = None
    eager: RunResult | None = None


def is_comparable(candidate: RuntimeCandidate, answer: CaseAnswer, compares_inside: bool) -> bool:
    """Check whether a candidate is judged on this input.

    Three kinds of input are left out for some files:
    - Engines guarantee nothing for non-finite numbers.
    - ONNX leaves open what a NaN does in a maximum, an order or a coordinate. The NaN may be given or computed from an
      infinity.
    - Ranges of a quantized file are meant for usual numbers. So are ranges that an op takes from its input, because one
      infinity would set the scale of all numbers.

    Args:
        compares_inside: the model has an operator that compares in its kernel, so a NaN may go either way.

    Returns:
        True if the candidate's outputs count on this input.
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
    """Check whether a reference file divides 0 by 0 as it runs but not in float64, or the other way around.

    A kernel may lack the epsilon of the standard, as onnxruntime's MeanVarianceNormalization does for equal elements.
    ONNX does not define the mean of no elements.

    Returns:
        True if a NaN is in only one of the two results.
    """
    with np.errstate(invalid="ignore"):
        return any(
            value.shape == reference[name].shape
            and value.dtype.kind == "f"
            and bool((np.isnan(value) != np.isnan(reference[name])).any())
            for name, value in eager.items()
        )
