"""Run a file in float64 with onnx's reference evaluator.

Its results are the ground truth of the corpus, because it shares no code with normdeploy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional


class GlobalMaxPool(OpRun):
    """Replacement for onnx's op (1.23), which drops the reduced axes of an input of rank 3."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class ConvTranspose(OpRun):
    """Replacement for onnx's op (1.23), which does not support groups."""

    def _run(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **attributes: Any) -> tuple[np.ndarray]:
        spatial = x.ndim - 2
        pads = list(attributes.get("pads") or [0] * 2 * spatial)
        bias = None if b is None else torch.from_numpy(b)
        function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[spatial - 1]
        return (
            function(
                torch.from_numpy(x),
                torch.from_numpy(w),
                bias,
                list(attributes.get("strides") or [1] * spatial),
                pads[:spatial],
                list(attributes.get("output_padding") or [0] * spatial),
                attributes.get("group") or 1,
                list(attributes.get("dilations") or [1] * spatial),
            ).numpy(),
        )


_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def outputs(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], rounded: bool = False) -> list[np.ndarray]:
    """Run a file in float64.

    Args:
        rounded: round numbers that the file casts to a narrower type; an epsilon of 1e-12 is zero in float16.

    Returns:
        outputs in float64, integers unchanged.
    """
    wide = {
        k: v.astype(np.float64) if v.dtype.kind == "f" or v.dtype == ml_dtypes.bfloat16 else v for k, v in feeds.items()
    }
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(widened(proto, rounded), new_ops=[GlobalMaxPool, ConvTranspose]).run(None, wide))


def widened(proto: onnx.ModelProto, rounded: bool = False) -> onnx.ModelProto:
    """Convert all floating tensors to float64: weights, constants, Casts, inputs and outputs.

    Returns:
        the copy.
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    if rounded:
        _round_constants(wide)
    for holder in (wide.graph, *wide.functions):
        for graph in _bodies(holder):
            _widen(graph)
    return wide


def _round_constants(proto: onnx.ModelProto) -> None:
    """Compute Casts of constants in their own types."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    types |= {t.name: t.data_type for t in graph.initializer}
    held = {t.name: t for t in proto.graph.initializer}
    held |= {
        n.output[0]: n.attribute[0].t
        for n in proto.graph.node
        if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    for node in proto.graph.node:
        if (
            node.op_type not in ("Cast", "CastLike")
            or node.input[0] not in held
            or types.get(node.output[0]) not in _FLOATS
        ):
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(types[node.output[0]])
        tensor = numpy_helper.from_array(np.asarray(numpy_helper.to_array(held[node.input[0]]).astype(dtype)))
        node.CopyFrom(onnx.helper.make_node("Constant", [], list(node.output), value=tensor))
        held[node.output[0]] = node.attribute[0].t


def _bodies(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    yield from _bodies(body)


def _widen(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    del graph.value_info[:]
    if isinstance(graph, onnx.GraphProto):
        for info in (*graph.input, *graph.output):
            if info.type.tensor_type.elem_type in _FLOATS:
                info.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                values = (
                    np.float64(attribute.f)
                    if attribute.name == "value_float"
                    else np.array(attribute.floats, np.float64)
                )
                attribute.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(np.asarray(values))))
        # Its function body would round the statistics to float32.
        if node.op_type == "GroupNormalization":
            kept = [a for a in node.attribute if a.name != "stash_type"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("stash_type", TensorProto.DOUBLE)])


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), name))
