"""This project's own ops (domain ``normdeploy``): what no standard node can say in one, each with a function body in
standard ops.

Their inputs, outputs and attributes stand in the table of norm ops (`normdeploy.norms.ops`). They are written on
request (``--fuse portable``). The body is part of the file, so that every runtime runs it; where a fused kernel of the
same name is at hand, that takes its place. They compute in the type ``stash_type`` (1: float32, 11: float64), from
which the result alone is rounded to X's.

The norms normalize over ``axes``, the trailing ones (L2Norm: any), and take one scale (and bias) that broadcasts to X:

    RMSNorm           X / sqrt(mean(X²) + epsilon) · scale                                  (ONNX has it from opset 23
    on) LayerNorm         (X − mean) / sqrt(Σ(X − mean)²/(n − ddof) + epsilon) · scale + bias   (torch.var without
    arguments, n dynamic) StdNorm           (X − mean) / (sqrt(Σ(X − mean)²/(n − ddof)) + epsilon) · scale + bias
                      (Rush, "The Annotated Transformer", 2018: a·(x − mean)/(std + eps) + b)
    L2Norm            X / max(‖X‖₂, epsilon) · scale                (torch.nn.functional.normalize)
    ChannelLayerNorm  LayerNormalization over axis 1 of (N, C, …) at each place, scale and bias of shape (C,)
    (ConvNeXt, Liu et al. 2022)

`JOINED` are a norm and its neighbours; their bodies hold the standard nodes that they took the place of, which runtimes
know to fuse:

    AddLayerNorm, AddRMSNorm   sum = X + residual (of one shape), Y = the norm of the sum over its last axis; both are
    outputs ModulatedLayerNorm         X̂ · (1 + scale) + shift over the last axis, scale and shift of shape (B, 1, D)
    (DiT, Peebles, Xie 2022) GroupNormSiLU              y · sigmoid(y) of y = GroupNormalization(X)
    (opset 21 on)

No op bears a standard one's name: TensorRT's parser goes by the name alone, and takes its own op and that one's
attributes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnx
import onnx.parser

from ..evaluate import evaluate
from ..norms.ops import DOMAIN, OURS

VERSION = 1  # of our domain

_EPSILON = "given = Constant <value_float: float = @epsilon> () small = Cast <to: int = @stash_type> (given)"
_SCALED = "wide = Cast <to: int = @stash_type> (scale) scaled = Mul (normal, wide)"
_SHIFTED = (
    f"{_SCALED} shift = Cast <to: int = @stash_type> (bias) shifted = Add (scaled, shift) Y = CastLike (shifted, X)"
)
_CENTERED = f"""
    x = Cast <to: int = @stash_type> (X)
    {{mean}} d = Sub (x, mean) q = Mul (d, d)
    {{biased}}
    counted = Shape (X) over = Constant <value_ints: ints = @axes> () each = Gather (counted, over)
    n = ReduceProd <keepdims: int = 0> (each) ddof = Constant <value_int: int = @ddof> () less = Sub (n, ddof)
    many = Cast <to: int = @stash_type> (n) fewer = Cast <to: int = @stash_type> (less) factor = Div (many, fewer)
    variance = Mul (biased, factor) {_EPSILON}"""

# onnxruntime makes one kernel of this; of Mul (x, x) it would not
_RMS = (
    "x = Cast <to: int = @stash_type> ({of}) of = Constant <value_float: float = 2.0> () two = Cast <to: int ="
    f" @stash_type> (of) q = Pow (x, two) {{biased}} {_EPSILON} e = Add (biased, small) r = Sqrt (e) normal = Div (x,"
    f" r) {_SCALED} Y = CastLike (scaled, X)"
)
_ON_THE_LAST = "LayerNormalization <axis: int = -1, epsilon: float = @epsilon, stash_type: int = @stash_type>"

# {mean} and the like are reductions over the axes, which each opset writes in its way
_BODIES: dict[str, str] = {
    "RMSNorm": _RMS.replace("{of}", "X"),
    "LayerNorm": f"{_CENTERED} e = Add (variance, small) r = Sqrt (e) normal = Div (d, r) {_SHIFTED}",
    "StdNorm": f"{_CENTERED} s = Sqrt (variance) r = Add (s, small) normal = Div (d, r) {_SHIFTED}",
    "L2Norm": (
        f"x = Cast <to: int = @stash_type> (X) {{length}} {_EPSILON} r = Clip (length, small) normal = Div (x, r)"
        f" {_SCALED} Y = CastLike (scaled, X)"
    ),
    # to (N, places, C) and back; no −1 in a Reshape, which an empty batch could not fill in
    "ChannelLayerNorm": (
        "whole = Shape (X) head = Shape <start: int = 0, end: int = 2> (X) tail = Shape <start: int = 2> (X)"
        " places = ReduceProd <keepdims: int = 1> (tail) flat = Concat <axis: int = 0> (head, places)"
        " rows = Reshape <allowzero: int = 1> (X, flat) last = Transpose <perm: ints = [0, 2, 1]> (rows)"
        f" normal = {_ON_THE_LAST} (last, scale, bias) first = Transpose <perm: ints = [0, 2, 1]> (normal)"
        " Y = Reshape <allowzero: int = 1> (first, whole)"
    ),
    "AddLayerNorm": f"sum = Add (X, residual) Y = {_ON_THE_LAST} (sum, scale, bias)",
    "AddRMSNorm": f"sum = Add (X, residual) {_RMS.replace('{of}', 'sum').replace('{biased}', '{last}')}",
    "ModulatedLayerNorm": (
        "one = Constant <value_float: float = 1.0> () unit = CastLike (one, scale) gain = Add (scale, unit)"
        f" Y = {_ON_THE_LAST} (X, gain, shift)"
    ),
    "GroupNormSiLU": (
        "normal = GroupNormalization <epsilon: float = @epsilon, num_groups: int = @num_groups, stash_type: int ="
        " @stash_type> (X, scale, bias) gate = Sigmoid (normal) Y = Mul (normal, gate)"
    ),
}
OPS = frozenset(OURS)
JOINED = frozenset(op for op, row in OURS.items() if row.joined)
WITHOUT_KERNEL = frozenset(op for op, row in OURS.items() if not row.plugin)  # in TensorRT too their bodies run
OLDEST = min(
    row.since for row in OURS.values()
)  # the first opset for which bodies are written, but for those that need a newer op


def oldest(op: str) -> int:
    """The lowest opset for which one of our ops has a body."""
    return OURS[op].since


@lru_cache
def body(op: str, opset: int) -> onnx.FunctionProto:
    """The function of one of our ops for a file of the given opset (`oldest` or above); don't write into it."""
    row, text = OURS[op], _BODIES[op]

    def reduced(of: str, to: str, axes: str = "@axes", by: str = "ReduceMean") -> str:
        if opset < 18:
            return f"{to} = {by} <axes: ints = {axes}, keepdims: int = 1> ({of})"
        return (
            f"along_{to} = Constant <value_ints: ints = {axes}> () {to} = {by} <keepdims: int = 1> ({of}, along_{to})"
        )

    means = {
        "{mean}": reduced("x", "mean"),
        "{biased}": reduced("q", "biased"),
        "{last}": reduced("q", "biased", "[-1]"),
    }
    for place, written in (means | {"{length}": reduced("x", "length", by="ReduceL2")}).items():
        text = text.replace(place, written)
    head = f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">'
    attributes, inputs, outputs = (", ".join(names) for names in (row.attributes, row.inputs, row.outputs))
    function = onnx.parser.parse_function(f"{head} {op} <{attributes}> ({inputs}) => ({outputs}) {{ {text} }}")
    for node in function.node:
        node.ClearField("domain")  # the parser writes the default one, other tools leave it out
    return function


def lacking(op: str, inputs: Sequence[str], attributes: Mapping[str, object]) -> list[str]:
    """What a call of one of our ops leaves out or gives in another type than it takes, in words.

    ``inputs`` are the names given, "" where one is not; ``attributes`` their values, None where the caller of a
    function gives one.
    """
    function = body(op, oldest(op))
    without = [name for i, name in enumerate(function.input) if i >= len(inputs) or not inputs[i]]
    return [
        *(f"the input {name!r}" for name in without),
        *(f"the attribute {name!r}" for name in function.attribute if name not in attributes),
        *(
            f"the attribute {name!r} as {_kind(name)}"
            for name in function.attribute
            if not _fits(name, attributes.get(name))
        ),
    ]


def _kind(attribute: str) -> str:
    return {"axes": "INTS", "epsilon": "FLOAT"}.get(attribute, "INT")


def _fits(attribute: str, value: object) -> bool:
    if value is None or attribute == "epsilon":
        return value is None or isinstance(value, float)
    if attribute == "axes":
        return isinstance(value, list | tuple) and all(isinstance(v, int) for v in value)
    return isinstance(value, int)


def reference(
    op: str,
    x: np.ndarray,
    scale: np.ndarray | float,
    bias: np.ndarray | float = 0.0,
    *,
    axes: Sequence[int],
    epsilon: float,
    ddof: int = 0,
) -> np.ndarray:
    """A norm of ours, neither of `JOINED` nor ChannelLayerNorm, by its formula in float64.

    ``x``: any shape; ``axes``: negative; the rest broadcasts to x.
    """
    x = np.asarray(x, np.float64)
    if op == "L2Norm":
        return np.asarray(x / np.maximum(np.sqrt(np.square(x).sum(axis=tuple(axes), keepdims=True)), epsilon) * scale)
    if op == "RMSNorm":
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=tuple(axes), keepdims=True) + epsilon) * scale)
    d = x - x.mean(axis=tuple(axes), keepdims=True)
    variance = x.var(axis=tuple(axes), keepdims=True, ddof=ddof)
    root = np.sqrt(variance + epsilon) if op == "LayerNorm" else np.sqrt(variance) + epsilon
    return np.asarray(d / root * scale + bias)


def _evaluated(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], opset: int, outputs: int) -> Any:
    """One of our ops in float64, by its function body: what other runtimes run is what certificates judge."""
    opset = max(opset, oldest(op))
    function = body(op, opset)
    known = dict(zip(function.input, inputs, strict=False))
    for node in function.node:
        given = {
            a.name: attrs[a.ref_attr_name] if a.ref_attr_name else onnx.helper.get_attribute_value(a)
            for a in node.attribute
        }
        if node.op_type == "CastLike":  # rounding is an identity here
            known[node.output[0]] = known[node.input[0]]
            continue
        found = evaluate.apply(node.op_type, [known[i] for i in node.input], given, opset=opset)
        known[node.output[0]] = found[0]
    return tuple(known[name] for name in function.output[:outputs])


_TABLE: dict[tuple[str, str], Callable[..., Any]] = {(DOMAIN, op): partial(_evaluated, op) for op in OPS}
evaluate.OPS.update(_TABLE)
