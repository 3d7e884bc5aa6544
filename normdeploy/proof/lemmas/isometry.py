"""Check matrices that commute with an RMSNorm without gamma: their rows are orthogonal and of equal length.

**Lemma.** Let A be a matrix of n×n integers with A·Aᵀ = k·I and k > 0. Let Q = A/√k with the positive root √k. Let

    rms(x) = x/√(mean(x²) + ε)        over rows of n elements, or of several runs of n elements; then Q acts on each run

Then rms(x·Q) = rms(x)·Q and (x·Q)·Qᵀ = x at every real x. Both sides are defined at the same x.

**Proof.** Q·Qᵀ = A·Aᵀ/k = I, hence (x·Q)·Qᵀ = x. In each run, Σ(x·Q)² = x·Q·Qᵀ·xᵀ = Σx². So mean(x²) + ε is the same
number for x and x·Q, and both sides divide x·Q by its root. ∎

The premise is checked exactly: no element of A·Aᵀ exceeds n, and float64 represents these integers exactly. All layers
that write must use this A in all their runs. All layers that read must use its transpose. Both are checked too.
`tests/proof/test_lemmas.py` has three counterexamples: a wrong sign, rows of two lengths, and a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def isometry_factor(a: np.ndarray) -> int | None:
    """Compute k with A·Aᵀ = k·I.

    Args:
        a: matrix (n, n) of −1, 0 and 1.

    Returns:
        k; None if there is no such k, or if ``a`` has other elements.
    """
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size or not np.isin(a, (-1, 0, 1)).all():
        return None
    wide = a.astype(np.float64)
    # Sums of at most n ones are exact.
    square = wide @ wide.T
    k = int(square[0, 0])
    if k > 0 and np.array_equal(square, k * np.eye(len(a))):
        return k
    return None


def inverse_pair_factor(writing: Sequence[np.ndarray], reading: Sequence[np.ndarray], n: int) -> int | None:
    """Compute k with A·Aᵀ = k·I for matrices made of one block A.

    Args:
        writing: matrices with A in each n×n diagonal block and 0 elsewhere.
        reading: matrices with the transpose of A in each block.
        n: size of A.

    Returns:
        k; None if the matrices do not have this form.
    """
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
