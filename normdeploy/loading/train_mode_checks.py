"""Find training mode in modules, in plain objects that modules refer to, and in exported graphs.

In training mode, a norm normalizes by the statistics of its batch, and a dropout is random. Exporters drop or keep
these effects without a warning. BatchNorm without running statistics and InstanceNorm are not errors, because they use
the statistics of their input even in eval mode.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import TrainingModeError
from .torch_pickles import join_names

_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.Tensor,
    torch.dtype,
    torch.device,
    np.ndarray,
    type,
    types.ModuleType,
)
_SENSITIVE = ("BatchNorm", "InstanceNorm", "Dropout", "RReLU", "LSTM", "GRU", "RNN", "Attention")
_OpOverload = type(torch.ops.aten.add.Tensor)


def iter_reachable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every object reachable through ``module``'s attributes, starting with the module.

    The search covers submodules, plain objects, containers, partials, bound methods and closures. Each object is
    yielded once.

    Yields:
        (qualified name such as ``layers[2].norm``, object).
    """
    queue: deque[tuple[str, Any]] = deque([("", module)])
    seen = {id(module)}
    while queue:
        path, item = queue.popleft()
        yield path, item
        for step, child in _iter_children(item):
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((f"{path}{step}".removeprefix("."), child))


def _iter_children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, _LEAVES):
        return
    if isinstance(item, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in item.items())
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(item))
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield (".__self__", item.__self__)
    elif isinstance(item, types.FunctionType):
        yield from (
            (f".{name}", cell.cell_contents)
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
            if _is_filled_cell(cell)
        )
    else:
        yield from _iter_attributes(item)


def _is_filled_cell(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _iter_attributes(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, nn.Module):
        yield from ((f".{name}", child) for name, child in item._modules.items() if child is not None)
    own = getattr(item, "__dict__", {})
    internal = _MODULE_INTERNALS if isinstance(item, nn.Module) else ()
    yield from ((f".{name}", value) for name, value in list(own.items()) if name not in internal)
    for owner in type(item).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(item, name):
                yield f".{name}", getattr(item, name)


_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def find_training_parts(module: nn.Module) -> list[tuple[str, Any]]:
    """Find the modules and plain objects whose ``training`` flag is set.

    Returns:
        (qualified name, object).
    """
    return [
        (path, item)
        for path, item in iter_reachable(module)
        if not isinstance(item, _LEAVES) and not _ignores_mode(item) and _has_training_flag(item)
    ]


def _ignores_mode(item: Any) -> bool:
    """Return whether the ``training`` flag of a module has no effect.

    The code of a traced graph has the mode of its trace (`require_eval_graph`), and a plain ``torch.nn.Module`` only
    contains tensors. ``torch.export`` returns both kinds of modules with the flag set. ``eval()`` of the graph module
    that ``ExportedProgram.module()`` returns raises an exception.
    """
    of_export = type(item).__module__.startswith("torch.export.")
    return of_export or isinstance(item, torch.fx.GraphModule) or type(item) is nn.Module


def _has_training_flag(item: Any) -> bool:
    try:
        flag = getattr(item, "training", False)
    except Exception:
        # A property of the user's class may raise an exception of any type.
        return False
    return isinstance(flag, bool | np.bool_) and bool(flag)


def require_eval(module: nn.Module, mend: bool) -> None:
    """Require that every part of ``module`` is in eval mode.

    Args:
        mend: True switches parts in training mode to eval mode, in place, instead of raising.

    Raises:
        TrainingModeError: parts are in training mode, or can't be switched to eval mode. The message names these parts.
    """
    parts = find_training_parts(module)
    if parts and mend:
        parts = _set_eval_mode(module, parts)
        if parts:
            raise TrainingModeError(
                f"the training flag of {_describe_parts(module, parts)} can't be set to False: set it before the "
                "model is saved or exported"
            )
    if parts:
        raise TrainingModeError(
            f"{_describe_parts(module, parts)} {'is' if len(parts) == 1 else 'are'} in training mode: the export "
            "would hold batch statistics or random dropout. Call .eval() first (it does not reach plain objects: set "
            "their training flag to False), or pass --eval (eval=True in Python)"
        )


def _set_eval_mode(module: nn.Module, parts: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    for _, item in parts:
        try:
            if isinstance(item, nn.Module):
                item.eval()
            else:
                item.training = False
        except Exception:
            # The flag is read-only, a property, or in a frozen dataclass. The caller reports the part that stays in
            # training mode.
            continue
    return find_training_parts(module)


def _describe_parts(module: nn.Module, parts: list[tuple[str, Any]]) -> str:
    """Return the names of the parts, beginning with the parts whose results depend on the mode."""

    def mode_rank(part: tuple[str, Any]) -> int:
        plain = not isinstance(part[1], nn.Module)
        if plain:
            return 0
        if any(word in type(part[1]).__name__ for word in _SENSITIVE):
            return 1
        if part[0]:
            return 2
        return 3

    names = [
        (
            f"{path} ({'plain object ' if not isinstance(item, nn.Module) else ''}{type(item).__name__})"
            if path
            else f"the model itself ({type(module).__name__})"
        )
        for path, item in sorted(parts, key=mode_rank)
    ]
    return join_names(names, 8)


def require_eval_graph(program: torch.export.ExportedProgram, mend: bool) -> None:
    """Require that the exported graph contains no training-mode BatchNorm, dropout or similar op.

    Args:
        mend: True rewrites such ops to their eval form, in place, instead of raising.

    Raises:
        TrainingModeError: without ``mend``, the graph contains such ops; with ``mend``, such an op has no eval
            form. The message names the modules of these ops.
    """
    nodes = [node for node in iter_graph_nodes(program) if is_train_mode_op(node)]
    if not nodes:
        return
    if mend:
        for node in nodes:
            _set_op_to_eval(node)
        _drop_batch_counters(program)
        nodes = [node for node in nodes if is_train_mode_op(node)]
        for part in iter_graph_modules(program):
            part.graph.lint()
            part.recompile()
    if nodes:
        names = list(dict.fromkeys(f"{_module_path_of(node)} ({operator_name(node)})" for node in nodes))
        advice = "export the program again after model.eval()" + (
            "" if mend else ", or pass --eval (eval=True in Python)"
        )
        raise TrainingModeError(
            f"the program holds training-mode operators: {join_names(names, 8)}. Its outputs would be random or "
            "depend on"
            f" the batch: {advice}"
        )


def iter_graph_modules(program: torch.export.ExportedProgram) -> Iterator[torch.fx.GraphModule]:
    """Iterate over the program's graph and the bodies of its higher-order operators."""
    return (part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))


def iter_graph_nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """Iterate over the nodes of all graphs of the program."""
    return (node for part in iter_graph_modules(program) for node in part.graph.nodes)


def _module_path_of(node: torch.fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if stack:
        path = str(stack[-1][0]).removeprefix("L['self']").removeprefix(".")
    else:
        path = ""
    return path or f"the model itself, node {node.name}"


def bind_node_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Map the names in the schema of the node's operator to the node's arguments, including defaults.

    Returns:
        Name -> value; {} if the target is not an operator.
    """
    if not isinstance(node.target, _OpOverload):
        return {}
    schema = operator_schema(node).arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)
    return {argument.name: argument.default_value for argument in schema if argument.has_default_value()} | given


_FLAGS = ("training", "train", "use_input_stats")


def operator_name(node: torch.fx.Node) -> str:
    """Return the name of the node's operator.

    Returns:
        ``batch_norm`` for ``aten.batch_norm.default``; "" if the target is not an operator.
    """
    if isinstance(node.target, _OpOverload):
        return operator_schema(node).name.partition("::")[2]
    return ""


def plain_operator_name(node: torch.fx.Node) -> str:
    """Return the name of the node's operator, without the trailing _ of an in-place operator.

    Returns:
        The name; "" if the target is not an operator.
    """
    name = operator_name(node)
    if name.endswith("__"):
        return name
    return name.removesuffix("_")


def operator_schema(node: torch.fx.Node) -> Any:
    """Return the schema of the node's operator, which must belong to torch's dispatcher."""
    return node.target._schema  # type: ignore[union-attr]


def is_train_mode_op(node: torch.fx.Node) -> bool:
    """Return whether a node is a training-mode norm or an active dropout.

    Returns:
        False also for norms without running statistics, whose results are the same in eval mode.
    """
    given = bind_node_arguments(node)
    if not given:
        return False
    name = operator_name(node)
    if "batch_norm_with_update" in name or name == "_fused_dropout":
        return True
    # For native_dropout, train=None means training.
    if name == "native_dropout":
        return given["train"] is not False and given["p"] != 0
    if (given.get("dropout_p") or 0) != 0:
        return True
    if not any(given.get(flag) is True for flag in _FLAGS):
        return False
    if "batch_norm" in name or "instance_norm" in name:
        return given.get("running_mean") is not None
    return given.get("p", given.get("dropout", 1)) != 0


def _set_op_to_eval(node: torch.fx.Node) -> None:
    """Set the operator's flag to eval mode. An operator that also returns updated statistics is not changed, because
    the program would then write these statistics back into the buffers.
    """
    if "functional" in operator_name(node):
        return
    given = bind_node_arguments(node)
    for index, argument in enumerate(operator_schema(node).arguments):
        if (argument.name in _FLAGS and given[argument.name] is not False) or argument.name == "dropout_p":
            value: Any
            if argument.name == "dropout_p":
                value = 0.0
            else:
                value = False
            if index < len(node.args):
                node.update_arg(index, value)
            else:
                node.update_kwarg(argument.name, value)


def _drop_batch_counters(program: torch.export.ExportedProgram) -> None:
    """Remove the in-place updates of BatchNorms' batch counters. These updates exist only in training mode."""
    buffers = program.graph_signature.inputs_to_buffers
    for node in reversed(list(program.graph.nodes)):
        if (
            node.target is torch.ops.aten.add_.Tensor
            and not node.users
            and buffers.get(getattr(node.args[0], "name", ""), "").endswith("num_batches_tracked")
        ):
            program.graph.erase_node(node)
