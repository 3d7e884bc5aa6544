"""Rewrite norms as a pass of onnx_ir, beside the passes of onnx_ir and onnxscript.

The pass converts the model to protobuf, rewrites it, and puts the new graph and functions into the same `Model`.
``meta`` and the tensors of unchanged weights are taken from the old graph, so external weights stay in their files.
"""

from __future__ import annotations

import inspect
from typing import Any

import onnx
import onnx_ir as ir

from ..errors import GraphError
from .norm_rewrite import NormRewrite, read_settings, rewrite_norms


class FuseNorms(ir.passes.InPlacePass):
    """Pass of onnx_ir that fuses and folds every normalization, each with a proof.

    If the pass raises an error, the model is unchanged.

    Args:
        options: runtime, provider, fuse, strict, strict_proof, compare_limit, inputs and dims, as for
            `normdeploy.optimize`.

    Attributes:
        rewrites: what each call of the pass did, in the order of the calls.

    Raises:
        InputError: an option has an unknown value.
    """

    __signature__ = inspect.signature(read_settings).replace(return_annotation=inspect.Signature.empty)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.settings = read_settings(**options)
        self.rewrites: list[NormRewrite] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the norms of a model in place.

        Returns:
            the model, and whether it was modified. `rewrites` records what was done.

        Raises:
            GraphError: a weight has no value.
            NormdeployError: as for `normdeploy.optimize`.
        """
        rewritten = rewrite_norms(_to_loaded_proto(model), self.settings)
        if rewritten.rewrite.modified:
            _replace_graph(model, ir.from_proto(rewritten.proto))
        self.rewrites.append(rewritten.rewrite)
        return ir.passes.PassResult(model, rewritten.rewrite.modified)


def _to_loaded_proto(model: ir.Model) -> onnx.ModelProto:
    """Convert a model to protobuf, with its external weights in memory.

    Returns:
        a copy; the tensors of ``model`` stay external.

    Raises:
        GraphError: a weight has no value.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is None:
                raise GraphError(f"the weight {value.name!r} has no value; load the weights before FuseNorms runs")
    copy = model.clone()
    ir.external_data.load_to_model(copy)
    holders: list[ir.Graph | ir.Function] = [copy.graph, *copy.functions.values()]
    for holder in holders:
        for node in ir.traversal.RecursiveGraphIterator(holder):
            _load_attributes(node)
    return ir.to_proto(copy)


def _load_attributes(node: ir.Node) -> None:
    """Read the external tensors of a node's attributes into memory."""
    for name, attribute in node.attributes.items():
        if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
            node.attributes[name] = ir.AttrTensor(name, _in_memory(attribute.value))


def _in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    return ir.external_data.convert_tensors_from_external([tensor])[0]


def _replace_graph(model: ir.Model, new: ir.Model) -> None:
    """Put the graph and the functions of ``new`` into ``model``."""
    _keep_meta(model.graph, new.graph)
    _keep_weights(model, new)
    model.graph = new.graph
    model.functions.clear()
    model.functions.update(new.functions)
    model.metadata_props.clear()
    model.metadata_props.update(new.metadata_props)
    model.ir_version = new.ir_version


def _keep_meta(old: ir.Graph, new: ir.Graph) -> None:
    """Copy ``meta``, which protobuf does not store, of the graph and of the tensors that remain."""
    new.meta.update(old.meta)
    before = {value.name: value for value in _iter_values(old)}
    for value in _iter_values(new):
        if value.name in before:
            value.meta.update(before[value.name].meta)


def _keep_weights(old: ir.Model, new: ir.Model) -> None:
    """Use the old tensors for unchanged weights of the graph and of the bodies, so that external weights stay external.

    Weights of two bodies may have the same name, so the values are compared too.
    """
    before = {value.name: value.const_value for graph in old.graphs() for value in graph.initializers.values()}
    for graph in new.graphs():
        for value in graph.initializers.values():
            known = before.get(value.name)
            if _is_same_tensor(known, value.const_value):
                value.const_value = known


def _iter_values(graph: ir.Graph) -> list[ir.Value]:
    outputs = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *outputs]


def _is_same_tensor(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    if one is None or other is None:
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
