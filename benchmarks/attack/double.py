"""Convert a model to float64.

Every floating-point tensor becomes double, and norm nodes are expanded by ONNX's definition.

onnxruntime runs the float64 model if it has all kernels. Otherwise onnx's ReferenceEvaluator runs it, with our
convolutions. All parameters are inputs of the float64 model, and so is a factor after every reduction. So one session
can estimate the effect of roundings in the original model (`jitter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from .builder import PARAMETER
from .kernels import OPS
from .spec import EXPANDED, expand

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
# Ops that sum or cancel, so that roundings of float64 matter
NOISY = {
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "ReduceL2",
    "ReduceL1",
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "AveragePool",
    "GlobalAveragePool",
    "Einsum",
    "Add",
    "Sub",
}
# Ops with factors that a rewrite may round, such as sqrt(n/(n − 1)) of an unbiased variance
FACTORS = {
    "Sqrt",
    "Reciprocal",
    "Pow",
    "Exp",
}
WHOLE = {
    "Shape",
    "Size",
    "NonZero",
    "ArgMax",
    "ArgMin",
    "Equal",
    "Less",
    "Greater",
    "LessOrEqual",
    "GreaterOrEqual",
    "Not",
    "And",
    "Or",
    "IsNaN",
    "IsInf",
}


class NoDouble(Exception):
    """Neither runtime evaluates the model in float64."""


def _tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    if tensor.data_type not in FLOATS:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def _retype(info: onnx.ValueInfoProto) -> None:
    if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type in FLOATS:
        info.type.tensor_type.elem_type = TensorProto.DOUBLE


def _value(node: onnx.NodeProto) -> onnx.TensorProto:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return attribute.t
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), kinds[attribute.name]))


@dataclass
class _Double:
    opset: int
    noisy: bool
    noise: list[str] = field(default_factory=list)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    # Noise of a sum of parameters -> its shape.
    sums: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Shapes of parameters.
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Tensors that are integers or booleans.
    whole: set[str] = field(default_factory=set)

    def graph(self, graph: onnx.GraphProto, top: bool) -> None:
        """Convert a graph in place.

        Args:
            top: the main graph; its inputs and outputs change type.
        """
        held = list(graph.initializer)
        self.shapes |= {t.name: tuple(t.dims) for t in held if PARAMETER in t.name and t.data_type in FLOATS}
        self.whole |= {t.name for t in held if t.data_type not in FLOATS}
        self.whole |= {i.name for i in graph.input if i.type.tensor_type.elem_type not in FLOATS}
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type == "Constant" and node.domain == "":
                tensor = onnx.TensorProto()
                tensor.CopyFrom(_value(node))
                tensor.name = node.output[0]
                held.append(tensor)
                self.whole |= {tensor.name} if tensor.data_type not in FLOATS else set()
            else:
                nodes.extend(self.node(node))
        held = [_tensor(t) for t in held]
        # A body's parameters are inputs of the model too; names are unique by construction.
        if self.noisy:
            for tensor in [
                t for t in held if PARAMETER in t.name and t.data_type in FLOATS and t.name not in self.params
            ]:
                self.params[tensor.name] = numpy_helper.to_array(tensor)
                held.remove(tensor)
        for info in [*graph.input, *graph.output]:
            _retype(info)
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.initializer.extend(held)
        if top:
            known = {info.name for info in graph.input}
            for name, array in self.params.items():
                if name not in known:
                    graph.input.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, array.shape))
            for name in self.noise:
                graph.input.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, self.sums.get(name, ())))

    def node(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Convert a node.

        Yields:
            the nodes that replace it.
        """
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                self.graph(attribute.g, False)
            elif attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.CopyFrom(_tensor(attribute.t))
            elif attribute.name in ("to", "dtype") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
        self.typed(node)
        if (node.domain, node.op_type) in EXPANDED:
            yield from expand(node, self.opset)
        elif self.noisy and node.op_type in ("Add", "Sub") and all(i in self.shapes for i in node.input):
            # The original rounds 1 + w at each use, but a rewrite rounds it once, and a loop may amplify the
            # difference.
            shape = np.broadcast_shapes(*(self.shapes[i] for i in node.input))
            yield from self.disturbed(node, f"factor_{len(self.noise)}", shape)
        elif self.noisy and node.op_type in NOISY | FACTORS and node.domain == "" and node.output[0] not in self.whole:
            yield from self.disturbed(node, f"{'factor' if node.op_type in FACTORS else 'noise'}_{len(self.noise)}", ())
        else:
            yield node

    def disturbed(self, node: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> Iterator[onnx.NodeProto]:
        """Multiply the node's result by the new input ``name``.

        Yields:
            the node and the product.
        """
        self.noise.append(name)
        self.sums |= {name: shape} if shape else {}
        result = node.output[0]
        node.output[0] = f"{result}__exact"
        yield node
        yield helper.make_node("Mul", [node.output[0], name], [result])

    def typed(self, node: onnx.NodeProto) -> None:
        """Add the node's outputs to ``whole`` if they are not floating; a body's results are assumed to be floating."""
        kinds = {a.name: a for a in node.attribute}
        if node.op_type == "Cast":
            whole = kinds["to"].i not in FLOATS
        elif node.op_type == "ConstantOfShape":
            whole = "value" in kinds and kinds["value"].t.data_type not in FLOATS
        elif node.op_type in WHOLE:
            whole = True
        else:
            source = node.input[1 if node.op_type == "Where" else 0] if node.input else ""
            whole = source in self.whole and node.op_type not in ("If", "Loop", "Scan")
        if whole:
            self.whole |= set(node.output)


def converted(
    model: onnx.ModelProto, noisy: bool
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Convert a model.

    Returns:
        the model in double, its parameters by name, and the shapes of its noise inputs.
    """
    double = onnx.ModelProto()
    double.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    opset = next((i.version for i in double.opset_import if i.domain in ("", "ai.onnx")), 17)
    work = _Double(opset, noisy)
    work.graph(double.graph, True)
    return double, work.params, {name: work.sums.get(name, ()) for name in work.noise}


class Evaluator:
    """Model in float64.

    ``runtime`` is "onnxruntime" or "reference".
    """

    def __init__(self, model: onnx.ModelProto, noisy: bool = False) -> None:
        self.model, self.params, self.noise = converted(model, noisy)
        self.outputs = [o.name for o in model.graph.output]
        try:
            self.runner: Any = session(self.model)
            self.runtime = "onnxruntime"
        # onnxruntime reports a missing kernel with several exception types.
        except Exception:
            self.reference()

    def reference(self) -> None:
        """Switch to onnx's evaluator.

        Raises:
            NoDouble: it can't load the model.
        """
        from onnx.reference import ReferenceEvaluator

        try:
            self.runner = ReferenceEvaluator(self.model, new_ops=OPS)
        except Exception as error:
            raise NoDouble(str(error)) from error
        self.runtime = "reference"

    def __call__(
        self, feed: dict[str, np.ndarray], jitter: np.random.Generator | None = None, ulp: float = 0.0
    ) -> list[np.ndarray]:
        """Evaluate the model.

        Args:
            jitter: move parameters, their sums and factors by ``ulp``, and other sums and differences by 1e-13,
                relatively.

        Returns:
            outputs in double.

        Raises:
            NoDouble: the model does not run.
        """
        full = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feed.items()}
        for name, default in self.params.items():
            # The caller may override a default.
            array = full.get(name, default)
            full[name] = array if jitter is None else np.asarray(array * (1 + ulp * jitter.uniform(-1, 1, array.shape)))
        for name, shape in self.noise.items():
            size = 1e-13 if name.startswith("noise") else ulp
            full[name] = np.ones(shape) if jitter is None else np.asarray(1 + size * jitter.uniform(-1, 1, shape))
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(a) for a in self.runner.run(None, full)]
        except Exception as error:
            if self.runtime == "onnxruntime" and "NOT_IMPLEMENTED" in str(error):
                self.reference()
                return self(feed, jitter, ulp)
            raise NoDouble(str(error)) from error


def session(model: onnx.ModelProto) -> Any:
    """Open an onnxruntime CPU session with its optimizer off and one thread.

    Returns:
        the session.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
