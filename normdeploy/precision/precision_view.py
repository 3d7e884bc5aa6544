"""Cache the facts about a graph that the conversion to half precision needs.

These are floating-point tensors, their producers and readers, and the ranges of values that calibration saw.
"""

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
    """Graph with cached lookups. A node is identified by its index.

    Attributes:
        types: tensor name -> elem_type.
        opset: opset of the default domain.
        ranges: tensor name -> range of the values that calibration saw.
    """

    graph: onnx.GraphProto
    types: Mapping[str, int]
    form: HalfFormat
    opset: int
    ranges: Mapping[str, TensorRange] = field(default_factory=dict)

    @cached_property
    def floating_tensors(self) -> set[str]:
        """Return the names of the tensors that are float32 or half."""
        return {name for name, kind in self.types.items() if kind in (TensorProto.FLOAT, self.form.onnx)}

    @cached_property
    def constants(self) -> dict[str, onnx.TensorProto]:
        """Return the initializers that are not inputs, by name."""
        listed = {v.name for v in self.graph.input}
        return {t.name: t for t in self.graph.initializer if t.name not in listed}

    @cached_property
    def producer(self) -> dict[str, int]:
        """Return the index of the node that computes each tensor, by tensor name."""
        return {name: i for i, node in enumerate(self.graph.node) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Return the indices of the nodes that read each tensor, also in their bodies, by tensor name."""
        by_tensor = defaultdict(list)
        for i, node in enumerate(self.graph.node):
            for name in dict.fromkeys((*node.input, *captured_names(node))):
                by_tensor[name].append(i)
        return by_tensor

    @cached_property
    def outputs(self) -> set[str]:
        """Return the names of the graph's outputs."""
        return {v.name for v in self.graph.output}

    def floating_inputs(self, i: int) -> list[str]:
        """List the floating tensors that node ``i`` reads, without constants.

        Returns:
            tensor names.
        """
        return [
            name for name in self.graph.node[i].input if name in self.floating_tensors and name not in self.constants
        ]

    def floating_outputs(self, i: int) -> list[str]:
        """List the floating tensors that node ``i`` computes.

        Returns:
            tensor names.
        """
        return [name for name in self.graph.node[i].output if name in self.floating_tensors]

    def reading_nodes(self, i: int) -> Iterator[int]:
        """Find the readers of the floating outputs of node ``i``.

        Yields:
            indices of nodes.
        """
        for name in self.floating_outputs(i):
            yield from self.readers.get(name, ())

    def has_floats(self, i: int) -> bool:
        """Return True if node ``i`` reads or computes a floating tensor."""
        node = self.graph.node[i]
        return any(name in self.floating_tensors for name in (*node.input, *node.output))
