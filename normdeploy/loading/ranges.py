"""Which values an exported program's integer inputs may take, and how long a dim may be: read off what consumes them.

An index into a table of N rows must lie in [0, N). Going forward through the graph, each integer tensor keeps its
origins: an input plus an offset, positions (an arange, or the running sum of a mask) that grow with a dim, or a 0/1
flag. Where one with an origin is used as an index, the table's size bounds that origin.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch

from .expressions import words
from .training import arguments, operator_name

_SAME_VALUES = words(
    "view _unsafe_view reshape unsqueeze squeeze expand expand_as broadcast_to slice select narrow transpose permute "
    "movedim t contiguous clone alias "
    "detach flatten unflatten repeat repeat_interleave to _to_copy type_as lift_fresh_copy flip roll split "
    "split_with_sizes chunk unbind view_as"
)
_FLAGS = words("eq ne gt ge lt le logical_and logical_or logical_not logical_xor isnan ones ones_like zeros zeros_like")
_INDEXING = {  # op -> the argument that is indexed, the argument that holds the indices
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
_MASK_FACTOR = 1e3  # (1 - mask) times at least this is an attention mask


@dataclass(frozen=True)
class _Origin:
    """Values that are ``what`` (an input's name) plus an offset in [low, high]; for a size: that lie in [low, what +
    high]."""

    kind: Literal["input", "size", "flag"]
    what: Any = None
    low: int = 0
    high: int = 0

    def shifted(self, low: int, high: int) -> _Origin:
        return replace(self, low=self.low + low, high=self.high + high)


@dataclass(frozen=True)
class Bound:
    """A half-open range [low, high) and the tensor that sets it, for messages."""

    low: int
    high: int
    source: str

    def __and__(self, other: Bound) -> Bound:
        source = self.source if self.high <= other.high else other.source
        return Bound(max(self.low, other.low), min(self.high, other.high), source)


@dataclass
class Bounds:
    """``values`` by the name of the input's placeholder; ``sizes`` by size symbol: the largest size is ``high - 1``."""

    values: dict[str, Bound] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, Bound] = field(default_factory=dict)
    masks: set[str] = field(default_factory=set)  # floating inputs that are used as 0/1 masks


def bounds(program: torch.export.ExportedProgram) -> Bounds:
    """What the top graph of ``program`` says of its inputs."""
    return _Analysis(program).run()


class _Analysis:
    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.origins: dict[torch.fx.Node, frozenset[_Origin]] = {}
        self.found = Bounds()
        signature = program.graph_signature
        self.stored = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self.inputs = {spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"}

    def run(self) -> Bounds:
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in self.inputs and _is_integer(node.meta.get("val")):
                self.origins[node] = frozenset({_Origin("input", node.name)})
            elif node.op == "placeholder" and node.name in self.inputs and _is_mask(node):
                self.found.masks.add(node.name)
            elif node.op == "call_function":
                self.origins[node] = frozenset(self._produced(node))
                self._consume(node)
        return self.found

    def _of(self, value: Any) -> frozenset[_Origin]:
        return self.origins.get(value, frozenset()) if isinstance(value, torch.fx.Node) else frozenset()

    def _produced(self, node: torch.fx.Node) -> Iterable[_Origin]:
        if node.target is operator.getitem:
            return self._of(node.args[0])
        name, given = _name(node), arguments(node)
        if not given:
            return ()
        first = next(iter(given.values())) if not node.args else node.args[0]
        match name:
            case "arange":
                return _arange(given)
            case "add" | "sub" | "rsub":
                return self._sum(given, name)
            case "mul":
                return self._product(given)
            case "cumsum":
                return _running_sum(self._of(first), first, given)
            case "cat" | "stack":
                return (origin for part in given["tensors"] for origin in self._of(part))
            case "where" if "other" in given:
                return self._of(given.get("self")) | self._of(given["other"])
            case "masked_fill":
                return self._of(first)
            case "full" | "full_like" if given.get("fill_value") in (0, 1):
                return (_Origin("flag"),)
            case _ if name in _FLAGS:
                return (_Origin("flag"),)
            case _ if name in _SAME_VALUES:
                return self._of(first)
        return ()

    def _sum(self, given: dict[str, Any], name: str) -> Iterable[_Origin]:
        left, right = given["self"], given["other"]
        if name == "rsub" or given.get("alpha", 1) != 1:
            return ()
        if name == "add" and not self._of(left):
            left, right = right, left
        span = self._span(right)
        if span is None:
            return ()
        low, high = span if name == "add" else (-span[1], -span[0])
        return (origin.shifted(low, high) for origin in self._of(left) if origin.kind != "flag")

    def _product(self, given: dict[str, Any]) -> Iterable[_Origin]:
        left, right = self._of(given["self"]), self._of(given["other"])
        if any(origin.kind == "flag" for origin in left):
            left, right = right, left
        if not any(origin.kind == "flag" for origin in right):
            return ()
        return (
            replace(origin, low=min(origin.low, 0), high=max(origin.high, 0) if origin.kind == "input" else origin.high)
            for origin in left
        )

    def _span(self, value: Any) -> tuple[int, int] | None:
        """The smallest and largest value of an integer constant."""
        if isinstance(value, int):
            return value, value
        while isinstance(value, torch.fx.Node) and value.op == "call_function" and _name(value) in _SAME_VALUES:
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

    def _consume(self, node: torch.fx.Node) -> None:
        name, given = _name(node), arguments(node)
        if name in _INDEXING:
            table, index = (given.get(argument) for argument in _INDEXING[name])
            self._bound(index, table, 0 if name.startswith("embedding") else given.get("dim", 0))
        elif name in ("index", "index_put"):
            for dim, index in enumerate(given["indices"]):
                self._bound(index, given["self"], dim)
        elif name == "one_hot" and given.get("num_classes", -1) > 0:
            self._limit(self._of(given["self"]), given["num_classes"], "one_hot")

    def _bound(self, index: Any, table: Any, dim: Any) -> None:
        value = table.meta.get("val") if isinstance(table, torch.fx.Node) else None
        if (
            not isinstance(value, torch.Tensor)
            or not isinstance(dim, int)
            or not value.dim()
            or not self._of(index)
            or not _is_integer(index.meta.get("val"))
        ):
            return
        rows, origins = value.shape[dim], self._of(index)
        if not isinstance(rows, int):  # a dim of the input: positions grow with it, values must fit its smallest size
            constraint = self.program.range_constraints.get(rows.node.expr)
            rows = max(1, int(constraint.lower)) if constraint is not None else 1
            origins = frozenset(origin for origin in origins if origin.kind == "input")
        self._limit(origins, rows, self.stored.get(table.name, table.name))

    def _limit(self, origins: Iterable[_Origin], rows: int, source: str) -> None:
        for origin in origins:
            if origin.kind == "input":
                bound = Bound(-origin.low, rows - origin.high, source)
                self.found.values[origin.what] = self.found.values.get(origin.what, bound) & bound
            elif origin.kind == "size" and len(symbols := sympy.sympify(origin.what).free_symbols) == 1:
                (symbol,) = symbols
                slope, offset = origin.what.coeff(symbol), origin.what.subs(symbol, 0)
                if slope.is_Integer and slope > 0 and offset.is_Integer and origin.what == slope * symbol + offset:
                    bound = Bound(0, int((rows - 1 - origin.high - offset) // slope) + 1, source)
                    self.found.sizes[symbol] = self.found.sizes.get(symbol, bound) & bound


def _name(node: torch.fx.Node) -> str:
    name = operator_name(node)  # in-place operators end in _
    return name.removesuffix("_") if name.endswith("_") and not name.endswith("__") else name


def _is_integer(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool
    )


def _expression(value: Any) -> Any:
    """A size as sympy has it: of an int, a SymInt, or a node that computes one."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _arange(given: dict[str, Any]) -> Iterable[_Origin]:
    start, end = given.get("start", 0), _expression(given["end"])
    if isinstance(start, int) and end is not None and given.get("step", 1) == 1:
        yield _Origin("size", end, start, -1)


def _running_sum(origins: Iterable[_Origin], source: Any, given: dict[str, Any]) -> Iterable[_Origin]:
    length = source.meta["val"].shape[given["dim"]] if isinstance(source, torch.fx.Node) else None
    if isinstance(length, torch.SymInt) and any(origin.kind == "flag" for origin in origins):
        yield _Origin("size", length.node.expr, 0, 0)


def _is_mask(placeholder: torch.fx.Node) -> bool:
    """A floating input that becomes a bool, or enters as (1 - mask) * large."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    stack = [placeholder]
    while stack:
        node = stack.pop()
        for user in node.users:
            result, name = user.meta.get("val"), _name(user)
            if name in ("to", "_to_copy") and isinstance(result, torch.Tensor) and result.dtype == torch.bool:
                return True
            if name in ("rsub", "sub") and _scaled_up(user):
                return True
            if name in _SAME_VALUES:
                stack.append(user)
    return False


def _scaled_up(node: torch.fx.Node) -> bool:
    for user in node.users:
        if operator_name(user) == "mul" and any(
            isinstance(factor, int | float) and abs(factor) >= _MASK_FACTOR for factor in user.args
        ):
            return True
        if _name(user) in _SAME_VALUES and _scaled_up(user):
            return True
    return False
