"""What graph.py needs of the ONNX protobufs themselves, beside what graphsurgeon reads."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator

import onnx

from ..errors import GraphError
from ..storage.protos import subgraphs
from .dims import Dims

IR_OF_CONSTANTS = 4  # the first IR version in which an initializer need not be a graph input

# Inference of shapes and types reads the values of small integer constants only.
_INFERENCE_SIZE = 512
_LONGEST = 2**20  # elements of a vector whose values it may write out


def inferred(
    proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None
) -> dict[str, tuple[int | None, Dims | None]]:
    """Element type and shape of each tensor by onnx's own inference, over a copy without the weights.

    ``nodes``: those to look at in the place of the graph's, where it holds some that inference does not know.
    """
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    graph = skeleton.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node if nodes is None else nodes)
    for field in ("input", "output", "value_info"):
        getattr(graph, field).extend(getattr(proto.graph, field))
        for dim in (d for v in getattr(graph, field) for d in v.type.tensor_type.shape.dim if d.dim_value < 0):
            dim.Clear()  # PaddlePaddle's older writers put -1 for a dynamic size; inference counts with it
    alone = lonely(proto.graph)
    for dim in (d for v in graph.output for d in v.type.tensor_type.shape.dim if d.dim_param in alone):
        dim.Clear()  # inference would keep the name
    listed = {i.name for i in graph.input}
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= _INFERENCE_SIZE:
            graph.initializer.append(tensor)
        elif tensor.name not in listed:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        result = onnx.shape_inference.infer_shapes(
            skeleton, data_prop=not _endless(graph) and not _long_vectors(skeleton)
        )
    except Exception:  # a file that inference refuses is still readable where it states its shapes itself
        result = skeleton
    initializers = {t.name: (t.data_type, tuple(t.dims)) for t in proto.graph.initializer}
    return initializers | {
        v.name: typed(v) for v in [*result.graph.value_info, *result.graph.output, *result.graph.input]
    }


def _endless(graph: onnx.GraphProto) -> bool:
    """Whether inference would write out values without end: those of a Range, or one for each element of a vector."""
    shapes = [v.type.tensor_type.shape for v in (*graph.input, *graph.output, *graph.value_info)]
    if any(len(shape.dim) == 1 and shape.dim[0].dim_value > _LONGEST for shape in shapes):
        return True
    initializers = {t.name: t for t in graph.initializer}
    initializers |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    for node in graph.node:
        ends = [initializers[name] for name in node.input if name in initializers] if node.op_type == "Range" else []
        if len(ends) == 3:
            start, limit, step = (float(onnx.numpy_helper.to_array(t).ravel()[:1].sum()) for t in ends)
            if not abs(limit - start) <= _LONGEST * abs(step):
                return True
    return False


def _long_vectors(model: onnx.ModelProto) -> bool:
    """The same of vectors whose size inference finds itself: those that a ConstantOfShape, an Expand or a Reshape
    makes."""
    graph = model.graph
    shapes = (v.type.tensor_type.shape for v in (*graph.input, *graph.value_info))
    wide = any(math.prod(max(d.dim_value, 1) for d in shape.dim) > _LONGEST for shape in shapes)
    whole = [
        *graph.initializer,
        *(a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"),
    ]
    vectors = [
        t for t in whole if t.data_type == onnx.TensorProto.INT64 and t.data_location != onnx.TensorProto.EXTERNAL
    ]
    if not wide and not any(max(onnx.numpy_helper.to_array(t).ravel().tolist(), default=0) > _LONGEST for t in vectors):
        return False
    inferred_graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = (v.type.tensor_type.shape for v in (*inferred_graph.value_info, *inferred_graph.output))
    return any(len(shape.dim) == 1 and shape.dim[0].dim_value > _LONGEST for shape in shapes)


def require_order(graph: onnx.GraphProto) -> None:
    """Each name is written once, and before it is read: in a circle no walk through the graph would end.

    Raises:
        GraphError: one is not.
    """
    written = {t.name for t in (*graph.input, *graph.initializer)}
    later = {name for node in graph.node for name in node.output}
    for node in graph.node:
        early = next((name for name in node.input if name in later and name not in written), "")
        twice = next((name for name in node.output if name and name in written), "")
        if early or twice:
            wrong = (
                f"reads {early!r} before it is written"
                if early
                else f"writes {twice!r}, which is an input or was written before it"
            )
            message = f"{node.op_type} {node.name!r} {wrong}"
            raise GraphError(f"{message}: that is no valid graph; give tensors names of their own and sort the nodes")
        written.update(node.output)


def lonely(graph: onnx.GraphProto) -> set[str]:
    """The symbols that one output alone bears: TorchScript's exporter and tf2onnx name an output's dims anew, and say
    nothing with it."""
    seen: dict[str, int] = {}
    for v in (*graph.input, *graph.value_info, *graph.output):
        for symbol in {d.dim_param for d in v.type.tensor_type.shape.dim if d.dim_param}:
            seen[symbol] = seen.get(symbol, 0) + 1
    return {d.dim_param for v in graph.output for d in v.type.tensor_type.shape.dim if seen.get(d.dim_param) == 1}


def typed(v: onnx.ValueInfoProto) -> tuple[int | None, Dims | None]:
    """Element type and shape that a value_info states, None for what it does not."""
    kind = v.type.tensor_type
    if not v.type.HasField("tensor_type"):
        return None, None
    shape: Dims | None = None
    if kind.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.shape.dim)
    return kind.elem_type or None, shape


# torch's name for the module of a node that a pass inserted outside of all modules
_MADE_UP = "_empty_nn_module_stack_from_metadata_hook"


def module(node: onnx.NodeProto) -> str:
    """The module path that ``normdeploy.export`` or torch's exporter wrote beside a node, "" where none."""
    metadata = {p.key: p.value for p in node.metadata_props}
    return real(metadata.get("normdeploy.module", "")) or scope(metadata.get("pkg.torch.onnx.name_scopes", ""))


def real(path: str) -> str:
    """A module path without the name that torch makes up for nodes of no module."""
    return path.removesuffix(_MADE_UP).removesuffix(".")


def scope(value: str) -> str:
    """The module path in torch's ``['', 'layers.0', 'layers.0.ln', 'layer_norm']``: the last but one."""
    try:
        names = ast.literal_eval(value) if value else []
    except (SyntaxError, ValueError):
        return ""
    return real(str(names[-2])) if isinstance(names, list) and len(names) > 1 else ""


def called(proto: onnx.ModelProto, body: onnx.GraphProto | onnx.FunctionProto) -> list[onnx.FunctionProto]:
    """The functions of ``proto`` that ``body`` calls, directly or by way of another: a model of its own needs no
    others."""
    defined = {(f.domain, f.name, f.overload): f for f in proto.functions}
    functions: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    stack: list[onnx.GraphProto | onnx.FunctionProto] = [body] if defined else []
    while stack:
        for node in stack.pop().node:
            stack.extend(a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
            stack.extend(g for a in node.attribute for g in a.graphs)
            key = (node.domain, node.op_type, node.overload)
            if key in defined and key not in functions:
                functions[key] = defined[key]
                stack.append(defined[key])
    return list(functions.values())


def names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a tensor or node of the graph or of a body in it bears: the bodies see the names outside, and may
    not take one again; onnxruntime refuses two nodes of one name."""
    yield from (i.name for i in (*graph.input, *graph.initializer))
    yield from (i.values.name for i in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.output)
        for body in subgraphs(node):
            yield from (i.name for i in (*body.input, *body.initializer, *body.node))
            yield from (o for inner in body.node for o in inner.output)


RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_KNOWN = (
    "",
    "ai.onnx",
    "ai.onnx.ml",
    "normdeploy",
)  # domains none of whose other ops draws, but for a Dropout in training


def may_draw(proto: onnx.ModelProto) -> bool:
    """Whether it may draw random numbers: two runs of it may then differ."""
    nodes = [*proto.graph.node, *(n for f in proto.functions for n in f.node)]
    nodes += [inner for node in nodes for body in subgraphs(node) for inner in body.node]
    functions = {(f.domain, f.name) for f in proto.functions}
    return any(
        n.op_type in RANDOM
        or (n.op_type == "Dropout" and len(n.input) > 2)
        or (n.domain not in _KNOWN and (n.domain, n.op_type) not in functions)
        for n in nodes
    )


def captured(node: onnx.NodeProto) -> set[str]:
    """The names that the bodies of a node read, those of their own tensors included."""
    return {
        name
        for body in subgraphs(node)
        for name in (*(i for n in body.node for i in n.input), *(o.name for o in body.output))
    }


def without_unused(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto``, changed in place, without the initializers that nothing reads any more."""
    graph = proto.graph
    read = {i for n in graph.node for i in n.input} | {o.name for o in graph.output} | {i.name for i in graph.input}
    read |= {name for n in graph.node for name in captured(n)}
    for field, name in (("initializer", lambda t: t.name), ("sparse_initializer", lambda t: t.values.name)):
        kept = [t for t in getattr(graph, field) if name(t) in read]
        if len(kept) < len(getattr(graph, field)):
            del getattr(graph, field)[:]
            getattr(graph, field).extend(kept)
    return proto


def inputs_without_defaults(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Initializers that are graph inputs are defaults that a caller may replace, so they must not be read as constants.

    Before IR version 4 every initializer had to be an input, and none could be replaced (onnx, docs/IR.md): there they
    are constants.
    """
    listed = {i.name for i in proto.graph.input} if proto.ir_version >= IR_OF_CONSTANTS else set()
    defaults = [t for t in proto.graph.initializer if t.name in listed]
    if not defaults:
        return proto, []
    opened = onnx.ModelProto()
    opened.CopyFrom(proto)
    del opened.graph.initializer[:]
    opened.graph.initializer.extend(t for t in proto.graph.initializer if t.name not in listed)
    return opened, defaults
