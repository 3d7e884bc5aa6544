"""Find problems in the quantization of a file. ``norm_rules.RULES`` describes the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from ...graphs.proto_queries import module_path
from ...graphs.quantization_info import (
    DEQUANTIZE,
    LINEAR,
    QUANTIZE,
    GraphQuantization,
    all_quantizations,
    is_quantization_node,
    is_quantized,
)
from ...option_values import TENSORRT
from ...storage.onnx_domains import is_standard
from .norm_rules import Problem

# Ops that runtimes fuse with the convolution whose result they read.
_FUSED = frozenset({"BatchNormalization", "Relu", "Clip", "LeakyRelu", "Sigmoid", "HardSwish"})
# Compute capability of Ada Lovelace, the first architecture with FP8.
FP8_FROM = 8.9


def find_quantization_problems(proto: onnx.ModelProto, runtime: str, capability: float | None) -> Iterator[Problem]:
    """Find the quantization problems of every graph of a file.

    Args:
        runtime: the target runtime; "any" applies only the rules that hold for every runtime.
        capability: compute capability of the oldest target GPU; None if unknown.

    Yields:
        Problems, without fingerprints.
    """
    if not is_quantized(proto):
        return
    for q in all_quantizations(proto):
        yield from _problems_of_graph(q, runtime, capability)


def _problems_of_graph(q: GraphQuantization, runtime: str, capability: float | None) -> Iterator[Problem]:
    for node in q.nodes:
        if not is_quantization_node(node) or node.op_type not in (QUANTIZE, DEQUANTIZE):
            continue
        if node.op_type == QUANTIZE:
            yield from _find_unpaired(q, node)
            yield from _find_blocking_pairs(q, node)
        elif q.is_weight(node.output[0]):
            yield from _problems_of_weight(q, node)
        if node.op_type == DEQUANTIZE and not q.is_weight(node.output[0]) and runtime in TENSORRT:
            yield from _find_asymmetric(q, node, runtime)
        if node.op_type == DEQUANTIZE and runtime in TENSORRT and q.scheme_of(node).kind == np.int32:
            message = f"{node.input[0]!r} is int32, which {runtime} can't dequantize"
            yield _make_problem(q, "int32", node, message)
        if capability is not None and capability < FP8_FROM:
            yield from _find_unsupported_fp8(q, node, capability)
    yield from _find_repeated_quantizers(q)


def _make_problem(q: GraphQuantization, rule: str, node: onnx.NodeProto, message: str) -> Problem:
    """Build a problem at a quantization node. If the node has no module path, the problem gets the module path of a
    neighbor node.
    """
    beside = (
        n
        for name in (*node.output, *node.input)
        for n in (*q.readers_by_tensor.get(name, ()), *_producing_nodes(q, name))
    )
    path = module_path(node) or next((m for n in beside if (m := module_path(n))), "")
    return Problem(rule, message, module=path, place=q.place, node=node.name, tensor=next(iter(node.output), ""))


def _producing_nodes(q: GraphQuantization, name: str) -> list[onnx.NodeProto]:
    if name in q.makers:
        return [q.makers[name]]
    return []


def _find_unpaired(q: GraphQuantization, node: onnx.NodeProto) -> Iterator[Problem]:
    """Find a quantized tensor that is neither dequantized, nor read by integer ops, nor an output of the graph."""
    name = node.output[0]
    waiting = [node.output[0]]
    others = list[str]()
    while waiting:
        tensor = waiting.pop()
        for reader in q.readers_by_tensor.get(tensor, ()):
            if is_quantization_node(reader) or reader.op_type.startswith("QLinear"):
                return
            if q.source_tensor(reader.output[0]) == q.source_tensor(tensor):
                waiting += reader.output
            else:
                others.append(reader.op_type)
        if tensor in q.outputs:
            return
    if others:
        what = f"{', '.join(dict.fromkeys(others))} computes with its integer codes"
    else:
        what = "nothing reads it"
    yield _make_problem(q, "unpaired", node, f"{name!r} is quantized and never dequantized: {what}")


def _find_blocking_pairs(q: GraphQuantization, node: onnx.NodeProto) -> Iterator[Problem]:
    """Find a quantization pair between a linear op and an op that a runtime would run in the same kernel."""
    source = q.makers.get(node.input[0])
    if source is None or source.op_type not in LINEAR or not is_standard(source):
        return
    if len(q.readers_by_tensor.get(node.input[0], ())) != 1:
        return
    for back in (r for r in q.readers_by_tensor.get(node.output[0], ()) if r.op_type == DEQUANTIZE):
        readers = q.readers_by_tensor.get(back.output[0], [])
        if len(readers) == 1 and readers[0].op_type in _FUSED:
            behind = readers[0].op_type
            message = f"{source.op_type} can't be fused with {behind}: its output is quantized between the two"
            yield _make_problem(q, "blocked-fusion", node, message)


def _find_repeated_quantizers(q: GraphQuantization) -> Iterator[Problem]:
    """Find a tensor, such as a norm's result, that is quantized separately but equally for each of its readers."""
    for name, readers in q.readers_by_tensor.items():
        pairs = [r for r in readers if r.op_type == QUANTIZE and is_quantization_node(r) and r.input[0] == name]
        alike = {_quantization_parameters(q, r) for r in pairs}
        if len(pairs) > 1 and len(alike) == 1 and not q.is_weight(name):
            message = f"{name!r} is quantized {len(pairs)} times in the same way: one pair would serve all its readers"
            yield _make_problem(q, "blocked-fusion", pairs[0], message)


def _quantization_parameters(q: GraphQuantization, node: onnx.NodeProto) -> tuple[Any, ...]:
    scheme = q.scheme_of(node)
    parts = (scheme.scale, scheme.zero_point)
    return (str(scheme.kind), *(None if p is None else p.astype(np.float64).tobytes() for p in parts))


def _problems_of_weight(q: GraphQuantization, node: onnx.NodeProto) -> Iterator[Problem]:
    scheme = q.scheme_of(node)
    origin = q.source_tensor(node.input[0])
    # A function has no initializers: there, the weight is the output of a Constant node.
    if origin not in q.weights:
        held = q.constant_value(origin)
    else:
        held = None
    if origin in q.weights:
        shape = tuple(q.weights[origin].dims)
    elif held is None:
        shape = ()
    else:
        shape = held.shape
    readers = [
        r for r in q.readers_by_tensor.get(node.output[0], ()) if r.op_type in LINEAR or r.op_type == "Transpose"
    ]
    if scheme.kind is not None and scheme.kind.name.startswith("int") and scheme.is_asymmetric and readers:
        message = f"the weight {origin!r} is {scheme.kind.name} with zero points other than 0"
        yield _make_problem(q, "weight-zero-point", node, message)
    if scheme.granularity == "tensor" and len(shape) > 1 and max(shape[:2]) > 1 and readers and not scheme.block:
        message = f"the weight {origin!r} of shape {list(shape)} has one scale for all of its channels"
        yield _make_problem(q, "per-tensor", node, message)


def _find_asymmetric(q: GraphQuantization, node: onnx.NodeProto, runtime: str) -> Iterator[Problem]:
    scheme = q.scheme_of(node)
    unsigned = scheme.kind is not None and scheme.kind.name.startswith("uint")
    if scheme.is_asymmetric or unsigned:
        if scheme.zero_point is None:
            zero = ""
        else:
            zero = f" with zero point {scheme.zero_point.reshape(-1)[0]}"
        if scheme.kind is None:
            kind = ""
        else:
            kind = scheme.kind.name
        message = f"{node.input[0]!r} is {kind}{zero}; {runtime} needs int8 or FP8 with zero point 0"
        yield _make_problem(q, "asymmetric", node, message)


def _find_unsupported_fp8(q: GraphQuantization, node: onnx.NodeProto, capability: float) -> Iterator[Problem]:
    kind = q.scheme_of(node).kind
    if node.op_type == DEQUANTIZE and kind is not None and kind.name.startswith("float8"):
        yield _make_problem(
            q,
            "fp8",
            node,
            f"{node.input[0]!r} is {kind.name}; GPUs of compute capability {capability:g} do not support FP8",
        )
