"""Let torch.export see that a minimum or maximum of sizes is always the same argument.

torch compares the strides of tensors while it traces, and keeps a comparison that it can't decide as a guard on the
dims. It does not know that Min(8·n + 8, 16·n + 16) is 8·n + 8 for each n ≥ 0. So the guard
Eq(Min(8·n + 8, 16·n + 16), 8·n + 8), which holds for each size, ended an export: torch's solver of dims has no Min.

An argument is dropped if the difference to another argument has one sign in the ranges of all symbols. torch computes
the bounds of the difference by interval arithmetic, after it is expanded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Max, Min


@contextlib.contextmanager
def decide_extremes() -> Iterator[None]:
    """Drop arguments of Min and Max that are never the result from each expression that torch evaluates."""
    evaluate = ShapeEnv._evaluate_expr

    @functools.wraps(evaluate)
    def evaluate_decided(env: ShapeEnv, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        return evaluate(env, _drop_decided_arguments(env, orig_expr), *args, **kwargs)

    ShapeEnv._evaluate_expr = evaluate_decided  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShapeEnv._evaluate_expr = evaluate  # type: ignore[method-assign]


def _drop_decided_arguments(env: ShapeEnv, expression: sympy.Basic) -> sympy.Basic:
    """Simplify each Min and Max in ``expression``, the innermost first."""
    kind = type(expression)
    if not expression.has(Min, Max):
        return expression
    arguments = [_drop_decided_arguments(env, argument) for argument in expression.args]
    if kind not in (Min, Max):
        return expression.func(*arguments)
    kept = list(arguments)
    for first, second in itertools.combinations(arguments, 2):
        if first in kept and second in kept:
            bounds = env.bound_sympy(sympy.expand(first - second))
            if bounds.lower >= 0:
                kept.remove(first if kind is Min else second)
            elif bounds.upper <= 0:
                kept.remove(second if kind is Min else first)
    return kind(*kept)
