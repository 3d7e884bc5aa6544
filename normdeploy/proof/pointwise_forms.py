"""Bring elementwise functions of one number into a normal form, so that two spellings of one function look equal.

The nodes between x and y compute a ratio of polynomials in x and s. Here s = σ(P(x)), with a polynomial P and one
function σ that is not algebraic: Erf, Tanh, Sigmoid, Exp, Abs, or a clamp between 0 and 1. All coefficients are the
exact fractions of the file's constants. So two graphs with the same normal form are the same function of real numbers.
The comparison is exact arithmetic of polynomials over the rationals, without sampling. If e^u is s, then e^(n·u) is
s^n. A division by a form that may be 0 has no normal form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..storage.onnx_domains import STANDARD

# Maximum number of terms of one polynomial
_TERMS = 32
_DEGREE = 8
# Maximum number of nodes between x and y
_NODES = 24

# Polynomial in x and s: (power of x, power of s) -> coefficient; no coefficient is 0
Terms = dict[tuple[int, int], Fraction]
ATOMS = frozenset({"Erf", "Tanh", "Sigmoid", "Exp", "Abs", "Clip", "HardSigmoid"})


class NoNormalForm(Exception):
    """Raised if a computation has no normal form."""


@dataclass(frozen=True)
class RationalFunction:
    """Ratio ``above`` / ``below`` of two polynomials in x and s."""

    above: Terms
    below: Terms

    @staticmethod
    def of_terms(terms: Terms) -> RationalFunction:
        """Build a polynomial.

        Returns:
            the ratio with denominator 1.
        """
        return RationalFunction(terms, {(0, 0): Fraction(1)})

    def __add__(self, other: RationalFunction) -> RationalFunction:
        if self.below == other.below:
            return RationalFunction(_add_terms(self.above, other.above), self.below)
        return RationalFunction(
            _add_terms(_multiply_terms(self.above, other.below), _multiply_terms(other.above, self.below)),
            _multiply_terms(self.below, other.below),
        )

    def __mul__(self, other: RationalFunction) -> RationalFunction:
        return RationalFunction(_multiply_terms(self.above, other.above), _multiply_terms(self.below, other.below))

    def inverse(self) -> RationalFunction:
        """Swap numerator and denominator.

        Returns:
            1 over this function.
        """
        return RationalFunction(self.below, self.above)

    def scale(self, number: Fraction) -> RationalFunction:
        """Multiply by a number.

        Returns:
            the product; the zero polynomial for 0.
        """
        return self * RationalFunction.of_terms({(0, 0): number} if number else {})

    def is_same(self, other: RationalFunction) -> bool:
        """Return True if both are the same function: a/b = c/d if a·d = c·b."""
        return _multiply_terms(self.above, other.below) == _multiply_terms(other.above, self.below)

    def as_polynomial(self) -> dict[int, Fraction]:
        """Convert to a polynomial in x.

        Returns:
            coefficient by the power of x.

        Raises:
            NoNormalForm: the denominator is not a number, or the function depends on s.
        """
        if self.below.keys() != {(0, 0)} or any(power for _, power in self.above):
            raise NoNormalForm
        return {power: c / self.below[0, 0] for (power, _), c in self.above.items()}


X = RationalFunction.of_terms({(1, 0): Fraction(1)})
S = RationalFunction.of_terms({(0, 1): Fraction(1)})
ONE = RationalFunction.of_terms({(0, 0): Fraction(1)})


def _add_terms(a: Terms, b: Terms) -> Terms:
    made = dict(a)
    for power, c in b.items():
        made[power] = made.get(power, Fraction(0)) + c
    return _require_bounded(made)


def _multiply_terms(a: Terms, b: Terms) -> Terms:
    made: Terms = {}
    for (i, j), c in a.items():
        for (k, n), d in b.items():
            made[i + k, j + n] = made.get((i + k, j + n), Fraction(0)) + c * d
    return _require_bounded(made)


def _require_bounded(terms: Terms) -> Terms:
    bounded = {power: c for power, c in terms.items() if c}
    if len(bounded) > _TERMS or any(max(power) > _DEGREE for power in bounded):
        raise NoNormalForm
    return bounded


@dataclass(frozen=True)
class PointwiseForm:
    """Function y = ``value``(x, s) with s = ``atom``(``argument``).

    Attributes:
        atom: op type of σ.
        argument: polynomial in x, coefficient by power.
        value: ratio of polynomials in x and s.
        nodes: nodes that compute y from x, without nodes that compute constants.
    """

    atom: str
    argument: dict[int, Fraction]
    value: RationalFunction
    nodes: tuple[gs.Node, ...]


def pointwise_form(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> PointwiseForm | None:
    """Compute the normal form of ``y`` as a function of each element of ``x``.

    Returns:
        the form; None if ``y`` has no normal form or depends on other data.
    """
    reader = _PointwiseReader(graph, x)
    try:
        value = reader.read_value(y)
    except NoNormalForm:
        return None
    if reader.atom is None:
        return None
    return PointwiseForm(*reader.atom, value, tuple(reader.nodes.values()))


class _PointwiseReader:
    """Reader of the nodes between ``x`` and a result into a normal form."""

    def __init__(self, graph: Graph, x: gs.Tensor) -> None:
        self.graph = graph
        self.x = x
        self.rank = len(graph.shape(x) or ())
        self.atom: tuple[str, dict[int, Fraction]] | None = None
        self.nodes: dict[int, gs.Node] = {}
        self._known: dict[int, RationalFunction] = {}

    def read_value(self, t: gs.Tensor) -> RationalFunction:
        """Read a tensor as a function of x.

        Returns:
            the ratio of polynomials.

        Raises:
            NoNormalForm: the tensor has no normal form.
        """
        if t is self.x:
            return X
        if id(t) not in self._known:
            number = self._read_constant(t)
            self._known[id(t)] = self._read_computed(t) if number is None else ONE.scale(number)
        return self._known[id(t)]

    def _read_computed(self, t: gs.Tensor) -> RationalFunction:
        node = self.graph.producer(t)
        if node is None or (node.domain or "") not in STANDARD or len(self.nodes) >= _NODES or len(node.outputs) != 1:
            raise NoNormalForm
        self.nodes[id(node)] = node
        rule = _RULES.get(node.op)
        if rule is None:
            raise NoNormalForm
        return rule(self, node)

    def _read_constant(self, t: gs.Tensor) -> Fraction | None:
        """Read the single number of a constant, which must not increase the rank of the result."""
        if not self.graph.is_constant(t):
            return None
        if math.prod(t.shape if isinstance(t, gs.Constant) else (1,)) != 1:
            raise NoNormalForm
        known = self.graph.known_value(t)
        if (
            known is None
            or known.size != 1
            or known.ndim > self.rank
            or known.dtype.kind != "f"
            or not np.isfinite(known).all()
        ):
            raise NoNormalForm
        return Fraction(float(known.reshape(())))

    def require_number(self, t: gs.Tensor) -> Fraction:
        """Read a tensor that must be a constant.

        Returns:
            its only number, as an exact fraction.

        Raises:
            NoNormalForm: the tensor is not a constant of one number.
        """
        own = self._read_constant(t)
        if own is None:
            raise NoNormalForm
        return own

    def inverse(self, of: RationalFunction) -> RationalFunction:
        """Invert a function that is never 0.

        It must be a number, or a number plus powers of e^u or |x|, with coefficients of one sign.

        Returns:
            1/of.

        Raises:
            NoNormalForm: ``of`` may be 0.
        """
        signs = {c > 0 for c in of.above.values()}
        positive = self.atom is not None and self.atom[0] in ("Exp", "Abs") and not any(power for power, _ in of.above)
        apart = (0, 0) in of.above or (self.atom is not None and self.atom[0] == "Exp")
        if len(signs) != 1 or not apart or not (positive or of.above.keys() == {(0, 0)}):
            raise NoNormalForm
        return of.inverse()

    def use_atom(self, name: str, argument: dict[int, Fraction]) -> RationalFunction:
        """Set σ to ``name`` with this argument, or check that an earlier call set the same.

        Returns:
            s.

        Raises:
            NoNormalForm: another function or argument was used before, or the argument does not depend on x.
        """
        if not any(argument):
            # The argument does not depend on x.
            raise NoNormalForm
        if self.atom is None:
            self.atom = (name, argument)
        if self.atom != (name, argument):
            raise NoNormalForm
        return S


Rule = Callable[[_PointwiseReader, gs.Node], RationalFunction]


def _binary_rule(combine: Callable[[RationalFunction, RationalFunction], RationalFunction]) -> Rule:
    def run(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
        a, b = node.inputs
        return combine(reader.read_value(a), reader.read_value(b))

    return run


def _divide_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    a, b = node.inputs
    return reader.read_value(a) * reader.inverse(reader.read_value(b))


def _power_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    base = reader.read_value(node.inputs[0])
    exponent = reader.require_number(node.inputs[1])
    if exponent not in (1, 2, 3):
        raise NoNormalForm
    made = base
    for _ in range(int(exponent) - 1):
        made = made * base
    return made


def _atom_rule(name: str) -> Rule:
    return lambda reader, node: reader.use_atom(name, reader.read_value(node.inputs[0]).as_polynomial())


def _exponential_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    """Read e^(αx) as a power of the exponential that was read first."""
    argument = reader.read_value(node.inputs[0]).as_polynomial()
    if argument.keys() != {1}:
        raise NoNormalForm
    if reader.atom is None or reader.atom[0] != "Exp":
        return reader.use_atom("Exp", argument)
    times = argument[1] / reader.atom[1][1]
    if times.denominator != 1 or not 0 < abs(times) <= _DEGREE:
        raise NoNormalForm
    power = RationalFunction.of_terms({(0, abs(int(times))): Fraction(1)})
    if times > 0:
        return power
    return reader.inverse(power)


def _absolute_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    argument = reader.read_value(node.inputs[0]).as_polynomial()
    if argument.keys() != {1}:
        raise NoNormalForm
    return reader.use_atom("Abs", {1: Fraction(1)}).scale(abs(argument[1]))


def _clip_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    attrs = reader.graph.attrs(node)
    ends = [reader.require_number(t) for t in node.inputs[1:] if not t.is_empty()] or [
        _exact_fraction(attrs.get(n)) for n in ("min", "max")
    ]
    if len(ends) != 2:
        raise NoNormalForm
    return _clamp_form(reader, node.inputs[0], *ends)


def _min_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    """Read Min(Relu(t), b), a spelling of ReLU6."""
    if len(node.inputs) != 2:
        raise NoNormalForm
    for t, other in (node.inputs, node.inputs[::-1]):
        below = reader.graph.producer(t)
        if below is not None and below.op == "Relu" and (below.domain or "") in STANDARD:
            reader.nodes[id(below)] = below
            return _clamp_form(reader, below.inputs[0], Fraction(0), reader.require_number(other))
    raise NoNormalForm


def _clamp_form(reader: _PointwiseReader, t: gs.Tensor, low: Fraction, high: Fraction) -> RationalFunction:
    """Read t clamped between two numbers as low + (high − low)·s.

    s is (t − low)/(high − low) clamped between 0 and 1.
    """
    if not low < high:
        raise NoNormalForm
    inner = (reader.read_value(t) + ONE.scale(-low)).scale(1 / (high - low))
    return reader.use_atom("Clip", inner.as_polynomial()).scale(high - low) + ONE.scale(low)


def _hard_sigmoid_rule(reader: _PointwiseReader, node: gs.Node) -> RationalFunction:
    attrs = reader.graph.attrs(node)
    alpha = _exact_fraction(attrs.get("alpha", float(np.float32(0.2))))
    beta = _exact_fraction(attrs.get("beta", 0.5))
    return reader.use_atom("Clip", (reader.read_value(node.inputs[0]).scale(alpha) + ONE.scale(beta)).as_polynomial())


def _exact_fraction(number: Any) -> Fraction:
    if not isinstance(number, float) or not math.isfinite(number):
        raise NoNormalForm
    return Fraction(number)


_RULES: dict[str, Rule] = {
    "Add": _binary_rule(lambda a, b: a + b),
    "Sub": _binary_rule(lambda a, b: a + b.scale(Fraction(-1))),
    "Mul": _binary_rule(lambda a, b: a * b),
    "Div": _divide_rule,
    "Neg": lambda reader, node: reader.read_value(node.inputs[0]).scale(Fraction(-1)),
    "Reciprocal": lambda reader, node: reader.inverse(reader.read_value(node.inputs[0])),
    "Identity": lambda reader, node: reader.read_value(node.inputs[0]),
    "Pow": _power_rule,
    "Exp": _exponential_rule,
    "Abs": _absolute_rule,
    "Clip": _clip_rule,
    "Min": _min_rule,
    "HardSigmoid": _hard_sigmoid_rule,
    **{name: _atom_rule(name) for name in ("Erf", "Tanh", "Sigmoid")},
}
ALGEBRA: Sequence[str] = tuple(_RULES.keys() - ATOMS)
