"""Graph under construction, with the choices that led to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NAMES = ("x", "gamma", "beta", "w", "h", "y", "weight", "scale", "bias", "gamma_migrated", "w_1", "y_0", "t")


@dataclass(frozen=True)
class Value:
    """Tensor with its name and its shape for the smallest batch."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Sheet:
    """Graph under construction. Names are drawn from a short list, so that they collide with names that a rewriter
    might use.

    Attributes:
        half: floating tensors are float16.
        words: the choices.
    """

    rng: np.random.Generator
    half: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> Any:
        """Return the floating type."""
        return np.float16 if self.half else np.float32

    def chance(self, share: float) -> bool:
        """Draw true with a probability.

        Returns:
            true or false.
        """
        return bool(self.rng.random() < share)

    def pick(self, what: str, choices: dict[Any, float]) -> Any:
        """Pick one of ``choices`` by weight, and record it under ``what``.

        Returns:
            the choice.
        """
        weights = np.array(list(choices.values()), float)
        chosen = list(choices)[int(self.rng.choice(len(choices), p=weights / weights.sum()))]
        self.words.append(f"{what}: {chosen}")
        return chosen

    def name(self, base: str = "") -> str:
        """Make a unique name.

        Returns:
            the name.
        """
        base = base or NAMES[int(self.rng.integers(len(NAMES)))]
        made, i = base, 0
        while made in self.used:
            made, i = f"{base}_{i}", i + 1
        self.used.add(made)
        return made

    def numbers(self, shape: Sequence[int], largest: float = 1.0) -> np.ndarray:
        """Draw quarters between −2 and 2, seldom 0, all exact in float16.

        Returns:
            array.
        """
        return (self.rng.integers(-8, 9, shape) / 4 * largest + (self.rng.random(shape) < 0.8) * 0.125).astype(
            self.dtype
        )

    def const(self, value: Any, dtype: Any = None, base: str = "") -> Value:
        """Add a stored tensor: an initializer, or now and then a Constant node, or one followed by Identity.

        Returns:
            the tensor.
        """
        array = np.asarray(value, dtype or self.dtype)
        name, spelling = self.name(base), self.rng.random()
        if spelling < 0.85:
            self.stored.append(numpy_helper.from_array(array, name))
            return Value(name, array.shape)
        if spelling < 0.95:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
            return Value(name, array.shape)
        self.stored.append(numpy_helper.from_array(array, name))
        return self.add("Identity", [name], array.shape)

    def whole(self, *values: int) -> str:
        """Add int64 [n].

        Returns:
            its name.
        """
        name = self.name("axes")
        self.stored.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def number(self, value: float) -> str:
        """Add a scalar.

        Returns:
            its name.
        """
        name = self.name("c")
        self.stored.append(numpy_helper.from_array(np.asarray(value, self.dtype), name))
        return name

    def add(self, op: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> Value:
        """Add a node.

        Returns:
            its output.
        """
        out = self.name()
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=self.name("node"), **attributes))
        return Value(out, tuple(shape))

    def given(self, shape: Sequence[int | str], kind: int | None = None) -> str:
        """Add a graph input.

        Returns:
            its name.
        """
        name = self.name("x")
        floating = TensorProto.FLOAT16 if self.half else TensorProto.FLOAT
        self.inputs.append(helper.make_tensor_value_info(name, kind or floating, shape))
        return name

    def model(self, opset: int) -> onnx.ModelProto:
        """Build the model.

        Returns:
            the model.
        """
        floating = TensorProto.FLOAT16 if self.half else TensorProto.FLOAT
        outs = [helper.make_tensor_value_info(v.name, floating, [None] * len(v.shape)) for v in self.outputs]
        graph = helper.make_graph(self.nodes, "drawn", self.inputs, outs, self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
