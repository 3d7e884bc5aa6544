"""Compare an exported file with PyTorch before it is written.

Different outputs mean that the file is wrong. The exporter, the user's translation of an operator, or a rewrite may
have caused this. Two runs at small sizes take a few seconds at most; `verify` compares more inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx

from ...compare.element_errors import absolute_difference
from ...compare.error_bounds import DECIDING_RUNS
from ...compare.number_text import format_pair
from ...compare.perturbation import find_unexplained, regrouping_error
from ...errors import ExportError, NormdeployError
from ...graphs.shape_inference import infer_types
from ...graphs.two_pass_group_norm import ONE_PASS, expand_group_norms
from ...model import LoadedModel, ModelSignature
from ...option_values import TENSORRT
from ...rewriting import perturbed_model
from ...rewriting.model_comparison import KnownRun
from ...runtimes import RunResult
from ...runtimes.rounding_noise import FLOAT32
from ...runtimes.torch_runners import EagerRunner
from ...types import Array, Arrays
from .followed_choices import FollowedRuns, WrongChoice, follow_file
from .random_draws import random_ops_of_program
from .reference_models import model_unit_roundoff
from .rounding_effect import RoundingEffect

_MOST_PARAMETERS = 2**28
# Maximum seconds of one run.
_MOST_SECONDS = 2.0


@dataclass(frozen=True)
class ReferenceRun:
    """PyTorch's outputs at one choice of sizes.

    Attributes:
        sizes: description of the sizes.
        known: the same run for the comparison of the rewritten model with the original one.
    """

    sizes: str
    feeds: Arrays
    outputs: RunResult
    known: KnownRun


@dataclass(frozen=True)
class ExpectedOutputs:
    """Outputs that a file must reproduce.

    Attributes:
        unit: unit roundoff of the model's type.
        relative: error that is always attributed to rounding, relative to a row's largest element.
        reason: reason why there are no outputs to compare with; None if there are outputs or if no note is needed.
    """

    runs: tuple[ReferenceRun, ...]
    unit: float = 0.0
    relative: float = 0.0
    reason: str | None = None


def run_expected(model: LoadedModel) -> ExpectedOutputs:
    """Run ``model`` in PyTorch at the smallest sizes of its dims and at small odd sizes.

    A model that draws random numbers is not run, because its outputs are not reproducible. A model in half precision is
    not run either, because only `verify` can judge it. Neither case has a reason in the result.

    Returns:
        the outputs, or a reason why the model was not run.
    """
    unit = model_unit_roundoff(model)
    if unit > FLOAT32 or random_ops_of_program(model.program):
        return ExpectedOutputs(())
    parameters = sum(value.numel() for value in model.program.state_dict.values())
    if parameters > _MOST_PARAMETERS:
        return ExpectedOutputs((), reason=f"it has {parameters} parameters, more than the limit of {_MOST_PARAMETERS}")
    runs = list[ReferenceRun]()
    reason: str | None = None
    with EagerRunner(model) as runner:
        for at, sizes in _iter_named_sizes(model):
            try:
                feeds = model.samples(len(runs), sizes)
                run = _run_timed(runner, feeds)
            except Exception as error:
                # torch and the model may raise exceptions of any type. A model may not run at odd sizes.
                reason = reason or f"PyTorch does not run it at {at}: {str(error) or type(error).__name__}"
                continue
            known = KnownRun(dict(sizes), feeds, list(run.outputs.values()), run.processor_seconds)
            runs.append(ReferenceRun(at, feeds, run.outputs, known))
            if run.seconds > _MOST_SECONDS:
                if len(runs) == 1:
                    return ExpectedOutputs((), reason=f"one run in PyTorch takes {run.seconds:.1f} s")
                break
    relative = regrouping_error(len(model.program.graph.nodes), unit)
    return ExpectedOutputs(tuple(runs), unit, relative, None if runs else reason)


@dataclass(frozen=True)
class _TimedRun:
    """Run in PyTorch with its seconds, and its seconds of processor time."""

    outputs: RunResult
    seconds: float
    processor_seconds: float


def _run_timed(runner: EagerRunner, feeds: Arrays) -> _TimedRun:
    """Run the model, or take the run on the same inputs with which loading has compared the module and its trace."""
    run = runner.find_trace_run(feeds)
    if run is not None:
        return _TimedRun(runner.trace_outputs(run), run.seconds, run.processor_seconds)
    begun = time.perf_counter()
    start = time.process_time()
    outputs = runner.infer(feeds)
    return _TimedRun(outputs, time.perf_counter() - begun, time.process_time() - start)


def require_expected_outputs(
    wanted: ExpectedOutputs, proto: onnx.ModelProto, reload: Callable[[], LoadedModel], runtime: str
) -> list[str]:
    """Run the file in onnxruntime and compare it with PyTorch's outputs.

    The file does not run again on inputs on which it ran in the comparison with the original model.

    Args:
        wanted: result of `run_expected`.
        proto: the file.
        reload: returns the model, to draw roundings if an output differs. It may load the model again.
        runtime: target of the file. A loss of digits in onnxruntime's kernels is not an error of a TensorRT file.

    Returns:
        notes on comparisons that were not possible.

    Raises:
        ExportError: an output differs by more than rounding explains.
    """
    if wanted.reason is not None:
        return [_unchecked_note(wanted.reason)]
    if not wanted.runs:
        return []
    notes = []
    model: LoadedModel | None = None
    file: perturbed_model.PerturbableModel | None = None
    for run in wanted.runs:
        if run.known.file is proto:
            values = run.known.file_outputs
        else:
            try:
                file = file or perturbed_model.PerturbableModel(proto)
            except Exception as error:
                # onnxruntime's exceptions have no common base class.
                return [_unchecked_note(f"onnxruntime can't load it: {perturbed_model.short_error_message(error)}")]
            try:
                values = file.run_perturbed(run.feeds)
            except Exception as error:
                # onnxruntime's exceptions have no common base class.
                notes.append(
                    _unchecked_note(
                        f"onnxruntime does not run it at {run.sizes}: {perturbed_model.short_error_message(error)}"
                    )
                )
                continue
        if len(values) != len(run.outputs):
            raise ExportError(
                f"the file would have {len(values)} outputs, but the model has {len(run.outputs)}, so nothing"
                " was written; --no-check (in Python check=False) writes the file"
            )
        given = dict(zip(run.outputs, values, strict=True))
        if not _describe_difference(run, given, wanted.relative, {}):
            continue
        model = model or reload()
        try:
            choices = follow_file(model, proto, run.feeds, optimize=False, provider="cpu")
            # The file may order nearly equal scores in another way than PyTorch.
            if isinstance(choices, FollowedRuns):
                expected = replace(run, outputs=choices.eager)
                guide = choices.follower
            else:
                expected = run
                guide = None
            effect = RoundingEffect(model, run.feeds, wanted.unit, expected.outputs, guide)
            describe = partial(_describe_difference, expected, given, wanted.relative)
            message = effect.find_beyond(describe)
            if message and guide is None:
                effect.include_runs(_run_moved_file(proto, run.feeds, given, wanted.unit))
                message = describe(effect.moved)
            if message and isinstance(choices, WrongChoice):
                message = f"{message}; {choices.text}"
        except NormdeployError as error:
            notes.append(
                _unchecked_note(f"outputs differ at {run.sizes}, and the effect of rounding is unknown: {error}")
            )
            continue
        accurate = expand_group_norms(proto) if message and runtime in TENSORRT else None
        if accurate is not None:
            values = perturbed_model.PerturbableModel(accurate).run_perturbed(run.feeds)
            accurate_outputs = dict(zip(run.outputs, values, strict=True))
            if not _describe_difference(expected, accurate_outputs, wanted.relative, effect.moved):
                notes.append(
                    f"{ONE_PASS}: at {run.sizes} {message}; with two passes over each group the file matches PyTorch"
                )
                continue
        if message:
            raise ExportError(
                "the file would be wrong, so nothing was written. Run in onnxruntime and in PyTorch on random"
                f" inputs at {run.sizes}, {message}. Either an operator was exported as another function, or"
                " onnxruntime rounds it more than PyTorch does: --no-check (in Python check=False) writes the"
                " file, then `normdeploy bisect MODEL FILE` names the node"
            )
    return notes


def _run_moved_file(
    proto: onnx.ModelProto, feeds: Arrays, outputs: Mapping[str, object], unit: float
) -> dict[str, Array]:
    """Move inputs, parameters and reductions of a file at random by up to one unit roundoff.

    A rewrite may round more than the model does: if a scale of the input is folded into a convolution, the sums have
    another size.

    Args:
        outputs: the file's outputs on ``feeds``.

    Returns:
        output -> largest change of each element. Empty if a run fails.
    """
    floating = {
        name: kind
        for name, (kind, _) in infer_types(proto).items()
        if kind is not None and kind in perturbed_model.FLOATING
    }
    arrays = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
    changes = {name: np.zeros(value.shape) for name, value in arrays.items()}
    try:
        file = perturbed_model.PerturbableModel(proto, floating=floating)
        for seed in range(DECIDING_RUNS):
            values = file.run_perturbed(feeds, np.random.default_rng(seed), unit)
            for name, value in zip(outputs, values, strict=True):
                if name in changes:
                    changes[name] = np.maximum(changes[name], absolute_difference(value, arrays[name]))
    except Exception:
        # onnxruntime's exceptions have no common base class.
        return {}
    return changes


def _unchecked_note(reason: str) -> str:
    return f"the file was not compared with PyTorch: {reason}"


def _iter_named_sizes(model: ModelSignature) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield the smallest sizes, then small odd sizes. The odd sizes of the dims differ if the ranges allow it."""
    dims = model.named_dims
    least = {name: dim.min for name, dim in dims.items()}
    yield _describe_sizes(least), least
    odd = dict[str, int]()
    taken = set[int]()
    for name, dim in dims.items():
        near = dim.allowed_sizes(dim.min + 1)[: 2 * len(dims) + 2]
        sizes = [size for size in near if size // dim.step % 2]
        odd[name] = next((size for size in sizes if size not in taken), sizes[0] if sizes else dim.max)
        taken.add(odd[name])
    if odd != least:
        yield _describe_sizes(odd), odd


def _describe_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "its sizes"


def _describe_difference(
    run: ReferenceRun, given: Mapping[str, object], relative: float, moved: RunResult
) -> str | None:
    """Describe the first output that differs by more than rounding explains; None if there is no such output."""
    for output, right in run.outputs.items():
        value = given[output]
        if not isinstance(value, np.ndarray):
            continue
        if value.shape != right.shape or value.dtype != right.dtype:
            return (
                f"output {output!r} is {value.dtype}{list(value.shape)} in onnxruntime and"
                f" {right.dtype}{list(right.shape)} in PyTorch"
            )
        if not right.size:
            continue
        room = moved.get(output, np.zeros(right.shape))
        worst = find_unexplained(value, right, room, relative)
        if worst is not None:
            if worst.place:
                at = f" at {list(worst.place)}"
            else:
                at = ""
            texts = format_pair(value[worst.place], right[worst.place])
            return (
                f"{worst.beyond} of {right.size} elements of output {output!r} differ by more than rounding"
                f" explains, most{at}: {texts[0]} in onnxruntime, {texts[1]} in"
                f" PyTorch; the error is {worst.error:.1g}, allowed {worst.allowed:.1g}"
            )
    return None
