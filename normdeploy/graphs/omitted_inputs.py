"""Rewrite inputs that a node omits by an empty name into a form that every runtime accepts.

ONNX lets a node omit any optional input, by an empty name or by ending the list early (IR.md, "Optional Inputs and
Outputs"). Two cases need a rewrite. onnxruntime 1.31's optimizer crashes on a LayerNormalization whose bias is an empty
name. In a model-local function, an input that no call passes has no known type.
"""

from __future__ import annotations

import onnx

from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import FunctionKey, copy_model, function_key, iter_subgraphs, nodes_with_bodies
from .proto_queries import own_functions

# Maximum number of functions that may be added to a file; an n-input function has up to 2^n variants.
_MOST = 256
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def has_omitted_inputs(proto: onnx.ModelProto) -> bool:
    """Return whether a function call omits an input, or a LayerNormalization has an empty bias.

    Returns: True also if this happens in a body or in another function.
    """
    functions = own_functions(proto)
    holders = (proto.graph.node, *(f.node for f in functions.values()))
    return any(
        _omitted_indices(n, functions) or _has_empty_bias(n) for nodes in holders for n in nodes_with_bodies(nodes)
    )


def remove_omitted_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Let each call that omits inputs call a variant without them, and cut empty biases of LayerNormalization.

    Returns:
        A copy; ``proto`` itself if nothing is omitted or more than `_MOST` functions would be needed.
    """
    if not has_omitted_inputs(proto):
        return proto
    made = copy_model(proto)
    functions = own_functions(made)
    variants: dict[tuple[FunctionKey, tuple[int, ...]], onnx.FunctionProto] = {}
    waiting = [*nodes_with_bodies(made.graph.node)]
    waiting += [node for f in functions.values() for node in nodes_with_bodies(f.node)]
    while waiting:
        node = waiting.pop()
        omitted = _omitted_indices(node, functions)
        function = functions.get(function_key(node))
        if function is None or not omitted or _passes_omitted_on(function, omitted):
            continue
        if _requires_omitted(function, omitted):
            continue
        variant = variants.get((function_key(node), omitted))
        if variant is None:
            if len(variants) == _MOST:
                return proto
            variant = _function_variant(function, omitted, taken=functions)
            variants[function_key(node), omitted] = variant
            functions[function_key(variant)] = variant
            waiting += nodes_with_bodies(variant.node)
        node.op_type = variant.name
        node.input[:] = [name for name in node.input if name]
    made.functions.extend(variants.values())
    _drop_uncalled_functions(made, {key for key, _ in variants})
    for nodes in (made.graph.node, *(f.node for f in made.functions)):
        for node in nodes_with_bodies(nodes):
            if _has_empty_bias(node):
                node.input.pop()
    return made


def _has_empty_bias(node: onnx.NodeProto) -> bool:
    return node.op_type == "LayerNormalization" and is_standard(node) and len(node.input) == 3 and not node.input[2]


def _omitted_indices(node: onnx.NodeProto, functions: dict[FunctionKey, onnx.FunctionProto]) -> tuple[int, ...]:
    """Return the positions of the inputs that a call omits."""
    function = functions.get(function_key(node))
    if function is None:
        return ()
    return tuple(place for place in range(len(function.input)) if place >= len(node.input) or not node.input[place])


def _passes_omitted_on(function: onnx.FunctionProto, omitted: tuple[int, ...]) -> bool:
    """Return whether the function, or a body in it, returns an omitted input as its own output."""
    bodies = (graph for node in function.node for graph in iter_subgraphs(node))
    given = {*function.output, *(value.name for graph in bodies for value in graph.output)}
    return any(function.input[place] in given for place in omitted)


def _requires_omitted(function: onnx.FunctionProto, omitted: tuple[int, ...]) -> bool:
    """Return whether a standard node of the function requires an omitted input; such a call can't run."""
    absent = {function.input[place] for place in omitted}
    opset = default_domain_opset(function)
    for node in nodes_with_bodies(function.node):
        if absent.isdisjoint(node.input) or not is_standard(node):
            continue
        try:
            formal = onnx.defs.get_schema(node.op_type, opset).inputs
        except onnx.defs.SchemaError:
            # The opset has no such op, so nothing is known of its inputs.
            continue
        # An input beyond the list belongs to the last parameter, such as the inputs of Concat.
        options = (formal[min(i, len(formal) - 1)].option for i in range(len(node.input)) if formal)
        if any(name in absent and option != _OPTIONAL for name, option in zip(node.input, options, strict=False)):
            return True
    return False


def _function_variant(
    function: onnx.FunctionProto, omitted: tuple[int, ...], *, taken: dict[FunctionKey, onnx.FunctionProto]
) -> onnx.FunctionProto:
    """Return the function without the omitted inputs. Its nodes that read these inputs omit them too."""
    variant = onnx.FunctionProto()
    variant.CopyFrom(function)
    absent = {function.input[place] for place in omitted}
    variant.input[:] = [name for name in function.input if name not in absent]
    for node in nodes_with_bodies(variant.node):
        node.input[:] = ["" if name in absent else name for name in node.input]
    variant.name = "_without_".join([function.name, *(function.input[place] for place in omitted)])
    while function_key(variant) in taken:
        variant.name += "_"
    return variant


def _drop_uncalled_functions(proto: onnx.ModelProto, replaced: set[FunctionKey]) -> None:
    """Remove each of the ``replaced`` functions that nothing calls any more."""
    while True:
        holders = (proto.graph.node, *(f.node for f in proto.functions))
        calls = {function_key(node) for nodes in holders for node in nodes_with_bodies(nodes)}
        kept = [f for f in proto.functions if function_key(f) not in replaced or function_key(f) in calls]
        if len(kept) == len(proto.functions):
            return
        del proto.functions[:]
        proto.functions.extend(kept)
