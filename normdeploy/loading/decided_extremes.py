"""Let torch.export see that a minimum or maximum of sizes is always the same argument, or a quotient the same number.

torch compares the strides of tensors while it traces, and keeps a comparison that it can't decide as a guard on the
dims. It does not know that Min(8·n + 8, 16·n + 16) is 8·n + 8 for each n ≥ 0. So the guard
Eq(Min(8·n + 8, 16·n + 16), 8·n + 8), which holds for each size, ended an export: torch's solver of dims has no Min.

An argument is dropped if the difference to another argument has one sign in the ranges of all symbols. torch computes
the bounds of the difference by interval arithmetic, after it is expanded. The ranges begin at 0: torch's own ranges
begin at 2, although the trace is used for the sizes 0 and 1 too.

A quotient is treated alike. torch.chunk parts 2·n rows into 2 parts of (2·n + 1) // 2 rows, which is n. It counts the
parts again, as (3·n − 1) // n. That is 2 for each n ≥ 1, because 2·n ≤ 3·n − 1 < 3·n.

The arguments of an extreme may be one size in two forms: a convolution counts 1 + (n − 1) // 2 steps, and a pooling
(n + 1) // 2. So whole multiples of the divisor are moved out of each quotient before the arguments are compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from .size_conditions import dim_of_symbol


@contextlib.contextmanager
def decide_extremes() -> Iterator[None]:
    """Drop arguments of Min and Max that are never the result from each expression that torch evaluates."""
    evaluate = getattr(ShapeEnv, "_evaluate_expr", None)
    if evaluate is None:
        # Another version of torch may have another name. The dims are then limited more than necessary.
        yield
        return

    @functools.wraps(evaluate)
    def evaluate_decided(env: ShapeEnv, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        for first, second in _iter_equal_dims(env, orig_expr):
            # torch then replaces the second symbol by the first one.
            evaluate(env, sympy.Eq(first, second))
        expression = env.replace(orig_expr)
        if expression.has(Min, Max):
            expression = _move_multiples_out(expression)
        return evaluate(env, _drop_decided_arguments(env, expression), *args, **kwargs)

    _hide_from_torch(evaluate_decided)
    ShapeEnv._evaluate_expr = evaluate_decided  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShapeEnv._evaluate_expr = evaluate  # type: ignore[method-assign]


def _hide_from_torch(function: Callable[..., Any]) -> None:
    """Let torch look past the frame of a function for the line of the model that needs a condition.

    torch keeps an ``assert`` on values as a condition of the program, and recognizes it by the bytecode of that line.
    """
    files = getattr(symbolic_shapes, "uninteresting_files", None)
    if files is not None:
        files().add(function.__code__.co_filename)


def _iter_equal_dims(env: ShapeEnv, expression: sympy.Basic) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Yield pairs of symbols in ``expression`` that represent the same dim.

    torch has a symbol for each input with the dim, and learns only at the end of the trace that they are equal.
    """
    known: dict[str, sympy.Symbol] = {}
    for symbol in sorted(expression.free_symbols, key=str):
        name = dim_of_symbol(env, symbol)
        if name and known.setdefault(name, symbol) != symbol:
            yield known[name], symbol


def _drop_decided_arguments(env: ShapeEnv, expression: sympy.Basic) -> sympy.Basic:
    """Simplify each Min, Max and FloorDiv in ``expression``, the innermost first."""
    kind = type(expression)
    if not expression.has(Min, Max, FloorDiv):
        return expression
    arguments = [_drop_decided_arguments(env, argument) for argument in expression.args]
    if kind is FloorDiv:
        return _decide_quotient(env, *arguments)
    if kind not in (Min, Max):
        return expression.func(*arguments)
    kept = list(arguments)
    for first, second in itertools.combinations(arguments, 2):
        if first in kept and second in kept:
            bounds = _bound(env, sympy.expand(first - second))
            if bounds.lower >= 0:
                kept.remove(first if kind is Min else second)
            elif bounds.upper <= 0:
                kept.remove(second if kind is Min else first)
    return kind(*kept)


def _decide_quotient(env: ShapeEnv, dividend: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """Return the number or sum of sizes to which dividend // divisor is equal for all sizes, or the quotient itself."""
    quotient = FloorDiv(dividend, divisor)
    if divisor.is_Integer:
        candidate = _whole_multiples(dividend, divisor)
    else:
        candidate = quotient.xreplace(env.backed_var_to_val)
    if not candidate.is_Integer and candidate.has(FloorDiv):
        return quotient
    # No size is divided by 0.
    least = {divisor: 1} if divisor.is_Symbol else {}
    remainder = sympy.expand(dividend - candidate * divisor)
    if _bound(env, remainder, least).lower >= 0 and _bound(env, sympy.expand(divisor - remainder), least).lower > 0:
        return candidate
    return quotient


def _move_multiples_out(expression: sympy.Basic) -> sympy.Basic:
    """Write each quotient in ``expression`` in one form: (k·d + r) // d becomes k + r // d, for a number d."""
    if not expression.has(FloorDiv):
        return expression
    arguments = [_move_multiples_out(argument) for argument in expression.args]
    if type(expression) is not FloorDiv or not arguments[1].is_Integer:
        return expression.func(*arguments)
    dividend, divisor = arguments
    multiples = _whole_multiples(dividend, divisor)
    return multiples + FloorDiv(sympy.expand(dividend - multiples * divisor), divisor)


def _whole_multiples(dividend: sympy.Expr, divisor: sympy.Integer) -> sympy.Expr:
    """Divide the factor of each term by a number, and drop the remainders."""
    terms = sympy.expand(dividend).as_coefficients_dict()
    return sympy.Add(*(factor // divisor * term for term, factor in terms.items()))


def _bound(env: ShapeEnv, expression: sympy.Expr, least: Mapping[sympy.Basic, int] | None = None) -> ValueRanges[Any]:
    """Bound an expression of sizes.

    Args:
        least: smallest size of a symbol; all other sizes of inputs may be 0.
    """
    ranges = []
    for symbol in sorted(expression.free_symbols, key=str):
        known = env.var_to_range.get(symbol, ValueRanges.unknown_int())
        # Only the sizes of inputs are never negative.
        lower = (least or {}).get(symbol, 0) if symbol in env.var_to_sources else min(0, known.lower)
        ranges.append((symbol, lower, known.upper))
    return _bound_in_ranges(expression, tuple(ranges))


@functools.lru_cache(maxsize=2**14)
def _bound_in_ranges(
    expression: sympy.Expr, ranges: tuple[tuple[sympy.Symbol, sympy.Expr, sympy.Expr], ...]
) -> ValueRanges[Any]:
    """Bound an expression. torch asks for the same sizes again and again.

    Args:
        ranges: each symbol with its smallest and its largest value.
    """
    return bound_sympy(expression, {symbol: ValueRanges(lower, upper) for symbol, lower, upper in ranges})
