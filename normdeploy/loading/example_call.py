"""Make the example call that torch.export traces, from the user's own example or from the stated inputs."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..model import DEFAULT_SIZES, Dim, InputSpec
from .input_request import InputRequest
from .program_signature import dtype_name, is_renaming, match_requested_inputs

# Annotations of parameters that take no tensor, both as types and as strings (postponed annotations).
_PLAIN = (int, float, bool, str, "int", "float", "bool", "str")


@dataclass(frozen=True)
class ExampleCall:
    """Example call on the CPU.

    Attributes:
        matched: index of the stated input for each tensor, in the order of the leaves; None for a tensor without a
            stated input.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    matched: tuple[int | None, ...]

    def tensors(self) -> list[torch.Tensor]:
        """List the tensors of the call.

        Returns:
            Tensor leaves of args and kwargs, in pytree order.
        """
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def matched_inputs(self, wishes: InputRequest) -> list[InputSpec | None]:
        """List the stated input of each tensor.

        Returns:
            Stated input or None for each tensor, in the order of ``tensors``.
        """
        return [None if index is None else wishes.inputs[index] for index in self.matched]


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of the module's forward without annotations, for binding and for messages.

    Returns:
        The signature without annotations.
    """
    signature = inspect.signature(module.forward)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def make_example_call(module: nn.Module, wishes: InputRequest, sizes: Mapping[str, int]) -> ExampleCall:
    """Make example arguments from the stated inputs. Inputs are matched to forward's parameters by name, or by order if
    the names differ.

    Args:
        sizes: dim name -> size.

    Returns:
        The call, with random tensors.

    Raises:
        InputError: inputs are missing or do not fit forward's parameters.
    """
    order = require_fitting_inputs(module, wishes)
    rng = np.random.default_rng(0)
    tensors = [_sample_input(wish, rng, sizes) for wish in wishes.inputs]
    args = tuple(tensors[index] for index in order.positional)
    kwargs = {key: tensors[index] for key, index in order.keywords.items()}
    return ExampleCall(args, kwargs, (*order.positional, *order.keywords.values()))


@dataclass(frozen=True)
class ArgumentOrder:
    """Assignment of inputs to arguments.

    Attributes:
        positional: indices of inputs passed by position.
        keywords: parameter -> index of the input that is passed by keyword, in the order of forward's parameters.
    """

    positional: list[int]
    keywords: dict[str, int]


def require_fitting_inputs(module: nn.Module, wishes: InputRequest) -> ArgumentOrder:
    """Match the stated inputs to forward's parameters.

    Returns:
        The arguments by position and by keyword.

    Raises:
        InputError: no inputs are stated, or they do not fit forward's parameters.
    """
    name = type(module).__name__
    if type(module).forward is nn.Module.forward:
        raise InputError(f"{name} defines no forward, so it computes nothing: define it, or pass another class")
    if wishes.constants and not wishes.inputs:
        raise InputError(
            f"the file of {name} would have no input, because only constants are described"
            f" ({', '.join(wishes.constants)}): describe an input without its values too, for example"
            f" --input '{next(iter(wishes.constants))}:float32[batch,3]'"
        )
    if not wishes.inputs:
        raise InputError(
            f"{name} needs example inputs: describe them with --input, for example {_suggest_input_options(module)}; "
            f"its forward is {name}{forward_signature(module)}"
        )
    names = [wish.name for wish in wishes.inputs]
    order = _arrange_arguments(module, names)
    try:
        forward_signature(module).bind(*order.positional, **order.keywords)
    except TypeError as error:
        lacking = _find_missing_parameters(module, order)
        if lacking:
            told = f"it also needs {', '.join(map(repr, lacking))}: {_advise_on_parameters(module, lacking)}"
        else:
            told = str(error)
        raise InputError(
            f"the inputs {', '.join(names)} do not fit {name}{forward_signature(module)}: {told}"
        ) from error
    return order


def _find_missing_parameters(module: nn.Module, order: ArgumentOrder) -> list[str]:
    """Return forward's parameters that have no default and no input."""
    try:
        bound = forward_signature(module).bind_partial(*order.positional, **order.keywords).arguments
    except TypeError:
        # Too many inputs are given, so no parameter lacks an input.
        return []
    return [name for name in _required_parameters(module) if name not in bound]


def _required_parameters(module: nn.Module) -> list[str]:
    parameters = forward_signature(module).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _advise_on_parameters(module: nn.Module, names: Sequence[str]) -> str:
    """Return advice on missing parameters: state a tensor with --input, or give a parameter for a plain value a
    default.
    """
    plain = [name for name in names if _takes_plain_value(module, name)]
    tensors = [name for name in names if name not in plain]
    if tensors:
        parts = [f"describe it with {' '.join(_example_option(name) for name in tensors)}"]
    else:
        parts = []
    if plain:
        parts.append(
            f"give {', '.join(map(repr, plain))} a default in forward, because a file accepts only tensors as inputs"
        )
    return ", and ".join(parts)


def _takes_plain_value(module: nn.Module, name: str) -> bool:
    return inspect.signature(module.forward).parameters[name].annotation in _PLAIN


def _example_option(name: str) -> str:
    return f"--input '{name}:{'int64[batch,seq]' if 'id' in name or 'mask' in name else 'float32[batch,3,224,224]'}'"


def _arrange_arguments(module: nn.Module, names: Sequence[str]) -> ArgumentOrder:
    parameters = forward_signature(module).parameters
    known = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not set(names) & known:
        return ArgumentOrder(list(range(len(names))), {})
    if not set(names) <= known and not open_ended:
        ordered = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if set(names) & known <= set(ordered) and is_renaming(ordered, names):
            return ArgumentOrder(list(range(len(names))), {})
        wrong = next(name for name in names if name not in known)
        near = difflib.get_close_matches(wrong, known, 1)
        moved = next((n for place, n in enumerate(names) if n in known and n not in ordered[place : place + 1]), "")
        raise InputError(
            f"the input {wrong!r} is not a parameter of "
            f"{type(module).__name__}{forward_signature(module)}{f' (is {near[0]!r} meant?)' if near else ''}: use "
            "its names, or pass the inputs in its order under any names"
            + (f", with {moved!r} only in its own position" if moved else "")
        )
    given = {name: index for index, name in enumerate(names)}
    positional = _leading_positional_inputs(parameters, given)
    ranked = sorted(given.items(), key=lambda item: _parameter_rank(parameters, item[0]))
    return ArgumentOrder(positional, {name: index for name, index in ranked if index not in positional})


def _leading_positional_inputs(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, int]) -> list[int]:
    """Return the indices of inputs passed by position: the inputs of the first parameters, up to the first parameter
    without an input.
    """
    leading: list[int] = []
    for name, parameter in parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name not in given:
            break
        leading.append(given[name])
    return leading


def _parameter_rank(parameters: Mapping[str, inspect.Parameter], name: str) -> int:
    if name in parameters:
        return list(parameters).index(name)
    return len(parameters)


def _suggest_input_options(module: nn.Module) -> str:
    tensors = [name for name in _required_parameters(module) if not _takes_plain_value(module, name)]
    return " ".join(map(_example_option, tensors or ["x"]))


def _sample_input(wish: InputSpec, rng: np.random.Generator, sizes: Mapping[str, int]) -> torch.Tensor:
    dtype = wish.dtype or "float32"
    values = replace(wish, dtype="float32" if dtype == "bfloat16" else dtype).sample(rng, sizes)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def iter_example_sizes(wishes: InputRequest) -> Iterator[dict[str, int]]:
    """Yield sizes of dims for tracing, in the order in which to try them.

    torch.export treats the sizes 0 and 1 as constants. If two dims have equal sizes in the example, torch.export may
    treat them as one dim. So different multiples of the opt sizes come first, because some models need a divisible
    size. Then come sizes close to these multiples, and last the opt sizes.

    Yields:
        Dim name -> size.
    """
    tried: list[dict[str, int]] = []
    for step in ("opt", 1, 0):
        chosen: dict[str, int] = {}
        for name, dim in wishes.dims.items():
            # torch also treats one step as a constant.
            start = min(max(2 * dim.step, dim.opt), dim.max) if dim.step > 1 else max(2, dim.opt)
            stride = start if step == "opt" else int(step) * dim.step
            sizes = range(start, min(dim.max, start + 64 * stride) + 1, stride) if stride else ()
            chosen[name] = next((size for size in sizes if size not in chosen.values()), start)
        if chosen not in tried:
            tried.append(chosen)
            yield chosen


def spread_arguments(
    module: nn.Module, args: torch.Tensor | Sequence[Any] | Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Normalize the user's example, which is one tensor, a tuple, or a mapping.

    The entries of a mapping become keyword arguments if forward can be called with them. Otherwise the mapping itself,
    a batch as a dict, is forward's only argument.

    Returns:
        Positional and keyword arguments.
    """
    if isinstance(args, Mapping):
        # transformers' BatchEncoding is not a dict, and torch's pytree supports only dicts.
        own = dict(args)
        try:
            forward_signature(module).bind(**own, **kwargs)
        except TypeError:
            return (own,), dict(kwargs)
        return (), {**own, **kwargs}
    return tuple(args) if isinstance(args, list | tuple) else (args,), dict(kwargs)


def copy_example_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: InputRequest
) -> ExampleCall:
    """Copy the user's example, detached and on the CPU. A dynamic dim of size 1 is repeated to size 2.

    Returns:
        The call, whose tensors are matched with the stated inputs.

    Raises:
        InputError: the arguments do not fit forward, contain no tensor, or contradict the stated inputs.
    """
    own_args, own_kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().cpu().clone(), (tuple(args), dict(kwargs))
    )
    try:
        bound = forward_signature(module).bind(*own_args, **own_kwargs)
    except TypeError as error:
        raise InputError(
            f"the arguments do not fit {type(module).__name__}{forward_signature(module)}: {error}"
        ) from error
    own_kwargs = dict(sorted(own_kwargs.items(), key=lambda item: _parameter_rank(bound.signature.parameters, item[0])))
    call = ExampleCall(own_args, own_kwargs, ())
    if not call.tensors():
        raise InputError(
            f"the example arguments of {type(module).__name__} contain no tensor: pass tensors, in containers that "
            "torch's pytree supports"
        )
    names = placeholder_names(bound)
    order = [names[id(leaf)] for leaf in call.tensors()]
    if wishes.inputs:
        matched = match_requested_inputs(order, wishes.inputs, f"the inputs of {type(module).__name__}")
    else:
        matched = [None] * len(order)
    call = replace(call, matched=tuple(None if wish is None else wishes.inputs.index(wish) for wish in matched))
    sizes = {
        dim.name: size
        for leaf, wish in zip(call.tensors(), matched, strict=True)
        if wish
        for dim, size in _iter_matching_dims(leaf, wish)
        if dim.name
    }
    stretched = {
        id(leaf): _stretch_unit_dims(leaf, wish, sizes) for leaf, wish in zip(call.tensors(), matched, strict=True)
    }
    own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, lambda t: stretched[id(t)], (call.args, call.kwargs))
    return replace(call, args=own_args, kwargs=own_kwargs)


def name_arguments(module: nn.Module, call: ExampleCall) -> dict[str, Any]:
    """Name the arguments of a call by forward's parameters.

    Returns:
        Parameter -> argument.

    Raises:
        InputError: an argument has no name, because forward takes *args or has parameters by position alone.
    """
    bound = forward_signature(module).bind(*call.args, **call.kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise InputError(f"{type(module).__name__} takes {name!r} by position alone: give it a name in forward")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def placeholder_names(bound: inspect.BoundArguments) -> dict[int, str]:
    """Compute the name that torch.export gives each tensor's placeholder, for example ``batch_ids`` for
    ``batch["ids"]``.

    Returns:
        id of the tensor -> name.
    """
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments |= {name: value}
    names: dict[int, str] = {}
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if isinstance(leaf, torch.Tensor):
            names[id(leaf)] = re.sub(
                r"\W+",
                "_",
                "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path),
            )
    return names


def user_dim_names(module: nn.Module, call: ExampleCall, dynamic_shapes: Any) -> list[dict[int, str]]:
    """Collect the names of the user's ``torch.export.Dim`` objects.

    Returns:
        axis -> dim name, for each tensor of the call.
    """
    arguments = forward_signature(module).bind(*call.args, **call.kwargs).arguments
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, call.args, call.kwargs)
    names: dict[int, dict[int, str]] = {}
    stack: list[tuple[Any, Any]] = [
        (arguments if isinstance(dynamic_shapes, Mapping) else list(arguments.values()), dynamic_shapes)
    ]
    while stack:
        value, shape = stack.pop()
        pairs = list(
            shape.items() if isinstance(shape, Mapping) else enumerate(shape) if isinstance(shape, list | tuple) else ()
        )
        if isinstance(value, torch.Tensor):
            names[id(value)] = {
                index: dim.__name__ for index, dim in pairs if str(getattr(dim, "__name__", "")).isidentifier()
            }
        elif isinstance(value, Mapping):
            stack.extend((value[key], part) for key, part in pairs if key in value)
        elif isinstance(value, list | tuple):
            stack.extend((value[index], part) for index, part in pairs if isinstance(index, int) and index < len(value))
    return [names.get(id(leaf), {}) for leaf in call.tensors()]


def _iter_matching_dims(leaf: torch.Tensor, wish: InputSpec) -> Iterator[tuple[Dim, int]]:
    if wish.dtype and wish.dtype != dtype_name(leaf):
        raise InputError(
            f"the input {wish.name!r} was declared as {wish.dtype}, but its example is {dtype_name(leaf)}: change "
            "one of them"
        )
    if len(wish.shape) != leaf.dim():
        raise InputError(
            f"the input {wish.name!r} was declared with {len(wish.shape)} dims, but its example has {leaf.dim()}: "
            f"{list(leaf.shape)}"
        )
    for index, (dim, size) in enumerate(zip(wish.shape, leaf.shape, strict=True)):
        if dim.name is None and dim.opt != size:
            raise InputError(
                f"dim {index} of the input {wish.name!r} was declared with the size {dim.opt}, but its example has "
                f"{size}: change one of them"
            )
        yield dim, size


def _stretch_unit_dims(leaf: torch.Tensor, wish: InputSpec | None, sizes: Mapping[str, int]) -> torch.Tensor:
    for index, dim in enumerate(wish.shape if wish else ()):
        if wish and dim.name and leaf.shape[index] != sizes[dim.name]:
            raise InputError(
                f"the dim {dim.name!r} has the size {sizes[dim.name]} in one example and {leaf.shape[index]} in the "
                f"example of {wish.name!r}: use one size for one name"
            )
        if dim.name and leaf.shape[index] == 1 and dim.max > 1:
            leaf = leaf.repeat_interleave(2, index)
    return leaf


def prefer_example_sizes(wishes: InputRequest, call: ExampleCall) -> InputRequest:
    """Set the opt size of dims without a stated range to the size in the example.

    Returns:
        The changed request.
    """
    dims = dict(wishes.dims)
    for leaf, wish in zip(call.tensors(), call.matched_inputs(wishes), strict=True):
        for dim, size in zip(wish.shape if wish else (), leaf.shape, strict=False):
            if dim.name and not dim.terms and dim.name not in wishes.stated:
                dims[dim.name] = Dim(dim.name, 1, size, max(DEFAULT_SIZES[2], size))
    return wishes.with_dims(dims)
