"""RMS norm without gamma commutes with a matrix whose rows are orthogonal and equally long.

**Lemma.** Let A be a matrix of n×n whole numbers with A·Aᵀ = k·I, k > 0, and Q = A/√k, √k the positive root. Let

    rms(x) = x/√(mean(x²) + ε)        over rows of n, or of a multiple of n in whose consecutive runs Q acts alike

Then rms(x·Q) = rms(x)·Q and (x·Q)·Qᵀ = x, at every real x, both sides being defined at the same x.

**Proof.** Q·Qᵀ = A·Aᵀ/k = I, hence (x·Q)·Qᵀ = x, and Σ(x·Q)² = x·Q·Qᵀ·xᵀ = Σx², run by run, so that mean(x²) + ε is one
number. Both sides divide x·Q by its root. ∎ The premise is looked at in whole numbers: no element of A·Aᵀ is above n,
which float64 holds. So is that all layers that write have this one A in all their runs, and those that read its
transpose. `tests/proof/test_lemmas.py` has a matrix with another sign, one with rows of two lengths, and one with a
fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def isometry_factor(a: np.ndarray) -> int | None:
    """k, where A·Aᵀ = k·I; None where there is no such k. ``a``: (n, n) of −1, 0 and 1."""
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size or not np.isin(a, (-1, 0, 1)).all():
        return None
    wide = a.astype(np.float64)
    # sums of at most n ones: exact
    square = wide @ wide.T
    k = int(square[0, 0])
    if k > 0 and np.array_equal(square, k * np.eye(len(a))):
        return k
    return None


def inverse_pair_factor(writing: Sequence[np.ndarray], reading: Sequence[np.ndarray], n: int) -> int | None:
    """k, where each matrix of ``writing`` is one A of n×n in all its runs and 0 elsewhere, each of ``reading`` its
    transpose, and A·Aᵀ = k·I; None where that is not so."""
    first = next(iter(writing), None)
    if first is None:
        return None
    a = first[:n, :n]

    def is_block_diagonal(matrix: np.ndarray, run: np.ndarray) -> bool:
        blocks = np.kron(np.eye(len(matrix) // n), run)
        return blocks.shape == matrix.shape and np.array_equal(blocks, matrix)

    if not all(is_block_diagonal(m, a) for m in writing) or not all(is_block_diagonal(m, a.T) for m in reading):
        return None
    return isometry_factor(a)
