"""Read dimensions of ONNX tensors: sizes, symbols, and the arithmetic that torch's exporter writes ("2*s16*s82").

Expressions are parsed and computed by walking their trees; they are never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .symbolic_sizes import UNKNOWN, Size

Dims = tuple["int | str | None", ...]
# elem_type and shape of a tensor; either is None if it is unknown.
Type = tuple[int | None, Dims | None]


class Types(dict[str, Type]):
    """Types and shapes by tensor name; a missing name means unknown."""

    def __missing__(self, name: str) -> Type:
        return None, None


Operators = Mapping[type[ast.operator | ast.unaryop], Callable[..., Any]]

# Operators that are exact on integers and on polynomials.
_POLYNOMIAL: Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
_INTEGER: Operators = {**_POLYNOMIAL, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_UNREADABLE = (SyntaxError, KeyError, TypeError, ValueError, RecursionError, ArithmeticError)


def compute_expression(tree: ast.expr, operators: Operators, leaf: Callable[[ast.expr], Any]) -> Any:
    """Compute an arithmetic expression by walking its tree.

    Args:
        operators: function for each class of operator.
        leaf: function that computes every other part: neither an integer nor an operation of ``operators``.

    Returns: the value, of the type that ``operators`` and ``leaf`` work on.
    """
    match tree:
        case ast.Constant() if type(tree.value) is int:
            return tree.value
        case ast.UnaryOp() if type(tree.op) in operators:
            return operators[type(tree.op)](compute_expression(tree.operand, operators, leaf))
        case ast.BinOp() if type(tree.op) in operators:
            left = compute_expression(tree.left, operators, leaf)
            right = compute_expression(tree.right, operators, leaf)
            return operators[type(tree.op)](left, right)
        case _:
            return leaf(tree)


def evaluate_dim(dim: int | str | None, sizes: Mapping[str, int]) -> int | None:
    """Compute a dim's size, for example of "2*s16*s82".

    Args:
        sizes: sizes of symbols, or of whole expressions.

    Returns: the size; None if it is unknown.
    """
    if dim is None or isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    try:
        return int(_evaluate_dim(dim, _INTEGER, lambda name: sizes[name]))
    except _UNREADABLE:
        return None


def _evaluate_dim(dim: str, operators: Operators, value: Callable[[str], Any]) -> Any:
    """Compute the expression ``dim``; ``value`` returns the value of a symbol."""

    def evaluate_leaf(tree: ast.expr) -> Any:
        """Compute a symbol.

        Returns: its value.
        """
        if not isinstance(tree, ast.Name):
            raise TypeError(ast.dump(tree))
        return value(tree.id)

    return compute_expression(ast.parse(dim, mode="eval").body, operators, evaluate_leaf)


def is_invented_name(dim: int | str | None) -> bool:
    """Return whether onnx's shape inference invented the name for a size that it could not compute.

    Returns: True for "unk__0", for example. The same size may have another name elsewhere.
    """
    return isinstance(dim, str) and dim.startswith("unk__")


@lru_cache(maxsize=4096)
def dim_symbols(dim: int | str | None) -> frozenset[str]:
    """Collect the symbols in a dim.

    Returns: their names; an expression that can't be parsed counts as one symbol.
    """
    if dim is None or isinstance(dim, int):
        return frozenset()
    names: set[str] = set()

    def note_symbol(name: str) -> int:
        """Note the symbol.

        Returns: an arbitrary positive size, so that the expression can be computed.
        """
        names.add(name)
        return 7

    try:
        _evaluate_dim(dim, _INTEGER, note_symbol)
    except _UNREADABLE:
        return frozenset({dim})
    return frozenset(names)


@lru_cache(maxsize=4096)
def dim_size(dim: int | str | None, name: str) -> Size:
    """Convert a dim to a polynomial of symbols.

    Args:
        name: identifies a dim that the file leaves unnamed.

    Returns: the size; an opaque symbol if ``dim`` can't be a size or its name is ambiguous.
    """
    if isinstance(dim, int):
        return Size.from_int(dim)
    if dim is None:
        return Size.opaque(name)
    # Python's parser would treat some different names as equal.
    if dim.startswith(UNKNOWN) or not dim.isascii() or "#" in dim or dim != dim.strip():
        return Size.opaque("a dim", dim)
    try:
        size = Size.from_int(_evaluate_dim(dim, _POLYNOMIAL, Size.symbol))
    except _UNREADABLE:
        return Size.symbol(dim)
    if (-size).is_nonnegative:
        return Size.opaque("a dim", dim)
    return size
