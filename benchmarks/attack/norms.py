"""Draw hand-written norms in many spellings, with hooks at which a trap can be inserted.

A hook is a function from tensor to tensor. The names of the hooks are:

- ``x``: on the input.
- ``d``: x − mean.
- ``square``, ``variance``, ``root``, ``normed``, ``scaled``: inside the norm.
- ``y``: on the result.
- ``gamma``: on the parameter.
- ``count``: on the number of elements as a float tensor, if the spelling divides by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .builder import Builder, Dim

Hook = Callable[[str], str]
PLACES = ("x", "d", "square", "variance", "root", "normed", "scaled", "y")


@dataclass
class Spelling:
    """Choices for one norm.

    Attributes:
        rms: True for a norm without a mean.
        ddof: 1 for an unbiased variance.
        outside: True if ε is added to the root.
    """

    axes: tuple[int, ...]
    rms: bool = False
    eps: float = 1e-5
    ddof: int = 0
    outside: bool = False
    gamma: bool = True
    beta: bool = True
    mean: str = "mean"
    variance: str = "pow"
    inverse: str = "div_sqrt"
    order: str = "plain"
    hooks: dict[str, Hook] = field(default_factory=dict)

    def at(self, place: str, tensor: str) -> str:
        """Apply the hook of a place.

        Returns:
            name of the result.
        """
        hook = self.hooks.get(place)
        return tensor if hook is None else hook(tensor)


def draw(b: Builder, axes: Sequence[int], rms: bool | None = None) -> Spelling:
    """Draw a spelling; half precision uses only an epsilon that it can represent.

    Returns:
        the spelling.
    """
    s = Spelling(tuple(axes))
    s.rms = b.chance(0.3) if rms is None else rms
    s.eps = b.pick(1e-5, 1e-6, 1e-12, 1e-3, 1e-5) if b.dtype != np.float16 else b.pick(1e-3, 1e-5)
    s.ddof = int(not s.rms and b.chance(0.12))
    s.outside = b.chance(0.08)
    s.gamma, s.beta = b.chance(0.75), b.chance(0.6) and not s.rms
    s.mean = b.pick("mean", "mean", "mean", "sum_shape", "sum_const", "times", "matmul")
    forms = ["pow", "mul", "sumsq", "l2", "sum_shape", "sum_const", "times"]
    s.variance = b.pick("pow", *forms) if s.rms or s.ddof else b.pick("pow", "expect", "flax", *forms)
    s.inverse = b.pick("div_sqrt", "div_sqrt", "recip_sqrt", "pow_minus", "div_pow", "sqrt_recip", "explog", "one_over")
    s.order = b.pick("plain", "plain", "plain", "scale_first", "tensorflow")
    return s


def count(b: Builder, x: str, axes: Sequence[int], static: int | None, s: Spelling, wish: str) -> str:
    """Count the elements as a float scalar or vector: a constant if the size is static and ``wish`` allows, else from
    Shape.

    Returns:
        name of the result.
    """
    if static is not None and wish != "sum_shape":
        n = b.const(float(static))
    elif len(axes) == 1 and b.chance(0.5):
        n = b.cast(b.size_of(x, axes[0], scalar=b.chance(0.5)), b.dtype)
    else:
        dims = b.op("Gather", b.op("Shape", x), b.ints(*axes), axis=0)
        kind = b.op("ReduceProd", dims, keepdims=0)
        n = b.cast(kind, b.dtype)
    return s.at("count", n)


def average(b: Builder, x: str, s: Spelling, static: int | None, how: str, last_only: bool) -> str:
    """Compute the mean in one of its spellings.

    Returns:
        name of the result.
    """
    if how == "matmul" and last_only and static is not None:
        return b.op("MatMul", x, b.param(np.full((static, 1), 1 / static)))
    if how == "times" and static is not None:
        return b.op("Mul", b.reduce("ReduceSum", x, s.axes), b.param(1 / static))
    if how in ("sum_shape", "sum_const"):
        return b.op("Div", b.reduce("ReduceSum", x, s.axes), count(b, x, s.axes, static, s, how))
    return b.reduce("ReduceMean", x, s.axes)


def second(b: Builder, x: str, d: str, m: str | None, s: Spelling, static: int | None) -> str:
    """Compute the variance about the mean, or the mean square for a norm without a mean.

    Returns:
        name of the result.
    """
    if s.ddof:
        total = b.reduce("ReduceSum", s.at("square", b.op("Mul", d, d)), s.axes)
        n = count(b, x, s.axes, static, s, b.pick("sum_shape", "sum_const"))
        return b.op("Div", total, b.op("Sub", n, b.const(1.0)))
    if s.variance in ("expect", "flax") and m is not None:
        v = b.op("Sub", average(b, s.at("square", b.op("Mul", x, x)), s, static, "mean", False), b.op("Mul", m, m))
        return v if s.variance == "expect" else b.pick(lambda: b.op("Relu", v), lambda: b.op("Max", b.const(0.0), v))()
    if s.variance == "sumsq":
        return b.op("Div", b.reduce("ReduceSumSquare", d, s.axes), count(b, x, s.axes, static, s, "sum_const"))
    if s.variance == "l2":
        norm = b.reduce("ReduceL2", d, s.axes)
        return b.op("Div", b.op("Mul", norm, norm), count(b, x, s.axes, static, s, "sum_const"))
    square = b.op("Mul", d, d) if s.variance in ("mul", "times") else b.op("Pow", d, b.const(2.0))
    return average(b, s.at("square", square), s, static, s.variance, False)


def normed(b: Builder, d: str, v: str, s: Spelling) -> tuple[str, str | None]:
    """Divide ``d`` by its deviation.

    Returns:
        name of the result, and of the factor if the spelling has one.
    """
    if s.outside:
        root = b.op("Add", s.at("root", b.op("Sqrt", v)), b.param(s.eps))
        return b.op("Div", d, root), None
    shifted = b.op("Add", v, b.param(s.eps)) if s.eps else v
    if s.inverse == "div_pow":
        return b.op("Div", d, s.at("root", b.op("Pow", shifted, b.const(0.5)))), None
    if s.inverse == "div_sqrt":
        return b.op("Div", d, s.at("root", b.op("Sqrt", shifted))), None
    if s.inverse == "pow_minus":
        factor = b.op("Pow", shifted, b.const(-0.5))
    elif s.inverse == "sqrt_recip":
        factor = b.op("Sqrt", b.op("Reciprocal", shifted))
    elif s.inverse == "explog":
        factor = b.op("Exp", b.op("Mul", b.op("Log", shifted), b.const(-0.5)))
    elif s.inverse == "one_over":
        factor = b.op("Div", b.const(1.0), s.at("root", b.op("Sqrt", shifted)))
    else:
        factor = b.op("Reciprocal", s.at("root", b.op("Sqrt", shifted)))
    return b.op("Mul", d, factor), factor


def norm(b: Builder, x: str, dims: Sequence[Dim], s: Spelling, affine: Sequence[int] | None = None) -> str:
    """Normalize ``x`` over ``s.axes`` (negative), with gamma and beta of shape ``affine`` (default: the normalized
    sizes).

    Returns:
        name of the result.
    """
    sizes = [dims[a] for a in s.axes]
    static = int(np.prod([int(n) for n in sizes])) if all(isinstance(n, int) for n in sizes) else None
    last_only = s.axes == (-1,)
    x = s.at("x", x)
    m = None if s.rms else average(b, x, s, static, s.mean, last_only)
    d = x if m is None else s.at("d", b.op("Sub", x, m))
    v = s.at("variance", second(b, x, d, m, s, static))
    shape = affine if affine is not None else [n if isinstance(n, int) else 1 for n in sizes]
    gamma_value = b.rng.normal(1, 0.5, shape)
    gamma = None
    if s.gamma:
        gamma = b.op("Add", b.param(gamma_value - 1), b.param(1.0)) if b.chance(0.15) else b.param(gamma_value)
        gamma = s.at("gamma", gamma)
    beta = b.param(b.rng.normal(0, 1, shape)) if s.beta else None
    if s.order == "tensorflow" and m is not None and not s.outside and not s.hooks.keys() & {"d", "normed", "scaled"}:
        _, factor = normed(b, d, v, Spelling(s.axes, eps=s.eps, inverse="recip_sqrt", hooks=s.hooks))
        # Only the factor is used.
        b.nodes.pop()
        factor = factor if gamma is None else b.op("Mul", factor, gamma)  # type: ignore[arg-type]
        moved = b.op("Mul", m, factor)  # type: ignore[arg-type]
        shift = b.op("Neg", moved) if beta is None else b.op("Sub", beta, moved)
        return s.at("y", b.op("Add", b.op("Mul", x, factor), shift))  # type: ignore[arg-type]
    if s.order == "scale_first" and gamma is not None and not s.outside:
        y, _ = normed(b, b.op("Mul", d, gamma), v, s)
    else:
        y, _ = normed(b, d, v, s)
        y = s.at("normed", y)
        if gamma is not None:
            y = b.op("Mul", gamma, y) if b.chance(0.5) else b.op("Mul", y, gamma)
    y = s.at("scaled", y)
    if beta is not None:
        y = b.op("Add", y, beta)
    return s.at("y", y)


def frame(b: Builder, dynamic_last: bool | None = None) -> tuple[list[Dim], list[int]]:
    """Draw dims of an input, and the axes of a layer or RMS norm over its last ones.

    Returns:
        dims and axes.
    """
    rank = b.pick(2, 2, 3, 3, 4)
    dims: list[Dim] = []
    for k in range(rank - 1):
        dims.append(b.pick(f"d{k}", f"?{k}", f"d{k}", int(b.rng.integers(1, 5))))
    last: Dim = int(b.pick(3, 4, 8, 12, 16))
    if dynamic_last or (dynamic_last is None and b.chance(0.15)):
        last = b.pick("n", "?n")
    dims.append(last)
    axes = [-1]
    if rank > 2 and b.chance(0.2):
        axes = [-2, -1]
    return dims, axes
