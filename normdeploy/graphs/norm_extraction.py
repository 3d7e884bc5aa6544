"""Extract each norm of a file as a small model that a runtime can be tested on.

Tensors and nodes get canonical names, and each element of a large weight becomes 1. So two norms that a runtime can't
distinguish give the same model, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx

from ..dtypes import is_float_dtype
from .dims import Dims, Types
from .local_functions import open_functions
from .shape_inference import infer_types
from .subgraphs import Subgraph, body_subgraphs, make_value_info

# Maximum number of elements of a constant that keeps its values, because a runtime may read them: axes, shapes,
# epsilon.
_SMALL = 16


def models_by_location(proto: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
    """Open all graphs of a file: the main one, bodies and functions.

    Returns: location → model. A location is written as in findings; "" is the main graph.
    """
    graphs = {"": proto}

    def add_models(inside: Iterator[Subgraph], around: str) -> None:
        """Add the models of ``inside`` and of their bodies.

        Args:
            around: location of the graph that contains them.
        """
        for nested in inside:
            if around:
                place = f"{around}, {nested.place}"
            else:
                place = nested.place
            graphs[place] = nested.model
            add_models(body_subgraphs(nested.model), place)

    add_models(body_subgraphs(proto), "")
    add_models(open_functions(proto), "")
    return graphs


class NormExtractor:
    """Extracts parts of one graph as models."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.made = {o: i for i, n in enumerate(model.graph.node) for o in n.output if o}
        self.held = {t.name: t for t in model.graph.initializer}

    @cached_property
    def tensor_types(self) -> Types:
        """Return the types and shapes of the graph's tensors."""
        return infer_types(self.model)

    @cached_property
    def constant_names(self) -> set[str]:
        """Return the names of initializers and of tensors computed from them alone.

        Returns: names, with "" for omitted inputs.
        """
        known = set(self.held) - {i.name for i in self.model.graph.input} | {""}
        for node in self.model.graph.node:
            if (
                not node.op_type.startswith("Random")
                and not any(a.g.node for a in node.attribute)
                and known.issuperset(node.input)
            ):
                known.update(node.output)
        return known

    def extract_model(self, tensors: Sequence[str], shapes: Mapping[str, Dims | None]) -> onnx.ModelProto | None:
        """Extract the nodes that make ``tensors``, and the constants that they read.

        Args:
            shapes: shapes that are known more precisely than the file states them.

        Returns:
            The model; None if a tensor is not in this graph, the type of an input is unknown, or no output depends on
            data.
        """
        if not tensors or any(t not in self.made for t in tensors):
            return None
        places = self._with_constant_nodes({self.made[t] for t in tensors})
        nodes = [self.model.graph.node[i] for i in sorted(places)]
        inside = {o for n in nodes for o in n.output}
        read = {i for n in nodes for i in n.input}
        data = dict.fromkeys(i for n in nodes for i in n.input if i and i not in inside)
        if any(self.tensor_types.get(name, (None,))[0] is None for name in data):
            return None
        cut = onnx.ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import)
        graph = cut.graph
        graph.name = "norm"
        names = {
            name: f"t{i}" for i, name in enumerate(dict.fromkeys([*data, *(o for n in nodes for o in n.output if o)]))
        } | {"": ""}
        for name in data:
            if name in self.held:
                graph.initializer.append(_plain_initializer(self.held[name], names[name]))
            else:
                kind, dims = self.tensor_types[name]
                known = shapes.get(name)
                graph.input.append(make_value_info(names[name], kind, known if known is not None else dims))
        for i, node in enumerate(nodes):
            graph.node.append(_rename_tensors(node, f"n{i}", names))
        ends = [o for n in nodes for o in n.output if o and o not in read and o not in self.constant_names]
        graph.output.extend(make_value_info(names[o], *self.tensor_types[o]) for o in ends)
        if {n.domain for n in nodes} - {"", "ai.onnx"}:
            cut.functions.extend(self.model.functions)
        if graph.output:
            return cut
        return None

    def _with_constant_nodes(self, places: set[int]) -> set[int]:
        """Add the nodes that compute the constants read at ``places``."""
        stack = list(places)
        while stack:
            for name in self.model.graph.node[stack.pop()].input:
                place = self.made.get(name)
                if place is not None and place not in places and name in self.constant_names:
                    places.add(place)
                    stack.append(place)
        return places


def _rename_tensors(node: onnx.NodeProto, name: str, names: Mapping[str, str]) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.name = name
    made.doc_string = ""
    del made.metadata_props[:], made.input[:], made.output[:]
    made.input.extend(names[i] for i in node.input)
    made.output.extend(names[o] for o in node.output)
    for attribute in made.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            attribute.t.CopyFrom(_plain_initializer(attribute.t, ""))
    return made


def _plain_initializer(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """Return a copy of the tensor under another name. In a large floating tensor, every element becomes 1."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if is_float_dtype(dtype) and int(np.prod(tensor.dims, dtype=int)) > _SMALL:
        return onnx.numpy_helper.from_array(np.ones(tuple(tensor.dims), dtype), name)
    plain = onnx.TensorProto()
    plain.CopyFrom(tensor)
    plain.name = name
    plain.doc_string = ""
    return plain
