"""Draw norms without a trap, with neighbors that do not affect the norm."""

from __future__ import annotations

import numpy as np

from .builder import Builder, Case, Dim
from .norms import Spelling, draw, frame, norm


def start(rng: np.random.Generator, half: bool = True) -> Builder:
    """Start a graph with a random opset and type, mostly float32.

    Returns:
        the builder.
    """
    r = rng.random()
    return Builder(rng, dtype=np.float64 if r < 0.08 else np.float16 if half and r < 0.14 else np.float32)


def neighbours(b: Builder, x: str) -> str:
    """Add an op before the norm now and then.

    Returns:
        name of the result.
    """
    r = b.rng.random()
    if r < 0.15:
        return b.op("Add", x, b.param(b.rng.normal()))
    if r < 0.25:
        return b.op(b.pick("Relu", "Tanh", "Neg", "Identity"), x)
    return x


def layer(rng: np.random.Generator) -> Case:
    """Draw a layer norm or RMS norm.

    Returns:
        the case.
    """
    b = start(rng)
    dims, axes = frame(b)
    s = draw(b, axes)
    x = neighbours(b, b.input("x", dims))
    y = norm(b, x, dims, s)
    if b.chance(0.2):
        y = b.op("Add", x, y)
    b.output(y, dims if b.chance(0.7) else None)
    b.note(
        f"{'rms' if s.rms else 'layer'}:{s.mean}:{s.variance}:{s.inverse}:{s.order}"
        f":ddof{s.ddof}:{'out' if s.outside else 'in'}"
    )
    return b.case("", True)


def channels(rng: np.random.Generator) -> Case:
    """Draw a norm over other dims than the last: the channels of NCHW, the batch, or several dims that are not
    adjacent.

    Returns:
        the case.
    """
    b = start(rng)
    c = int(b.pick(2, 3, 4, 6))
    dims: list[Dim] = ["d0", c, b.pick("h", int(b.pick(2, 3))), b.pick("w", int(b.pick(2, 5)))][: b.pick(3, 4)]
    axes = [1 - len(dims)] if b.chance(0.7) else b.pick([-2], [-3, -1], [-len(dims)])
    axes = [a for a in axes if a >= -len(dims)]
    s = draw(b, axes)
    s.order = "plain"
    s.mean = "mean" if s.mean == "matmul" else s.mean
    sizes = [d if isinstance(d, int) and k - len(dims) in axes else 1 for k, d in enumerate(dims)]
    x = b.input("x", dims)
    b.output(norm(b, x, dims, s, affine=sizes), dims)
    b.note(f"axes{axes}:{s.variance}:{s.inverse}")
    return b.case("", True)


def group(rng: np.random.Generator) -> Case:
    """Draw GroupNorm and InstanceNorm by hand, with views or over the dims as they are.

    Returns:
        the case.
    """
    b = start(rng)
    groups, per = int(b.pick(1, 2, 3, 4)), int(b.pick(1, 2, 3))
    c = groups * per
    h, w = b.pick("h", int(b.pick(1, 2, 3))), b.pick("w", int(b.pick(2, 4)))
    dims: list[Dim] = [b.pick("d0", "?0", 2), c, h, w]
    x = neighbours(b, b.input("x", dims))
    instance = b.chance(0.4)
    s = draw(b, [-2, -1] if instance else [-1], rms=False)
    s.gamma = s.beta = False
    s.order, s.mean = "plain", "mean" if s.mean == "matmul" else s.mean
    if instance:
        y = norm(b, x, dims, s)
    else:
        view = b.reshape(x, 0, groups, -1)
        inner: list[Dim] = [dims[0], groups, per * h * w if isinstance(h, int) and isinstance(w, int) else "hw"]
        y = b.op("Reshape", norm(b, view, inner, s), b.op("Shape", x))
    if b.chance(0.7):
        y = b.op("Mul", y, b.param(b.rng.normal(1, 0.5, (c, 1, 1))))
        y = b.op("Add", y, b.param(b.rng.normal(0, 1, (c, 1, 1)))) if b.chance(0.8) else y
    b.output(y, dims)
    b.note(f"{'instance' if instance else f'group{groups}'}:{s.variance}:{s.inverse}:{b.dtype}")
    return b.case("", True)


def nodes(rng: np.random.Generator) -> Case:
    """Draw norm nodes of the standard and of onnxruntime, around and after hand-written norms.

    Returns:
        the case.
    """
    b = Builder(rng, opset=int(rng.integers(17, 22)))
    n = int(b.pick(4, 8))
    dims: list[Dim] = ["d0", "d1", n]
    x = b.input("x", dims)
    gamma, beta = b.param(rng.normal(1, 0.3, n)), b.param(rng.normal(0, 1, n))
    eps = float(b.pick(1e-5, 1e-6, 1e-12))
    kind = b.pick(
        "LayerNormalization",
        "InstanceNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Simplified",
    )
    if kind == "LayerNormalization":
        y = b.op(kind, x, gamma, beta, axis=-1, epsilon=eps)
    elif kind == "InstanceNormalization":
        y = b.op(
            "Transpose", b.op(kind, b.op("Transpose", x, perm=[0, 2, 1]), gamma, beta, epsilon=eps), perm=[0, 2, 1]
        )
    elif kind == "Simplified":
        y = b.op("SimplifiedLayerNormalization", x, gamma, axis=-1, epsilon=eps)
    else:
        skip = b.input("skip", dims)
        extra = [beta] if kind == "SkipLayerNormalization" else []
        outs = b.many(kind, x, skip, gamma, *extra, outputs=1, domain="com.microsoft", epsilon=eps)
        y = outs[0]
    if b.chance(0.5):
        y = norm(b, y, dims, draw(b, [-1]))
    b.output(y, dims)
    b.note(kind)
    return b.case("", True)


__all__ = ["Spelling", "channels", "group", "layer", "neighbours", "nodes", "start"]
