"""Trace a stream: the tensors that have to be changed together if a linear map T is applied to one of them.

T maps rows, which lie along the last axis. If T is applied to one tensor of a stream, it must be applied to all tensors
of the stream. The following ops commute with T, so their inputs and results belong to one stream:

- sums;
- views that keep the rows whole;
- ops that pick, move or mix other axes;
- products by numbers that do not vary along the last axis.

Linear layers that write the stream, embedding tables and constants absorb T. Linear layers that read the stream absorb
the inverse of T. If any other op reads or writes the stream, the trace fails, and the refusal names the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from ..forms.constant_linear import ConstantLinear, absorb_added_bias, constant_linear_of
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusedError
from ..norms.norm_table import DEFAULT
from ..storage.onnx_domains import is_standard
from .linear_layers import find_linear_layers

# RMS norms with one input and a scale, in the default domain
RMS = frozenset(op for op, row in DEFAULT.items() if row.kind == "RMSNorm" and row.inputs == ("X", "scale"))
NORMS = RMS | {"LayerNormalization"}
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
_SUMS = frozenset({"Add", "Sub", "Sum"})


@dataclass
class ResidualStream:
    """Tensors of a stream, and the nodes that read and write them. The keys of all mappings are ids.

    Attributes:
        writers: linear layers that write the stream, by their node.
        readers: linear layers that read the stream, by their node.
        tables: Gathers that pick rows of a constant.
        carriers: nodes that commute with T, with the indices of their constant inputs.
        norms: norms that read the stream.
        widths: lengths of the runs of elements that T maps. A run is a part of a row: the size of each last axis is a
            multiple of the run's length.
    """

    tensors: dict[int, gs.Tensor] = field(default_factory=dict)
    writers: dict[int, ConstantLinear] = field(default_factory=dict)
    readers: dict[int, ConstantLinear] = field(default_factory=dict)
    tables: dict[int, gs.Node] = field(default_factory=dict)
    carriers: dict[int, tuple[gs.Node, tuple[int, ...]]] = field(default_factory=dict)
    norms: dict[int, gs.Node] = field(default_factory=dict)
    widths: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class LinearLayers:
    """Linear layers of a graph.

    Attributes:
        made: layers by the id of their result.
        by_node: layers by the id of their node.
        refused: layers that can't be read, by the name of their result.
    """

    graph: Graph
    made: dict[int, ConstantLinear]
    by_node: dict[int, ConstantLinear]
    refused: dict[str, Refusal]

    @classmethod
    def find_in_graph(cls, graph: Graph) -> LinearLayers:
        """Find all linear layers of ``graph``.

        Returns:
            the layers and the refusals.
        """
        found = find_linear_layers(graph)
        read = [one for one in found if isinstance(one, ConstantLinear)]
        return cls(
            graph,
            {id(one.out): one for one in read},
            {id(one.node): one for one in read},
            {one.tensor: one for one in found if isinstance(one, Refusal)},
        )

    def update_layers(self, nodes: Sequence[gs.Node]) -> None:
        """Register the layers of nodes that replaced other nodes."""
        for node in nodes:
            linear = constant_linear_of(self.graph, node)
            if isinstance(linear, ConstantLinear):
                linear = absorb_added_bias(self.graph, linear)
                self.made[id(linear.out)] = self.by_node[id(node)] = linear


def trace_stream(layers: LinearLayers, stream: ResidualStream, seed: gs.Tensor, through: bool) -> None:
    """Add to ``stream`` everything that a map of the last axis of ``seed`` reaches.

    Args:
        through: True if norms commute with T, such as an RMS norm without gamma with an isometry. Then the results of
            norms belong to the stream, and linear layers may read it. If False, only norms may read the stream, and
            their results do not belong to it.

    Raises:
        RefusedError: a node does not commute with T and can't absorb it. ``stream`` contains what was traced so far.
    """
    _StreamTraversal(layers, stream, through).traverse(seed)


@dataclass
class _StreamTraversal:
    layers: LinearLayers
    stream: ResidualStream
    through: bool
    left: list[gs.Tensor] = field(default_factory=list)

    def traverse(self, seed: gs.Tensor) -> None:
        graph = self.layers.graph
        self.left = [seed]
        while self.left:
            t = self.left.pop()
            if id(t) in self.stream.tensors:
                continue
            self.stream.tensors[id(t)] = t
            width = self._last_dim(t)
            if graph.dtype(t) != np.float32:
                raise RefusedError(f"{t.name!r} is {graph.dtype(t)}, not float32")
            self.stream.widths.add(width)
            if graph.is_output(t):
                raise RefusedError(f"{t.name!r} is a graph output")
            self._visit_producer(t)
            for node in graph.all_consumers_of(t):
                if node.op not in ("Shape", "Size"):
                    self._visit_reader(t, node)

    def _last_dim(self, t: gs.Tensor) -> int:
        shape = self.layers.graph.shape(t)
        if not shape or not isinstance(shape[-1], int):
            raise RefusedError(f"the file does not specify the last dim of {t.name!r}")
        return shape[-1]

    def _visit_producer(self, t: gs.Tensor) -> None:
        graph = self.layers.graph
        node = self.layers.graph.producer(t)
        linear = self.layers.made.get(id(t))
        if node is None:
            raise RefusedError(f"{t.name!r} is a graph input")
        if (refused := self.layers.refused.get(t.name)) is not None:
            raise RefusedError(refused.reason)
        if linear is not None:
            if linear.w.ndim != 2 or linear.node.op not in ("MatMul", "Gemm") or linear.weight != 1:
                raise RefusedError(f"{describe_node(node)} writes it, but its channels are not along the last axis")
            self.stream.writers[id(linear.node)] = linear
        elif node.op == "Gather" and is_standard(node) and graph.is_constant(node.inputs[0]):
            self._visit_table(node)
        elif node.op in NORMS and is_standard(node):
            if not self.through:
                raise RefusedError(f"{describe_node(node)} writes it with its own gamma or beta")
            self._visit_norm(node)
        else:
            self._visit_carrier(node)

    def _visit_reader(self, t: gs.Tensor, node: gs.Node) -> None:
        linear = self.layers.by_node.get(id(node))
        if linear is not None:
            if linear.data_input is not t:
                raise RefusedError(f"{describe_node(node)} reads it as its weight")
            if not self.through:
                raise RefusedError(f"{describe_node(node)} reads it and depends on the mean of each row")
            rank = len(self.layers.graph.shape(t) or ())
            square = linear.w.ndim == 2 and linear.node.op in ("MatMul", "Gemm") and linear.weight == 1
            if not square or linear.input_channel_axis(rank) != rank - 1:
                raise RefusedError(f"{describe_node(node)} reads it along another axis than the last")
            self.stream.readers[id(node)] = linear
        elif (refused := self.layers.refused.get(node.outputs[0].name)) is not None:
            raise RefusedError(refused.reason)
        elif node.op in NORMS and is_standard(node) and node.inputs[0] is t:
            self._visit_norm(node)
        else:
            self._visit_carrier(node, t)

    def _visit_table(self, node: gs.Node) -> None:
        graph = self.layers.graph
        table = node.inputs[0]
        if int(node.attrs.get("axis", 0)) or len(graph.shape(table) or ()) != 2:
            raise RefusedError(f"{describe_node(node)} does not select rows of a matrix")
        if not isinstance(table, gs.Constant):
            raise RefusedError(f"the table of {describe_node(node)} is not constant")
        for reader in graph.all_consumers_of(table):
            if reader.op not in ("Gather", "MatMul", "Gemm", "Transpose"):
                raise RefusedError(f"{describe_node(reader)} also reads the table {table.name!r}")
        self.stream.tables[id(node)] = node

    def _visit_norm(self, node: gs.Node) -> None:
        graph = self.layers.graph
        x = node.inputs[0]
        rank = len(graph.shape(x) or ())
        if not rank or int(graph.attrs(node).get("axis", -1)) % rank != rank - 1:
            raise RefusedError(f"{describe_node(node)} normalizes over several axes")
        if any(o.name and graph.all_consumers_of(o) for o in node.outputs[1:]):
            raise RefusedError(f"the statistics of {describe_node(node)} are also used")
        if not self.through and node.op in RMS:
            raise RefusedError(f"{describe_node(node)} reads it and depends on the mean of each row")
        self.stream.norms[id(node)] = node
        self.left.append(x)
        if self.through:
            self.left.append(node.outputs[0])

    def _visit_carrier(self, node: gs.Node, t: gs.Tensor | None = None) -> None:
        """Add the inputs and results of ``node`` that belong to the stream.

        Args:
            t: tensor of the stream that the node reads; None if the trace reached the node from its result.
        """
        if id(node) in self.stream.carriers:
            inputs: Sequence[int] = self._carried_inputs(node)
        else:
            inputs = self._carried_inputs(node)
            constant = tuple(i for i in inputs if self.layers.graph.is_constant(node.inputs[i]))
            for i in constant:
                self._add_constant_width(node, node.inputs[i])
            self.stream.carriers[id(node)] = node, constant
            self.left += [node.inputs[i] for i in inputs if i not in constant]
            self.left += [o for o in node.outputs[: None if node.op == "Split" else 1] if o.name]
        if t is not None and not all(i in inputs for i, x in enumerate(node.inputs) if x is t):
            raise RefusedError(f"{describe_node(node)} does not read it row by row")

    def _carried_inputs(self, node: gs.Node) -> Sequence[int]:
        """Return the indices of the inputs of ``node`` that belong to the stream.

        Raises:
            RefusedError: the node does not commute with T.
        """
        graph = self.layers.graph
        op = node.op
        out = graph.shape(node.outputs[0]) or ()
        refused = RefusedError(f"{describe_node(node)} does not commute with it")
        known = [graph.shape(t) for t in node.inputs]
        # A factor or summand of unknown rank may vary along the channels, so it does not count as a single number. All
        # other ops have only one data input, the first.
        if op in (*_SUMS, "Mul", "Div", "MatMul", "Concat"):
            read = node.inputs
        else:
            read = node.inputs[:1]
        unknown = next((t for t, shape in zip(read, known, strict=False) if shape is None), None)
        if unknown is not None:
            raise RefusedError(f"{describe_node(node)} reads {unknown.name!r}, whose rank is unknown")
        shapes = [shape or () for shape in known]
        if not is_standard(node) or not out or not isinstance(out[-1], int):
            raise refused
        last = len(out) - 1
        if op in _SUMS:
            if all(s and s[-1] == out[-1] for s in shapes):
                return range(len(node.inputs))
            raise RefusedError(f"{describe_node(node)} adds a tensor without the stream's channels")
        if op in ("Mul", "Div"):
            wide = [i for i, s in enumerate(shapes) if s and s[-1] == out[-1] != 1]
            if (
                len(wide) != 1
                or (op == "Div" and wide != [0])
                or any(s and s[-1] != 1 for s in [s for i, s in enumerate(shapes) if i not in wide])
            ):
                raise RefusedError(f"{describe_node(node)} multiplies it by a tensor that varies along its channels")
            return wide
        # A product with a matrix on the left mixes rows, not channels.
        if op == "MatMul" and len(out) > 1 and len(shapes[1]) > 1:
            return (1,)
        if op == "Attention":
            return self._attention_inputs(node)
        if op in VIEWS:
            # A Reshape keeps the row-major order. The check of the widths ensures that it cuts no run.
            return (0,)
        if shapes[0]:
            axis = int(node.attrs.get("axis", 0)) % len(shapes[0])
        else:
            axis = 0
        kept = {
            "Identity": True,
            "Transpose": list(node.attrs.get("perm", range(last, -1, -1)))[-1:] == [last],
            "Expand": shapes[0][-1:] == out[-1:],
            "Concat": axis != last,
            "Split": axis != last,
            "Gather": axis != len(shapes[0]) - 1,
            "Slice": self._keeps_last_axis(node, len(shapes[0])),
        }
        if not kept.get(op, False):
            raise refused
        if op == "Concat":
            return range(len(node.inputs))
        return (0,)

    def _keeps_last_axis(self, node: gs.Node, rank: int) -> bool:
        """Return True if a Slice does not cut the last axis."""
        if node.op != "Slice" or len(node.inputs) < 4:
            return False
        axes = self.layers.graph.known_value(node.inputs[3])
        return axes is not None and all(int(a) % rank != rank - 1 for a in axes.reshape(-1))

    def _attention_inputs(self, node: gs.Node) -> Sequence[int]:
        """Check that an Attention is linear in its values. If one axis contains several heads, check it per head.

        Returns:
            the index of the input with the values.
        """
        graph = self.layers.graph
        if any(o.name and graph.all_consumers_of(o) for o in node.outputs[1:]) or any(
            not t.is_empty() for t in node.inputs[4:6]
        ):
            raise RefusedError(f"{describe_node(node)} stores past values")
        if any(graph.is_output(o) for o in node.outputs[1:]):
            raise RefusedError(f"{describe_node(node)} outputs its values")
        shape = graph.shape(node.inputs[2])
        if shape is None:
            raise RefusedError(f"the rank of the values of {describe_node(node)} is unknown")
        heads = int(node.attrs.get("kv_num_heads", 0))
        if len(shape) == 3 and isinstance(shape[-1], int):
            if not heads or shape[-1] % heads:
                raise RefusedError(f"{describe_node(node)} does not specify the number of heads of its values")
            self.stream.widths.add(shape[-1] // heads)
        return (2,)

    def _add_constant_width(self, node: gs.Node, t: gs.Tensor) -> None:
        width = (self.layers.graph.shape(t) or (0,))[-1]
        if not isinstance(width, int) or width < 2 or self.layers.graph.known_value(t) is None:
            raise RefusedError(f"the constant {t.name!r} of {describe_node(node)} has no channels")
        self.stream.widths.add(width)


def describe_node(node: gs.Node) -> str:
    """Describe a node by its op and its name.

    Returns:
        the op, and the name of the node or of its first result.
    """
    return f"{node.op} {node.name or node.outputs[0].name!r}"
