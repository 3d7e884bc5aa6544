"""How many points an identity needs, by atom: the lemma of few points, and that with one point fewer a false identity
gets through."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.graphs.symbolic_sizes import AxisSize, Size
from normdeploy.proof.axis_plan import AxisPlan, RestartEvaluation
from normdeploy.proof.degree import ALL, ZERO, Degree, add_counts, places_named, scale_counts
from normdeploy.proof.proof_errors import ProofFailure

from .support import proved, refused

C, S = Size.from_int(16), Size.from_int(9)


def test_an_element_names_a_place_of_each_of_its_atoms() -> None:
    assert Degree.of_element([C, S]).counts == {ALL: (1, 0), C: (1, 0), S: (1, 0)}
    assert Degree.of_element([S, S]).counts == {ALL: (2, 0), S: (2, 0)}
    assert Degree.of_element([]).counts == {ALL: (1, 0)}
    assert Degree.of_each([[C], [S], [S]]).counts == {ALL: (3, 0), C: (1, 0), S: (2, 0)}


def test_axes_of_one_size_are_one_atom() -> None:
    assert Degree.of_element([AxisSize(C, ("x", 0)), C]).counts == {ALL: (2, 0), C: (2, 0)}


def test_sums_and_products_of_fractions() -> None:
    x, w = Degree.of_element([C]), Degree.of_element([C, S])
    over = x.times(w.inverse())
    assert over.counts == {ALL: (1, 1), C: (1, 1), S: (0, 1)}
    assert over.plus(x).counts == {ALL: (2, 1), C: (2, 1), S: (1, 1)}  # x/w + x = (x + x·w)/w
    assert x.plus(ZERO).counts == x.counts
    assert over.cross_multiply(x) == {ALL: 2, C: 2, S: 1}
    assert over.root().counts == {ALL: (1, 1), C: (1, 1), S: (1, 1)}
    assert x.union(w).counts == {ALL: (1, 0), C: (1, 0), S: (1, 0)}
    assert Degree({ALL: (0, 2), S: (0, 2)}).of_unknown_function().counts == {ALL: (1, 0), S: (1, 0)}
    assert scale_counts(over.total_counts(), 2) == {ALL: 4, C: 4, S: 2}
    assert add_counts(over.larger_counts(), {S: 3}) == {ALL: 1, C: 1, S: 4}


def test_a_plan_takes_as_many_points_as_each_atom_needs() -> None:
    plan = AxisPlan()
    plan.summed |= {C, S}
    with pytest.raises(RestartEvaluation):
        plan.require_degree({ALL: 9, C: 8, S: 2})
    assert (plan.point_count(C), plan.point_count(S)) == (10, 4)
    plan.require_degree({ALL: 9, C: 8, S: 2})


def test_where_axes_are_joined_each_factor_counts_for_all_atoms() -> None:
    """A place of a part is one of the whole as well. An axis that is cut is two axes everywhere, so each counts for
    itself."""
    plan = AxisPlan()
    plan.summed |= {C, Size.from_int(40)}
    plan.cuts[Size.from_int(360)] = (Size.from_int(40), S)
    plan.require_degree({ALL: 9, C: 2, Size.from_int(40): 2})
    plan.joins[Size.from_int(80)] = (Size.from_int(40), Size.from_int(40))
    with pytest.raises(RestartEvaluation):
        plan.require_degree({ALL: 9, C: 1})
    assert (plan.point_count(C), plan.point_count(Size.from_int(40))) == (11, 11)


def test_a_denominator_that_is_summed_names_places() -> None:
    """Σ 1/v has one place of v in each term, and no crosswise product takes it away."""
    assert Degree.of_element([S]).inverse().sum_over([S]).counts == {ALL: (1, 1), S: (1, 1), ("sum", S): (1, 0)}


def test_one_factor_names_all_places_it_varies_along() -> None:
    """1/(a_i + a_j), √(a_i + a_j) and σ(a_i + a_j) are one factor each, with two places of S."""
    both = Degree.of_element([S]).plus(Degree.of_element([S]))
    assert both.counts[S] == (1, 0)
    assert both.with_places_in([S, S]).inverse().counts[S] == (0, 2)
    assert both.root().with_places_in([S, S]).counts[S] == (2, 0)
    assert both.with_places_in([S, S]).of_unknown_function().counts[S] == (2, 0)


def test_a_tensor_of_an_axis_and_one_that_it_is_joined_of() -> None:
    """An element of J×A, A a part of J, may name two places of A."""
    plan = AxisPlan()
    plan.summed |= {C, S}
    plan.joins[Size.from_int(1000)] = (C, Size.from_int(640))
    with pytest.raises(RestartEvaluation):
        plan.separate_axes(((Size.from_int(1000),), (C,)))
    assert plan.together[C] == 2
    with pytest.raises(RestartEvaluation):
        plan.require_degree({ALL: 3})
    assert plan.points[C] == 2 * 3 + 2


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_the_lemma_is_sharp(degree: int) -> None:
    """A sum over d-tuples of places of what vanishes where two of them agree is zero on d − 1 points, with any values
    and weights, and not on d: an identity of degree d is not shown by fewer than d points."""
    rng = np.random.default_rng(degree)

    def value(points: int) -> float:
        """Σ w_{i₁}⋯w_{i_d} Π_{j<k} (v_{i_j} − v_{i_k})²: each tuple names d places."""
        v, w = rng.standard_normal(points), rng.standard_normal(points)
        total = 0.0
        for tuple_ in np.ndindex(*(points,) * degree):
            picked = v[list(tuple_)]
            gaps = [(picked[j] - picked[k]) ** 2 for j in range(degree) for k in range(j)]
            total += float(np.prod(w[list(tuple_)]) * np.prod(gaps))
        return total

    assert value(degree - 1) == 0.0
    assert abs(value(degree)) > 1e-9


def test_places_of_the_result_are_parameters_where_sums_are_counted() -> None:
    """y_o = Σ_i W_oi x_i·a_o with as many inputs as outputs: five factors name a place, one sum goes over places."""
    w, x, a = Degree.of_element([C, C]), Degree.of_element([C]), Degree.of_element([C])
    y = w.times(x).times(Degree.of_sums([C])).times(a)
    degrees = y.cross_multiply(ZERO)
    assert (places_named(degrees, C, by_sums=False), places_named(degrees, C, by_sums=True)) == (4, 1)
    assert places_named(degrees, S, by_sums=True) == 0
    assert (
        places_named(y.of_unknown_function().cross_multiply(ZERO), C, by_sums=False) == 4
    )  # an unknown function of it is no polynomial in its sums


def test_a_sum_that_no_factor_speaks_of_is_none() -> None:
    """Σ_i Σ_j x_j: two sums, one factor."""
    total = Degree.of_element([C]).times(Degree.of_sums([C, C])).cross_multiply(ZERO)
    assert places_named(total, C, by_sums=True) == 1


GROUPS = """r = Reshape(x, grouped) n = InstanceNormalization <epsilon = 1e-5> (r, ones, zeros) b = Reshape(n, whole)
before = Mul(b, scale)
    m = GroupNormalization <epsilon = 1e-5, num_groups = 32> (x, unit, none) after = Mul(m, scale)"""


@pytest.mark.parametrize("shape", [(64, 64, 64), (64, 32, 32), (128, 64, 64)])
def test_axes_that_are_equally_long_by_chance_are_told_apart(shape: tuple[int, ...]) -> None:
    """A GroupNorm as torch writes it, its Reshape back to numbers: with one atom for channels, rows and columns it
    takes 200,000 points."""
    channels = shape[0]
    constants = {
        "grouped": np.array([0, 32, -1]),
        "whole": np.array([-1, *shape]),
        "ones": np.ones(32),
        "zeros": np.zeros(32),
    }
    affine = {
        "unit": np.ones(channels),
        "none": np.zeros(channels),
        "scale": np.linspace(0.5, 1.5, channels).reshape(-1, 1, 1),
    }
    found = proved(GROUPS, shape="B, " + ", ".join(map(str, shape)), **constants, **affine)
    assert found.points < 20000


def test_told_apart_they_are_still_these_lengths() -> None:
    """A Reshape that takes rows for columns is another function, whatever the names."""
    body = "t = Transpose<perm=[0, 2, 1]>(x) before = Identity(t) after = Reshape(x, same)"
    refused(body, ProofFailure.DIFFERS, shape="B, 64, 64", same=np.array([0, 64, 64]))
    body = "s = Shape(x) n = Gather(s, second) f = Cast<to=1>(n) before = Mul(x, f) after = Mul(x, c)"
    proved(body, shape="B, 64, 64", second=np.array(2), c=np.float32(64))
    refused(body, ProofFailure.DIFFERS, shape="B, 64, 64", second=np.array(2), c=np.float32(63))
    mean = "u = ReduceMean(x, last) s = ReduceSum(x, last) before = Mul(u, c) after = Identity(s)"
    proved(mean, shape="B, 64, 64", c=np.float32(64))  # true of this length alone
    refused(mean, ProofFailure.DIFFERS, shape="B, 64, 64", c=np.float32(63))
