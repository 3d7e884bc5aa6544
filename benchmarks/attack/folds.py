"""BatchNorm, as the node or by hand, next to a linear op: correct folds, lookalikes, and folds that cost accuracy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .builder import Builder, Case
from .linears import Linear, Statistics, batch_norm, conv, linear, statistics, viewed
from .values import PIECEWISE, clipped, some_number


def _start(rng: np.random.Generator) -> Builder:
    # float32, because onnxruntime has no convolution of doubles.
    b = Builder(rng)
    b.fold = True
    return b


def honest(rng: np.random.Generator) -> Case:
    """Draw folds that are right.

    Returns:
        the case.
    """
    b = _start(rng)
    how = b.rng.integers(4)
    # Before a linear op.
    if how == 0:
        c = int(b.pick(2, 4))
        s = statistics(b, c)
        x = b.input("x", ["d0", c], mean=s.mean, std=np.sqrt(s.var))
        y = batch_norm(b, x, s, 1, 2)
        y = b.op(b.pick("Gemm", "MatMul"), y, b.param(rng.normal(size=(c, 3))))
        b.note("before")
    # Two parts of a Concat.
    elif how == 1:
        one = linear(b, ("conv", "gemm"))
        z = b.op(
            "Concat", one.out, b.op("Mul", one.out, b.param(rng.normal(size=[one.c] + [1] * (one.rank - 2)))), axis=1
        )
        y = batch_norm(b, z, statistics(b, 2 * one.c), 1, one.rank)
        b.note("concat")
    else:
        one = linear(b)
        z, axis, rank = viewed(b, one) if how == 2 else (one.out, one.axis, one.rank)
        y = batch_norm(b, z, statistics(b, one.c), axis, rank)
        b.channel = axis
    b.output(y)
    return b.case("", True)


def _tiny(b: Builder, z: str) -> str:
    """Return a term in z that is small until z is large."""
    tiny = b.const(float(b.pick(1e-12, 1e-9, -1e-10, 1e-15)))
    square = b.op("Mul", z, z)
    b.numbers += [1e6, 1e8]
    how = b.rng.integers(3)
    term = square if how == 0 else b.op("Mul", square, z) if how == 1 else b.op("Abs", z)
    return b.op("Mul", term, tiny)


def _impure(b: Builder, z: str) -> str:
    return b.op("Add", z, _tiny(b, z))


def _between(b: Builder, z: str) -> str:
    how = b.rng.integers(5)
    if how == 0:
        return _impure(b, z)
    if how == 1:
        far = float(b.pick(5e4, 1e5, 2e3, 300))
        b.numbers += [far, -far, far / 4]
        return b.clip(z, b.const(-far), b.const(far))
    if how == 2:
        return clipped(b, z)
    return b.pick(*PIECEWISE)(b, z)


def _broken(b: Builder, one: Linear, s: Statistics) -> str:
    """Connect a linear op and a BatchNorm by another dim, with another consumer, or with data instead of a constant."""
    how = b.rng.integers(7)
    # Something else above a height.
    if how > 4 and one.axis == 1 and one.rank > 2:
        t = int(b.pick(2, 3, 5, 9))
        b.sizes.setdefault("h", []).extend([t + 3, t + 6, 2 * t + 7])
        n = b.size_of(one.out, 2)
        r = b.op("Range", b.const(0, np.int64), n, b.const(1, np.int64))
        low = b.op("Less", b.unsqueeze(r, *range(1, one.rank - 2)) if one.rank > 3 else r, b.const(t, np.int64))
        small = low if how == 5 else b.op("Less", n, b.const(t, np.int64))
        z = b.op("Where", small, one.out, b.op("Mul", one.out, b.const(b.pick(0.0, 2.0))))
        return batch_norm(b, z, s, one.axis, one.rank)
    # Statistics along another axis: as many as its size, or one.
    if how == 0 and one.rank > 2:
        last = b.op("Transpose", one.out, perm=[0, *range(2, one.rank), 1]) if one.axis == 1 else one.out
        return b.op("Add", b.op("Mul", last, b.param(s.gamma)), b.param(s.beta))
    # Gamma is data.
    if how == 1:
        g = b.input("g", [b.pick("G", one.c)])
        b.sizes["G"] = [1, one.c]
        z = batch_norm(b, one.out, s, one.axis, one.rank)
        return b.op("Mul", z, g if one.axis == one.rank - 1 else b.reshape(g, *[-1] + [1] * (one.rank - 2)))
    # Padding after the linear op: the border does not get its bias.
    if how == 2:
        pads = [0] * one.rank
        pads[-1] = 1
        z = b.pad(one.out, [*pads, *pads]) if one.axis != one.rank - 1 else one.out
        return batch_norm(b, z, s, one.axis, one.rank)
    # The sum of the tensors before and after.
    if how == 3:
        return b.op("Add", batch_norm(b, one.out, s, one.axis, one.rank), b.op("Relu", one.out))
    first = batch_norm(b, one.out, s, one.axis, one.rank)
    b.output(b.op("Neg", first))
    return batch_norm(
        b, b.op("Where", b.op("Greater", first, b.number(some_number(b))), b.const(0.0), first), s, one.axis, one.rank
    )


def trapped(rng: np.random.Generator) -> Case:
    """Draw folds that are wrong.

    Returns:
        the case.
    """
    b = _start(rng)
    before = b.chance(0.3)
    # After the norm and before the linear op.
    if before:
        c = int(b.pick(2, 4))
        s = statistics(b, c)
        image = b.chance(0.4)
        x = b.input("x", ["d0", c, 7] if image else ["d0", c])
        y = _between(b, batch_norm(b, _between(b, x) if b.chance(0.5) else x, s, 1, 3 if image else 2))
        y = conv(b, y, c, 4, 1, False) if image else b.op("MatMul", y, b.param(rng.normal(size=(c, 3))))
    else:
        one = linear(b)
        s = statistics(b, one.c)
        if b.chance(0.2):
            y = b.op("Add", batch_norm(b, one.out, s, one.axis, one.rank), _tiny(b, one.out))
        else:
            y = _broken(b, one, s) if b.chance(0.4) else batch_norm(b, _between(b, one.out), s, one.axis, one.rank)
    if b.chance(0.3):
        y = _between(b, y)
    b.output(y)
    b.note("before" if before else "behind")
    return b.case("", False)


def _spread(b: Builder, s: Statistics) -> Callable[[], None]:
    c = len(s.mean)

    def tiny_var() -> None:
        """Make a variance tiny."""
        s.var[b.rng.integers(c)] = b.pick(0.0, 1e-12, 1e-30, 1e-6)

    def huge_var() -> None:
        """Make a variance huge."""
        s.var[b.rng.integers(c)] = b.pick(1e12, 1e20, 1e6)

    def scales() -> None:
        """Spread the scales over many decades."""
        low, high = b.pick((-10, 0), (-5, 5), (0, 8))
        s.gamma[:] = 10.0 ** np.linspace(low, high, c)
        s.beta[:] = s.beta * b.pick(s.gamma, 0.0, 1.0)

    def dead() -> None:
        """Make a channel dead."""
        s.gamma[b.rng.integers(c)] = 0.0

    def all_spread() -> None:
        """Spread all variances."""
        s.var[:] = 10.0 ** np.linspace(-8, 8, c)
        s.mean[:] = s.mean * np.sqrt(s.var)

    return b.pick(tiny_var, huge_var, scales, dead, all_spread)


def scales(rng: np.random.Generator) -> Case:
    """Draw channels over many decades, dead channels, and variances of zero: right folds must stay right per channel.

    Returns:
        the case.
    """
    b = _start(rng)
    one = linear(b)
    s = statistics(b, one.c)
    _spread(b, s)()
    z = one.out
    # Only the smallest channel differs.
    if b.chance(0.5):
        keep = np.ones([one.c] + [1] * (one.rank - one.axis - 1))
        keep[0] = b.pick(0.0, 1.0001, -1.0)
        small = b.op("Greater", b.op("Abs", z), b.number(abs(some_number(b)) + 10))
        z = b.op("Where", small, b.op("Mul", z, b.const(keep)), z)
    b.output(batch_norm(b, z, s, one.axis, one.rank))
    b.note("scales")
    return b.case("", False)


def accuracy(rng: np.random.Generator) -> Case:
    """Draw (x − mean)/std with mean/std up to 1e6 before or after a linear op: the fold is right but loses the digits.

    Returns:
        the case.
    """
    b = _start(rng)
    ratio = 10.0 ** b.rng.uniform(2, 6)
    c = int(b.pick(2, 4, 6))
    s = statistics(b, c)
    s.var = s.var * 10.0 ** b.rng.uniform(-2, 2)
    s.mean = np.sqrt(s.var) * ratio * b.pick(-1, 1)
    if b.chance(0.3):
        s.mean[1:] = 0
    std = np.sqrt(s.var)
    image = b.chance(0.3)
    shape = (c, 1) if image else (c,)
    x = b.input("x", ["d0", c, 7] if image else ["d0", c], mean=s.mean.reshape(shape), std=std.reshape(shape))
    if b.chance(0.7):
        y = batch_norm(b, x, s, 1, 3 if image else 2)
        if image:
            b.channel = 1
            y = conv(b, y, c, 4, 1, b.chance(0.3))
        else:
            y = b.op("MatMul", y, b.param(rng.normal(size=(c, 3))))
            y = b.op("Add", y, b.param(rng.normal(size=3))) if b.chance(0.5) else y
        b.note("before")
    else:
        w = np.eye(c) + 0.01 * rng.normal(size=(c, c)) if b.chance(0.5) else np.diag(rng.uniform(0.5, 2, c))
        z = b.op("MatMul", b.op("Transpose", x, perm=[0, 2, 1]), b.param(w)) if image else b.op("MatMul", x, b.param(w))
        s.mean = s.mean @ w
        y = batch_norm(b, z, s, 2 if image else 1, 3 if image else 2)
        b.note("behind")
    b.output(y)
    b.note(f"ratio{ratio:.0e}")
    return b.case("", False)
