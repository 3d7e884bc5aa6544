"""A graph as the rules of half precision see it: its floating tensors, who makes and who reads them, and what values
were seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx
from onnx import TensorProto

from ..graphs.proto_queries import captured_names
from ..graphs.proto_queries import module_path as module_path
from .tensor_ranges import TensorRange
from .type_conversion import HalfFormat


@dataclass
class PrecisionView:
    """A graph as the rules see it. ``floating_tensors`` are the tensors that are float32 or half."""

    graph: onnx.GraphProto
    types: Mapping[str, int]
    form: HalfFormat
    opset: int
    ranges: Mapping[str, TensorRange] = field(default_factory=dict)

    @cached_property
    def floating_tensors(self) -> set[str]:
        return {name for name, kind in self.types.items() if kind in (TensorProto.FLOAT, self.form.onnx)}

    @cached_property
    def constants(self) -> dict[str, onnx.TensorProto]:
        listed = {v.name for v in self.graph.input}
        return {t.name: t for t in self.graph.initializer if t.name not in listed}

    @cached_property
    def producer(self) -> dict[str, int]:
        return {name: i for i, node in enumerate(self.graph.node) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        by_tensor = defaultdict(list)
        for i, node in enumerate(self.graph.node):
            for name in dict.fromkeys((*node.input, *captured_names(node))):
                by_tensor[name].append(i)
        return by_tensor

    @cached_property
    def outputs(self) -> set[str]:
        return {v.name for v in self.graph.output}

    def floating_inputs(self, i: int) -> list[str]:
        """The floating tensors that a node reads, constants left out."""
        return [
            name for name in self.graph.node[i].input if name in self.floating_tensors and name not in self.constants
        ]

    def floating_outputs(self, i: int) -> list[str]:
        return [name for name in self.graph.node[i].output if name in self.floating_tensors]

    def reading_nodes(self, i: int) -> Iterator[int]:
        for name in self.floating_outputs(i):
            yield from self.readers.get(name, ())

    def has_floats(self, i: int) -> bool:
        node = self.graph.node[i]
        return any(name in self.floating_tensors for name in (*node.input, *node.output))
