"""Find ops that draw random numbers. Two runs of such a model differ, so nothing can be compared with the model."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import torch

from ...graphs.proto_queries import RANDOM
from ...storage.onnx_domains import is_standard
from ...storage.onnx_files import iter_bodies

__all__ = ["random_nodes_of_file", "random_ops_of_program"]

_SWITCHES = ("train", "training")
_RATES = ("dropout", "dropout_p", "p")


def random_ops_of_program(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Find the operators that draw random numbers and affect an output.

    Returns:
        operators with their modules, without repeats: "aten.randn_like in module 'enc'".
    """
    return tuple(dict.fromkeys(_find_random_calls(program.graph_module)))


def _find_random_calls(module: torch.fx.GraphModule) -> Iterator[str]:
    used = _used_nodes(module)
    for node in module.graph.nodes:
        if node not in used:
            continue
        if node.op == "get_attr" and isinstance(body := getattr(module, str(node.target), None), torch.fx.GraphModule):
            yield from _find_random_calls(body)
        if isinstance(node.target, torch._ops.OpOverload) and _is_random_in_eval(node):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if stack and stack[-1][0]:
                where = f" in module {stack[-1][0]!r}"
            else:
                where = ""
            yield str(node.target).rpartition(".")[0] + where


def _used_nodes(module: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Return the nodes on which an output depends, and nodes that write into their arguments, with all their inputs."""
    waiting = [
        n
        for n in module.graph.nodes
        if n.op == "output" or (isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable)
    ]
    used = set[torch.fx.Node]()
    while waiting:
        if (node := waiting.pop()) not in used:
            used.add(node)
            waiting += node.all_input_nodes
    return used


def _is_random_in_eval(node: torch.fx.Node) -> bool:
    """Check whether a node draws random numbers in evaluation.

    Dropout in evaluation, and an attention or LSTM without dropout, have PyTorch's tag for random ops too, but draw no
    random numbers.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {
        a.name: node.args[k] if k < len(node.args) else node.kwargs.get(a.name, a.default_value)
        for k, a in enumerate(target._schema.arguments)
    }
    if any(given.get(name) is False for name in _SWITCHES):
        return False
    return not any(isinstance(given.get(name), int | float) and given[name] == 0 for name in _RATES)


def random_nodes_of_file(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Find the nodes of a file that draw random numbers.

    Returns:
        op types with node names, without repeats: "RandomNormalLike 'noise'".
    """
    nodes = [node for body in iter_bodies(proto) for node in body.node]
    on = {tensor.name for tensor in proto.graph.initializer if _is_true(tensor)}
    for node in nodes:
        if node.op_type == "Constant" and any(a.name == "value" and _is_true(a.t) for a in node.attribute):
            on.add(node.output[0])
    found = [n for n in nodes if is_standard(n) and (n.op_type in RANDOM or _is_active_dropout(n, on))]
    return tuple(dict.fromkeys(f"{n.op_type} {n.name!r}" if n.name else n.op_type for n in found))


def _is_true(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.BOOL and bool(onnx.numpy_helper.to_array(tensor).any())


def _is_active_dropout(node: onnx.NodeProto, on: set[str]) -> bool:
    return node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in on
