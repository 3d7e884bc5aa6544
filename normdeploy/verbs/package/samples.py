"""Make the samples of a bundle: inputs, expected outputs, and the allowed error of each output.

With the PyTorch model, the expected outputs are its float64 outputs, rounded to the model's type. The allowed error is
that of ``normdeploy.verbs.verify.file_comparison``, plus half an ulp for the rounding:

    error ≤ 4 · (eager's own error) + 4.5 ulp(max |expected|)

For a quantized file, the bound also includes the change of the output if its activations and weights are rounded
differently (`verify.quantized_reference`).

Without the model, the expected outputs are the outputs of onnxruntime with its optimizer off. The error of eager mode
is then unknown. It is replaced by the change of the outputs in perturbed runs: inputs and weights change by up to one
unit roundoff of the coarsest floating type. The effect of one such rounding is the scale of the error of a correct
evaluation.

Only weights of two or more dims are perturbed. Vectors and scalars are not, because a different exponent, or a
different factor of a Resize, would be a different model.

Expected outputs of onnxruntime can show that a runtime changed, but not that the file itself is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from ...compare.element_errors import absolute_difference, largest_finite
from ...compare.ulp_spacing import allowed_beside_peer, ulp_at
from ...errors import InputError
from ...graphs.quantization_info import is_quantized
from ...inputs.input_cases import InputCase, NamedInputs, check_user_cases, generate_cases
from ...model import DEFAULT_SIZES, Dim, InputSpec, LoadedModel, ModelSignature
from ...precision.half_conversion import recorded_precision
from ...precision.type_conversion import FORMATS
from ...runtimes import Runner, RunResult
from ...runtimes.onnx_float64 import is_floating
from ...runtimes.size_search import find_runnable_sizes
from ...storage.export_record import read_record
from ...types import Array, Arrays, Progress
from ..run.run_function import can_run
from ..verify.precision_trial import PrecisionTrial
from ..verify.quantized_reference import evaluate_quantized as expected_of
from ..verify.reference_models import FloatReference, model_unit_roundoff
from ..verify.runtime_candidates import HALF_TYPES, input_types
from .onnx_reference import open_perturbed_runners, perturb_feeds, reference_runner
from .triton_config import TritonPort

# Maximum bytes of all inputs and expected outputs (256 MiB). The first sample is kept even if it is larger.
LIMIT = 2**28
# Number of perturbed runs that find integer outputs that depend on rounding, as in `compare.rounding_ties`.
_TIES = 16


@dataclass(frozen=True)
class Sample:
    """Input and its expected outputs.

    Attributes:
        inputs: name -> array, in the types of the file.
        expected: name -> array, in the types of the model.
        free: integer output -> bool array. True marks elements that depend on rounding; any value of them is accepted.
    """

    name: str
    kind: str
    inputs: dict[str, Array]
    expected: dict[str, Array]
    free: dict[str, Array] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Count the bytes of all arrays.

        Returns:
            Bytes.
        """
        return sum(a.nbytes for part in (self.inputs, self.expected, self.free) for a in part.values())


@dataclass(frozen=True)
class Samples:
    """Samples of a bundle with their bounds.

    Attributes:
        bounds: (output, kind of sample) -> largest absolute error that passes.
        reference: source of the expected outputs.
    """

    cases: tuple[Sample, ...]
    bounds: dict[tuple[str, str], float]
    reference: str
    notes: tuple[str, ...] = ()


def make_samples_from_model(
    model: LoadedModel,
    path: Path,
    proto: onnx.ModelProto,
    *,
    batch: str = "",
    inputs: Sequence[NamedInputs] = (),
    progress: Progress | None = None,
) -> Samples:
    """Make samples whose expected outputs come from ``model`` in float64.

    Args:
        path: the ONNX file of the model.
        proto: the same file without its weights.
        batch: name of the batch dim, or "". One of the samples has the smallest batch.
        inputs: the user's inputs. If there are any, no inputs are generated.

    Returns:
        The samples and the bounds of their outputs.

    Raises:
        InputError: the model does not run on an input that it accepts by its signature.
        NormdeployError: an operator of the model does not run in float64.
    """
    precision = recorded_precision(proto)
    types = input_types(proto.graph)
    halves = {name: {kind} for name, kind in types.items() if kind in HALF_TYPES}
    cases, notes = _make_cases(model, batch, inputs, halves)
    reference = FloatReference(model)
    trial = PrecisionTrial(model, reference, precision)
    for done, _ in enumerate(trial.prepare_answers(cases)):
        if progress is not None:
            progress("samples", done, len(cases))
    unit = 4 * (FORMATS[precision].unit_roundoff if precision else model_unit_roundoff(model))
    dtypes = {output: tally.dtype for (output, _), tally in trial.eager.tallies.items()}
    samples: list[Sample] = []
    for answer in trial.answers:
        expected = {name: value.astype(dtypes[name]) for name, value in answer.reference.items()}
        whole = {name: value for name, value in expected.items() if value.dtype.kind in "iub"}
        others = (
            [reference.float64_runner.run_perturbed(answer.feeds, unit, seed) for seed in range(_TIES)] if whole else []
        )
        inputs_of_file = {name: value.astype(types[name]) for name, value in answer.feeds.items()}
        _add_sample(
            samples,
            Sample(answer.case.name, answer.case.kind, inputs_of_file, expected, _find_free_integers(whole, others)),
            notes,
        )
    bounds = {
        key: tally.allowed_error(tally) + (0.0 if tally.dtype.kind in "iub" else ulp_at(tally.scale, tally.dtype) / 2)
        for key, tally in trial.eager.tallies.items()
    }
    for sample in samples if is_quantized(proto) else ():
        steps = _quantization_tolerances(path, sample.inputs, weights=True)
        for output in sample.expected:
            bounds[output, sample.kind] += steps.get(output, 0.0)
    return Samples(tuple(samples), bounds, "the PyTorch model in float64", (*notes, *trial.notes))


def make_samples_from_file(
    path: Path,
    proto: onnx.ModelProto,
    ports: Sequence[TritonPort],
    *,
    batch: str = "",
    largest: int = 0,
    inputs: Sequence[NamedInputs] = (),
    progress: Progress | None = None,
) -> Samples:
    """Make samples whose expected outputs come from onnxruntime with its optimizer off.

    Args:
        proto: the file at ``path`` without its weights. Inputs are generated from its export record.
        ports: inputs of the file.
        batch, inputs: as for ``make_samples_from_model``.
        largest: largest batch of a file without a record; 0 if unknown.

    Returns:
        The samples and the bounds of their outputs.

    Raises:
        InputError: the file does not run on the inputs, or its outputs are random.
        GraphError: onnxruntime refuses the file.
        RuntimeUnavailable: onnxruntime has no kernel for an operator of the file.
    """
    known = {spec.name: spec for spec in read_record(proto).get("inputs", ())}
    outputs = tuple(v.name for v in proto.graph.output)
    guessed = [] if inputs else [p.name for p in ports if p.name not in known]
    specs = tuple(
        known.get(p.name) or (_spec_of_given_input(p) if inputs else _guess_spec(p, batch, largest)) for p in ports
    )
    model = ModelSignature(inputs=specs, outputs=outputs, kind="onnx")
    stated = {batch} if largest else set()
    every = [dim for spec in specs if spec.name in guessed for dim in spec.shape]
    unsaid = list(dict.fromkeys(dim.name for dim in every if dim.name is not None and dim.name not in stated))
    if unsaid:
        with ExitStack() as stack:
            runner = stack.enter_context(reference_runner(path, proto))
            model = _at_sizes_that_run(model, unsaid, runner)
    cases, notes = _make_cases(model, batch, inputs, {})
    if unsaid:
        sizes = ", ".join(
            f"{name}={dim.min}" + (f" to {dim.max}" if dim.max > dim.min else "")
            for name, dim in model.named_dims.items()
            if name in unsaid
        )
        notes.append(
            f"the file does not state the sizes of {', '.join(unsaid)}: samples have {sizes}, as far as the"
            " file runs; pass your own with --inputs FILE.npz"
            + (", or the largest batch with --max-batch N" if batch in unsaid else "")
        )
    if guessed:
        names = ", ".join(guessed)
        notes.append(f"the file does not state the values of {names}: samples are standard normal, integers 0 and 1")
    samples: list[Sample] = []
    bounds: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        runner = stack.enter_context(reference_runner(path, proto))
        unit, others = open_perturbed_runners(path, proto, stack)
        for done, case in enumerate(cases):
            if progress is not None:
                progress("samples", done, len(cases))
            feeds = case.make()
            if unsaid and not can_run(runner.infer, feeds):
                notes.append(f"no sample at {case.name}: the file does not run at these sizes")
                continue
            expected = runner.infer(feeds)
            if done == 0 and not _are_equal(runner.infer(feeds), expected):
                raise InputError(
                    f"{path.name} returns different outputs for the same inputs, so no outputs can be expected"
                )
            moved = [other.infer(perturb_feeds(feeds, unit, seed)) for seed, other in enumerate(others)]
            whole = {name: value for name, value in expected.items() if value.dtype.kind in "iub"}
            _add_sample(
                samples, Sample(case.name, case.kind, feeds, expected, _find_free_integers(whole, moved)), notes
            )
            steps = _quantization_tolerances(path, feeds) if is_quantized(proto) else {}
            for output, value in expected.items():
                allowed = 0.0
                if is_floating(value.dtype):
                    allowed = steps.get(output, 0.0) + allowed_beside_peer(
                        max(_largest_difference(other[output], value) for other in moved),
                        largest_finite(value),
                        value.dtype,
                    )
                bounds[output, case.kind] = max(bounds.get((output, case.kind), 0.0), allowed)
    return Samples(tuple(samples), bounds, "onnxruntime with its optimizer off", tuple(notes))


def _quantization_tolerances(path: Path, feeds: Arrays, weights: bool = False) -> dict[str, float]:
    """Bound the change of each output of a quantized file under other roundings.

    Returns:
        Output -> bound; empty if the file can't be evaluated in float64.
    """
    told = expected_of(path, feeds, weights)
    if told is None:
        return {}
    return {name: float(v.max(initial=0.0)) for name, v in told.allowed.items()}


def _make_cases(
    model: ModelSignature, batch: str, inputs: Sequence[NamedInputs], also: Mapping[str, Collection[np.dtype]]
) -> tuple[list[InputCase], list[str]]:
    if inputs:
        cases = check_user_cases(model, inputs, also)
        first = cases[0].make()
        if batch and all(len(array) > 1 for array in first.values()):
            cases.append(
                InputCase(f"the first row of {cases[0].name}", "given", lambda: {n: a[:1] for n, a in first.items()})
            )
        return cases, []
    cases, notes = generate_cases(model, 1)
    if batch in model.named_dims and (least := model.named_dims[batch].min) != model.named_dims[batch].opt:
        sizes = {batch: least}
        cases.insert(
            1,
            InputCase(
                f"{batch}={least}, the other dims at their usual sizes", "random", lambda: model.samples(1, sizes)
            ),
        )
    return cases, notes


def _spec_of_given_input(port: TritonPort) -> InputSpec:
    """Describe an input for which the user passes arrays. Of its dynamic dims, only the names are known."""
    dims = (
        Dim.from_size(d) if isinstance(d, int) else Dim(d or f"{port.name}.{i}", 0, 1, 2**31)
        for i, d in enumerate(port.shape)
    )
    return InputSpec(port.name, port.dtype, tuple(dims))


def _guess_spec(port: TritonPort, batch: str, largest: int) -> InputSpec:
    """Describe an input of a file without an export record. The range of its batch dim is 1 to ``largest``."""

    def guess_dim(place: int, size: int | str | None) -> Dim:
        """Guess the range of a dim.

        Returns:
            The fixed size or a range. The batch dim has a range up to ``largest``, other dims have the default range.
        """
        if isinstance(size, int):
            return Dim.from_size(size)
        if size and size == batch and largest:
            return Dim(batch, 1, min(2, largest), largest)
        return Dim(size or f"{port.name}.{place}", *DEFAULT_SIZES)

    return InputSpec(port.name, port.dtype, tuple(guess_dim(i, size) for i, size in enumerate(port.shape)))


def _at_sizes_that_run(model: ModelSignature, unsaid: Sequence[str], runner: Runner) -> ModelSignature:
    """Choose sizes at which the model runs, for dims without a recorded range. The usual sizes are tried first.

    Returns:
        The model with these sizes.

    Raises:
        InputError: the model does not run at any size that was tried.
    """
    found = find_runnable_sizes(model, unsaid, lambda sizes: can_run(runner.infer, model.samples(0, sizes)))
    dims = {n: Dim(n, found[n], found[n], found[n]) for n in found}
    inputs = tuple(spec.with_ranges_of(dims) for spec in model.inputs)
    at_them = replace(model, inputs=inputs)
    # If no sizes were found, this run raises the error of the model, which names the cause.
    runner.infer(at_them.samples(0))
    return at_them


def _add_sample(samples: list[Sample], sample: Sample, notes: list[str]) -> None:
    if samples and sum(s.nbytes() for s in samples) + sample.nbytes() > LIMIT:
        notes.append(f"not in the samples: {sample.name}, of {sample.nbytes()} bytes; the total is limited to {LIMIT}")
    else:
        samples.append(sample)


def _find_free_integers(whole: RunResult, others: Sequence[RunResult]) -> dict[str, Array]:
    """Mark the elements of integer outputs that depend on rounding. The result has only outputs with such elements."""
    free = {}
    for name, value in whole.items():
        loose = [np.asarray(other[name] != value) for other in others if other[name].shape == value.shape]
        if loose and np.any(loose):
            free[name] = np.asarray(np.logical_or.reduce(loose))
    return free


def _are_equal(one: RunResult, other: RunResult) -> bool:
    return all(a.shape == other[name].shape and a.tobytes() == other[name].tobytes() for name, a in one.items())


def _largest_difference(one: Array, other: Array) -> float:
    """Return the largest finite difference of two arrays, or 0 if their shapes differ."""
    if one.shape != other.shape:
        return 0.0
    return float(absolute_difference(one, other, one_sided=0.0).max(initial=0.0))
