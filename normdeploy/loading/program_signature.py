"""Describe how an exported program is called: its tensor inputs, their paths in the arguments, and names for its
outputs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..model import InputSpec


@dataclass(frozen=True)
class InputPlaceholder:
    """Tensor input of a program.

    Attributes:
        node: placeholder node of the input.
        paths: paths of the input in the arguments, as guards write them.
        example: sizes of the input at the export; None if unknown.
    """

    node: torch.fx.Node
    paths: tuple[str, ...]
    example: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Return the placeholder's name."""
        return self.node.name

    @property
    def value(self) -> torch.Tensor:
        """Return the fake tensor of the trace, which has shape and dtype but no data."""
        return self.node.meta["val"]

    def dim_size(self, index: int) -> Any:
        """Return the size of a dim.

        Returns:
            A sympy expression if the dim is dynamic, else an int.
        """
        size = self.value.shape[index]
        if isinstance(size, torch.SymInt):
            size = size.node.expr
            if size.is_number:
                return int(size)
            return size
        return size


def traced_tensor(value: Any) -> torch.Tensor | None:
    """Return the tensor that torch traced for an argument or result.

    Returns:
        Fake tensor with shape and dtype; None if the value is not a tensor.
    """
    if isinstance(value, torch.fx.Node):
        tensor = value.meta.get("val")
    else:
        tensor = None
    if isinstance(tensor, torch.Tensor):
        return tensor
    return None


def traced_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype that torch traced for an argument or result, None if it is not a tensor."""
    tensor = traced_tensor(value)
    if tensor is None:
        return None
    return tensor.dtype


def user_inputs(program: torch.export.ExportedProgram) -> list[Any]:
    """List the arguments that a caller passes, without parameters and buffers.

    Returns:
        Arguments of the graph signature, in order.
    """
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def user_outputs(program: torch.export.ExportedProgram) -> list[Any]:
    """List the results that a caller gets, without changed buffers.

    Returns:
        Arguments of the graph signature, in order.
    """
    return [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]


def with_constant_inputs(program: torch.export.ExportedProgram, tensors: Iterable[Any]) -> list[Any]:
    """Insert the constant arguments of the call between its tensors.

    Args:
        tensors: the tensor arguments, in order.

    Returns:
        All arguments that a caller passes.
    """
    given = iter(tensors)
    return [item.value if isinstance(item, ConstantArgument) else next(given) for item in user_inputs(program)]


def find_placeholders(
    program: torch.export.ExportedProgram,
) -> tuple[list[InputPlaceholder], dict[tuple[str, int], Any]]:
    """Find the tensor inputs and the constant inputs.

    Returns:
        The tensor inputs in the program's order, and (path, -1) -> value of the constant inputs.

    Raises:
        InputError: an input is a number whose value is unknown.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    user = user_inputs(program)
    if program.example_inputs:
        examples = pytree.tree_leaves(program.example_inputs)
    else:
        examples = []
    tensors: list[InputPlaceholder] = []
    constants: dict[tuple[str, int], Any] = {}
    for index, (argument, paths) in enumerate(zip(user, _guard_paths(program, len(user)), strict=True)):
        if argument.name in nodes:
            value = nodes[argument.name].meta.get("val")
        else:
            value = None
        if isinstance(value, torch.Tensor):
            if len(examples) == len(user):
                example = examples[index]
            else:
                example = None
            tensors.append(
                InputPlaceholder(
                    nodes[argument.name], paths, tuple(example.shape) if isinstance(example, torch.Tensor) else None
                )
            )
        elif hasattr(argument, "value"):
            constants |= {(path, -1): argument.value for path in paths}
        else:
            raise InputError(
                f"the program's input {argument.name!r} is a number without a fixed value: export it with a tensor "
                "or a fixed number instead"
            )
    return tensors, constants


def _guard_paths(program: torch.export.ExportedProgram, count: int) -> list[tuple[str, ...]]:
    """Return the paths that a guard may write for each input: ``['x']``, ``['batch']['ids']``, ``['xs'][0]``."""
    signature = program.module_call_graph[0].signature
    if signature is None or signature.in_spec.num_leaves != count:
        return [()] * count
    names = signature.forward_arg_names or []
    paths = []
    for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), signature.in_spec))[0]:
        place: Any = path[0]
        position: Any = path[1]
        keyword = place.idx == 1
        rest = pytree.keystr(tuple(path[2:]))
        if keyword:
            name = position.key
        elif position.idx < len(names):
            name = names[position.idx]
        else:
            name = f"args_{position.idx}"
        # torch names the elements of *xs xs_0, xs_1 and so on.
        variadic = re.fullmatch(r"(.+)_(\d+)", str(name))
        paths.append((f"[{name!r}]{rest}", *([f"[{variadic[1]!r}][{variadic[2]}]{rest}"] if variadic else [])))
    return paths


def find_used_parameters(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Find the parameters and buffers that the program reads.

    Returns:
        Qualified names.
    """
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return frozenset(target for name, target in stored.items() if name in read)


def match_requested_inputs(names: Sequence[str], wishes: Sequence[InputSpec], what: str) -> list[InputSpec | None]:
    """Match stated inputs to a program's inputs: by name if the program has all stated names, else by position.

    In a match by position, each input gets a new name or keeps the program's name for this position.

    Args:
        names: the program's input names.
        what: description of the names, for messages.

    Returns:
        The stated input, or None, for each name.

    Raises:
        InputError: the inputs match neither by name nor by position.
    """
    given = {wish.name: wish for wish in wishes}
    if given.keys() <= set(names):
        return [given.get(name) for name in names]
    if len(wishes) == len(names) and is_renaming(names, list(given)):
        return list(wishes)
    raise InputError(describe_misnaming(names, list(given), what))


def is_renaming(names: Sequence[str], given: Sequence[str]) -> bool:
    """Return whether ``given`` contains new names for the first inputs in ``names``, in order. An input may also keep
    its name at its own position.

    Returns:
        False also if some names are kept and a new name is nearly equal to another name of the program. Such a new name
        is treated as a typo.
    """
    if len(given) > len(names) or any(name in names and names.index(name) != place for place, name in enumerate(given)):
        return False
    kept = set(given) & set(names)
    fresh = [name for name in given if name not in names]
    return not kept or not any(
        difflib.get_close_matches(name, [n for n in names if n not in kept], 1) for name in fresh
    )


def describe_misnaming(names: Sequence[str], given: Sequence[str], what: str) -> str:
    """Explain why the names ``given`` do not fit inputs named ``names``.

    Returns:
        Message with advice.
    """
    unknown = [name for name in given if name not in names]
    near = difflib.get_close_matches(unknown[0], names, 1)
    message = f"the input {unknown[0]!r} is not one of {what}: {', '.join(names) or 'none'}"
    if near:
        message += f" (is {near[0]!r} meant?)"
    if len(given) != len(names):
        return (
            f"{message}; use those names, or pass all {len(names)} in their order under any names (passed: "
            f"{len(given)})"
        )
    moved = next((name for place, name in enumerate(given) if name in names and names.index(name) != place), "")
    if not moved:
        return f"{message}; use that name, or a name that can't be confused with it"
    place = names.index(moved) + 1
    return (
        f"{message}; all {len(names)} may have any names in their order, but {moved!r} is the name of input {place}: "
        "move it there"
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32".

    Returns:
        The name without "torch.".
    """
    return str(tensor.dtype).removeprefix("torch.")


def name_outputs(program: torch.export.ExportedProgram, inputs: Collection[str]) -> tuple[str, ...]:
    """Name each tensor that the program returns by its path in the returned structure. A single tensor is named
    "output".

    A path that is also the name of an input gets the prefix "output_". For example, models of diffusers take and return
    a "sample".

    Returns:
        Names in the order of the outputs.
    """
    outputs = user_outputs(program)
    signature = program.module_call_graph[0].signature
    paths = [str(index) for index in range(len(outputs))]
    if signature is not None and signature.out_spec.num_leaves == len(outputs):
        paths = list(_iter_leaf_names(signature.out_spec, ""))
    names = [path if re.match(r"[A-Za-z_]", path) else f"output_{path}" if path else "output" for path in paths]
    for place, name in enumerate(names):
        others = {*inputs, *names} if name in inputs else ()
        while name in others:
            name = f"output_{name}"
        names[place] = name
    return tuple(name for name, argument in zip(names, outputs, strict=True) if not hasattr(argument, "value"))


def _iter_leaf_names(spec: pytree.TreeSpec, prefix: str) -> Iterator[str]:
    """Yield a name for each leaf of a tree spec. The name joins the keys on the leaf's path.

    For classes that are registered with keys as their context (ModelOutput, dict), these keys are used.
    """
    children = spec.children()
    if spec.is_leaf():
        yield prefix
        return
    context = spec.context
    fields = getattr(context, "_fields", None) or (context[0] if _has_nested_keys(context) else context)
    keys = fields if isinstance(fields, list | tuple) and len(fields) == len(children) else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _iter_leaf_names(child, f"{prefix}_{key}".removeprefix("_"))


def _has_nested_keys(context: Any) -> bool:
    return isinstance(context, list | tuple) and bool(context) and isinstance(context[0], list | tuple)
