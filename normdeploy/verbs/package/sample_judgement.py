"""Run the samples in every installed runtime, and compare the outputs with the expected outputs and their bounds.

``normdeploy.verbs.package.samples`` describes the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...compare.element_errors import absolute_difference
from ...compare.error_tally import ErrorTally
from ...compare.ulp_spacing import EAGER_MULTIPLE, ULPS
from ...errors import InputError
from ...inputs.input_cases import InputCase
from ...runtimes.onnx_float64 import is_floating
from ...runtimes.torch_runners import Float64Runner
from ...runtimes.trt_runner import TrtRunner
from ...storage.onnx_files import load_onnx
from ...types import Array, Progress
from ..verify.comparison_result import Comparison
from ..verify.output_results import OutputResult, failed_result, judge_output
from ..verify.runtime_candidates import OFF, ON, NotRun, RuntimeCandidate, inspect_file, make_candidates
from .onnx_reference import reference_runner
from .samples import Sample, Samples

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class Judgement(Comparison):
    """Verdicts of the runtimes on the samples.

    Attributes:
        reference: source of the expected outputs.
    """

    reference: str = Float64Runner.name

    @property
    def optimizer_is_wrong(self) -> bool:
        """Return whether an output fails with onnxruntime's optimizer on and passes with it off."""
        right = {r.output for r in self.results if r.runtime == OFF and r}
        return any(r.runtime == ON and not r and r.output in right for r in self.results)

    def to_json(self) -> dict[str, Any]:
        """Convert the verdicts to JSON values.

        Returns:
            The fields of the comparison, and a description of the rule for the bounds.
        """
        return super().to_json() | {
            "rule": {"eager_multiple": EAGER_MULTIPLE, "ulps": ULPS, "reference": self.reference}
        }

    def show(self, console: Console) -> None:
        from .package_tables import show_judgement

        show_judgement(console, self)


@dataclass
class _BoundedTally(ErrorTally):
    """Tally of errors that uses a recorded bound."""

    bound: float = 0.0

    def allowed_error(self, eager: ErrorTally) -> float:
        """Return the recorded bound.

        Returns:
            An absolute error. The argument ``eager`` is ignored.
        """
        return self.bound


def judge_samples(
    path: Path,
    engines: Sequence[Path],
    samples: Samples,
    *,
    runtime_cache: bool | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Run every sample in onnxruntime and in each engine that can run on this machine.

    onnxruntime runs with its optimizer off and on, on the CPU and on the GPU.

    Args:
        runtime_cache: use of the cache of kernels that TensorRT-RTX compiles for this GPU. True writes a cache file
            next to each engine, None reads an existing file, False does neither.

    Returns:
        The verdict for each output in each runtime.

    Raises:
        GraphError: the ONNX file is broken.
        InputError: a file of ``engines`` is not an engine.
    """
    subjects = [inspect_file(file) for file in (path, *engines)]
    candidates, not_run = make_candidates(subjects)
    notes = []
    for done, candidate in enumerate(candidates):
        if candidate.subject is not None and candidate.subject.runtime == "tensorrt-rtx":
            candidate.make = partial(TrtRunner, candidate.subject.path, runtime_cache)
        if progress is not None:
            progress("run", done, len(candidates))
        # Only one runner is kept in memory, because each runner may be as large as the model.
        with ExitStack() as stack:
            candidate.load(stack)
            for sample in samples.cases:
                _run_sample(candidate, sample, samples, half=subjects[0].precision != "")
            candidate.runner = None
        if candidate.skipped and candidate.tallies:
            notes.append(
                f"{candidate.name}: {candidate.skipped} of {len(samples.cases)} samples are outside the"
                " engine's profile"
            )
        elif candidate.skipped:
            candidate.unavailable = "all samples are outside the engine's profile"
    outputs = dict.fromkeys(output for sample in samples.cases for output in sample.expected)
    results = [r for output in outputs for candidate in candidates for r in _output_results(output, candidate, samples)]
    missed = [*not_run, *(NotRun(c.name, c.unavailable, c.file_label) for c in candidates if c.unavailable)]
    names = tuple(sample.name for sample in samples.cases)
    return Judgement(tuple(results), tuple(missed), names, (*samples.notes, *notes), reference=samples.reference)


def _run_sample(candidate: RuntimeCandidate, sample: Sample, samples: Samples, *, half: bool) -> None:
    result = candidate.infer(InputCase(sample.name, sample.kind, lambda: sample.inputs), sample.inputs)
    if result is None:
        return
    for output, expected in sample.expected.items():
        value = result.get(output)
        if half and value is not None and is_floating(expected.dtype) and is_floating(value.dtype):
            # With ``keep_io``, the outputs of a half-precision file are float32.
            value = value.astype(expected.dtype)
        tally = candidate.tallies.get((output, sample.kind))
        if tally is None:
            tally = candidate.tallies[output, sample.kind] = _BoundedTally(
                expected.dtype, bound=samples.bounds[output, sample.kind]
            )
        if is_floating(expected.dtype):
            exact = expected.astype(np.float64)
        else:
            exact = expected
        tally.add(sample.name, value, exact, partial(_matches_expected, sample, output))


def _matches_expected(sample: Sample, output: str, value: Array) -> Array:
    free = sample.free.get(output)
    same = np.asarray(value == sample.expected[output])
    if free is None:
        return same
    return same | free


def _output_results(output: str, candidate: RuntimeCandidate, samples: Samples) -> list[OutputResult]:
    """Compare one output in one runtime with its bounds. The result is empty if the runtime did not run."""
    dtype = next(s.expected[output] for s in samples.cases if output in s.expected).dtype
    if candidate.failure:
        return [failed_result(output, candidate.name, dtype, candidate.where, candidate.failure)]
    mine = {kind: tally for (name, kind), tally in candidate.tallies.items() if name == output}
    if not mine or candidate.unavailable:
        return []
    return [judge_output(output, candidate.name, mine, {kind: ErrorTally(dtype) for kind in mine})]


def explain_row_dependence(path: Path, samples: Samples) -> str | None:
    """Check whether Triton may join requests into one batch.

    The first and the last row of a batch are run alone, and compared with the same row in the batch. Each of the two
    results may have the error that the sample allows, so they may differ by twice that bound. If they differ by more,
    the result of a row depends on the other rows (for example, by a normalization over the batch).

    Returns:
        The reason why requests can't be joined; None if no such difference was found.
    """
    batches = [
        s
        for s in samples.cases
        if s.kind in ("random", "given") and all(a.ndim and len(a) > 1 for a in s.inputs.values())
    ]
    if not batches:
        return None
    sample = min(batches, key=Sample.nbytes)
    with reference_runner(path, load_onnx(path, external_data=False)) as runner:
        together = runner.infer(sample.inputs)
        count = len(next(iter(sample.inputs.values())))
        for row in (slice(0, 1), slice(count - 1, count)):
            try:
                alone = runner.infer({name: np.ascontiguousarray(a[row]) for name, a in sample.inputs.items()})
            except InputError as error:
                return f"the model does not run on a single row: {error}"
            for name, value in alone.items():
                free = sample.free.get(name)
                if reason := _describe_difference(
                    name, value, together[name], row, 2 * samples.bounds[name, sample.kind], free
                ):
                    return reason
    return None


def _describe_difference(
    name: str, alone: Array, together: Array, row: slice, bound: float, free: Array | None
) -> str | None:
    if together.ndim == 0 or alone.shape != together[row].shape:
        return f"the output {name!r} has the shape {list(together.shape)}, but {list(alone.shape)} for one row"
    if not is_floating(alone.dtype):
        same = (alone == together[row]) | (False if free is None else free[row])
        if np.all(same):
            return None
        return f"a row's {name!r} depends on the other rows of the batch"
    worst = float(absolute_difference(alone, together[row]).max(initial=0.0))
    if worst > bound:
        return f"a row's {name!r} depends on the other rows of the batch: it differs by {worst:.2e}"
    return None
