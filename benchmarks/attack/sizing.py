"""Draw traps that depend on sizes: norms at the sizes that a test would try, but not at others."""

from __future__ import annotations

import numpy as np

from .builder import Builder, Case, Dim
from .norms import draw, frame, norm
from .whole import start


def _threshold(b: Builder) -> int:
    return int(b.pick(1, 2, 3, 7, 12, 32, 64, 100, int(b.rng.integers(4, 121))))


def _dims(b: Builder, last: bool | None = None) -> tuple[list[Dim], int]:
    """Draw dims with a dynamic one, and return its axis (negative)."""
    if last or (last is None and b.chance(0.5)):
        return [b.pick("d0", "?0", 2), b.pick("n", "?n")], -1
    n = int(b.pick(4, 8))
    return ([b.pick("s", "?s"), n], -2) if b.chance(0.5) else ([b.pick("s", "?s"), b.pick("d1", 3), n], -3)


def _nasty(b: Builder, dim: Dim, number: int) -> None:
    if isinstance(dim, str):
        b.sizes.setdefault(dim, []).extend(max(1, k) for k in (number - 1, number, number + 1, number + 5, 2 * number))


def _arange(b: Builder, x: str, axis: int, rank: int) -> str:
    """Return 0 … size − 1 along ``axis``, int64, shaped to broadcast."""
    n = b.size_of(x, axis)
    if b.chance(0.7):
        r = b.op("Range", b.const(0, np.int64), n, b.const(1, np.int64))
    else:
        ones = b.op("Expand", b.ints(1), b.unsqueeze(n, 0))
        r = b.op("Sub", b.op("CumSum", ones, b.const(0, np.int64)), b.const(1, np.int64))
    after = -1 - axis
    return b.unsqueeze(r, *range(1, after + 1)) if after else r


def masked(rng: np.random.Generator) -> Case:
    """Draw an arange mask against a threshold, or a mask from another op, before or after a norm.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, axis = _dims(b)
    t = _threshold(b)
    _nasty(b, dims[axis], t)
    x = b.input("x", dims)

    def mask(v: str) -> str:
        """Apply the mask.

        Returns:
            name of the result.
        """
        r = _arange(b, x, axis, len(dims))
        c = b.const(t, np.int64)
        how = b.rng.integers(8)
        # Only the size decides.
        if how > 5:
            size = b.size_of(x, axis)
            odd = b.op(b.pick("Greater", "Equal", "Less", "GreaterOrEqual"), size, c)
            if how == 6:
                return b.op("Where", odd, b.op("Mul", v, b.const(2.0)), v)
            return b.op("Add", v, b.op("Mul", b.cast(odd, b.dtype), b.op("Sub", v, b.const(1.0))))
        if how == 0:
            return b.op("Where", b.op("Less", r, c), v, b.const(0.0))
        if how == 1:
            return b.op("Where", b.op("Equal", r, c), b.const(0.0), v)
        if how == 2:
            return b.op("Mul", v, b.cast(b.op("LessOrEqual", r, c), b.dtype))
        # 1 up to the threshold, another factor after it.
        if how == 3:
            steps = b.cast(b.op("Div", r, b.const(max(t, 2), np.int64)), b.dtype)
            return b.op("Mul", v, b.op("Add", steps, b.const(1.0)))
        if how == 4:
            wrapped = b.op("Mod", r, b.const(max(t, 2), np.int64))
            return b.op("Where", b.op("Equal", wrapped, r), v, b.op("Mul", v, b.const(2.0)))
        late = b.op("Max", b.op("Sub", b.cast(r, b.dtype), b.const(float(t))), b.const(0.0))
        return b.op("Add", v, late)

    s = draw(b, [-1])
    s.mean = "mean" if s.mean == "matmul" else s.mean
    place = b.pick("x", "x", "y", "normed", "d")
    s.order, s.rms = "plain", s.rms and place != "d"
    s.hooks[place] = mask
    b.output(norm(b, x, dims, s))
    b.note(f"mask{t}@{place}:axis{axis}")
    return b.case("", False)


def counted(rng: np.random.Generator) -> Case:
    """Draw a norm whose divisor or epsilon is a function of a size that equals the size only for some sizes.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, _ = _dims(b, last=True)
    if b.chance(0.3):
        dims = [*dims[:1], "d1", dims[1]]
    t = max(_threshold(b), 2)
    _nasty(b, dims[-1], t)
    x = b.input("x", dims)
    c = b.const(t, np.int64)

    def wrong(v: str) -> str:
        """Compute the wrong count.

        Returns:
            name of the result.
        """
        n = b.size_of(x, -1)
        how = b.rng.integers(9)
        if how == 0:
            n = b.op("Min", n, c)
        elif how == 1:
            n = b.op("Max", n, c)
        elif how == 2:
            n = b.op("Where", b.op("Greater", n, c), c, n)
        elif how == 3:
            two = b.const(b.pick(2, 3, 4), np.int64)
            n = b.op("Mul", b.op("Div", b.op("Add", n, b.const(1, np.int64)), two), two)
        elif how == 4:
            n = b.op("Add", n, b.op("Div", n, c))
        elif how == 5:
            n = b.op("Sub", n, b.op("Div", n, c))
        elif how == 6:
            n = b.op("Add", b.op("Mod", n, c), b.op("Mul", c, b.op("Min", b.op("Div", n, c), b.const(1, np.int64))))
        elif how == 7:
            n = b.op("Add", n, b.cast(b.op("Equal", n, c), np.int64))
        else:
            n = b.op("ReduceMin", b.op("Concat", b.unsqueeze(n, 0), b.ints(t), axis=0), keepdims=0)
        return b.cast(n, b.dtype)

    s = draw(b, [-1])
    s.mean, s.variance = b.pick("sum_shape", "mean"), b.pick("sum_shape", "sum_shape", "pow")
    s.ddof = 0
    if s.variance == "pow":
        s.mean, s.rms = "sum_shape", False
    s.order = "plain"
    s.hooks["count"] = wrong
    b.output(norm(b, x, dims, s))
    b.note(f"count{t}:{s.mean}:{s.variance}")
    return b.case("", False)


def cut(rng: np.random.Generator) -> Case:
    """Draw statistics of a slice, or of a padded or re-joined tensor that equals x only up to some size.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims, axis = _dims(b)
    t = max(_threshold(b), 2)
    _nasty(b, dims[axis], t)
    x = b.input("x", dims)
    place = b.pick("x", "x", "square", "d", "y")
    stat = b.chance(0.25) and axis == -1

    def part(v: str) -> str:
        """Take the part.

        Returns:
            name of the result.
        """
        how = b.rng.integers(7)
        if how == 0 or stat:
            return b.slice(v, 0, t, axis)
        if how == 1:
            tail = b.op("Mul", b.slice(v, t, 2**31, axis), b.const(2.0))
            return b.op("Concat", b.slice(v, 0, t, axis), tail, axis=axis)
        if how == 2:
            return b.op("Concat", b.slice(v, 0, t, axis), b.op("Neg", b.slice(v, t, 2**62, axis)), axis=axis)
        # Pads to at least t.
        if how == 3:
            n = b.size_of(x, axis, scalar=False)
            short = b.op("Max", b.op("Sub", b.ints(t), n), b.ints(0))
            zeros = [b.ints(*[0] * (len(dims) + axis)), *([b.ints(*[0] * (-1 - axis))] if axis < -1 else [])]
            before = [b.ints(*[0] * len(dims)), zeros[0], short, *zeros[1:]]
            pads = b.op("Concat", *[p for p in before if p], axis=0)
            return b.op("Pad", v, pads, mode="constant")
        if how == 4:
            n = b.size_of(x, axis, scalar=False)
            return b.op("Slice", v, b.ints(0), b.op("Min", n, b.ints(t)), b.ints(axis))
        if how == 5:
            index = b.op(
                "Mod",
                b.op("Range", b.const(0, np.int64), b.size_of(x, axis), b.const(1, np.int64)),
                b.const(t, np.int64),
            )
            return b.op("Gather", v, index, axis=axis)
        cap = b.op(
            "Min", b.op("Range", b.const(0, np.int64), b.size_of(x, axis), b.const(1, np.int64)), b.const(t, np.int64)
        )
        return b.op("Gather", v, cap, axis=axis)

    s = draw(b, [-1])
    s.order = "plain"
    if stat:
        place = "square"
    if place == "square":
        s.variance, s.ddof = b.pick("mul", "pow", "sum_shape"), 0
    s.rms = s.rms and place != "d"
    s.hooks[place] = part
    b.output(norm(b, x, dims, s))
    b.note(f"cut{t}@{place}:axis{axis}")
    return b.case("", False)


def broadcast(rng: np.random.Generator) -> Case:
    """Draw gamma, shift or a residual with other symbols for dims than x: equal, or one of them 1.

    Returns:
        the case.
    """
    b = start(rng)
    n = int(b.pick(4, 8))
    first, other = b.pick(("A", "B"), ("?a", "?b"), ("A", "?b"))
    layout = b.rng.integers(4)
    dims: list[Dim] = [first, "S", n] if layout < 3 else [first, n]
    given: list[Dim] = {0: [other, 1, n], 1: [other, n], 2: [1, other, n], 3: [other, n]}[int(layout)]  # type: ignore[assignment]
    axis = "S" if layout in (1, 2) else first
    b.broadcast.append((axis, other))
    x, g = b.input("x", dims), b.input("g", given)
    s = draw(b, [-1])
    s.order = "plain"
    how = b.rng.integers(5)
    if how == 0:
        s.hooks["normed"] = lambda v: b.op("Mul", v, g)
    elif how == 1:
        s.hooks["y"] = lambda v: b.op("Add", v, g) if b.chance(0.5) else b.op("Add", g, v)
    elif how == 2:
        s.hooks["x"] = lambda v: b.op("Add", v, g)
    elif how == 3:
        one = b.op("Add", g, b.const(1.0))
        s.hooks["normed"] = lambda v: b.op("Mul", one, v)
        s.hooks["y"] = lambda v: b.op("Add", v, g)
    else:
        s.rms = False
        s.hooks["d"] = lambda v: b.op("Sub", b.op("Add", v, g), g)
    b.output(norm(b, x, dims, s))
    b.note(f"broadcast{how}:{layout}")
    return b.case("", False)


def far(rng: np.random.Generator) -> Case:
    """Draw a norm that is wrong at one place of a large static axis, which a trial at small sizes does not have.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    rows = int(b.pick(60, 110, 128, 200))
    n = int(b.pick(4, 6))
    dims: list[Dim] = [rows, n] if b.chance(0.5) else ["d0", rows, n]
    x = b.input("x", dims)
    row = int(b.rng.integers(rows))
    field = np.ones((rows, 1))
    field[row:] = b.pick(0.0, 2.0, 1.0001)
    if b.chance(0.5):
        field[row + 1 :] = 1
    s = draw(b, [-1])
    s.order = "plain"
    place = b.pick("x", "normed", "scaled", "y", "d")
    s.rms = s.rms and place != "d"
    how = b.rng.integers(3)
    if how == 0:
        s.hooks[place] = lambda v: b.op("Mul", v, b.const(field))
    elif how == 1:
        s.hooks[place] = lambda v: b.op("Where", b.const(field == 1, np.bool_), v, b.const(0.0))
    else:
        order = np.arange(rows)
        order[row] = (row + 1) % rows
        s.hooks[place] = lambda v: b.op("Gather", v, b.const(order, np.int64), axis=-2)
    b.output(norm(b, x, dims, s), dims)
    b.note(f"far{row}of{rows}@{place}:{how}")
    return b.case("", False)


__all__ = ["broadcast", "counted", "cut", "far", "frame", "masked"]
