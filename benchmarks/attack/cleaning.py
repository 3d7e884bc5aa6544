"""Test the cleaning rules with random graphs of the ops that they change.

Outputs in onnxruntime must be equal bit for bit.

``python -m benchmarks.attack.cleaning --count 20000 --seed 0`` prints how many graphs were drawn, ran, were changed and
differ, and writes the graphs that differ to ``--output``.

Each graph is a chain of up to six ops on one input, followed by gates and masks. Constants and inputs include -0,
infinities, NaN, large integers and empty dims. `simplify` is called without samples, so that no comparison hides a
rule's error. Outputs must have equal bits; NaN equals NaN with any payload. Folded constants of floating arithmetic may
differ by two units in the last place.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.graphs.simplification import simplify

SPECIAL = (0.0, -0.0, 1.0, -1.0, 6.0, np.inf, -np.inf, np.nan, 1e-12, -3e38, 0.5)
WHOLE = (0, 1, -1, 3, 5, 9, 2**31 - 1, -(2**31), 2**40)
_OPSETS = (14, 17, 18, 20, 21)
# Allowed difference of computed constants in units in the last place: half a unit from our computation, and at least
# half a unit from the runtime
_ULPS = 2


@dataclass
class Drawn:
    """Graph as it grows.

    Attributes:
        value: last tensor, of ``shape`` and ``dtype``.
    """

    rng: np.random.Generator
    opset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    value: str = "x"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: dict[str, np.ndarray] = field(default_factory=dict)

    def constant(self, array: object, dtype: object = None) -> str:
        """Store a constant.

        Returns:
            its name.
        """
        name = f"c{len(self.stored)}"
        with np.errstate(over="ignore"):
            self.stored[name] = np.array(array, self.dtype if dtype is None else dtype)
        return name

    def add(self, op: str, inputs: list[str], **attributes: object) -> None:
        """Add a node, which becomes the value."""
        self.value = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [self.value], **attributes))

    def number(self) -> float | int:
        """Draw a special number of the value's type.

        Returns:
            the number.
        """
        if self.dtype.kind == "f":
            return float(self.rng.choice(SPECIAL))
        limits = np.iinfo(self.dtype)
        return int(np.clip(int(self.rng.choice(np.array(WHOLE, object))), limits.min, limits.max))


def _clip(d: Drawn) -> None:
    bounds = [d.constant(d.number()) if d.rng.random() < 0.85 else "" for _ in range(2)]
    d.add("Clip", [d.value, *bounds])


def _extreme(d: Drawn) -> None:
    d.add(str(d.rng.choice(["Min", "Max"])), [d.value, d.constant(d.number())])


def _relu(d: Drawn) -> None:
    if d.dtype.kind == "f":
        d.add("Relu", [d.value])


def _neutral(d: Drawn) -> None:
    op = str(d.rng.choice(["Add", "Sub", "Mul", "Div"]))
    number = d.rng.choice([0.0, -0.0, 1.0]) if d.dtype.kind == "f" else d.rng.choice([0, 1])
    if op == "Div" and number == 0 and d.dtype.kind != "f":
        return
    rank = int(d.rng.integers(0, len(d.shape) + 2))
    inputs = [d.value, d.constant(np.full((1,) * rank, number))]
    if op in ("Add", "Mul") and d.rng.random() < 0.5:
        inputs.reverse()
    d.add(op, inputs)
    d.shape = (*(1,) * (rank - len(d.shape)), *d.shape)


def _reshape(d: Drawn) -> None:
    total, rank = int(np.prod(d.shape)), int(d.rng.integers(1, 4))
    shape = [1] * rank
    shape[int(d.rng.integers(rank))] = total
    stated = list(shape)
    if total and d.rng.random() < 0.5:
        stated[shape.index(total)] = -1
    d.add("Reshape", [d.value, d.constant(stated, np.int64)], allowzero=int(total == 0))
    d.shape = tuple(shape)


def _flatten(d: Drawn) -> None:
    axis = int(d.rng.integers(0, len(d.shape) + 1))
    d.add("Flatten", [d.value], axis=axis)
    d.shape = (int(np.prod(d.shape[:axis])), int(np.prod(d.shape[axis:])))


def _transpose(d: Drawn) -> None:
    if not d.shape:
        return
    order = [int(axis) for axis in d.rng.permutation(len(d.shape))]
    d.add("Transpose", [d.value], perm=order)
    d.shape = tuple(d.shape[axis] for axis in order)


def _slice(d: Drawn) -> None:
    if not d.shape:
        return
    axis, step = int(d.rng.integers(len(d.shape))), int(d.rng.choice([1, 1, 1, -1, 2]))
    size = d.shape[axis]
    start = int(d.rng.choice([0, 1, -1, size])) if step > 0 else int(d.rng.choice([-1, size]))
    end = int(d.rng.choice([size, 2**63 - 1, size - 1, -1])) if step > 0 else -(2**63)
    ends = [d.constant([n], np.int64) for n in (start, end, axis, step)]
    d.add("Slice", [d.value, *ends])
    taken = len(np.arange(size)[slice(start, None if step < 0 else end, step)])
    d.shape = (*d.shape[:axis], taken, *d.shape[axis + 1 :])


def _expand(d: Drawn) -> None:
    d.add("Expand", [d.value, d.constant(list(d.shape), np.int64)])


def _unsqueeze(d: Drawn) -> None:
    axis = int(d.rng.integers(0, len(d.shape) + 1))
    if len(d.shape) < 5:
        d.add("Unsqueeze", [d.value, d.constant([axis], np.int64)])
        d.shape = (*d.shape[:axis], 1, *d.shape[axis:])


def _squeeze(d: Drawn) -> None:
    if ones := [axis for axis, size in enumerate(d.shape) if size == 1]:
        axis = int(d.rng.choice(ones))
        d.add("Squeeze", [d.value, d.constant([axis], np.int64)])
        d.shape = (*d.shape[:axis], *d.shape[axis + 1 :])


def _cast(d: Drawn) -> None:
    dtype = np.dtype(str(d.rng.choice(["float16", "float32", "float64", "int32", "int64", "uint8"])))
    # The cast of a NaN, or of a number out of range, gives a result that depends on the processor.
    if d.dtype.kind == "f" and dtype.kind != "f":
        return
    d.add("Cast", [d.value], to=helper.np_dtype_to_tensor_dtype(dtype))
    d.dtype = dtype


def _scatter(d: Drawn) -> None:
    if len(d.shape) < 1 or d.dtype.name not in ("float32", "int64"):
        return
    rows = np.arange(d.shape[0]).reshape(-1, 1)
    if d.rng.random() < 0.3:
        rows = rows[::-1].copy()
    updates = np.zeros(d.shape, d.dtype) + 10
    attributes: dict[str, object] = {}
    if d.rng.random() < 0.6:
        kinds = ["none", "add", "mul"] + (["min", "max"] if d.opset >= 18 else [])
        attributes["reduction"] = str(d.rng.choice(kinds)) if d.opset >= 16 else "none"
    if d.opset < 16:
        attributes = {}
    d.add("ScatterND", [d.value, d.constant(rows, np.int64), d.constant(updates)], **attributes)


def _conv(d: Drawn) -> None:
    if d.dtype != np.float32 or len(d.shape) != 3 or 0 in d.shape:
        return
    channels = d.shape[1]
    pads = [0, 0, int(d.rng.integers(0, 3)), 0, 0, int(d.rng.integers(0, 3))]
    mode = str(d.rng.choice(["constant", "constant", "edge", "reflect"]))
    if mode == "reflect" and max(pads) >= d.shape[2]:
        return
    fill = [d.constant(float(d.rng.choice([0.0, -0.0, 1.0])))] if d.rng.random() < 0.6 else []
    d.add("Pad", [d.value, d.constant(pads, np.int64), *fill], mode=mode)
    own = [int(n) for n in d.rng.integers(0, 2, 2)]
    d.add("Conv", [d.value, d.constant(d.rng.integers(-3, 4, (2, channels, 1)))], pads=own)
    d.shape = (d.shape[0], 2, d.shape[2] + pads[2] + pads[5] + sum(own))


def _constants(d: Drawn) -> None:
    """Add an op on constants, whose result joins the chain through its own comparison."""
    op = str(d.rng.choice(["LogSoftmax", "Softmax", "Exp", "Sqrt", "Reciprocal", "Div", "Neg", "Abs", "Floor", "Relu"]))
    if d.dtype != np.float32:
        return
    numbers = np.array([*d.rng.choice(SPECIAL, 3), -200.0, 0.0], np.float32)
    first, name = d.constant(numbers), f"k{len(d.nodes)}"
    inputs = [first, d.constant(d.rng.choice(SPECIAL, 5))] if op == "Div" else [first]
    d.nodes.append(helper.make_node(op, inputs, [name]))
    made = f"m{len(d.nodes)}"
    d.nodes.append(helper.make_node("ReduceMax" if d.opset < 18 else "Identity", [name], [made]))
    whole = d.constant([-1], np.int64)
    flat, joined = f"f{len(d.nodes)}", f"j{len(d.nodes)}"
    d.nodes.append(helper.make_node("Reshape", [d.value, whole], [flat]))
    row = f"r{len(d.nodes)}"
    d.nodes.append(helper.make_node("Reshape", [made, whole], [row]))
    d.nodes.append(helper.make_node("Concat", [flat, row], [joined], axis=0))
    d.value = joined
    d.shape = (int(np.prod(d.shape)) + (1 if d.opset < 18 else 5),)


STEPS: tuple[Callable[[Drawn], None], ...] = (
    *(_clip, _extreme, _relu, _neutral, _reshape, _flatten, _transpose, _slice, _expand),
    *(_unsqueeze, _squeeze, _cast, _scatter, _conv, _constants),
)


def draw(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Draw a graph.

    Returns:
        the graph and its input.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(str(rng.choice(["float32", "float32", "float32", "int64", "int32", "float16"])))
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 0], int(rng.integers(1, 4)), p=[0.25, 0.25, 0.2, 0.2, 0.1]))
    d = Drawn(rng, int(rng.choice(_OPSETS)), dtype, shape)
    for _ in range(int(rng.integers(1, 7))):
        STEPS[int(rng.integers(len(STEPS)))](d)
    d.add("Identity", [d.value])
    inputs = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(dtype), _dims(shape, rng))]
    output = helper.make_tensor_value_info(d.value, helper.np_dtype_to_tensor_dtype(d.dtype), [None] * len(d.shape))
    stored = [numpy_helper.from_array(array, name) for name, array in d.stored.items()]
    graph = helper.make_graph(d.nodes, "g", inputs, [output], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", d.opset)], ir_version=8)
    values: np.ndarray
    if dtype.kind == "f":
        values = rng.standard_normal(shape) * 4
        mask = rng.random(shape) < 0.4
        values[mask] = rng.choice(SPECIAL, int(mask.sum()))
    else:
        values = rng.integers(-10, 10, shape)
    with np.errstate(all="ignore"):
        return proto, {"x": values.astype(dtype)}


def _dims(shape: tuple[int, ...], rng: np.random.Generator) -> list[int | str]:
    """Return the sizes, with some left open."""
    return [f"d{axis}" if rng.random() < 0.4 else size for axis, size in enumerate(shape)]


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Run a graph in onnxruntime without its optimizer.

    Returns:
        the output.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def run_alone(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Run a graph in onnx's evaluator, node by node.

    Returns:
        the output.
    """
    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(proto).run(None, feeds)[0])


def equal(before: np.ndarray, after: np.ndarray, *, computed: bool, shifted: bool, signed_zeros: bool) -> bool:
    """Compare two outputs; NaN equals NaN.

    Args:
        computed: True if computed constants may round differently.
        shifted: True if 1 may be added to or subtracted from such constants. The result then has the error of numbers
            of magnitude 1.
        signed_zeros: True if 0 and -0 count as different. In onnxruntime, it depends on the tensor's shape which zero
            Min and Max return.

    Returns:
        true if the bits are the same, within these limits.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.dtype.kind != "f":
        return bool((before == after).all())
    signs = (np.signbit(before) == np.signbit(after)) | (not signed_zeros and before == 0)
    same = (before == after) & signs | (np.isnan(before) & np.isnan(after))
    if computed:
        with np.errstate(all="ignore"):
            # The constants are float32; a later Cast may widen the result.
            unit = np.maximum(np.spacing(np.abs(before)), np.spacing(np.abs(before.astype(np.float32))))
            unit = np.maximum(unit, np.spacing(np.float32(shifted)))
            same |= (np.abs(before.astype(np.float64) - after) <= _ULPS * unit) & signs
    return bool(same.all())


def judge(seed: int) -> str:
    """Clean a graph and compare.

    Returns:
        "not run", "same", "right" (changed and equal), "failed" (not cleaned) or "false".
    """
    proto, feeds = draw(seed)
    try:
        before = run(proto, feeds)
    # Catch every exception, because onnxruntime's exceptions share no base class.
    except Exception:
        return "not run"
    result = simplify(proto)
    if result.note:
        return "failed"
    rounded = ("LogSoftmax", "Softmax", "Exp", "Sqrt", "Reciprocal", "Div")
    computed = any(node.op_type in rounded for node in proto.graph.node)
    try:
        after = run(result.proto, feeds)
    # Catch every exception, because onnxruntime's exceptions share no base class.
    except Exception:
        return "false"
    signed_zeros = all(node.op_type not in ("Min", "Max", "ReduceMax") for node in proto.graph.node)
    shifted = any(node.op_type in ("Add", "Sub") for node in proto.graph.node)
    same = partial(equal, computed=computed, shifted=shifted, signed_zeros=signed_zeros)
    # onnxruntime computes halves in float32, and drops a Cast to half if the next op has no kernel of that type. So its
    # result for a node depends on the neighbors; onnx's evaluator handles each node alone.
    if not same(before, after) and not same(run_alone(proto, feeds), run_alone(result.proto, feeds)):
        return "false"
    changed = [n.op_type for n in result.proto.graph.node] != [n.op_type for n in proto.graph.node]
    return "right" if changed else "same"


def main() -> None:
    """Attack and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begun, counts = time.process_time(), Counter[str]()
    for seed in range(options.seed, options.seed + options.count):
        verdict = judge(seed)
        counts[verdict] += 1
        if verdict in ("false", "failed"):
            proto, _ = draw(seed)
            print(seed, verdict, [node.op_type for node in proto.graph.node], flush=True)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                onnx.save(proto, options.output / f"{seed}.onnx")
    print(dict(counts), f"{time.process_time() - begun:.0f} s")


if __name__ == "__main__":
    main()
