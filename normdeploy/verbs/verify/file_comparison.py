"""Compare files with the model that they were made from, by errors against float64 and by the error of eager mode.

The rule for each element of a floating-point output (``normdeploy.compare.error_bounds``):

    error ≤ 4 · max(ρ · s, eager's own error)

Errors are measured against the reference, the model in float64. s is the unit for each element: the change of the
element if the intermediate values of the reference are rounded at random, plus one ulp. ρ is the error of eager mode in
units s.

The bound combines two measurements of a correct evaluation in the model's type. The random roundings show which
elements depend on rounding. Eager mode has sums as long as in any other evaluation, so ρ measures their errors. Another
correct evaluation differs from these two as one random draw differs from another; the factor 4 is the margin between
two draws. No other tolerance is added.

NaN and infinities must be in the same elements as in the reference, rounded to the output's type. On extreme or
non-finite inputs (``edge_cases``) they may also be in the same elements as in eager mode, and NaN and Inf are not
distinguished.

A file in half precision (``--precision``) is compared with eager mode in half precision, on inputs that are rounded to
half precision. Files of several precisions may be compared at once, each with eager mode in the file's precision.

If the user gives rules for an output (``policy``), these rules decide. The default rule is still computed and reported.
The exception is a quantized file whose outputs all have given rules, because the default rule would take dozens of runs
in float64.

Integers and bools must be equal unless the result depends on rounding. If it does, two other results are also right:
the result of eager mode, and a result of the reference with perturbed parameters and inputs. The perturbation is at
most 4 units of the model's type. Such differences are counted and reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ...compare.policy import Policy
from ...errors import GraphError, InputError
from ...inputs.input_cases import DATASET, InputCase, Inputs, read_inputs
from ...model import LoadedModel
from ...storage.onnx_files import load_onnx
from ...types import Progress
from ..build.build_function import Engine
from .claimed_inputs import describe_unseen_sizes
from .compared_files import open_files_of_model
from .comparison_notes import (
    collect_notes,
    note_computed_weights,
    note_half_nodes,
    note_other_forms,
    note_unbudgeted_weights,
)
from .comparison_result import Comparison
from .compute_budget import BudgetClock, ComparisonBudget
from .epsilon_audit import find_foreign_epsilons
from .file_drift import measure_file_drift
from .input_plan import are_quantized, plan_inputs
from .io_matching import Map
from .optimizer_bisect import blame_optimizers
from .output_results import OutputResult
from .precision_trial import PrecisionTrial
from .random_draws import random_nodes_of_file, random_ops_of_program
from .reference_models import FileModel, FloatReference, Original, model_label
from .runtime_blame import blame_runtimes
from .runtime_candidates import (
    OFF,
    ComparedFile,
    File,
    NotRun,
    RuntimeCandidate,
    inspect_file,
    make_candidates,
)
from .tensor_drift import DriftPoint
from .weight_audit import audit_weights

# Maximum number of outputs that a message names.
_NAMED = 3


def compare_files(
    model: Original,
    files: File | Iterable[File],
    *,
    engines: Iterable[File] = (),
    seeds: int = 3,
    inputs: Inputs | None = None,
    drift: bool = False,
    most: int | None = None,
    policy: Policy | None = None,
    names: Map | None = (),
    dataset: Sequence[InputCase] = (),
    runners: Sequence[str] = (),
    budget: ComparisonBudget = ComparisonBudget(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> Comparison:
    """Compare the outputs of ``files`` in each runtime with ``model`` in float64.

    These runtimes are compared:

    - eager mode in the model's own type, and in half precision if a file uses it;
    - onnxruntime with its optimizer off and on, on the CPU, and on CUDA if it is available;
    - each engine, if a GPU is present.

    Runtimes that can't run are listed with the reason. If only onnxruntime's optimizer breaks a file, the result names
    the faulty optimizers.

    Args:
        files: ONNX files and engines, distinguished by content.
        engines: more engines.
        seeds: number of random inputs at the opt sizes, in addition to inputs of other sizes, of small numbers and of
            zeros.
        inputs: one or several inputs of the user, each name -> array or an .npz file. They replace the generated
            inputs.
        drift: also compare the inner tensors that an ONNX file and the model share.
        most: limit on the input elements of a generated input; None: 8 times those at the opt sizes. Larger sizes are
            left out.
        policy: rules for outputs that replace the default rule.
        names: the file's name of an input or output -> the model's name, or texts such as "theirs=ours". None means
            that all names must be equal; names are then not matched by order either.
        dataset: samples to measure metrics and tolerances on.
        runners: names of further runtimes that also run ONNX files: OpenVINO, onnxruntime-web, and runtimes of other
            packages.
        budget: limits on time and memory. The verdict states the work that was skipped because of them.
        progress: called with (stage, done, total).

    Returns:
        the comparison. It is true if each ONNX file ran in some runtime and every output and weight passes
        (``Comparison.ok``).

    Raises:
        GraphError: no file can be read.
        InputError: a file is missing or has other inputs than the model; an input does not fit the model, or the model
            does not run on the input; or a rule or name does not match the model or the files.
        NormdeployError: an operator of the model does not run in float64.
    """
    start = time.perf_counter()
    clock = budget.start_clock()
    tell = progress or (lambda stage, done, total: None)
    own = None if inputs is None else read_inputs(inputs)
    rules = policy or Policy()
    rules.check(model.outputs)
    _require_deterministic(model)
    if dataset and not rules:
        raise InputError(
            "a dataset needs rules to judge the file by, but none were passed; pass a metric or a tolerance,"
            " or inputs instead"
        )
    labelled = any(case.labels is not None for case in dataset)
    if rules.labeled_metrics and not labelled:
        raise InputError(
            f"{rules.labeled_metrics[0]} needs labels, but there are none; pass a dataset, and the name of its"
            " labels with --labels"
        )
    if labelled and not rules.labeled_metrics:
        raise InputError(
            "labels were passed, but no metric uses them; pass one, such as accuracy_drop:0.01, or omit the labels"
        )
    if drift and isinstance(model, FileModel):
        raise InputError("drift compares the modules of a PyTorch model, but the reference is an ONNX file; omit it")
    every = [*([files] if isinstance(files, Engine | str | os.PathLike) else files), *engines]
    every, unreadable = _split_readable(every)
    compared, notes = open_files_of_model(model, every, names)
    plan = plan_inputs(model, compared, seeds, own, most, budget)
    cases = (*plan.cases, *dataset)
    if not plan.cases:
        raise InputError("nothing to compare on; pass at least one seed or input")
    candidates, not_run = make_candidates(compared, runners)
    trials = _run_trials(model, candidates, compared, cases, rules, clock, tell)
    empty = _find_empty_outputs(model, trials)
    results = _order_results(model, trials, candidates)
    not_run += [NotRun(c.name, c.unavailable, c.file_label) for c in candidates if c.unavailable]
    not_run += unreadable
    notes += [
        *(model.notes if isinstance(model, FileModel) and own is None else ()),
        *plan.left_out,
        *plan.too_large,
        *(f"{output} has no elements at any input: only its shape was compared" for output in empty),
        *collect_notes(trials, candidates, results),
        *note_half_nodes(compared, results),
        *note_unbudgeted_weights(compared, results),
        *note_other_forms(compared, results),
        *find_foreign_epsilons(model, compared),
        *filter(None, (s.steps.describe_clipped_ranges(s.label) for s in compared if s.steps is not None)),
    ]
    points = None
    if drift and isinstance(model, LoadedModel):
        points, more = _measure_drifts(model, compared, trials, results, clock, tell)
        notes += more
    weights = [
        weight for s in compared if not s.runtime for weight in audit_weights(model, load_onnx(s.path), s.label, clock)
    ]
    notes += [*note_computed_weights(weights), *clock.describe_left_out()]
    done = dict.fromkeys(answer.case.name for trial in trials.values() for answer in trial.answers)
    seconds = time.perf_counter() - start
    return Comparison(
        tuple(results),
        tuple(not_run),
        tuple(done),
        tuple(dict.fromkeys(notes)),
        seconds,
        None if points is None else tuple(points),
        plan.most if plan.left_out else None,
        tuple(weights),
        model_label(model),
        narrow=next((trial.narrow for trial in trials.values() if trial.narrow), ""),
        word="" if own is not None else model.word,
        limits=(
            *dict.fromkeys(f"with the session option {c.option}" for c in candidates if c.option),
            *([f"with images prepared as {model.image_claim} states"] if model.image_claim else []),
            *(
                (
                    *_describe_unseen_sizes(model, compared),
                    *_describe_size_limit(plan.too_large, budget),
                    *clock.describe_limits(),
                )
                if own is None
                else ()
            ),
        ),
    )


def _split_readable(files: Sequence[File]) -> tuple[list[File], list[NotRun]]:
    """Separate the files that can be opened from the files that can't be opened and therefore run nowhere.

    Raises:
        GraphError: no file can be opened.
    """
    readable = list[File]()
    unreadable = list[NotRun]()
    for file in files:
        try:
            inspect_file(Path(file.path if isinstance(file, Engine) else file))
        except GraphError as error:
            if len(files) == 1:
                raise
            name = os.fspath(file.path if isinstance(file, Engine) else file)
            unreadable.append(NotRun(OFF, str(error), name))
        else:
            readable.append(file)
    if unreadable and not readable:
        raise GraphError("; ".join(file.reason for file in unreadable))
    return readable, unreadable


def _require_deterministic(model: Original) -> None:
    """Refuse a model that draws random numbers, because two of its runs differ.

    Raises:
        InputError: the model draws random numbers; the message names the operators.
    """
    if isinstance(model, LoadedModel):
        draws = random_ops_of_program(model.program)
    else:
        draws = random_nodes_of_file(model.proto)
    if draws:
        raise InputError(
            f"the model can't be verified, because it draws random numbers ({', '.join(draws)}); make the noise"
            " an input of the model, or verify the part without it"
        )


def _find_empty_outputs(model: Original, trials: Mapping[str, PrecisionTrial]) -> list[str]:
    """Return the outputs that are empty for every input.

    Raises:
        InputError: all outputs are empty.
    """
    answers = [answer for trial in trials.values() for answer in trial.answers]
    empty = [output for output in model.outputs if not any(answer.reference[output].size for answer in answers)]
    if empty and len(empty) == len(model.outputs):
        raise InputError(
            f"no output has elements at any input ({', '.join(empty[:_NAMED])}), so there is nothing to"
            " compare; pass sizes above 0"
        )
    return empty


def _describe_size_limit(too_large: Sequence[str], budget: ComparisonBudget) -> Iterable[str]:
    if too_large:
        yield f"at sizes whose tensors have up to {budget.most_elements:,} elements"


def _describe_unseen_sizes(model: Original, compared: Sequence[ComparedFile]) -> Iterable[str]:
    """Yield phrases on sizes that the files accept but that were not tried."""
    if isinstance(model, FileModel):
        return
    for subject in compared:
        if not subject.runtime:
            proto = load_onnx(subject.path, external_data=False)
            yield from describe_unseen_sizes(proto, subject.label, subject.inputs, model.inputs)


def _usual_precision(compared: Sequence[ComparedFile]) -> str:
    """Return the precision of the ONNX files if all have the same precision, otherwise "". An engine of unknown
    precision is judged in this precision.
    """
    kinds = {s.precision for s in compared if not s.runtime}
    if len(kinds) == 1:
        return kinds.pop()
    return ""


def _run_trials(
    model: Original,
    candidates: Sequence[RuntimeCandidate],
    compared: Sequence[ComparedFile],
    cases: Sequence[InputCase],
    rules: Policy,
    clock: BudgetClock,
    tell: Progress,
) -> dict[str, PrecisionTrial]:
    """Run the trial of each precision, and return precision -> trial.

    Only one of the reference and the runtimes is in memory at a time, because each may be as large as the model.
    """
    reference, usual = FloatReference(model), _usual_precision(compared)
    trials: dict[str, PrecisionTrial] = {}

    def trial_for_precision(precision: str) -> PrecisionTrial:
        if precision not in trials:
            sampled = any(case.kind == DATASET for case in cases)
            trials[precision] = PrecisionTrial(
                model,
                reference,
                precision,
                each=True,
                policy=rules,
                dataset=sampled,
                quantized=are_quantized(compared),
                clock=clock,
            )
            for done, _ in enumerate(trials[precision].prepare_answers(cases)):
                tell("reference", done, len(cases))
            reference.release_runner()
        return trials[precision]

    for precision in dict.fromkeys(c.compute_precision(usual) for c in candidates) or [usual]:
        trial_for_precision(precision)
    for done, candidate in enumerate(candidates):
        tell("verify", done, len(candidates))
        with ExitStack() as stack:
            candidate.load(stack)
            trial = trial_for_precision(candidate.compute_precision(usual))
            trial.run_candidate(candidate)
    for trial in trials.values():
        trial.rejudge_within_ranges()
        blame_optimizers(trial, tell, clock)
        blame_runtimes(trial)
    return trials


def _order_results(
    model: Original, trials: Mapping[str, PrecisionTrial], candidates: Sequence[RuntimeCandidate]
) -> list[OutputResult]:
    """Return the results output by output: eager first, then the files in the given order."""
    eager = [result for _, trial in sorted(trials.items()) for result in trial.candidate_results(trial.eager)]
    of = {id(candidate): trial for trial in trials.values() for candidate in trial.candidates}
    every = eager + [result for candidate in candidates for result in of[id(candidate)].candidate_results(candidate)]
    return [result for output in model.outputs for result in every if result.output == output]


def _measure_drifts(
    model: LoadedModel,
    compared: Sequence[ComparedFile],
    trials: Mapping[str, PrecisionTrial],
    results: Sequence[OutputResult],
    clock: BudgetClock,
    tell: Progress,
) -> tuple[list[DriftPoint], list[str]]:
    """Measure drift of each ONNX file on a case that it fails, otherwise on the first case.

    Returns:
        (points, notes).
    """
    points = list[DriftPoint]()
    notes = list[str]()
    for subject in compared:
        if subject.runtime:
            notes.append(f"no drift of {subject.label}: the inner tensors of an engine can't be read")
            continue
        failed = [r.case for r in results if r.file == subject.label and not r]
        answers = trials[subject.precision].answers
        answer = next((a for a in answers if a.case.name in failed), answers[0])
        seen, more = measure_file_drift(model, subject, answer.feeds, subject.precision, tell, clock)
        points += seen
        notes += [f"drift of {subject.label}: measured at {answer.case.name}", *more]
    return points, notes
