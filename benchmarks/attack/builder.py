"""Write ONNX graphs node by node, in any opset from 13 to 21, and record the facts that the judge needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# A size, or the name of a dynamic dim. Names "?k" stand for dynamic dims without a name in the file.
Dim = int | str
# Prefix of the names of trained constants. A rewrite may round these constants, so the judge allows changes of half an
# ulp.
PARAMETER = "w_"
TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.bool_): TensorProto.BOOL,
}


@dataclass(frozen=True)
class Input:
    """Graph input.

    Attributes:
        dims: size or dim name of each axis.
        mean: mean of the drawn values, an array that broadcasts to the input; None if the graph has no statistics.
        std: standard deviation of the drawn values, in the same form.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: np.dtype
    mean: np.ndarray | None = None
    std: np.ndarray | None = None


@dataclass
class Case:
    """Generated graph with hints for the judge.

    Attributes:
        honest: True if the graph contains only norms without a trap, so that every norm should be rewritten.
        numbers: numbers with which the graph compares values.
        sizes: sizes that must be tried, by dynamic dim.
        broadcast: pairs of dims that are equal, or of which one is 1.
        degenerate: True if an epsilon is zero.
        channel: axis of an output along which accuracy is judged separately.
        fold: True if the graph has a linear op and constants to fold, so that the result must be accurate.
    """

    family: str
    name: str
    model: onnx.ModelProto
    inputs: list[Input]
    honest: bool
    numbers: list[float] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    broadcast: list[tuple[str, str]] = field(default_factory=list)
    degenerate: bool = False
    channel: int = -1
    fold: bool = False


class Builder:
    """Build a graph. Every method that adds a node returns the name of its (first) output."""

    def __init__(
        self, rng: np.random.Generator, opset: int | None = None, dtype: Any = np.float32, prefix: str = ""
    ) -> None:
        self.rng = rng
        self.opset = int(rng.integers(13, 22)) if opset is None else opset
        self.dtype = np.dtype(dtype)
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[Input] = []
        self.outputs: list[tuple[str, tuple[Dim, ...] | None, np.dtype]] = []
        self.functions: list[onnx.FunctionProto] = []
        self.domains: set[str] = set()
        self.numbers: list[float] = []
        self.sizes: dict[str, list[int]] = {}
        self.broadcast: list[tuple[str, str]] = []
        self.degenerate = False
        self.channel = -1
        self.fold = False
        self.label = ""
        self._count = 0

    # ---- randomness
    def pick(self, *choices: Any) -> Any:
        """Pick one of the choices.

        Returns:
            the choice.
        """
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """Draw true with a probability.

        Returns:
            true or false.
        """
        return bool(self.rng.random() < probability)

    def note(self, text: str) -> None:
        """Add a choice to the case's name."""
        self.label = f"{self.label}-{text}" if self.label else text

    # ---- nodes
    def fresh(self, stem: str = "t") -> str:
        """Make a unique name.

        Returns:
            the name.
        """
        self._count += 1
        return f"{self.prefix}{stem}{self._count}"

    def op(self, kind: str, *inputs: str, outputs: int | Sequence[str] = 1, domain: str = "", **attributes: Any) -> str:
        """Add a node.

        Returns:
            its first output.
        """
        names = [self.fresh() for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        if domain:
            self.domains.add(domain)
        return names[0]

    def many(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs.

        Returns:
            its outputs.
        """
        self.op(kind, *inputs, outputs=outputs, **attributes)
        return list(self.nodes[-1].output)

    def const(self, value: Any, dtype: Any = None, stem: str = "c") -> str:
        """Add a constant, as an initializer or a Constant node.

        Returns:
            its name.
        """
        array = np.asarray(value, self.dtype if dtype is None else dtype)
        name = self.fresh(stem)
        tensor = numpy_helper.from_array(array, name)
        if self.rng.random() < 0.3:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.constants.append(tensor)
        return name

    def ints(self, *values: int) -> str:
        """Add a constant of int64.

        Returns:
            its name.
        """
        return self.const(np.array(values, np.int64), np.int64)

    def param(self, value: Any) -> str:
        """Add a trained number; the judge lets it move by its rounding.

        Returns:
            its name.
        """
        return self.const(value, stem=PARAMETER)

    def number(self, value: float, around: bool = True) -> str:
        """Add a scalar that the graph compares with; the judge tries it and its neighbors.

        Returns:
            its name.
        """
        value = float(np.asarray(value, self.dtype))
        if around:
            self.numbers.append(value)
        return self.const(value)

    def reduce(self, kind: str, x: str, axes: Sequence[int], keep: int = 1) -> str:
        """Add a reduction; axes are an input or an attribute, depending on the opset.

        Returns:
            its output.
        """
        if self.opset >= 18 or kind == "ReduceSum":
            return self.op(kind, x, self.ints(*axes), keepdims=keep)
        return self.op(kind, x, axes=list(axes), keepdims=keep)

    def cast(self, x: str, dtype: Any) -> str:
        """Add a Cast.

        Returns:
            its output.
        """
        return self.op("Cast", x, to=TYPES[np.dtype(dtype)])

    def clip(self, x: str, low: str, high: str) -> str:
        """Add a Clip.

        Returns:
            its output.
        """
        return self.op("Clip", x, low, high)

    def reshape(self, x: str, *sizes: int) -> str:
        """Add a Reshape.

        Returns:
            its output.
        """
        return self.op("Reshape", x, self.ints(*sizes))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Add an Unsqueeze.

        Returns:
            its output.
        """
        return self.op("Unsqueeze", x, self.ints(*axes))

    def slice(self, x: str, start: int, end: int, axis: int, step: int = 1) -> str:
        """Add a Slice.

        Returns:
            its output.
        """
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis), self.ints(step))

    def pad(self, x: str, pads: Sequence[int]) -> str:
        """Add a Pad with constants.

        Returns:
            its output.
        """
        return self.op("Pad", x, self.ints(*pads), mode="constant")

    def size_of(self, x: str, axis: int, scalar: bool = True) -> str:
        """Add the size of one axis, int64.

        Returns:
            a scalar, or one element.
        """
        shape = self.op("Shape", x)
        return self.op("Gather", shape, self.const(axis, np.int64) if scalar else self.ints(axis), axis=0)

    # ---- the frame
    def input(self, name: str, dims: Sequence[Dim], dtype: Any = None, mean: Any = None, std: Any = None) -> str:
        """Add a graph input.

        Returns:
            its name.
        """
        kind = self.dtype if dtype is None else np.dtype(dtype)
        self.inputs.append(Input(name, tuple(dims), kind, mean, std))
        return name

    def output(self, tensor: str, dims: Sequence[Dim] | None = None, dtype: Any = None) -> None:
        """Add a graph output."""
        self.outputs.append(
            (tensor, None if dims is None else tuple(dims), self.dtype if dtype is None else np.dtype(dtype))
        )

    def info(self, name: str, dims: Sequence[Dim] | None, dtype: np.dtype) -> onnx.ValueInfoProto:
        """Describe a tensor for the file.

        Returns:
            value info.
        """
        shape = None if dims is None else [None if isinstance(d, str) and d.startswith("?") else d for d in dims]
        return helper.make_tensor_value_info(name, TYPES[dtype], shape)

    def graph(self, name: str = "g") -> onnx.GraphProto:
        """Build the graph.

        Returns:
            the graph.
        """
        infos = [self.info(i.name, i.dims, i.dtype) for i in self.inputs]
        outs = [self.info(n, d, t) for n, d, t in self.outputs]
        return helper.make_graph(self.nodes, name, infos, outs, self.constants)

    def model(self) -> onnx.ModelProto:
        """Build the model.

        Returns:
            the model.
        """
        imports = [helper.make_opsetid("", self.opset)] + [helper.make_opsetid(d, 1) for d in sorted(self.domains)]
        version = 8 if self.opset < 19 else 10
        model = helper.make_model(self.graph(), opset_imports=imports, functions=self.functions, ir_version=version)
        # onnx.checker requires every output's rank.
        if any(dims is None for _, dims, _ in self.outputs):
            inferred = onnx.shape_inference.infer_shapes(model).graph.output
            for given, found in zip(model.graph.output, inferred, strict=True):
                if found.type.tensor_type.HasField("shape"):
                    given.type.tensor_type.shape.CopyFrom(found.type.tensor_type.shape)
        return model

    def case(self, family: str, honest: bool) -> Case:
        """Build the case.

        Returns:
            the case.
        """
        marks = (self.numbers, self.sizes, self.broadcast, self.degenerate, self.channel, self.fold)
        return Case(family, self.label, self.model(), self.inputs, honest, *marks)
