"""The known ways to write each part of a norm, by point of choice. ``norm_generator_heldout.py`` holds more of them.

Every function takes the writer first. ``Stats`` travel between the parts: the mean (None for RMS), the numerator and
the variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.norm_writers import Book, Size, T, TorchWriter, Writer

KNOWN = Book()
say = KNOWN.spelling


@dataclass(frozen=True)
class Stats:
    mean: T | None
    centred: T
    var: T


@dataclass(frozen=True)
class Layout:
    """How the tensor lies while it is normalized: the view, the axes there, the way back, and how a parameter's array
    lies in the view (None where it can't)."""

    view: T
    axes: tuple[int, ...]
    back: Callable[[T], T]
    param: Callable[[np.ndarray], np.ndarray | None]


def torch_only(w: Writer, *_: Any) -> bool:
    return isinstance(w, TorchWriter)


def static(w: Writer, x: T, axes: Sequence[int]) -> int:
    n = w.size(x, axes)
    assert n is not None, "this spelling is only for static sizes"
    return n


def power_of_two(w: Writer, x: T, axes: Sequence[int]) -> bool:
    """1/n is then exact in any type; otherwise sum · (1/n) is not the mean."""
    n = w.size(x, axes)
    return n is not None and n & (n - 1) == 0


# --- mean and mean square ---
@say("mean.of", "mean")
def _(w: Writer, x: T, axes: tuple[int, ...], keepdims: bool) -> T:
    return w.reduce("mean", x, axes, keepdims)


@say("mean.of", "sum / n")
def _(w: Writer, x: T, axes: tuple[int, ...], keepdims: bool) -> T:
    return w.div(w.reduce("sum", x, axes, keepdims), w.n(x, axes))


@say("mean.of", "sum * (1/n)", lambda w, x, axes, _: power_of_two(w, x, axes))
def _(w: Writer, x: T, axes: tuple[int, ...], keepdims: bool) -> T:
    return w.mul(w.reduce("sum", x, axes, keepdims), 1.0 / static(w, x, axes))


@say("mean", "keepdims")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.spell("mean.of", x, axes, True)


@say("mean", "unsqueeze")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.unsqueeze(w.spell("mean.of", x, axes, False), axes)


@say("mean", "reshape")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.reshape(w.spell("mean.of", x, axes, False), w.reduced(x, axes, True))


@say("square", "x * x")
def _(w: Writer, x: T) -> T:
    return w.mul(x, x)


@say("square", "pow 2")
def _(w: Writer, x: T) -> T:
    return w.power(x, 2.0)


@say("mean_square", "mean of squares")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.spell("mean", w.spell("square", x), axes)


@say("mean_square", "sum of squares / n")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.div(w.reduce("sum", w.spell("square", x), axes), w.n(x, axes))


# --- centre and variance ---
@say("centre", "x - mean")
def _(w: Writer, x: T, mean: T) -> T:
    return w.sub(x, mean)


@say("centre", "x + (-mean)")
def _(w: Writer, x: T, mean: T) -> T:
    return w.add(x, w.unary("neg", mean))


def centred(w: Writer, x: T, axes: tuple[int, ...]) -> tuple[T, T]:
    mean = w.spell("mean", x, axes)
    return mean, w.spell("centre", x, mean)


def more_than_one(w: Writer, x: T, axes: tuple[int, ...]) -> bool:
    n = w.size(x, axes)
    return n is not None and n > 1


@say("stats", "two passes")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.spell("mean_square", d, axes))


@say("stats", "duplicated centre")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    variance = w.spell("mean_square", centred(w, x, axes)[1], axes)
    return Stats(*centred(w, x, axes), variance)


@say("stats", "E[x^2] - E[x]^2")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.sub(w.spell("mean_square", x, axes), w.spell("square", mean)))


@say("stats", "max(E[x^2] - E[x]^2, 0)")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.clamp_min(w.sub(w.spell("mean_square", x, axes), w.spell("square", mean)), 0.0))


@say("stats", "var biased")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    return Stats(*centred(w, x, axes), w.moments(x, axes, 0, "var")[0])


@say("stats", "var_mean")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    var, mean = w.moments(x, axes, 0, "var_mean")
    return Stats(mean, w.spell("centre", x, mean), var)


@say("stats", "var unbiased * (n-1)/n", more_than_one)
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    n = static(w, x, axes)
    return Stats(*centred(w, x, axes), w.mul(w.moments(x, axes, 1, "var")[0], (n - 1) / n))


@say("rms.stats", "mean square")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    return Stats(None, x, w.spell("mean_square", x, axes))


# --- epsilon and root ---
@say("epsilon", "var + eps")
def _(w: Writer, var: T, eps: float) -> T:
    return w.add(var, eps)


@say("epsilon", "eps + var")
def _(w: Writer, var: T, eps: float) -> T:
    return w.add(eps, var)


@say("epsilon", "buffer")
def _(w: Writer, var: T, eps: float) -> T:
    return w.add(var, to(w, w.param("eps", np.array(eps)), var.dtype))


@say("inverse", "rsqrt")
def _(w: Writer, v: T) -> T:
    return w.unary("rsqrt", v)


@say("inverse", "1 / sqrt")
def _(w: Writer, v: T) -> T:
    return w.div(1.0, w.unary("sqrt", v))


@say("inverse", "pow -0.5")
def _(w: Writer, v: T) -> T:
    return w.power(v, -0.5)


@say("inverse", "sqrt, reciprocal")
def _(w: Writer, v: T) -> T:
    return w.unary("reciprocal", w.unary("sqrt", v))


@say("root", "sqrt")
def _(w: Writer, v: T) -> T:
    return w.unary("sqrt", v)


# --- putting it together: (view, stats, var + eps, gamma, beta) -> y ---
def affine(w: Writer, y: T, gamma: T | None, beta: T | None) -> T:
    y = y if gamma is None else w.spell("scale", y, gamma)
    return y if beta is None else w.spell("shift", y, beta)


@say("scale", "y * gamma")
def _(w: Writer, y: T, gamma: T) -> T:
    return w.mul(y, gamma)


@say("scale", "gamma * y")
def _(w: Writer, y: T, gamma: T) -> T:
    return w.mul(gamma, y)


@say("shift", "y + beta")
def _(w: Writer, y: T, beta: T) -> T:
    return w.add(y, beta)


@say("apply", "d * inv")
def _(w: Writer, x: T, s: Stats, v: T, gamma: T | None, beta: T | None) -> T:
    return affine(w, w.mul(s.centred, w.spell("inverse", v)), gamma, beta)


@say("apply", "d / root")
def _(w: Writer, x: T, s: Stats, v: T, gamma: T | None, beta: T | None) -> T:
    return affine(w, w.div(s.centred, w.spell("root", v)), gamma, beta)


@say("apply", "(inv * gamma) * d", lambda w, x, s, v, gamma, beta: gamma is not None)
def _(w: Writer, x: T, s: Stats, v: T, gamma: T, beta: T | None) -> T:
    return affine(w, w.mul(w.mul(w.spell("inverse", v), gamma), s.centred), None, beta)


@say("apply", "x * a + (beta - mean * a)", lambda w, x, s, v, gamma, beta: s.mean is not None and beta is not None)
def _(w: Writer, x: T, s: Stats, v: T, gamma: T | None, beta: T) -> T:
    a = w.spell("inverse", v)
    a = a if gamma is None else w.mul(a, gamma)
    assert s.mean is not None
    return w.add(w.mul(x, a), w.sub(beta, w.mul(s.mean, a)))


# --- parameters: an array whose shape broadcasts against the tensor, all dims written ---
def to(w: Writer, x: T, dtype: str) -> T:
    return x if x.dtype == dtype else w.cast(x, dtype)


def core(values: np.ndarray) -> np.ndarray:
    """Without the leading dims of size 1, which broadcasting gives back."""
    return values.reshape(values.shape[next((a for a, s in enumerate(values.shape) if s != 1), values.ndim - 1) :])


@say("param", "all dims")
def _(w: Writer, name: str, values: np.ndarray) -> T:
    return w.param(name, values)


@say("param", "without leading ones")
def _(w: Writer, name: str, values: np.ndarray) -> T:
    return w.param(name, core(values))


@say("param", "vector, viewed", lambda w, name, values: max(values.shape) == values.size)
def _(w: Writer, name: str, values: np.ndarray) -> T:
    return w.reshape(w.param(name, values.reshape(-1)), values.shape)


@say("gamma", "gamma")
def _(w: Writer, values: np.ndarray) -> T:
    return w.spell("param", "gamma", values)


@say("gamma", "1 + w")
def _(w: Writer, values: np.ndarray) -> T:
    return w.add(w.spell("param", "w", values - 1.0), 1.0)


# --- precision of the statistics ---
@say("precision", "as it is")
def _(w: Writer, x: T) -> T:
    return x


@say("precision", "float32 inside", lambda w, x: x.dtype == "float16")
def _(w: Writer, x: T) -> T:
    return w.cast(x, "float32")


# --- layouts ---
def trailing(x: T, axes: tuple[int, ...]) -> bool:
    return axes == tuple(range(x.rank - len(axes), x.rank))


def product(sizes: Sequence[Size]) -> Size:
    return "*".join(map(str, sizes)) if any(isinstance(s, str) for s in sizes) else math.prod(int(s) for s in sizes)


def back_to(w: Writer, shape: tuple[Size, ...]) -> Callable[[T], T]:
    return lambda y: w.reshape(y, shape)


def ungrouped(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> bool:
    return groups == 0


@say("layout", "direct", ungrouped)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    return Layout(x, axes, lambda y: y, lambda p: p)


def flattens(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> bool:
    return groups == 0 and trailing(x, axes) and x.rank - len(axes) >= 2


def one_lead(p: np.ndarray, lead: int) -> np.ndarray | None:
    return p.reshape(1, *p.shape[lead:]) if set(p.shape[:lead]) == {1} else None


@say("layout", "leading dims flattened", flattens)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    lead = x.rank - len(axes)
    view = w.reshape(x, (product(x.shape[:lead]), *x.shape[lead:]))
    return Layout(view, tuple(range(1, view.rank)), back_to(w, x.shape), lambda p: one_lead(p, lead))


@say(
    "layout",
    "normalized dims flattened",
    lambda w, x, axes, groups: groups == 0 and trailing(x, axes) and len(axes) >= 2,
)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    lead = x.rank - len(axes)
    view = w.reshape(x, (*x.shape[:lead], product(x.shape[lead:])))
    return Layout(view, (lead,), back_to(w, x.shape), lambda p: p.reshape(*p.shape[:lead], -1))


@say("layout", "transposed", ungrouped)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    others = tuple(a for a in range(x.rank) if a not in axes)
    perm = (*axes, *others) if trailing(x, axes) else (*others, *axes)
    inside = tuple(sorted(perm.index(a) for a in axes))
    back = tuple(int(a) for a in np.argsort(perm))
    return Layout(w.transpose(x, perm), inside, lambda y: w.transpose(y, back), lambda p: p.transpose(perm))


@say("layout", "(N, G, -1)", lambda w, x, axes, groups: groups > 0)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    view = w.reshape(x, (x.shape[0], groups, product((int(x.shape[1]) // groups, *x.shape[2:]))))
    return Layout(view, (2,), back_to(w, x.shape), lambda p: None)


@say("layout", "(N, G, C/G, ...)", lambda w, x, axes, groups: groups > 0)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    inside = int(x.shape[1]) // groups
    view = w.reshape(x, (x.shape[0], groups, inside, *x.shape[2:]))
    return Layout(
        view, tuple(range(2, view.rank)), back_to(w, x.shape), lambda p: p.reshape(1, groups, inside, *p.shape[2:])
    )


# --- what only an ONNX graph can say in several ways ---
@say("onnx.add", "Add")
def _(w: Any, a: str, b: str, shape: tuple[Size, ...], dtype: str) -> T:
    return w.node("Add", [a, b], shape, dtype)


@say("onnx.clamp_min", "Max", lambda w, a, low: a.dtype == "float32" or w.opset >= 13)
def _(w: Any, a: T, low: float) -> T:
    return w.node("Max", [a.name, w.constant(low, a.dtype)], a.shape, a.dtype)


@say("onnx.clamp_min", "Clip")
def _(w: Any, a: T, low: float) -> T:
    return w.node("Clip", [a.name, w.constant(low, a.dtype)], a.shape, a.dtype)
