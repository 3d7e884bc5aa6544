"""Derive bounds of an exported program's integer inputs and dims from the nodes that use them.

An index into a table of N rows must lie in [0, N). The analysis goes forward through the graph and records the origins
of each integer tensor. There are three kinds of origins: an input plus an offset, positions that grow with a dim (an
arange, or the running sum of a mask), and a 0/1 flag. If a tensor with an origin is used as an index, the table's size
bounds that origin.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch

from ..graphs.index_bounds import IndexLimit
from .program_signature import traced_dtype, traced_tensor, user_inputs
from .shape_expressions import split_words
from .train_mode_checks import bind_node_arguments, operator_name, plain_operator_name

_SAME_VALUES = split_words(
    "view _unsafe_view reshape unsqueeze squeeze expand expand_as broadcast_to slice select narrow transpose permute "
    "movedim t contiguous clone alias "
    "detach flatten unflatten repeat repeat_interleave to _to_copy type_as lift_fresh_copy flip roll split "
    "split_with_sizes chunk unbind view_as"
)
_FLAGS = split_words(
    "eq ne gt ge lt le logical_and logical_or logical_not logical_xor isnan ones ones_like zeros zeros_like"
)
# Operator -> (argument that is indexed, argument with the indices).
_INDEXING = {
    "embedding": ("weight", "indices"),
    "embedding_bag": ("weight", "indices"),
    "index_select": ("self", "index"),
    "gather": ("self", "index"),
    "take_along_dim": ("self", "indices"),
    "scatter": ("self", "index"),
    "scatter_add": ("self", "index"),
    "index_add": ("self", "index"),
    "index_copy": ("self", "index"),
    "index_fill": ("self", "index"),
}
# If an input is used as (1 - input)·m with at least this factor m, the input is an attention mask.
_MASK_FACTOR = 1e3


@dataclass(frozen=True)
class _ValueOrigin:
    """Origin of integer values.

    Attributes:
        kind: "input": the input ``what`` plus an offset in [low, high]; "size": values in [low, what + high]; "flag": 0
            or 1.
        what: name of the input, or expression of the size.
        low: smallest offset, or smallest value for the kind "size".
        high: largest offset.
    """

    kind: Literal["input", "size", "flag"]
    what: Any = None
    low: int = 0
    high: int = 0

    def shift_offsets(self, low: int, high: int) -> _ValueOrigin:
        return replace(self, low=self.low + low, high=self.high + high)


@dataclass
class ProgramBounds:
    """Bounds of a program's inputs.

    Attributes:
        values: placeholder name -> allowed values.
        sizes: size symbol -> bound; the largest size is ``high - 1``.
        masks: names of floating inputs that are used as 0/1 masks.
    """

    values: dict[str, IndexLimit] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, IndexLimit] = field(default_factory=dict)
    masks: set[str] = field(default_factory=set)


def find_program_bounds(program: torch.export.ExportedProgram) -> ProgramBounds:
    """Derive bounds from the top-level graph of ``program``.

    Returns:
        The bounds of the program's inputs.
    """
    return _ProgramBoundsAnalysis(program).run()


class _ProgramBoundsAnalysis:
    """Analysis that visits each node once and collects origins and bounds."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.origins: dict[torch.fx.Node, frozenset[_ValueOrigin]] = {}
        self.found = ProgramBounds()
        signature = program.graph_signature
        self.stored = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.inputs = {item.name for item in user_inputs(program)}

    def run(self) -> ProgramBounds:
        """Visit all nodes of the graph.

        Returns:
            The bounds that were found.
        """
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in self.inputs and _is_integer_tensor(node.meta.get("val")):
                self.origins[node] = frozenset({_ValueOrigin("input", node.name)})
            elif node.op == "placeholder" and node.name in self.inputs and _is_float_mask(node):
                self.found.masks.add(node.name)
            elif node.op == "call_function":
                self.origins[node] = frozenset(self._trace_origins(node))
                self._record_consumer(node)
        return self.found

    def _origins_of(self, value: Any) -> frozenset[_ValueOrigin]:
        if isinstance(value, torch.fx.Node):
            return self.origins.get(value, frozenset())
        return frozenset()

    def _trace_origins(self, node: torch.fx.Node) -> Iterable[_ValueOrigin]:
        if node.target is operator.getitem:
            return self._origins_of(node.args[0])
        name = plain_operator_name(node)
        given = bind_node_arguments(node)
        if not given:
            return ()
        if not node.args:
            first = next(iter(given.values()))
        else:
            first = node.args[0]
        match name:
            case "arange":
                return _origins_of_arange(given)
            case "add" | "sub" | "rsub":
                return self._shift_origins(given, name)
            case "mul":
                return self._mask_origins(given)
            case "cumsum":
                return _origins_of_cumsum(self._origins_of(first), first, given)
            case "cat" | "stack":
                return (origin for part in given["tensors"] for origin in self._origins_of(part))
            case "where" if "other" in given:
                return self._origins_of(given.get("self")) | self._origins_of(given["other"])
            case "masked_fill":
                return self._origins_of(first)
            case "full" | "full_like" if given.get("fill_value") in (0, 1):
                return (_ValueOrigin("flag"),)
            case _ if name in _FLAGS:
                return (_ValueOrigin("flag"),)
            case _ if name in _SAME_VALUES:
                return self._origins_of(first)
        return ()

    def _shift_origins(self, given: dict[str, Any], name: str) -> Iterable[_ValueOrigin]:
        left = given["self"]
        right = given["other"]
        if name == "rsub" or given.get("alpha", 1) != 1:
            return ()
        if name == "add" and not self._origins_of(left):
            left, right = right, left
        span = self._constant_span(right)
        if span is None:
            return ()
        low, high = span if name == "add" else (-span[1], -span[0])
        return (origin.shift_offsets(low, high) for origin in self._origins_of(left) if origin.kind != "flag")

    def _mask_origins(self, given: dict[str, Any]) -> Iterable[_ValueOrigin]:
        left = self._origins_of(given["self"])
        right = self._origins_of(given["other"])
        if any(origin.kind == "flag" for origin in left):
            left, right = right, left
        if not any(origin.kind == "flag" for origin in right):
            return ()
        return (
            replace(origin, low=min(origin.low, 0), high=max(origin.high, 0) if origin.kind == "input" else origin.high)
            for origin in left
        )

    def _constant_span(self, value: Any) -> tuple[int, int] | None:
        """Return the smallest and largest value of an integer constant, None if ``value`` is not an integer
        constant.
        """
        if isinstance(value, int):
            return value, value
        while (
            isinstance(value, torch.fx.Node)
            and value.op == "call_function"
            and plain_operator_name(value) in _SAME_VALUES
        ):
            value = value.args[0]
        name = self.stored.get(getattr(value, "name", ""), "")
        tensor = self.program.state_dict.get(name, self.program.constants.get(name))
        if (
            isinstance(tensor, torch.Tensor)
            and not tensor.is_floating_point()
            and not tensor.is_complex()
            and tensor.numel()
        ):
            return int(tensor.min()), int(tensor.max())
        return None

    def _record_consumer(self, node: torch.fx.Node) -> None:
        name = plain_operator_name(node)
        given = bind_node_arguments(node)
        if name in _INDEXING:
            table, index = (given.get(argument) for argument in _INDEXING[name])
            self._record_index(index, table, 0 if name.startswith("embedding") else given.get("dim", 0))
        elif name in ("index", "index_put"):
            for dim, index in enumerate(given["indices"]):
                self._record_index(index, given["self"], dim)
        elif name == "one_hot" and given.get("num_classes", -1) > 0:
            self._record_bound(self._origins_of(given["self"]), given["num_classes"], "one_hot")

    def _record_index(self, index: Any, table: Any, dim: Any) -> None:
        value = traced_tensor(table)
        if (
            value is None
            or not isinstance(dim, int)
            or not value.dim()
            or not self._origins_of(index)
            or not _is_integer_tensor(index.meta.get("val"))
        ):
            return
        rows = value.shape[dim]
        origins = self._origins_of(index)
        # If the table's size is itself a dim, positions may grow with this dim, so positions are not bounded. Values of
        # an input must fit the table at the dim's smallest size.
        if not isinstance(rows, int):
            constraint = self.program.range_constraints.get(rows.node.expr)
            if constraint is not None:
                rows = max(1, int(constraint.lower))
            else:
                rows = 1
            origins = frozenset(origin for origin in origins if origin.kind == "input")
        self._record_bound(origins, rows, self.stored.get(table.name, table.name))

    def _record_bound(self, origins: Iterable[_ValueOrigin], rows: int, source: str) -> None:
        for origin in origins:
            if origin.kind == "input":
                bound = IndexLimit(-origin.low, rows - origin.high, source)
                self.found.values[origin.what] = self.found.values.get(origin.what, bound) & bound
            elif origin.kind == "size" and len(symbols := sympy.sympify(origin.what).free_symbols) == 1:
                (symbol,) = symbols
                slope = origin.what.coeff(symbol)
                offset = origin.what.subs(symbol, 0)
                if slope.is_Integer and slope > 0 and offset.is_Integer and origin.what == slope * symbol + offset:
                    bound = IndexLimit(0, int((rows - 1 - origin.high - offset) // slope) + 1, source)
                    self.found.sizes[symbol] = self.found.sizes.get(symbol, bound) & bound


def _is_integer_tensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _size_expression(value: Any) -> Any:
    """Return a size as a sympy expression, from a SymInt or a node that computes a SymInt; None for other values."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return None


def _origins_of_arange(given: dict[str, Any]) -> Iterable[_ValueOrigin]:
    start = given.get("start", 0)
    end = _size_expression(given["end"])
    if isinstance(start, int) and end is not None and given.get("step", 1) == 1:
        yield _ValueOrigin("size", end, start, -1)


def _origins_of_cumsum(origins: Iterable[_ValueOrigin], source: Any, given: dict[str, Any]) -> Iterable[_ValueOrigin]:
    if isinstance(source, torch.fx.Node):
        length = source.meta["val"].shape[given["dim"]]
    else:
        length = None
    if isinstance(length, torch.SymInt) and any(origin.kind == "flag" for origin in origins):
        yield _ValueOrigin("size", length.node.expr, 0, 0)


def _is_float_mask(placeholder: torch.fx.Node) -> bool:
    """Return whether a floating input is cast to bool or used as (1 - mask) * large."""
    dtype = traced_dtype(placeholder)
    if dtype is None or not dtype.is_floating_point:
        return False
    stack = [placeholder]
    while stack:
        node = stack.pop()
        for user in node.users:
            name = plain_operator_name(user)
            if name in ("to", "_to_copy") and traced_dtype(user) == torch.bool:
                return True
            if name in ("rsub", "sub") and _is_scaled_up(user):
                return True
            if name in _SAME_VALUES:
                stack.append(user)
    return False


def _is_scaled_up(node: torch.fx.Node) -> bool:
    for user in node.users:
        if operator_name(user) == "mul" and any(
            isinstance(factor, int | float) and abs(factor) >= _MASK_FACTOR for factor in user.args
        ):
            return True
        if plain_operator_name(user) in _SAME_VALUES and _is_scaled_up(user):
            return True
    return False
