"""Write operations on complex numbers that torch's exporter can't translate, while a program is exported.

The exporter writes a complex tensor as a real tensor with one more axis of size 2. torch 2.13 lacks a translation for
``unsqueeze``, and multiplies by a real number as if the number had this axis too. Llama 4 and DeepSeek V2 need both for
their rotary positions. Here both are written on real tensors:

    unsqueeze(z, axis)  →  view_as_complex(unsqueeze(view_as_real(z), axis))
    z * number          →  view_as_complex(view_as_real(z) * number)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Change:
    """Change of one node, which then computes with real tensors.

    Attributes:
        args, meta: arguments and description of the node before the change.
        real: node before it, which gives a complex tensor as a real one.
        made: node behind it, which gives the complex result.
        users: nodes that read the node before the change.
    """

    node: torch.fx.Node
    args: tuple[Any, ...]
    meta: dict[str, Any]
    real: torch.fx.Node
    made: torch.fx.Node
    users: list[torch.fx.Node]


@contextmanager
def write_complex_as_real(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Write the operations on complex numbers that torch's exporter can't translate.

    Args:
        program: is changed inside the context, and is as before afterwards.
    """
    nodes = [
        node
        for graph_module in program.graph_module.modules()
        if isinstance(graph_module, torch.fx.GraphModule)
        for node in graph_module.graph.nodes
        if _is_untranslatable(node)
    ]
    changes: list[_Change] = []
    try:
        for node in nodes:
            changes.append(_write_as_real(node))
        _recompile(changes)
        yield
    finally:
        for change in reversed(changes):
            for user in change.users:
                user.replace_input_with(change.made, change.node)
            change.node.args = change.args
            change.node.meta = change.meta
            for inserted in (change.made, change.real):
                inserted.graph.erase_node(inserted)
        _recompile(changes)


def _recompile(changes: list[_Change]) -> None:
    owners = {id(change.node.graph): change.node.graph.owning_module for change in changes}
    for owner in owners.values():
        assert owner is not None
        owner.recompile()


def _is_untranslatable(node: torch.fx.Node) -> bool:
    if node.target is _aten.unsqueeze.default:
        return _is_complex(node.args[0])
    return node.target is _aten.mul.Tensor and _is_complex(node.args[0]) and isinstance(node.args[1], int | float)


def _is_complex(operand: Any) -> bool:
    if not isinstance(operand, torch.fx.Node):
        return False
    value = operand.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _write_as_real(node: torch.fx.Node) -> _Change:
    args = node.args
    meta = node.meta
    users = list(node.users)
    source = args[0]
    operand: Any = args[1]
    assert isinstance(source, torch.fx.Node)
    if node.target is _aten.unsqueeze.default and operand < 0:
        # The real tensor has one more axis at the end.
        operand -= 1
    view = _aten.view_as_real.default
    with node.graph.inserting_before(node):
        real = node.graph.call_function(view, (source,))
    real.meta = {**meta, "val": view(source.meta["val"])}
    node.args = (real, operand)
    target: Any = node.target
    node.meta = {**meta, "val": target(real.meta["val"], operand)}
    with node.graph.inserting_after(node):
        made = node.graph.call_function(_aten.view_as_complex.default, (node,))
    made.meta = meta
    for user in users:
        user.replace_input_with(node, made)
    return _Change(node=node, args=args, meta=meta, real=real, made=made, users=users)
