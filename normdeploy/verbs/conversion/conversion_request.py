"""Validate the options of ``export`` and ``optimize`` before any work: the target, the samples and the quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...compare.metrics import Metric
from ...compare.policy import Policy, parse_policy
from ...errors import InputError
from ...inputs.image_dataset import Preprocessing
from ...norms.norm_table import STANDARD
from ...option_values import ANY, CUDA, DEFAULT_OPSET, ONNXRUNTIME
from ...precision.tensor_ranges import load_samples
from ...quantization.quantization_request import QuantizationRequest, require_half_support, require_runtime_kernels
from ...runtimes.target_support import Target, find_target
from ...verb_options import ConversionOptions
from ..arguments.preprocessing_choice import resolve_preprocessing
from ..arguments.user_metrics import metric_importer


def read_calibration_samples(options: ConversionOptions) -> Sequence[Mapping[str, Any]] | None:
    """Read the user's samples for half precision before any work, so that a wrong file is reported early.

    Returns:
        for each sample, input name -> array; None if there are no samples, or if the samples are for quantization or
        for metrics.

    Raises:
        InputError: a file can't be read, or samples or ``keep_io`` were given for a float32 file.
    """
    if options.quantize is None:
        calibrate = options.calibrate
    else:
        calibrate = ()
    if options.precision is None:
        if calibrate or options.keep_io:
            raise InputError(
                "calibrate needs quantization or half precision, keep_io needs half precision; also pass"
                " quantize (int8, fp8, int4) or precision (fp16, bf16)"
            )
        return None
    if not calibrate:
        return None
    if options.metric:
        # They are split into calibration samples and judging samples when the model's inputs are known.
        return None
    samples: list[Mapping[str, Any]] = []
    for item in calibrate:
        if isinstance(item, Mapping):
            samples += [item]
        else:
            samples += load_samples([item])
    return samples


def read_preprocessing_option(options: ConversionOptions) -> Preprocessing | None:
    """Read the preprocessing of the calibration files before any work.

    Returns:
        the preprocessing; None if the samples are arrays.

    Raises:
        InputError: the option has no effect, or the preprocessing can't be used.
        TrustError: a function's module would run without the user's permission.
    """
    if options.preprocess is None:
        return None
    if not options.calibrate or not (options.quantize or (options.precision and options.metric)):
        raise InputError(
            "--preprocess prepares pictures for --quantize, or for --precision with --metric; pass one of these, and"
            " the folder of pictures with --calibrate"
        )
    return resolve_preprocessing(options.preprocess, trust=bool(getattr(options, "trust", False)))


@dataclass(frozen=True)
class TargetForms:
    """Restriction of the written forms by ``--for`` and ``--opset``.

    Attributes:
        runtime: runtime whose measured forms are written.
        avoided: standard norm ops that the target does not run.
        limit: newest opset of the file; None for no limit.
    """

    runtime: str
    avoided: frozenset[str] = frozenset()
    limit: int | None = None


def select_forms(options: ConversionOptions) -> TargetForms:
    """Select the forms that a target and a stated opset allow.

    Raises:
        InputError: the target is unknown, or the options contradict it.
    """
    opset = getattr(options, "opset", None)
    if options.target is None:
        return TargetForms(options.runtime, limit=opset)
    target = find_target(options.target)
    if options.runtime not in (ANY, target.runtime):
        raise InputError(
            f"the target {target.name!r} needs runtime {target.runtime!r}, but the runtime is {options.runtime!r};"
            " pass one of the two options"
        )
    if target.unknown and target.kind == "tensorrt":
        raise InputError(f"can't choose forms for {target.name!r}: {target.note}")
    newest = _newest_opset(target)
    if opset is not None and newest is not None and opset > newest:
        raise InputError(f"the target {target.name!r} reads opsets up to {newest}, not {opset}; pass --opset {newest}")
    half = {"fp16": "float16", "bf16": "bfloat16"}.get(options.precision or "")
    accepted = {dtype for op, row in target.ops.items() if op in STANDARD for dtype in row.dtypes}
    if half is not None and accepted and half not in accepted:
        raise InputError(
            f"the target {target.name!r} takes {' and '.join(sorted(accepted))}, not {half}; omit --precision, or pass"
            " the other one"
        )
    return TargetForms(target.runtime, target.avoided_ops(), opset or newest)


def _newest_opset(target: Target) -> int | None:
    """Return the newest opset that is known to work, or None for no limit."""
    if target.unknown:
        # Without an op list, the newest opset that needs no recent release is used: onnxruntime 1.17 and newer read it.
        return DEFAULT_OPSET
    return target.opsets[1]


def select_target(options: ConversionOptions) -> str:
    """Select the runtime that the norms are written for.

    Returns:
        ``options.runtime``, or `CUDA` if the runtime is onnxruntime with its CUDA provider.

    Raises:
        InputError: the CUDA provider was requested for a runtime other than onnxruntime.
    """
    if options.provider != "cuda":
        return options.runtime
    if options.runtime not in ONNXRUNTIME:
        raise InputError(
            f"provider 'cuda' belongs to onnxruntime, but the runtime is {options.runtime!r}; pass runtime onnxruntime"
        )
    return CUDA


def parse_quantization_request(
    options: ConversionOptions, own: Callable[[str], Metric] | None = None
) -> QuantizationRequest | None:
    """Validate the quantization options before any work.

    Args:
        own: function that imports the user's metric ``MODULE:FUNCTION``; None imports it if the user trusts code.

    Returns:
        the request, or None if nothing is to be quantized.

    Raises:
        InputError: options contradict each other, or the runtime has no kernels for the format.
    """
    runtime = select_target(options)
    if options.quantize is None:
        if options.calibration or options.dynamic or options.rotate:
            raise InputError("calibration, dynamic and rotate need quantization; also pass quantize: int8, fp8 or int4")
        if (options.metric or options.keep_float) and options.precision is None:
            raise InputError(
                "metric and keep_float choose the layers of a quantized or half-precision file; also pass quantize"
                " (int8, fp8, int4) or precision (fp16, bf16)"
            )
        return None
    if not options.calibrate and options.quantize != "int4" and not options.dynamic:
        raise InputError(
            f"{options.quantize} needs samples to find ranges; pass --calibrate samples.npz (INT4 weights and,"
            " in onnxruntime, --dynamic need none)"
        )
    _require_metric_texts(options.metric)
    if options.dynamic and options.calibration:
        raise InputError(
            f"dynamic computes ranges at run time, but the calibration {options.calibration!r} needs samples;"
            " omit --dynamic or --calibration"
        )
    if options.metric and not options.calibrate:
        raise InputError("a metric needs samples; pass --calibrate samples.npz")
    wish = QuantizationRequest(
        options.quantize,
        runtime,
        options.calibration or "minmax",
        parse_policy(None, options.metric, own or metric_importer(trust=bool(getattr(options, "trust", False)))),
        options.dynamic,
        options.precision or "",
        options.rotate,
        tuple(options.keep_float),
    )
    require_runtime_kernels(wish)
    require_half_support(wish)
    return wish


def parse_half_policy(options: ConversionOptions, own: Callable[[str], Metric] | None = None) -> Policy:
    """Validate the metrics of a half-precision file before any work.

    Args:
        own: function that imports the user's metric ``MODULE:FUNCTION``; None imports it if the user trusts code.

    Returns:
        the metrics; empty if none are requested, or if the file is not in half precision.

    Raises:
        InputError: the metric can't be read, or there are no samples.
    """
    if options.precision is None or not options.metric:
        return Policy()
    _require_metric_texts(options.metric)
    if not options.calibrate:
        raise InputError("a metric needs samples; pass --calibrate samples.npz")
    return parse_policy(None, options.metric, own or metric_importer(trust=bool(getattr(options, "trust", False))))


def _require_metric_texts(metric: object) -> None:
    """Check at run time that the metric is a text, a list of texts, or a dict of texts or lists (``Thresholds``).

    Raises:
        InputError: the metric is something else.
    """
    if isinstance(metric, Mapping):
        given = list(metric.values())
    else:
        given = [metric]
    texts = [t for one in given for t in (one if isinstance(one, list | tuple) else [one])]
    if metric is not None and not all(isinstance(t, str) for t in texts):
        raise InputError(
            f"can't read the metric {metric!r}; pass a text such as 'cosine>=0.995', a list of them, or a dict"
            f" by output: {{'logits': 'cosine>=0.995'}}"
        )
