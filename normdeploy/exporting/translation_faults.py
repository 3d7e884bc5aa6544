"""Refuse operators for which torch's exporter (2.13, onnxscript 0.7.2) writes ONNX nodes that compute another function.

- scatter_reduce with "mean": the ONNX node has the reduction "none".
- avg_pool2d, avg_pool3d with ``divisor_override``: the divisor is dropped.
- adaptive pools along a dynamic size, including "area" resizes: the ONNX nodes are only correct for the sizes of the
  example inputs.
- nearest-exact resizes of a dynamic size: the ONNX node reads other source pixels.
- cross_entropy with ``label_smoothing``: the smoothing is dropped.
- LSTM with ``proj_size``: the projection is dropped.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch

from ..errors import ExportError
from ..loading.program_signature import traced_tensor
from ..loading.recurrent_ops import PROJECTION


def require_translatable(program: torch.export.ExportedProgram, *, own: Container[Any] = ()) -> None:
    """Check that torch's exporter writes no operator of a program as another function.

    Args:
        program: the model as torch.export traced it.
        own: operators that a translation table translates. They are not checked.

    Raises:
        ExportError: the exporter would write another function. The message lists each such operator with its module and
            an alternative.
    """
    found = [
        f"{fault} (operator {node.target}{_module_clause(node)})"
        for node, fault in _find_mistranslated(program)
        if node.target not in own
    ]
    if found:
        raise ExportError(f"torch's exporter writes a different function to ONNX: {'; '.join(dict.fromkeys(found))}")


def _find_mistranslated(program: torch.export.ExportedProgram) -> Iterator[tuple[torch.fx.Node, str]]:
    """Yield each operator that the exporter translates wrongly, with a description of the fault."""
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                fault = _describe_fault(node, node.target)
                if fault:
                    yield node, fault


def _describe_fault(node: torch.fx.Node, target: torch._ops.OpOverload) -> str:
    """Describe how the exporter mistranslates ``node``; "" if its translation is correct."""
    name = target._schema.name.removeprefix("aten::")
    arguments = _bound_arguments(node, target)
    if name == "scatter_reduce" and arguments.get("reduce") == "mean":
        return 'scatter_reduce drops its "mean": divide a scatter_add by the counts instead'
    if name in ("avg_pool2d", "avg_pool3d") and arguments.get("divisor_override") is not None:
        return f"{name} drops divisor_override: multiply the plain average instead"
    if name == "lstm" and _has_projection(arguments):
        return PROJECTION
    if name == "cross_entropy_loss" and arguments.get("label_smoothing"):
        return "cross_entropy drops label_smoothing: write it with log_softmax"
    if name.lstrip("_").startswith("adaptive_") and _pools_dynamic_size(arguments):
        return "an adaptive pool (or area resize) has a dynamic size: fix that size, or pool with a fixed kernel"
    if "upsample_nearest_exact" in name and _has_dynamic_size(arguments.get("self", arguments.get("input"))):
        return "a nearest-exact resize has a dynamic size: fix that size, or use nearest"
    return ""


def _has_projection(arguments: dict[str, Any]) -> bool:
    """Return True if each layer and direction has more weights than the two products and their biases need."""
    weights = arguments.get("params")
    if not isinstance(weights, list | tuple):
        return False
    rows = arguments["num_layers"] * (2 if arguments["bidirectional"] else 1)
    return len(weights) != rows * (4 if arguments["has_biases"] else 2)


def _bound_arguments(node: torch.fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    names = [argument.name for argument in target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _pools_dynamic_size(arguments: dict[str, Any]) -> bool:
    """Return True if a pool divides a dynamic size into more than one part."""
    sizes = arguments.get("output_size", ())
    shape = _shape_of_value(arguments.get("self"))
    axes = zip(shape[len(shape) - len(sizes) :], sizes, strict=False)
    return any(not isinstance(size, int) and parts != 1 for size, parts in axes)


def _has_dynamic_size(value: Any) -> bool:
    return any(not isinstance(size, int) for size in _shape_of_value(value)[2:])


def _shape_of_value(value: Any) -> tuple[Any, ...]:
    tensor = traced_tensor(value)
    if tensor is None:
        return ()
    return tuple(tensor.shape)


def _module_clause(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = list(stack.values())[-1][0]
    else:
        path = ""
    if path:
        return f" in module {path!r}"
    return ""
