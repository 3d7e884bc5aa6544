"""Measure the accuracy of a quantized file against the model, on samples that were not used for calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import onnx

from ..compare.metrics import Metric
from ..compare.policy import Policy, Threshold
from ..errors import InputError
from ..findings.quantization_report import MetricReport, OutputDrift
from ..ort_sessions.session import open_session
from ..precision.tensor_ranges import serialize_for_session
from ..runtimes.crash_check import require_no_crash
from ..types import Arrays

# Square of the 95 % quantile of the normal distribution
_SQUARED = 1.6449**2
# One mapping per batch: output name → value
Outputs = list[dict[str, np.ndarray]]
# An output whose relative error exceeds this limit gets a note.
_FAR = 0.1


class AccuracyJudge:
    """Runner of files on the judging samples, which measures their outputs against the model in float64.

    If an output has one row per sample, each row is compared separately. In this case, ``cosine`` is the cosine of the
    worst sample.

    Args:
        samples: batches, with the samples of a batch along the first axis.
        reference: outputs of the model on each batch.
        policy: metrics that a file must reach.
        optimize: True to let onnxruntime optimize the files.
    """

    def __init__(self, samples: Sequence[Arrays], reference: Outputs, policy: Policy, optimize: bool) -> None:
        self.samples = samples
        self.reference = reference
        self.optimize = optimize
        names = [name for name, value in reference[0].items() if value.dtype.kind == "f"]
        policy.check(names)
        self.rules = [(name, rule) for name in names for rule in _thresholds_for(policy, name)]

    def run_samples(self, proto: onnx.ModelProto) -> Outputs:
        """Run a file on the judging samples in onnxruntime.

        Returns:
            the outputs of each batch.
        """
        return run_in_onnxruntime(proto, self.samples, self.optimize)

    def measure_metrics(self, outputs: Outputs, float32: Outputs) -> tuple[MetricReport, ...]:
        """Measure each requested metric of each output.

        Args:
            outputs: outputs of the quantized file.
            float32: outputs of the float32 file, for comparison.

        Returns:
            one report per output and metric, with the values of both files and True if the threshold is met.
        """
        judged = []
        for name, rule in self.rules:
            (value, rows), (plain, _) = (self._measure_metric(rule.metric, name, made) for made in (outputs, float32))
            judged.append(MetricReport(name, rule.kind, rule.least, value, plain, bool(value >= rule.least), rows))
        return tuple(judged)

    def measure_drift(self, outputs: Outputs, float32: Outputs) -> tuple[OutputDrift, ...]:
        """Measure the relative error and cosine of each floating-point output, even if no metric is requested.

        Returns:
            one record per output, with the float32 file's relative error for comparison.
        """
        names = [name for name, value in self.reference[0].items() if value.dtype.kind == "f"]
        return tuple(
            OutputDrift(
                name,
                *_relative_difference(name, outputs, self.reference),
                _relative_difference(name, float32, self.reference)[0],
            )
            for name in names
        )

    def _measure_metric(self, kind: Metric, name: str, outputs: Outputs) -> tuple[float, int]:
        """Measure one metric of one output.

        Returns:
            the value, and the number of rows if the metric is a share of rows; 0 for other metrics.
        """
        pairs = [(made[name], right[name]) for made, right in zip(outputs, self.reference, strict=True)]
        if kind.joined and not kind.pooled:
            value, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
            return float(cast("float", kind.of(value, right))), 0
        if kind.pooled:
            rows = len(next(iter(self.samples[0].values())))
            alike = all(
                v.ndim and len(v) == len(next(iter(s.values()))) for (v, _), s in zip(pairs, self.samples, strict=True)
            )
            # The nearest neighbor of a sample may be in another batch, so the rows of all batches are joined.
            if alike and rows:
                shapes = {v.shape[1:] for v, _ in pairs}
                if len(shapes) == 1:
                    pairs = [(np.concatenate([v for v, _ in pairs]), np.concatenate([r for _, r in pairs]))]
            shares = np.concatenate([np.atleast_1d(kind.of(v, r)) for v, r in pairs])
            return (float(shares.mean()) if shares.size else 1.0), int(shares.size)
        return min(float(kind.of(v, r)) for v, r in self._compared_rows(pairs)), 0

    def _compared_rows(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        for (value, right), sample in zip(pairs, self.samples, strict=True):
            if value.ndim and len(value) == len(next(iter(sample.values()))):
                yield from zip(value, right, strict=True)
            else:
                yield value, right


def drift_notes(moved: Iterable[OutputDrift]) -> list[str]:
    """Write a note for each output that has a relative error above a tenth or can't be compared.

    Returns:
        the notes.
    """
    return [
        (
            f"the relative error of {m.output!r} is {m.error:.0%} on the judging samples (cosine {m.cosine:.4g})"
            if math.isfinite(m.error)
            else f"{m.output!r} differs from the model's output in shape, NaN or infinities on the judging samples"
        )
        + ": pass --metric, for example 'cosine>=0.99', so that the layers with the largest errors stay float"
        for m in moved
        if not m.error <= _FAR
    ]


def _relative_difference(name: str, outputs: Outputs, reference: Outputs) -> tuple[float, float]:
    """Compute ‖value − reference‖ / ‖reference‖ and the cosine over all batches together.

    Elements that are the same infinity in both outputs, or NaN in both outputs, are ignored. Both results are NaN if
    the shapes differ.
    """
    squares = np.zeros(4)
    with np.errstate(all="ignore"):
        for made, right in zip(outputs, reference, strict=True):
            v, r = (values[name].astype(np.float64) for values in (made, right))
            if v.shape != r.shape:
                return math.nan, math.nan
            alike = ~np.isfinite(r) & ((v == r) | (np.isnan(v) & np.isnan(r)))
            v, r = (np.where(alike, 0.0, values).ravel() for values in (v, r))
            squares += [(v - r) @ (v - r), r @ r, v @ v, v @ r]
        off, size, length, product = squares
        if off == 0:
            return 0.0, 1.0
        return float((off / size) ** 0.5), float(product / (size * length) ** 0.5) if size and length else 0.0


def _thresholds_for(policy: Policy, name: str) -> list[Threshold]:
    rules = policy.rules_for(name)
    for rule in rules:
        if not isinstance(rule, Threshold) or rule.metric.labelled:
            raise InputError(f"{rule} can't decide which layers stay float; use a metric that needs no labels")
    return [rule for rule in rules if isinstance(rule, Threshold)]


def lower_share_bound(share: float, rows: int) -> float:
    """Compute a lower bound of a share in a population from a sample.

    The bound is the lower end of Wilson's one-sided 95 % interval (Journal of the American Statistical Association 22,
    1927, 209).

    Args:
        share: share of the sample that agrees, from 0 to 1.
        rows: size of the sample.

    Returns:
        the bound, from 0 to ``share``.
    """
    middle = share + _SQUARED / (2 * rows)
    half = (share * (1 - share) / rows + _SQUARED / (4 * rows**2)) ** 0.5
    return (middle - _SQUARED**0.5 * half) / (1 + _SQUARED / rows)


def few_sample_notes(judged: Iterable[MetricReport]) -> list[str]:
    """Write a note for each share that reaches its threshold, but on too few samples to predict the share on other
    samples.

    Returns:
        the notes.
    """
    notes = []
    for j in judged:
        if not (j.met and j.samples) or (least := lower_share_bound(j.value, j.samples)) >= j.threshold:
            continue
        if j.threshold < 1:
            enough = math.ceil(_SQUARED * j.threshold / (1 - j.threshold))
        else:
            enough = 0
        if j.samples < enough:
            told = f", which needs at least {enough} rows to confirm"
        else:
            told = ""
        notes.append(
            f"{j.metric} of {j.output!r} is {j.value:.4g} on {j.samples} rows of the judging samples, and may be "
            f"{least:.4g} on others (95 % confidence); the threshold is {j.threshold:g}{told}. Pass more samples "
            "(half of them judge) or set a higher threshold than you need"
        )
    return notes


def run_in_onnxruntime(proto: onnx.ModelProto, samples: Sequence[Arrays], optimize: bool) -> Outputs:
    """Run ``proto`` in onnxruntime on each batch of ``samples``.

    Args:
        optimize: True to let onnxruntime optimize the graph.

    Returns:
        the outputs of each batch.
    """
    names = [v.name for v in proto.graph.output]
    with serialize_for_session(proto) as source:
        if optimize:
            require_no_crash(source)
        session = open_session(source, optimize=optimize)
    return [dict(zip(names, session.run(names, dict(sample)), strict=True)) for sample in samples]


def largest_relative_error(outputs: Outputs, reference: Outputs) -> float:
    """Compute the largest ‖value − reference‖ / ‖reference‖ of the floating-point outputs, over all batches together.

    Returns:
        the error; 0 for a model without floating-point outputs.
    """
    worst = 0.0
    for name, right in reference[0].items():
        if right.dtype.kind != "f":
            continue
        off = sum(
            float(np.sum((m[name].astype(np.float64) - r[name]) ** 2)) for m, r in zip(outputs, reference, strict=True)
        )
        length = sum(float(np.sum(r[name].astype(np.float64) ** 2)) for r in reference)
        worst = max(worst, (off / max(length, 1e-300)) ** 0.5)
    return worst
