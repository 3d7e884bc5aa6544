"""Check matrices that commute with RMSNorm: their rows are orthogonal and of equal length, and the norm has no gamma.

**Lemma.** Let A be a matrix of n×n integers with A·Aᵀ = k·I, k > 0, and Q = A/√k, √k the positive root. Let

    rms(x) = x/√(mean(x²) + ε)        over rows of n, or of a multiple of n in whose consecutive runs Q acts alike

Then rms(x·Q) = rms(x)·Q and (x·Q)·Qᵀ = x, at every real x, both sides being defined at the same x.

**Proof.** Q·Qᵀ = A·Aᵀ/k = I, hence (x·Q)·Qᵀ = x, and Σ(x·Q)² = x·Q·Qᵀ·xᵀ = Σx², run by run, so that mean(x²) + ε is one
number. Both sides divide x·Q by its root. ∎

The premise is checked in integers: no element of A·Aᵀ exceeds n, which float64 represents exactly. All layers that
write must have this one A in all their runs, and all that read must have its transpose; this is checked too.
`tests/proof/test_lemmas.py` has a matrix with another sign, one with rows of two lengths, and one with a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def isometry_factor(a: np.ndarray) -> int | None:
    """Compute k with A·Aᵀ = k·I.

    Args:
        a: matrix (n, n) of −1, 0 and 1.

    Returns:
        k; None if there is none, or if ``a`` has other elements.
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
