"""Transformers with ops drawn at random into their residual streams: what commutes with a rotation, and what only looks
like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tests.quantization.streams import FEED, INPUTS, OUTPUTS, WIDTH, transformer

_ROW = " w{n} = Cast<to=1>(ids) v{n} = Unsqueeze(w{n}, three) t{n} = Sigmoid(v{n}) "
_MIX = _ROW + "u{n} = Transpose<perm=[0, 2, 1]>(t{n}) p{n} = MatMul(t{n}, u{n}) "

# {x} to {y}; whether the map may be handed on is not said: whatever is made is judged by its answers
OPS = (
    "{y} = Identity({x})",
    "a{n} = Transpose<perm=[1, 0, 2]>({x}) {y} = Transpose<perm=[1, 0, 2]>(a{n})",
    "a{n} = Transpose<perm=[0, 2, 1]>({x}) {y} = Transpose<perm=[0, 2, 1]>(a{n})",
    "a{n} = Reshape({x}, rows) s{n} = Shape({x}) {y} = Reshape(a{n}, s{n})",
    "a{n} = Reshape({x}, cut) b{n} = Transpose<perm=[0, 2, 1, 3]>(a{n}) c{n} = Transpose<perm=[0, 2, 1, 3]>(b{n})"
    " {y} = Reshape(c{n}, joined)",
    "a{n} = Reshape({x}, cut) b{n} = Transpose<perm=[0, 1, 3, 2]>(a{n}) {y} = Reshape(b{n}, joined)",
    "a{n} = Reshape({x}, cut) b{n} = Gather<axis=2>(a{n}, swap) {y} = Reshape(b{n}, joined)",
    "a{n} = Unsqueeze({x}, one1) {y} = Squeeze(a{n}, one1)",
    "a{n} = Concat<axis=0>({x}, {x}) {y} = Slice(a{n}, zero1, from1, zero1)",
    "a{n} = Slice({x}, from1, all1, two1) b{n} = Slice({x}, zero1, from1, two1) {y} = Concat<axis=2>(a{n}, b{n})",
    "{y} = Mul({x}, half)",
    "{y} = Div({x}, half)",
    "{y} = Div(half, {x})",
    "{y} = Mul({x}, channels)",
    "{y} = Add({x}, channels)",
    "{y} = Sub(channels, {x})",
    "{y} = Add({x}, half)",
    "{y} = Sum({x}, {x}, channels)",
    "{y} = Relu({x})",
    "a{n} = ReduceMean({x}, two1) {y} = Sub({x}, a{n})",
    "a{n} = ReduceMean({x}, one1) {y} = Add({x}, a{n})",
    "a{n} = MatMul({x}, square) {y} = Add({x}, a{n})",
    "{y} = MatMul({x}, square)",
    "a{n} = Tanh({x}) {y} = Add({x}, a{n})",
    _ROW + "{y} = Mul({x}, t{n})",
    _ROW + "{y} = Add({x}, t{n})",
    _MIX + "{y} = MatMul(p{n}, {x})",
    "a{n} = Transpose<perm=[0, 2, 1]>({x}) b{n} = MatMul({x}, a{n}) {y} = MatMul(b{n}, {x})",
    "{y} = RMSNormalization({x}, ones)",
    "{y} = RMSNormalization({x}, g1)",
    "a{n} = Softmax<axis=1>({x}) {y} = Add({x}, a{n})",
    "{y} = Expand({x}, ones1)",
)


def drawn(seed: int) -> onnx.ModelProto:
    """ids (b, s) to scores; the norms all layer norms or all RMS norms, now and then one of the other kind."""
    rng = np.random.default_rng([71, seed])
    norm = "layer" if rng.random() < 0.5 else "rms"
    changed: dict[str, str] = {}
    if rng.random() < 0.15:
        changed["last norm"] = "n2 = RMSNormalization(x2, g2)"
    if rng.random() < 0.2:
        changed["head"] = "tied = Transpose<perm=[1, 0]>(table) y = MatMul(n2, tied)"
    places = {"first sum": "{y} = Add(x0, a0)", "second sum": "{y} = Add(x1, a1)"}
    for number, (name, text) in enumerate(places.items()):
        if rng.random() < 0.7:
            op = OPS[rng.integers(len(OPS))].format(x=f"z{number}", y=f"x{number + 1}", n=f"_{number}")
            changed[name] = f"{text.format(y=f'z{number}')} {op}"
    if rng.random() < 0.2:  # on what a layer is to write
        op = OPS[rng.integers(len(OPS))].format(x="f1", y="a1", n="_f")
        changed["feed"] = FEED.format(i=1).replace("a1 = Add(dm1, bd1)", f"f1 = Add(dm1, bd1) {op}")
    if rng.random() < 0.2:  # on what a norm gives
        op = OPS[rng.integers(len(OPS))].format(x="m1", y="n1", n="_n")
        own = "LayerNormalization(x1, g1, b1)" if norm == "layer" else "RMSNormalization(x1, ones)"
        changed["feed norm"] = f"m1 = {own} {op}"
    more: dict[str, Any] = {
        "half": np.array(0.7, np.float32),
        "channels": rng.uniform(0.5, 1.5, WIDTH),
        "square": rng.standard_normal((WIDTH, WIDTH)) / 5,
        "ones": np.ones(WIDTH),
        "rows": np.array([-1, WIDTH]),
        "cut": np.array([0, 0, 2, WIDTH // 2]),
        "joined": np.array([0, 0, WIDTH]),
        "swap": np.array([1, 0]),
        "zero1": np.array([0]),
        "one1": np.array([1]),
        "two1": np.array([2]),
        "three": np.array([2]),
        "from1": np.array([1]),
        "all1": np.array([2**40]),
        "ones1": np.array([1, 1, 1]),
    }
    return transformer(norm, changed, INPUTS, OUTPUTS, more)
