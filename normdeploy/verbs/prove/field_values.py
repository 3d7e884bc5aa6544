"""Define the values of a field evaluation.

A value is known in one of three ways: as numbers (``stored``), as residues at random points (``residues``), or only by
its term (``digest``). Equal digests mean equal terms.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np

from ...graphs.symbolic_sizes import Size, product_of_sizes
from .float_errors import UNITS, Approx
from .residues import BITS, PRIME_BITS, Array, RandomFunctions, Residues
from .root_ratios import RootArguments, fraction_residues

# Axis as a product of factors in row-major order: () for size 1, else numbers above 1 and open sizes
Axis = tuple[Size, ...]

# dtype → ONNX's number of it
ELEMENT_TYPES = {
    **{"float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9},
    **{"float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16},
}
_INT64 = 7

EXACT_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


class Sign(IntEnum):
    """Knowledge about the sign of all elements at every real input."""

    UNKNOWN = 0
    NOT_NEGATIVE = 1
    POSITIVE = 2


class OutOfTime(Exception):
    """Raised if the time limit of a proof is reached."""


class CastRounding(IntEnum):
    """Casts to a narrower floating type that change numbers. Exact Casts do not change them.

    Attributes:
        ALL: every such Cast rounds.
        CONSTANTS: only Casts of stored constants round.
        NONE: no Cast rounds.
    """

    ALL = 0
    CONSTANTS = 1
    NONE = 2


class NotEvaluated(Exception):
    """Raised if the field can't evaluate a node. The node then counts as an unknown function of its inputs."""


@dataclass(frozen=True)
class Degree:
    """Bound of the degree and height of a value as a quotient of polynomials.

    All elements of a value have the common divisor ∏ Tᵉ over ``poles``: T is the product of all elements of a tensor
    of divisors, and e its exponent. The numerator's degree is at most ``excess`` plus that of this divisor.

    Attributes:
        excess: degree of the numerator beyond that of the divisor.
        height: bits of the coefficients.
        poles: exponent of each tensor of divisors, by its key.
        sums: maximum number of sums over each open size in one product.
    """

    excess: int = 0
    height: int = 0
    poles: Mapping[bytes, int] = field(default_factory=dict)
    sums: Mapping[Size, int] = field(default_factory=dict)

    def times(self, other: Degree) -> Degree:
        """Return the bound of a product."""
        poles = dict(self.poles)
        for key, exponent in other.poles.items():
            poles[key] = poles.get(key, 0) + exponent
        sums = dict(self.sums)
        for size, count in other.sums.items():
            sums[size] = sums.get(size, 0) + count
        return Degree(self.excess + other.excess, self.height + other.height, poles, sums)

    def plus(self, other: Degree, terms: int = 2) -> Degree:
        """Return the bound of a sum of ``terms`` terms."""
        poles = dict(self.poles)
        for key, exponent in other.poles.items():
            poles[key] = max(poles.get(key, 0), exponent)
        height = max(self.height, other.height) + terms.bit_length()
        sums = dict(self.sums)
        for size, count in other.sums.items():
            sums[size] = max(sums.get(size, 0), count)
        return Degree(max(self.excess, other.excess), height, poles, sums)

    def summed(self, sizes: Iterable[Size]) -> Degree:
        """Return the bound of a sum over axes of open sizes."""
        sums = dict(self.sums)
        for size in sizes:
            sums[size] = sums.get(size, 0) + 1
        return Degree(self.excess + len(sums), self.height, self.poles, sums)


_CONSTANT = Degree(0, 64)
_FRESH = Degree(1, 0)


@dataclass(eq=False)
class Value:
    """Value of one tensor.

    Attributes:
        shape: shape of the residues; None if it is unknown. An open size has a few points.
        kind: "f" for floats, "i" for integers, "b" for booleans, "o" for all else.
        stored: the numbers, if they are constants or follow from sizes.
        residues: int64 with shape (primes, *shape); None if they are not computed.
        approx: numbers of a constant that was computed from constants.
        special: the value may be infinite or NaN, and each such number is an unknown residue.
        axes: factors of the axes; None if no axis has an open size.
        square_of: the value is the square of this value.
        root_of: the value is the root of this value.
        moment: the value is a sum of squares, times a constant: the value that was squared, and the summed axes.
        elem: ONNX's number of the element type; 0 if it is unknown.
        wraps: the integers may have overflowed. Then they equal the residues modulo two to the bits of the type only.
        fits: ONNX's number of a narrower floating type that holds the numbers exactly; 0 if there is none.
    """

    shape: tuple[int, ...] | None
    kind: str
    stored: Array | None = None
    residues: Array | None = None
    digest: bytes = b""
    approx: Approx | None = None
    degree: Degree = _FRESH
    sign: Sign = Sign.UNKNOWN
    special: bool = False
    axes: tuple[Axis, ...] | None = None
    square_of: Value | None = None
    moment: tuple[Value, tuple[int, ...]] | None = None
    root_of: Value | None = None
    elem: int = 0
    wraps: bool = False
    fits: int = 0

    @property
    def is_open(self) -> bool:
        """Return True if an axis has an open size."""
        return self.axes is not None

    @property
    def is_known(self) -> bool:
        """Return True if numbers or residues are known."""
        return self.stored is not None or self.residues is not None

    @property
    def is_constant(self) -> bool:
        """Return True if the value does not depend on inputs."""
        return self.stored is not None or self.approx is not None

    @property
    def points(self) -> tuple[int, ...]:
        """Return the shape of the residues.

        Raises:
            NotEvaluated: it is unknown.
        """
        if self.shape is None:
            raise NotEvaluated("the shape of an input is unknown")
        return self.shape

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the shape of a value without open sizes.

        Raises:
            NotEvaluated: a size is open or unknown.
        """
        if self.axes is not None:
            raise NotEvaluated("the op is not supported for open sizes")
        return self.points

    @property
    def rank(self) -> int:
        """Return the number of axes."""
        return len(self.points)

    @property
    def size(self) -> int:
        """Return the number of elements of a value without open sizes."""
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def factors(self) -> tuple[Axis, ...]:
        """Return the factors of all axes."""
        if self.axes is not None:
            return self.axes
        return tuple(map(axis_of_length, self.points))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return the size of each axis."""
        return tuple(product_of_sizes(axis) for axis in self.factors)


def axis_of_length(n: int) -> Axis:
    """Make an axis of a fixed length."""
    return () if n == 1 else (Size.from_int(n),)


def is_open_axis(axis: Axis) -> bool:
    """Return True if an axis has an open factor."""
    return any(size.constant_value is None for size in axis)


def closed_if_static(axes: Iterable[Axis]) -> tuple[Axis, ...] | None:
    """Merge neighboring fixed factors.

    Returns:
        the axes; None if no size is open.
    """
    merged = []
    for axis in axes:
        made: list[Size] = []
        for size in axis:
            if size == 1:
                continue
            if made and size.constant_value is not None and made[-1].constant_value is not None:
                made[-1] = made[-1] * size
            else:
                made.append(size)
        merged.append(tuple(made))
    return tuple(merged) if any(map(is_open_axis, merged)) else None


def joint_axes(values: Iterable[Value]) -> tuple[Axis, ...] | None:
    """Broadcast the axes of values.

    Returns:
        the axes; None if no size is open.

    Raises:
        NotEvaluated: two sizes may differ.
    """
    given = list(values)
    if not any(x.is_open for x in given):
        return None
    rank = max(x.rank for x in given)
    joined: list[Axis] = [()] * rank
    for x in given:
        for i, axis in enumerate(x.factors, rank - x.rank):
            if not axis or axis == joined[i]:
                continue
            if joined[i]:
                raise NotEvaluated("sizes that may differ")
            joined[i] = axis
    return tuple(joined)


@dataclass(frozen=True)
class Extremum:
    """Largest or smallest elements of a value along axes.

    Attributes:
        name: "max" or "min".
        of: the value.
        axes: the axes, not negative.
    """

    name: str
    of: Value
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """Arguments at which a side is not defined everywhere, as hashes of their residues.

    Attributes:
        found: kind of argument ("divisor", "root", "logarithm", ...) → the hashes.
    """

    found: dict[str, set[int]] = field(default_factory=dict)

    def add(self, kind: str, keys: Array) -> None:
        """Record the keys of all elements of an argument."""
        self.found.setdefault(kind, set()).update(np.unique(keys[0]).tolist())


class Field:
    """Random point of the proof: primes, unknown functions and counts of the error probability.

    Attributes:
        arithmetic: arithmetic modulo the primes.
        unknown: unknown functions.
        facts: arguments at which the side under evaluation is not defined everywhere.
        shared: hashes of large matrices that both files store. They count as unknown functions, which is much faster
            than exact products.
        limits: open sizes, each with the largest size for which the proof holds.
        safe: arguments that are valid at every real input.
        poles: key of a tensor of divisors → the degree and the height of the product of its elements.
        casts: Casts to a narrower floating type that change numbers.
        root_arguments: arguments of roots so far.
        root_ratios: 1/√c for each ratio c of two arguments of roots.
        bases: values by the digests of their positive multiples.
        extrema: largest and smallest elements along axes, by the digests of these values.
        constant_rows: digest of a condition → rows that are constant wherever the condition is true.
        counts: numbers of terms of sums over fixed sizes.
        body_constants: exact constants inside the functions that define ops, by digest.
        exact_numbers: exact values of epsilons that the file under evaluation stores rounded, by the stored number.
        exact_casts: types of the Casts of the node under evaluation that would round but were exact.
    """

    def __init__(
        self,
        primes: tuple[int, ...],
        seed: int,
        open_points: int = 4,
        shared: frozenset[bytes] = frozenset(),
        *,
        casts: CastRounding = CastRounding.ALL,
        deadline: float = math.inf,
    ) -> None:
        self._deadline = deadline
        self.casts = casts
        self.exact_casts: set[int] = set()
        self.open_points = open_points
        self._shared = shared
        # The arrays are kept, so that no other array gets their address.
        self._hashes: dict[tuple[object, ...], tuple[bytes, Array]] = {}
        # Points that the few-points lemma requires
        self.required_points = 0
        self.arithmetic = Residues(primes)
        self.unknown = RandomFunctions(self.arithmetic, seed)
        self.root_arguments = RootArguments(self.arithmetic)
        self.root_ratios: dict[Fraction, Value] = {}
        self.exact_numbers: Mapping[float, Value] = {}
        self.bases: dict[bytes, Value] = {}
        self.extrema: dict[bytes, Extremum] = {}
        self.constant_rows: dict[bytes, tuple[Extremum, ...]] = {}
        self.counts: set[int] = set()
        self.body_constants: dict[bytes, Value] = {}
        self.facts = Facts()
        self.safe = Facts()
        self.limits: set[tuple[Size, int]] = set()
        self.poles: dict[bytes, tuple[int, int]] = {}
        # Elements to which unknown functions were applied
        self._applied = 0
        self._degree = 1
        self._height = 64

    def check_time(self) -> None:
        """Check the time limit.

        Raises:
            OutOfTime: it is reached.
        """
        if time.process_time() > self._deadline:
            raise OutOfTime

    def shared_hash(self, x: Value) -> bytes | None:
        """Return the hash of a large matrix that both files store; None for any other value."""
        if not self._shared or x.stored is None or not is_large_matrix(x.stored):
            return None
        place = (x.stored.__array_interface__["data"][0], x.stored.shape, x.stored.strides)
        if place not in self._hashes:
            self._hashes[place] = hash_matrix(x.stored), x.stored
        found = self._hashes[place][0]
        return found if found in self._shared else None

    # ------------------------------------------------------------ error probability

    def note_compared(self, *values: Value) -> None:
        """Record the degrees of values that are compared, or that unknown functions read."""
        for value in values:
            degree = value.degree
            if value.axes is not None:
                held = [size for axis in value.axes for size in axis if size.constant_value is None]
                for size in {*held, *degree.sums}:
                    extra = max(held.count(size) - 1, 0)
                    self.required_points = max(self.required_points, degree.sums.get(size, 0) + 2 + extra)
            elif degree.sums:
                self.required_points = max(self.required_points, max(degree.sums.values()) + 2)
            total = degree.excess
            height = degree.height
            for key, exponent in degree.poles.items():
                total += exponent * self.poles[key][0]
                height += exponent * self.poles[key][1]
            self._degree = max(self._degree, total)
            self._height = max(self._height, height)

    def note_applied(self, count: int) -> None:
        """Record the number of elements to which an unknown function was applied."""
        self._applied += count

    @property
    def security_bits(self) -> int:
        """Return b: two different terms of all pairs agree with a probability of at most 2^-b."""
        pairs = 2 * max(self._applied, 2).bit_length()
        # Two quotients are compared by cross-multiplication.
        point = 2 * self._degree / 2 ** (BITS - 1)
        prime = 2 * self._height / (BITS - 1) / 2**PRIME_BITS
        chance = point + prime
        if chance >= 1:
            return 0
        return int(-np.log2(chance) * len(self.arithmetic.primes)) - pairs

    # ------------------------------------------------------------ values

    def size_residues(self, size: Size) -> Array:
        """Compute a size modulo the primes. Each open size is a random number."""
        made = []
        for j, p in enumerate(self.arithmetic.primes):
            symbols = {s: int(self.unknown.fill(f"size {s}", ())[j]) for s in size.symbols()}
            made.append(int(size.evaluate(symbols)) % p)
        return np.array(made, np.int64)

    def fraction(self, number: Fraction) -> Value:
        """Make the value of a fraction, as an attribute stores it."""
        numbers = np.array(number.numerator / number.denominator)
        height = max(abs(number.numerator), number.denominator).bit_length()
        residues = fraction_residues(number, self.arithmetic.primes)
        return self.made(residues, Degree(0, height), approx=Approx(numbers, np.zeros(()), 0.0))

    def size_value(self, size: Size) -> Value:
        """Make the value of a size, which is 1 or more."""
        made = Value((), "i", residues=self.size_residues(size))
        made.sign = Sign.POSITIVE if size.is_positive else Sign.UNKNOWN
        return made

    def axis_points(self, axis: Axis) -> int:
        """Return the number of points along an axis."""
        return math.prod(size.constant_value or self.open_points for size in axis)

    def weights(self, axis: Axis) -> Array:
        """Draw weights of the points along an axis. Those of an open size add up to the size.

        Returns:
            residues with shape (primes, points).
        """
        made = np.ones((len(self.arithmetic.primes), 1), np.int64)
        for size in axis:
            if size.constant_value is not None:
                part = np.ones((len(made), size.constant_value), np.int64)
            else:
                part = self.unknown.fill(f"weights {size!r} {size.terms!r}", (self.open_points,)).copy()
                rest = self.arithmetic.sum(part[:, 1:], (0,))[:, 0]
                column = self.arithmetic.column(0)
                part[:, 0] = (self.size_residues(size) - rest) % column
            made = self.arithmetic.multiply(made[:, :, None], part[:, None, :]).reshape(len(made), -1)
        return made

    def constant(self, array: Array) -> Value:
        """Make the value of stored numbers.

        Raises:
            NotEvaluated: the numbers have a type without exact arithmetic, such as strings or float8.
        """
        if array.dtype == object and all(isinstance(n, Size | int) for n in array.reshape(-1)):
            return Value(array.shape, "i", stored=array, elem=_INT64)
        elem = ELEMENT_TYPES.get(array.dtype.name, 0)
        if array.dtype.kind in "iu":
            return Value(array.shape, "i", stored=array, degree=_CONSTANT, sign=_sign_of(array), elem=elem)
        if array.dtype.kind == "b":
            return Value(array.shape, "b", stored=array, degree=_CONSTANT, sign=Sign.NOT_NEGATIVE, elem=elem)
        if array.dtype.name not in EXACT_FLOATS:
            raise NotEvaluated(f"constants of type {array.dtype.name}")
        if array.dtype.name in ("float16", "bfloat16"):
            array = array.astype(np.float32)
        special = not bool(np.isfinite(array).all())
        height = 53 + (1100 if array.dtype == np.float64 else 150)
        if array.size < 2**16 and array.size and not special:
            exponents = np.frexp(array.astype(np.float64))[1]
            height = 53 + int(np.abs(exponents).max())
        sign = _sign_of(array)
        return Value(array.shape, "f", stored=array, degree=Degree(0, height), sign=sign, special=special, elem=elem)

    def residues(self, x: Value) -> Array:
        """Compute the residues of a value.

        Raises:
            NotEvaluated: only its term is known.
        """
        if x.residues is not None:
            return x.residues
        if x.stored is None:
            raise NotEvaluated("an input is known only by its term")
        made = self._residues_of_numbers(x.stored)
        # Large weights are converted again whenever they are read.
        if x.stored.size < 2**18:
            x.residues = made
        return made

    def residues_modulo(self, x: Value, j: int) -> Array:
        """Compute the residues of a value modulo the prime at ``j``."""
        if x.residues is None and x.stored is not None and x.stored.dtype == np.float32 and not x.special:
            return self.arithmetic.floats_modulo(x.stored, j)
        return self.residues(x)[j]

    def _residues_of_numbers(self, array: Array) -> Array:
        if array.dtype == object:
            rows = [self.size_residues(Size.from_int(n)) for n in array.reshape(-1)]
            return np.array(rows, np.int64).reshape(len(rows), -1).T.reshape(-1, *array.shape)
        if array.dtype.kind in "iub":
            return self.arithmetic.from_integers(array)
        finite = np.isfinite(array)
        if finite.all():
            return self.arithmetic.from_floats(array)
        made = self.arithmetic.from_floats(np.where(finite, array, 0))
        for name, places in (("inf", array == np.inf), ("-inf", array == -np.inf), ("nan", np.isnan(array))):
            made[:, places] = self.unknown.fill(name, ()).reshape(-1, 1)
        return made

    def digest(self, x: Value) -> bytes:
        """Compute the digest of the value's term. Values with equal residues have equal digests."""
        if not x.digest and x.stored is not None and x.stored.size >= _LARGE and x.stored.dtype != object:
            x.digest = hash_matrix(x.stored)
        if not x.digest:
            hashed = hashlib.blake2b(repr((x.shape, x.kind == "o", x.axes)).encode(), digest_size=16)
            if x.residues is None and x.stored is not None:
                for j in range(len(self.arithmetic.primes)):
                    hashed.update(np.ascontiguousarray(self.residues_modulo(x, j).astype(np.uint32)).tobytes())
            else:
                for row in self.residues(x):
                    hashed.update(np.ascontiguousarray(row.astype(np.uint32)).tobytes())
            x.digest = hashed.digest()
        return x.digest

    def approx(self, x: Value) -> Approx | None:
        """Return the float64 numbers of a constant; None if the value depends on inputs."""
        if x.stored is not None:
            if x.stored.dtype == object:
                return None
            numbers = x.stored.astype(np.float64)
            return Approx(numbers, np.zeros(numbers.shape), UNITS.get(x.elem, 0.0))
        return x.approx

    def free(self, name: str, sizes: Sequence[Size], kind: str, elem: int = 0) -> Value:
        """Make a value of independent variables, or of the unknown results of one function."""
        axes = tuple(self.axis_of_size(size) for size in sizes)
        shape = tuple(map(self.axis_points, axes))
        self.note_applied(int(np.prod(shape, dtype=np.int64)))
        return Value(shape, kind, residues=self.unknown.fill(name, shape), axes=closed_if_static(axes), elem=elem)

    def axis_of_size(self, size: Size) -> Axis:
        """Make an axis. A size that is a product of a number and symbols has several factors."""
        if size.constant_value is not None:
            return axis_of_length(size.constant_value)
        if len(size.terms) != 1:
            return (size,)
        (monomial, number) = size.terms[0]
        factors = [Size.symbol(s) for s in monomial]
        return (*factors, *axis_of_length(number))

    def made(
        self,
        residues: Array,
        degree: Degree,
        *,
        kind: str = "f",
        approx: Approx | None = None,
        sign: Sign = Sign.UNKNOWN,
        special: bool = False,
        axes: tuple[Axis, ...] | None = None,
    ) -> Value:
        """Make a computed value. The sign of a constant is read from its numbers."""
        if approx is not None:
            if not np.isfinite(approx.numbers).all():
                raise NotEvaluated("a constant that is not finite")
            if _sign_of(approx.numbers) is Sign.POSITIVE:
                sign = Sign.POSITIVE
        return Value(residues.shape[1:], kind, None, residues, b"", approx, degree, sign, special, axes)

    def unknown_function(
        self,
        name: str,
        arguments: list[Value],
        *,
        approx: Approx | None = None,
        symmetric: bool = False,
        kind: str = "f",
    ) -> Value:
        """Apply an unknown function element by element.

        Args:
            symmetric: the order of the arguments does not matter.
        """
        name = read_name(name, *arguments)
        if symmetric:
            keys = sum(self.unknown.keys(name, self.residues(x)) for x in self.align(arguments))
        else:
            keys = self.unknown.keys(name, *(self.residues(x) for x in self.align(arguments)))
        return self.from_keys(name, keys, arguments, approx=approx, kind=kind, axes=joint_axes(arguments))

    def from_keys(
        self,
        name: str,
        keys: Any,
        arguments: Iterable[Value],
        *,
        approx: Approx | None = None,
        kind: str = "f",
        axes: tuple[Axis, ...] | None = None,
    ) -> Value:
        """Make the results of an unknown function from the keys of its arguments."""
        self.note_compared(*arguments)
        made = self.unknown.from_keys(keys)
        self.note_applied(made[0].size)
        return self.made(made, _FRESH, approx=approx, kind=kind, axes=axes)

    def align(self, values: list[Value]) -> list[Value]:
        """Add leading axes so that residues of all values have one rank."""
        rank = max(x.rank for x in values)
        aligned = []
        for x in values:
            if x.rank == rank:
                aligned.append(x)
                continue
            shape = (1,) * (rank - x.rank) + x.points
            a = self.residues(x)
            axes = None if x.axes is None else ((),) * (rank - x.rank) + x.axes
            aligned.append(replace(x, shape=shape, stored=None, residues=a.reshape(a.shape[0], *shape), axes=axes))
        return aligned

    def require_nonzero(self, x: Value, kind: str = "divisor") -> None:
        """Record that a side is defined only where ``x`` is not zero, or not negative for a root."""
        if self.bases:
            x = self.bases.get(self.digest(x), x)
        known = x.sign is Sign.POSITIVE or (kind == "root" and x.sign is Sign.NOT_NEGATIVE)
        self.note_compared(x)
        keys = self.unknown.keys(read_name(f"fact {kind}", x), self.residues(x))
        (self.safe if known else self.facts).add(kind, keys)


def read_name(name: str, *arguments: Value) -> str:
    """Name an unknown function that reads numbers.

    Integers that may have overflowed are known modulo two to the bits of their type only. Equal residues mean equal
    numbers only if the types are equal too, so the types become a part of the name.
    """
    if not any(x.wraps for x in arguments):
        return name
    return f"{name} of {[x.elem if x.wraps else 0 for x in arguments]}"


# Number of elements from which a matrix is large
_LARGE = 2**16


def is_large_matrix(array: Array) -> bool:
    """Return True for a matrix that takes long to convert to residues."""
    return array.ndim == 2 and array.size >= _LARGE and array.dtype.kind == "f"


def hash_matrix(array: Array) -> bytes:
    """Hash the numbers of a matrix in row-major order."""
    hashed = hashlib.blake2b(repr((array.shape, array.dtype.str)).encode(), digest_size=16)
    hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.digest()


def _sign_of(array: Array) -> Sign:
    if array.size == 0 or array.dtype.kind == "b":
        return Sign.NOT_NEGATIVE
    least = array.min()
    if not least >= 0:
        return Sign.UNKNOWN
    # The margin covers the rounding of computed constants.
    if least > 1e-9 * float(array.max()):
        return Sign.POSITIVE
    return Sign.NOT_NEGATIVE if least >= 0 else Sign.UNKNOWN
