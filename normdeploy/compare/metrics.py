"""How alike two outputs are, as one number: the measures that ``verify --metric`` takes. The larger, the more alike.

All are computed in float64. ``cosine``, ``psnr`` and ``snr`` take the whole output of one input as one vector; the
least of all inputs counts. ``top1``, ``top5`` and ``nearest_neighbor_agreement`` are shares of the rows of all inputs
together. A NaN or an infinity in either output makes a measure NaN, which reaches no threshold.

``accuracy_drop`` and ``accuracy5_drop`` ask for labels: how much smaller is the share of samples whose label is found
than with the reference? The smaller, the better; below zero the other finds more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..types import Array

# similarities that are held at a time
AT_ONCE = 2**24


@dataclass(frozen=True)
class Metric:
    """``of(value, reference)`` is the measure of one input, or where ``pooled`` the rows that agree, as 0 and 1.

    ``least`` and ``most`` bound what it can be. An output needs ``axes`` dims at least, and more than ``among`` places
    along the last.
    ``labelled``: ``of(value, labels)`` are the samples whose label is found, of value and of reference; their shares'
    difference counts.
    """

    name: str
    of: Callable[[Array, Array], float | Array]
    least: float
    most: float
    pooled: bool = False
    axes: int = 0
    among: int = 0
    labelled: bool = False

    @property
    def comparison_sign(self) -> str:
        """Between the metric and its threshold."""
        if self.labelled:
            return "<="
        return ">="


def cosine(value: Array, reference: Array) -> float:
    """Σ v·r / (‖v‖ ‖r‖), between −1 and 1 (Salton and McGill, Introduction to Modern Information Retrieval, 1983).

    Two vectors of zeros are alike (1), one of zeros and another are not (0), as Polygraphy's
    CosineSimilarityCompareFunc has it.
    """
    v, r = _flatten_to_float64(value, reference)
    # scaled first: of numbers beyond 1e154 the squares are infinite
    v, r = (x / largest if (largest := float(np.abs(x).max(initial=0.0))) else x for x in (v, r))
    lengths = float(np.linalg.norm(v)), float(np.linalg.norm(r))
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    return float(np.clip(v @ r / (lengths[0] * lengths[1]), -1.0, 1.0))


def psnr(value: Array, reference: Array) -> float:
    """Peak signal-to-noise ratio in dB: 10·log10(peak² / mean((v − r)²)), peak = max |r| (ITU-T J.340 with the
    reference's own peak).

    Infinite where both are equal; −infinite where the reference is zero and the other is not.
    """
    v, r = _flatten_to_float64(value, reference)
    return _decibels(float(np.abs(r).max(initial=0.0)), float(_root_mean_square(v - r)))


def snr(value: Array, reference: Array) -> float:
    """Signal-to-noise ratio in dB: 10·log10(Σ r² / Σ (v − r)²) (Oppenheim and Schafer, Discrete-Time Signal
    Processing)."""
    v, r = _flatten_to_float64(value, reference)
    return _decibels(float(_root_mean_square(r)), float(_root_mean_square(v - r)))


def top_agreement(count: int) -> Callable[[Array, Array], Array]:
    """Of each row along the last axis (the classes): is the reference's best among the ``count`` largest of the other?

    The top-k accuracy of ILSVRC (Russakovsky et al., 2015), the reference's answer in the place of the label. Where the
    reference has several best, any of them will do. Of equal scores of the other the first goes before, as in
    ``top_accuracy``.
    """

    def rows_agree(value: Array, reference: Array) -> Array:
        v, r = (x.astype(np.float64).reshape(-1, x.shape[-1]) for x in (value, reference))
        best = r == r.max(-1, keepdims=True)
        # of the best, the one that the other likes most
        return top_accuracy(count)(v, np.where(best, v, -np.inf).argmax(-1))

    return rows_agree


def top_accuracy(count: int) -> Callable[[Array, Array], Array]:
    """Of each sample: is its label among the ``count`` largest of its scores?

    The top-k accuracy of ILSVRC (Russakovsky et al., 2015). Of equal scores the first goes before, as with argmax: a
    file that gives all classes one score finds label 0 alone.
    """

    def labels_found(scores: Array, labels: Array) -> Array:
        """Scores [samples, classes] and labels [samples], whole numbers of 0 or more and below classes."""
        own = scores[np.arange(len(labels)), labels][:, None]
        before = (scores > own) | ((scores == own) & (np.arange(scores.shape[-1]) < labels[:, None]))
        return (before.sum(-1) < count).astype(np.float64)

    return labels_found


def nearest_neighbor_agreement(value: Array, reference: Array) -> Array:
    """Of each row (an embedding: all dims but the first as one vector): is its nearest among the other rows the
    reference's too?

    Near is what has the larger cosine; recall at 1 of the reference's neighbours, as retrieval is measured (Manning,
    Raghavan and Schütze, Introduction to Information Retrieval, 2008, 8.4). Rows that lie equally near in the reference
    will do for each other. One row alone has no neighbour: nothing is returned.
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
        # two roundings of one product
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
        Metric("nearest", nearest_neighbor_agreement, 0.0, 1.0, pooled=True, axes=2),
        Metric("accuracy_drop", top_accuracy(1), 0.0, 1.0, axes=2, among=1, labelled=True),
        Metric("accuracy5_drop", top_accuracy(5), 0.0, 1.0, axes=2, among=5, labelled=True),
    )
}


def _flatten_to_float64(value: Array, reference: Array) -> tuple[Array, Array]:
    return value.astype(np.float64).reshape(-1), reference.astype(np.float64).reshape(-1)


def _normalize_rows(rows: Array) -> Array:
    """Each row at length 1; rows of zeros stay."""
    wide = rows.astype(np.float64).reshape(len(rows), -1)
    lengths = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(lengths > 0, lengths, 1.0)


def _root_mean_square(values: Array) -> float:
    """The root of the mean square, of numbers of any size."""
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
