"""``check`` on files that this tool wrote, and on others that hold the same nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy
from tests.half_graphs import text

RNG = np.random.default_rng(2)
WIDTH = 64
X = RNG.standard_normal((64, WIDTH)).astype(np.float32)
BY_HAND = "h = Mul({x}, {x}) v = ReduceMean(h, axes) e = Add(v, eps) s = Sqrt(e) {y} = Div({x}, s)"
WEIGHTS: dict[str, Any] = {
    "gamma": RNG.uniform(0.5, 2, WIDTH),
    "beta": RNG.standard_normal(WIDTH),
    "w1": RNG.standard_normal((WIDTH, WIDTH)) / 8,
}
ROOT: dict[str, Any] = {"axes": np.array([-1]), "eps": np.array(1e-5)}


def block() -> onnx.ModelProto:
    """A layer between two norms, and the residual."""
    body = "n = LayerNormalization(x, gamma, beta) a = MatMul(n, w1) r = Add(a, x) y = RMSNormalization(r, gamma)"
    return text(body, f"float[b,{WIDTH}] x", f"float[b,{WIDTH}] y", 23, **WEIGHTS)


def found(proto: onnx.ModelProto, **options: Any) -> list[tuple[str, str]]:
    (file,) = normdeploy.check([proto], **options).files
    assert not file.error
    return [(p.rule, p.kind) for p in file.findings]


def made(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    result = normdeploy.optimize(proto, **options)
    assert result.proto is not None
    return result.proto


@pytest.mark.parametrize("precision", [None, "fp16", "bf16"])
@pytest.mark.parametrize("fuse", ["standard", "portable"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_what_was_written_for_a_runtime_passes_there(precision: str | None, fuse: str, quantize: str | None) -> None:
    calibrate = [{"x": X}] if quantize or precision else ()
    options: dict[str, Any] = {"precision": precision, "fuse": fuse, "quantize": quantize, "calibrate": calibrate}
    file = made(block(), runtime="tensorrt-rtx", **options)
    assert found(file, runtime="tensorrt-rtx") == []


def test_a_norm_by_hand_is_found_beside_our_ops() -> None:
    file = made(block(), fuse="portable")
    assert [n.domain for n in file.graph.node].count("normdeploy") == 1
    behind = text(BY_HAND.format(x="y", y="z"), f"float[b,{WIDTH}] y", f"float[b,{WIDTH}] z", **ROOT).graph
    file.graph.node.extend(behind.node)
    file.graph.initializer.extend(behind.initializer)
    file.graph.output[0].name = "z"
    assert found(file) == [("decomposed", "RMSNorm")]


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ("y = RMSNormalization(r, gamma)", []),
        (BY_HAND.format(x="r", y="y"), ["decomposed"]),
        ("n2 = RMSNormalization(r, gamma) y = Mul(n2, gamma)", ["decomposed"]),
        ("o = LayerNormalization(r, gamma) y = Add(o, gamma)", ["decomposed"]),
    ],
)
def test_casts_around_a_norm(body: str, rules: list[str]) -> None:
    """One node between Casts is as it should be; what stands in several nodes is not, with Casts or without."""
    casts = f"r = Cast<to = 1>(x) {body.replace('y =', 'f =')} y = Cast<to = 10>(f)"
    constants = {**WEIGHTS, **(ROOT if "axes" in body else {})}
    proto = text(casts, f"float16[b,{WIDTH}] x", f"float16[b,{WIDTH}] y", 23, **constants)
    assert [rule for rule, _ in found(proto)] == rules
