"""Link a file's nodes and tensors, over onnx-graphsurgeon's IR.

Only this file and `normdeploy.graphs.graph` know graphsurgeon's quirks:

- It loses metadata, doc strings of nodes and of the model, model_version and quantization annotations. These are kept
  here by tensor name and restored.
- It treats initializers that are graph inputs as constants. Here they stay inputs.
- It compares tensors by name and nodes by value. Here tensors and nodes are compared by identity.
- It skips attributes of types that it doesn't know. Nodes that are not rewritten are written back as in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from ..storage.shared_weights import shared_array
from .ordered_list import OrderedList
from .proto_queries import captured_names, module_path, require_topological_order, separate_default_inputs

G_LOGGER.severity = G_LOGGER.CRITICAL

_COPIES = ("Identity", "Dropout")


class LinkedGraph:
    """Nodes of an ONNX model, linked by their tensors."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        """Open ``proto``.

        Raises:
            GraphError: the nodes are not in topological order, or a name is written twice.
        """
        require_topological_order(proto.graph)
        self.proto = proto
        opened, self._defaults = separate_default_inputs(proto)
        self.gs = gs.import_onnx(opened)
        self._sequence: OrderedList[gs.Node] = OrderedList(self.gs.nodes)
        self._consumers: dict[int, dict[int, gs.Node]] = {}
        self._captured = self._body_reads(opened.graph)
        for node in self.gs.nodes:
            self._link_node(node)
        self._outputs = {id(t) for t in self.gs.outputs}
        self._attrs: dict[int, dict[str, Any]] = {}
        self._metadata = {o: n for n in proto.graph.node if n.metadata_props or n.doc_string for o in n.output[:1]}
        self._original = {id(n): p for n, p in zip(self.gs.nodes, opened.graph.node, strict=True)}
        self._initializers = {t.name: t for t in opened.graph.initializer}
        self._resolve_held_weights()

    def _resolve_held_weights(self) -> None:
        """Load referenced weights that are in memory, because graphsurgeon would search for them in files."""
        if not any(shared_array(t) is not None for t in self._initializers.values()):
            return
        for t in (*(t for node in nodes_with_subgraphs(self.gs.nodes) for t in node.inputs), *self.gs.outputs):
            if isinstance(t, gs.Constant):
                lazy = t._values
            else:
                lazy = None
            if isinstance(lazy, gs.ir.tensor.LazyValues) and (array := shared_array(lazy.tensor)) is not None:
                t.values = array
                t.data_location = None

    def _body_reads(self, graph: onnx.GraphProto) -> dict[int, list[gs.Tensor]]:
        """Return, for each node with bodies (If, Loop, Scan), the outer tensors that the bodies read by name."""
        bodies = {id(n): read for n, p in zip(self.gs.nodes, graph.node, strict=True) if (read := captured_names(p))}
        if not bodies:
            return {}
        tensors = self.gs.tensors()
        return {place: [tensors[name] for name in read if name in tensors] for place, read in bodies.items()}

    def _read_tensors(self, node: gs.Node) -> list[gs.Tensor]:
        return [*node.inputs, *self._captured.get(id(node), ())]

    def _link_node(self, node: gs.Node) -> None:
        for t in self._read_tensors(node):
            self._consumers.setdefault(id(t), {})[id(node)] = node

    def position_of(self, node: gs.Node) -> int:
        """Return a number that increases in topological order; valid until the next edit.

        Returns: 0 or more.
        """
        return self._sequence.position_of(node)

    def producer(self, t: gs.Tensor) -> gs.Node | None:
        """Return the node that makes ``t``.

        Returns: None for an input or a constant.
        """
        if t.inputs:
            return t.inputs[0]
        return None

    def consumers(self, t: gs.Tensor) -> list[gs.Node]:
        """List the live nodes that read the value of ``t``.

        Returns: each node once, without CastLikes that read only the type of ``t``.
        """
        return [n for n in self._consumers.get(id(t), {}).values() if n.op != "CastLike" or n.inputs[0] is t]

    def all_consumers_of(self, t: gs.Tensor) -> list[gs.Node]:
        """List the live nodes that use ``t`` in any way.

        Returns: each node once. CastLikes that read only the type of ``t`` and nodes whose bodies read ``t`` are
            included.
        """
        return list(self._consumers.get(id(t), {}).values())

    def is_read_once(self, t: gs.Tensor) -> bool:
        """Return whether exactly one live node reads the value of ``t``.

        The search stops at the second reader, because a tensor may have thousands of readers.

        Returns: False for a tensor without readers.
        """
        readers = (n for n in self._consumers.get(id(t), {}).values() if n.op != "CastLike" or n.inputs[0] is t)
        return next(readers, None) is not None and next(readers, None) is None

    def is_output(self, t: gs.Tensor) -> bool:
        """Return whether ``t`` is an output of the model."""
        return id(t) in self._outputs

    def is_overridable(self, name: str) -> bool:
        """Return whether a caller may override this initializer.

        Returns: True if the initializer is also a graph input.
        """
        return any(t.name == name for t in self._defaults)

    def attrs(self, node: gs.Node) -> dict[str, Any]:
        """Return a node's attributes as plain values.

        Returns: name → number, string, list or numpy array.
        """
        attributes = self._attrs.get(id(node))
        if attributes is None:
            attributes = {k: v.values if isinstance(v, gs.Constant) else v for k, v in node.attrs.items()}
            self._attrs[id(node)] = attributes
        return attributes

    def module(self, node: gs.Node) -> str:
        """Return the qualified module path of a node.

        Returns: "" if the file does not record it.
        """
        for t in self._copied_node(node).outputs:
            source = self._metadata.get(t.name)
            if source is not None:
                return module_path(source)
        return ""

    def _copied_node(self, node: gs.Node) -> gs.Node:
        """Return the node whose result ``node`` copies, or ``node`` itself.

        A Dropout after a norm, for example, copies the norm's result but belongs to another module.
        """
        while node.op in _COPIES and (above := self.producer(node.inputs[0])) is not None:
            node = above
        return node


def nodes_with_subgraphs(nodes: Iterable[gs.Node]) -> Iterator[gs.Node]:
    """Walk the nodes and those in their bodies, at any depth.

    Yields: each node, in no particular order.
    """
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                stack.extend(value.nodes)
