"""Hadamard matrices: ±1, with H·Hᵀ = n·I.

Sylvester's, of order 2n from one of order n; Paley's, of order q + 1 for primes q ≡ 3 and 2(q + 1) for q ≡ 1 modulo 4
(R. E. A. C. Paley, On Orthogonal Matrices, J. Math. Phys. 12, 1933). Whoever uses one looks at H·Hᵀ
(`normdeploy.proof.lemmas.isometry`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_SEED = 1933


def largest_order(width: int) -> int:
    """The largest order of a matrix that is known here and divides ``width``; 1 where there is none."""
    return next((n for n in range(width, 1, -1) if width % n == 0 and _paley_construction(n)), 1)


@lru_cache(maxsize=8)
def signed_hadamard(order: int) -> np.ndarray:
    """int8 (order, order): a Hadamard matrix with a random sign for each row, the same at every call.

    A row vector is multiplied from the left: the signs are those of its channels (QuIP#, Tseng et al., arXiv
    2402.04396, section 3). ``order``: of `largest_order`.
    """
    core = _paley_construction(order)
    assert core is not None, f"no matrix of order {order} is known"
    kind, q, doublings = core
    h = {"one": lambda q: np.ones((1, 1)), "first": _paley_first, "second": _paley_second}[kind](q)
    for _ in range(doublings):
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng([_SEED, order]).choice([-1, 1], order)
    made = (signs[:, None] * h).astype(np.int8)
    made.setflags(write=False)
    return made


def _paley_construction(order: int) -> tuple[str, int, int] | None:
    """Paley's construction ("first", "second") and its prime, or "one", and how often it is doubled."""
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
    """χ(i − j) modulo q: 1 for squares, −1 for others, 0 for 0."""
    character = -np.ones(q)
    character[np.arange(1, q) ** 2 % q] = 1
    character[0] = 0
    places = np.arange(q)
    return np.asarray(character[(places[:, None] - places) % q])


def _bordered_matrix(q: int, corner: float) -> np.ndarray:
    """0 and ones around Jacobsthal's matrix; ``corner``: −1 where it is to be skew, 1 where symmetric."""
    s = np.zeros((q + 1, q + 1))
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, corner, _jacobsthal_matrix(q)
    return s


def _paley_first(q: int) -> np.ndarray:
    return np.eye(q + 1) + _bordered_matrix(q, -1)


def _paley_second(q: int) -> np.ndarray:
    s = _bordered_matrix(q, 1)
    return np.kron(s, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
