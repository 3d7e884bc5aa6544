"""Hadamard matrices of every construction, against the theorem that names them: |det| = n^(n/2), the largest of all
matrices of ±1 (J. Hadamard, 1893)."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof.lemmas.isometry import isometry_factor
from normdeploy.quantization.hadamard import largest_order, signed_hadamard


@pytest.mark.parametrize("order", [2, 4, 8, 12, 20, 24, 28, 36, 60, 64, 76, 96, 192])
def test_every_construction_reaches_the_bound(order: int) -> None:
    """Sylvester 2, 8, 64; Paley I 4, 12, 20, 24, 60; Paley II 28, 36, 76; doubled 96, 192."""
    h = signed_hadamard(order)
    assert h.shape == (order, order)
    assert set(np.unique(h)) == {-1, 1}
    assert isometry_factor(h) == order
    _, logarithm = np.linalg.slogdet(h.astype(float))
    assert abs(logarithm - order / 2 * np.log(order)) < 1e-9 * order
    assert signed_hadamard(order) is h  # byte for byte the same file, whoever makes it


@pytest.mark.parametrize(
    ("width", "order"),
    # of LLMs: Llama 4096 and 5120, Qwen 896 and 3584, GPT-2 768 and 1600, MiniLM 384; 2·odd; odd
    [(4096, 4096), (5120, 5120), (896, 896), (3584, 3584), (768, 768), (1600, 1600), (384, 384), (50, 2), (168, 168)],
)
def test_widths_of_models_have_one(width: int, order: int) -> None:
    assert largest_order(width) == order


def test_an_odd_width_has_none() -> None:
    assert largest_order(25) == 1
