"""Run onnx's inference of types and shapes, and avoid the cases that would take hours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from ..storage.onnx_domains import is_standard
from .dims import Dims, Types
from .proto_queries import single_use_symbols, value_info_type

# Maximum number of elements of a constant whose values inference sees. It needs only small integer constants.
_INFERENCE_SIZE = 512
# Maximum number of elements of a vector whose values inference may compute one by one.
_LONGEST = 2**20


def infer_types(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None) -> Types:
    """Infer elem_type and shape of each tensor with onnx, on a copy without the weights.

    Args:
        nodes: nodes to use in place of the graph's nodes, if inference does not know some of the graph's nodes.

    Returns: types by tensor name.
    """
    types = Types({t.name: (t.data_type, tuple(t.dims)) for t in proto.graph.initializer})
    inferable = [_with_inferred_result(n) for n in (proto.graph.node if nodes is None else nodes)]
    types.update(stated_types(infer_graph(proto, inferable)))
    return types


def _with_inferred_result(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node whose result onnx (1.23) infers: it infers nothing for GroupNormalization."""
    if node.op_type != "GroupNormalization" or not is_standard(node) or not node.input:
        return node
    return onnx.helper.make_node("Identity", node.input[:1], node.output[:1])


def infer_graph(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None) -> onnx.GraphProto:
    """Infer types and shapes of the graph and its bodies.

    Args:
        nodes: as in `infer_types`.

    Returns: a copy of the graph without the weights, with everything that onnx inferred.
    """
    skeleton = _copy_skeleton(proto, nodes)
    return _run_inference(skeleton, data_prop=_has_short_vectors(skeleton)).graph


def stated_types(graph: onnx.GraphProto) -> Types:
    """Read the elem_types and shapes that a graph declares, without its bodies.

    Returns: types by tensor name.
    """
    return Types({v.name: value_info_type(v) for v in (*graph.value_info, *graph.output, *graph.input)})


def _copy_skeleton(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    """Copy everything that inference reads: all but the large weights, which become inputs."""
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    graph = skeleton.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node if nodes is None else nodes)
    for field in ("input", "output", "value_info"):
        getattr(graph, field).extend(getattr(proto.graph, field))
        for dim in (d for v in getattr(graph, field) for d in v.type.tensor_type.shape.dim if d.dim_value < 0):
            # PaddlePaddle's older exporters write -1 for a dynamic size, which inference would use as a number.
            dim.Clear()
    alone = single_use_symbols(proto.graph)
    for dim in (d for v in graph.output for d in v.type.tensor_type.shape.dim if d.dim_param in alone):
        # The dim's name carries no information, but inference would keep the name and discard the dim that it infers.
        dim.Clear()
    listed = {i.name for i in graph.input}
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= _INFERENCE_SIZE:
            graph.initializer.append(tensor)
        elif tensor.name not in listed:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return skeleton


def _has_short_vectors(skeleton: onnx.ModelProto) -> bool:
    """Return whether the vectors are short enough for inference to compute their values."""
    return not _has_endless_range(skeleton.graph) and not _has_long_vectors(skeleton)


def _run_inference(skeleton: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
    """Run onnx's inference over ``skeleton``, and drop the declared shapes that inference contradicts."""
    try:
        return onnx.shape_inference.infer_shapes(skeleton, strict_mode=True, data_prop=data_prop)
    except Exception:
        _drop_stated_shapes(skeleton.graph, _find_contradictions(skeleton, data_prop=data_prop))
    try:
        return onnx.shape_inference.infer_shapes(skeleton, data_prop=data_prop)
    except Exception:
        # If inference refuses the file, the shapes that the file declares are still usable.
        return skeleton


@dataclass(frozen=True)
class ShapeContradiction:
    """Tensor whose declared shape or type differs from the shape or type that its node computes.

    Attributes:
        stated: declared dims, as in `Dims`.
        inferred: computed dims.
        stated_type: declared elem_type; 0 if the types agree.
        inferred_type: computed elem_type; 0 if the types agree.
    """

    name: str
    stated: Dims | None
    inferred: Dims | None
    stated_type: int = 0
    inferred_type: int = 0

    def __str__(self) -> str:
        if self.stated_type:
            types = [onnx.TensorProto.DataType.Name(kind).lower() for kind in (self.stated_type, self.inferred_type)]
            return f"{self.name!r} is declared as {types[0]} but computed as {types[1]}"
        return (
            f"{self.name!r} is declared as {_describe_dims(self.stated)} but computed as "
            f"{_describe_dims(self.inferred)}"
        )


def _describe_dims(dims: Dims | None) -> str:
    if dims is None:
        return "a tensor"
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"


def drop_contradictions(proto: onnx.ModelProto) -> list[ShapeContradiction]:
    """Remove declared shapes that the nodes contradict; an output gets the computed shape instead.

    onnxruntime runs such a file with a warning; ``onnx.shape_inference`` in strict mode refuses it. Code that reads a
    declared shape would use a wrong shape. Outputs keep a shape, because ``onnx.checker`` requires it.

    Returns:
        The contradictions.
    """
    skeleton = _copy_skeleton(proto)
    data_prop = _has_short_vectors(skeleton)
    try:
        onnx.shape_inference.infer_shapes(skeleton, strict_mode=True, data_prop=data_prop)
    except Exception:
        found = _find_contradictions(skeleton, data_prop=data_prop)
        _drop_stated_shapes(proto.graph, found)
        _state_output_shapes(proto.graph.output, found)
        return found
    return []


def _find_contradictions(skeleton: onnx.ModelProto, *, data_prop: bool) -> list[ShapeContradiction]:
    """Compare the shapes that ``skeleton`` declares with those inferred from its inputs alone."""
    bare = onnx.ModelProto()
    bare.CopyFrom(skeleton)
    bare.graph.ClearField("value_info")
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        result = onnx.shape_inference.infer_shapes(bare, data_prop=data_prop).graph
    except Exception:
        # Inference failed, so no contradictions are known.
        return []
    computed = Types({v.name: value_info_type(v) for v in (*result.value_info, *result.output)})
    found = []
    for value in (*skeleton.graph.value_info, *skeleton.graph.output):
        stated_type, stated = value_info_type(value)
        inferred_type, inferred_dims = computed[value.name]
        if stated_type and inferred_type and stated_type != inferred_type:
            found.append(ShapeContradiction(value.name, stated, inferred_dims, stated_type, inferred_type))
        elif stated is not None and inferred_dims is not None and not _shapes_agree(stated, inferred_dims):
            found.append(ShapeContradiction(value.name, stated, inferred_dims))
    return found


def _shapes_agree(stated: Dims, computed: Dims) -> bool:
    """Return whether the shapes are compatible: equal ranks, and equal sizes wherever both are numbers."""
    if len(stated) != len(computed):
        return False
    pairs = zip(stated, computed, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int) and a >= 0)


def _drop_stated_shapes(graph: onnx.GraphProto, contradictions: Iterable[ShapeContradiction]) -> None:
    """Remove the declarations of the tensors in ``contradictions``; an output keeps its elem_type."""
    names = {contradiction.name for contradiction in contradictions}
    if not names:
        return
    kept = [v for v in graph.value_info if v.name not in names]
    graph.ClearField("value_info")
    graph.value_info.extend(kept)
    for output in graph.output:
        if output.name in names:
            output.type.tensor_type.ClearField("shape")


def _state_output_shapes(outputs: Iterable[onnx.ValueInfoProto], contradictions: Iterable[ShapeContradiction]) -> None:
    """Declare the computed shapes of these outputs."""
    computed = {contradiction.name: contradiction.inferred for contradiction in contradictions}
    for output in outputs:
        dims = computed.get(output.name)
        if dims is None:
            continue
        shape = output.type.tensor_type.shape
        # A scalar's shape has no dims, but the shape field must be present.
        shape.SetInParent()
        for dim in dims:
            if isinstance(dim, int):
                shape.dim.add(dim_value=dim)
            else:
                shape.dim.add(dim_param=dim or "")


def _has_endless_range(graph: onnx.GraphProto) -> bool:
    """Return whether inference would compute too many values one by one: of a Range, or of a long declared vector."""
    shapes = [v.type.tensor_type.shape for v in (*graph.input, *graph.output, *graph.value_info)]
    if any(len(shape.dim) == 1 and shape.dim[0].dim_value > _LONGEST for shape in shapes):
        return True
    initializers = {t.name: t for t in graph.initializer}
    initializers |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    for node in graph.node:
        if node.op_type == "Range":
            ends = [initializers[name] for name in node.input if name in initializers]
        else:
            ends = []
        if len(ends) == 3:
            start, limit, step = (float(onnx.numpy_helper.to_array(t).ravel()[:1].sum()) for t in ends)
            if not abs(limit - start) <= _LONGEST * abs(step):
                return True
    return False


def _has_long_vectors(model: onnx.ModelProto) -> bool:
    """Return whether a ConstantOfShape, Expand or Reshape makes a vector that is too long for inference."""
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
