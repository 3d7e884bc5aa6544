"""Define the reference outputs for one input case, and decide which runtimes are judged on this case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...compare.error_bounds import ErrorBounds
from ...compare.rounding_ties import RoundingTies
from ...inputs.input_cases import LENIENT, NAN, NONFINITE, InputCase
from ...runtimes import RunResult
from ...runtimes.ordering_operators import ChoiceWatcher
from ...types import Array
from .runtime_candidates import DYNAMIC_QUANTIZING, FINITE_ALONE, NAN_BLIND, RuntimeCandidate


@dataclass(frozen=True)
class CaseAnswer:
    """Reference outputs for one input case, with the allowed values and allowed errors.

    Attributes:
        feeds: inputs by name. The inputs of a sample of the user's dataset are created when they are needed.
        ties: other integers that are also right for an output because of rounding.
        bounds: allowed error of each floating-point element; None if it was not computed.
        eager: outputs of eager mode, if a runtime may have the same non-finite values as eager mode; otherwise None.
        choices: observer of the choices of eager mode and of all runs of the reference; None if the model makes none.
    """

    case: InputCase
    feeds: dict[str, Array]
    reference: RunResult
    ties: RoundingTies
    bounds: ErrorBounds | None = None
    eager: RunResult | None = None
    choices: ChoiceWatcher | None = None

    @property
    def has_near_ties(self) -> bool:
        """Return whether rounding decides a choice of the model, so that its runs are far apart."""
        return self.choices is not None and self.choices.differ


def is_comparable(candidate: RuntimeCandidate, answer: CaseAnswer, compares_inside: bool) -> bool:
    """Check whether a candidate is judged on this input.

    Some files are not judged on inputs with extreme or non-finite numbers:

    - Engines and OpenVINO guarantee nothing for non-finite numbers.
    - ONNX does not define the effect of a NaN on a maximum, an order or a coordinate. The NaN may be in the input, or
      may be computed from an infinity.
    - The ranges of a quantized file are meant for ordinary numbers. The same holds for an op that takes its range from
      its input, because one infinity would determine the scale of all numbers.

    Args:
        compares_inside: True if the model has an operator that compares numbers inside its kernel; the result for a NaN
            is then undefined.

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
    guarded = bool(subject.runtime) or candidate.finite_only
    return not guarded and not (has_nan and blind) and not subject.ops & FINITE_ALONE


def divides_zero_by_zero(eager: RunResult, reference: RunResult) -> bool:
    """Check whether a reference file divides 0 by 0 in its runtime but not in float64, or the reverse.

    A kernel may lack the epsilon of the standard. For example, onnxruntime's MeanVarianceNormalization divides 0 by 0
    if all elements are equal. ONNX does not define the mean of an empty tensor.

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
