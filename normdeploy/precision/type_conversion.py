"""Change element types to half precision, for chosen nodes.

onnxruntime's float16 converter makes the change (``onnxruntime.transformers.float16``). This module works around faults
of the converter (version 1.31):

- Values: the converter raises every number below 6e-8 to 6e-8 and clamps at 65504. So the converter gets a file without
  weights, and changes only types. This module rounds the weights itself, from the original float32 numbers to the
  nearest half-precision numbers (ties to even). For bfloat16, it replaces the converter's float16 by bfloat16.
- Nodes that stay float32: if two of them read one tensor, the converter writes two Casts with the same name. For a node
  in a body, it writes the Cast outside the body. So the converter gets no list of such nodes. Instead, tensors that
  stay float32 have a private type while the converter runs, because it changes only tensors of the type float32.
- Order, functions, shape inference: this module writes the Casts, in topological order. The converter gets a file
  without functions and does not run shape inference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..dtypes import unit_roundoff
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_graphs, unique_name

# Private elem_type of tensors that stay float32; not an elem_type of ONNX
_HIDDEN = 4242
# Attributes that store an elem_type
_TYPED = ("to", "dtype")
# Ops that return float32 if no attribute names a type
_WITHOUT = frozenset({"ConstantOfShape", "RandomNormal", "RandomUniform", "SequenceEmpty"})

Change = Callable[[int], int]


@dataclass(frozen=True)
class HalfFormat:
    """16-bit floating type.

    Attributes:
        name: "fp16" or "bf16".
        onnx: elem_type of the type.
    """

    name: str
    onnx: int
    dtype: np.dtype

    @property
    def largest(self) -> float:
        """Return the largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def smallest(self) -> float:
        """Return the smallest normal number.

        Smaller numbers lose precision gradually, and GPUs may flush them to zero.
        """
        return float(ml_dtypes.finfo(self.dtype).smallest_normal)

    @property
    def unit_roundoff(self) -> float:
        """Return the unit roundoff."""
        return unit_roundoff(self.dtype)

    def round_to_format(self, values: np.ndarray | float) -> np.ndarray:
        """Round to this type. Numbers beyond the range become infinite.

        Returns:
            an array of ``dtype``.
        """
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float32).astype(self.dtype)


FORMATS = {
    "fp16": HalfFormat("fp16", TensorProto.FLOAT16, np.dtype(np.float16)),
    "bf16": HalfFormat("bf16", TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}


def narrow_types(
    proto: onnx.ModelProto, form: HalfFormat, wide_nodes: Iterable[int], wide_tensors: Iterable[str]
) -> onnx.ModelProto:
    """Change float32 to ``form`` in ``proto``, in place, except for some nodes and tensors.

    Casts between the two types must already be in the graph. A Cast to ``form`` must be written as a Cast to float32
    that is not in ``wide_nodes``.

    Args:
        wide_nodes: indices of nodes that stay float32.
        wide_tensors: names of tensors that stay float32.

    Returns:
        ``proto``.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    graph = proto.graph
    apart = set(wide_tensors)
    hide = _swap_types({TensorProto.FLOAT: _HIDDEN, form.onnx: _HIDDEN})
    for i in wide_nodes:
        _make_types_explicit(graph.node[i], form)
        _change_node_types(graph.node[i], hide)
    for v in (*graph.input, *graph.output, *graph.value_info):
        if v.name in apart:
            _change_type(v.type, hide)
    weights = _detach_weights(graph, apart)
    narrow = [
        numpy_helper.to_array(a.t) if a.t.data_type == TensorProto.FLOAT else None
        for n in graph.node
        for a in n.attribute
    ]
    convert_float_to_float16(proto, disable_shape_infer=True, op_block_list=[], node_block_list=[])
    for values, attribute in zip(narrow, (a for n in graph.node for a in n.attribute), strict=False):
        # The converter appends its nodes at the end, so zip still pairs each original attribute with its values.
        if values is not None and attribute.t.data_type == TensorProto.FLOAT16:
            attribute.t.CopyFrom(numpy_helper.from_array(form.round_to_format(values)))
    _change_graph_types(graph, _swap_types({TensorProto.FLOAT16: form.onnx}))
    _change_graph_types(graph, _swap_types({_HIDDEN: TensorProto.FLOAT}))
    for tensor, original in zip(graph.initializer, weights, strict=True):
        if original.data_type == tensor.data_type or tensor.name in apart:
            tensor.CopyFrom(original)
        else:
            tensor.CopyFrom(numpy_helper.from_array(form.round_to_format(numpy_helper.to_array(original)), tensor.name))
    return proto


def _detach_weights(graph: onnx.GraphProto, apart: set[str]) -> list[onnx.TensorProto]:
    """Replace each initializer by an empty tensor of the same type, and return the original initializers."""
    weights = list(graph.initializer)
    light = [TensorProto(name=t.name, data_type=_HIDDEN if t.name in apart else t.data_type, dims=[0]) for t in weights]
    del graph.initializer[:]
    graph.initializer.extend(light)
    return weights


def _make_types_explicit(node: onnx.NodeProto, form: HalfFormat) -> None:
    """If a node's type is float32 only by default, write the type as an attribute. Convert half-precision attributes to
    float32.
    """
    for a in node.attribute:
        if a.t.data_type == form.onnx:
            a.t.CopyFrom(numpy_helper.from_array(initializer_values(a.t).astype(np.float32)))
    if node.op_type not in _WITHOUT or any(a.name in ("value", "dtype") for a in node.attribute):
        return
    if node.op_type == "ConstantOfShape":
        node.attribute.append(
            onnx.helper.make_attribute("value", onnx.helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0]))
        )
    else:
        node.attribute.append(onnx.helper.make_attribute("dtype", TensorProto.FLOAT))


# ------------------------------------------------------------------ element types in a model


def _swap_types(swaps: Mapping[int, int]) -> Change:
    return lambda kind: swaps.get(kind, kind)


def _change_graph_types(graph: onnx.GraphProto, change: Change) -> None:
    for tensor in graph.initializer:
        tensor.data_type = change(tensor.data_type)
    for v in (*graph.input, *graph.output, *graph.value_info):
        _change_type(v.type, change)
    for node in graph.node:
        _change_node_types(node, change)


def _change_node_types(node: onnx.NodeProto, change: Change) -> None:
    for attribute in node.attribute:
        if attribute.name in _TYPED and attribute.type == onnx.AttributeProto.INT:
            attribute.i = change(attribute.i)
        if attribute.type == onnx.AttributeProto.TENSOR:
            attribute.t.data_type = change(attribute.t.data_type)
        for body in attribute_graphs(attribute):
            _change_graph_types(body, change)


def _change_type(proto: onnx.TypeProto, change: Change) -> None:
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        proto.tensor_type.elem_type = change(proto.tensor_type.elem_type)
    elif kind in ("sequence_type", "optional_type"):
        _change_type(getattr(proto, kind).elem_type, change)


# ------------------------------------------------------------------ Casts between the two types


@dataclass(frozen=True)
class Float32Parts:
    """Parts of a graph that stay float32.

    Attributes:
        nodes: indices of the nodes that compute in float32.
        inputs, outputs: names of inputs and outputs of the graph.
        node_inputs: index of a node -> indices of the inputs that are float32 even if the node is half precision.
    """

    nodes: frozenset[int]
    inputs: set[str]
    outputs: set[str]
    node_inputs: Mapping[int, Collection[int]]


class CastWriter:
    """Writer of Casts between float32 tensors and half-precision tensors, one Cast per tensor and type.

    Args:
        graph: changed in place by ``rewrite_graph``; each node must follow the nodes that it reads.
        floating: names of the tensors that are float32 or half precision.
        float32: the parts that stay float32.

    Attributes:
        wide_nodes: indices of float32 nodes in the new graph.
        count: number of Casts written.
    """

    def __init__(self, graph: onnx.GraphProto, floating: set[str], float32: Float32Parts, form: HalfFormat) -> None:
        self._graph = graph
        self._floating = floating
        self._float32 = float32
        self._form = form
        self._is_wide = {v.name: v.name in float32.inputs for v in graph.input if v.name in floating}
        self._weights = {t.name: t for t in graph.initializer if t.name in floating and t.name not in self._is_wide}
        narrow = self._narrow_read_names()
        self._wide_weights = {
            k: k if k not in narrow and t.data_type == TensorProto.FLOAT else "" for k, t in self._weights.items()
        }
        self._taken = {o for n in graph.node for o in n.output} | {t.name for t in (*graph.input, *graph.initializer)}
        self._renamed: dict[str, str] = {}
        self._made: dict[tuple[str, bool], str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._copies: list[onnx.TensorProto] = []
        self.wide_nodes: set[int] = set()
        self.count = 0
        self._outputs = {v.name: v.name in float32.outputs for v in graph.output if v.name in floating}

    def _narrow_read_names(self) -> set[str]:
        """Collect the tensors that half-precision nodes read, and the graph's outputs."""
        read = set[str]()
        for place, node in enumerate(self._graph.node):
            if place not in self._float32.nodes:
                wide = self._float32.node_inputs.get(place, ())
                read |= {name for k, name in enumerate(node.input) if k not in wide}
        return read | {v.name for v in self._graph.output}

    def rewrite_graph(self) -> set[str]:
        """Rewrite the graph in place.

        Returns:
            the names of the float32 tensors.
        """
        for place, node in enumerate(self._graph.node):
            self._add_node(node, place in self._float32.nodes, self._float32.node_inputs.get(place, ()))
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        self._graph.initializer.extend(self._copies)
        weights = {name for name in self._wide_weights.values() if name}
        return weights | {name for name, wide in self._is_wide.items() if wide}

    def _add_node(self, node: onnx.NodeProto, wide: bool, always: Collection[int]) -> None:
        """Append a node with its inputs in the node's precision.

        Casts follow for outputs that must have the other precision.

        A Cast between float32 and half is dropped if the new graph does not need it.
        """
        if node.op_type == "Cast" and node.input[0] in self._floating and node.output[0] in self._floating:
            source = self._renamed.get(node.input[0], node.input[0])
            if source not in self._weights and self._is_wide[source] == wide and node.output[0] not in self._outputs:
                self._renamed[node.output[0]] = source
                return
        else:
            for i, name in enumerate(node.input):
                if name in self._floating:
                    node.input[i] = self._read_as(name, wide or i in always)
        self._rename_in_bodies(node, wide)
        late = []
        for i, name in enumerate(node.output):
            if name not in self._floating:
                continue
            # The result of the Cast gets the name of the graph output.
            if self._outputs.get(name, wide) != wide:
                node.output[i] = self._renamed[name] = self._fresh_name(f"{name}_{_type_name(wide, self._form)}")
                late.append((node.output[i], name))
            self._is_wide[node.output[i]] = wide
        self._append_node(node, wide)
        for inner, name in late:
            self._add_cast(inner, name, not wide, node)

    def _read_as(self, name: str, wide: bool) -> str:
        """Return the name of a tensor in the wanted precision, and write the Cast if no earlier node needed it."""
        name = self._renamed.get(name, name)
        if name in self._weights:
            if wide:
                return self._narrow_weight(name)
            return name
        if self._is_wide[name] == wide:
            return name
        if (name, wide) not in self._made:
            made = self._fresh_name(f"{name}_{_type_name(wide, self._form)}")
            self._add_cast(name, made, wide, None)
        return self._made[name, wide]

    def _rename_in_bodies(self, node: onnx.NodeProto, wide: bool) -> None:
        """Rename tensors of the outer graph in a node's bodies to their copies in the node's precision."""
        for body in (b for a in node.attribute for b in attribute_graphs(a)):
            own = {v.name for v in (*body.input, *body.initializer)} | {o for n in body.node for o in n.output}
            for inner in body.node:
                for i, name in enumerate(inner.input):
                    if name in self._floating and name not in own:
                        inner.input[i] = self._read_as(name, wide)
                self._rename_in_bodies(inner, wide)
            for out in body.output:
                if out.name in self._floating and out.name not in own:
                    out.name = self._read_as(out.name, wide)

    def _narrow_weight(self, name: str) -> str:
        """Return the name of the float32 copy of a weight.

        If only float32 nodes read the weight, no copy is needed, and the name is the weight's own name.
        """
        if not self._wide_weights[name]:
            self._wide_weights[name] = self._fresh_name(f"{name}_{_type_name(True, self._form)}")
            self._copies.append(
                numpy_helper.from_array(
                    initializer_values(self._weights[name]).astype(np.float32), self._wide_weights[name]
                )
            )
        return self._wide_weights[name]

    def _add_cast(self, source: str, made: str, wide: bool, like: onnx.NodeProto | None) -> None:
        node = onnx.helper.make_node("Cast", [source], [made], name=f"cast_{made}", to=TensorProto.FLOAT)
        if like is not None:
            node.metadata_props.extend(like.metadata_props)
        self._made[source, wide] = made
        self._is_wide[made] = wide
        self.count += 1
        self._append_node(node, wide)

    def _append_node(self, node: onnx.NodeProto, wide: bool) -> None:
        if wide:
            self.wide_nodes.add(len(self._nodes))
        self._nodes.append(node)

    def _fresh_name(self, name: str) -> str:
        return unique_name(name, self._taken)


def _type_name(wide: bool, form: HalfFormat) -> str:
    if wide:
        return "float32"
    return form.dtype.name


def initializer_values(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    """Read the values of a tensor.

    Returns:
        an array of the tensor's shape and dtype.
    """
    return np.asarray(numpy_helper.to_array(tensor))


def constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers, in place, so that the converter's rules for weights apply to them."""
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Constant" and is_standard(node):
            tensor = _constant_tensor(node.attribute)
        else:
            tensor = None
        if tensor is None or any(o.name == node.output[0] for o in graph.output):
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def _constant_tensor(attributes: Sequence[onnx.AttributeProto]) -> onnx.TensorProto | None:
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for a in attributes:
        if a.name == "value":
            return a.t
        if a.name in kinds:
            return numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(a), kinds[a.name]))
    return None
