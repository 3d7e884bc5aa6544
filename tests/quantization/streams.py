"""Small transformers with constant weights, to be rotated, and their lookalikes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tests.half_graphs import text

WIDTH, HEADS, HIDDEN, WORDS, PLACES = 24, 2, 20, 15, 6
INPUTS, OUTPUTS = "int64[b,s] ids", f"float[b,s,{WORDS}] y"

NORMS = {
    "layer": "LayerNormalization <axis=-1, epsilon=1e-3> ({x}, g{i}, b{i})",
    "rms": "RMSNormalization <axis=-1, epsilon=1e-3> ({x}, g{i})",
}
ATTENTION = """
    q{i} = MatMul(n{i}, wq{i}) k{i} = MatMul(n{i}, wk{i}) vm{i} = MatMul(n{i}, wv{i}) v{i} = Add(vm{i}, bv{i})
    qh{i} = Reshape(q{i}, heads) kh{i} = Reshape(k{i}, heads) vh{i} = Reshape(v{i}, heads)
    qt{i} = Transpose<perm=[0, 2, 1, 3]>(qh{i}) kt{i} = Transpose<perm=[0, 2, 3, 1]>(kh{i})
    vt{i} = Transpose<perm=[0, 2, 1, 3]>(vh{i})
    s{i} = MatMul(qt{i}, kt{i}) p{i} = Softmax<axis=-1>(s{i}) o{i} = MatMul(p{i}, vt{i})
    ot{i} = Transpose<perm=[0, 2, 1, 3]>(o{i}) of{i} = Reshape(ot{i}, flat)
    a{i} = MatMul(of{i}, wo{i})
"""
FEED = """
    um{i} = MatMul(n{i}, wu{i}) u{i} = Add(um{i}, bu{i}) h{i} = Tanh(u{i})
    dm{i} = MatMul(h{i}, wd{i}) a{i} = Add(dm{i}, bd{i})
"""


def weights(norm: str, seed: int = 3) -> dict[str, Any]:
    """Of `transformer`."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[0])

    w: dict[str, Any] = {"table": rng.standard_normal((WORDS, WIDTH)) + 0.5, "head": drawn(WIDTH, WORDS)}
    w |= {"heads": np.array([0, 0, HEADS, WIDTH // HEADS]), "flat": np.array([0, 0, WIDTH])}
    for i in (0, 1, 2):
        w[f"g{i}"] = rng.uniform(0.5, 2, WIDTH) * rng.choice([-1, 1], WIDTH)
        if norm == "layer":
            w[f"b{i}"] = rng.standard_normal(WIDTH)
    w |= {f"w{x}0": drawn(WIDTH, WIDTH) for x in "qkvo"} | {"bv0": rng.standard_normal(WIDTH)}
    w |= {"wu1": drawn(WIDTH, HIDDEN), "bu1": drawn(HIDDEN), "wd1": drawn(HIDDEN, WIDTH), "bd1": 1 + drawn(WIDTH)}
    return w


def parts(norm: str) -> dict[str, str]:
    """The nodes of a transformer with its norms in front, by what they are; a test may put others in their place."""
    n = NORMS[norm]
    return {
        "embedding": "x0 = Gather(table, ids)",
        "attention norm": "n0 = " + n.format(x="x0", i=0),
        "attention": ATTENTION.format(i=0),
        "first sum": "x1 = Add(x0, a0)",
        "feed norm": "n1 = " + n.format(x="x1", i=1),
        "feed": FEED.format(i=1),
        "second sum": "x2 = Add(x1, a1)",
        "last norm": "n2 = " + n.format(x="x2", i=2),
        "head": "y = MatMul(n2, head)",
    }


def transformer(
    norm: str,
    changed: dict[str, str] | None = None,
    inputs: str = INPUTS,
    outputs: str = OUTPUTS,
    more: dict[str, Any] | None = None,
    opset: int = 23,
) -> onnx.ModelProto:
    """One of a single layer. ``changed``: of `parts`. ``more``: weights besides."""
    body = " ".join((parts(norm) | (changed or {})).values())
    proto = text(body, inputs, outputs, opset, **(weights(norm) | (more or {})))
    return proto
