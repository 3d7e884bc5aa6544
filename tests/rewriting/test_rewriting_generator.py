"""The generator itself: every spelling is the norm that it says, and no lookalike is any norm. Nothing of normdeploy
runs here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from tests.norm_generator import Example, Route, generate
from tests.norm_generator_heldout import HELD_OUT
from tests.norm_lookalikes import DYNAMIC, LOOKALIKES, generate_lookalike
from tests.norm_spellings import KNOWN
from tests.norm_writers import Choices, random_draw

ALL = KNOWN.merged(HELD_OUT)
EXACT = 1e-10  # float64 spellings of one function: cancellation in E[x²] − E[x]² costs (mean/σ)² · 2e-16, far below
slow = settings(
    max_examples=80,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def drawn(data: st.DataObject) -> Choices:
    return Choices(lambda point, options: data.draw(st.sampled_from(options), label=point))


def run_exactly(example: Example, x: np.ndarray) -> list[np.ndarray]:
    """The generated text in float64: torch's on the one route, onnx's own evaluator on the other."""
    if example.exact_proto is not None:
        onnx.checker.check_model(example.proto, full_check=True)
        return ReferenceEvaluator(example.exact_proto).run(None, {"x": x})
    with torch.no_grad():
        out = example.module(exact=True)(torch.from_numpy(x))
    return [t.numpy() for t in (out if isinstance(out, tuple) else (out,))]


def assert_equal(got: list[np.ndarray], want: tuple[np.ndarray, ...] | list[np.ndarray], example: Example) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.shape == np.broadcast_shapes(g.shape, w.shape), repr(example)  # an inner mean may come out expanded
        assert np.abs(g - w).max() <= EXACT * max(1.0, np.abs(w).max()), repr(example)


@pytest.mark.parametrize("route", ["torch", "onnx"])
@given(data=st.data())
@slow
def test_spellings_are_their_norm(route: Route, data: st.DataObject) -> None:
    example = generate(drawn(data), ALL, route)
    for sizes in ({}, {"B": 1, "S": 7, "L": 3}):
        x = example.inputs(1, **sizes).astype(np.float64)
        assert example.definition is not None
        assert_equal(run_exactly(example, x), example.definition(x), example)


@pytest.mark.parametrize("route", ["torch", "onnx"])
def test_each_spelling_is_drawn(route: Route) -> None:
    """A spelling whose condition never holds would test nothing."""
    drawn = {
        (key.split("#")[0], name)
        for seed in range(600)
        for key, name in generate(Choices.seeded(seed), ALL, route).vector.items()
    }
    other_route = {
        "onnx.add",
        "onnx.clamp_min",
        "square: torch.square",
        "centre: torch.add(alpha=-1)",
        "apply: addcmul",
        "mean_square: ReduceSumSquare",
    }
    never = {(p, n) for p, spellings in ALL.items() for n in spellings} - drawn
    assert {(p, n) for p, n in never if p not in other_route and f"{p}: {n}" not in other_route} == set()


def test_a_third_is_held_back() -> None:
    known, held = (sum(map(len, book.values())) for book in (KNOWN, HELD_OUT))
    assert 0.3 <= held / (known + held) <= 0.5


def test_replaying_a_vector_gives_the_same_text() -> None:
    for seed in range(20):
        example = generate(Choices.seeded(seed), ALL, "torch")
        again = generate(Choices.replayed(example.vector), ALL, "torch")
        assert again.source == example.source
        assert again.vector == example.vector


# --- lookalikes ---
def samples(example: Example, eps: float) -> np.ndarray:
    """48 samples on the scales where epsilon, a floor at epsilon, and neither can be seen, half of them off centre."""
    shape = (48, *example.inputs(0, B=1, S=5).shape[1:])
    rng = np.random.default_rng(7)
    scales = np.array([0.1 * eps, eps, 3 * eps, 0.3 * eps**0.5, eps**0.5, 3 * eps**0.5, 1.0, 30.0])
    column = (-1,) + (1,) * (len(shape) - 1)
    scale = np.resize(scales, shape[0]).reshape(column)
    return scale * (rng.standard_normal(shape) + rng.choice([0.0, 0.0, 1.0, -2.0], shape[0]).reshape(column))


def in_batches(example: Example, x: np.ndarray) -> np.ndarray:
    batch = example.inputs(0).shape[0]
    return np.concatenate([run_exactly(example, part)[0] for part in np.split(x, len(x) // batch)])


def views(x: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Every set of axes after the batch, and every grouping of axis 1 with the axes behind it."""
    for count in range(1, x.ndim):
        for axes in itertools.combinations(range(1, x.ndim), count):
            yield x, axes
    for groups in range(2, x.shape[1]):
        if x.shape[1] % groups == 0:
            grouped = x.reshape(len(x), groups, x.shape[1] // groups, *x.shape[2:])
            yield grouped, tuple(range(2, grouped.ndim))


def distance_to_norms(x: np.ndarray, y: np.ndarray, eps: float) -> float:
    """How much of y no norm of x explains: the least over axes, groups, centre or none, and epsilon, with the best
    gamma and beta for each position by least squares: more freedom than any norm node has."""
    rows, best = y.reshape(len(y), -1), np.inf
    total = np.sqrt(((rows - rows.mean(0)) ** 2).mean())
    for (view, axes), centre in itertools.product(views(x), (True, False)):
        d = view - view.mean(axes, keepdims=True) if centre else view
        var = (d**2).mean(axes, keepdims=True)
        for e in [0.0, *np.geomspace(eps * 1e-4, eps * 1e4, 33)]:
            hat = (d / np.sqrt(var + e)).reshape(len(y), -1)
            hat = hat - hat.mean(0)
            gamma = (hat * rows).sum(0) / np.maximum((hat**2).sum(0), 1e-30)
            rest = rows - rows.mean(0) - gamma * hat
            best = min(best, float(np.sqrt((rest**2).mean()) / total))
    return best


@pytest.mark.parametrize("name", [n for n, look in LOOKALIKES.items() if not look.dynamic and not look.type_only])
def test_lookalikes_are_no_norm(name: str) -> None:
    for seed in range(3):
        example = generate_lookalike(Choices.seeded(seed), ALL, "torch", name)
        eps = example.vector["eps"]
        x = samples(example, eps)
        # 1e-3 stands 1e4 above the certificates' bound of 1e-7; the grid of epsilons (a factor of 1.8 apart) does not
        # reach it for a norm
        assert distance_to_norms(x, in_batches(example, x), eps) > 1e-3, repr(example)


def test_the_distance_is_zero_for_a_norm() -> None:
    """The measure above must be able to say no: real norms, at an epsilon of its grid."""
    for seed in range(40):
        example = generate(
            Choices.replayed({"extra": "none", "eps": 1e-3, "dtype": "float32"}, random_draw(seed)),
            ALL,
            "torch",
            ["LayerNorm", "GroupNorm", "RMSNorm"],
        )
        if 0 in example.case.axes:
            continue
        x = samples(example, 1e-3)
        assert distance_to_norms(x, in_batches(example, x), 1e-3) < 1e-9, repr(example)


@pytest.mark.parametrize("name", [n for n, look in LOOKALIKES.items() if look.dynamic])
@pytest.mark.parametrize("case", list(DYNAMIC))
def test_dynamic_lookalikes_change_with_the_size(name: str, case: str) -> None:
    """At one size they are a norm; its gamma or epsilon is another at another size."""
    choices = Choices.replayed({"affine": "none", "eps": 1e-2, "case": case})
    example = generate_lookalike(choices, KNOWN, "torch", name)
    (axis,) = example.case.axes
    ratios = []
    for size in (3, 9):
        x = example.inputs(3, B=4, S=size).astype(np.float64)[:-1]
        d = x - x.mean(axis, keepdims=True)
        hat = d / np.sqrt((d**2).mean(axis, keepdims=True) + 1e-2)
        y = run_exactly(example, np.concatenate([x, x[:1]]))[0][:-1]
        ratios.append((y * hat).sum() / (hat**2).sum())
    assert abs(ratios[0] / ratios[1] - 1) > 0.05, repr(example)


@pytest.mark.parametrize("name", [n for n, look in LOOKALIKES.items() if look.type_only])
def test_narrowed_lookalikes_differ_in_their_own_type(name: str) -> None:
    for seed in range(5):
        example = generate_lookalike(Choices.seeded(seed), ALL, "torch", name)
        x = example.inputs(seed)
        with torch.no_grad():
            got = example.module()(torch.from_numpy(x)).numpy()
        exact = run_exactly(example, x.astype(np.float64))[0]
        # float16 rounds by 5e-4, float32 by 6e-8: what is seen must be the former
        assert np.abs(got - exact).max() > 2e-5 * np.abs(exact).max(), repr(example)


@given(data=st.data())
@slow
def test_both_routes_mean_the_same_lookalike(data: st.DataObject) -> None:
    graph = generate_lookalike(drawn(data), KNOWN, "onnx")
    text = generate_lookalike(Choices.replayed(graph.vector), KNOWN, "torch")
    x = graph.inputs(2).astype(np.float64)
    assert_equal(run_exactly(graph, x), run_exactly(text, x), graph)
