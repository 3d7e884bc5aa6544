"""Measure the similarity of two outputs as one number, for ``verify --metric``. Larger is more similar.

All measures are computed in float64. ``cosine``, ``psnr`` and ``snr`` treat the whole output for one input as one
vector; the smallest value over the inputs is compared with the threshold. ``top1``, ``top5`` and
``nearest_neighbor_agreement`` are shares of the rows of all inputs together. A NaN or an infinity in either output
makes a measure NaN, and NaN fails every threshold.

``accuracy_drop`` and ``accuracy5_drop`` need labels. They are the accuracy of the reference minus the accuracy of the
tested model, so smaller is better. A negative drop means that the tested model labels more samples correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..types import Array

# Maximum number of similarities in memory at a time.
AT_ONCE = 2**24


@dataclass(frozen=True)
class Metric:
    """Measure of similarity.

    Attributes:
        of: computes the measure. ``of(value, reference)`` returns the measure for one input. If ``pooled``, it returns
            0 or 1 for each row. If ``labelled``, ``of(value, labels)`` returns 0 or 1 for each sample, and the measure
            is the share of the reference minus the share of the value.
        least: smallest possible value.
        most: largest possible value.
        axes: minimum number of dims of an output.
        joined: True if the rows of all inputs are measured together.
        among: number that the size of the last axis must exceed, such as 5 for top5.
    """

    name: str
    of: Callable[[Array, Array], float | Array]
    least: float
    most: float
    pooled: bool = False
    axes: int = 0
    among: int = 0
    labelled: bool = False
    joined: bool = False

    @property
    def comparison_sign(self) -> str:
        """Return the sign between the metric and its threshold.

        Returns:
            ">=", or "<=" for metrics with labels.
        """
        if self.labelled:
            return "<="
        return ">="


def cosine(value: Array, reference: Array) -> float:
    """Compute Σ v·r / (‖v‖ ‖r‖) (Salton and McGill, Introduction to Modern Information Retrieval, 1983).

    Returns:
        number between −1 and 1. Two zero vectors give 1; one zero vector and one nonzero vector give 0, as in
        Polygraphy's CosineSimilarityCompareFunc.
    """
    v, r = _flatten_to_float64(value, reference)
    # Scale first: squares of numbers beyond 1e154 are infinite.
    v, r = (x / largest if (largest := float(np.abs(x).max(initial=0.0))) else x for x in (v, r))
    lengths = float(np.linalg.norm(v)), float(np.linalg.norm(r))
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    return float(np.clip(v @ r / (lengths[0] * lengths[1]), -1.0, 1.0))


def psnr(value: Array, reference: Array) -> float:
    """Compute the peak signal-to-noise ratio 10·log10(peak² / mean((v − r)²)), peak = max |r| (ITU-T J.340 with the
    reference's own peak).

    Returns:
        dB; infinite if both are equal, −infinite if only the reference is zero.
    """
    v, r = _flatten_to_float64(value, reference)
    return _decibels(float(np.abs(r).max(initial=0.0)), float(_root_mean_square(v - r)))


def snr(value: Array, reference: Array) -> float:
    """Compute the signal-to-noise ratio 10·log10(Σ r² / Σ (v − r)²) (Oppenheim and Schafer, Discrete-Time Signal
    Processing).

    Returns:
        dB; infinite if both are equal.
    """
    v, r = _flatten_to_float64(value, reference)
    return _decibels(float(_root_mean_square(r)), float(_root_mean_square(v - r)))


def top_agreement(count: int) -> Callable[[Array, Array], Array]:
    """Check for each row (of classes, along the last axis) if the reference's best class is among the ``count`` largest
    scores of the tested output.

    This is the top-k accuracy of ILSVRC (Russakovsky et al., 2015) with the reference's answer as the label. If the
    reference has several best classes, each of them is accepted. Among equal scores of the tested output, the first
    class ranks higher, as in ``top_accuracy``.

    Returns:
        function of (value, reference) that returns 0 or 1 for each row.
    """

    def rows_agree(value: Array, reference: Array) -> Array:
        """Compare the rows of two arrays of shape [..., classes].

        Returns:
            1 for rows that agree, else 0.
        """
        v, r = (x.astype(np.float64).reshape(-1, x.shape[-1]) for x in (value, reference))
        best = r == r.max(-1, keepdims=True)
        # Of the reference's best classes, take the class with the highest score in the tested output.
        return top_accuracy(count)(v, np.where(best, v, -np.inf).argmax(-1))

    return rows_agree


def top_accuracy(count: int) -> Callable[[Array, Array], Array]:
    """Check for each sample if its label has one of the ``count`` largest scores of the sample.

    This is the top-k accuracy of ILSVRC (Russakovsky et al., 2015). Among equal scores, the first class ranks higher,
    as in argmax. So if a file gives all classes the same score, only label 0 ranks first.

    Returns:
        function of (scores, labels) that returns 0 or 1 for each sample.
    """

    def labels_found(scores: Array, labels: Array) -> Array:
        """Find the labels among the largest scores.

        Args:
            scores: [samples, classes].
            labels: [samples], integers from 0 to classes − 1.

        Returns:
            1 for samples whose label is found, else 0.
        """
        own = scores[np.arange(len(labels)), labels][:, None]
        before = (scores > own) | ((scores == own) & (np.arange(scores.shape[-1]) < labels[:, None]))
        return (before.sum(-1) < count).astype(np.float64)

    return labels_found


def nearest_neighbor_agreement(value: Array, reference: Array) -> Array:
    """Check for each row if its nearest other row is the same as in the reference. A row is an embedding: all dims but
    the first as one vector.

    The nearest row is the row with the largest cosine. The measure is the recall at 1 of the reference's neighbors
    (Manning, Raghavan and Schütze, Introduction to Information Retrieval, 2008, 8.4). Rows that are equally near in the
    reference are interchangeable.

    Returns:
        0 or 1 for each row; empty for a single row, which has no neighbor.
    """
    v, r = (_normalize_rows(x) for x in (value, reference))
    if len(r) < 2:
        return np.zeros(0)
    agree = np.zeros(len(r))
    step = max(1, AT_ONCE // len(r))
    for start in range(0, len(r), step):
        rows = np.arange(start, min(start + step, len(r)))
        ours = v[rows] @ v.T
        theirs = r[rows] @ r.T
        for similar in (ours, theirs):
            similar[rows - start, rows] = -np.inf
        chosen = theirs[rows - start, ours.argmax(-1)]
        # 8 ulp allow for the roundings of two equal products.
        agree[rows] = chosen >= theirs.max(-1) - 8 * np.finfo(np.float64).eps
    return agree


METRICS = {
    metric.name: metric
    for metric in (
        Metric("cosine", cosine, -1.0, 1.0),
        Metric("psnr", psnr, -np.inf, np.inf),
        Metric("snr", snr, -np.inf, np.inf),
        Metric("top1", top_agreement(1), 0.0, 1.0, pooled=True, axes=1, among=1),
        Metric("top5", top_agreement(5), 0.0, 1.0, pooled=True, axes=1, among=5),
        Metric("nearest", nearest_neighbor_agreement, 0.0, 1.0, pooled=True, axes=2, joined=True),
        Metric("accuracy_drop", top_accuracy(1), 0.0, 1.0, axes=2, among=1, labelled=True),
        Metric("accuracy5_drop", top_accuracy(5), 0.0, 1.0, axes=2, among=5, labelled=True),
    )
}


def _flatten_to_float64(value: Array, reference: Array) -> tuple[Array, Array]:
    return value.astype(np.float64).reshape(-1), reference.astype(np.float64).reshape(-1)


def _normalize_rows(rows: Array) -> Array:
    """Scale each row to length 1; zero rows stay."""
    wide = rows.astype(np.float64).reshape(len(rows), -1)
    lengths = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1.0)


def _root_mean_square(values: Array) -> float:
    """Return the root of the mean square, without overflow or underflow."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest:
        return largest * float(np.sqrt(np.mean((values / largest) ** 2)))
    return 0.0


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return float("inf")
    if signal:
        return 20 * (float(np.log10(signal)) - float(np.log10(noise)))
    return float("-inf")
