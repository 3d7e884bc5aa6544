"""Write norms of Flax and JAX with jax2onnx.

    python benchmarks/corpus/foreign/write_jax.py FOLDER

Needs jax, flax and jax2onnx, in a separate environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax2onnx import to_onnx
from manifest import FOLDED, GN, IN, LN, RMS, Expect, Saver, Shape

LAST, IMAGE = (None, 5, 16), (None, 6, 7, 8)
rng = np.random.default_rng(4)
rngs = nnx.Rngs(0)
gamma, beta = (jnp.asarray(rng.uniform(0.5, 1.5, 16).astype(np.float32)) for _ in range(2))


def randomised(module: Any) -> Any:
    """Randomize every parameter and statistic, and switch to evaluation mode.

    Returns:
        the module.
    """
    state = nnx.state(module, (nnx.Param, nnx.BatchStat))
    nnx.update(module, jax.tree.map(lambda v: jnp.asarray(rng.uniform(0.5, 1.5, v.shape).astype(np.float32)), state))
    module.eval()
    return module


def moments(x: Any) -> tuple[Any, Any]:
    """Compute mean and variance over the last axis.

    Returns:
        both, with the axis kept.
    """
    return x.mean(-1, keepdims=True), x.var(-1, keepdims=True)


def haiku(x: Any) -> Any:
    """Apply dm-haiku's layer norm: gamma times the inverse root.

    Returns:
        like x.
    """
    mean, variance = moments(x)
    return gamma * jax.lax.rsqrt(variance + 1e-5) * (x - mean) + beta


def fast(x: Any) -> Any:
    """Use Flax's fast variance: E[x²] − E[x]², at least zero.

    Returns:
        like x.
    """
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * gamma) + beta


def power(x: Any) -> Any:
    """Use a power of −1/2.

    Returns:
        like x.
    """
    mean, variance = moments(x)
    return (x - mean) * (variance + 1e-6) ** -0.5


def unbiased(x: Any) -> Any:
    """Use the unbiased variance.

    Returns:
        like x.
    """
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5) * gamma


def gemma(x: Any) -> Any:
    """Apply Gemma's RMS norm.

    Returns:
        like x.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * (1.0 + gamma)).astype(x.dtype)


def outside(x: Any) -> Any:
    """Add epsilon outside the root.

    Returns:
        like x.
    """
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)


def norms() -> list[tuple[str, Shape, Expect, Callable[[Any], Any], str]]:
    """List the norms: name, shape, expectation, function and type.

    Returns:
        rows.
    """
    conv = nnx.Sequential(nnx.Conv(8, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, use_running_average=True, rngs=rngs))
    dense = nnx.Sequential(nnx.Linear(16, 6, rngs=rngs), nnx.BatchNorm(6, use_running_average=True, rngs=rngs))
    return [
        ("nnx LayerNorm", LAST, (LN,), randomised(nnx.LayerNorm(16, rngs=rngs)), "float32"),
        (
            "nnx LayerNorm, slow variance",
            LAST,
            (LN,),
            randomised(nnx.LayerNorm(16, use_fast_variance=False, rngs=rngs)),
            "float32",
        ),
        ("nnx LayerNorm, no bias", LAST, (LN,), randomised(nnx.LayerNorm(16, use_bias=False, rngs=rngs)), "float32"),
        ("nnx RMSNorm", LAST, (RMS,), randomised(nnx.RMSNorm(16, rngs=rngs)), "float32"),
        ("nnx GroupNorm", IMAGE, (GN,), randomised(nnx.GroupNorm(8, num_groups=2, rngs=rngs)), "float32"),
        ("nnx GroupNorm, one group", IMAGE, (LN,), randomised(nnx.GroupNorm(8, num_groups=1, rngs=rngs)), "float32"),
        ("nnx InstanceNorm", IMAGE, (IN,), randomised(nnx.InstanceNorm(8, rngs=rngs)), "float32"),
        ("nnx Conv BatchNorm", IMAGE, (FOLDED,), randomised(conv), "float32"),
        ("nnx Linear BatchNorm", LAST, (FOLDED,), randomised(dense), "float32"),
        (
            "nnx BatchNorm",
            IMAGE,
            (FOLDED,),
            randomised(nnx.BatchNorm(8, use_running_average=True, rngs=rngs)),
            "float32",
        ),
        ("haiku", LAST, (LN,), haiku, "float32"),
        ("fast variance", LAST, (LN,), fast, "float32"),
        ("power", LAST, (LN,), power, "float32"),
        ("unbiased", LAST, (LN,), unbiased, "float32"),
        ("standardize", LAST, (LN,), lambda x: jax.nn.standardize(x, axis=-1), "float32"),
        ("gemma", LAST, (RMS,), gemma, "float32"),
        ("gemma", LAST, (RMS,), gemma, "float16"),
        ("std plus epsilon", LAST, (), outside, "float32"),
        (
            "unit length, clamped",
            LAST,
            (),
            lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6),
            "float32",
        ),
    ]


def main(folder: str) -> None:
    """Write the archive."""
    saver = Saver(folder, "jax2onnx")
    for name, shape, expect, function, dtype in norms():
        # At opset 17 jax2onnx writes ReduceMean of opset 18.
        for opset, sizes in (
            (18, shape),
            (20, (2, *shape[1:])),
            (23, shape),
        ):
            given = jax.ShapeDtypeStruct(sizes, dtype) if None not in sizes else ["B", *sizes[1:]]
            # A shape alone means float32.
            if dtype != "float32" and None in sizes:
                continue
            proto = to_onnx(function, inputs=[given], opset=opset)
            saver.add(name, proto, sizes, expect, dtype)
    saver.finish()


if __name__ == "__main__":
    main(sys.argv[1])
