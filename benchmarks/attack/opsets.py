"""Test the conversion to newer opsets, for every operator that changed, with its attributes present and absent.

With ``--down``, test the conversion to older opsets, from 13 on, by `normdeploy.graphs.opset_lowering`.

``python -m benchmarks.attack.opsets --count 20000 --seed 0`` prints how many nodes were drawn, converted and refused,
and which of them became another function; it writes those to ``--output``.

Each graph is one node, sometimes in a body of If or in a local function, at an opset from 7 on. It is converted to a
newer one as `normdeploy.graphs.opset_conversion` converts a file. onnxruntime (optimizer off) runs both, and the
outputs are compared. They must be the same bits if the op does not round. If onnxruntime can't run one of the two
opsets, onnx's reference evaluator runs both. A node is "lost" if only its opset number changed and neither of the two
runs it; `normdeploy.optimize` reverts such conversions.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.graphs import opset_conversion
from normdeploy.graphs.newer_ops import inline_newer_functions
from normdeploy.graphs.opset_lowering import lower_opset
from normdeploy.graphs.region import RefusedError

from .nodes import OPS, draw_node

OLDEST, NEWEST = 7, 23
# Oldest opset to which files are lowered
LOWEST = 13
# Allowed difference in units of the largest output. For a newer opset, onnxruntime may use another kernel or expand the
# op. Then sums of at most 64 products may be added in another order. Each addition rounds by half a unit of the largest
# partial sum, which is up to 8 times as large as the largest output.
_ULPS = 64 * 8 / 2
# Ops that only move, select, compare or count numbers, so that results must have the same bits
_EXACT = (
    "Abs ArgMax ArgMin BitShift Cast CastLike Ceil Clip Compress Concat ConstantOfShape DepthToSpace DequantizeLinear"
    " Dropout Equal Expand EyeLike Flatten Floor Gather GatherElements GatherND Greater GreaterOrEqual Hardmax Identity"
    " IsInf IsNaN Less LessOrEqual Max MaxPool MaxUnpool Min Neg NonMaxSuppression NonZero OneHot Pad QuantizeLinear"
    " Range ReduceMax ReduceMin Relu Reshape ReverseSequence Round Scatter ScatterElements ScatterND Shape Sign Size"
    " Slice SpaceToDepth Split Squeeze Tile TopK Transpose Trilu Unique Unsqueeze Where"
)
# Ops whose result may be 0 or -0 if both are inputs; onnxruntime's kernels differ
_OF_TWO_ZEROS = ("Max", "Min", "ReduceMax", "ReduceMin", "Relu", "Clip")
# Ops whose kernels in onnxruntime crash the process if the node has training outputs
_CRASHING = ("BatchNormalization",)


@dataclass(frozen=True)
class Case:
    """File and its inputs.

    Attributes:
        target: opset to convert to.
    """

    op: str
    opset: int
    target: int
    proto: onnx.ModelProto
    feeds: dict[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """Result for one file.

    Attributes:
        kind: "not run", "refused", "right", "false" or "failed".
        oracle: evaluator that ran both files.
    """

    kind: str
    detail: str = ""
    oracle: str = ""


def versions(op: str) -> list[int]:
    """List the opsets from `OLDEST` on at which an operator begins or changes.

    Returns:
        sorted opsets.
    """
    found = [s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain]
    last = max(v for v in found if v <= NEWEST)
    return sorted({max(v, OLDEST) for v in found if v <= last})


CHANGED = {op: versions(op) for op in sorted(OPS) if len(versions(op)) > 1}
NEWER = {op: changes for op in sorted(OPS) if (changes := [v for v in versions(op) if v > LOWEST])}


def draw(seed: int) -> Case:
    """Draw a file.

    Returns:
        the case.
    """
    rng = np.random.default_rng([seed, 7])
    op = list(CHANGED)[int(rng.integers(len(CHANGED)))]
    # The opset is before a change, so that a conversion crosses at least one.
    changes = CHANGED[op]
    opset = int(rng.integers(changes[0], changes[-1]))
    target = int(rng.integers(opset + 1, NEWEST + 1))
    if rng.random() < 0.5:
        target = int(rng.choice([each for each in (17, 18, 21, 23) if each > opset]))
    node, arrays = draw_node(rng, op, opset)
    proto, feeds = _file(rng, node, arrays, opset)
    return Case(op, opset, target, proto, feeds)


def draw_down(seed: int) -> Case:
    """Draw a file that is lowered.

    Returns:
        the case.
    """
    rng = np.random.default_rng([seed, 9])
    op = list(NEWER)[int(rng.integers(len(NEWER)))]
    change = int(rng.choice(NEWER[op]))
    opset = int(rng.integers(change, NEWEST + 1))
    target = int(rng.integers(LOWEST, change))
    node, arrays = draw_node(rng, op, opset)
    proto, feeds = _file(rng, node, arrays, opset)
    return Case(op, opset, target, proto, feeds)


def _file(
    rng: np.random.Generator, node: onnx.NodeProto, arrays: list[np.ndarray | None], opset: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Wrap a node in a graph: inputs are fed or stored, dims known or not, shapes stated or not."""
    feeds: dict[str, np.ndarray] = {}
    stored, inputs = [], []
    fixed = float(rng.choice([0.1, 0.9]))
    old = bool(rng.random() < 0.1)
    for place, array in enumerate(arrays):
        if array is None:
            continue
        name = f"i{place}"
        stated = helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), _dims(rng, array.shape)
        )
        if place > 0 and rng.random() < fixed:
            stored.append(numpy_helper.from_array(array, name))
            # In files before IR version 4, weights are listed as inputs too.
            if old:
                inputs.append(stated)
        else:
            inputs.append(stated)
            feeds[name] = array
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    imports = [helper.make_opsetid("", opset)]
    nodes, functions = [node], []
    nest = rng.random()
    if nest < 0.06:
        inner = [f"f{name}" if name else "" for name in node.output]
        renamed = onnx.NodeProto()
        renamed.CopyFrom(node)
        renamed.output[:] = inner
        given = [name for name in dict.fromkeys(node.input) if name]
        made = [name for name in inner if name]
        functions.append(helper.make_function("own", "F", given, made, [renamed], imports))
        nodes = [helper.make_node("F", given, [o.name for o in outputs], domain="own")]
        imports = [*imports, helper.make_opsetid("own", 1)]
    elif nest < 0.12:
        branches = {}
        for key in ("then_branch", "else_branch"):
            renamed = onnx.NodeProto()
            renamed.CopyFrom(node)
            renamed.output[:] = [f"{key}_{name}" if name else "" for name in node.output]
            results = [onnx.ValueInfoProto(name=name) for name in renamed.output if name]
            branches[key] = helper.make_graph([renamed], key, [], results)
        feeds["condition"] = np.array(True)
        inputs.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
        nodes = [helper.make_node("If", ["condition"], [o.name for o in outputs], **branches)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    version = 3 if old and not functions else 8 if opset < 21 else 10
    proto = helper.make_model(graph, opset_imports=imports, ir_version=version, functions=functions)
    return _typed(proto, stated=bool(rng.random() < 0.4)), feeds


def _dims(rng: np.random.Generator, shape: tuple[int, ...]) -> list[int | str]:
    open_share = float(rng.choice([0.0, 0.0, 0.4, 1.0]))
    return [f"d{axis}_{size}" if rng.random() < open_share else size for axis, size in enumerate(shape)]


def _typed(proto: onnx.ModelProto, *, stated: bool) -> onnx.ModelProto:
    """Return ``proto`` with the types of its outputs, and with their shapes if ``stated``."""
    try:
        known = onnx.shape_inference.infer_shapes(proto)
    except onnx.shape_inference.InferenceError:
        return proto
    for output, seen in zip(proto.graph.output, known.graph.output, strict=True):
        output.CopyFrom(seen)
        if not stated:
            output.type.tensor_type.ClearField("shape")
    return proto


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in onnxruntime without its optimizer.

    Returns:
        outputs.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feeds)]


def run_reference(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in onnx's reference evaluator.

    Returns:
        outputs.
    """
    with np.errstate(all="ignore"):
        return [np.asarray(value) for value in ReferenceEvaluator(proto).run(None, feeds)]


ORACLES = {"onnxruntime": run, "reference": run_reference}


def converted(proto: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """Convert a copy as `normdeploy.rewriting` converts a file.

    Returns:
        the copy.

    Raises:
        RefusedError: it can't be converted.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    if target < proto.opset_import[0].version:
        return lower_opset(inline_newer_functions(copy, target), target)[0]
    if opset_conversion.ops_needing_conversion(copy, target):
        return opset_conversion.convert_opset(copy, target)
    return opset_conversion.raise_opset_number(copy, target)


def judge(case: Case) -> Verdict:
    """Convert a file and compare.

    Returns:
        the verdict.
    """
    before: dict[str, list[np.ndarray]] = {}
    crashing = case.op in _CRASHING and any(len(node.output) > 1 for node in case.proto.graph.node)
    for name, oracle in ORACLES.items():
        if crashing and oracle is run:
            continue
        try:
            before[name] = oracle(case.proto, case.feeds)
        # The exceptions of neither oracle share a base class.
        except Exception:
            continue
        break
    if not before:
        return Verdict("not run")
    try:
        made = converted(case.proto, case.target)
    except RefusedError as refusal:
        return Verdict("refused", str(refusal))
    # Any other exception is a fault.
    except Exception as e:
        return Verdict("failed", f"{type(e).__name__}: {e}"[:200])
    (name, wanted), failure = next(iter(before.items())), ""
    if name == "reference" and case.target < case.opset and not crashing and _has_outputs(made, case, wanted):
        # onnx's evaluator lacks the older forms of RoiAlign and GridSample, which onnxruntime has.
        return Verdict("right", "", "onnxruntime")
    try:
        after = ORACLES[name](made, case.feeds)
    # Any other exception is a fault.
    except Exception as e:
        failure = " ".join(str(e).split())[:200]
    kept = all(node in made.graph.node for node in case.proto.graph.node)
    lowers = case.target < case.opset
    if failure and not kept and not lowers:
        return Verdict("false", f"runs no more: {failure}")
    if failure:
        # A runtime may lack an operator at the newer opset; then the reference decides.
        try:
            name, wanted = "reference", run_reference(case.proto, case.feeds)
            after = run_reference(made, case.feeds)
        # The exceptions of neither oracle share a base class.
        except Exception:
            return Verdict("lost" if kept or lowers else "false", f"runs no more: {failure}")
    if len(wanted) != len(after):
        return Verdict("false", f"{len(wanted)} outputs became {len(after)}", name)
    for k, (old, new) in enumerate(zip(wanted, after, strict=True)):
        if not equal(old, new, case.op):
            return Verdict(
                "false",
                f"{k}: {old.dtype}{old.shape} {old.ravel()[:4]} became {new.dtype}{new.shape} {new.ravel()[:4]}",
                name,
            )
    return Verdict("lost" if failure else "right", failure, name)


def _has_outputs(made: onnx.ModelProto, case: Case, wanted: list[np.ndarray]) -> bool:
    """Return whether onnxruntime runs a model and computes the wanted outputs."""
    try:
        after = run(made, case.feeds)
    # onnxruntime's exceptions share no base class.
    except Exception:
        return False
    return all(equal(old, new, case.op) for old, new in zip(wanted, after, strict=True))


def equal(before: np.ndarray, after: np.ndarray, op: str) -> bool:
    """Compare two outputs.

    Returns:
        true if they have the same bits, or differ only by rounding; NaN equals NaN.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.dtype.kind != "f":
        return bool((before == after).all())
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if op in _EXACT.split():
        signs = np.isnan(before) | (np.signbit(before) == np.signbit(after)) | ((before == 0) & (op in _OF_TWO_ZEROS))
        return bool((same & signs).all())
    finite = np.abs(before[np.isfinite(before)]).astype(np.float64)
    unit = np.finfo(before.dtype).eps * max(float(finite.max(initial=0)), float(np.finfo(before.dtype).tiny))
    with np.errstate(all="ignore"):
        same |= np.abs(before.astype(np.float64) - after.astype(np.float64)) <= _ULPS * unit
    return bool(same.all())


def main() -> int:
    """Attack and print the counts.

    Returns:
        exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--down", action="store_true", help="lower the files")
    parser.add_argument("--output", type=Path, help="folder for the files that became another function")
    options = parser.parse_args()
    begun, counts = time.process_time(), Counter[str]()
    by_op: dict[str, Counter[str]] = defaultdict(Counter)
    oracles = Counter[str]()
    for seed in range(options.seed, options.seed + options.count):
        case = draw_down(seed) if options.down else draw(seed)
        verdict = judge(case)
        counts[verdict.kind] += 1
        by_op[case.op][verdict.kind] += 1
        oracles[verdict.oracle] += 1
        if verdict.kind in ("false", "failed", "lost"):
            print(seed, verdict.kind, case.op, case.opset, case.target, verdict.detail, flush=True)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                onnx.save(case.proto, options.output / f"{seed}_{case.op}_{case.opset}_{case.target}.onnx")
    kinds = ("right", "refused", "lost", "false", "failed", "not run")
    print("| op | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|", sep="\n")
    for op, seen in sorted(by_op.items()):
        print(f"| {op} | " + " | ".join(str(seen[kind]) for kind in kinds) + " |")
    print("| all | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    print(dict(oracles), f"{time.process_time() - begun:.0f} s")
    return 1 if counts["false"] + counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
