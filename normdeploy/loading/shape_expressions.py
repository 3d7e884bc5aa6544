"""Parse shape expressions and guards of an ExportedProgram without evaluating them as Python.

torch passes these texts to ``sympy.sympify`` or to ``exec``, which would run any code in them. This module parses a
text with ``ast``, and checks every node of the resulting tree against an allowlist. Guards are evaluated directly on
this tree.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..graphs.dims import Operators, compute_expression


def split_words(text: str) -> frozenset[str]:
    """Split a text into names.

    Returns:
        Set of names.
    """
    return frozenset(text.split())


# Matches torch's symbols, such as s77 and u0: backed (s) and unbacked (u) sizes, and floats (zf, zuf).
_SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,9}")
_NUMBER = re.compile(r"[-+]?\d{1,20}(\.\d{0,40})?(e[-+]?\d{1,3})?(/\d{1,20})?")
_FUNCTIONS = split_words(
    # Functions of torch.utils._sympy.functions that torch registers for loading, and sympy's classes as srepr writes
    # them.
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural"
    " FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt"
    " RoundDecimal ToFloat Identity Add Mul Pow Max Min Abs Integer Rational Float Symbol Eq Ne Equality Unequality"
    " GreaterThan LessThan StrictGreaterThan StrictLessThan And Or Not floor ceiling Piecewise ExprCondPair sqrt"
)
_POWERS = split_words("Pow PowByNatural FloatPow LShift")
_ASSUMPTIONS = split_words("positive nonnegative integer real nonzero negative precision dps evaluate")
# Maximum number of characters of an expression. The longest expression of BERT has 60 characters.
_LENGTH_LIMIT = 10_000
_INTEGER_LIMIT = 2**63
_EXPONENT_LIMIT = 64

_BINARY: Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Operators = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_OPERATORS: Operators = {**_BINARY, **_UNARY}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "max": max,
    "min": min,
    "abs": abs,
    "Abs": abs,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Eq": operator.eq,
    "Ne": operator.ne,
    "And": lambda *a: all(a),
    "Or": lambda *a: any(a),
    "Not": operator.not_,
}


class DisallowedExpression(ValueError):
    """Raised if an expression contains a forbidden part. The message names the part."""


def _parse_expression(text: str) -> ast.expr:
    if len(text) > _LENGTH_LIMIT or not text.isascii():
        raise DisallowedExpression(f"{len(text)} characters, or not ASCII")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DisallowedExpression(f"not an expression ({type(error).__name__})") from None


def require_allowed_expression(text: str) -> None:
    """Accept only arithmetic on size symbols in torch's notation.

    Examples are ``s77//2`` and sympy's srepr form, ``Mul(Integer(2), Symbol('s77', positive=True))``.

    Raises:
        DisallowedExpression: the text is not such an expression, or evaluating it could take much time or memory.
    """
    try:
        _require_allowed_node(_parse_expression(text), powers=0)
    except RecursionError:
        raise DisallowedExpression("nested too deeply") from None


def _require_allowed_node(node: ast.expr, powers: int) -> None:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            if abs(number) > _INTEGER_LIMIT:
                raise DisallowedExpression("a number beyond 64 bits")
        case ast.Name():
            if not _SYMBOL.fullmatch(node.id):
                raise DisallowedExpression(f"the name {node.id!r}")
        case ast.UnaryOp():
            _require_allowed_node(node.operand, powers)
        case ast.BinOp() if type(node.op) in _BINARY:
            if isinstance(node.op, ast.Pow):
                powers = _require_allowed_power(node.right, powers)
            _require_allowed_node(node.left, powers)
            _require_allowed_node(node.right, powers)
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            for operand in (node.left, *node.comparators):
                _require_allowed_node(operand, powers)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            _require_allowed_call(node, name, powers)
        case _:
            raise DisallowedExpression(f"{ast.unparse(node)[:80]!r}")


def _require_allowed_power(exponent: ast.expr, powers: int) -> int:
    """Allow only small or symbolic exponents and limit nested powers, because sympy evaluates numeric powers
    immediately.

    Returns:
        The number of nested powers.
    """
    if isinstance(exponent, ast.UnaryOp):
        bare = exponent.operand
    else:
        bare = exponent
    match bare:
        case (
            ast.Constant(value=int() | float() as value)
            | ast.Call(func=ast.Name(id="Integer"), args=[ast.Constant(value=int() as value)])
        ):
            small = abs(value) <= _EXPONENT_LIMIT
        case ast.Name() | ast.Call(func=ast.Name(id="Symbol")):
            small = True
        case _:
            small = False
    if not small or powers >= 2:
        raise DisallowedExpression(f"the power {ast.unparse(exponent)[:80]!r}")
    return powers + 1


def _require_allowed_call(node: ast.Call, name: str, powers: int) -> None:
    for keyword in node.keywords:
        if (
            keyword.arg not in _ASSUMPTIONS
            or not isinstance(keyword.value, ast.Constant)
            or not isinstance(keyword.value.value, bool | int)
        ):
            raise DisallowedExpression(f"the argument {ast.unparse(keyword)[:80]!r}")
        if type(keyword.value.value) is int and keyword.value.value > _EXPONENT_LIMIT:
            raise DisallowedExpression(f"the argument {ast.unparse(keyword)[:80]!r}")
    if (
        name in ("Symbol", "Integer", "Float", "Rational")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ):
        if name == "Symbol":
            wanted = _SYMBOL
        else:
            wanted = _NUMBER
        if len(node.args) > 1 or not wanted.fullmatch(node.args[0].value):
            raise DisallowedExpression(f"{ast.unparse(node)[:80]!r}")
        return
    if name in _POWERS and len(node.args) == 2:
        powers = _require_allowed_power(node.args[1], powers)
    for argument in node.args:
        _require_allowed_node(argument, powers)


class SizeGuard:
    """Condition on the sizes of a program's inputs, one line of ``guards_code``: ``L['x'].size()[1] <= 12``.

    Attributes:
        text: the line of ``guards_code``.
        sizes: (path as torch writes it, dim) of each size in the condition. The dim -1 means the argument itself.

    Raises:
        DisallowedExpression: the line contains more than arithmetic and comparisons of sizes and plain arguments.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parse_expression(text)
        # Pairs (path as torch writes it, such as "['x'][0]", and dim).
        self.sizes: set[tuple[str, int]] = set()
        try:
            self._collect_sizes(self._tree)
        except RecursionError:
            raise DisallowedExpression("nested too deeply") from None

    def _collect_sizes(self, node: ast.expr) -> None:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                pass
            case ast.BinOp() if type(node.op) in _BINARY and not (
                isinstance(node.op, ast.Pow) and not _is_small_integer(node.right)
            ):
                self._collect_sizes(node.left)
                self._collect_sizes(node.right)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                self._collect_sizes(node.operand)
            case ast.BoolOp():
                for value in node.values:
                    self._collect_sizes(value)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                for operand in (node.left, *node.comparators):
                    self._collect_sizes(operand)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CALLS:
                for argument in node.args:
                    self._collect_sizes(argument)
            case ast.Subscript() | ast.Attribute() | ast.Name():
                self.sizes.add(_parse_size(node))
            case _:
                raise DisallowedExpression(f"{ast.unparse(node)[:80]!r}")

    def holds(self, sizes: Mapping[tuple[str, int], int]) -> bool | None:
        """Evaluate the condition at the given sizes.

        Returns:
            True or False; None if ``sizes`` lacks a size of the condition.
        """
        if not self.sizes <= sizes.keys():
            return None
        try:
            return bool(_evaluate_tree(self._tree, sizes))
        except (ArithmeticError, TypeError):
            return False


def _evaluate_tree(tree: ast.expr, sizes: Mapping[tuple[str, int], int]) -> Any:
    def evaluate_node(node: ast.expr) -> Any:
        return compute_expression(node, _OPERATORS, evaluate_leaf)

    def evaluate_leaf(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.BoolOp():
                return (all if isinstance(node.op, ast.And) else any)(map(evaluate_node, node.values))
            case ast.Compare():
                values = [evaluate_node(operand) for operand in (node.left, *node.comparators)]
                return all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, values[:-1], values[1:], strict=True))
            case ast.Call(func=ast.Name(id=name)):
                return _CALLS[name](*map(evaluate_node, node.args))
            case _:
                return sizes[_parse_size(node)]

    return evaluate_node(tree)


def _is_small_integer(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= _EXPONENT_LIMIT


def _parse_size(node: ast.expr) -> tuple[str, int]:
    """Parse a size such as ``L['x'][0].size()[1]`` into ("['x'][0]", 1), and an argument itself, such as ``L['n']``,
    into ("['n']", -1).
    """
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[], keywords=[]),
            slice=ast.Constant(value=int(dim)),
        ):
            return _parse_input_path(owner), dim
        case _:
            return _parse_input_path(node), -1


def _parse_input_path(node: ast.expr) -> str:
    match node:
        case ast.Name(id="L"):
            return ""
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() | int() as key)):
            return f"{_parse_input_path(owner)}[{key!r}]"
        case ast.Attribute(value=owner, attr=name) if not name.startswith("_"):
            return f"{_parse_input_path(owner)}.{name}"
        case _:
            raise DisallowedExpression(f"{ast.unparse(node)[:80]!r}")
