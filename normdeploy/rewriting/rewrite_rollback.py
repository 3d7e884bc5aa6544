"""Compares the whole model before and after, which shows what no single certificate can, and takes back the rewrite
that is to blame.

The two are compared once (`normdeploy.rewriting.model_comparison`). Where they differ, the model is made again with
fewer and fewer of the steps, which finds the one with which the difference begins; it is left out, and the search goes
on until there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from ..errors import ExportError
from ..findings.records import Finding, Summary
from ..model import InputSpec
from ..storage.onnx_files import iter_tensors
from ..storage.weight_serialization import tensor_nbytes
from .model_comparison import BaselineModel, ModelDifference
from .norm_optimizer import require_kept, undone_finding
from .rewrite_ledger import RewriteStep

# bytes of weights: both models and their results are held at once
LIMIT = 2**30
# steps that are left out one by one; after that all are
SEARCHES = 8

Made = tuple[onnx.ModelProto, Summary, list[tuple[RewriteStep, Finding]]]
Make = Callable[[Mapping[RewriteStep, Finding]], Made]


def total_weight_bytes(proto: onnx.ModelProto) -> int:
    """Bytes of all weights."""
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
) -> tuple[Made, list[str], bool]:
    """``made``, or what ``make`` makes without the steps that are to blame for a difference; what there is to note; and
    whether the result ran in onnxruntime.

    Args:
        before: the model; not changed.
        specs: its inputs; where they are not those of the file, what this says of them is taken (`specs_of`).
        make: makes the result without some steps, telling of each the finding that it is given.
        made: what it makes without leaving out any, and ``tidy`` of that.
        tidy: cleans up; where that is to blame the result is left as it was.
        strict: a step to blame is an error.
        loads: whether the result has to run in onnxruntime where ``before`` does; else that is a note.

    Raises:
        ExportError: the result does not run, or computes something else, and no step is to blame.
        CertificateError: with ``strict``, where one is.
    """
    reference = BaselineModel(before, specs)
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
                f"{difference.message}; none of the rewrites is to blame: this is a mistake of normdeploy's, please"
                " report it"
            )
        if len(left) < SEARCHES:
            blamed = _find_blamed_steps(reference, make, left, steps, difference)
        else:
            blamed = list(steps)
        left |= {
            step: undone_finding(steps[step], f"{difference.message}; without it that is not so") for step in blamed
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
        return made, [*reference.notes, f"the graph was left unsimplified: {wrong.message}"], True
    return (tidied, *made[1:]), reference.notes, True


def _may_gain_nan(made: Made) -> bool:
    """Whether a certificate says that an infinite input gives NaN where it gave a number before."""
    return any(f.certificate is not None and f.certificate.gains for f in made[1].findings)


def _find_blamed_steps(
    reference: BaselineModel,
    make: Make,
    left: Mapping[RewriteStep, Finding],
    steps: Mapping[RewriteStep, Finding],
    difference: ModelDifference,
) -> list[RewriteStep]:
    """The step with which the first ``k`` of ``steps`` begin to differ; all where leaving out all does not help."""
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
