"""What ``export`` and ``optimize`` are asked of quantization, and the findings of the two passes over a quantized
file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import InputError
from ..findings.records import Finding, combine_certificates
from ..quantization.quantization_request import QuantizationRequest, require_half_support, require_runtime_kernels
from ..verb_options import ConversionOptions
from ..verbs.verify.policy import parse_policy
from .common import select_target


def parse_quantization_request(options: ConversionOptions) -> QuantizationRequest | None:
    """What is asked for, looked at before any work; None where nothing is to be quantized.

    Raises:
        InputError: options contradict each other, or the runtime has no kernels.
    """
    runtime = select_target(options)
    if options.quantize is None:
        if options.metric or options.calibration or options.dynamic or options.rotate or options.keep_float:
            raise InputError(
                "metric, calibration, dynamic, rotate and keep_float are for quantization alone; ask for it with"
                " quantize: int8, fp8 or int4"
            )
        return None
    if not options.calibrate and options.quantize != "int4" and not options.dynamic:
        raise InputError(
            f"{options.quantize} takes ranges of samples; give some with --calibrate samples.npz (INT4 weights do"
            " without, and --dynamic in onnxruntime)"
        )
    _require_metric_texts(options.metric)
    if options.dynamic and options.calibration:
        raise InputError(
            f"with dynamic, ranges are taken while the model runs, and the calibration {options.calibration!r} would"
            " take them of samples; leave one of --dynamic and --calibration out"
        )
    if options.metric and not options.calibrate:
        raise InputError("a metric is judged on samples; give some with --calibrate samples.npz")
    wish = QuantizationRequest(
        options.quantize,
        runtime,
        options.calibration or "minmax",
        parse_policy(None, options.metric),
        options.dynamic,
        options.precision or "",
        options.rotate,
        tuple(options.keep_float),
    )
    require_runtime_kernels(wish)
    require_half_support(wish)
    return wish


def _require_metric_texts(metric: object) -> None:
    """
    Raises:
        InputError: it is not what ``Thresholds`` says, which Python lets pass.
    """
    given = list(metric.values()) if isinstance(metric, Mapping) else [metric]
    texts = [t for one in given for t in (one if isinstance(one, list | tuple) else [one])]
    if metric is not None and not all(isinstance(t, str) for t in texts):
        raise InputError(
            f"the metric {metric!r} can't be read; give a text such as 'cosine>=0.995', several in a list, or a dict of"
            " them by output: {'logits': 'cosine>=0.995'}"
        )


def merge_findings(first: Sequence[Finding], second: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding for each norm: what the second pass made of it, with the proof of the first."""
    merged = list(first)
    taken = set[int]()
    for finding in second:
        place = _find_same_norm(finding, [(i, f) for i, f in enumerate(first) if i not in taken])
        if place is None:
            merged.append(finding)
            continue
        taken.add(place)
        before = first[place]
        if finding.status == "fused":
            certificate = combine_certificates(before.certificate, finding.certificate)
            proved = (*before.proved, *finding.proved)
            merged[place] = replace(finding, certificate=certificate, proved=tuple(dict.fromkeys(proved)))
        else:
            merged[place] = replace(before, notes=tuple(dict.fromkeys((*before.notes, *finding.notes))))
    return tuple(merged)


def _find_same_norm(finding: Finding, before: Sequence[tuple[int, Finding]]) -> int | None:
    """Which finding is of the same norm: its result has that name, or it is the module's only one, or the name was
    made of that name when the norm was split and quantized."""
    alike = [(i, f) for i, f in before if (f.kind, f.place) == (finding.kind, finding.place)]
    named = [i for i, f in alike if f.tensor == finding.tensor]
    of_module = [i for i, f in alike if f.module and f.module == finding.module]
    made = [(len(f.tensor), i) for i, f in alike if finding.tensor.startswith(f"{f.tensor}_")]
    if named or len(of_module) == 1:
        return (named or of_module)[0]
    if made:
        return max(made)[1]
    return None
