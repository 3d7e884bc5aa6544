"""Functions of one number that a graph computes element by element, in a normal form: however they are spelled, equal
ones look equal.

A graph between x and y is a ratio of polynomials in x and s, where s = σ(P(x)) for one function σ that is no algebra
(Erf, Tanh, Sigmoid, Exp, Abs, or a clamp between 0 and 1) and a polynomial P. All coefficients are the exact fractions
that the constants of the file are, so that two of one normal form are one function of real numbers: the ring of
polynomials over the rationals decides it, with no sampling. e^(n·u) is s^n where e^u is s. Nothing is divided by what
may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..domains import STANDARD
from ..graphs.graph import Graph

_TERMS = 32  # of one polynomial
_DEGREE = 8
_NODES = 24  # between x and y

Terms = dict[tuple[int, int], Fraction]  # (power of x, power of s) -> coefficient, none of them 0
ATOMS = frozenset({"Erf", "Tanh", "Sigmoid", "Exp", "Abs", "Clip", "HardSigmoid"})


class NoForm(Exception):
    """What is computed has no normal form of this kind."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of two polynomials in x and s."""

    above: Terms
    below: Terms

    @staticmethod
    def of(terms: Terms) -> Ratio:
        return Ratio(terms, {(0, 0): Fraction(1)})

    def __add__(self, other: Ratio) -> Ratio:
        if self.below == other.below:
            return Ratio(_sum(self.above, other.above), self.below)
        return Ratio(
            _sum(_product(self.above, other.below), _product(other.above, self.below)),
            _product(self.below, other.below),
        )

    def __mul__(self, other: Ratio) -> Ratio:
        return Ratio(_product(self.above, other.above), _product(self.below, other.below))

    def inverse(self) -> Ratio:
        return Ratio(self.below, self.above)

    def times(self, number: Fraction) -> Ratio:
        return self * Ratio.of({(0, 0): number} if number else {})

    def same(self, other: Ratio) -> bool:
        """Whether the two are one function: a/b = c/d where a·d = c·b."""
        return _product(self.above, other.below) == _product(other.above, self.below)

    def polynomial(self) -> dict[int, Fraction]:
        """Power of x -> coefficient.

        Raises:
            NoForm: it is none, or holds s.
        """
        if self.below.keys() != {(0, 0)} or any(power for _, power in self.above):
            raise NoForm
        return {power: c / self.below[0, 0] for (power, _), c in self.above.items()}


X = Ratio.of({(1, 0): Fraction(1)})
S = Ratio.of({(0, 1): Fraction(1)})
ONE = Ratio.of({(0, 0): Fraction(1)})


def _sum(a: Terms, b: Terms) -> Terms:
    made = dict(a)
    for power, c in b.items():
        made[power] = made.get(power, Fraction(0)) + c
    return _bounded(made)


def _product(a: Terms, b: Terms) -> Terms:
    made: Terms = {}
    for (i, j), c in a.items():
        for (k, n), d in b.items():
            made[i + k, j + n] = made.get((i + k, j + n), Fraction(0)) + c * d
    return _bounded(made)


def _bounded(terms: Terms) -> Terms:
    bounded = {power: c for power, c in terms.items() if c}
    if len(bounded) > _TERMS or any(max(power) > _DEGREE for power in bounded):
        raise NoForm
    return bounded


@dataclass(frozen=True)
class Form:
    """y as ``value`` of x and s = ``atom``(``argument``), and the nodes that compute it, those of constants left
    out."""

    atom: str
    argument: dict[int, Fraction]  # a polynomial in x: power -> coefficient
    value: Ratio
    nodes: tuple[gs.Node, ...]


def form_of(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> Form | None:
    """The normal form of ``y`` as a function of each element of ``x``; None where it has none, or hangs on other
    data."""
    reader = _Reader(graph, x)
    try:
        value = reader.value(y)
    except NoForm:
        return None
    if reader.atom is None:
        return None
    return Form(*reader.atom, value, tuple(reader.nodes.values()))


class _Reader:
    def __init__(self, graph: Graph, x: gs.Tensor) -> None:
        self.graph, self.x = graph, x
        self.rank = len(graph.shape(x) or ())
        self.atom: tuple[str, dict[int, Fraction]] | None = None
        self.nodes: dict[int, gs.Node] = {}
        self._known: dict[int, Ratio] = {}

    def value(self, t: gs.Tensor) -> Ratio:
        if t is self.x:
            return X
        if id(t) not in self._known:
            number = self._number(t)
            self._known[id(t)] = self._computed(t) if number is None else ONE.times(number)
        return self._known[id(t)]

    def _computed(self, t: gs.Tensor) -> Ratio:
        node = self.graph.producer(t)
        if node is None or (node.domain or "") not in STANDARD or len(self.nodes) >= _NODES or len(node.outputs) != 1:
            raise NoForm
        self.nodes[id(node)] = node
        rule = _RULES.get(node.op)
        if rule is None:
            raise NoForm
        return rule(self, node)

    def _number(self, t: gs.Tensor) -> Fraction | None:
        """The one number that a constant holds, which must not give the result another rank."""
        if not self.graph.is_constant(t):
            return None
        if math.prod(t.shape if isinstance(t, gs.Constant) else (1,)) != 1:
            raise NoForm
        known = self.graph.known(t)
        if (
            known is None
            or known.size != 1
            or known.ndim > self.rank
            or known.dtype.kind != "f"
            or not np.isfinite(known).all()
        ):
            raise NoForm
        return Fraction(float(known.reshape(())))

    def number(self, t: gs.Tensor) -> Fraction:
        own = self._number(t)
        if own is None:
            raise NoForm
        return own

    def inverse(self, of: Ratio) -> Ratio:
        """1 over what is never 0: a number, or a sum of powers of e^u or |x| and a number, all of one sign."""
        signs = {c > 0 for c in of.above.values()}
        positive = self.atom is not None and self.atom[0] in ("Exp", "Abs") and not any(power for power, _ in of.above)
        apart = (0, 0) in of.above or (self.atom is not None and self.atom[0] == "Exp")
        if len(signs) != 1 or not apart or not (positive or of.above.keys() == {(0, 0)}):
            raise NoForm
        return of.inverse()

    def of_atom(self, name: str, argument: dict[int, Fraction]) -> Ratio:
        """s, where it is this function of this argument, or there was none yet."""
        if not any(argument):
            raise NoForm  # of no x
        if self.atom is None:
            self.atom = (name, argument)
        if self.atom != (name, argument):
            raise NoForm
        return S


Rule = Callable[[_Reader, gs.Node], Ratio]


def _binary(combine: Callable[[Ratio, Ratio], Ratio]) -> Rule:
    def run(reader: _Reader, node: gs.Node) -> Ratio:
        a, b = node.inputs
        return combine(reader.value(a), reader.value(b))

    return run


def _quotient(reader: _Reader, node: gs.Node) -> Ratio:
    a, b = node.inputs
    return reader.value(a) * reader.inverse(reader.value(b))


def _power(reader: _Reader, node: gs.Node) -> Ratio:
    base, exponent = reader.value(node.inputs[0]), reader.number(node.inputs[1])
    if exponent not in (1, 2, 3):
        raise NoForm
    made = base
    for _ in range(int(exponent) - 1):
        made = made * base
    return made


def _atom(name: str) -> Rule:
    return lambda reader, node: reader.of_atom(name, reader.value(node.inputs[0]).polynomial())


def _exponential(reader: _Reader, node: gs.Node) -> Ratio:
    """e^(αx), as a power of that which was met first."""
    argument = reader.value(node.inputs[0]).polynomial()
    if argument.keys() != {1}:
        raise NoForm
    if reader.atom is None or reader.atom[0] != "Exp":
        return reader.of_atom("Exp", argument)
    times = argument[1] / reader.atom[1][1]
    if times.denominator != 1 or not 0 < abs(times) <= _DEGREE:
        raise NoForm
    power = Ratio.of({(0, abs(int(times))): Fraction(1)})
    return power if times > 0 else reader.inverse(power)


def _absolute(reader: _Reader, node: gs.Node) -> Ratio:
    argument = reader.value(node.inputs[0]).polynomial()
    if argument.keys() != {1}:
        raise NoForm
    return reader.of_atom("Abs", {1: Fraction(1)}).times(abs(argument[1]))


def _clip(reader: _Reader, node: gs.Node) -> Ratio:
    attrs = reader.graph.attrs(node)
    ends = [reader.number(t) for t in node.inputs[1:] if not t.is_empty()] or [
        _exact(attrs.get(n)) for n in ("min", "max")
    ]
    if len(ends) != 2:
        raise NoForm
    return _clamped(reader, node.inputs[0], *ends)


def _least(reader: _Reader, node: gs.Node) -> Ratio:
    """Min(Relu(t), b), as ReLU6 is written."""
    if len(node.inputs) != 2:
        raise NoForm
    for t, other in (node.inputs, node.inputs[::-1]):
        below = reader.graph.producer(t)
        if below is not None and below.op == "Relu" and (below.domain or "") in STANDARD:
            reader.nodes[id(below)] = below
            return _clamped(reader, below.inputs[0], Fraction(0), reader.number(other))
    raise NoForm


def _clamped(reader: _Reader, t: gs.Tensor, low: Fraction, high: Fraction) -> Ratio:
    """t between two numbers, as low + (high − low)·s, where s is (t − low)/(high − low) between 0 and 1."""
    if not low < high:
        raise NoForm
    inner = (reader.value(t) + ONE.times(-low)).times(1 / (high - low))
    return reader.of_atom("Clip", inner.polynomial()).times(high - low) + ONE.times(low)


def _hard_sigmoid(reader: _Reader, node: gs.Node) -> Ratio:
    attrs = reader.graph.attrs(node)
    alpha, beta = _exact(attrs.get("alpha", float(np.float32(0.2)))), _exact(attrs.get("beta", 0.5))
    return reader.of_atom("Clip", (reader.value(node.inputs[0]).times(alpha) + ONE.times(beta)).polynomial())


def _exact(number: Any) -> Fraction:
    if not isinstance(number, float) or not math.isfinite(number):
        raise NoForm
    return Fraction(number)


_RULES: dict[str, Rule] = {
    "Add": _binary(lambda a, b: a + b),
    "Sub": _binary(lambda a, b: a + b.times(Fraction(-1))),
    "Mul": _binary(lambda a, b: a * b),
    "Div": _quotient,
    "Neg": lambda reader, node: reader.value(node.inputs[0]).times(Fraction(-1)),
    "Reciprocal": lambda reader, node: reader.inverse(reader.value(node.inputs[0])),
    "Identity": lambda reader, node: reader.value(node.inputs[0]),
    "Pow": _power,
    "Exp": _exponential,
    "Abs": _absolute,
    "Clip": _clip,
    "Min": _least,
    "HardSigmoid": _hard_sigmoid,
    **{name: _atom(name) for name in ("Erf", "Tanh", "Sigmoid")},
}
ALGEBRA: Sequence[str] = tuple(_RULES.keys() - ATOMS)
