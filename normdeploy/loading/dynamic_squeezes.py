"""Write a squeeze of a dynamic dim as torch.export traced it.

`x.squeeze(0)` removes axis 0 if its size is 1 at run time. torch.export assumes that a dynamic dim has at least 2
elements, so the traced result keeps the axis. But the operator stays in the program: PyTorch removes the axis at size
1, while ONNX's Squeeze removes it at every size and fails above 1. Without the dynamic axes, the program and the file
compute the traced branch at every size. `differing_sizes` then finds that the module takes another branch at size 1.

`x.squeeze()` without axes is a squeeze of all axes. ONNX's Squeeze without axes does the same at run time, so it is
left alone if only pointwise operators follow: they give the same values at each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_ALL_AXES = (
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.default,
    torch.ops.aten.squeeze_copy.default,
)
_SQUEEZES = (
    *_ALL_AXES,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.squeeze_.dim,
    torch.ops.aten.squeeze_.dims,
    torch.ops.aten.squeeze_copy.dim,
    torch.ops.aten.squeeze_copy.dims,
)
# Key of a node's metadata: the node was a squeeze of a dynamic dim.
_KEY = "normdeploy.squeeze"
# A line of the user's code in a stack trace of torch: file, number and source.
_LINE = re.compile(r'File "(?:[^"]*[/\\])?([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]+)')


@dataclass(frozen=True)
class _Change:
    """Change of one node; ``target`` and ``args`` are those before it."""

    node: torch.fx.Node
    target: Any
    args: tuple[Any, ...]


def keep_dynamic_axes(program: torch.export.ExportedProgram) -> None:
    """Remove the dynamic axes from the squeezes of ``program``. The program is changed."""
    _change_squeezes(program)


@contextmanager
def dynamic_axes_kept(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Remove the dynamic axes from the squeezes of ``program`` within the context."""
    changes = _change_squeezes(program)
    try:
        yield
    finally:
        for change in changes:
            change.node.target, change.node.args = change.target, change.args
            del change.node.meta[_KEY]
        _recompile(changes)


def describe_squeezes(program: torch.export.ExportedProgram) -> str:
    """List the lines of the model's code that squeeze a dynamic dim.

    Returns:
        for example " (net.py, line 12: x = x.squeeze(0))"; "" if there are none.
    """
    lines = []
    for node in _iter_nodes(program):
        found = _LINE.findall(node.meta.get("stack_trace") or "") if _KEY in node.meta else []
        if found:
            file, number, source = found[-1]
            lines.append(f"{file}, line {number}: {source.strip()}")
    return f" ({'; '.join(dict.fromkeys(lines))})" if lines else ""


def _change_squeezes(program: torch.export.ExportedProgram) -> list[_Change]:
    changes = []
    for node in _iter_nodes(program):
        static = _static_axes(node)
        if static is None:
            continue
        changes.append(_Change(node, node.target, node.args))
        node.meta[_KEY] = True
        if static:
            node.target, node.args = torch.ops.aten.squeeze.dims, (node.args[0], static)
        else:
            node.target, node.args = torch.ops.aten.alias.default, (node.args[0],)
    _recompile(changes)
    return changes


def _static_axes(node: torch.fx.Node) -> list[int] | None:
    """Return the axes of static size among the axes of a squeeze; None for other nodes, or without a dynamic axis."""
    if node.op != "call_function" or node.target not in _SQUEEZES:
        return None
    source = node.args[0]
    before = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dim() == 0:
        return None
    if node.target in _ALL_AXES:
        if _is_pointwise_to_outputs(node):
            return None
        axes = list(range(before.dim()))
    else:
        stated: Any = node.args[1]
        axes = [axis % before.dim() for axis in ([stated] if isinstance(stated, int) else stated)]
    static = [axis for axis in axes if isinstance(before.shape[axis], int)]
    removed = sum(before.shape[axis] == 1 for axis in static)
    if len(static) == len(axes) or before.dim() - removed != after.dim():
        return None
    return static


def _is_pointwise_to_outputs(node: torch.fx.Node) -> bool:
    """Return whether each path from ``node`` to an output has only pointwise operators of one tensor."""
    return all(
        user.op == "output"
        or (
            isinstance(user.target, torch._ops.OpOverload)
            and torch.Tag.pointwise in user.target.tags
            and user.all_input_nodes == [node]
            and _is_pointwise_to_outputs(user)
        )
        for user in node.users
    )


def _iter_nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            yield from graph_module.graph.nodes


def _recompile(changes: list[_Change]) -> None:
    owners = {id(change.node.graph): change.node.graph.owning_module for change in changes}
    for owner in owners.values():
        if owner is not None:
            owner.recompile()
