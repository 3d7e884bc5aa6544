"""Match the constants of one file with exact numbers that they may be rounded from.

A tool that folds constants stores rounded numbers. So the two files are not exactly equal. This module proposes exact
values for such constants. A proposal may be wrong. The proof then uses the exact values, and fails if they are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .field_run import ConcreteGraph, Trace, plain_attributes
from .field_values import Approx, Field, Value
from .op_call import Call
from .residues import Array

# dtype of stored numbers → half an ulp of numbers of 1 or more
_UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
# dtype of stored numbers → half of the smallest number above 0
_TINY = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134, "float64": 2.0**-1074}
# Largest numerator and denominator of the ratio of two epsilons that is read from the stored numbers
_MOST = 1000
# Relative difference up to which a multiple of a constant is compared element by element
_NEAR = 2.0**-6


@dataclass(frozen=True)
class RoundedConstant:
    """Constant that was taken as the exact number of which it is the rounded value.

    Attributes:
        name: name of the constant.
        ulps: largest difference from the exact numbers, in ulps of the constant's type.
        bound: largest difference that a computation in floats may make, in ulps.
    """

    name: str
    ulps: float
    bound: float


@dataclass(frozen=True)
class _Stored:
    """Stored constant that the other file does not store.

    Attributes:
        core: the numbers, without the repetitions along axes on which they do not vary.
    """

    name: str
    value: Value
    core: Array
    dtype: str


def match_constants(
    point: Field,
    graph: ConcreteGraph,
    trace: Trace,
    other_graph: ConcreteGraph,
    other: Trace,
    candidates: list[Value],
) -> dict[str, tuple[Value, RoundedConstant]]:
    """Propose exact values for the stored constants of ``graph`` that the other graph does not store.

    A float32 constant may be a float64 constant of the other graph. A constant may also be a multiple of a constant of
    the other graph. The multipliers are √c and 1/√c for each ratio c of two arguments of roots. For each number n of
    terms of a sum, they are n, 1/n, n/(n - 1) and (n - 1)/n.

    Args:
        trace: evaluation of ``graph``.
        other: evaluation of the other graph.
        candidates: exact values from the other graph.

    Returns:
        by the name of the constant, its exact value and the difference.
    """
    call = Call(point, "", [], {}, 21, 1)
    by_size: dict[int, list[Value]] = {}
    for value in candidates:
        by_size.setdefault(value.size, []).append(value)
    one = call.number(1.0)
    factors = {1: [one]}
    for _, value in _stored_floats(other):
        factors.setdefault(value.size, []).append(value)
    multipliers = list(_multipliers(call))
    doubles = list(_stored_doubles(other_graph, other))
    matched = {}
    for stored in _constants_without_counterpart(point, graph, trace, other):
        same = by_size.get(stored.core.size, [])
        if stored.dtype == "float32":
            same = [*same, *(value for value in doubles if value.size == stored.core.size)]
        options = _best(call, stored, same)
        if options is None and multipliers:
            several = [*factors.get(stored.core.size, []), *by_size.get(stored.core.size, [])]
            options = _best(call, stored, list(_multiples(call, stored, several, multipliers)))
        if options is not None:
            matched[stored.name] = options
    return matched


def _constants_without_counterpart(point: Field, graph: ConcreteGraph, trace: Trace, other: Trace) -> Iterator[_Stored]:
    held = {point.digest(x) for x in other.values.values() if x.is_constant and x.is_known}
    for name, value in _stored_floats(trace):
        if value.special or point.digest(value) in held:
            continue
        assert value.stored is not None
        yield _Stored(name, value, _without_repetitions(value.stored), _stored_type(name, graph, value.stored))


def _stored_doubles(graph: ConcreteGraph, trace: Trace) -> Iterator[Value]:
    """Yield the stored constants of a graph in float64."""
    for name, value in _stored_floats(trace):
        assert value.stored is not None
        if _stored_type(name, graph, value.stored) == "float64":
            yield value


def _stored_floats(trace: Trace) -> Iterator[tuple[str, Value]]:
    for name, value in trace.values.items():
        if value.stored is not None and value.kind == "f" and value.stored.dtype.kind == "f" and value.stored.size:
            yield name, value


def _without_repetitions(stored: Array) -> Array:
    """Reduce each axis along which the numbers do not vary to one place."""
    core = stored
    for axis in range(core.ndim):
        first = core.take([0], axis)
        if core.shape[axis] > 1 and (core == first).all():
            core = first
    return core


def _multipliers(call: Call) -> Iterator[Value]:
    """Yield numbers by which a tool may multiply constants."""
    for root in list(call.field.root_ratios.values()):
        yield root
        yield call.inverse(root)
    for number in _count_ratios(call.field):
        yield call.field.fraction(number)


def _count_ratios(point: Field) -> Iterator[Fraction]:
    for n in sorted(point.counts):
        if n > 1:
            yield from (Fraction(n), Fraction(1, n), Fraction(n, n - 1), Fraction(n - 1, n))


def _multiples(call: Call, stored: _Stored, factors: list[Value], multipliers: list[Value]) -> Iterator[Value]:
    """Yield the multiples of constants whose largest number is near that of a stored constant."""
    largest = float(np.abs(stored.core.astype(np.float64)).max())
    for factor in factors:
        known = call.field.approx(factor)
        if known is None:
            continue
        reference = float(np.abs(known.numbers).max(initial=0.0))
        for multiplier in multipliers:
            number = call.field.approx(multiplier)
            assert number is not None
            if abs(reference * abs(float(number.numbers.reshape(()))) - largest) <= _NEAR * largest:
                yield call.multiply(factor, multiplier)


def _best(call: Call, stored: _Stored, candidates: list[Value]) -> tuple[Value, RoundedConstant] | None:
    """Find the exact value that is nearest to a stored constant, among those that rounding explains."""
    best: tuple[Value, RoundedConstant] | None = None
    for candidate in candidates:
        for arranged in _arrangements(call, candidate, stored.core.shape):
            rounded = _compare(stored.name, stored.core, stored.dtype, call.field.approx(arranged))
            if rounded is not None and (best is None or rounded.ulps < best[1].ulps):
                best = arranged, rounded
    if best is None:
        return None
    return call.expand(best[0], stored.value.dims), best[1]


def _arrangements(call: Call, x: Value, shape: tuple[int, ...]) -> Iterator[Value]:
    """Yield the ways in which the elements of ``x`` may be stored in a given shape."""
    yield call.reshape(x, shape)
    if x.rank == 2 and min(x.dims) > 1 and (len(shape) != 2 or shape == x.dims[::-1]):
        yield call.reshape(call.transpose(x, (1, 0)), shape)


def match_epsilons(
    point: Field, graph: ConcreteGraph, other_graph: ConcreteGraph, other: Trace
) -> dict[float, tuple[Value, RoundedConstant]]:
    """Propose exact values for the epsilons of norm nodes: rational multiples of numbers of the other graph.

    Returns:
        by the stored epsilon, its exact value and the difference.
    """
    call = Call(point, "", [], {}, 21, 1)
    known = _epsilons(other_graph)
    for _, value in _stored_floats(other):
        if value.size == 1 and value.stored is not None and float(value.stored.reshape(())) > 0:
            known.add(float(value.stored.reshape(())))
    matched = {}
    for epsilon in sorted(_epsilons(graph) - known):
        best: tuple[Value, RoundedConstant] | None = None
        for number in sorted(known):
            for ratio in {*_count_ratios(point), Fraction(epsilon / number).limit_denominator(_MOST)}:
                if not 0 < ratio.numerator <= max(_MOST, ratio.denominator + 1):
                    continue
                exact = call.multiply(call.number(number), point.fraction(ratio))
                rounded = _compare(f"epsilon {epsilon:.9g}", np.array(epsilon), "float32", point.approx(exact))
                if rounded is not None and (best is None or rounded.ulps < best[1].ulps):
                    best = exact, rounded
        if best is not None:
            matched[epsilon] = best
    return matched


def _epsilons(graph: ConcreteGraph) -> set[float]:
    """Collect the epsilons of norm nodes, as float32 stores them."""
    found = set()
    for node in graph.nodes:
        if node.op_type.endswith("Normalization") and node.op_type != "LpNormalization":
            found.add(float(np.float32(plain_attributes(node).get("epsilon", 1e-5))))
    return found - {0.0}


def _compare(name: str, stored: Array, dtype: str, approx: Approx | None) -> RoundedConstant | None:
    """Compare stored numbers with the exact numbers that they may be rounded from.

    Returns:
        the difference; None if rounding does not explain it.
    """
    if approx is None:
        return None
    numbers = stored.astype(np.float64)
    if approx.numbers.any() and not numbers.any():
        # A lost epsilon is not a rounding error.
        return None
    difference = np.abs(numbers - approx.numbers)
    half_ulps = np.maximum(_half_ulps(numbers, dtype), _half_ulps(approx.numbers, dtype))
    if approx.unit == _UNITS[dtype]:
        # The error of the computation contains the rounding of its result.
        allowed = np.maximum(half_ulps, approx.error)
    else:
        allowed = half_ulps + approx.error
    # float64 computed the numbers with the same operations. Subnormal results of a float type have an absolute error.
    allowed = allowed + approx.error * 2.0**-29 + 2.0**-50 * np.abs(approx.numbers) + _TINY[dtype]
    if not (np.isfinite(allowed) & (difference <= allowed)).all():
        return None
    worst = float((difference / (2 * half_ulps)).max())
    return RoundedConstant(name, worst, float((allowed / (2 * half_ulps)).max()))


def _half_ulps(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Compute half the distance to the next number of a type.

    Returns:
        float64; at least half of the smallest number of the type.
    """
    exponents = np.frexp(np.abs(numbers))[1]
    made = np.ldexp(_UNITS[dtype], exponents - 1)
    return np.maximum(np.where(numbers == 0, 0.0, made), _TINY[dtype])


def _stored_type(name: str, graph: ConcreteGraph, stored: np.ndarray) -> str:
    kind = graph.kinds.get(name)
    return {1: "float32", 10: "float16", 16: "bfloat16", 11: "float64"}.get(kind or 0, stored.dtype.name)
