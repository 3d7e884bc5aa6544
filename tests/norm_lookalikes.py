"""Norms with one thing wrong: what they compute is no norm, or only a part of them is.

Each lookalike is drawn with the same spellings as the real norms. ``allowed`` names the norm ops that may still stand
in a correct result, because an exact part of it is a norm (the RMS norm of something centred elsewhere, say).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.norm_generator import Case, Example, Route, affine_values, finish, new_writer, parameters
from tests.norm_spellings import KNOWN, Stats, affine, centred
from tests.norm_writers import Book, Choices, T, Writer

RMS = frozenset({"RMSNormalization"})
Perturbed = Callable[[Writer, T, tuple[int, ...], float], T]


@dataclass(frozen=True)
class Lookalike:
    write: Perturbed
    why: str
    allowed: frozenset[str] = frozenset()
    type_only: bool = False  # equal to a norm in float64: only the narrow type makes the difference
    dynamic: bool = False  # a lookalike only where the normalized dim is dynamic


LOOKALIKES: dict[str, Lookalike] = {}


def lookalike(name: str, why: str, **more: Any) -> Callable[[Perturbed], Perturbed]:
    def register(write: Perturbed) -> Perturbed:
        LOOKALIKES[name] = Lookalike(write, why, **more)
        return write

    return register


def stats(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    return w.spell("stats", x, axes)


def root(w: Writer, var: T, eps: float) -> T:
    return w.spell("root", w.spell("epsilon", var, eps))


def inverse(w: Writer, var: T, eps: float) -> T:
    return w.spell("inverse", w.spell("epsilon", var, eps))


def other_axes(x: T, axes: tuple[int, ...]) -> tuple[int, ...]:
    """One axis more to the left, or one fewer where there is none."""
    return (axes[0] - 1, *axes) if axes[0] > 1 else axes[1:]


def halved(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    axis = axes[-1]
    return w.take(x, axis, 0, int(x.shape[axis]) // 2)


# --- epsilon ---
@lookalike("std + eps", "epsilon outside the root: 1/(sqrt(v) + e) is no 1/sqrt(v + e)")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.div(s.centred, w.add(w.spell("root", s.var), eps))


@lookalike("inv + eps", "epsilon added to the inverse root")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.mul(s.centred, w.add(inverse(w, s.var, eps), eps))


@lookalike("max(var, eps)", "a floor under the variance is no epsilon added to it")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.mul(s.centred, w.spell("inverse", w.clamp_min(s.var, eps)))


@lookalike("max(std, eps)", "F.normalize of the centred input: a floor under the root")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.div(s.centred, w.clamp_min(w.spell("root", s.var), eps))


@lookalike("F.normalize", "x / max(|x|, eps): a floor under the length")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.div(x, w.clamp_min(w.spell("root", w.reduce("sum", w.spell("square", x), axes)), eps))


@lookalike("epsilon in one of two uses", "the shift is divided by another root than x is")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    assert s.mean is not None
    return w.sub(w.mul(x, inverse(w, s.var, eps)), w.mul(s.mean, inverse(w, s.var, eps * 3)))


@lookalike("eps from the data", "a share of |x| is added to epsilon: no constant")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    extra = w.mul(w.spell("mean", w.unary("abs", x), axes), eps)
    return w.mul(s.centred, inverse(w, w.add(s.var, extra), eps / 64))


@lookalike("eps by position", "epsilon varies along the normalized dims")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    shape = tuple(int(size) if a in axes else 1 for a, size in enumerate(x.shape))
    values = eps * (1.0 + 7.0 * np.arange(np.prod(shape)).reshape(shape) / np.prod(shape))
    return w.mul(s.centred, w.spell("inverse", w.add(s.var, w.param("eps", values))))


@lookalike("epsilon then square", "epsilon added to the root and to the variance")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.div(s.centred, w.add(root(w, s.var, eps), eps))


# --- the root and the square ---
@lookalike("no root", "divided by the variance itself")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.div(s.centred, w.spell("epsilon", s.var, eps))


@lookalike("root of the root", "divided by the fourth root of the variance")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.div(s.centred, w.spell("root", root(w, s.var, eps)))


@lookalike("power -0.25", "the variance to the power of -1/4")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.mul(s.centred, w.power(w.spell("epsilon", s.var, eps), -0.25))


@lookalike("mean of |d|", "the mean absolute deviation in the place of the standard deviation")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.div(d, w.add(w.spell("mean", w.unary("abs", d), axes), eps))


@lookalike("root of mean |d|", "the root of the mean absolute deviation: abs for square")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.spell("mean", w.unary("abs", d), axes), eps))


@lookalike("cube", "the mean of |d| cubed in the place of the mean square")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.spell("mean", w.power(w.unary("abs", d), 3.0), axes), eps))


@lookalike("fourth power", "the mean of d to the fourth")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.spell("mean_square", w.spell("square", d), axes), eps))


@lookalike("max norm", "divided by the largest |d|")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.div(d, w.add(w.reduce("max", w.unary("abs", d), axes), eps))


@lookalike("max of squares", "the largest square in the place of the mean square")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.reduce("max", w.spell("square", d), axes), eps))


@lookalike("E[x^2] + E[x]^2", "the sign of the squared mean is wrong")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    mean, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.add(w.spell("mean_square", x, axes), w.spell("square", mean)), eps))


# --- the centre ---
@lookalike("x + mean", "the mean is added")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    assert s.mean is not None
    return w.mul(w.add(x, s.mean), inverse(w, s.var, eps))


@lookalike("x not centred", "only the statistics are centred")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(x, inverse(w, stats(w, x, axes).var, eps))


@lookalike("statistics not centred", "divided by the root mean square of x, not of x - mean")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, w.spell("mean_square", x, axes), eps))


@lookalike("variance around a constant", "the variance is taken around a constant, the numerator around the mean")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, w.spell("mean_square", w.sub(x, 0.5), axes), eps))


@lookalike("stale mean", "the numerator is centred by a constant kept from another time")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(w.sub(x, 0.25), inverse(w, stats(w, x, axes).var, eps))


@lookalike("mean over other axes", "the mean is over other axes than the mean square", allowed=RMS)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, other_axes(x, axes))
    return w.mul(d, inverse(w, w.spell("mean_square", d, axes), eps))


@lookalike("variance over other axes", "the variance is over other axes than the mean")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, stats(w, x, other_axes(x, axes)).var, eps))


@lookalike("largest for the mean", "centred by the maximum", allowed=RMS)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    d = w.sub(x, w.reduce("max", x, axes))
    return w.mul(d, inverse(w, w.spell("mean_square", d, axes), eps))


@lookalike("half of the mean", "centred by half of the mean: the root mean square of that is no variance", allowed=RMS)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    d = w.sub(x, w.mul(w.spell("mean", x, axes), 0.5))
    return w.mul(d, inverse(w, w.spell("mean_square", d, axes), eps))


@lookalike("rounded mean", "the mean is rounded to a whole number")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    assert s.mean is not None
    return w.mul(w.sub(x, w.unary("round", s.mean)), inverse(w, s.var, eps))


# --- the sample ---
@lookalike("half of the features", "the statistics are over the first half of the normalized dims")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    var, mean = w.moments(halved(w, x, axes), axes, 0, "var_mean")
    return w.mul(w.sub(x, mean), inverse(w, var, eps))


@lookalike("variance of half of the features", "the mean is over all, the variance over half")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, w.moments(halved(w, x, axes), axes, 0, "var")[0], eps))


@lookalike("RMS over half of the features", "partial RMS norm: the mean square is over half")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(x, inverse(w, w.reduce("mean", w.spell("square", halved(w, x, axes)), axes), eps))


@lookalike("statistics of tanh(x)", "the statistics are of another tensor")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, w.unary("tanh", x), axes)
    assert s.mean is not None
    return w.mul(w.sub(x, s.mean), inverse(w, s.var, eps))


@lookalike("variance of relu(x)", "the variance is of another tensor")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, stats(w, w.unary("relu", x), axes).var, eps))


@lookalike("numerator of tanh(x)", "what is divided is not what was measured")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, w.unary("tanh", x), axes)[1], inverse(w, stats(w, x, axes).var, eps))


@lookalike("weighted mean square", "the squares are weighted by position: no plain mean")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    shape = tuple(int(size) if a == axes[-1] else 1 for a, size in enumerate(x.shape))
    weights = w.param("weights", np.linspace(0.5, 1.5, int(x.shape[axes[-1]])).reshape(shape))
    return w.mul(d, inverse(w, w.spell("mean", w.mul(w.spell("square", d), weights), axes), eps))


@lookalike("two epsilons by sign", "positive and negative values are divided by different roots")
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    positive = w.unary("relu", s.centred)
    return w.add(w.mul(positive, inverse(w, s.var, eps)), w.mul(w.sub(s.centred, positive), inverse(w, s.var, 5 * eps)))


@lookalike(
    "unbiased over a dynamic dim", "the factor n/(n-1) on the variance is data, and so would be epsilon", dynamic=True
)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    return w.mul(centred(w, x, axes)[1], inverse(w, w.moments(x, axes, 1, "var")[0], eps))


@lookalike("sum over a dynamic dim", "divided by the root of the sum of squares: sqrt(n) is data", dynamic=True)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    _, d = centred(w, x, axes)
    return w.mul(d, inverse(w, w.reduce("sum", w.spell("square", d), axes), eps))


@lookalike("statistics in float16", "the statistics are rounded to float16 inside a float32 model", type_only=True)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, w.cast(x, "float16"), axes)
    assert s.mean is not None
    return w.mul(w.sub(x, w.cast(s.mean, "float32")), inverse(w, w.cast(s.var, "float32"), eps))


@lookalike("variance through float16", "the variance passes through float16 inside a float32 model", type_only=True)
def _(w: Writer, x: T, axes: tuple[int, ...], eps: float) -> T:
    s = stats(w, x, axes)
    return w.mul(s.centred, inverse(w, w.cast(w.cast(s.var, "float16"), "float32"), eps))


CASES = {
    "last": Case("lookalike", ("B", "S", 16), (2,), (1, 1, 16)),
    "last, static": Case("lookalike", (4, 5, 12), (2,), (1, 1, 12)),
    "last two": Case("lookalike", ("B", 4, 6), (1, 2), (1, 4, 6)),
    "plane": Case("lookalike", ("B", 3, 4, 6), (2, 3), (1, 3, 1, 1)),
    "channel": Case("lookalike", ("B", 8, 2, 3), (1,), (1, 8, 1, 1)),
}
DYNAMIC = {
    "sequence": Case("lookalike", ("B", "S", 6), (1,), (1, 1, 6)),
    "length": Case("lookalike", ("B", 6, "S"), (2,), (1, 6, 1)),
}


def generate_lookalike(choices: Choices, book: Book = KNOWN, route: Route = "onnx", name: str = "") -> Example:
    """Draw a lookalike in a random spelling; its own text, run in float64, is what it means."""
    chosen = LOOKALIKES[choices("lookalike", [name] if name else list(LOOKALIKES))]
    cases = (
        DYNAMIC
        if chosen.dynamic
        else {n: c for n, c in CASES.items() if len(c.axes) > 1 or c.axes[0] > 1 or "other" not in chosen.why}
    )
    case = cases[choices("case", list(cases))]
    eps = choices("eps", [1e-3, 1e-2, 1e-1])  # large enough for its place to be seen in every type

    def write(choices: Choices, exact: bool) -> tuple[Writer, tuple[str, Any]]:
        w = new_writer(route, choices, book, "float32", exact)
        x = w.input("x", case.shape)
        gamma, beta = affine_values(choices, case.affine)
        y = affine(w, chosen.write(w, x, case.axes, eps), *parameters(w, gamma, beta, "float32"))
        return w, finish(route, w, x, [y])

    w, (source, proto) = write(choices, False)
    exact = write(Choices.replayed(choices.vector), True)[1][1] if route == "onnx" else None
    nodes = (0, 1 if chosen.allowed else 0)
    made = Example(
        route,
        case,
        "float32",
        case.shape,
        source,
        w.params,
        proto,
        exact,
        None,
        nodes,
        choices.vector,
        frozenset(),
        chosen.why,
    )
    return replace(made, only_ops=chosen.allowed)
