"""Tell whether a file or the runtime is wrong, if the file is right in onnxruntime with its optimizer off. The runtime
is OpenVINO or onnxruntime-web.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...precision.tensor_ranges import serialize_for_session
from ...runtimes import Runner
from ...runtimes.named_runners import BUILTIN_RUNNERS, open_session_runner
from .output_results import OutputResult
from .precision_trial import PrecisionTrial
from .reference_models import FileModel
from .runtime_candidates import OFF, RuntimeCandidate, input_types


def blame_runtimes(trial: PrecisionTrial) -> None:
    """Record for each file that is wrong only in OpenVINO or onnxruntime-web that this runtime is the cause.

    Candidates that fail only because the runtime computes the reference file wrongly too are marked as not judged.
    """
    plain = {c.file_label: c for c in trial.candidates if c.name == OFF}
    for candidate in trial.candidates:
        off = plain.get(candidate.file_label)
        if candidate.provider not in BUILTIN_RUNNERS or candidate.lowered or off is None or candidate.failure:
            continue
        right = {r.output for r in trial.candidate_results(off) if r.by_default == "pass"}
        wrong = [r for r in trial.candidate_results(candidate) if not r and r.output in right]
        if not wrong or candidate.advice:
            continue
        candidate.advice = (
            f"{BUILTIN_RUNNERS[candidate.provider].runtime} is the cause, not the file: {OFF} computes the same file"
            f" correctly; bisect with --runner {candidate.provider} names the node"
        )
        _excuse_shared_errors(trial, candidate, wrong)


def _excuse_shared_errors(trial: PrecisionTrial, candidate: RuntimeCandidate, wrong: Sequence[OutputResult]) -> None:
    """Mark a candidate as not judged if its runtime makes the same errors on the reference file."""
    model = trial.model
    if not isinstance(model, FileModel) or candidate.subject is None or candidate.subject.steps is not None:
        return
    types = input_types(model.proto.graph)
    subject = replace(candidate.subject, inputs={}, outputs={}, steps=None, types=types)
    make = partial(_open_reference, model, candidate.provider)
    shared = RuntimeCandidate(candidate.name, make, subject, candidate.provider, finite_only=candidate.finite_only)
    theirs = {r.output: r for r in trial.measure_candidate(shared, ())}
    pairs = [(mine, theirs.get(mine.output)) for mine in wrong]
    if any(same is None or same or not mine.max_abs_error <= same.max_abs_error + mine.allowed for mine, same in pairs):
        return
    worst = max((same for _, same in pairs if same is not None), key=lambda r: r.max_abs_error)
    candidate.unavailable = (
        f"not judged: the runtime is wrong, not the file: {model.label} itself is off there by"
        f" {worst.max_abs_error:.2g} in {worst.output}, allowed {worst.allowed:.2g}"
    )


def _open_reference(model: FileModel, provider: str) -> Runner:
    if model.path:
        return open_session_runner(str(model.path), optimize=True, provider=provider)
    with serialize_for_session(model.proto) as source:
        return open_session_runner(source, optimize=True, provider=provider)
