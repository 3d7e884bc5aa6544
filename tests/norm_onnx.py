"""The ONNX side of the writers: the same calls as nodes, in the forms of opsets 11 to 22."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.norm_writers import Operand, Size, T, Writer, broadcast

OPSETS = (11, 13, 16, 17, 18, 20, 21, 22)
IR_VERSION = 10
ONNX_TYPES = {
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
}
ONNX_OPS = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "neg": "Neg",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
}
ONNX_OPS |= {"abs": "Abs", "relu": "Relu", "round": "Round", "floor": "Floor", "tanh": "Tanh"}
REDUCE = {"mean": "ReduceMean", "sum": "ReduceSum", "l2": "ReduceL2", "l1": "ReduceL1", "max": "ReduceMax"}


@dataclass
class OnnxWriter(Writer):
    """Writes nodes. With ``exact`` every floating type is float64."""

    exact: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[T] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opset = self.choices("onnx.opset", OPSETS)
        self.constants = self.choices("onnx.constants", ["initializer", "Constant"])
        self.scalar_rank = self.choices("onnx.scalar_rank", [0, 1])
        self.negative_axes = self.choices("onnx.negative_axes", [False, True])
        self.reshape_by = self.choices("onnx.reshape", ["constant", "Shape Gather", "Shape start end", "Shape Slice"])

    def type(self, dtype: str) -> int:
        return ONNX_TYPES["float64" if self.exact and dtype.startswith("float") else dtype]

    def node(self, op: str, inputs: Sequence[str], shape: tuple[Size, ...], dtype: str, **attributes: object) -> T:
        name = self.fresh(op.lower())
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"n_{name}", **attributes))
        return T(name, shape, dtype)

    def constant(self, values: object, dtype: str) -> str:
        array = np.asarray(values, np.dtype("float64" if self.exact and dtype.startswith("float") else dtype))
        name = self.fresh("const")
        tensor = numpy_helper.from_array(array, name)
        if self.constants == "Constant":
            self.nodes.append(helper.make_node("Constant", [], [name], name=f"n_{name}", value=tensor))
        else:
            self.initializers.append(tensor)
        return name

    def input(self, name: str, shape: tuple[Size, ...]) -> T:
        x = T(name, shape, self.dtype)
        self.dims.update({s: (x, a) for a, s in enumerate(shape) if isinstance(s, str)})
        self.inputs.append(x)
        return x

    def param(self, name: str, values: np.ndarray) -> T:
        name = self.fresh(name)
        self.params[name] = values
        self.initializers.append(
            numpy_helper.from_array(np.asarray(values, np.float64 if self.exact else np.dtype(self.dtype)), name)
        )
        return T(name, values.shape, self.dtype)

    def named(self, a: Operand, dtype: str) -> str:
        if isinstance(a, T):
            return a.name
        return self.constant(a if self.scalar_rank == 0 else [a], dtype)

    def binary(self, op: str, a: Operand, b: Operand) -> T:
        tensors = [t for t in (a, b) if isinstance(t, T)]
        dtype = tensors[0].dtype
        shape = broadcast(*(t.shape for t in tensors), () if self.scalar_rank == 0 or len(tensors) == 2 else (1,))
        left, right = self.named(a, dtype), self.named(b, dtype)
        return (
            self.spell("onnx.add", left, right, shape, dtype)
            if op == "add"
            else self.node(ONNX_OPS[op], [left, right], shape, dtype)
        )

    def unary(self, op: str, a: T) -> T:
        return (
            self.unary("reciprocal", self.unary("sqrt", a))
            if op == "rsqrt"
            else self.node(ONNX_OPS[op], [a.name], a.shape, a.dtype)
        )

    def power(self, a: T, exponent: float) -> T:
        whole = (
            exponent == int(exponent)
            and self.opset >= 12
            and self.choices("onnx.pow_type", ["same", "int64"]) == "int64"
        )
        return self.node("Pow", [a.name, self.constant(exponent, "int64" if whole else a.dtype)], a.shape, a.dtype)

    def clamp_min(self, a: T, low: float) -> T:
        return self.spell("onnx.clamp_min", a, low)

    def axes_of(self, axes: Sequence[int], rank: int) -> list[int]:
        return [a - rank for a in axes] if self.negative_axes else list(axes)

    def reduce(self, op: str, x: T, axes: Sequence[int], keepdims: bool = True) -> T:
        shape, dims = self.reduced(x, axes, keepdims), self.axes_of(axes, x.rank)
        if self.opset >= (13 if op == "sum" else 18):
            return self.node(REDUCE[op], [x.name, self.constant(dims, "int64")], shape, x.dtype, keepdims=int(keepdims))
        return self.node(REDUCE[op], [x.name], shape, x.dtype, axes=dims, keepdims=int(keepdims))

    def moments(self, x: T, axes: Sequence[int], ddof: int, want: str) -> tuple[T, ...]:
        """As the exporters decompose torch's var: mean, sub, mul, mean, and n/(n − 1) for ddof 1."""
        mean = self.reduce("mean", x, axes)
        centred = self.sub(x, mean)
        var = self.reduce("mean", self.mul(centred, centred), axes)
        if ddof:
            n = self.n(x, axes)
            var = self.div(self.mul(var, n), n - 1.0 if isinstance(n, float) else self.sub(n, 1.0))
        var = self.unary("sqrt", var) if want == "std" else var
        return (var, mean) if want == "var_mean" else (var,)

    def sizes(self, x: T, axis: int) -> str:
        """An int64 tensor of shape (1,) that holds the size of one axis."""
        if self.reshape_by == "Shape start end" and self.opset >= 15:
            return self.node("Shape", [x.name], (1,), "int64", start=axis, end=axis + 1).name
        whole = self.node("Shape", [x.name], (x.rank,), "int64").name
        if self.reshape_by == "Shape Slice":
            bounds = [self.constant([axis], "int64"), self.constant([axis + 1], "int64")]
            return self.node("Slice", [whole, *bounds], (1,), "int64").name
        return self.node("Gather", [whole, self.constant([axis], "int64")], (1,), "int64", axis=0).name

    def reshape(self, x: T, shape: tuple[Size, ...]) -> T:
        dynamic = [s for s in shape if isinstance(s, str)]
        copied = [0 if isinstance(s, str) and x.shape[a : a + 1] == (s,) else s for a, s in enumerate(shape)]
        if not dynamic or (len(dynamic) == 1 and self.reshape_by == "constant"):
            target = self.constant([-1 if isinstance(s, str) else s for s in shape], "int64")
        elif self.reshape_by == "constant" and sum(isinstance(s, str) for s in copied) <= 1:
            target = self.constant([-1 if isinstance(s, str) else s for s in copied], "int64")
        else:
            parts = [
                self.sizes(*self.dims[s])
                if s in self.dims
                else self.constant([-1 if isinstance(s, str) else s], "int64")
                for s in shape
            ]
            target = self.node("Concat", parts, (len(shape),), "int64", axis=0).name
        return self.node("Reshape", [x.name, target], shape, x.dtype)

    def transpose(self, x: T, perm: Sequence[int]) -> T:
        return self.node("Transpose", [x.name], tuple(x.shape[a] for a in perm), x.dtype, perm=list(perm))

    def unsqueeze(self, x: T, axes: Sequence[int]) -> T:
        shape = list(x.shape)
        for axis in sorted(axes):
            shape.insert(axis, 1)
        if self.opset >= 13:
            return self.node("Unsqueeze", [x.name, self.constant(list(axes), "int64")], tuple(shape), x.dtype)
        return self.node("Unsqueeze", [x.name], tuple(shape), x.dtype, axes=list(axes))

    def expand(self, x: T, like: T) -> T:
        target = self.node("Shape", [like.name], (like.rank,), "int64")
        return self.node("Expand", [x.name, target.name], like.shape, x.dtype)

    def cast(self, x: T, dtype: str) -> T:
        return self.node("Cast", [x.name], x.shape, dtype, to=self.type(dtype))

    def take(self, x: T, axis: int, start: int, stop: int) -> T:
        shape = tuple(stop - start if a == axis else s for a, s in enumerate(x.shape))
        bounds = [self.constant([v], "int64") for v in (start, stop, axis)]
        return self.node("Slice", [x.name, *bounds], shape, x.dtype)

    def shape_product(self, x: T, axes: Sequence[int]) -> T:
        whole = self.node("Shape", [x.name], (x.rank,), "int64").name
        sizes = self.node("Gather", [whole, self.constant(list(axes), "int64")], (len(axes),), "int64", axis=0)
        product = {"axes": [0], "keepdims": 0} if self.opset < 18 else {"keepdims": 0}
        return self.cast(self.node("ReduceProd", [sizes.name], (), "int64", **product), x.dtype)

    def alive(self, outputs: Sequence[T]) -> list[onnx.NodeProto]:
        """The nodes that reach an output: exporters write no others."""
        needed, kept = {t.name for t in outputs}, []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(node)
        return kept[::-1]

    def proto(self, outputs: Sequence[T]) -> onnx.ModelProto:
        values = [
            helper.make_tensor_value_info(t.name, self.type(t.dtype), list(t.shape)) for t in (*self.inputs, *outputs)
        ]
        nodes, split = self.alive(outputs), len(self.inputs)
        used = {name for node in nodes for name in node.input}
        initializers = [t for t in self.initializers if t.name in used]
        graph = helper.make_graph(nodes, "generated", values[:split], values[split:], initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=IR_VERSION)
