"""Open each model-local function as a model. Its inputs have the types and shapes on which all callers agree.

A size that differs between callers becomes a symbol. Two sizes that are equal in every call share one symbol.
Attributes that a function's nodes take from the caller are filled in if all callers pass the same value. They are
restored when the function is written back. A function whose types or attributes stay unknown is not opened;
`closed_functions` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from ..storage.proto_traversal import FunctionKey, attribute_graphs, function_key, functions_by_key, iter_subgraphs
from .dims import Type, Types
from .proto_queries import called_functions, own_functions
from .region import RefusedError
from .shape_inference import infer_types
from .subgraphs import Subgraph, make_value_info


@dataclass
class _CallSites:
    """Arguments that the callers of one function pass.

    Attributes:
        inputs: for each call, the types and shapes of its inputs.
        attributes: for each call, its attributes by name.
    """

    inputs: list[tuple[Type, ...]] = field(default_factory=list)
    attributes: list[dict[str, onnx.AttributeProto]] = field(default_factory=list)


def open_functions(proto: onnx.ModelProto) -> Iterator[Subgraph]:
    """Open the functions whose callers agree on types and shapes.

    Yields: each function as a subgraph; changes are written back into ``proto``.
    """
    for function, model in _called_functions(proto):
        if isinstance(model, onnx.ModelProto):
            yield _function_subgraph(function, model)


def closed_functions(proto: onnx.ModelProto) -> Iterator[tuple[Subgraph, str]]:
    """List the called functions that can't be opened.

    Yields: each function as a subgraph without types and shapes, and the reason.
    """
    defined = functions_by_key(proto)
    for function, reason in _called_functions(proto):
        if isinstance(reason, RefusedError):
            model = _model_without_graph(proto, defined, function)
            model.graph.input.extend(make_value_info(name, None, None) for name in function.input)
            model.graph.node.extend(function.node)
            yield _function_subgraph(function, model), str(reason)


def _called_functions(proto: onnx.ModelProto) -> Iterator[tuple[onnx.FunctionProto, onnx.ModelProto | RefusedError]]:
    """Yield each called function as a model, or with the reason why it can't be one."""
    by_key = own_functions(proto)
    if not by_key:
        return
    defined = functions_by_key(proto)
    sites: dict[FunctionKey, _CallSites] = {}
    _collect_call_sites(proto.graph.node, infer_types(proto), by_key, sites)
    for key in _order_callers_first(by_key):
        if key not in sites:
            continue
        try:
            model = _function_model(proto, defined, by_key[key], sites[key])
        except RefusedError as refusal:
            # The function was not opened, so the types that it passes to other functions are unknown.
            _collect_call_sites(by_key[key].node, Types(), by_key, sites)
            yield by_key[key], refusal
        else:
            _collect_call_sites(model.graph.node, infer_types(model), by_key, sites)
            yield by_key[key], model


def _collect_call_sites(
    nodes: Sequence[onnx.NodeProto],
    types: Types,
    by_key: dict[FunctionKey, onnx.FunctionProto],
    sites: dict[FunctionKey, _CallSites],
) -> None:
    for node in nodes:
        key = function_key(node)
        if key in by_key:
            site = sites.setdefault(key, _CallSites())
            site.inputs.append(tuple(types[name] for name in node.input))
            site.attributes.append({a.name: a for a in node.attribute})
        # The types inside a body are unknown here.
        for body in (g for a in node.attribute for g in attribute_graphs(a)):
            _collect_call_sites(body.node, Types(), by_key, sites)


def _order_callers_first(by_key: dict[FunctionKey, onnx.FunctionProto]) -> list[FunctionKey]:
    """Order the functions so that each function comes before the functions that it calls.

    ONNX allows no recursion. If functions of a file call each other anyway, their order is arbitrary.
    """
    order: list[FunctionKey] = []
    seen: set[FunctionKey] = set()
    stack = [(key, False) for key in by_key]
    while stack:
        key, called = stack.pop()
        if called:
            order.append(key)
        elif key not in seen:
            seen.add(key)
            stack.append((key, True))
            inner = map(function_key, by_key[key].node)
            stack.extend((k, False) for k in inner if k in by_key)
    return order[::-1]


def _function_model(
    proto: onnx.ModelProto,
    defined: Mapping[FunctionKey, onnx.FunctionProto],
    function: onnx.FunctionProto,
    sites: _CallSites,
) -> onnx.ModelProto:
    """Build the model of a function from the types and attributes that all its callers pass.

    Raises:
        RefusedError: callers differ in the number, types or ranks of inputs, or a type or an attribute is unknown.
    """
    inputs = _agreed_types(sites.inputs, function.input)
    model = _model_without_graph(proto, defined, function)
    graph = model.graph
    graph.input.extend(make_value_info(name, *kind) for name, kind in zip(function.input, inputs, strict=True))
    graph.output.extend(make_value_info(name, None, None) for name in function.output)
    graph.value_info.extend(function.value_info)
    defaults = {a.name: a for a in function.attribute_proto}
    for node in function.node:
        if any(a.ref_attr_name for body in iter_subgraphs(node) for inner in body.node for a in inner.attribute):
            raise RefusedError(f"a body in its node {node.name or node.output[0]!r} reads an attribute of the caller")
        graph.node.append(node)
        for attribute in graph.node[-1].attribute:
            if attribute.ref_attr_name:
                given = {_attribute_value(attribute, s, defaults) for s in sites.attributes}
                if len(given) != 1 or None in given:
                    raise RefusedError(
                        f"its attribute {attribute.ref_attr_name!r} is missing in a call or differs between calls"
                    )
                attribute.ParseFromString(given.pop() or b"")
    types = infer_types(model)
    for out in graph.output:
        out.CopyFrom(make_value_info(out.name, *types[out.name]))
    return model


def _model_without_graph(
    proto: onnx.ModelProto, defined: Mapping[FunctionKey, onnx.FunctionProto], function: onnx.FunctionProto
) -> onnx.ModelProto:
    model = onnx.ModelProto(
        ir_version=proto.ir_version, opset_import=function.opset_import, functions=called_functions(defined, function)
    )
    model.graph.name = function.name
    return model


def _attribute_value(
    attribute: onnx.AttributeProto, site: dict[str, onnx.AttributeProto], defaults: dict[str, onnx.AttributeProto]
) -> bytes | None:
    value = site.get(attribute.ref_attr_name, defaults.get(attribute.ref_attr_name))
    if value is None:
        return None
    filled = onnx.AttributeProto()
    filled.CopyFrom(value)
    filled.name = attribute.name
    return filled.SerializeToString(deterministic=True)


def _agreed_types(sites: Sequence[tuple[Type, ...]], inputs: Sequence[str]) -> list[Type]:
    other = next((len(site) for site in sites if len(site) != len(inputs)), None)
    if other is not None:
        raise RefusedError(f"it has {len(inputs)} inputs, but a call passes {other}")
    agreed: list[Type] = []
    names: dict[tuple[int | str | None, ...], str] = {}
    for name, position in zip(inputs, zip(*sites, strict=True), strict=True):
        kinds = {kind for kind, _ in position}
        ranks = {None if dims is None else len(dims) for _, dims in position}
        if None in kinds or None in ranks:
            raise RefusedError(f"the type or rank of its input {name!r} is unknown in a call")
        if len(kinds) != 1 or len(ranks) != 1:
            raise RefusedError(f"its calls pass tensors of different types or ranks as its input {name!r}")
        dims = [
            sizes[0] if len(set(sizes)) == 1 and sizes[0] is not None else names.setdefault(sizes, f"n{len(names)}")
            for sizes in zip(*(d for _, d in position if d is not None), strict=True)
        ]
        agreed.append((kinds.pop(), tuple(dims)))
    return agreed


def _function_subgraph(function: onnx.FunctionProto, model: onnx.ModelProto) -> Subgraph:
    written = {node.output[0]: node for node in function.node if node.output}
    filled = {node.output[0]: node.SerializeToString(deterministic=True) for node in model.graph.node if node.output}

    def put_back(result: onnx.ModelProto) -> None:
        """Write the optimized nodes back into the function.

        An unchanged node again takes from the caller the attributes that were filled in.
        """
        nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in result.graph.initializer]
        for node in result.graph.node:
            if node.output:
                first = node.output[0]
            else:
                first = ""
            same = filled.get(first) == node.SerializeToString(deterministic=True)
            kept = onnx.NodeProto()
            kept.CopyFrom(written[first] if same else node)
            nodes.append(kept)
        del function.node[:]
        function.node.extend(nodes)

    return Subgraph(f"function {function.domain}.{function.name}", model, put_back)
