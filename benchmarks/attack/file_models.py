"""Draw models whose outputs depend on every stored number.

They consist of norms, convolutions and products, with tables of each data type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from .storing import PACKED

ROWS, WIDTH = 3, 4
_OPSETS = (13, 17, 18, 21, 23)
# Type -> the first opset whose Cast accepts it, and numpy's type.
TABLES = {
    TensorProto.FLOAT: (9, np.float32),
    TensorProto.DOUBLE: (9, np.float64),
    TensorProto.FLOAT16: (9, np.float16),
    TensorProto.BFLOAT16: (13, ml_dtypes.bfloat16),
    TensorProto.BOOL: (9, np.bool_),
    TensorProto.INT8: (9, np.int8),
    TensorProto.INT16: (9, np.int16),
    TensorProto.INT32: (9, np.int32),
    TensorProto.INT64: (9, np.int64),
    TensorProto.UINT8: (9, np.uint8),
    TensorProto.UINT16: (9, np.uint16),
    TensorProto.UINT32: (9, np.uint32),
    TensorProto.UINT64: (9, np.uint64),
    TensorProto.FLOAT8E4M3FN: (19, ml_dtypes.float8_e4m3fn),
    TensorProto.FLOAT8E4M3FNUZ: (19, ml_dtypes.float8_e4m3fnuz),
    TensorProto.FLOAT8E5M2: (19, ml_dtypes.float8_e5m2),
    TensorProto.FLOAT8E5M2FNUZ: (19, ml_dtypes.float8_e5m2fnuz),
    TensorProto.INT4: (21, ml_dtypes.int4),
    TensorProto.UINT4: (21, ml_dtypes.uint4),
    TensorProto.FLOAT4E2M1: (23, ml_dtypes.float4_e2m1fn),
}
_QUANTIZED = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN)


def tensor(name: str, kind: int, array: np.ndarray) -> TensorProto:
    """Make a dense raw tensor; types with several numbers per byte are packed by hand.

    Returns:
        the tensor.
    """
    made = TensorProto(name=name, data_type=kind, dims=array.shape)
    if kind == TensorProto.STRING:
        made.string_data.extend(str(each).encode() for each in array.ravel())
    elif bits := PACKED.get(kind):
        cells = array.ravel().view(np.uint8) & (2**bits - 1)
        together = 8 // bits
        cells = np.pad(cells, (0, -len(cells) % together)).reshape(-1, together)
        made.raw_data = (cells << (np.arange(together, dtype=np.uint8) * bits)).sum(1).astype(np.uint8).tobytes()
    else:
        made.raw_data = array.tobytes()
    return made


@dataclass
class Drawn:
    """Graph as it grows.

    Attributes:
        value: last tensor, [ROWS, WIDTH].
        constants: weights are Constant nodes instead of initializers.
        exact: outputs that must have the same bits.
    """

    rng: np.random.Generator
    opset: int
    prefix: str = ""
    value: str = "x"
    constants: bool = False
    nodes: list[NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    outputs: list[ValueInfoProto] = field(default_factory=list)
    functions: list[FunctionProto] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)

    def new(self) -> str:
        """Make a name.

        Returns:
            unique name of a tensor.
        """
        return f"{self.prefix}t{len(self.nodes)}"

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        """Add a node.

        Returns:
            its output.
        """
        name = self.new()
        self.nodes.append(helper.make_node(op, inputs, [name], domain=domain, **attributes))
        return name

    def weight(self, array: object, kind: int = TensorProto.FLOAT) -> str:
        """Store a weight; one in six with the same bytes and shape is shared.

        Returns:
            its name.
        """
        values = np.asarray(array)
        if kind in TABLES:
            with np.errstate(all="ignore"):
                values = values.astype(TABLES[kind][1])
        name = f"{self.prefix}w{len(self.weights)}_{len(self.nodes)}"
        made = tensor(name, kind, values)
        if self.constants:
            node = helper.make_node("Constant", [], [name], value=made)
            self.nodes.append(node)
        else:
            self.weights.append(made)
        return name

    def numbers(self, *shape: int) -> np.ndarray:
        """Draw numbers of about 1; some or most are 0, and a few are -0.

        Returns:
            float32.
        """
        values = self.rng.uniform(0.4, 1.2, shape) * self.rng.choice([-1, 1], shape)
        values[self.rng.random(shape) < self.rng.choice([0.0, 0.5, 0.9, 1.0], p=[0.4, 0.4, 0.15, 0.05])] = 0
        values[self.rng.random(shape) < 0.03] = -0.0
        return values.astype(np.float32)

    def positive(self, *shape: int) -> np.ndarray:
        """Draw positive numbers of about 1.

        Returns:
            float32.
        """
        return self.rng.uniform(0.5, 1.5, shape).astype(np.float32)


def _product(d: Drawn) -> None:
    d.value = d.add("MatMul", d.value, d.weight(d.numbers(WIDTH, WIDTH) / 2))
    if d.rng.random() < 0.5:
        d.value = d.add("Add", d.value, d.weight(d.numbers(WIDTH)))


def _shared_product(d: Drawn) -> None:
    weight = d.weight(d.numbers(WIDTH, WIDTH) / 2)
    d.value = d.add("MatMul", d.add("Tanh", d.add("MatMul", d.value, weight)), weight)


def _gemm(d: Drawn) -> None:
    bias = [d.weight(d.numbers(WIDTH))] if d.rng.random() < 0.7 else []
    d.value = d.add("Gemm", d.value, d.weight(d.numbers(WIDTH, WIDTH) / 2), *bias, transB=int(d.rng.integers(2)))


def _mean(d: Drawn, value: str) -> str:
    if d.opset < 18:
        return d.add("ReduceMean", value, axes=[-1])
    return d.add("ReduceMean", value, d.weight(np.array([-1]), TensorProto.INT64))


def _spelled(d: Drawn) -> None:
    """Add a hand-written layer norm or RMS norm."""
    center = d.add("Sub", d.value, _mean(d, d.value)) if d.rng.random() < 0.6 else d.value
    two = d.weight(np.array(2.0)) if d.rng.random() < 0.5 else ""
    square = d.add("Pow", center, two) if two else d.add("Mul", center, center)
    # Like the width of a row, epsilon may be a scalar or a row of one number.
    epsilon = d.weight(np.full((1,) * int(d.rng.integers(2)), d.rng.choice([0.25, 0.1])))
    root = d.add("Sqrt", d.add("Add", _mean(d, square), epsilon))
    d.value = d.add("Mul", d.add("Div", center, root), d.weight(d.numbers(WIDTH)))
    if d.rng.random() < 0.5:
        d.value = d.add("Add", d.value, d.weight(d.numbers(WIDTH)))


def _node(d: Drawn) -> None:
    if d.opset >= 17:
        scale = [d.weight(d.numbers(WIDTH)), d.weight(d.numbers(WIDTH))][: int(d.rng.integers(1, 3))]
        d.value = d.add("LayerNormalization", d.value, *scale, axis=-1, epsilon=0.25)


def _convolution(d: Drawn) -> None:
    """Add a convolution with a batch norm after or before it, on an image made of the row."""
    image = d.add("Reshape", d.value, d.weight(np.array([ROWS, WIDTH, 1, 1]), TensorProto.INT64))
    kernel = int(d.rng.choice([1, 3]))

    def convolve(value: str) -> str:
        """Add the convolution.

        Returns:
            its output.
        """
        bias = [d.weight(d.numbers(WIDTH))] if d.rng.random() < 0.5 else []
        weight = d.weight(d.numbers(WIDTH, WIDTH, kernel, kernel) / 2)
        return d.add("Conv", value, weight, *bias, pads=[kernel // 2] * 4)

    def normalize(value: str) -> str:
        """Add the batch norm.

        Returns:
            its output.
        """
        arrays = (d.numbers(WIDTH), d.numbers(WIDTH), d.numbers(WIDTH), d.positive(WIDTH))
        return d.add("BatchNormalization", value, *(d.weight(each) for each in arrays), epsilon=0.1)

    steps = [convolve, normalize]
    if d.rng.random() < 0.3:
        steps.reverse()
    for step in steps:
        image = step(image)
    d.value = d.add("Reshape", image, d.weight(np.array([ROWS, WIDTH]), TensorProto.INT64))


def _table(d: Drawn) -> None:
    """Add a table of any type that a Cast reads, to the chain and as a separate output."""
    kinds = [kind for kind, (since, _) in TABLES.items() if d.opset >= since]
    kind = int(d.rng.choice(kinds))
    shape = (WIDTH,) if d.rng.random() < 0.7 else (1, WIDTH - 1)
    dtype = np.dtype(TABLES[kind][1])
    if dtype.kind in "iub" or dtype.name in ("int4", "uint4"):
        values = d.rng.integers(-8 if dtype.name in ("int4",) or dtype.kind == "i" else 0, 8, shape)
    else:
        values = d.numbers(*shape)
    stored = d.weight(values, kind)
    read = d.add("Cast", stored, to=TensorProto.FLOAT)
    if d.prefix == "":
        d.outputs.append(helper.make_tensor_value_info(read, TensorProto.FLOAT, list(shape)))
        d.exact.append(read)
    if shape == (WIDTH,):
        d.value = d.add("Add", d.value, d.add("Tanh", read))


def _dequantized(d: Drawn) -> None:
    kind = int(d.rng.choice(_QUANTIZED))
    if d.opset < (TABLES[kind][0] if TABLES[kind][0] > 9 else 10):
        return
    values: np.ndarray = d.numbers(WIDTH, WIDTH)
    low = -8 if kind in (TensorProto.INT8, TensorProto.INT4) else 0
    if kind != TensorProto.FLOAT8E4M3FN:
        values = d.rng.integers(low, 8, (WIDTH, WIDTH))
    zero = [d.weight(np.zeros(WIDTH) if low < 0 or kind == TensorProto.FLOAT8E4M3FN else np.full(WIDTH, 4), kind)]
    stored = d.weight(values, kind)
    weight = d.add("DequantizeLinear", stored, d.weight(d.positive(WIDTH) / 8), *zero, axis=1)
    d.value = d.add("MatMul", d.value, weight)


def _gathered(d: Drawn) -> None:
    kind = int(d.rng.choice([TensorProto.INT64, TensorProto.INT32]))
    d.value = d.add("Gather", d.value, d.weight(d.rng.permutation(WIDTH) * d.rng.integers(0, 2), kind), axis=1)


def _text(d: Drawn) -> None:
    if d.prefix == "":
        words = np.array(d.rng.choice(["", "a", "naïve", "nul\0"], 2), object)
        read = d.add("Identity", d.weight(words, TensorProto.STRING))
        d.outputs.append(helper.make_tensor_value_info(read, TensorProto.STRING, [2]))
        d.exact.append(read)


def _digits(d: Drawn) -> None:
    """Add a table whose numbers are written as strings."""
    words = np.array([f"{number:.3f}" for number in d.numbers(WIDTH)], object)
    d.value = d.add("Add", d.value, d.add("Cast", d.weight(words, TensorProto.STRING), to=TensorProto.FLOAT))


def _unread(d: Drawn) -> None:
    """Add a weight that no node reads, of a type that a runtime need not know."""
    kinds = {TensorProto.COMPLEX64: np.complex64, TensorProto.COMPLEX128: np.complex128, TensorProto.DOUBLE: np.float64}
    kind = int(d.rng.choice(list(kinds)))
    if not d.constants:
        d.weights.append(tensor(f"{d.prefix}unread{len(d.weights)}_{len(d.nodes)}", kind, np.ones(3, kinds[kind])))


def _body(d: Drawn, prefix: str, inputs: list[ValueInfoProto], value: str, extra: list[NodeProto]) -> GraphProto:
    inner = Drawn(d.rng, d.opset, prefix, value, constants=bool(d.rng.random() < 0.3))
    for _ in range(int(d.rng.integers(1, 3))):
        INNER[int(d.rng.integers(len(INNER)))](inner)
    inner.value = inner.add("Identity", inner.value)
    outputs = [helper.make_tensor_value_info(inner.value, TensorProto.FLOAT, [ROWS, WIDTH])]
    first = [helper.make_tensor_value_info(o, TensorProto.BOOL, []) for n in extra for o in n.output]
    return helper.make_graph([*extra, *inner.nodes], prefix, inputs, [*first, *outputs], inner.weights)


def _if(d: Drawn) -> None:
    place = f"i{len(d.nodes)}"
    condition = d.weight(np.array(bool(d.rng.integers(2))), TensorProto.BOOL)
    if d.rng.random() < 0.5:
        limit = d.weight(np.array(0.0))
        condition = d.add("Greater", d.add("ReduceMax", d.value, keepdims=0), limit)
    branches = {key: _body(d, f"{place}{key[0]}_", [], d.value, []) for key in ("then_branch", "else_branch")}
    d.value = d.add("If", condition, **branches)


def _loop(d: Drawn) -> None:
    place = f"l{len(d.nodes)}_"
    inputs = [
        helper.make_tensor_value_info(f"{place}n", TensorProto.INT64, []),
        helper.make_tensor_value_info(f"{place}c", TensorProto.BOOL, []),
        helper.make_tensor_value_info(f"{place}x", TensorProto.FLOAT, [ROWS, WIDTH]),
    ]
    go_on = helper.make_node("Identity", [f"{place}c"], [f"{place}o"])
    body = _body(d, place, inputs, f"{place}x", [go_on])
    trips = d.weight(np.array(2), TensorProto.INT64)
    d.value = d.add("Loop", trips, "", d.value, body=body)


def _function(d: Drawn) -> None:
    name = f"F{len(d.functions)}"
    inner = Drawn(d.rng, d.opset, f"{name}_", "p", constants=True)
    for _ in range(int(d.rng.integers(1, 3))):
        INNER[int(d.rng.integers(len(INNER)))](inner)
    scaled = inner.add("Mul", inner.value, "scale")
    opsets = [helper.make_opsetid("", d.opset)]
    d.functions.append(helper.make_function("own", name, ["p", "scale"], [scaled], inner.nodes, opsets))
    d.value = d.add(name, d.value, d.weight(d.numbers(WIDTH)), domain="own")


INNER: tuple[Callable[[Drawn], None], ...] = (
    *(_product, _shared_product, _gemm, _spelled, _spelled, _node, _convolution, _table, _dequantized, _gathered),
)
STEPS = (*INNER, _spelled, _convolution, _table, _text, _digits, _unread, _if, _loop, _function)


def draw(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """Draw a model with dense raw weights.

    Returns:
        the model, its input, and the outputs that must have the same bits.
    """
    rng = np.random.default_rng([seed, 1])
    d = Drawn(rng, int(rng.choice(_OPSETS)))
    for _ in range(int(rng.integers(2, 5))):
        STEPS[int(rng.integers(len(STEPS)))](d)
    d.value = d.add("Identity", d.value)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, WIDTH])]
    # A caller may override a weight that is also an input.
    if d.weights and rng.random() < 0.1:
        also = d.weights[int(rng.integers(len(d.weights)))]
        inputs.append(helper.make_tensor_value_info(also.name, also.data_type, list(also.dims)))
    outputs = [helper.make_tensor_value_info(d.value, TensorProto.FLOAT, [ROWS, WIDTH]), *d.outputs]
    graph = helper.make_graph(d.nodes, "g", inputs, outputs, d.weights)
    opsets = [helper.make_opsetid("", d.opset), *([helper.make_opsetid("own", 1)] if d.functions else [])]
    version = 10 if d.opset >= 21 else 8
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=version, functions=d.functions)
    return proto, {"x": rng.uniform(-2, 2, (ROWS, WIDTH)).astype(np.float32)}, d.exact
