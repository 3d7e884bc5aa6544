"""Draw traps that depend on values: functions that are the identity except on a set that samples are likely to miss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .builder import Builder, Case
from .norms import PLACES, draw, frame, norm
from .whole import start

Trap = Callable[[Builder, str], str]


def some_number(b: Builder) -> float:
    """Draw a threshold of either sign: a usual one, a round one, or one of any magnitude.

    Returns:
        the number.
    """
    if b.dtype == np.float16:
        return float(b.pick(-1, 1) * b.pick(7.25, 100, 30, 2000, 0.5, 1e4))
    r = b.rng.random()
    size = b.pick(7.25, 100, 25, 1e5, 1e-9, 1000, 64, 12, 40) if r < 0.4 else 10.0 ** b.rng.uniform(-9, 8)
    return float(np.float32(b.pick(-1, 1) * size))


def disguised(b: Builder, t: str, number: float) -> tuple[str, str]:
    """Apply the same map to ``t`` and ``number``, so that the graph does not contain the number itself.

    Returns:
        names of both.
    """
    b.numbers.append(number)
    how = b.rng.integers(6)
    if how == 0:
        return b.op("Neg", t), b.const(-number)
    if how == 1:
        return b.op("Mul", t, b.const(2.0)), b.const(2 * number)
    if how == 2:
        return b.op("Mul", t, b.const(-0.5)), b.const(-0.5 * number)
    if how == 3:
        return b.op("Sub", b.const(number), t), b.const(0.0)
    return t, b.const(number)


def equal(b: Builder, t: str) -> str:
    """Replace t at one number.

    Returns:
        name of the result.
    """
    u, c = disguised(b, t, some_number(b))
    other = b.const(b.pick(0.0, 1.0)) if b.chance(0.7) else b.op("Mul", t, b.const(1.5))
    if b.chance(0.7):
        return b.op("Where", b.op("Equal", u, c), other, t)
    return b.op("Where", b.op("Not", b.op("Equal", u, c)), t, other)


def beyond(b: Builder, t: str) -> str:
    """Replace t beyond a threshold, far out or close to zero.

    Returns:
        name of the result.
    """
    number = some_number(b)
    u, c = disguised(b, t, number)
    kind = b.pick("Less", "Greater", "GreaterOrEqual", "LessOrEqual")
    far = b.op(kind, b.op("Abs", u), b.op("Abs", c)) if b.chance(0.3) else b.op(kind, u, c)
    other = b.const(0.0) if b.chance(0.5) else b.op("Mul", t, b.const(2.0))
    return b.op("Where", far, other, t) if b.chance(0.5) else b.op("Where", far, t, other)


def between(b: Builder, t: str) -> str:
    """Replace t inside an interval.

    Returns:
        name of the result.
    """
    low = b.pick(0.0, 1.0, -3.0)
    high = low + abs(some_number(b)) * b.pick(1, 1e-3)
    b.numbers += [low, high, (low + high) / 2]
    inside = b.op("And", b.op("Greater", t, b.const(low)), b.op("Less", t, b.const(high)))
    return b.op("Where", inside, b.const(0.0), t)


def clipped(b: Builder, t: str) -> str:
    """Clip t.

    Returns:
        name of the result.
    """
    low, high = -abs(some_number(b)), abs(some_number(b))
    how = b.rng.integers(5)
    if how == 0:
        return b.clip(t, b.number(low), b.number(high))
    if how == 1:
        return b.clip(t, b.number(low), "")
    if how == 2:
        return b.clip(t, "", b.number(high))
    if how == 3:
        return b.op("Max", t, b.number(low))
    return b.op("Min", b.number(high), t)


def shifted(b: Builder, t: str) -> str:
    """Apply relu(t + K) − K or a relative: the identity above −K.

    Returns:
        name of the result.
    """
    k = abs(some_number(b))
    k = k if k > 1 else 50.0
    b.numbers += [-k, k]
    up = b.op("Add", t, b.param(k))
    kinds = ("Relu", "Abs", "LeakyRelu", "PRelu", "Elu", "Max", "Selu", "ThresholdedRelu", "Celu")
    kind = b.pick(*kinds) if b.dtype == np.float32 else b.pick("Relu", "Abs", "Max")
    if kind == "PRelu":
        up = b.op(kind, up, b.const(0.25))
    elif kind == "Max":
        up = b.op(kind, up, b.const(0.0))
    elif kind == "Selu":
        up = b.op(kind, up, gamma=1.0, alpha=1.0)
    elif kind == "ThresholdedRelu":
        up = b.op(kind, up, alpha=0.0)
    else:
        up = b.op(kind, up)
    return b.op("Sub", up, b.param(k))


def cast_away(b: Builder, t: str) -> str:
    """Use a cast that loses the value of t.

    Returns:
        name of the result.
    """
    number = some_number(b)
    b.numbers += [number, -number]
    how = b.rng.integers(4)
    if how == 0:
        away = b.cast(b.op("Sub", t, b.const(number)), np.bool_)
        return b.op("Where", away, t, b.const(0.0)) if b.chance(0.5) else b.op("Mul", t, b.cast(away, b.dtype))
    scaled = b.op("Mul", t, b.const(1 / max(abs(number), 10.0)))
    # 0 within ±number.
    whole = b.cast(b.cast(scaled, b.pick(np.int32, np.int64)), b.dtype)
    if how == 1:
        return b.op("Add", t, whole)
    if how == 2:
        return b.op("Mul", t, b.op("Add", whole, b.const(1.0)))
    return b.op("Where", b.cast(whole, np.bool_), b.const(0.0), t)


def rounding(b: Builder, t: str) -> str:
    """Use a remainder or a rounding of t.

    Returns:
        name of the result.
    """
    number = max(abs(some_number(b)), 8.0)
    b.numbers += [number, -number]
    if b.chance(0.25):
        return b.op("Mod", t, b.const(number), fmod=1)
    size = b.op("Abs", t) if b.chance(0.7) else t
    step = b.op(b.pick("Floor", "Round", "Ceil", "Floor"), b.op("Div", size, b.const(number)))
    return b.op("Add", t, step) if b.chance(0.5) else b.op("Sub", t, b.op("Mul", step, b.const(0.5)))


def bump(b: Builder, t: str) -> str:
    """Add a narrow bump, or a wall far out.

    Returns:
        name of the result.
    """
    number = some_number(b)
    b.numbers += [number]
    away = b.op("Sub", t, b.const(number))
    if b.chance(0.6):
        width = float(b.pick(1.0, 100.0, 1e4)) if b.dtype != np.float16 else 1.0
        return b.op("Add", t, b.op("Exp", b.op("Mul", b.op("Mul", away, away), b.const(-width))))
    wall = b.op("Erf" if b.dtype == np.float32 else "Tanh", b.op("Mul", b.op("Abs", away), b.const(1e3)))
    return b.op("Mul", t, wall) if b.chance(0.4) else b.op("Mul", t, _gate(b, away))


def _gate(b: Builder, away: str) -> str:
    steep = float(b.pick(1e3, 1e5)) if b.dtype != np.float16 else 100.0
    return (
        b.op("Sigmoid", b.op("Mul", b.op("Mul", away, away), b.const(steep)))
        if b.chance(0.5)
        else b.op("Tanh", b.op("Mul", b.op("Abs", away), b.const(steep)))
    )


def saturating(b: Builder, t: str) -> str:
    """Use HardSwish, HardSigmoid, Softplus, Sign or Shrink as an identity on one side.

    Returns:
        name of the result.
    """
    k = float(b.pick(20.0, 60.0, 200.0))
    b.numbers += [k, -k, 3 * k]
    how = b.rng.integers(4)
    if how == 0:
        return b.op("Mul", t, b.op("Sign", b.op("Add", t, b.const(k))))
    if how == 1 and b.dtype == np.float32:
        half = b.op("HardSigmoid", b.op("Mul", t, b.const(1 / k)), alpha=0.5, beta=0.5)
        return b.op("Mul", b.op("Sub", half, b.param(0.5)), b.param(2 * k))
    if how == 2 and b.dtype == np.float32:
        return b.op("Add", t, b.op("Shrink", t, lambd=k, bias=0.0))
    return b.op("Mul", t, b.op("Max", b.const(1.0), b.op("Mul", b.op("Abs", t), b.const(1 / k))))


PIECEWISE: tuple[Trap, ...] = (
    equal,
    equal,
    beyond,
    beyond,
    between,
    clipped,
    clipped,
    shifted,
    cast_away,
    rounding,
    bump,
    saturating,
)


def trapped_norm(b: Builder, trap: Trap, places: tuple[str, ...]) -> None:
    """Write a norm with a trap at one of ``places``."""
    dims, axes = frame(b)
    s = draw(b, axes)
    place = b.pick(*places)
    if place in ("d", "normed", "scaled"):
        s.order, s.rms = "plain", s.rms and place != "d"
    if place == "gamma":
        s.gamma = True
    if place == "square" and s.variance in ("sumsq", "l2"):
        s.variance = "mul"
    if place == "root" and s.inverse not in ("div_sqrt", "recip_sqrt", "div_pow", "one_over"):
        s.inverse = "div_sqrt"
    s.hooks[place] = lambda t: trap(b, t)
    x = b.input("x", dims)
    b.output(norm(b, x, dims, s), dims if b.chance(0.7) else None)
    b.note(f"{trap.__name__}@{place}")


def piecewise(rng: np.random.Generator) -> Case:
    """Draw a norm with a piecewise trap.

    Returns:
        the case.
    """
    b = start(rng)
    trapped_norm(b, b.pick(*PIECEWISE), ("x", "x", "x", "y", "y", *PLACES))
    return b.case("", False)


# ---- values that are not finite
def kept_equal(b: Builder, t: str) -> str:
    """Replace NaN by 0, by comparing t with itself.

    Returns:
        name of the result.
    """
    return b.op("Where", b.op("Equal", t, t), t, b.const(0.0))


def is_nan(b: Builder, t: str) -> str:
    """Replace NaN or Inf by a number.

    Returns:
        name of the result.
    """
    kind = b.pick("IsNaN", "IsInf") if b.dtype == np.float32 else "IsNaN"
    return b.op("Where", b.op(kind, t), b.const(b.pick(0.0, 1.0)), t)


def finite_range(b: Builder, t: str) -> str:
    """Limit t to finite numbers.

    Returns:
        name of the result.
    """
    top = float(np.finfo(b.dtype).max)
    if b.chance(0.4):
        return b.clip(t, b.const(-top), b.const(top))
    if b.chance(0.5):
        return b.op("Max", b.op("Min", t, b.const(top)), b.const(-top))
    fine = b.op("And", b.op("Less", t, b.const(np.inf)), b.op("Greater", t, b.const(-np.inf)))
    return b.op("Where", fine, t, b.const(0.0))


def poisoned(b: Builder, t: str) -> str:
    """Produce NaN or Inf at a number on purpose; a rewrite must not hide it.

    Returns:
        name of the result.
    """
    number = some_number(b)
    b.numbers.append(number)
    how = b.rng.integers(5)
    away = b.op("Sub", t, b.const(number))
    if how == 0:
        return b.op("Where", b.op("Equal", t, b.const(number)), b.const(b.pick(np.nan, np.inf)), t)
    if how == 1:
        return b.op("Mul", t, b.op("Div", away, away))
    if how == 2:
        pole = b.op("Reciprocal", away)
        return b.op("Add", t, b.op("Sub", pole, pole))
    if how == 3:
        k = abs(number) + 20
        b.numbers += [-k, -k * 1.5]
        root = b.op("Sqrt", b.op("Add", t, b.const(k)))
        return b.op("Add", t, b.op("Sub", root, root))
    log = b.op("Log", b.op("Abs", away))
    return b.op("Add", t, b.op("Mul", log, b.const(0.0)))


def cancelled(b: Builder, t: str) -> str:
    """Use t·0 or t − t, which keep a NaN or Inf that algebra forgets.

    Returns:
        name of the result.
    """
    how = b.rng.integers(4)
    if how == 0:
        return b.op("Add", t, b.op("Mul", t, b.const(0.0)))
    if how == 1:
        return b.op("Add", t, b.op("Sub", t, t))
    if how == 2:
        # Inf from 89 on in float32.
        other = b.op("Exp", t)
        return b.op("Add", t, b.op("Mul", b.op("Sub", other, other), b.const(1.0)))
    return b.op("Sub", b.op("Add", t, b.op("ReduceMax", t, keepdims=1)), b.op("ReduceMax", t, keepdims=1))


def not_nan_out(b: Builder, t: str) -> str:
    """Use Where with a comparison that NaN fails.

    Returns:
        name of the result.
    """
    if b.chance(0.5):
        return b.op("Where", b.op("Less", b.op("Abs", t), b.const(b.pick(np.inf, 3e4, 6e4))), t, b.const(0.0))
    return b.op("Where", b.op("Not", b.op("Equal", t, t)), b.const(0.0), t)


NONFINITE: tuple[Trap, ...] = (kept_equal, is_nan, finite_range, poisoned, poisoned, cancelled, not_nan_out)


def nonfinite(rng: np.random.Generator) -> Case:
    """Draw a norm with a trap for values that are not finite.

    Returns:
        the case.
    """
    b = start(rng)
    trapped_norm(b, b.pick(*NONFINITE), ("x", "x", "x", "y", *PLACES, "gamma"))
    return b.case("", False)


# ---- traps that look at a whole row, or at another one
def row_wise(b: Builder, t: str) -> str:
    """Replace a row that is negative, positive, small or constant, or that contains a number.

    Returns:
        name of the result.
    """
    number = some_number(b)
    how = b.rng.integers(8)
    # The sum of the positive parts is zero only in a negative row.
    if how > 5:
        side = t if how == 6 else b.op("Neg", t)
        return b.op("Mul", t, b.op("Sign", b.reduce(b.pick("ReduceSum", "ReduceMean"), b.op("Relu", side), [-1])))
    if how == 0:
        sign = b.op("Less", b.reduce("ReduceMax", t, [-1]), b.const(0.0))
    elif how == 1:
        sign = b.op("Greater", b.reduce("ReduceMin", t, [-1]), b.const(0.0))
    elif how == 2:
        b.numbers += [abs(number)]
        sign = b.op("Greater", b.reduce("ReduceMax", b.op("Abs", t), [-1]), b.number(abs(number) + 6))
    elif how == 3:
        sign = b.op("Equal", b.reduce("ReduceMax", t, [-1]), b.reduce("ReduceMin", t, [-1]))
    elif how == 4:
        sign = b.op("Less", b.reduce("ReduceL1", t, [-1]), b.number(1e-6 if b.dtype != np.float16 else 1e-3))
    else:
        sign = b.op("Greater", b.op("Abs", b.reduce("ReduceMean", t, [-1])), b.number(abs(number) + 2))
    return b.op("Where", sign, b.const(0.5) if b.chance(0.5) else b.op("Mul", t, b.const(2.0)), t)


def sorted_row(b: Builder, t: str) -> str:
    """Use the order of a row: a sorted row has the same moments in other places.

    Returns:
        name of the result.
    """
    top = b.many("TopK", t, b.ints(1), outputs=2, axis=-1)[0]
    return b.op("Where", b.op("Equal", t, b.op("Add", top, b.number(some_number(b)))), b.const(0.0), t)


def rows(rng: np.random.Generator) -> Case:
    """Draw a norm with a trap that looks at a whole row.

    Returns:
        the case.
    """
    b = start(rng)
    trapped_norm(b, b.pick(row_wise, row_wise, row_wise, sorted_row), ("x", "x", "x", "y", "d", "scaled", "normed"))
    return b.case("", False)
