"""What became of a file: is each norm one node, and are the numbers right?

**Numbers.** An output may be off from the float64 truth by max(2·e, 64u·max|y|): e is what the original file is off by
in the same runtime and type, u its unit roundoff. 64 is the certificate's 8·(1 + max|x|/σ)
(``rewriting.rounding_verdicts``) for
the corpus's inputs, which stay within 7σ. Where the original is not finite, any number is as good. bfloat16, which
onnxruntime's CPU provider can't run, is evaluated exactly: what is left are the roundings of folded parameters,
4u·max|y|. An epsilon that a Cast to half precision makes zero may be kept or be zero: the project keeps it, tools that
fold the Cast do not; either is right if the rest is.
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
    """Whether every norm of an expressible entry is in ``proto`` the standard node that it should be, or folded away.

    No op of another domain may have come in; what the original holds (onnxruntime's FusedConv) may stay, if it is no
    norm.
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
    """Whether a batch norm is still spelled out: more than a scale and a shift for each, or a scale behind a linear op
    of its own."""
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
        steps += not (behind and node.op_type == "Add")  # a MatMul's bias
    return steps > 2 * entry.expect.count("folded")


def _constants(proto: onnx.ModelProto) -> tuple[set[str], set[str], dict[str, int]]:
    """Tensors that are constant, those of them that hold one number, and how many nodes read each tensor."""
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
    """The inputs of an entry, the float64 outputs of its original file, and how far that file itself is off."""

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
        """(error, bound) of the output that is worst against its bound; (inf, 0) where it has another shape."""
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
        # what is zero exactly may come out as the rounding of the numbers around it
        bound = max(2 * own, multiple * _UNIT[self.entry.dtype] * scale, float(np.finfo(np.float32).tiny))
        return float(off.max()), bound


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """onnxruntime's CPU provider, its optimizer off."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return [np.asarray(v) for v in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]


def valid(proto: onnx.ModelProto) -> str:
    """Why onnx's checker refuses the file, "" where it does not."""
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the checker and shape inference share no base class
        return " ".join(str(error).split())[:160]
    return ""


def ops(proto: onnx.ModelProto) -> Sequence[str]:
    return [n.op_type for n in proto.graph.node if n.op_type != "Constant"]
