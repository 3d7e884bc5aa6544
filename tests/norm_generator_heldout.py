"""A third of the spellings, held back while the recognisers were written: they show whether it is the maths that is
recognised."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.norm_spellings import Layout, Stats, affine, back_to, centred, more_than_one, product, static, torch_only
from tests.norm_writers import Book, Size, T, TorchWriter, Writer

HELD_OUT = Book()
say = HELD_OUT.spelling


# --- mean and mean square ---
@say("mean.of", "mean of means", lambda w, x, axes, _: len(axes) >= 2)
def _(w: Writer, x: T, axes: tuple[int, ...], keepdims: bool) -> T:
    return w.reduce("mean", w.reduce("mean", x, axes[-1:], keepdims), axes[:-1], keepdims)


@say("mean", "expanded")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.expand(w.spell("mean.of", x, axes, True), x)


@say("square", "torch.square", torch_only)
def _(w: TorchWriter, x: T) -> T:
    return w.raw(f"torch.square({x.name})", x.shape, x.dtype)


@say("square", "|x| * |x|")
def _(w: Writer, x: T) -> T:
    magnitude = w.unary("abs", x)
    return w.mul(magnitude, magnitude)


@say("mean_square", "length squared / n")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.div(w.spell("square", w.reduce("l2", x, axes)), w.n(x, axes))


@say("mean_square", "mean of x * (x / n) summed")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> T:
    return w.reduce("sum", w.mul(x, w.div(x, w.n(x, axes))), axes)


@say("mean_square", "ReduceSumSquare", lambda w, x, axes: not torch_only(w))
def _(w: Any, x: T, axes: tuple[int, ...]) -> T:
    shape = w.reduced(x, axes, True)
    if w.opset < 18:
        total = w.node("ReduceSumSquare", [x.name], shape, x.dtype, axes=list(axes), keepdims=1)
    else:
        total = w.node("ReduceSumSquare", [x.name, w.constant(list(axes), "int64")], shape, x.dtype, keepdims=1)
    return w.div(total, w.n(x, axes))


# --- centre and variance ---
@say("centre", "-(mean - x)")
def _(w: Writer, x: T, mean: T) -> T:
    return w.unary("neg", w.sub(mean, x))


@say("centre", "torch.add(alpha=-1)", torch_only)
def _(w: TorchWriter, x: T, mean: T) -> T:
    return w.raw(f"torch.add({x.name}, {mean.name}, alpha=-1)", x.shape, x.dtype)


@say("stats", "std squared")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    return Stats(*centred(w, x, axes), w.spell("square", w.moments(x, axes, 0, "std")[0]))


@say("stats", "sum / (n-1) * ((n-1)/n)", more_than_one)
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    n = static(w, x, axes)
    unbiased = w.div(w.reduce("sum", w.spell("square", d), axes), float(n - 1))
    return Stats(mean, d, w.mul(unbiased, (n - 1) / n))


@say("stats", "E[x * d]")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.spell("mean", w.mul(x, d), axes))


@say("stats", "corrected two passes: E[d^2] - E[d]^2")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.sub(w.spell("mean_square", d, axes), w.spell("square", w.spell("mean", d, axes))))


@say("stats", "(E[x]^2 - E[x^2]) * -1")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    mean, d = centred(w, x, axes)
    return Stats(mean, d, w.mul(w.sub(w.spell("square", mean), w.spell("mean_square", x, axes)), -1.0))


@say("rms.stats", "mean of x / 2 squared, times 4")
def _(w: Writer, x: T, axes: tuple[int, ...]) -> Stats:
    return Stats(None, x, w.mul(w.spell("mean_square", w.mul(x, 0.5), axes), 4.0))


# --- epsilon and root ---
@say("epsilon", "var - (-eps)")
def _(w: Writer, var: T, eps: float) -> T:
    return w.sub(var, -eps)


@say("epsilon", "in two halves")
def _(w: Writer, var: T, eps: float) -> T:
    return w.add(w.add(var, eps / 2), eps / 2)


@say("epsilon", "max(var, 0) + eps")
def _(w: Writer, var: T, eps: float) -> T:
    return w.add(w.clamp_min(var, 0.0), eps)


@say("inverse", "sqrt of 1/v")
def _(w: Writer, v: T) -> T:
    return w.unary("sqrt", w.div(1.0, v))


@say("inverse", "1 / pow 0.5")
def _(w: Writer, v: T) -> T:
    return w.div(1.0, w.power(v, 0.5))


@say("root", "pow 0.5")
def _(w: Writer, v: T) -> T:
    return w.power(v, 0.5)


@say("root", "v * rsqrt(v)")
def _(w: Writer, v: T) -> T:
    return w.mul(v, w.unary("rsqrt", v))


# --- putting it together ---
@say("scale", "y + y * (gamma - 1)")
def _(w: Writer, y: T, gamma: T) -> T:
    return w.add(y, w.mul(y, w.sub(gamma, 1.0)))


@say("shift", "y - (-beta)")
def _(w: Writer, y: T, beta: T) -> T:
    return w.sub(y, w.unary("neg", beta))


@say("apply", "addcmul", lambda w, x, s, v, gamma, beta: torch_only(w) and gamma is not None and beta is not None)
def _(w: TorchWriter, x: T, s: Stats, v: T, gamma: T, beta: T) -> T:
    y = w.mul(s.centred, w.spell("inverse", v))
    return w.raw(f"torch.addcmul({beta.name}, {y.name}, {gamma.name})", y.shape, y.dtype)


@say("apply", "(gamma / root) * d", lambda w, x, s, v, gamma, beta: gamma is not None)
def _(w: Writer, x: T, s: Stats, v: T, gamma: T, beta: T | None) -> T:
    return affine(w, w.mul(w.div(gamma, w.spell("root", v)), s.centred), None, beta)


@say("apply", "(gamma * d) / root", lambda w, x, s, v, gamma, beta: gamma is not None)
def _(w: Writer, x: T, s: Stats, v: T, gamma: T, beta: T | None) -> T:
    return affine(w, w.div(w.mul(gamma, s.centred), w.spell("root", v)), None, beta)


@say("apply", "x * inv - mean * inv", lambda w, x, s, v, gamma, beta: s.mean is not None)
def _(w: Writer, x: T, s: Stats, v: T, gamma: T | None, beta: T | None) -> T:
    inverse = w.spell("inverse", v)
    assert s.mean is not None
    return affine(w, w.sub(w.mul(x, inverse), w.mul(s.mean, inverse)), gamma, beta)


@say("whole", "n inside the root", lambda w, layout, *_: w.size(layout.view, layout.axes) is not None)
def _(w: Writer, layout: Layout, stats: Stats, eps: float, gamma: T | None, beta: T | None) -> T:
    n = static(w, layout.view, layout.axes)
    scaled = w.spell("epsilon", w.mul(stats.var, float(n)), n * eps)
    return affine(w, w.mul(w.div(stats.centred, w.spell("root", scaled)), n**0.5), gamma, beta)


@say("whole", "doubled on both sides")
def _(w: Writer, layout: Layout, stats: Stats, eps: float, gamma: T | None, beta: T | None) -> T:
    four = w.spell("epsilon", w.mul(stats.var, 4.0), 4 * eps)
    return affine(w, w.mul(w.mul(stats.centred, 2.0), w.spell("inverse", four)), gamma, beta)


@say("gamma", "two factors")
def _(w: Writer, values: np.ndarray) -> T:
    return w.mul(w.spell("param", "gamma", values * 2.0), 0.5)


@say("gamma", "negated twice")
def _(w: Writer, values: np.ndarray) -> T:
    return w.unary("neg", w.spell("param", "gamma", -values))


# --- layouts ---
@say("layout", "one more leading dim", lambda w, x, axes, groups: groups == 0)
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    return Layout(w.unsqueeze(x, (0,)), tuple(a + 1 for a in axes), back_to(w, x.shape), lambda p: p[None])


@say("layout", "(N * G, -1)", lambda w, x, axes, groups: groups > 0 and all(isinstance(s, int) for s in x.shape[1:]))
def _(w: Writer, x: T, axes: tuple[int, ...], groups: int) -> Layout:
    inner: Size = product((int(x.shape[1]) // groups, *x.shape[2:]))
    return Layout(w.reshape(x, (product((x.shape[0], groups)), inner)), (1,), back_to(w, x.shape), lambda p: None)


# --- what only an ONNX graph can say ---
@say("onnx.add", "Sum")
def _(w: Any, a: str, b: str, shape: tuple[Size, ...], dtype: str) -> T:
    return w.node("Sum", [a, b], shape, dtype)


@say("onnx.clamp_min", "Relu", lambda w, a, low: low == 0.0)
def _(w: Any, a: T, low: float) -> T:
    return w.unary("relu", a)
