"""Check that a graph computes the same function after a migration.

onnx's reference evaluator runs both graphs, with all floating-point tensors in float64.

The allowed error is the effect of rounding the stored weights. Every stored number of the original graph is moved by up
to one rounding of its type (2⁻²⁴ relatively for float32), several times. The bound is the largest resulting change of
each output, times `SLACK`. A wrong migration of γ, β or ε is off by far more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

FLOATS = {TensorProto.FLOAT: 2.0**-24, TensorProto.FLOAT16: 2.0**-11}
# Factor of the bound, because several weights are rounded, some of them twice: γ·W, then its sum with β·W
SLACK = 16.0
# Relative to the largest output, for these inputs or for usual ones: float64's own rounding through about twenty
# operations. Nothing else remains for a constant row, or for a tiny branch that is shifted like one that is not.
FLOOR = 1e-11
DRAWS = 4
KINDS = ("normal", "offset", "zeros", "constant rows", "spikes", "small")
Feeds = dict[str, np.ndarray]


class GroupNormalization(OpRun):
    """GroupNormalization in float64; the op's function body casts to float32."""

    def _run(self, x, scale, bias, num_groups=None, epsilon=None, stash_type=None):  # type: ignore[no-untyped-def]
        rows = x.reshape(x.shape[0], num_groups, -1)
        centred = rows - rows.mean(2, keepdims=True)
        n = (centred / np.sqrt((centred**2).mean(2, keepdims=True) + epsilon)).reshape(x.shape)
        trailing = (1,) * (x.ndim - 2)
        return (n * scale.reshape(-1, *trailing) + bias.reshape(-1, *trailing),)


def widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert float32 and float16 to float64, in subgraphs too.

    Returns:
        the copy.
    """
    wide = onnx.ModelProto.FromString(proto.SerializeToString())
    for graph in _graphs(wide.graph):
        for tensor in graph.initializer:
            _widen(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in FLOATS:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    _widen(attribute.t)
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i in FLOATS:
                    attribute.i = TensorProto.DOUBLE
    return wide


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def moved(proto: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Move every stored floating number of a widened graph by up to one rounding of its original type.

    Returns:
        the copy.
    """
    wide = widened(proto)
    for before, after in zip(_graphs(proto.graph), _graphs(wide.graph), strict=True):
        tensors = [*zip(before.initializer, after.initializer, strict=True)]
        for a, b in zip(before.node, after.node, strict=True):
            pairs = zip(a.attribute, b.attribute, strict=True)
            tensors += [(p.t, q.t) for p, q in pairs if p.type == onnx.AttributeProto.TENSOR]
        for a, b in tensors:
            if a.data_type in FLOATS:
                values = numpy_helper.to_array(b)
                step = FLOATS[a.data_type] * rng.uniform(-1, 1, values.shape)
                b.CopyFrom(numpy_helper.from_array(np.asarray(values * (1 + step)), b.name))
    return wide


class Evaluated:
    """Graph in float64."""

    def __init__(self, wide: onnx.ModelProto) -> None:
        self.run_by = ReferenceEvaluator(wide, new_ops=[GroupNormalization])

    def __call__(self, feeds: Feeds) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return [np.asarray(v) for v in self.run_by.run(None, feeds)]


def inputs(proto: onnx.ModelProto, seed: int) -> Iterator[Feeds]:
    """Yield several sizes and values of every input. In half of them, initializers that can be overridden are.

    Yields:
        name -> array.
    """
    rng, stored = np.random.default_rng((5, seed)), {t.name for t in proto.graph.initializer}
    for turn, kind in enumerate(KINDS):
        sizes = {"batch": (2, 1, 3, 2, 2, 4)[turn], "length": (3, 3, 1, 2, 5, 3)[turn]}
        feeds: Feeds = {}
        for value in proto.graph.input:
            if value.name in stored and turn % 2:
                continue
            spec = value.type.tensor_type
            shape = [sizes.get(d.dim_param, d.dim_value) if d.dim_param else d.dim_value for d in spec.shape.dim]
            if spec.elem_type == TensorProto.BOOL:
                feeds[value.name] = np.array(bool(turn % 2))
            elif spec.elem_type == TensorProto.INT64:
                feeds[value.name] = rng.integers(0, 5, shape)
            else:
                feeds[value.name] = _values(rng, kind, shape)
        yield feeds


def _values(rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    values = rng.standard_normal(shape)
    if kind == "offset":
        return values + 100
    if kind == "zeros":
        return np.zeros(shape)
    if kind == "constant rows" and len(shape) > 1:
        return np.broadcast_to(values[..., :1], shape).copy()
    if kind == "spikes":
        return np.where(rng.random(shape) < 0.1, 1e3 * values, values)
    return 1e-4 * values if kind == "small" else values


def fault(before: onnx.ModelProto, after: onnx.ModelProto, seed: int = 0) -> str:
    """Compare two graphs.

    Returns:
        how ``after`` differs from ``before``, or "".
    """
    if reason := _other_signature(before, after):
        return reason
    try:
        onnx.checker.check_model(after, full_check=True)
    except Exception as error:
        if not _invalid(before):
            return f"the checker refuses it: {' '.join(str(error).split())[:150]}"
    first, second = Evaluated(widened(before)), Evaluated(widened(after))
    rng = np.random.default_rng(seed)
    nearby = [Evaluated(moved(before, rng)) for _ in range(DRAWS)]
    asked: list[tuple[Feeds, list[np.ndarray]]] = []
    usual = [0.0] * len(before.graph.output)
    for kind, feeds in zip(KINDS, inputs(before, seed), strict=True):
        try:
            want = first(feeds)
        # A size that the graph does not accept.
        except Exception:
            continue
        asked.append((feeds, want))
        if kind not in ("offset", "spikes"):
            usual = [max(u, _largest(w)) for u, w in zip(usual, want, strict=True)]
    for feeds, want in asked:
        try:
            have = second(feeds)
        except Exception as error:
            return f"it fails where the graph before ran: {type(error).__name__}: {str(error)[:120]}"
        near = [run(feeds) for run in nearby]
        for i, value in enumerate(before.graph.output):
            if reason := _different(want[i], have[i], [n[i] for n in near], usual[i]):
                return f"output {value.name!r}: {reason}"
    return "" if asked else "no input could be run"


def runs(proto: onnx.ModelProto) -> bool:
    """Check if the graph can be evaluated for most inputs.

    Returns:
        true if it can.
    """
    try:
        run = Evaluated(widened(proto))
    except Exception:
        return False
    good = 0
    for feeds in inputs(proto, 0):
        try:
            run(feeds)
            good += 1
        except Exception:
            continue
    return good >= 2


def _invalid(proto: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception:
        return True
    return False


def _other_signature(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    for what in ("input", "output"):
        mine, theirs = (
            [(v.name, v.type.tensor_type.elem_type) for v in getattr(p.graph, what)] for p in (before, after)
        )
        if mine != theirs:
            return f"its {what}s are {theirs}, they were {mine}"
    kinds: Mapping[str, int] = {t.name: t.data_type for t in before.graph.initializer}
    inputs_before = {v.name for v in before.graph.input} & set(kinds)
    if gone := inputs_before - {t.name for t in after.graph.initializer}:
        return f"the initializers {sorted(gone)}, which can be overridden, are gone"
    return ""


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) if values.dtype.kind == "f" else 0.0


def _different(want: np.ndarray, have: np.ndarray, near: Sequence[np.ndarray], usual: float) -> str:
    if want.shape != have.shape:
        return f"shape {have.shape}, it was {want.shape}"
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(have)) or not np.array_equal(
        want[~finite], have[~finite], equal_nan=True
    ):
        return "NaN or infinity in other places"
    if not finite.any():
        return ""
    largest = _largest(want)
    with np.errstate(all="ignore"):
        # A γ from data, used as a divisor, may become 0.
        moves = [np.abs(n - want)[finite & np.isfinite(n)] for n in near]
        spread = max(float(m.max(initial=0.0)) for m in moves)
        error = float(np.abs(have - want)[finite].max())
    allowed = SLACK * spread + FLOOR * max(largest, usual)
    return "" if error <= allowed else f"off by {error:.2g} of {largest:.2g}, rounding explains {allowed:.2g}"


def float_names(proto: onnx.ModelProto) -> list[str]:
    """List the stored floating tensors.

    Returns:
        names.
    """
    return [t.name for t in proto.graph.initializer if t.data_type in FLOATS]


def dtype_of(kind: int) -> np.dtype:
    """Return numpy's type.

    Returns:
        type.
    """
    return helper.tensor_dtype_to_np_dtype(kind)
