"""Read from ONNX protobufs what graphsurgeon does not provide."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from ..errors import GraphError
from ..norms.third_party import is_managed_op
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import (
    FunctionKey,
    attribute_value,
    function_key,
    functions_by_key,
    iter_bodies,
    iter_subgraphs,
)
from .dims import Dims, Type

# Lowest IR version in which an initializer need not be a graph input.
IR_OF_CONSTANTS = 4


def require_topological_order(graph: onnx.GraphProto) -> None:
    """Check that each name is written once, before it is read. A walk through a cycle would never end.

    Raises:
        GraphError: a name is written twice or read too early.
    """
    written = {t.name for t in (*graph.input, *graph.initializer)}
    later = {name for node in graph.node for name in node.output}
    for node in graph.node:
        early = next((name for name in node.input if name in later and name not in written), "")
        twice = next((name for name in node.output if name and name in written), "")
        if early or twice:
            if early:
                wrong = f"reads {early!r} before it is written"
            else:
                wrong = f"writes {twice!r}, which is an input or was already written"
            message = f"{node.op_type} {node.name!r} {wrong}"
            raise GraphError(f"{message}, so the graph is invalid; give tensors unique names and sort the nodes")
        written.update(node.output)


def single_use_symbols(graph: onnx.GraphProto) -> set[str]:
    """Find the symbols that only one output uses.

    TorchScript's exporter and tf2onnx invent new names for an output's dims, which carry no information.

    Returns: names of dims.
    """
    seen: dict[str, int] = {}
    for v in (*graph.input, *graph.value_info, *graph.output):
        for symbol in {d.dim_param for d in v.type.tensor_type.shape.dim if d.dim_param}:
            seen[symbol] = seen.get(symbol, 0) + 1
    return {d.dim_param for v in graph.output for d in v.type.tensor_type.shape.dim if seen.get(d.dim_param) == 1}


def forget_dim_names(graph: onnx.GraphProto) -> None:
    """Remove the names of dims in place.

    onnxruntime reuses buffers for tensors with equal dims. A run fails if dims with the same name have different sizes.
    """
    for v in (*graph.input, *graph.value_info, *graph.output):
        for dim in v.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")


def value_info_type(v: onnx.ValueInfoProto) -> Type:
    """Return the elem_type and the shape that a value_info declares.

    Returns: elem_type and dims. None replaces an undeclared elem_type, an undeclared shape, and an unnamed dynamic dim.
    """
    kind = v.type.tensor_type
    if not v.type.HasField("tensor_type"):
        return None, None
    shape: Dims | None = None
    if kind.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.shape.dim)
    return kind.elem_type or None, shape


# Module name that torch writes for a node that a pass inserted outside all modules.
_MADE_UP = "_empty_nn_module_stack_from_metadata_hook"


def module_path(node: onnx.NodeProto) -> str:
    """Return the module path that ``normdeploy.export`` or torch's exporter stored in a node's metadata.

    Returns: "" if there is none.
    """
    metadata = {p.key: p.value for p in node.metadata_props}
    return strip_invented_module(metadata.get("normdeploy.module", "")) or module_from_scope(
        metadata.get("pkg.torch.onnx.name_scopes", "")
    )


def strip_invented_module(path: str) -> str:
    """Remove the name that torch invents for nodes outside all modules from a path.

    Returns: the path; "" if nothing remains.
    """
    return path.removesuffix(_MADE_UP).removesuffix(".")


def module_from_scope(value: str) -> str:
    """Read the module path from torch's ``['', 'layers.0', 'layers.0.ln', 'layer_norm']``.

    Returns: the second to last element, which is the module; "" if there is none.
    """
    try:
        if value:
            names = ast.literal_eval(value)
        else:
            names = []
    except (SyntaxError, ValueError):
        return ""
    if isinstance(names, list) and len(names) > 1:
        return strip_invented_module(str(names[-2]))
    return ""


def own_functions(proto: onnx.ModelProto) -> dict[FunctionKey, onnx.FunctionProto]:
    """Return the functions of the file itself, without the functions of normdeploy's own ops and of third-party ops.

    Returns: functions by their key.
    """
    return {key: f for key, f in functions_by_key(proto).items() if not is_managed_op(f.domain, f.name)}


def called_functions(
    defined: Mapping[FunctionKey, onnx.FunctionProto], body: onnx.GraphProto | onnx.FunctionProto
) -> list[onnx.FunctionProto]:
    """Return the functions that ``body`` calls, directly or indirectly. A model made of ``body`` needs no other
    functions.

    Args:
        defined: the model's functions (`functions_by_key`).

    Returns: each function once.
    """
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    stack: list[onnx.GraphProto | onnx.FunctionProto]
    if defined:
        stack = [body]
    else:
        stack = []
    while stack:
        for node in stack.pop().node:
            stack.extend(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
            stack.extend(g for a in node.attribute for g in a.graphs)
            key = function_key(node)
            if key in defined and key not in functions:
                functions[key] = defined[key]
                stack.append(defined[key])
    return list(functions.values())


def all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """List every name of a tensor or node in the graph and its bodies.

    Bodies see outer names and must not reuse them, and onnxruntime refuses two nodes with the same name.

    Yields: names, possibly repeated.
    """
    yield from (i.name for i in (*graph.input, *graph.initializer))
    yield from (i.values.name for i in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.output)
        for body in iter_subgraphs(node):
            yield from (i.name for i in (*body.input, *body.initializer, *body.node))
            yield from (o for inner in body.node for o in inner.output)


RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
# Domains in which only the ops of `RANDOM`, and Dropout in training, draw random numbers.
_KNOWN = (
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "normdeploy",
)


def may_draw(proto: onnx.ModelProto) -> bool:
    """Return whether a model may draw random numbers, so that two runs may differ.

    Returns: True also if it has ops of unknown domains.
    """
    functions = {(f.domain, f.name) for f in proto.functions}
    return any(
        n.op_type in RANDOM
        or (n.op_type == "Dropout" and len(n.input) > 2)
        or (n.domain not in _KNOWN and (n.domain, n.op_type) not in functions)
        for body in iter_bodies(proto)
        for n in body.node
    )


def captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node's bodies read, including names of the bodies' own tensors.

    Returns: an empty set for a node without bodies.
    """
    return {
        name
        for body in iter_subgraphs(node)
        for name in (*(i for n in body.node for i in n.input), *(o.name for o in body.output))
    }


def drop_unused_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the unread initializers of the model.

    Returns: ``proto``, changed in place.
    """
    graph = proto.graph
    read = {i for n in graph.node for i in n.input} | {o.name for o in graph.output} | {i.name for i in graph.input}
    read |= {name for n in graph.node for name in captured_names(n)}
    for field, name in (("initializer", lambda t: t.name), ("sparse_initializer", lambda t: t.values.name)):
        kept = [t for t in getattr(graph, field) if name(t) in read]
        if len(kept) < len(getattr(graph, field)):
            del getattr(graph, field)[:]
            getattr(graph, field).extend(kept)
    return proto


def separate_default_inputs(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Remove initializers that are graph inputs. A caller may override these defaults, so they are not constants.

    Before IR version 4, every initializer had to be an input, and a caller could not override it (onnx, docs/IR.md). In
    such files, initializers are constants and stay.

    Returns: a copy without the defaults, and the defaults; ``proto`` itself and [] if there are none.
    """
    if proto.ir_version >= IR_OF_CONSTANTS:
        listed = {i.name for i in proto.graph.input}
    else:
        listed = set()
    defaults = [t for t in proto.graph.initializer if t.name in listed]
    if not defaults:
        return proto, []
    opened = onnx.ModelProto()
    opened.CopyFrom(proto)
    del opened.graph.initializer[:]
    opened.graph.initializer.extend(t for t in proto.graph.initializer if t.name not in listed)
    return opened, defaults


def constant_tensors(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the constants of a graph: initializers that are not inputs, and Constant nodes.

    Returns: tensors by name.
    """
    fed = {i.name for i in graph.input}
    constants = {t.name: t for t in graph.initializer if t.name not in fed}
    for node in graph.node:
        if node.op_type == "Constant" and is_standard(node):
            value = attribute_value(node, "value")
            for name in ("value_int", "value_ints"):
                numbers = attribute_value(node, name)
                if numbers is not None:
                    value = onnx.numpy_helper.from_array(np.array(numbers, np.int64))
            if value is not None:
                named = onnx.TensorProto()
                named.CopyFrom(value)
                named.name = node.output[0]
                constants[named.name] = named
    return constants
