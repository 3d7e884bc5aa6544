"""Evaluate matrix products at a random point."""

from __future__ import annotations

import math

import numpy as np

from ...evaluate.evaluator_core import decode_text
from .field_values import NotEvaluated, Value
from .op_call import Call


def evaluate_matmul(call: Call) -> Value:
    return call.matmul(call.data(0), call.data(1))


def evaluate_gemm(call: Call) -> Value:
    a, b, c = call.data(0), call.data(1), call.optional(2)
    if call.attrs.get("transA"):
        a = call.transpose(a, (1, 0))
    if call.attrs.get("transB"):
        b = call.transpose(b, (1, 0))
    y = call.matmul(a, b)
    alpha = float(np.float32(call.attrs.get("alpha", 1.0)))
    beta = float(np.float32(call.attrs.get("beta", 1.0)))
    if alpha != 1.0:
        y = call.multiply(call.number(alpha), y)
    if c is None or beta == 0.0:
        return y
    return call.add(y, c if beta == 1.0 else call.multiply(call.number(beta), c))


def evaluate_einsum(call: Call) -> Value:
    equation = decode_text(call.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    values = [call.data(i) for i in range(len(call.inputs))]
    simple = arrow and "." not in equation and all(len(set(t)) == len(t) for t in (*terms, right))
    if not simple or len(terms) != len(values) or len(terms) > 2:
        raise NotEvaluated(f"Einsum {equation!r}")
    if len(terms) == 1:
        terms.append("")
        values.append(call.number(1.0))
    return _contract_pair(call, values, terms, right)


def _contract_pair(call: Call, values: list[Value], terms: list[str], right: str) -> Value:
    """Compute an Einsum of two inputs as a matrix product."""
    first, second = terms
    sizes = {c: n for v, t in zip(values, terms, strict=True) for c, n in zip(t, v.dims, strict=True)}
    alone = [c for t, other in ((first, second), (second, first)) for c in t if c not in other and c not in right]
    for i, term in enumerate(terms):
        dropped = [term.index(c) for c in term if c in alone]
        if dropped:
            values[i] = call.sum(values[i], dropped, keepdims=False)
            terms[i] = "".join(c for c in term if c not in alone)
    first, second = terms
    batch = [c for c in first if c in second and c in right]
    inner = [c for c in first if c in second and c not in right]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]

    def arrange(value: Value, term: str, *groups: list[str]) -> Value:
        moved = call.transpose(value, [term.index(c) for group in groups for c in group])
        return call.reshape(moved, [math.prod(sizes[c] for c in group) for group in groups])

    y = call.matmul(arrange(values[0], first, batch, rows, inner), arrange(values[1], second, batch, inner, columns))
    letters = [*batch, *rows, *columns]
    y = call.reshape(y, [sizes[c] for c in letters])
    return call.transpose(y, [letters.index(c) for c in right])
