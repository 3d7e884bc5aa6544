"""Draw linear ops of every kind, and batch norms as a node or in several hand-written spellings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .builder import Builder, Dim


@dataclass
class Statistics:
    """Parameters of a BatchNorm over c channels."""

    mean: np.ndarray
    var: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    eps: float = 1e-5


@dataclass
class Linear:
    """Linear op with output ``out`` [.., c at ``axis``, ..] of rank ``rank``."""

    x: str
    out: str
    c: int
    axis: int
    rank: int
    dims: list[Dim] = field(default_factory=list)


def statistics(b: Builder, c: int) -> Statistics:
    """Draw the parameters of a BatchNorm.

    Returns:
        the parameters.
    """
    r = b.rng
    return Statistics(
        r.normal(0, 1, c), r.uniform(0.2, 3, c), r.normal(1, 0.5, c), r.normal(0, 1, c), float(b.pick(1e-5, 1e-3, 1e-6))
    )


def batch_norm(b: Builder, z: str, s: Statistics, axis: int, rank: int) -> str:
    """Add a BatchNorm: as the node if the channels are at axis 1, or by hand in several spellings.

    Returns:
        name of the result.
    """
    c = len(s.mean)
    if axis == 1 and b.chance(0.5):
        given = [b.param(v) for v in (s.gamma, s.beta, s.mean, s.var)]
        return b.op("BatchNormalization", z, *given, epsilon=s.eps)
    shape = [c] + [1] * (rank - axis - 1)
    gamma, beta, mean, var = (v.reshape(shape) for v in (s.gamma, s.beta, s.mean, s.var))
    std = np.sqrt(var + s.eps)
    how = b.rng.integers(6)
    if how == 0:
        root = b.op("Sqrt", b.op("Add", b.param(var), b.param(s.eps)))
        y = b.op("Div", b.op("Sub", z, b.param(mean)), root)
        return b.op("Add", b.op("Mul", y, b.param(gamma)), b.param(beta))
    if how == 1:
        return b.op("Add", b.op("Mul", z, b.param(gamma / std)), b.param(beta - gamma * mean / std))
    if how == 2:
        factor = b.op(
            "Mul", b.op("Reciprocal", b.op("Sqrt", b.op("Add", b.param(var), b.const(s.eps)))), b.param(gamma)
        )
        return b.op("Add", b.op("Mul", z, factor), b.op("Sub", b.param(beta), b.op("Mul", b.param(mean), factor)))
    if how == 3:
        factor = b.op("Pow", b.op("Add", b.param(var), b.param(s.eps)), b.const(-0.5))
        return b.op(
            "Add", b.op("Mul", b.op("Mul", b.op("Sub", z, b.param(mean)), factor), b.param(gamma)), b.param(beta)
        )
    y = b.op("Div", b.op("Sub", z, b.param(mean)), b.param(std))
    return y if how == 4 else b.op("Add", b.op("Mul", b.param(gamma), y), b.param(beta))


def conv(
    b: Builder, x: str, c_in: int, c_out: int, spatial: int, transpose: bool, weight: np.ndarray | None = None
) -> str:
    """Add a convolution.

    Returns:
        name of the result.
    """
    groups = int(b.pick(1, 1, np.gcd(c_in, c_out)))
    k = [int(b.pick(1, 2, 3)) for _ in range(spatial)]
    attributes: dict[str, Any] = {
        "group": groups,
        "kernel_shape": k,
        "strides": [int(b.pick(1, 1, 2)) for _ in k],
        "dilations": [int(b.pick(1, 1, 2)) for _ in k],
        "pads": [int(b.pick(0, 1)) for _ in k] * 2 if b.chance(0.5) else [0] * 2 * spatial,
    }
    shape = (c_in, c_out // groups, *k) if transpose else (c_out, c_in // groups, *k)
    w = b.rng.normal(size=shape) * 0.5 if weight is None else weight
    bias = [b.param(b.rng.normal(size=c_out))] if b.chance(0.6) else []
    return b.op("ConvTranspose" if transpose else "Conv", x, b.param(w), *bias, **attributes)


def linear(
    b: Builder, kinds: tuple[str, ...] = ("conv", "conv", "convtranspose", "matmul", "gemm", "matmul3")
) -> Linear:
    """Add an input and a linear op.

    Returns:
        the op.
    """
    kind = b.pick(*kinds)
    c_in, c = int(b.pick(2, 3, 4)), int(b.pick(2, 4, 6))
    b.note(kind)
    if kind in ("conv", "convtranspose"):
        spatial = int(b.pick(1, 2, 2))
        dims: list[Dim] = ["d0", c_in, b.pick("h", "?h", 7), 6][: 2 + spatial]
        if isinstance(dims[2], str):
            b.sizes[dims[2]] = [5, 7, 9, 16]
        x = b.input("x", dims)
        b.channel = 1
        return Linear(x, conv(b, x, c_in, c, spatial, kind == "convtranspose"), c, 1, 2 + spatial, dims)
    dims = ["d0", "d1", c_in] if kind == "matmul3" else [b.pick("d0", "?0"), c_in]
    x = b.input("x", dims)
    w = b.rng.normal(size=(c_in, c))
    if kind == "gemm":
        turned = b.chance(0.5)
        alpha, beta = float(b.pick(1.0, 0.5)), float(b.pick(1.0, 2.0))
        bias = [b.param(b.rng.normal(size=c))] if b.chance(0.7) else []
        out = b.op("Gemm", x, b.param(w.T if turned else w), *bias, transB=int(turned), alpha=alpha, beta=beta)
    else:
        out = b.op("MatMul", x, b.param(w))
        out = b.op("Add", out, b.param(b.rng.normal(size=c))) if b.chance(0.6) else out
    return Linear(x, out, c, len(dims) - 1, len(dims), dims)


def viewed(b: Builder, at: Linear) -> tuple[str, int, int]:
    """Add a view.

    Returns:
        the tensor, its channel axis and its rank.
    """
    how = b.rng.integers(5)
    if how == 0 and at.rank == 3 and at.axis == 2:
        return b.op("Transpose", at.out, perm=[0, 2, 1]), 1, 3
    if how == 1 and at.axis == 1:
        return b.reshape(at.out, 0, at.c, -1), 1, 3
    if how == 2:
        return b.unsqueeze(at.out, 0), at.axis + 1, at.rank + 1
    if how == 3 and at.axis == at.rank - 1:
        return b.reshape(at.out, -1, at.c), 1, 2
    return at.out, at.axis, at.rank
