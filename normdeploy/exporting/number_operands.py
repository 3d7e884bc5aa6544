"""Write operands that torch's exporter can't promote, while a program is exported.

PyTorch promotes the dtypes of a number and a tensor. torch's exporter (2.13) writes these promotions as Casts, but
fails at these operators:

- `1.0 - mask` with an integer mask, in a trace `rsub.Scalar(mask, 1.0)`: it becomes `sub(1.0, mask)`, for which no
  overload takes a number and a tensor.
- `5 // x`, `torch.div(5, x)`, `torch.mul(5, x)`, and `x // 2.5` with an integer x: no overload takes a number before a
  tensor, and the translations expect two tensors.

Here the promotions are written first: integers are cast, and the number becomes a tensor. The values are those of
PyTorch, which computes these operators in the dtype of their result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_SUBTRACT = torch.ops.aten.rsub.Scalar
_FLOOR_DIVIDE = torch.ops.aten.floor_divide.default
# Operators that compute in the dtype of their result.
_ARITHMETIC = (
    _FLOOR_DIVIDE,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div.Tensor_mode,
)


@dataclass(frozen=True)
class _Change:
    """Change of one node.

    Attributes:
        args: arguments before the change.
        inserted: nodes that were inserted before the node.
    """

    node: torch.fx.Node
    args: tuple[Any, ...]
    inserted: list[torch.fx.Node] = field(default_factory=list)


@contextmanager
def promote_number_operands(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Write the promotions that torch's exporter can't write.

    Args:
        program: is changed inside the context, and is as before afterwards.
    """
    nodes = [
        node
        for graph_module in program.graph_module.modules()
        if isinstance(graph_module, torch.fx.GraphModule)
        for node in graph_module.graph.nodes
        if _needs_promotion(node)
    ]
    changes = [_Change(node, node.args) for node in nodes]
    try:
        for change in changes:
            _promote(change)
        _recompile(changes)
        yield
    finally:
        for change in changes:
            change.node.args = change.args
            for node in change.inserted:
                node.graph.erase_node(node)
        _recompile(changes)


def _recompile(changes: list[_Change]) -> None:
    owners = {id(change.node.graph): change.node.graph.owning_module for change in changes}
    for owner in owners.values():
        assert owner is not None
        owner.recompile()


def _needs_promotion(node: torch.fx.Node) -> bool:
    if node.target is _SUBTRACT:
        return _is_cast(node.args[0], node)
    if node.target not in _ARITHMETIC:
        return False
    if isinstance(node.args[0], int | float):
        return _is_tensor(node.args[1])
    divides_by_number = node.target is _FLOOR_DIVIDE and isinstance(node.args[1], int | float)
    return divides_by_number and _is_cast(node.args[0], node)


def _is_cast(operand: Any, node: torch.fx.Node) -> bool:
    """Return True if PyTorch casts the tensor ``operand`` to the dtype of the node's result."""
    return _is_tensor(operand) and operand.meta["val"].dtype != node.meta["val"].dtype


def _is_tensor(operand: Any) -> bool:
    """Return True for a node with a tensor. Other nodes have a size, or a number that is computed from sizes."""
    return isinstance(operand, torch.fx.Node) and isinstance(operand.meta.get("val"), torch.Tensor)


def _promote(change: _Change) -> None:
    """Give all operands of a node the dtype of its result."""
    node = change.node
    value = node.meta["val"]
    operands: list[Any] = [*node.args]
    with node.graph.inserting_before(node):
        for index, operand in enumerate(operands[:2]):
            if _is_cast(operand, node):
                made = node.graph.call_function(torch.ops.aten._to_copy.default, (operand,), {"dtype": value.dtype})
                made.meta = {**node.meta, "val": operand.meta["val"].to(value.dtype)}
            elif node.target is not _SUBTRACT and isinstance(operand, int | float):
                made = node.graph.call_function(torch.ops.aten.full.default, ([], operand), {"dtype": value.dtype})
                made.meta = {**node.meta, "val": value.new_empty(())}
            else:
                continue
            operands[index] = made
            change.inserted.append(made)
    node.args = tuple(operands)
