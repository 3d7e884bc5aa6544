"""Compare the whole model before and after, and take back the rewrite that causes a difference.

No single certificate covers the whole model, so the original and the rewritten model are compared once
(`normdeploy.rewriting.model_comparison`). If they differ, a bisection rebuilds the model with fewer steps, and finds
the step that causes the difference. This step is omitted, and the search continues until both models agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from ..errors import ExportError
from ..findings.records import Finding, Summary
from ..model import InputSpec
from ..storage.onnx_files import iter_tensors
from ..storage.weight_serialization import tensor_nbytes
from .model_comparison import BaselineModel, KnownRun, ModelDifference
from .norm_optimizer import require_kept, undone_finding
from .rewrite_ledger import RewriteStep

# Maximum bytes of weights, because both models and their results are in memory at once
LIMIT = 2**30
# Maximum number of steps that are omitted one by one; after that, all steps are omitted
SEARCHES = 8

Made = tuple[onnx.ModelProto, Summary, list[tuple[RewriteStep, Finding]]]
Make = Callable[[Mapping[RewriteStep, Finding]], Made]


def total_weight_bytes(proto: onnx.ModelProto) -> int:
    """Add up the sizes of all weights.

    Returns:
        bytes.
    """
    return sum(tensor_nbytes(t) for t in iter_tensors(proto))


def roll_back_differences(
    before: onnx.ModelProto,
    specs: Sequence[InputSpec],
    make: Make,
    made: Made,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    *,
    strict: bool = False,
    loads: bool = True,
    known: Sequence[KnownRun] = (),
) -> tuple[Made, list[str], bool]:
    """Omit the steps that cause a difference between the models.

    Args:
        before: the model; not changed.
        specs: specs of its inputs. If the names differ from the file's inputs,
            `model_comparison.comparison_input_specs` is used instead.
        make: builds the result without the steps that are passed to it, with their findings.
        made: result with all steps, after ``tidy``.
        tidy: cleans up a result. If the cleanup causes a difference, the result stays without it.
        strict: raise an error if a step causes a difference.
        loads: True if the result has to run in onnxruntime whenever ``before`` does; False to only note a failure.
        known: runs of the model in PyTorch, with which the result is compared first.

    Returns:
        ``made``, or the result without the omitted steps; notes; and True if the result ran in onnxruntime.

    Raises:
        ExportError: the result does not run or has other outputs, and no step causes this.
        CertificateError: a step causes a difference, with ``strict``.
    """
    reference = BaselineModel(before, specs, known)
    if reference.failed is not None:
        return made, [f"the whole model was not compared: {reference.failed}"], False
    difference = reference.find_difference(made[0], gains=_may_gain_nan(made))
    if difference is None:
        return made, reference.notes, True
    if difference.fails and not loads:
        return made, [*reference.notes, f"the whole model was not compared: {difference.message}"], False
    left: dict[RewriteStep, Finding] = {}
    if tidy is not None:
        made = make(left)
        difference = reference.find_difference(made[0], gains=_may_gain_nan(made))
    while difference is not None:
        steps = {step: finding for step, finding in made[2] if step not in left}
        if not steps:
            raise ExportError(
                f"{difference.message}. None of the rewrites causes this: it is a bug in normdeploy; please report it"
            )
        if len(left) < SEARCHES:
            blamed = _find_blamed_steps(reference, make, left, steps, difference)
        else:
            blamed = list(steps)
        left |= {
            step: undone_finding(steps[step], f"{difference.message}; without this rewrite the difference is gone")
            for step in blamed
        }
        made = make(left)
        difference = reference.find_difference(made[0], gains=_may_gain_nan(made))
    if strict:
        require_kept(made[1].findings)
    if tidy is None:
        return made, reference.notes, True
    tidied = tidy(made[0])
    wrong = reference.find_difference(tidied, gains=_may_gain_nan(made))
    if wrong is not None:
        return made, [*reference.notes, f"the graph was not simplified: {wrong.message}"], True
    return (tidied, *made[1:]), reference.notes, True


def _may_gain_nan(made: Made) -> bool:
    """Return True if a certificate states that an infinite input gives NaN instead of a number."""
    return any(f.certificate is not None and f.certificate.gains for f in made[1].findings)


def _find_blamed_steps(
    reference: BaselineModel,
    make: Make,
    left: Mapping[RewriteStep, Finding],
    steps: Mapping[RewriteStep, Finding],
    difference: ModelDifference,
) -> list[RewriteStep]:
    """Bisect for the step with which the difference starts; return all steps if the model differs even without any."""
    order = list(steps)

    def differs_with_first(first: int) -> bool:
        fewer = make({**left, **{step: steps[step] for step in order[first:]}})
        return reference.find_difference(fewer[0], only=difference.sizes, gains=_may_gain_nan(fewer)) is not None

    if differs_with_first(0):
        return order
    good = 0
    bad = len(order)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if differs_with_first(middle) else (middle, bad)
    return [order[bad - 1]]
