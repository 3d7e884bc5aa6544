"""Find the settled integers of a trace (`data_independent` defines "settled")."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch

from .data_independent import DataIndependent, select_feeding_integers

# Operators that read only the size or dtype of their input, not its values.
_SIZES = frozenset(
    {"sym_size", "sym_numel", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
# Module name of Python's operators. A trace uses them for arithmetic of sizes and for items of lists.
_OPERATORS = operator.add.__module__
_INDICES = (torch.int64, torch.int32, torch.bool)
_WIDE = (torch.float32, torch.float64)


def find_data_independent_nodes(
    module: torch.fx.GraphModule, lifted: Mapping[str, Any]
) -> DataIndependent[torch.fx.Node]:
    """Find the settled integers of a trace.

    Args:
        lifted: placeholder name -> its parameter, buffer or constant.

    Returns:
        The settled nodes. Empty for a graph that writes to its tensors: there, a tensor that is settled at one node may
        not be settled at the next node.
    """
    nodes = list(module.graph.nodes)
    if any(schema.is_mutable for schema in map(_op_schema, nodes) if schema is not None):
        return DataIndependent()
    settled: set[torch.fx.Node] = set()
    for node in nodes:
        if _is_data_independent(module, node, lifted, settled):
            settled.add(node)
    return select_feeding_integers(
        [n for n in nodes if n in settled and n.op == "call_function"],
        lambda n: [read for read in n.all_input_nodes if read in settled],
        {n for n in settled if _has_floats(n.meta.get("val"))},
    )


def _is_data_independent(
    module: torch.fx.GraphModule, node: torch.fx.Node, lifted: Mapping[str, Any], settled: Collection[torch.fx.Node]
) -> bool:
    value = node.meta.get("val")
    if node.op == "placeholder":
        held = lifted.get(node.name)
        if held is None:
            return not _has_floats(value)
        return _is_index_or_scalar(held)
    if node.op == "get_attr":
        held = getattr(module, str(node.target), None)
        return _is_index_or_scalar(held)
    if node.op != "call_function":
        return False
    schema = _op_schema(node)
    if schema is None:
        return getattr(node.target, "__module__", "") == _OPERATORS and all(
            read in settled for read in node.all_input_nodes
        )
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in _WIDE:
        return False
    if schema.name.partition("::")[2] in _SIZES:
        return True
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not drawn and all(read in settled for read in node.all_input_nodes)


def _is_index_or_scalar(value: Any) -> bool:
    """Return whether a constant is a single number or holds indices; integers of 8 bits or fewer may be weights."""
    return isinstance(value, torch.Tensor) and (value.numel() == 1 or value.dtype in _INDICES)


def _has_floats(value: Any) -> bool:
    """Return whether a node's value is a floating or complex tensor, or a list with such a tensor."""
    if isinstance(value, list | tuple):
        return any(_has_floats(each) for each in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _op_schema(node: torch.fx.Node) -> Any:
    return getattr(node.target, "_schema", None)
