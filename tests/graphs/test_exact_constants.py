"""A product is rounded in pieces to the same numbers, with the same remainder, as in one piece."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from normdeploy.graphs.exact_constants import Product, round_product

SHAPES = [(300, 40, 3), (3, 20000, 1), (1, 50000), (5000, 1), (70, 70)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_have_the_elements_of_the_product(shape: tuple[int, ...], axis: int, rng: np.random.Generator) -> None:
    array = rng.standard_normal(shape)
    factors = rng.standard_normal([n if i == axis else 1 for i, n in enumerate(shape)])
    array.reshape(-1)[::7] = 0
    product = Product(array, factors)
    made = round_product(product)
    assert made is not None
    exact = array * factors
    assert (product.compute() == exact).all()
    assert (made.rounded == exact.astype(np.float32)).all()
    assert (made.remainder == (exact - exact.astype(np.float32)).astype(np.float32)).all()
    assert (made.low, made.high) == (exact.min(), exact.max())


UNFIT: dict[str, Callable[[np.ndarray], None]] = {
    "NaN": lambda a: a.__setitem__(-1, np.nan),
    "Inf": lambda a: a.__setitem__(0, -np.inf),
    "too large for float32": lambda a: a.__setitem__(len(a) // 2, 1e39),
    "too small for a remainder": lambda a: a.__setitem__(3, 1e-30),
}


@pytest.mark.parametrize("name", UNFIT)
def test_numbers_without_a_remainder_in_float32_are_left_to_float64(name: str, rng: np.random.Generator) -> None:
    array = rng.standard_normal((200, 200))
    UNFIT[name](array.reshape(-1))
    assert round_product(Product(array, np.ones((1, 1)))) is None


def test_few_numbers_are_left_to_float64(rng: np.random.Generator) -> None:
    assert round_product(Product(rng.standard_normal((8, 8)), np.ones((1, 1)))) is None
