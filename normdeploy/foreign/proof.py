"""The certificate of a foreign node's expansion: its owner's definition and the nodes written, both in float64 on the battery.

What an expansion computes depends on the node's attributes, on which inputs it has and on their ranks, but on few sizes: those of the axes
that a LayerNorm plugin is laid along, and the channels of a GroupNormalization 18. So small tensors prove it, and nodes that agree in all
this share one proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..evaluate import evaluate
from ..evaluate.foreign import GROUPS, TABLE
from ..graphs.dims import Dims
from ..records import Certificate
from ..rewriting.certify import BOUND, PATTERNS
from .write import Op, Writer

Array = np.ndarray
Draw = Callable[[np.random.Generator, int, float], Array]

MALFORMED = (evaluate.Unsupported, KeyError, TypeError, ValueError, IndexError, ArithmeticError)
SIZES = ((2, 3, 8, 5, 4), (3, 2, 6, 3, 2))
SKIPS = {"SkipLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 1, "CustomSkipLayerNormPluginDynamic": 1, "SkipGroupNorm": 3}


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes as plain values; tensors as arrays."""
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in found.items()}


def proved(op: Op, writer: Writer, opset: int, shape: Dims, skip: int) -> Certificate:
    """Compare every output that the node names, at two sizes, on each pattern of the battery.

    ``shape``: of the first input. ``skip``: the rank of the other summand, where there is one.

    Raises:
        MALFORMED: the node does not fit its op, so that one of the two can't be evaluated.
    """
    node, attrs = writer.node, attributes(writer.node)
    reference = _reference(op, node)
    worst, name, cases = 0.0, "", 0
    rng = np.random.default_rng(17)
    for sizes in SIZES:
        for pattern, draw in PATTERNS.items():
            drawn = _inputs(op, node, attrs, small(op, shape, sizes, attrs), skip, rng, draw)
            values = dict(zip(node.input, drawn, strict=True))  # a tensor may be given twice
            inputs = [values[name] for name in node.input]
            with evaluate.quiet():
                expected = reference(inputs, attrs, opset, len(node.output))
                found = _run(writer, inputs, opset)
                ratio = _difference(node, expected if isinstance(expected, tuple) else (expected,), found)
            cases += 1
            if not ratio <= worst:
                worst, name = ratio, pattern
    return Certificate(bool(worst <= BOUND), worst, BOUND, cases, name or next(iter(PATTERNS)))


def small(op: Op, shape: Dims, sizes: Sequence[int], attrs: Mapping[str, Any]) -> list[int]:
    """A small shape of the same rank; sizes that the expansion depends on are kept."""
    made = [*sizes, *(2,) * len(shape)][: len(shape)]
    kept = range(attrs["axis"] % len(shape), len(shape)) if "axis" in attrs else (1,) if op.owner == "ONNX 18" else ()
    return [d if a in kept and isinstance(d, int) else made[a] for a, d in enumerate(shape)]


def _reference(op: Op, node: onnx.NodeProto) -> Callable[..., Any]:
    owner = "TensorRT" if op.owner == "TensorRT" else "com.microsoft"
    return TABLE.get((owner, node.op_type)) or evaluate.OPS["com.microsoft" if op.owner == "onnxruntime" else "", node.op_type]


def _run(writer: Writer, inputs: Sequence[Array | None], opset: int) -> dict[str, Array]:
    values: dict[str, Any] = {n: v for n, v in zip(writer.node.input, inputs, strict=True) if n}
    for tensor in writer.initializers:
        held = onnx.numpy_helper.to_array(tensor)
        values[tensor.name] = held if held.dtype.kind in "iub" else held.astype(np.float64)
    for n in writer.nodes:
        made = evaluate.apply(n.op_type, [values[i] if i else None for i in n.input], attributes(n), opset=opset, outputs=len(n.output))
        values.update(zip(n.output, made, strict=False))
    return values


def _difference(node: onnx.NodeProto, expected: Sequence[Array | None], found: dict[str, Array]) -> float:
    """The largest difference of any output, relative to the largest value of it."""
    worst = 0.0
    for name, ref in zip(node.output, expected, strict=False):
        if not name:
            continue
        got = found.get(name)
        if ref is None or got is None or got.shape != ref.shape:
            return float("inf")
        if (np.isnan(ref) != np.isnan(got)).any():
            return float("inf")
        gap = np.nan_to_num(np.abs(np.where(got == ref, 0.0, got.astype(np.float64) - ref)), nan=0.0, posinf=np.inf).max(initial=0.0)
        worst = max(worst, float(gap) / max(float(np.abs(np.nan_to_num(ref)).max(initial=0.0)), 1e-300))
    return worst


def _inputs(
    op: Op, node: onnx.NodeProto, attrs: Mapping[str, Any], shape: list[int], skip: int, rng: np.random.Generator, draw: Draw
) -> list[Array | None]:
    """One set of inputs; ``draw`` fills those that are normalized. A vector in an attribute decides how many channels there are."""
    if node.op_type == "EmbedLayerNormalization":
        return _embedding(node, shape[1], rng, draw)
    held = next((int(np.size(attrs[k])) for k in ("scales", "gamma") if k in attrs), 0)
    last = op.kind in ("LayerNorm", "RMSNorm") or (op.owner == "onnxruntime" and attrs.get("channels_last", 1))
    channel = len(shape) - 1 if last else 1
    if held and last and len(shape) == 5:
        channel, shape[3:] = 2, [1, 1]
    if op.kind == "GroupNorm" and op.owner != "ONNX 18":
        shape[channel] = 2 * attrs.get("groups", attrs.get("num_groups", GROUPS))
    shape[channel] = held or shape[channel]
    size = attrs["num_groups"] if op.owner == "ONNX 18" else shape[attrs["axis"] :] if "axis" in attrs else shape[channel]
    made: list[Array | None] = []
    for i, name in enumerate(node.input):
        dims = shape if i == 0 else skipped(shape, skip) if i == SKIPS.get(node.op_type) else None
        value = rng.uniform(0.5, 1.5, size) if dims is None else draw(rng, math.prod(dims), attrs.get("epsilon", 1e-5)).reshape(dims)
        made.append(value if name else None)
    return made


def skipped(shape: Sequence[int], rank: int) -> list[int]:
    """The shape of the other summand: of x's, or x's last axes, or (N, C) for a SkipGroupNorm."""
    return [shape[0], shape[-1]] if len(shape) == 4 and rank == 2 else list(shape[len(shape) - rank :])


def _embedding(node: onnx.NodeProto, length: int, rng: np.random.Generator, draw: Draw) -> list[Array | None]:
    """input_ids, segment_ids, three tables, gamma, beta, mask, position_ids."""
    rows, hidden, batch = 11, 8, 3
    made: list[Array] = [rng.integers(0, rows, (batch, length)) for _ in range(2)]
    made += [draw(rng, rows * hidden, 1e-5).reshape(rows, hidden) for _ in range(3)]
    made += [rng.uniform(0.5, 1.5, hidden) for _ in range(2)]
    made += [rng.integers(0, below, (batch, length)) for below in (2, rows)]
    return [m if n else None for n, m in zip(node.input, made, strict=False)]
