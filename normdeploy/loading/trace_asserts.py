"""Remove asserts of a trace that do not hold for the module itself.

If a dim takes only multiples of a step, torch defers its guards to asserts in the graph. Some asserts are torch's own
guesses, for example about strides or paddings of width 0. They are true at the example's sizes, but no operator depends
on them. The module also runs at sizes that such an assert excludes, and so does the graph without the assert.

An assert is removed only if the module and the graph without the assert give the same results at excluded sizes.
Otherwise the assert is not a guess: the module takes another branch at these sizes. Sizes that the module itself
refuses are ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..errors import InputError
from ..model import Dim, InputSpec, LoadedModel
from .program_signature import user_inputs, with_constant_inputs

_ASSERT = torch.ops.aten._assert_scalar.default
# Number of excluded combinations of sizes to try for each assert.
_TRIES = 3
# Maximum number of parameters of a model that is tried. Each run copies the module.
_MOST_PARAMETERS = 2**28
# Number of sizes of a dim to try, from its smallest size upwards.
_NEAR = 24
# Allowed difference of outputs, in units of the output dtype's epsilon. The module and its trace run the same
# operators. Results differ only if several threads add the terms of a sum in another order.
_ROUNDINGS = 256


def drop_guessed_asserts(model: LoadedModel, fresh: Callable[[], nn.Module]) -> None:
    """Erase asserts from the graph of ``model`` that exclude sizes at which the graph agrees with the module.

    Args:
        fresh: function that makes a copy of the module, because a run may change it.
    """
    program = model.program
    asserts = [node for node in program.graph.nodes if node.target is _ASSERT]
    if not asserts or sum(value.numel() for value in program.state_dict.values()) > _MOST_PARAMETERS:
        return
    symbols = _dim_names_of_symbols(model)
    agreed: dict[tuple[int, ...], bool | None] = {}
    erased = []
    for node in asserts:
        holds = _assert_condition(node, symbols)
        if holds is None:
            continue
        excluded = (sizes for sizes in _iter_small_sizes(model.named_dims) if not holds(sizes))
        tried = list(itertools.islice(excluded, _TRIES))
        for sizes in tried:
            key = tuple(sizes.values())
            if key not in agreed:
                agreed[key] = _outputs_agree(model, fresh, sizes)
        found = {agreed[tuple(sizes.values())] for sizes in tried}
        if True in found and False not in found:
            erased.append(node)
    for node in erased:
        program.graph.erase_node(node)
    if erased:
        program.graph_module.recompile()


def _dim_names_of_symbols(model: LoadedModel) -> dict[Any, str]:
    """Map each symbol of the trace to the name of the dim that the symbol represents."""
    found: dict[Any, str] = {}
    nodes = {node.name: node for node in model.program.graph.nodes if node.op == "placeholder"}
    tensors = [nodes[item.name] for item in user_inputs(model.program) if not isinstance(item, ConstantArgument)]
    for node, given in zip(tensors, model.inputs, strict=True):
        for size, dim in zip(node.meta["val"].shape, given.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and dim.name and not dim.terms:
                found[size.node.expr] = dim.name
    return found


def _assert_condition(node: torch.fx.Node, symbols: Mapping[Any, str]) -> Callable[[Mapping[str, int]], bool] | None:
    """Return the assert's condition as a function of the dims' sizes; None if it depends on other values."""
    given = node.args[0]
    if isinstance(given, torch.fx.Node):
        value = given.meta.get("val")
    else:
        value = None
    expression = getattr(getattr(value, "node", None), "expr", None)
    if expression is None or not expression.free_symbols or not expression.free_symbols <= set(symbols):
        return None
    return lambda sizes: bool(expression.subs({symbol: sizes[dim] for symbol, dim in symbols.items()}))


def _iter_small_sizes(dims: Mapping[str, Dim]) -> Iterator[dict[str, int]]:
    """Yield sizes close to the smallest sizes. All dims are increased equally, each by a different amount, or only one
    is increased.
    """
    count = len(dims)
    for step in range(1, _NEAR):
        moves = [[step] * count, [step + k for k in range(count)]]
        moves += [[step if k == one else 0 for k in range(count)] for one in range(count)]
        for move in moves:
            sizes = {name: dim.min + by for (name, dim), by in zip(dims.items(), move, strict=True)}
            if all(sizes[name] <= dim.max for name, dim in dims.items()):
                yield sizes


class _AssertFreeInterpreter(torch.fx.Interpreter):
    """Interpreter that runs the graph without its asserts."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator.

        Returns:
            The operator's result; None for an assert.
        """
        if target is _ASSERT:
            return None
        return super().call_function(target, args, kwargs)


def _outputs_agree(model: LoadedModel, fresh: Callable[[], nn.Module], sizes: Mapping[str, int]) -> bool | None:
    """Return whether the module agrees with the graph without its asserts; None if the module does not run at these
    sizes.
    """
    try:
        samples = zip(model.inputs, model.samples(0, sizes).values(), strict=True)
        tensors = [_sample_to_tensor(given, value) for given, value in samples]
    except InputError:
        # The sample would have too many values.
        return None
    flat = with_constant_inputs(model.program, tensors)
    args, kwargs = tree_unflatten(flat, model.program.call_spec.in_spec)
    try:
        with torch.no_grad():
            wanted = tree_leaves(fresh()(*args, **kwargs))
    except Exception:
        # The user's forward may raise an exception of any type.
        return None
    try:
        with torch.no_grad():
            unlifted = model.program.module(check_guards=False)
            given = tree_leaves(_AssertFreeInterpreter(unlifted).run(*flat, enable_io_processing=False))
    except Exception:
        # torch may raise an exception of any type.
        return False
    return len(wanted) == len(given) and all(map(_values_agree, wanted, given))


def _sample_to_tensor(given: InputSpec, value: np.ndarray) -> torch.Tensor:
    if given.dtype == "bfloat16":
        plain = value.astype(np.float32)
    else:
        plain = value
    return torch.from_numpy(plain).to(getattr(torch, given.dtype))


def _values_agree(wanted: Any, given: Any) -> bool:
    if not isinstance(wanted, torch.Tensor) or not isinstance(given, torch.Tensor):
        return bool(wanted == given)
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return False
    if not wanted.dtype.is_floating_point or not wanted.numel():
        return torch.equal(wanted, given)
    room = _ROUNDINGS * torch.finfo(wanted.dtype).eps * float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(wanted, given, rtol=0.0, atol=room, equal_nan=True)
