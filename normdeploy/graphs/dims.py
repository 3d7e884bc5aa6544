"""Dimensions of ONNX tensors: sizes, symbols, and the arithmetic that torch's exporter writes into them ("2*s16*s82").

An expression is parsed and evaluated over integers; nothing of it is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

Dims = tuple["int | str | None", ...]

_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate_dim(dim: int | str | None, sizes: Mapping[str, int]) -> int | None:
    """A dim's size where its symbols take the given sizes ("2*s16*s82", "floor" forms excluded); None where that can't
    be said."""
    if isinstance(dim, int):
        return dim
    if dim is None:
        return None
    if dim in sizes:
        return sizes[dim]
    try:
        return _evaluate(ast.parse(dim, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError):
        return None


def invented(dim: int | str | None) -> bool:
    """Whether onnx's inference made up the name, for a size that it could not follow: the size may be named elsewhere,
    too."""
    return isinstance(dim, str) and dim.startswith("unk__")


@lru_cache(maxsize=4096)
def symbols(dim: int | str | None) -> frozenset[str]:
    """The symbols that a dim speaks of; an expression that can't be read is one symbol by itself."""
    if dim is None or isinstance(dim, int):
        return frozenset()
    try:
        tree = ast.parse(dim, mode="eval").body
        names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        _evaluate(tree, dict.fromkeys(names, 7))
        return names
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError):
        return frozenset({dim})


def _evaluate(tree: ast.AST, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_evaluate(tree.operand, sizes)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
        return _ARITHMETIC[type(tree.op)](_evaluate(tree.left, sizes), _evaluate(tree.right, sizes))
    raise TypeError(ast.dump(tree))
