"""Build Hadamard matrices: n×n matrices H of ±1 with H·Hᵀ = n·I.

Sylvester's construction makes order 2n from order n. Paley's make order q + 1 for primes q ≡ 3 modulo 4, and 2(q + 1)
for q ≡ 1 modulo 4 (R. E. A. C. Paley, On Orthogonal Matrices, J. Math. Phys. 12, 1933). The proofs that use a matrix
check H·Hᵀ (`normdeploy.proof.lemmas.isometry`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_SEED = 1933


def largest_order(width: int) -> int:
    """Find the largest order of a Hadamard matrix that this module can build and that divides ``width``.

    Returns:
        the order; 1 if no larger order divides ``width``.
    """
    return next((n for n in range(width, 1, -1) if width % n == 0 and _paley_construction(n)), 1)


@lru_cache(maxsize=8)
def signed_hadamard(order: int) -> np.ndarray:
    """Build a Hadamard matrix with a random sign for each row. Every call returns the same matrix.

    The matrix multiplies row vectors from the right, so each sign belongs to a channel of the vector (QuIP#, Tseng et
    al., arXiv 2402.04396, section 3).

    Args:
        order: an order from `largest_order`.

    Returns:
        read-only int8 [order, order].
    """
    core = _paley_construction(order)
    assert core is not None, f"no Hadamard matrix of order {order} is known"
    kind, q, doublings = core
    h = {"one": lambda q: np.ones((1, 1)), "first": _paley_first, "second": _paley_second}[kind](q)
    for _ in range(doublings):
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng([_SEED, order]).choice([-1, 1], order)
    made = (signs[:, None] * h).astype(np.int8)
    made.setflags(write=False)
    return made


def _paley_construction(order: int) -> tuple[str, int, int] | None:
    """Find a construction of a matrix of this order; None if no construction is known.

    Returns:
        Paley's construction ("first", "second") or "one" for the matrix of order 1, its prime (0 for "one"), and the
        number of doublings after it.
    """
    doublings = 0
    while True:
        if order in (1, 2):
            return "one", 0, doublings + (order == 2)
        if _is_prime(order - 1) and (order - 1) % 4 == 3:
            return "first", order - 1, doublings
        if order % 2 == 0 and _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
            return "second", order // 2 - 1, doublings
        if order % 2:
            return None
        order = order // 2
        doublings = doublings + 1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _jacobsthal_matrix(q: int) -> np.ndarray:
    """Build the matrix χ(i − j) modulo the prime q, with χ = 0 for 0, 1 for other squares, and −1 for nonsquares."""
    character = -np.ones(q)
    character[np.arange(1, q) ** 2 % q] = 1
    character[0] = 0
    places = np.arange(q)
    return np.asarray(character[(places[:, None] - places) % q])


def _bordered_matrix(q: int, corner: float) -> np.ndarray:
    """Add a first row of ones and a first column of ``corner`` to Jacobsthal's matrix; their common element is 0.

    ``corner`` is −1 for a skew-symmetric matrix and 1 for a symmetric matrix.
    """
    s = np.zeros((q + 1, q + 1))
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, corner, _jacobsthal_matrix(q)
    return s


def _paley_first(q: int) -> np.ndarray:
    return np.eye(q + 1) + _bordered_matrix(q, -1)


def _paley_second(q: int) -> np.ndarray:
    s = _bordered_matrix(q, 1)
    return np.kron(s, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
