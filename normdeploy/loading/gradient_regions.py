"""Write the operators of a region without gradients, or without autocast, among the other operators of a program.

torch.export traces ``with torch.no_grad()`` and ``with torch.autocast(…, enabled=False)`` as a call of a nested graph.
Files are made without gradients and outside of autocast, so such a call computes the same as its operators. In the main
graph, each reader of a program sees them: for example the reader of the choices of `topk`
(`normdeploy.runtimes.ordering_operators`). A region with another autocast stays nested, because it casts its operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.graph_module import GraphModule

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_gradient_regions(program: torch.export.ExportedProgram) -> None:
    """Replace each call of such a region by its operators. The program is changed."""
    for old, new in _inline_calls(program.graph_module, is_cast=False).items():
        program.graph_signature.replace_all_uses(old, new)


def has_gradient_regions(program: torch.export.ExportedProgram) -> bool:
    """Check if `inline_gradient_regions` would change a program."""
    return any(_region_of(node, is_cast=False) for node in program.graph_module.graph.nodes)


def _region_of(node: torch.fx.Node, *, is_cast: bool) -> tuple[torch.fx.Node, tuple[Any, ...]] | None:
    """Return the nested graph of a region, as a node, and its operands; None for other nodes.

    Args:
        is_cast: True if the node stands in a region with autocast.
    """
    if node.target is _GRADIENTS:
        return node.args[1], node.args[2:]  # type: ignore[return-value]
    if node.target is _AUTOCAST and not is_cast and not node.args[2]:
        return node.args[4], node.args[5:]  # type: ignore[return-value]
    return None


def _inline_calls(root: GraphModule, *, is_cast: bool) -> dict[str, str]:
    """Replace the calls in a graph and in the nested graphs of its regions.

    Returns:
        name of each replaced result -> name of the node that replaces it.
    """
    renamed = dict[str, str]()
    is_changed = False
    for node in list(root.graph.nodes):
        if node.target is _AUTOCAST and _region_of(node, is_cast=is_cast) is None:
            _inline_calls(_nested_graph(root, node.args[4]), is_cast=bool(node.args[2]))
        region = _region_of(node, is_cast=is_cast)
        if region is not None:
            body = _nested_graph(root, region[0])
            _inline_calls(body, is_cast=is_cast)
            renamed |= _inline_call(root, node, body, region[1])
            if not region[0].users:
                root.graph.erase_node(region[0])
            is_changed = True
    if is_changed:
        root.delete_all_unused_submodules()
        root.graph.lint()
        root.recompile()
    return renamed


def _nested_graph(root: GraphModule, reference: Any) -> GraphModule:
    body = root.get_submodule(str(reference.target))
    assert isinstance(body, GraphModule)
    return body


def _inline_call(
    root: GraphModule, call: torch.fx.Node, body: GraphModule, operands: tuple[Any, ...]
) -> dict[str, str]:
    """Replace one call by copies of the nodes of its graph, whose results are a tuple."""
    parameters = [node for node in body.graph.nodes if node.op == "placeholder"]
    values = dict(zip(parameters, operands, strict=True))
    with root.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                name = _unique_name(root, str(node.target))
                setattr(root, name, getattr(body, str(node.target)))
                values[node] = root.graph.node_copy(node, values.__getitem__)
                values[node].target = name
            elif node.op not in ("placeholder", "output"):
                values[node] = root.graph.node_copy(node, values.__getitem__)
    results: Any = body.graph.output_node().args[0]
    renamed = dict[str, str]()
    for user in list(call.users):
        result = values[results[user.args[1]]]
        user.replace_all_uses_with(result)
        renamed[user.name] = result.name
        root.graph.erase_node(user)
    root.graph.erase_node(call)
    return renamed


def _unique_name(root: GraphModule, name: str) -> str:
    found = name.replace(".", "_")
    while hasattr(root, found):
        found += "_"
    return found
