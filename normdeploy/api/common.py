"""What several verbs share: the stages, what is said of samples and of the runtime, the comparison of the whole
model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnx

from ..errors import InputError
from ..findings.records import Finding
from ..log import log
from ..option_values import CUDA, ONNXRUNTIME, TENSORRT
from ..precision.tensor_ranges import load_samples
from ..rewriting import norm_optimizer, rewrite_rollback
from ..rewriting.rewrite_ledger import RewriteOptions, RewriteStep
from ..types import Progress
from ..verb_options import ConversionOptions

if TYPE_CHECKING:
    from ..model import InputSpec

NOT_MEASURED = "the forms for onnxruntime's CUDA provider were chosen by its documents: they were not measured"


class StageTimer:
    """Names and times the stages of a verb, and tells the progress bar which one runs."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, 0, 0)
        log.info("%s ...", name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log.info("%s took %.2f s", name, self.seconds[name])


def read_calibration_samples(options: ConversionOptions) -> Sequence[Mapping[str, Any]] | None:
    """Read the user's samples for half precision before any work, so that a wrong file costs no export.

    Returns:
        None where there are none, or where they are for quantization.

    Raises:
        InputError: they can't be read, or nothing asks for them.
    """
    calibrate = options.calibrate if options.quantize is None else ()
    if options.precision is None:
        if calibrate or options.keep_io:
            raise InputError(
                "calibrate is for quantization and half precision, keep_io for half precision alone; ask for either"
                " with quantize (int8, fp8, int4) or precision (fp16, bf16)"
            )
        return None
    if not calibrate:
        return None
    samples: list[Mapping[str, Any]] = []
    for item in calibrate:
        samples += [item] if isinstance(item, Mapping) else load_samples([item])
    return samples


def select_target(options: ConversionOptions) -> str:
    """The runtime whose forms are written.

    Raises:
        InputError: a provider is chosen of another runtime than onnxruntime.
    """
    if options.provider != "cuda":
        return options.runtime
    if options.runtime not in ONNXRUNTIME:
        raise InputError(
            f"provider 'cuda' is one of onnxruntime's, and the runtime is {options.runtime!r}; give runtime onnxruntime"
            " with it"
        )
    return CUDA


def compare_with_original(
    before: onnx.ModelProto | None,
    inputs: Sequence[InputSpec],
    wanted: RewriteOptions,
    made: rewrite_rollback.Made,
    strict: bool,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> tuple[rewrite_rollback.Made, list[str], bool]:
    """As `rewrite_rollback.roll_back_differences`; ``before`` is None where it is too large to be held."""
    if before is None:
        return (
            made,
            ["the whole model was not compared with the one before: its weights are beyond compare_limit"],
            False,
        )
    model = before

    def optimize_without_undone(undone: Mapping[RewriteStep, Finding]) -> rewrite_rollback.Made:
        return norm_optimizer.optimize_with_steps(model, replace(wanted, progress=None, undone=undone))

    return rewrite_rollback.roll_back_differences(
        model, inputs, optimize_without_undone, made, tidy, strict=strict, loads=wanted.runtime not in TENSORRT
    )
