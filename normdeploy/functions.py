"""This project's own ops (domain ``normdeploy``): norms that no standard node can say, each with a function body in standard ops.

They are written on request (``--fuse portable``). The body is part of the file, so that every runtime runs it; where a fused kernel of the
same name is at hand, that takes its place. All of them normalize over ``axes``, the trailing ones, take one scale (and bias) that
broadcasts to X, and compute in the type ``stash_type`` (1: float32, 11: float64), from which the result alone is rounded to X's:

    RMSNorm    X / sqrt(mean(X²) + epsilon) · scale                                  (ONNX has it from opset 23 on)
    LayerNorm  (X − mean) / sqrt(Σ(X − mean)²/(n − ddof) + epsilon) · scale + bias   (torch.var without arguments, n dynamic)
    StdNorm    (X − mean) / (sqrt(Σ(X − mean)²/(n − ddof)) + epsilon) · scale + bias
               (Rush, "The Annotated Transformer", 2018: a·(x − mean)/(std + eps) + b)

No op bears a standard one's name: TensorRT's parser goes by the name alone, and takes its own op and that one's attributes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnx
import onnx.parser

from . import evaluate

DOMAIN, VERSION = "normdeploy", 1
OLDEST = 17  # the first opset for which the bodies are written

_EPSILON = "given = Constant <value_float: float = @epsilon> () small = Cast <to: int = @stash_type> (given)"
_SCALED = "wide = Cast <to: int = @stash_type> (scale) scaled = Mul (normal, wide)"
_SHIFTED = f"{_SCALED} shift = Cast <to: int = @stash_type> (bias) shifted = Add (scaled, shift) Y = CastLike (shifted, X)"
_CENTERED = f"""
    x = Cast <to: int = @stash_type> (X)
    {{mean}} d = Sub (x, mean) q = Mul (d, d)
    {{biased}}
    counted = Shape (X) over = Constant <value_ints: ints = @axes> () each = Gather (counted, over)
    n = ReduceProd <keepdims: int = 0> (each) ddof = Constant <value_int: int = @ddof> () less = Sub (n, ddof)
    many = Cast <to: int = @stash_type> (n) fewer = Cast <to: int = @stash_type> (less) factor = Div (many, fewer)
    variance = Mul (biased, factor) {_EPSILON}"""

# op -> (attributes, inputs, body); {mean} and {biased} are means over the axes of x and of q, which each opset writes in its way
_BODIES: dict[str, tuple[str, str, str]] = {
    "RMSNorm": (  # onnxruntime makes one kernel of this; of Mul (x, x) it would not
        "axes, epsilon, stash_type",
        "X, scale",
        "x = Cast <to: int = @stash_type> (X) of = Constant <value_float: float = 2.0> () two = Cast <to: int = @stash_type> (of)"
        f" q = Pow (x, two) {{biased}} {_EPSILON} e = Add (biased, small) r = Sqrt (e) normal = Div (x, r) {_SCALED}"
        " Y = CastLike (scaled, X)",
    ),
    "LayerNorm": (
        "axes, epsilon, ddof, stash_type",
        "X, scale, bias",
        f"{_CENTERED} e = Add (variance, small) r = Sqrt (e) normal = Div (d, r) {_SHIFTED}",
    ),
    "StdNorm": (
        "axes, epsilon, ddof, stash_type",
        "X, scale, bias",
        f"{_CENTERED} s = Sqrt (variance) r = Add (s, small) normal = Div (d, r) {_SHIFTED}",
    ),
}
OPS = frozenset(_BODIES)


@lru_cache
def body(op: str, opset: int) -> onnx.FunctionProto:
    """The function of one of our ops for a file of the given opset (17 or above); don't write into it."""
    attributes, inputs, text = _BODIES[op]

    def mean(of: str, to: str) -> str:
        if opset < 18:
            return f"{to} = ReduceMean <axes: ints = @axes, keepdims: int = 1> ({of})"
        return f"along_{to} = Constant <value_ints: ints = @axes> () {to} = ReduceMean <keepdims: int = 1> ({of}, along_{to})"

    text = text.replace("{mean}", mean("x", "mean")).replace("{biased}", mean("q", "biased"))
    head = f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">'
    function = onnx.parser.parse_function(f"{head} {op} <{attributes}> ({inputs}) => (Y) {{ {text} }}")
    for node in function.node:
        node.ClearField("domain")  # the parser writes the default one, other tools leave it out
    return function


def reference(
    op: str, x: np.ndarray, scale: np.ndarray, bias: np.ndarray | float = 0.0, *, axes: Sequence[int], epsilon: float, ddof: int = 0
) -> np.ndarray:
    """The formula at the top of this module, in float64. ``x``: any shape; ``axes``: negative; ``scale`` and ``bias`` broadcast to x."""
    x = np.asarray(x, np.float64)
    if op == "RMSNorm":
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=tuple(axes), keepdims=True) + epsilon) * scale)
    d = x - x.mean(axis=tuple(axes), keepdims=True)
    variance = x.var(axis=tuple(axes), keepdims=True, ddof=ddof)
    root = np.sqrt(variance + epsilon) if op == "LayerNorm" else np.sqrt(variance) + epsilon
    return np.asarray(d / root * scale + bias)


def _evaluated(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], opset: int, outputs: int) -> Any:
    """One of our ops in float64, by its function body: what other runtimes run is what certificates judge."""
    function = body(op, max(opset, OLDEST))
    known = dict(zip(function.input, inputs, strict=False))
    for node in function.node:
        given = {a.name: attrs[a.ref_attr_name] if a.ref_attr_name else onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "CastLike":  # rounding is an identity here
            known[node.output[0]] = known[node.input[0]]
            continue
        found = evaluate.apply(node.op_type, [known[i] for i in node.input], given, opset=max(opset, OLDEST))
        known[node.output[0]] = found[0]
    return known[function.output[0]]


_TABLE: dict[tuple[str, str], Callable[..., Any]] = {(DOMAIN, op): partial(_evaluated, op) for op in OPS}
evaluate.OPS.update(_TABLE)
