"""Find the optimizer of onnxruntime that breaks a file, if the file is right without this optimizer.

onnxruntime's log names the optimizers that changed the graph. A binary search finds the smallest set of optimizers that
must be disabled for the file to pass (QuickXplain: Junker, AAAI 2004). It takes about 2·log2(n) sessions to find one of
n optimizers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...graphs.qoperator_expansion import PRODUCTS
from ...graphs.quantization_info import DEQUANTIZE
from ...ort_sessions.session import EXACT_INTEGERS, FLOAT_OPERANDS, PROVIDERS, saturates_int8_pairs
from ...runtimes.ort_runner import OrtRunner
from ...types import Progress
from .compute_budget import BudgetClock
from .output_results import OutputResult
from .precision_trial import PrecisionTrial
from .quantization_budget import StepBudget
from .reference_models import FileModel, rounds_itself
from .runtime_candidates import STEPWISE, RuntimeCandidate, input_types

_RULES = re.compile(r"Level\d_RuleBasedTransformer$")
# Rewrite rules of the transformers that `_RULES` matches. The log names only the transformer, not the rule. The names
# are those of onnxruntime 1.31; unknown names have no effect.
RULES = (
    "EliminateIdentity",
    "EliminateSlice",
    "UnsqueezeElimination",
    "EliminateDropout",
    "ExpandElimination",
    "CastElimination",
    "CastChainElimination",
    "PreShapeNodeElimination",
    "NoopElimination",
    "DivMulFusion",
    "FuseReluClip",
    "GemmSumFusion",
    "GemmTransposeFusion",
    "NotWhereFusion",
    "ConvAddFusion",
    "ConvMulFusion",
    "ConvBNFusion",
    "Pad_Fusion",
    "MatMul_BatchNormalization_Fusion",
    "LabelEncoderFusion",
    "ClipQuantRewrite",
    "ReluQuantRewrite",
)

# Script that loads the file in a child process. onnxruntime writes its log directly to the standard error of the
# process, where Python can't read it.
_LISTEN = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 1
onnxruntime.InferenceSession(sys.argv[1], options, providers=[sys.argv[2]], disabled_optimizers=sys.argv[3:])
"""
_MODIFIED = re.compile(r"GraphTransformer (\S+) modified: 1 ")

_WHOLE = "onnxruntime's optimizer is the cause: with it off the same file passes"

Passes = Callable[[Sequence[str]], bool]


def blame_optimizers(trial: PrecisionTrial, progress: Progress, clock: BudgetClock) -> None:
    """Find the faulty part of onnxruntime's optimizer for each file that is wrong only with this optimizer, and record
    it.

    Candidates that fail only because the runtime itself is wrong are marked as not judged.
    """
    plain = {(c.file_label, c.provider): c for c in trial.candidates if c.provider and not c.optimize}
    stepwise = {c.file_label: c for c in trial.candidates if c.name == STEPWISE}
    _excuse_saturated_products(trial, plain)
    for candidate in trial.candidates:
        if candidate.optimize:
            off = plain.get((candidate.file_label, candidate.provider))
        else:
            off = None
        if off is None or off.unavailable or candidate.crashes:
            continue
        if candidate.unavailable and candidate.subject is not None and candidate.subject.elsewhere:
            # The file was quantized for TensorRT, so onnxruntime need not load it.
            continue
        if candidate.unavailable:
            # The file runs with the optimizer off, so the node without a kernel was created by the optimizer.
            candidate.failure = candidate.unavailable
            candidate.unavailable = None
        alone = trial.candidate_results(off)
        verdicts = list(trial.candidate_results(candidate))
        right = {r.output for r in alone if r.by_default == "pass"}
        # An output that is wrong in stepwise half precision is excluded: the file is wrong, not the optimizer. With the
        # optimizer off, the CPU provider computes single half-precision nodes in float32 and hides this.
        if candidate.file_label in stepwise:
            right -= {r.output for r in trial.candidate_results(stepwise[candidate.file_label]) if not r}
        wrong = [r for r in verdicts if not r and r.by_default != "pass" and r.output in right]
        # Only given rules decide on these outputs, and the search needs the default rule. So the whole optimizer is
        # blamed.
        ruled = {r.output for r in alone if r and not r.by_default}
        if any(not r and r.output in ruled for r in verdicts):
            candidate.advice = _WHOLE
        elif wrong:
            progress("find the optimizer to blame", 0, 0)
            blame_optimizer(
                trial, candidate, {r.output for r in wrong}, sorted({r.case for r in wrong if r.case}), clock
            )
            _excuse_shared_errors(trial, candidate, wrong)


def _excuse_shared_errors(trial: PrecisionTrial, candidate: RuntimeCandidate, wrong: Sequence[OutputResult]) -> None:
    """Mark a candidate as not judged if the runtime makes the same error on the reference file.

    The errors are the same if the error on the file exceeds the error on the reference by at most the allowed error.
    """
    model = trial.model
    if not isinstance(model, FileModel) or candidate.subject is None or candidate.subject.steps is not None:
        return
    make = partial(OrtRunner, model.path or model.proto, provider=candidate.provider)
    types = input_types(model.proto.graph)
    subject = replace(candidate.subject, inputs={}, outputs={}, steps=None, types=types)
    shared = RuntimeCandidate(candidate.name, make, subject)
    theirs = {r.output: r for r in trial.measure_candidate(shared, sorted({r.case for r in wrong}))}
    for mine in wrong:
        same = theirs.get(mine.output)
        if same is None or same or not mine.max_abs_error <= same.max_abs_error + mine.allowed:
            return
    worst = max((theirs[r.output] for r in wrong), key=lambda r: r.max_abs_error)
    candidate.unavailable = (
        f"not judged: the runtime is wrong, not the file: {model.label} itself is off there by"
        f" {worst.max_abs_error:.2g} in {worst.output}, allowed {worst.allowed:.2g}"
        + (f" ({candidate.advice})" if candidate.advice else "")
    )


def _excuse_saturated_products(trial: PrecisionTrial, plain: Mapping[tuple[str, str], RuntimeCandidate]) -> None:
    """Mark a candidate as not judged if the processor sums its integer products wrongly.

    This is only done if a session with onnxruntime's optimizer, which sums the products correctly, passes.
    """
    for on in trial.candidates:
        if on.optimize and on.provider == "cpu":
            off = plain.get((on.file_label, on.provider))
        else:
            off = None
        if off is None or off.subject is None or not off.subject.ops.intersection(PRODUCTS):
            continue
        right = {r.output for r in trial.candidate_results(on) if r}
        wrong = {r.output for r in trial.candidate_results(off) if not r}
        if wrong and wrong <= right and saturates_int8_pairs():
            off.unavailable = (
                "not judged: this processor adds pairs of uint8 · int8 products in 16 bits, which saturate;"
                f" with its optimizer on, and {'='.join(*EXACT_INTEGERS.items())}, onnxruntime adds them"
                " correctly: set both when the file runs on such a processor"
            )


def blame_optimizer(
    trial: PrecisionTrial,
    candidate: RuntimeCandidate,
    outputs: Collection[str],
    worst: Sequence[str],
    clock: BudgetClock,
) -> None:
    """Find the optimizers that break one file, and record them with advice.

    Args:
        outputs: the wrong outputs.
        worst: cases in which they are wrong.
        clock: may be extended by the time that the comparison took.
    """
    assert candidate.subject is not None
    path = candidate.subject.path
    provider = candidate.provider

    def is_right_with(make: Callable[[], OrtRunner], names: Sequence[str]) -> bool:
        return trial.passes(RuntimeCandidate(candidate.name, make, candidate.subject), outputs, names)

    # The search may take at most as long as the comparison took.
    search = clock.extended_clock()

    def passes_without(disabled: Sequence[str], names: Sequence[str] = worst) -> bool:
        # Without time for a trial, the faulty part is unknown, so the whole optimizer is blamed.
        if search.is_over():
            clock.blamed[candidate.file_label] = None
            return False
        return is_right_with(partial(OrtRunner, path, provider=provider, disabled=disabled), names)

    if DEQUANTIZE in candidate.subject.ops and (
        _retry_with_float_operands(trial, candidate, outputs) or _retry_with_steps(trial, candidate, outputs)
    ):
        return
    blamed = find_culprits(path, provider, passes_without)
    if blamed and passes_without(blamed, ()):
        candidate.culprit = blamed
        if len(blamed) == 1:
            these = "it"
        else:
            these = "these"
        candidate.advice = (
            f"onnxruntime's optimizer is the cause: {', '.join(blamed)}; with {these} disabled the file passes"
        )
    else:
        candidate.advice = _WHOLE


def _retry_with_float_operands(trial: PrecisionTrial, candidate: RuntimeCandidate, outputs: Collection[str]) -> bool:
    """Judge the file with float operands if it passes with them, and return whether it passes."""
    assert candidate.subject is not None
    make = partial(OrtRunner, candidate.subject.path, provider=candidate.provider, entries=FLOAT_OPERANDS)
    fresh = RuntimeCandidate(candidate.name, make, candidate.subject)
    if not trial.passes(fresh, outputs):
        return False
    off = _take_over(trial, candidate, fresh, outputs)
    candidate.option = "=".join(*FLOAT_OPERANDS.items())
    candidate.without = (
        f"{candidate.file_label}: by default {candidate.name} rounds activations to 8 bits before quantized"
        f" weights, which the file does not ask for, and {off.output} is off by {off.max_abs_error:.2g},"
        f" allowed {off.allowed:.2g}; it was judged with the session option {candidate.option}: set this option"
        " to run the file"
    )
    return True


def _retry_with_steps(trial: PrecisionTrial, candidate: RuntimeCandidate, outputs: Collection[str]) -> bool:
    """Judge a file by its error budget if its model rounds too and the file then passes. Return whether it passes.

    Integer kernels sum exactly, but float32 rounds. So a value near the edge of a quantization step may be rounded to
    the other side. Integer kernels also round biases, by much less than a step.
    """
    subject = candidate.subject
    assert subject is not None
    if subject.steps is not None or not rounds_itself(trial.model):
        return False
    stepped = replace(subject, steps=StepBudget(subject))
    fresh = replace(candidate, subject=stepped, sources=("activations",), tallies={}, runner=None, ran=0)
    if not trial.passes(fresh, outputs):
        return False
    off = _take_over(trial, candidate, fresh, outputs)
    candidate.without = (
        f"{candidate.file_label}: {candidate.name} computes with integers, but the file states floats. Biases"
        f" and sums are rounded differently, and {off.output} is off by {off.max_abs_error:.2g}. It was judged"
        " by the steps of its activations, on finite inputs of usual size"
    )
    return True


def _take_over(
    trial: PrecisionTrial, candidate: RuntimeCandidate, fresh: RuntimeCandidate, outputs: Collection[str]
) -> OutputResult:
    """Replace a candidate's tallies with those of ``fresh``. Return the candidate's former result with the largest
    error.
    """
    own = [result for result in trial.candidate_results(candidate) if result.output in outputs]
    candidate.tallies = fresh.tallies
    candidate.measures = fresh.measures
    return max(own, key=lambda result: result.max_abs_error)


def list_applied_optimizers(path: Path, provider: str, disabled: Sequence[str] = ()) -> list[str]:
    """List the optimizers that change the graph of a file, in their order.

    Args:
        provider: "cpu" or "cuda".
        disabled: optimizers to disable.

    Returns:
        their names, from onnxruntime's log.
    """
    command = [sys.executable, "-P", "-c", _LISTEN, str(path.absolute()), PROVIDERS[provider], *disabled]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stderr
    return list(dict.fromkeys(_MODIFIED.findall(run)))


def find_culprits(path: Path, provider: str, passes: Passes) -> tuple[str, ...]:
    """Find the smallest set of optimizers that must be disabled for the file to pass.

    Args:
        passes: returns whether the file is right with the named optimizers disabled.

    Returns:
        their names; () if the file is wrong even with all optimizers disabled that change it.
    """
    known: list[str] = []
    while fresh := [name for name in list_applied_optimizers(path, provider, known) if name not in known]:
        # After an optimizer is disabled, another optimizer may change the graph instead, so the log is read again.
        known += fresh
        if passes(known):
            break
    else:
        return ()
    rules = [name for name in known if _RULES.search(name)]
    single = [name for name in known if name not in rules]
    if rules and passes([*single, *RULES]):
        known = [*single, *RULES]
    return tuple(minimize_disabled(passes, [], known, tried=True))


def minimize_disabled(passes: Passes, kept: Sequence[str], names: Sequence[str], *, tried: bool) -> list[str]:
    """Find the smallest subset of ``names`` that must be disabled, together with ``kept``, for the file to pass.

    The file must pass if all of ``names`` and ``kept`` are disabled.

    Args:
        tried: True if the file is known to fail if only ``kept`` is disabled.

    Returns:
        the subset.
    """
    if not tried and passes(kept):
        return []
    if len(names) == 1:
        return list(names)
    left = names[: len(names) // 2]
    right = names[len(names) // 2 :]
    last = minimize_disabled(passes, [*kept, *left], right, tried=False)
    first = minimize_disabled(passes, [*kept, *last], left, tried=not last)
    return [*first, *last]
