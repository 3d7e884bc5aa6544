"""ONNX graph that the passes edit and write. It extends `normdeploy.graphs.file_graph` by changes.

Edits only change which tensors nodes read and write. A node whose outputs are unused is dropped from the exported list.
The dropped node keeps its links to tensors, because residual branches share these tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from ..errors import GraphError
from ..evaluate.evaluator_core import is_quantized_type
from ..storage.proto_traversal import copy_field
from ..storage.shared_weights import Weights, is_shareable_weight, share_array
from .dims import Dims
from .exact_constants import RoundedArray
from .file_graph import NEWEST, FileGraph, value_inputs
from .linked_graph import nodes_with_subgraphs
from .proto_queries import IR_OF_CONSTANTS, all_names

__all__ = ["NEWEST", "Graph", "value_inputs"]


class Graph(FileGraph):
    """ONNX model opened for rewriting. ``nodes`` is in topological order and holds live nodes only."""

    def __init__(self, proto: onnx.ModelProto, taken: Collection[str] = (), weights: Weights | None = None) -> None:
        """Open ``proto``, which is never changed.

        Args:
            taken: names that new tensors must not have.
            weights: stores new large constants, to which the written model then only refers
                (`normdeploy.storage.shared_weights`). If None, the constants are written into the model.

        Raises:
            GraphError: the nodes are not in topological order, or a name is written twice.
        """
        super().__init__(proto)
        # Keeps dropped objects alive, because an id identifies an object only as long as the object exists.
        self._keep: list[gs.Node | gs.Tensor] = []
        # Id of a node → the last node that was inserted after this node.
        self._inserted: dict[int, gs.Node] = {}
        self._dead: set[int] = set()
        self._weights = weights
        # Id of a new large constant → the tensor that refers to its data in ``weights``.
        self._referring: dict[int, onnx.TensorProto] = {}
        self._names = {*taken, *all_names(proto.graph)}
        # Id of a Constant node that `freeze_tensor` made → the initializer that is written in its place.
        self._settled: dict[int, gs.Constant] = {}
        # Recognition results of norms already read. Recognition tries them first on similar norms.
        self.memo: dict[object, object] = {}

    @property
    def nodes(self) -> list[gs.Node]:
        """Return the live nodes in topological order, new ones included."""
        return [node for node in self._sequence if id(node) not in self._dead]

    def is_alive(self, node: gs.Node) -> bool:
        """Return whether the node has not been dropped."""
        return id(node) not in self._dead

    # ------------------------------------------------------------------ editing

    def add_constant(self, name: str, exact: np.ndarray, dtype: Any) -> gs.Constant:
        """Add an initializer that remembers its float64 value.

        Args:
            name: made unique if it is in use.
            exact: value before rounding to ``dtype``.

        Returns: the new constant.
        """
        stored = gs.Constant(self._fresh_name(name), np.asarray(exact).astype(dtype, order="C"))
        self._keep.append(stored)
        if np.issubdtype(np.asarray(exact).dtype, np.floating):
            self.exact.store_exact(stored, exact)
        return stored

    def add_rounded(self, name: str, array: RoundedArray) -> gs.Constant:
        """Add an initializer of float32 that remembers the value before rounding.

        Args:
            name: made unique if it is in use.

        Returns: the new constant.
        """
        stored = gs.Constant(self._fresh_name(name), array.rounded)
        self._keep.append(stored)
        self.exact.store_rounded(stored, array.rounded, array.remainder)
        return stored

    def make_node(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        like: gs.Tensor,
        attrs: Mapping[str, Any] | None = None,
        domain: str = "",
        outputs: int = 1,
    ) -> gs.Node:
        """Make a node with fresh outputs; it is not in the graph yet.

        Attributes are rounded to float32 as in the file, so that certificates judge the node that is written.

        Args:
            like: tensor that provides the outputs' type and the beginning of their names.
            outputs: number of outputs.

        Returns: the new node.
        """
        attributes = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in (attrs or {}).items()}
        if like.dtype is not None:
            dtype = like.dtype
        else:
            dtype = self.dtype(like)
        outs = [gs.Variable(self._fresh_name(f"{like.name}_{op}"), dtype=dtype) for _ in range(outputs)]
        made = gs.Node(
            op, name=outs[0].name, attrs=attributes, inputs=list(inputs), outputs=outs, domain=domain or None
        )
        self._new.add(id(made))
        self._keep.append(made)
        return made

    def replace(
        self,
        old: gs.Tensor,
        new_nodes: Sequence[gs.Node],
        shape: Dims | None = None,
        place: int = 0,
        origin: gs.Node | None = None,
    ) -> None:
        """Insert ``new_nodes`` and let the last of them produce ``old``, which keeps its name and readers.

        Nodes that become unused are dropped.

        Args:
            shape: shape of ``old``, if the rewrite determined it.
            place: index of the output that becomes ``old``.
            origin: node whose metadata the new nodes inherit; None for the producer of ``old``.
        """
        before = self.producer(old)
        assert before is not None, f"{old.name!r} has no producer"
        told = next(
            (self._metadata[t.name] for t in self._copied_node(origin or before).outputs if t.name in self._metadata),
            None,
        )
        if told is not None:
            self._metadata.update((t.name, told) for t in (old, *(t for n in new_nodes for t in n.outputs)))
        if shape is not None:
            self._shapes[id(old)] = shape
        end = before
        # Nodes may have been inserted already for another output of the same node.
        while id(end) in self._inserted:
            end = self._inserted[id(end)]
        for node in new_nodes:
            self._sequence.insert(node, end)
            self._link_node(node)
            end = node
        self._inserted[id(before)] = end
        self.redirect_readers(old, new_nodes[-1], place)

    def redirect_readers(self, old: gs.Tensor, node: gs.Node, place: int) -> None:
        """Let output number ``place`` of ``node``, a node of the graph, produce ``old``.

        Nodes that become unused are dropped.
        """
        before = self.producer(old)
        assert before is not None, f"{old.name!r} has no producer"
        before.outputs[_index_of(before.outputs, old)] = gs.Variable(
            self._fresh_name(f"{old.name}_replaced"), dtype=old.dtype, shape=old.shape
        )
        # Caches may know this id, so no later tensor may get it.
        self._keep.append(node.outputs[place])
        node.outputs[place] = old
        self.drop_if_unused(before)

    def freeze_tensor(self, t: gs.Tensor, value: np.ndarray) -> None:
        """Replace ``t`` by an initializer of the same name that holds ``value``.

        ``t`` is computed from constants or sizes that the file states. Nodes that become unused are dropped.
        """
        node = gs.Node(
            "Constant",
            name=t.name,
            attrs={"value": gs.Constant("", value)},
            inputs=[],
            outputs=[gs.Variable("", dtype=t.dtype)],
        )
        self._new.add(id(node))
        self._keep.append(node)
        self._settled[id(node)] = gs.Constant(t.name, value)
        self._budget.values.pop(id(t), None)
        self._constant[id(t)] = True
        self.replace(t, [node])

    def drop_if_unused(self, node: gs.Node) -> None:
        """Remove ``node`` if none of its outputs is read. Then remove the nodes before it that become unused."""
        stack = [node]
        while stack:
            top = stack.pop()
            if id(top) in self._dead or any(self.is_output(o) or self._consumers.get(id(o)) for o in top.outputs):
                continue
            self._dead.add(id(top))
            for t in self._read_tensors(top):
                self._consumers.get(id(t), {}).pop(id(top), None)
                above = self.producer(t)
                if above is not None:
                    stack.append(above)

    def _fresh_name(self, name: str) -> str:
        candidate = name
        n = 1
        while candidate in self._names:
            n += 1
            candidate = f"{name}_{n}"
        self._names.add(candidate)
        return candidate

    # ------------------------------------------------------------------ writing

    def to_proto(self) -> onnx.ModelProto:
        """Write the current model.

        Returns: a model with the live nodes, the initializers that they use, and all fields that graphsurgeon would
            lose.
        """
        out = onnx.ModelProto()
        for field, value in self.proto.ListFields():
            if field.name != "graph":
                copy_field(out, field, value)
        source = self.proto.graph
        graph = out.graph
        nodes = self.nodes
        graph.name = source.name
        graph.doc_string = source.doc_string
        graph.metadata_props.extend(source.metadata_props)
        graph.quantization_annotation.extend(source.quantization_annotation)
        if out.ir_version < IR_OF_CONSTANTS:
            out.ir_version = IR_OF_CONSTANTS
            graph.input.extend(t for t in source.input if t.name in {i.name for i in self.gs.inputs})
        else:
            graph.input.extend(source.input)
        graph.output.extend(source.output)
        settled = [self._settled[id(n)] for n in nodes if id(n) in self._settled]
        nodes = [n for n in nodes if id(n) not in self._settled]
        graph.node.extend(self.node_proto(n) for n in nodes)
        made = {t.name for n in nodes for t in n.outputs}
        used = {id(t): t for n in nodes for t in n.inputs if isinstance(t, gs.Constant)}
        inner = (t for n in nodes_with_subgraphs(nodes) for t in n.inputs if isinstance(t, gs.Constant))
        # Constants of the bodies themselves are written with the bodies.
        used |= {id(t): t for t in inner if t.name in self._initializers}
        used |= {id(t): t for t in self.gs.outputs if isinstance(t, gs.Constant)}
        used |= {id(t): t for t in settled}
        named: set[str] = set()
        # Initializers of the file come first, in the file's order, then new ones. So a second run changes nothing.
        place = {name: i for i, name in enumerate(self._initializers)}
        for t in sorted(used.values(), key=lambda t: place.get(t.name, len(place))):
            if t.name in named:
                continue
            named.add(t.name)
            if isinstance(t._values, gs.ir.tensor.SparseValues):
                graph.sparse_initializer.append(OnnxExporter.export_sparse_tensor_proto(t))
            else:
                graph.initializer.append(self.tensor_proto(t))
        graph.initializer.extend(self._defaults)
        graph.value_info.extend(v for v in source.value_info if v.name in made)
        return out

    def node_proto(self, node: gs.Node) -> onnx.NodeProto:
        """Write one node.

        Returns: a node of the file, unchanged except for its outputs' names; or a new node, with the metadata of the
            nodes that it replaces.
        """
        proto = onnx.NodeProto()
        original = self._original.get(id(node))
        if original is not None:
            proto.CopyFrom(original)
            for i, t in enumerate(node.outputs):
                proto.output[i] = t.name
            return proto
        proto.CopyFrom(OnnxExporter.export_node(node))
        origin = next((self._metadata[t.name] for t in node.outputs if t.name in self._metadata), None)
        if origin is not None:
            proto.metadata_props.extend(origin.metadata_props)
            proto.doc_string = origin.doc_string
        return proto

    def file_initializer(self, t: gs.Tensor) -> onnx.TensorProto | None:
        """Return the file's initializer for ``t``.

        Returns: None if ``t`` is computed or new.

        Raises:
            GraphError: the file has sparse initializers with this name, which are not supported here.
        """
        if any(t.name == sparse.values.name for sparse in self.proto.graph.sparse_initializer):
            raise GraphError(f"the initializer {t.name!r} is sparse")
        return self._initializers.get(t.name)

    def tensor_proto(self, t: gs.Constant) -> onnx.TensorProto:
        """Write one initializer.

        Returns:
            The file's own tensor unchanged, because graphsurgeon can't repack 4-bit elements that it has unpacked; or a
            new one.
        """
        known = self._initializers.get(t.name, self._referring.get(id(t)))
        if known is not None:
            return known
        if isinstance(t._values, np.ndarray) and is_quantized_type(t._values.dtype):
            return onnx.numpy_helper.from_array(t.values, t.name)
        if (
            self._weights is None
            or not isinstance(t.values, np.ndarray)
            or not is_shareable_weight(t.values.dtype, t.values.shape)
        ):
            return OnnxExporter.export_tensor_proto(t)
        kind = onnx.helper.np_dtype_to_tensor_dtype(t.values.dtype)
        made = self._referring[id(t)] = onnx.TensorProto(name=t.name, data_type=kind, dims=t.values.shape)
        share_array(made, t.values, self._weights)
        return made


def _index_of(tensors: Sequence[gs.Tensor], t: gs.Tensor) -> int:
    return next(i for i, other in enumerate(tensors) if other is t)
