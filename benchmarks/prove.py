"""Measure ``normdeploy prove``: wrong verdicts on planted faults, and the rewrites of other tools that it proves.

    python -m benchmarks.prove planted FOLDER [--count 2000] [--seed 1]
    python -m benchmarks.prove tools FOLDER MODELS [--tools onnxsim onnxslim ...] [--python PYTHON]
    python -m benchmarks.prove table FOLDER

``planted`` draws small graphs, rewrites each without changing its function, plants one fault in the result, and asks
for a verdict. The truth comes from float64 runs at several sizes. ``tools`` runs optimizers over the
.onnx files in MODELS (``python -m benchmarks.corpus write MODELS`` makes some) and asks for a verdict on each result.
Both write JSON into FOLDER. ``table`` writes ``benchmarks/results/prove.md`` from it, and from the folder
``architectures`` in it, whose rows belong to files of torch's exporter (``python -m
benchmarks.architectures.plain_files`` makes some).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

import normdeploy
from benchmarks.corpus.others import Worker
from normdeploy.verbs.prove.counterexamples import find_difference
from normdeploy.verbs.prove.file_pair import OpenFile, pair_files

RESULTS = Path(__file__).parent / "results" / "prove.md"
ARCHITECTURES = "Rewrites of tools: architectures, as torch's exporter writes them"
_HIDDEN = 8
_CHANNELS = 4


class Writer:
    """Writes a random graph."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []

    def const(self, value: object, dtype: object = np.float32) -> str:
        """Add an initializer."""
        name = f"c{len(self.held)}"
        self.held.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add random weights."""
        return self.const(self.rng.standard_normal(shape) * 0.5)

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """Add a node."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"n{len(self.nodes)}", **attrs))
        return name


Block = Callable[[Writer, str], str]


def _linear(w: Writer, x: str) -> str:
    return w.op("Add", w.op("MatMul", x, w.weight(_HIDDEN, _HIDDEN)), w.weight(_HIDDEN))


def _centered(w: Writer, x: str) -> tuple[str, str]:
    axes = w.const([-1], np.int64)
    d = w.op("Sub", x, w.op("ReduceMean", x, axes))
    square = w.op("Mul", d, d) if w.rng.random() < 0.5 else w.op("Pow", d, w.const(2.0))
    return d, w.op("ReduceMean", square, axes)


def _layer_norm(w: Writer, x: str) -> str:
    if w.rng.random() < 0.4:
        return w.op("LayerNormalization", x, w.weight(_HIDDEN), w.weight(_HIDDEN), axis=-1, epsilon=1e-5)
    d, variance = _centered(w, x)
    y = w.op("Div", d, w.op("Sqrt", w.op("Add", variance, w.const(1e-5))))
    return w.op("Add", w.op("Mul", y, w.weight(_HIDDEN)), w.weight(_HIDDEN))


def _gelu(w: Writer, x: str) -> str:
    e = w.op("Erf", w.op("Div", x, w.const(1.4142135)))
    return w.op("Mul", w.op("Mul", x, w.op("Add", e, w.const(1.0))), w.const(0.5))


def _softmax(w: Writer, x: str) -> str:
    return w.op("Softmax", x, axis=-1)


def _attention(w: Writer, x: str) -> str:
    q, k, v = (_linear(w, x) for _ in range(3))
    scores = w.op("MatMul", q, w.op("Transpose", k, perm=[0, 2, 1]))
    return w.op("Add", x, w.op("MatMul", _softmax(w, w.op("Mul", scores, w.const(0.35))), v))


def _gate(w: Writer, x: str) -> str:
    both = w.op("MatMul", x, w.weight(_HIDDEN, 2 * _HIDDEN))
    n = w.const([_HIDDEN, _HIDDEN], np.int64)
    node = helper.make_node("Split", [both, n], [f"{both}a", f"{both}b"], axis=-1)
    w.nodes.append(node)
    return w.op("Mul", w.op("Sigmoid", f"{both}a"), f"{both}b")


def _slices(w: Writer, x: str) -> str:
    parts = []
    for start, end in ((0, 4), (4, 8)):
        parts.append(w.op("Slice", x, *(w.const([n], np.int64) for n in (start, end, -1))))
    return w.op("Concat", w.op("Neg", parts[1]), parts[0], axis=-1)


def _where(w: Writer, x: str) -> str:
    return w.op("Where", w.op("Greater", x, w.const(0.1)), x, w.op("Mul", x, w.const(0.3)))


def _seq_mean(w: Writer, x: str) -> str:
    return w.op("Sub", x, w.op("ReduceMean", x, w.const([1], np.int64)))


def _clip(w: Writer, x: str) -> str:
    return w.op("Clip", x, w.const(-0.5), w.const(0.8))


def _leaky(w: Writer, x: str) -> str:
    return w.op("LeakyRelu", x, alpha=0.1)


def _affine(w: Writer, x: str) -> str:
    n = _HIDDEN
    return w.op("Add", w.op("Mul", x, w.weight(n)), w.weight(n))


def _heads(w: Writer, x: str) -> str:
    y = w.op("Reshape", x, w.const([0, 0, 2, 4], np.int64))
    y = w.op("Transpose", y, perm=[0, 2, 1, 3])
    y = w.op("Softmax", y, axis=-1)
    y = w.op("Transpose", y, perm=[0, 2, 1, 3])
    return w.op("Add", x, w.op("Reshape", y, w.const([0, 0, 8], np.int64)))


ROWS: Sequence[Block] = (
    _linear,
    _layer_norm,
    _gelu,
    _softmax,
    _attention,
    _gate,
    _slices,
    _where,
    _seq_mean,
    _clip,
    _leaky,
    _affine,
    _heads,
    lambda w, x: w.op("Relu", x),
    lambda w, x: w.op("Tanh", x),
    lambda w, x: w.op("Add", x, _linear(w, w.op("Relu", _linear(w, x)))),
)


def _conv(w: Writer, x: str) -> str:
    n = _CHANNELS
    if w.rng.random() < 0.5:
        return w.op("Conv", x, w.weight(n, n, 3, 3), w.weight(n), pads=[1, 1, 1, 1])
    return w.op("Conv", x, w.weight(n, n // 2, 1, 1), w.weight(n), group=2)


def _batch_norm(w: Writer, x: str) -> str:
    n = _CHANNELS
    variance = w.const(w.rng.uniform(0.5, 2.0, n))
    return w.op("BatchNormalization", _conv(w, x), w.weight(n), w.weight(n), w.weight(n), variance, epsilon=1e-5)


IMAGES: Sequence[Block] = (
    _conv,
    _batch_norm,
    _batch_norm,
    _clip,
    _leaky,
    lambda w, x: w.op("Relu", x),
    lambda w, x: w.op("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    lambda w, x: w.op("InstanceNormalization", x, w.weight(_CHANNELS), w.weight(_CHANNELS), epsilon=1e-5),
    lambda w, x: w.op("Mul", x, w.op("Sigmoid", w.op("GlobalAveragePool", x))),
    lambda w, x: w.op("Sub", x, w.op("ReduceMean", x, w.const([2, 3], np.int64))),
    lambda w, x: w.op("Mul", x, w.op("HardSigmoid", x, alpha=0.25)),
)


def draw_graph(rng: np.random.Generator) -> onnx.ModelProto:
    """Draw a small graph of a few blocks.

    Returns:
        the model; its batch and length are open or fixed.
    """
    w = Writer(rng)
    rows = rng.random() < 0.6
    fixed = rng.random() < 0.4
    if rows:
        shape: list[object] = [2, 5, _HIDDEN] if fixed else ["b", "s", _HIDDEN]
    else:
        shape = [2, _CHANNELS, 5, 6] if fixed else ["b", _CHANNELS, "h", "w"]
    blocks = ROWS if rows else IMAGES
    x = "x"
    for _ in range(int(rng.integers(1, 5))):
        x = blocks[int(rng.integers(len(blocks)))](w, x)
    graph = helper.make_graph(
        w.nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(x, 1, [None] * len(shape))],
        w.held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


# ------------------------------------------------------------------ rewrites that keep the function


def rewrite(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Rewrite a graph without changing its function.

    Returns:
        a copy with other names; some copies went through onnxruntime's optimizer at level basic.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    if rng.random() < 0.35:
        made = _optimized(made)
        graph = made.graph
    fixed = {v.name for v in (*graph.input, *graph.output)}
    names: dict[str, str] = {}
    for node in graph.node:
        node.name = ""
        if node.op_type in ("Add", "Mul") and rng.random() < 0.3:
            node.input[0], node.input[1] = node.input[1], node.input[0]
        for names_of in (node.input, node.output):
            for i, name in enumerate(names_of):
                if name and name not in fixed:
                    names_of[i] = names.setdefault(name, f"v{len(names)}")
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    del graph.value_info[:]
    if rng.random() < 0.3:
        _insert_identity(graph, rng)
    return made


def _optimized(model: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = f"{folder}/m.onnx"
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def _insert_identity(graph: onnx.GraphProto, rng: np.random.Generator) -> None:
    place = int(rng.integers(len(graph.node)))
    node = graph.node[place]
    name = node.output[0]
    node.output[0] = f"{name}_"
    graph.node.insert(place + 1, helper.make_node("Identity", [f"{name}_"], [name]))


# ------------------------------------------------------------------ faults


def _pick(rng: np.random.Generator, found: Sequence[object]) -> int:
    return int(rng.integers(len(found)))


def _change_constant(model: onnx.ModelProto, rng: np.random.Generator, ulp: bool) -> bool:
    found = [t for t in model.graph.initializer if t.data_type == 1]
    if not found:
        return False
    tensor = found[_pick(rng, found)]
    array = numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    i = int(rng.integers(flat.size))
    if flat[i] == 0:
        return False
    if ulp:
        flat[i] = np.nextafter(flat[i], np.float32(np.inf if rng.random() < 0.5 else -np.inf))
    else:
        flat[i] *= np.float32(1 + 10.0 ** -rng.uniform(3, 6.5))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return True


def _change_attribute(
    model: onnx.ModelProto,
    rng: np.random.Generator,
    names: Sequence[str],
    change: Callable[[onnx.AttributeProto], bool],
) -> bool:
    found = [a for n in model.graph.node for a in n.attribute if a.name in names]
    return bool(found) and change(found[_pick(rng, found)])


def _other_axis(attribute: onnx.AttributeProto) -> bool:
    if attribute.name == "axis":
        attribute.i = 1 if attribute.i != 1 else 2
        return True
    i, j = len(attribute.ints) - 1, len(attribute.ints) - 2
    attribute.ints[i], attribute.ints[j] = attribute.ints[j], attribute.ints[i]
    return True


def _swap_axes(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    if rng.random() < 0.5:
        return _change_attribute(model, rng, ("axis", "perm"), _other_axis)
    reads = {n.input[1] for n in model.graph.node if n.op_type == "ReduceMean" and len(n.input) > 1}
    found = [t for t in model.graph.initializer if t.name in reads]
    if not found:
        return False
    tensor = found[_pick(rng, found)]
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.where(array == 1, 2, 1).astype(np.int64), tensor.name))
    return True


def _change_epsilon(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    factor = float(rng.choice([0.1, 10.0, 1.001, 1 + 1e-5]))

    def scale(attribute: onnx.AttributeProto) -> bool:
        attribute.f = float(np.float32(attribute.f * factor))
        return True

    found = [t for t in model.graph.initializer if t.data_type == 1 and _is_epsilon(t)]
    if found and rng.random() < 0.5:
        tensor = found[_pick(rng, found)]
        value = numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
        return True
    return _change_attribute(model, rng, ("epsilon",), scale)


def _is_epsilon(tensor: onnx.TensorProto) -> bool:
    array = numpy_helper.to_array(tensor)
    return bool(array.size == 1 and 0 < float(array.reshape(-1)[0]) < 1e-3)


def _drop_clip(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    found = [n for n in model.graph.node if n.op_type in ("Clip", "Relu", "LeakyRelu")]
    if not found:
        return False
    node = found[_pick(rng, found)]
    if node.op_type == "Clip" and rng.random() < 0.5:
        node.input[1 + int(rng.integers(2))] = ""
        return True
    node.op_type = "Identity"
    del node.input[1:]
    del node.attribute[:]
    return True


def _depend_on_size(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    """Replace a mean over an open axis by a sum and a division that is right at one size only."""
    if isinstance(model.graph.input[0].type.tensor_type.shape.dim[0].dim_param, str):
        opened = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
        if not opened:
            return False
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for i, node in enumerate(model.graph.node):
        if node.op_type == "ReduceMean" and len(node.input) > 1:
            axes = held.get(node.input[1])
            if axes is None or axes.reshape(-1).tolist() not in ([1], [2, 3]):
                continue
            node.op_type = "ReduceSum"
            name = node.output[0]
            node.output[0] = f"{name}_sum"
            count = 7.0 if axes.size == 1 else 21.0
            model.graph.initializer.append(numpy_helper.from_array(np.float32(count), f"{name}_n"))
            model.graph.node.insert(i + 1, helper.make_node("Div", [f"{name}_sum", f"{name}_n"], [name]))
            return True
    return False


def _swap_branches(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    places = {"Where": (1, 2), "Concat": (0, 1), "Sub": (0, 1), "Div": (0, 1)}
    found = [n for n in model.graph.node if n.op_type in places or (n.op_type == "Split" and len(n.output) == 2)]
    if not found:
        return False
    node = found[_pick(rng, found)]
    if node.op_type == "Split":
        node.output[0], node.output[1] = node.output[1], node.output[0]
        return True
    i, j = places[node.op_type]
    node.input[i], node.input[j] = node.input[j], node.input[i]
    return True


def _transpose_weight(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    found = [t for t in model.graph.initializer if t.data_type == 1 and len(t.dims) >= 2 and t.dims[0] == t.dims[1]]
    if not found:
        return False
    tensor = found[_pick(rng, found)]
    array = np.ascontiguousarray(numpy_helper.to_array(tensor).swapaxes(0, 1))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return True


def _other_attribute(model: onnx.ModelProto, rng: np.random.Generator) -> bool:
    def change(attribute: onnx.AttributeProto) -> bool:
        match attribute.name:
            case "alpha":
                attribute.f = float(np.float32(attribute.f * rng.choice([1.001, 2.0])))
            case "pads":
                attribute.ints[:] = [2, 0, 0, 2] if rng.random() < 0.5 else [0, 1, 2, 1]
            case "kernel_shape":
                attribute.ints[:] = [3, 1]
            case "group":
                attribute.i = 1
            case "keepdims":
                attribute.i = 1 - attribute.i
        return True

    return _change_attribute(model, rng, ("alpha", "pads", "kernel_shape", "group"), change)


FAULTS: dict[str, Callable[[onnx.ModelProto, np.random.Generator], bool]] = {
    "constant by one ulp": lambda m, r: _change_constant(m, r, ulp=True),
    "constant by 3e-7 to 1e-3": lambda m, r: _change_constant(m, r, ulp=False),
    "swapped axes": _swap_axes,
    "epsilon changed": _change_epsilon,
    "clip dropped": _drop_clip,
    "size-dependent": _depend_on_size,
    "wrong branch": _swap_branches,
    "transposed weight": _transpose_weight,
    "changed attribute": _other_attribute,
}


@dataclass(frozen=True)
class Outcome:
    """Verdict on one pair.

    Attributes:
        fault: planted fault; "" for an equal pair.
        truth: "different" if float64 shows a difference, "near" if the difference is below ``NOISE``, else "alike".
        verdict: the verdict of ``prove``.
        ulps: largest difference of a constant that counts as rounded.
        seconds: duration of ``prove``.
    """

    seed: int
    fault: str
    truth: str
    verdict: str
    reason: str
    ulps: float
    seconds: float


# Difference that rounding errors of float64 in an ill-conditioned norm reach, relative to the output's largest element
NOISE = 2.0**-36
_SIZES = ((5, 7, 3), (3, 4, 2), (1, 1, 1), (2, 9, 11))


def judge(first: onnx.ModelProto, second: onnx.ModelProto) -> str:
    """Compare two models in float64 at several sizes.

    Returns:
        "different", "near" (a difference that float64's own rounding may cause), "alike" or "invalid" (a file does
        not run).
    """
    pair = pair_files(OpenFile(first, "A"), OpenFile(second, "B"), {})
    sizes = [{name: row[i % 3] for i, name in enumerate(pair.symbols)} for row in _SIZES]
    found = find_difference(pair, sizes if pair.symbols else [{}])
    if not found.ran:
        return "invalid"
    if found.shown is None:
        return "alike"
    return "different" if found.relative > NOISE else "near"


def judge_fault(first: onnx.ModelProto, second: onnx.ModelProto, faulty: onnx.ModelProto) -> str:
    """Judge a fault that was planted in ``second``, a rewrite of ``first``.

    Returns:
        as `judge`; "alike" if only the rounding of the rewrite shows, because the fault has no effect.
    """
    truth = judge(first, faulty)
    if truth == "different":
        return judge(second, faulty)
    return truth


def planted(seed: int) -> Iterator[Outcome]:
    """Judge one equal pair and one pair with a fault.

    Yields:
        outcomes; nothing for a fault that does not apply.
    """
    rng = np.random.default_rng(seed)
    first = draw_graph(rng)
    second = rewrite(first, rng)
    if seed % 4 == 0:
        yield _outcome(seed, "", "alike", first, second)
    names = list(FAULTS)
    for i in rng.permutation(len(names)):
        faulty = onnx.ModelProto()
        faulty.CopyFrom(second)
        if not FAULTS[names[i]](faulty, rng) or faulty.SerializeToString() == second.SerializeToString():
            continue
        try:
            truth = judge_fault(first, second, faulty)
        # A fault may make a graph invalid in any way.
        except Exception:
            continue
        if truth == "invalid":
            continue
        yield _outcome(seed, names[i], truth, first, faulty)
        return


@dataclass(frozen=True)
class _Answer:
    """Verdict of ``prove``; "crash" if it raised an error."""

    verdict: str
    reason: str
    ulps: float
    seconds: float


def _ask(first: onnx.ModelProto | Path, second: onnx.ModelProto | Path) -> _Answer:
    start = time.perf_counter()
    try:
        proof = normdeploy.prove(first, second)
        verdict, reason = str(proof.verdict), proof.reason
        ulps = max((r.ulps for r in proof.rounded), default=0.0)
    # A crash is also a result.
    except Exception as error:
        verdict, reason, ulps = "crash", f"{type(error).__name__}: {error}", 0.0
    return _Answer(verdict, reason, ulps, time.perf_counter() - start)


def _outcome(seed: int, fault: str, truth: str, first: onnx.ModelProto, second: onnx.ModelProto) -> Outcome:
    answer = _ask(first, second)
    return Outcome(seed, fault, truth, answer.verdict, answer.reason[:160], answer.ulps, answer.seconds)


# ------------------------------------------------------------------ tools


@dataclass(frozen=True)
class ToolRow:
    """Verdict on one file that a tool rewrote."""

    name: str
    tool: str
    verdict: str
    reason: str
    changed: bool
    ulps: float
    seconds: float


def run_tool(tool: str, models: Sequence[Path], python: str, folder: Path) -> Iterator[ToolRow]:
    """Rewrite each file with a tool, and prove the result.

    Yields:
        a row for each file that the tool could rewrite.
    """
    if tool == "normdeploy":
        for path in models:
            target = folder / f"{path.stem}.normdeploy.onnx"
            try:
                normdeploy.optimize(path, output=target)
            # A file that optimize refuses has no result to prove.
            except Exception as error:
                print(f"{path.name}: {type(error).__name__}: {str(error)[:100]}")
                continue
            yield _prove_row(tool, path, target)
        return
    with Worker(python, tool) as worker:
        for path in models:
            target = folder / f"{path.stem}.{tool}.onnx"
            if worker.run(path.resolve(), target.resolve()) == "ok":
                yield _prove_row(tool, path, target)


def _prove_row(tool: str, path: Path, target: Path) -> ToolRow:
    answer = _ask(path, target)
    changed = _ops(path) != _ops(target)
    return ToolRow(path.stem, tool, answer.verdict, answer.reason, changed, answer.ulps, answer.seconds)


def _ops(path: Path) -> list[str]:
    return sorted(n.op_type for n in onnx.load(path, load_external_data=False).graph.node)


# ------------------------------------------------------------------ table


def write_table(folder: Path) -> None:
    """Write ``benchmarks/results/prove.md``."""
    lines = ["# Proofs that two files are equal", "", (__doc__ or "").strip(), ""]
    file = folder / "planted.json"
    if file.exists():
        lines += _planted_table([Outcome(**row) for row in json.loads(file.read_text())])
    for part, title in ((folder, "Rewrites of tools: the corpus"), (folder / "architectures", ARCHITECTURES)):
        rows = [ToolRow(**row) for path in sorted(part.glob("rows-*.json")) for row in json.loads(path.read_text())]
        if rows:
            lines += _tool_table(title, rows)
    RESULTS.write_text("\n".join(lines) + "\n")


def _planted_table(outcomes: list[Outcome]) -> list[str]:
    faulty = [o for o in outcomes if o.fault]
    wrong = [o for o in faulty if o.truth == "different" and o.verdict == "equal"]
    rounded = [o for o in faulty if o.truth == "different" and o.verdict == "equal up to rounding"]
    near = [o for o in faulty if o.truth == "near"]
    hidden = [o for o in near if o.verdict == "equal"]
    alike = [o for o in outcomes if not o.fault]
    false = [o for o in alike if o.verdict == "different"]
    proved = sum(o.verdict.startswith("equal") for o in alike)
    mean = sum(o.seconds for o in outcomes) / max(len(outcomes), 1)
    lines = [
        "## Planted faults",
        "",
        f"{len(faulty)} pairs with one fault, {len(alike)} pairs without; {mean:.2f} s per verdict on average.",
        "",
        f'- wrong "equal": {len(wrong)}{f" (seeds {_seeds(wrong)})" if wrong else ""}',
        f'- "equal up to rounding" for a fault that float64 shows: {len(rounded)}; the largest difference of a '
        f"constant is {max((o.ulps for o in rounded), default=0.0):.1f} ulp, as the verdict states",
        f"- differences below {NOISE:.1e} of the largest element, which rounding in float64 may cause: {len(near)};"
        f' "equal" for {len(hidden)} of them{f" (seeds {_seeds(hidden)})" if hidden else ""}',
        f"- equal pairs that are proved: {proved} of {len(alike)}; called different: {len(false)}",
        f"- crashes: {sum(o.verdict == 'crash' for o in outcomes)}",
        "",
        '"No effect" counts these and faults that float64 does not show, such as one in a value that a clamp cuts off.',
        "",
        "| fault | pairs | different | not known | equal | up to rounding | no effect: equal, other |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        own = [o for o in faulty if o.fault == fault]
        seen = Counter(o.verdict for o in own if o.truth == "different")
        none = [o for o in own if o.truth != "different"]
        equal = sum(o.verdict.startswith("equal") for o in none)
        cells = [seen[v] for v in ("different", "not known", "equal", "equal up to rounding")]
        lines.append(f"| {fault} | {len(own)} | {' | '.join(map(str, cells))} | {equal}, {len(none) - equal} |")
    return [*lines, ""]


def _seeds(outcomes: list[Outcome]) -> str:
    return ", ".join(str(o.seed) for o in outcomes[:20])


def _tool_table(title: str, rows: list[ToolRow]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "Only files whose ops the tool changed are counted.",
        "",
        "| tool | files | changed | equal | up to rounding | proved | different | not known | crash | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for tool in dict.fromkeys(r.tool for r in rows):
        own = [r for r in rows if r.tool == tool]
        changed = [r for r in own if r.changed]
        seen = Counter(r.verdict for r in changed)
        proved = seen["equal"] + seen["equal up to rounding"]
        share = f"{100 * proved / max(len(changed), 1):.1f} %"
        mean = sum(r.seconds for r in changed) / max(len(changed), 1)
        cells = [len(own), len(changed), seen["equal"], seen["equal up to rounding"], share]
        cells += [seen["different"], seen["not known"], seen["crash"], f"{mean:.2f}"]
        lines.append(f"| {tool} | {' | '.join(map(str, cells))} |")
    lines += ["", "Reasons of the other verdicts:", ""]
    reasons = Counter((r.tool, r.verdict, _short(r.reason)) for r in rows if not r.verdict.startswith("equal"))
    for (tool, verdict, reason), count in reasons.most_common(40):
        example = next(r.name for r in rows if (r.tool, r.verdict, _short(r.reason)) == (tool, verdict, reason))
        lines.append(f"- {count} × {tool}, {verdict}: {reason} (for example {example})")
    return [*lines, ""]


def _short(reason: str) -> str:
    return reason.split(";")[0].split("→")[0][:110]


def main() -> None:
    """Run one stage."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prove")
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("planted")
    stage.add_argument("folder", type=Path)
    stage.add_argument("--count", type=int, default=2000)
    stage.add_argument("--seed", type=int, default=1)
    stage.add_argument("--seconds", type=float, default=float("inf"))
    stage = stages.add_parser("tools")
    stage.add_argument("folder", type=Path)
    stage.add_argument("models", type=Path)
    stage.add_argument("--tools", nargs="+", default=["normdeploy", "onnxsim", "onnxslim", "onnxruntime-basic"])
    stage.add_argument("--python", default=sys.executable, help="where the tools are installed")
    stage = stages.add_parser("table")
    stage.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.stage == "planted":
        _run_planted(args.folder / "planted.json", args.seed, args.count, args.seconds)
    elif args.stage == "tools":
        models = sorted(args.models.glob("*.onnx"))
        for tool in args.tools:
            with tempfile.TemporaryDirectory() as scratch:
                rows = list(run_tool(tool, models, args.python, Path(scratch)))
            (args.folder / f"rows-{tool}.json").write_text(json.dumps([asdict(r) for r in rows], indent=1))
            print(tool, Counter(r.verdict for r in rows if r.changed), flush=True)
    else:
        write_table(args.folder)


def _run_planted(file: Path, seed: int, count: int, seconds: float) -> None:
    """Judge pairs, and add them to the outcomes of earlier runs."""
    outcomes = json.loads(file.read_text()) if file.exists() else []
    end = time.monotonic() + seconds
    for number in range(seed, seed + count):
        if time.monotonic() > end:
            print(f"stopped before seed {number}")
            break
        for outcome in planted(number):
            outcomes.append(asdict(outcome))
            bad = outcome.verdict == "crash" or (outcome.truth == "different" and outcome.verdict.startswith("equal"))
            if bad or (not outcome.fault and not outcome.verdict.startswith("equal")):
                print(outcome, flush=True)
        if number % 500 == 0:
            file.write_text(json.dumps(outcomes))
    file.write_text(json.dumps(outcomes))
    print(len(outcomes), Counter((o["truth"], o["verdict"]) for o in outcomes))


if __name__ == "__main__":
    main()
