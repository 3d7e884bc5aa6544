"""Compare the first denoising step of a pipeline: its ONNX files in onnxruntime, with eager mode and float64.

The rule is the rule of ``verbs.verify.file_comparison``, applied to the whole chain of parts (`denoising_chain`). The
reference is the chain in float64. The unit s of each element comes from runs of the whole chain with random roundings
in every part. So s contains the errors of a text encoder as the later parts enlarge them. ρ is the error of the chain
in eager mode, in units s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ...compare.error_bounds import ErrorBounds
from ...compare.error_tally import ErrorTally
from ...errors import GraphError, InputError, RuntimeUnavailable
from ...model import InputSpec, LoadedModel
from ...runtimes import Runner
from ...runtimes.ort_runner import OrtRunner, ort_title
from ...runtimes.rounding_noise import RoundingRunner
from ...runtimes.torch_runners import EagerRunner
from ...storage.onnx_files import load_small_weights
from ...types import Array, Arrays
from .compared_files import open_files_of_model
from .comparison_result import Comparison
from .compute_budget import ComparisonBudget, InnerSizes
from .denoising_chain import SCALING, STEPPING, DenoisingChain, require_fitting_feeds
from .output_results import OutputResult, failed_result, judge_output
from .runtime_candidates import ComparedFile, NotRun

# Kind and name of the only input case.
_KIND, _CASE = "random", "seed 0"
_SCHEDULER = (SCALING, STEPPING)
# Label of the files of all parts together.
_STEP = "the step"


def compare_step(chain: DenoisingChain, paths: Mapping[str, Path], budget: ComparisonBudget) -> Comparison:
    """Compare the first denoising step of a pipeline.

    Args:
        paths: part -> ONNX file.
        budget: limit on the seconds of additional runs with random roundings, and on the memory of each part.

    Returns:
        the comparison: rows for the text encoders, noise, latents and image, in eager mode and in onnxruntime. If
        onnxruntime can't run a file, the rows fail.

    Raises:
        NormdeployError: the chain can't run in float64 or in eager mode.
    """
    begun = time.monotonic()
    files = {name: _open_file(model, paths[name]) for name, model in chain.models.items() if name not in _SCHEDULER}
    with ExitStack() as stack:
        exact = {name: stack.enter_context(_open_reference(model)) for name, model in chain.models.items()}
        eager = {name: stack.enter_context(EagerRunner(model)) for name, model in chain.models.items()}

        def run_exact(name: str, feeds: Arrays) -> Arrays:
            sizes = require_fitting_feeds(name, chain.models[name], feeds)
            if name in files:
                _require_memory(name, files[name], chain.models[name], sizes, budget)
            return exact[name].infer(_cast(feeds, _exact_inputs(chain.models[name])))

        reference = chain.run(run_exact)
        own = chain.run(partial(_run_in_own_types, chain, eager))

        def run_rounded(seed: int) -> dict[str, Array]:
            return chain.run(
                lambda name, feeds: exact[name].run_rounded(_cast(feeds, _exact_inputs(chain.models[name])), seed)
            )

        bounds = ErrorBounds(reference, own, run_rounded, lambda: time.monotonic() - begun < budget.seconds)
        judge = _StepJudge(reference, own, bounds)
        results = judge.judge_runtime(EagerRunner.name, own)
        not_run = list[NotRun]()
        for optimize in (False, True):
            runtime = ort_title("cpu", optimize=optimize)
            try:
                made = _run_files(chain, files, eager, optimize=optimize)
            except RuntimeUnavailable as error:
                not_run.append(NotRun(runtime, str(error)))
            except (GraphError, InputError) as error:
                # onnxruntime can't load or run a file, and the reference ran with the same inputs.
                results += judge.fail_runtime(runtime, str(error), file=_STEP)
            else:
                results += judge.judge_runtime(runtime, made, file=_STEP)
    # Rows of one output stand together.
    ordered = tuple(result for output in reference for result in results if result.output == output)
    return Comparison(
        results=ordered,
        not_run=tuple(not_run),
        cases=(_CASE,),
        notes=chain.notes,
        seconds=time.monotonic() - begun,
        reference="the pipeline's parts",
        limits=chain.limits,
    )


def _open_file(model: LoadedModel, path: Path) -> ComparedFile:
    """Open the file of a part, and match the names of its inputs and outputs with the model's."""
    (file,), _ = open_files_of_model(model, [path], ())
    return replace(file, label=f"{path.parent.name}/{path.name}")


def _require_memory(
    name: str, file: ComparedFile, model: LoadedModel, sizes: Mapping[str, int], budget: ComparisonBudget
) -> None:
    """Check that the inner tensors of a part fit the memory.

    Raises:
        InputError: they do not fit.
    """
    inner = InnerSizes(load_small_weights(file.path), file.inputs, model.inputs)
    tensor, elements = inner.largest_tensor(sizes)
    if elements > budget.most_elements:
        raise InputError(
            f"the tensor {tensor!r} of {name}, with the tensors held at the same time, would need up to {elements:,}"
            f" elements, but {budget.memory:,} bytes hold only {budget.most_elements:,}; --max-memory raises the limit"
        )


def _exact_inputs(model: LoadedModel) -> tuple[InputSpec, ...]:
    """Return the inputs of the model in float64: floating inputs are float64."""
    return tuple(replace(spec, dtype="float64") if _is_floating(spec) else spec for spec in model.inputs)


def _is_floating(spec: InputSpec) -> bool:
    return spec.dtype == "bfloat16" or np.dtype(spec.dtype).kind == "f"


def _open_reference(model: LoadedModel) -> RoundingRunner:
    """Return the float64 runner of a part, which takes float64 inputs."""
    return RoundingRunner(replace(model, inputs=_exact_inputs(model)))


def _cast(feeds: Arrays, inputs: tuple[InputSpec, ...]) -> dict[str, Array]:
    return {spec.name: np.asarray(feeds[spec.name]).astype(spec.dtype) for spec in inputs}


def _run_in_own_types(chain: DenoisingChain, runners: Mapping[str, Runner], name: str, feeds: Arrays) -> Arrays:
    return runners[name].infer(_cast(feeds, chain.models[name].inputs))


def _run_files(
    chain: DenoisingChain, files: Mapping[str, ComparedFile], eager: Mapping[str, Runner], *, optimize: bool
) -> dict[str, Array]:
    """Run the chain in onnxruntime, one session at a time. The scheduler runs in PyTorch, as in a pipeline."""

    def run(name: str, feeds: Arrays) -> Arrays:
        if name in _SCHEDULER:
            return _run_in_own_types(chain, eager, name, feeds)
        subject = files[name]
        model = chain.models[name]
        own = {key: value for key, value in _cast(feeds, model.inputs).items() if key not in subject.spared}
        with OrtRunner(subject.path, optimize=optimize) as session:
            made = subject.model_results(session.infer(subject.own_feeds(own)))
        if missing := [output for output in model.outputs if output not in made]:
            raise InputError(f"{subject.label} does not return {', '.join(missing)}")
        return {output: made[output] for output in model.outputs}

    return chain.run(run)


class _StepJudge:
    """Judge the outputs of a runtime by the errors of eager mode and by the bounds of the reference."""

    def __init__(self, reference: Arrays, own: Arrays, bounds: ErrorBounds) -> None:
        self._reference = reference
        self._dtypes = {name: value.dtype for name, value in own.items()}
        self._bounds = bounds
        self._eager = {name: self._tally(name, own) for name in reference}

    def judge_runtime(self, runtime: str, made: Arrays, file: str = "") -> list[OutputResult]:
        """Judge every output of one runtime.

        Args:
            file: label of the files; "" for eager mode.

        Returns:
            one result for each output.
        """
        found = list[OutputResult]()
        for name in self._reference:
            result = judge_output(name, runtime, {_KIND: self._tally(name, made)}, {_KIND: self._eager[name]})
            found.append(replace(result, file=file, by_default=result.verdict))
        return found

    def fail_runtime(self, runtime: str, reason: str, file: str) -> list[OutputResult]:
        """Return a failing result for every output of a runtime that can't run the files."""
        return [
            replace(failed_result(name, runtime, self._dtypes[name], _CASE, reason), file=file)
            for name in self._reference
        ]

    def _tally(self, name: str, made: Arrays) -> ErrorTally:
        def allow(error: Array) -> Array:
            return self._bounds.allowed_error(name, self._bounds.eager_ratio(name), error)

        tally = ErrorTally(self._dtypes[name])
        tally.add(_CASE, made.get(name), self._reference[name], _explain_nothing, bound=allow)
        return tally


def _explain_nothing(value: Array) -> Array:
    """Explain no difference of integers, because no output of the step is an integer."""
    return np.zeros(value.shape, bool)
