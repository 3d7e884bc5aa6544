"""Products of matrices in the field, by digits in float64: equal to Python's integers, and for convolutions in little
memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.graphs.symbolic_sizes import Size
from normdeploy.proof import convolutions, modular_products
from normdeploy.proof.axis_plan import AxisPlan
from normdeploy.proof.interpreter import ProofInterpreter, RandomDraws
from normdeploy.proof.modular_products import contract, modular_matmul
from normdeploy.proof.prime_field import make_field
from normdeploy.proof.value import Value


def elements(shape: tuple[int, ...], p: int, seed: int) -> np.ndarray:
    """Random elements, and among them the largest."""
    rng = random.Random(seed)
    made = np.empty(shape, dtype=object)
    made.reshape(-1)[:] = [p - 1 if rng.random() < 0.3 else rng.randrange(p) for _ in range(made.size)]
    return made


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of elements that were split into digits."""
    seen: list[int] = []
    real = modular_products._split_digits

    def watched(a: np.ndarray, p: int, digits: int) -> np.ndarray:
        seen.append(a.size)
        return real(a, p, digits)

    monkeypatch.setattr(modular_products, "_split_digits", watched)
    return seen


@pytest.mark.parametrize("bits", [160, 161, 400])
@pytest.mark.parametrize("shape", [(40, 90, 60), (30, 2500, 20), (300, 60, 40)])
def test_dot_by_digits(bits: int, shape: tuple[int, int, int], splits: list[int]) -> None:
    check_dot(bits, shape)
    assert splits


@pytest.mark.parametrize(
    ("bits", "shape"), [(700, (40, 90, 60)), (160, (1, 2500, 1)), (160, (2880, 4, 12)), (161, (3, 1, 2))]
)
def test_dot_by_integers(bits: int, shape: tuple[int, int, int], splits: list[int]) -> None:
    """Few terms a sum: digits would take several times as long, because each element is put together again."""
    check_dot(bits, shape)
    assert not splits


def check_dot(bits: int, shape: tuple[int, int, int]) -> None:
    """Compare with Python's integers."""
    p = make_field(0, bits).p
    rows, inner, columns = shape
    a, b = elements((rows, inner), p, 1), elements((inner, columns), p, 2)
    assert (modular_matmul(a, b, p) == np.dot(a, b) % p).all()


def test_dot_of_the_largest_elements(splits: list[int]) -> None:
    """Sums of digits reach their bound where every element is p − 1."""
    p = make_field(0).p
    a, b = np.full((20, 4000), p - 1, dtype=object), np.full((4000, 20), p - 1, dtype=object)
    assert (modular_matmul(a, b, p) == 4000 * (p - 1) ** 2 % p).all()
    assert splits


@pytest.mark.parametrize(
    ("a", "b", "slots"),
    [
        ((4, 2, 1, 6, 5, 3), (1, 1, 7, 6, 1, 3), [3, 5]),
        ((4, 2, 3, 6, 5), (4, 1, 3, 6, 1), [3]),  # draws and groups in both
        ((1, 5, 1), (3, 1, 4), [1]),  # summed over where one does not vary
        ((2, 1), (2, 1), [1]),
    ],
)
def test_contracted_is_the_sum_of_the_products(a: tuple[int, ...], b: tuple[int, ...], slots: list[int]) -> None:
    p = make_field(0).p
    x, y = elements(a, p, 3), elements(b, p, 4)
    wanted = np.add.reduce(x * y, axis=tuple(slots), keepdims=True) % p
    found = contract(x, y, slots, p)
    assert found.shape == wanted.shape
    assert (found == wanted).all()
    f, g = np.random.default_rng(0).standard_normal(a), np.random.default_rng(1).standard_normal(b)
    f.flat[0], g.flat[-1] = np.inf, 0.0
    with np.errstate(all="ignore"):
        expected = np.add.reduce(f * g, axis=tuple(slots), keepdims=True)
    np.testing.assert_allclose(contract(f, g, slots), expected, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (40, 50, 60), (50, 50, 50)])
def test_inner_is_the_total_of_the_product(sizes: tuple[int, int, int]) -> None:
    """Also over axes that are sampled, with weights, and over an axis along which neither varies."""
    plan = AxisPlan(summed={Size.from_int(sizes[1]), Size.from_int(9)}, together={Size.from_int(50): 3})
    m = ProofInterpreter(plan, RandomDraws(random.Random(0)), make_field(0))
    rows, inner, columns = (plan.atoms_of(Size.from_int(n)) for n in sizes)
    still = plan.atoms_of(Size.from_int(9))
    a, b, c = (plan.point_count(atoms[0]) for atoms in (rows, inner, columns))
    p = make_field(0).p
    x = Value(
        (rows, inner, (), still),
        elements((4, a, b, 1), p, 5),
        np.random.default_rng(2).standard_normal((4, a, b, 1)),
        True,
    )
    y = Value(
        ((), inner, columns, still),
        elements((1, b, c, 1), p, 6),
        np.random.default_rng(3).standard_normal((1, b, c, 1)),
    )
    found, wanted = m.inner_product(x, y, [1, 3]), m.sum_over(m.mul(x, y), [1, 3])
    assert found.axes == wanted.axes
    assert (found.a == wanted.a).all()
    np.testing.assert_allclose(found.f, wanted.f, rtol=1e-12)
    for name in ("data", "sign", "degree", "sized", "sums", "fixed", "nonzero", "roots", "size"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_a_convolution_of_as_many_channels_as_it_takes_is_proved_in_little_memory() -> None:
    """ResNet's blocks: the products of all weights and places at once were 5 million integers, 400 MB and 7 s for each
    kind of block."""
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    normdeploy.export(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).eval(), torch.randn(1, 3, 8, 8))
    tracemalloc.start()
    try:
        result = normdeploy.export(net.eval(), inputs=["x:float32[batch,64,16,16]"], dims=["batch=1:2:3"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (finding,) = result.summary.findings
    assert finding.status == "folded"
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    assert peak < 150e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("a", "b", "slots"),
    [
        ((1, 300, 300, 1), (1, 1, 300, 300), [2]),
        ((2, 300, 1, 300), (2, 300, 300, 1), [1]),  # draws in both
        ((1, 300, 1), (300, 1, 300), [1]),  # summed over where one does not vary
    ],
)
def test_many_finite_products_are_summed_by_blas(a: tuple[int, ...], b: tuple[int, ...], slots: list[int]) -> None:
    """The same sums in another order: 300 terms, each of the two off by at most 300·2^-53 of their magnitudes."""
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal(a), rng.standard_normal(b)
    lengths = [max(n, m) for n, m in zip(a, b, strict=True)]
    assert modular_products.uses_blas(x, y, lengths)
    found = contract(x, y, slots)
    letters = list(range(len(a)))
    x, y = (
        np.broadcast_to(v, [n if i in slots else m for i, (n, m) in enumerate(zip(lengths, v.shape, strict=True))])
        for v in (x, y)
    )
    kept = [i for i in letters if i not in slots]
    wanted, most = (np.einsum(f(x), letters, f(y), letters, kept) for f in (np.asarray, np.abs))
    assert np.abs(found.reshape(wanted.shape) - wanted).max() <= (600 * 2.0**-53 * most).max()


def test_a_nan_among_many_products_comes_through() -> None:
    x, y = np.ones((1, 300, 300, 1)), np.zeros((1, 1, 300, 300))
    x[0, 7, 3, 0] = np.nan
    found = contract(x, y, [2])
    assert np.isnan(found[0, 7]).all()
    assert np.isfinite(np.delete(found, 7, axis=1)).all()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"dilations": [2]}, True),
        ({"strides": [2]}, False),
        ({"pads": [1, 0]}, False),
        ({"pads": [0, 1]}, False),
        ({"kernel": 3}, False),
    ],
)
def test_only_one_tap_without_stride_and_padding_copies_its_axis(changed: dict[str, Any], expected: bool) -> None:
    """Then the gather is the identity, and a random matrix in its place would only cost time."""
    attrs = {name: value for name, value in changed.items() if name != "kernel"}
    kernel = Size.from_int(changed.get("kernel", 1))
    m = ProofInterpreter(AxisPlan(), RandomDraws(random.Random(1)), make_field(0))
    source, tap = m.plan.atoms_of(Size.from_int(600)), m.plan.atoms_of(kernel)
    axis = convolutions._ConvolvedAxis(convolutions._tap_attributes(attrs, 0, 1), source, source, tap, kernel)
    assert convolutions._copies_axis(m, axis) == expected
