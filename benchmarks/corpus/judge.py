"""Judge a result: check that each norm is one node, and that the numbers are right.

**Numbers.** An output may differ from the float64 truth by max(2·e, 64u·max|y|). Here e is the error of the original
file in the same runtime and type, and u is the unit roundoff of the type. The factor 64 is the factor 8·(1 + max|x|/σ)
of certificates (``normdeploy.rewriting.rounding_verdicts``), because the inputs stay within 7σ. If the original result
is not finite, any number passes.

onnxruntime's CPU provider can't run bfloat16, so bfloat16 files are evaluated exactly. Then only the roundings of
folded parameters remain, and the bound is 4u·max|y|. A Cast to half precision may turn an epsilon into zero. normdeploy
keeps such an epsilon, and tools that fold the Cast do not. Both are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort

from models.case import Case, norm_ops

from . import exact
from .entry import Entry

_REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool"}
_LINEAR = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
_UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "mixed": 2.0**-11}


def fits(entry: Entry, proto: onnx.ModelProto, original: onnx.ModelProto | None = None) -> bool:
    """Check that every norm of an expressible entry is its expected standard node in ``proto``, or folded away.

    No op of another domain may have been added. Such ops of the original (onnxruntime's FusedConv) may stay, unless
    they are norms.

    Returns:
        true if all norms fit.
    """
    nodes = [n for n in proto.graph.node if n.op_type != "Constant"]
    held = {n.op_type for n in original.graph.node if "Norm" not in n.op_type} if original is not None else set()
    if any(n.domain not in ("", "ai.onnx") and n.op_type not in held for n in nodes):
        return False
    found = norm_ops(nodes, "GroupNormalization" in entry.expect)
    if not Case(entry.name, "", lambda: None, (), entry.expect).accepts(found):  # type: ignore[arg-type, return-value]
        return False
    if not entry.survivors and any(n.op_type in _REDUCTIONS for n in nodes):
        return False
    return "folded" not in entry.expect or not _scales(entry, proto)


def _scales(entry: Entry, proto: onnx.ModelProto) -> bool:
    """Check if a batch norm is still spelled out: more than a scale and a shift for each, or a scale after its own
    linear op.
    """
    constant, scalars, readers = _constants(proto)
    makers = {o: n for n in proto.graph.node for o in n.output}
    steps = 0
    for node in proto.graph.node:
        vectors = [i for i in node.input if i in constant - scalars]
        data = [i for i in node.input if i not in constant]
        if node.op_type not in ("Add", "Sub", "Mul", "Div") or len(vectors) != 1 or len(data) != 1:
            continue
        maker = makers.get(data[0])
        behind = maker is not None and maker.op_type in _LINEAR and readers[data[0]] == 1
        if behind and node.op_type != "Add" and maker is not None:
            weights = [i for i in maker.input if i in constant]
            if weights and all(readers[w] == 1 for w in weights):
                return True
        # A MatMul's bias.
        steps += not (behind and node.op_type == "Add")
    return steps > 2 * entry.expect.count("folded")


def _constants(proto: onnx.ModelProto) -> tuple[set[str], set[str], dict[str, int]]:
    """Return the constant tensors, those of them with one number, and the number of nodes that read each tensor."""
    scalars = {t.name for t in proto.graph.initializer if np.prod(t.dims) == 1}
    constant = {t.name for t in proto.graph.initializer}
    readers: dict[str, int] = {}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            constant.add(node.output[0])
            if not any(a.HasField("t") and np.prod(a.t.dims) > 1 for a in node.attribute):
                scalars.add(node.output[0])
        elif node.input and all(i in constant for i in node.input if i):
            constant.add(node.output[0])
            if all(i in scalars for i in node.input if i):
                scalars.add(node.output[0])
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    return constant, scalars, readers


class Truth:
    """Inputs of an entry, the float64 outputs of its original file, and that file's own error."""

    def __init__(self, entry: Entry, original: onnx.ModelProto, reference: onnx.ModelProto | None = None) -> None:
        self.entry = entry
        self.feeds = list(entry.feeds(original))
        self.exact = [
            [exact.outputs(reference or original, f, rounded) for f in self.feeds] for rounded in (False, True)
        ]
        self._before = [self._run(original, f) for f in self.feeds]

    def _run(self, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return exact.outputs(proto, feeds) if self.entry.dtype == "bfloat16" else run(proto, feeds)

    def error(self, proto: onnx.ModelProto) -> tuple[float, float]:
        """Run a file and compare.

        Returns:
            (error, bound) of the output that is worst relative to its bound; (inf, 0) if a shape differs.
        """
        got = [self._run(proto, f) for f in self.feeds]
        return min((self._worst(got, truths) for truths in self.exact), key=lambda pair: pair[0] / (pair[1] or 1e-300))

    def _worst(self, results: list[list[np.ndarray]], exact_results: list[list[np.ndarray]]) -> tuple[float, float]:
        worst = (0.0, 1.0)
        for gots, truths, befores in zip(results, exact_results, self._before, strict=True):
            for got, truth, before in zip(gots, truths, befores, strict=True):
                found = self._one(got, truth, before)
                if found[0] * worst[1] > worst[0] * found[1] or found[1] == 0.0:
                    worst = found
        return worst

    def _one(self, got: np.ndarray, truth: np.ndarray, before: np.ndarray) -> tuple[float, float]:
        if got.shape != truth.shape:
            return float("inf"), 0.0
        got, before = got.astype(np.float64), before.astype(np.float64)
        judged = np.isfinite(truth) & np.isfinite(before)
        if not judged.any():
            return 0.0, 1.0
        scale = float(np.abs(truth[judged]).max())
        off = np.where(np.isfinite(got), np.abs(got - truth), np.inf)[judged]
        own = float(np.abs(before - truth)[judged].max())
        multiple = 4 if self.entry.dtype == "bfloat16" else 64
        # An exact zero may come out as the rounding of the numbers around it.
        bound = max(2 * own, multiple * _UNIT[self.entry.dtype] * scale, float(np.finfo(np.float32).tiny))
        return float(off.max()), bound


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a file in onnxruntime's CPU provider with its optimizer off.

    Returns:
        outputs.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return [np.asarray(v) for v in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]


def valid(proto: onnx.ModelProto) -> str:
    """Check a file with onnx's checker.

    Returns:
        the reason for a refusal, or "".
    """
    try:
        onnx.checker.check_model(proto, full_check=True)
    # The checker and shape inference share no base class.
    except Exception as error:
        return " ".join(str(error).split())[:160]
    return ""


def ops(proto: onnx.ModelProto) -> Sequence[str]:
    """List the op types of the main graph without Constant.

    Returns:
        op types.
    """
    return [n.op_type for n in proto.graph.node if n.op_type != "Constant"]
