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

import torch
from torch.export.graph_signature import ConstantArgument

from ..model import Dim, LoadedModel
from .program_signature import user_inputs
from .trace_comparison import ASSERT, TraceComparison

# Number of excluded combinations of sizes to try for each assert.
_TRIES = 3
# Number of sizes of a dim to try, from its smallest size upwards.
_NEAR = 24


def drop_guessed_asserts(comparison: TraceComparison) -> bool:
    """Erase asserts from the graph of a trace that exclude sizes at which the graph agrees with the module.

    Returns:
        True if the module runs at sizes that a remaining assert excludes, and computes something else than the graph.
    """
    model = comparison.model
    program = model.program
    asserts = [node for node in program.graph.nodes if node.target is ASSERT]
    if not asserts or not comparison.is_possible:
        return False
    symbols = _dim_names_of_symbols(model)
    erased = []
    branches = False
    for node in asserts:
        holds = _assert_condition(node, symbols)
        if holds is None:
            continue
        excluded = (sizes for sizes in _iter_small_sizes(model.named_dims) if not holds(sizes))
        found = {comparison.agrees_at(sizes) for sizes in itertools.islice(excluded, _TRIES)}
        branches = branches or False in found
        if True in found and False not in found:
            erased.append(node)
    for node in erased:
        program.graph.erase_node(node)
    if erased:
        program.graph_module.recompile()
    return branches


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
