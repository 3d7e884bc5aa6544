"""Draw traps made of identities that hold for rational functions but not for all numbers.

They use poles, roots of negative numbers, 0 · NaN, and |t| instead of t.

Both sides are equal as rational functions, so a proof in a field alone does not see the difference. At single points,
or for one sign, the original returns NaN or the other root.
"""

from __future__ import annotations

import numpy as np

from .builder import Builder, Case, Dim
from .norms import draw, norm
from .values import Trap, some_number, trapped_norm
from .whole import start


def _far(b: Builder) -> float:
    """Draw a positive number that ordinary inputs do not reach, but the judge's inputs do."""
    k = abs(some_number(b)) + 12.0
    b.numbers += [-k, k, 1.5 * k, -1.5 * k]
    return k


def removable(b: Builder, t: str) -> str:
    """Compute (t − c)(t + c)/(t − c) − c: 0/0 at c.

    Returns:
        name of the result.
    """
    c = some_number(b)
    b.numbers += [c, -c]
    low, high = b.op("Sub", t, b.const(c)), b.op("Add", t, b.const(c))
    if b.chance(0.5):
        return b.op("Sub", b.op("Div", b.op("Mul", low, high), low), b.const(c))
    return b.op("Mul", t, b.op("Mul", low, b.op("Reciprocal", low)))


def root_squared(b: Builder, t: str) -> str:
    """Compute sqrt(t + K)² − K: NaN below −K.

    Returns:
        name of the result.
    """
    k = _far(b)
    up = b.op("Add", t, b.param(k))
    how = b.rng.integers(4)
    if how == 0:
        root = b.op("Sqrt", up)
        square = b.op("Mul", root, root)
    elif how == 1:
        square = b.op("Pow", b.op("Sqrt", up), b.const(2.0))
    elif how == 2:
        square = b.op("Div", b.op("Pow", up, b.const(1.5)), b.op("Sqrt", up))
    else:
        square = b.op("Exp", b.op("Log", up))
    return b.op("Sub", square, b.param(k))


def absolute(b: Builder, t: str) -> str:
    """Compute sqrt((t + K)²) − K: another branch below −K.

    Returns:
        name of the result.
    """
    k = _far(b)
    up = b.op("Add", t, b.param(k))
    how = b.rng.integers(4)
    if how == 0:
        size = b.op("Sqrt", b.op("Mul", up, up))
    elif how == 1:
        size = b.op("Pow", b.op("Pow", up, b.const(2.0)), b.const(0.5))
    elif how == 2:
        size = b.op("Div", b.op("Mul", up, up), b.op("Sqrt", b.op("Mul", up, up)))
    else:
        size = (
            b.op("ReduceL2", b.unsqueeze(up, 0), keepdims=0, axes=[0])
            if b.opset < 18
            else b.op("Sqrt", b.op("Pow", up, b.const(2.0)))
        )
    return b.op("Sub", size, b.param(k))


def by_itself(b: Builder, t: str) -> str:
    """Compute t·s/s with an s that is zero for some rows: its largest element, itself, its distance from a mean.

    Returns:
        name of the result.
    """
    how = b.rng.integers(5)
    if how == 0:
        # Not the sum: that of a normalized row is zero except for rounding.
        s = b.reduce("ReduceMax", t, [-1])
    elif how == 1:
        s = t
    elif how == 2:
        d = b.op("Sub", t, b.reduce("ReduceMean", t, [-1]))
        s = b.reduce("ReduceMean", b.op("Mul", d, d), [-1])
    elif how == 3:
        s = b.reduce("ReduceL2", t, [-1])
    else:
        s = b.slice(t, 0, 1, -1)
    if b.chance(0.5):
        return b.op("Div", b.op("Mul", t, s), s)
    return b.op("Mul", t, b.op("Div", s, s))


def no_change(b: Builder, t: str) -> str:
    """Add a difference that is zero wherever both terms are numbers.

    Returns:
        name of the result.
    """
    how = b.rng.integers(5)
    if how == 0:
        s = b.op("Sqrt", b.op("Add", t, b.const(_far(b))))
    elif how == 1:
        s = b.op("Reciprocal", b.op("Sub", t, b.number(some_number(b))))
    elif how == 2:
        s = b.op("Log", b.op("Add", t, b.const(_far(b))))
    elif how == 3:
        s = b.op("Pow", b.op("Add", t, b.const(_far(b))), b.const(-0.5))
    else:
        s = b.op("Div", b.const(1.0), b.slice(t, 0, 1, -1))
    return b.op("Add", t, b.op("Sub", s, s)) if b.chance(0.5) else b.op("Add", t, b.op("Mul", s, b.const(0.0)))


POLES: tuple[Trap, ...] = (removable, root_squared, absolute, by_itself, no_change)


def poles(rng: np.random.Generator) -> Case:
    """Draw a norm with one of these identities.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    trapped_norm(b, b.pick(*POLES), ("x", "x", "d", "variance", "square", "root", "normed", "scaled", "y", "gamma"))
    return b.case("", False)


def selection(rng: np.random.Generator) -> Case:
    """Draw moves and group means as products with 0/1 matrices: a NaN spoils the whole row, but a move or a GroupNorm
    only a part.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    groups, per = int(b.pick(2, 3)), int(b.pick(2, 3, 4))
    n = groups * per
    dims: list[Dim] = ["d0", n] if b.chance(0.6) else ["d0", "d1", n]
    x = b.input("x", dims)
    block = np.kron(np.eye(groups), np.full((per, per), 1 / per))
    how = b.rng.integers(4)
    # The means of groups by one product.
    if how == 0:
        d = b.op("Sub", x, b.op("MatMul", x, b.param(block)))
        v = b.op("MatMul", b.op("Mul", d, d), b.param(block))
        y = b.op("Div", d, b.op("Sqrt", b.op("Add", v, b.param(1e-5))))
    else:
        order = np.arange(n) if how == 1 else b.rng.permutation(n)
        v = b.op("MatMul", x, b.const(np.eye(n)[order].T))
        # Only half of the row is normalized.
        if how == 3:
            v = b.op("MatMul", x, b.const(np.eye(n)[:, :per]))
            split = b.op("Sub", v, b.reduce("ReduceMean", v, [-1]))
        else:
            shape = b.op("Shape", v)
            v = b.reshape(v, *[0] * (len(dims) - 1), groups, per)
            split = b.op("Sub", v, b.reduce("ReduceMean", v, [-1]))
        square = b.reduce("ReduceMean", b.op("Mul", split, split), [-1])
        y = b.op("Div", split, b.op("Sqrt", b.op("Add", square, b.param(1e-5))))
        y = y if how == 3 else b.op("Reshape", y, shape)
    if how != 3 and b.chance(0.6):
        y = b.op("Add", b.op("Mul", y, b.param(rng.normal(1, 0.3, n))), b.param(rng.normal(size=n)))
    b.output(y, [*dims[:-1], per if how == 3 else n])
    b.note(f"selection{how}")
    return b.case("", False)


def negative(rng: np.random.Generator) -> Case:
    """Draw a negative epsilon, or a sum of squares with a negative weight: NaN for a negative radicand.

    Returns:
        the case.
    """
    b = start(rng, half=False)
    dims: list[Dim] = ["d0", int(b.pick(3, 4, 8))]
    s = draw(b, [-1])
    s.order, s.outside = "plain", False
    if b.chance(0.5):
        s.eps = float(b.pick(-1e-3, -1e-5, -0.1))
    else:
        row = np.ones(int(dims[1]))
        row[-1] = b.pick(-1e-6, -1e-9, -0.5, 0.0)
        s.variance, s.ddof = "mul", 0
        s.hooks["square"] = lambda v: b.op("Mul", v, b.const(row))
    x = b.input("x", dims)
    b.output(norm(b, x, dims, s))
    b.note(f"negative{s.eps:.0e}")
    return b.case("", False)
