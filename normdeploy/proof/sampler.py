"""Create the leaves, constants and sizes of an evaluation, at a few points of each axis, in the field and as floats.

`normdeploy.proof` defines the terms (draw, leaf, point, radicand).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from ..graphs.exact_constants import min_and_max
from ..graphs.symbolic_sizes import AxisSize, Size
from .axis_plan import Axes, AxisPlan
from .degree import Degree
from .prime_field import BITS, PrimeField
from .proof_budget import OperationBudget
from .proof_errors import NotProved, ProofFailure
from .quadratic_residues import ResidueCharacters
from .value import NEGATIVE, NOT_NEGATIVE, POSITIVE, Array, Value

# Number of elements from which computing a digest of a constant takes longer than using the constant
_LARGE = 2**12
# Number of draws that are evaluated together. The first two determine a scale and shift, and the other draws test them.
# In floats, the last draw is all zeros.
DRAWS = 4


@dataclass
class RandomDraws:
    """State that survives a restart of the evaluation.

    Attributes:
        rng: source of the elements.
        elements: random elements. Keys are tuples such as ("leaf", …, atoms), ("constant", …, atoms), ("weights",
            atom).
        symbols: the value of each symbol's root in the field, and the symbol as a float.
        seen: nonsquares of each radicand, by the index of the radicand.
        epsilons: exact epsilon (residue, float) by the id of a node after the rewrite.
        opaque: value of an unknown function by (function, argument).
        work: operations of the whole proof.
        length: bits of the prime.
        redraws: number of redraws so far because a root was missing.
        flipped: True if the roots of constants with many digits take the other sign (`ProofInterpreter.unknown`).
        counts: element counts. A constant that is a rounded fraction of such counts is read as the exact fraction. If
            ``counts`` is empty, no constant is read as a fraction.
        read: constants that were read as fractions, with their readings.
        affine: for each choice of sizes, the scale and shift between the sides, per result.
        held: constants of the file, by the ids of their tensors.
        turn: shift of the one place that all taps of a convolution read, in floats only
            (`normdeploy.proof.convolutions`). 0 if each tap reads its own place.
    """

    rng: random.Random
    elements: dict[Any, Array] = field(default_factory=dict)
    symbols: dict[str, tuple[int, float]] = field(default_factory=dict)
    weights: dict[Any, Array] = field(default_factory=dict)
    seen: dict[int, ResidueCharacters] = field(default_factory=dict)
    epsilons: dict[int, tuple[int, float]] = field(default_factory=dict)
    opaque: dict[tuple[object, int], int] = field(default_factory=dict)
    work: OperationBudget = field(default_factory=OperationBudget)
    length: int = BITS
    redraws: int = 0
    flipped: bool = False
    counts: frozenset[int] = frozenset()
    read: dict[float, str] = field(default_factory=dict)
    affine: list[Any] = field(default_factory=list)
    held: dict[int, StoredConstant] = field(default_factory=dict)
    turn: int = 0


class StoredConstant:
    """Constant of the file with its properties, which are computed once.

    Attributes:
        array: elements in float32 or float64.
        rest: float64 correction that is added to the elements; None for no correction.
        half: True if the constant was stored in float16.
        finite: True if all elements are finite.
        uniform: True if all elements are equal.
        nonzero: True if no element is zero.
        sign: sign of all elements (`Value.sign`).
        below: sign of their negatives (`Value.below`).
    """

    def __init__(self, array: Array, half: bool = False, rest: Array | None = None) -> None:
        """Compute the properties of the elements ``array`` + ``rest``.

        Args:
            array: elements; float32 is not copied, other types become float64.
            half: True if the constant was stored in float16.
            rest: correction of the last digits of the elements (`normdeploy.graphs.exact_constants`).
        """
        self.half = half
        self.array = array = array if array.dtype == np.float32 else np.asarray(array, dtype=np.float64)
        self.rest = rest
        low, high = min_and_max(array)
        self.finite = math.isfinite(low) and math.isfinite(high)
        self.uniform = low == high and (rest is None or bool((rest == rest.reshape(-1)[0]).all()))
        self.nonzero = low > 0 or high < 0 or bool((array != 0).all())
        self.sign, self.below = _sign_of_numbers(low), _sign_of_numbers(-high)

    @property
    def structure_key(self) -> tuple[object, ...]:
        """Return all properties that an evaluation reads, except the elements."""
        return self.half, self.finite, self.uniform, self.nonzero, self.sign, self.below, self.periods

    @cached_property
    def periods(self) -> tuple[int | None, ...]:
        """Return the length of the piece that repeats along each axis: [a, b, a, b] has 2; None if none repeats."""
        parts = [part for part in (self.array, self.rest) if part is not None]
        return tuple(_period_along(parts, axis) for axis in range(self.array.ndim))

    @cached_property
    def content_key(self) -> object:
        """Return a key that is equal for equal elements in equal order, in any shape.

        For large constants, `compare_contents` sets it.
        """
        return hashlib.sha256(np.ascontiguousarray(self.elements_at()).data).digest()

    def first_element(self) -> float:
        """Return the first element.

        Returns:
            a Python float, with the correction added.
        """
        return float(self.array.reshape(-1)[0]) + (0.0 if self.rest is None else float(self.rest.reshape(-1)[0]))

    def elements_at(self, lengths: Sequence[int] | None = None, chosen: Sequence[Sequence[int]] | None = None) -> Array:
        """Return the elements, or some of them.

        Args:
            lengths: shape to lay the elements out in; None for their own.
            chosen: places along each axis; None for all.

        Returns:
            a float64 array.
        """
        parts = []
        for part in (self.array, self.rest):
            if part is not None:
                if lengths is None:
                    laid = part
                else:
                    laid = part.reshape(lengths)
                parts.append(laid if chosen is None else laid[np.ix_(*chosen)])
        if len(parts) == 2:
            return np.add(*parts, dtype=np.float64)
        return parts[0].astype(np.float64, copy=False)


def _period_along(parts: Sequence[Array], axis: int) -> int | None:
    """Return the length of the shortest piece that repeats along an axis of all arrays; None if none does."""
    first = parts[0]
    n = first.shape[axis]
    line = first[tuple(slice(None) if i == axis else 0 for i in range(first.ndim))]
    # A piece ends where the first element comes again.
    lengths = np.flatnonzero(line[1 : n // 2 + 1] == line[0]) + 1
    pieces = (int(length) for length in lengths[n % lengths == 0])
    return next((length for length in pieces if all(_repeats(part, axis, length) for part in parts)), None)


def _repeats(array: Array, axis: int, length: int) -> bool:
    """Return True if an axis consists of equal pieces of ``length`` places."""
    rows = np.moveaxis(array, axis, 0)
    return all(
        np.array_equal(rows[start : start + length], rows[:length]) for start in range(length, len(rows), length)
    )


def compare_contents(constants: Iterable[StoredConstant]) -> None:
    """Set the content keys of all large constants of a proof by comparing them.

    Digests would take longer than the rest of the proof.
    """
    known: dict[int, list[StoredConstant]] = {}
    for constant in constants:
        size = constant.array.size
        if size <= _LARGE:
            continue
        alike = known.setdefault(size, [])
        number = next((i for i, other in enumerate(alike) if _have_equal_elements(constant, other)), len(alike))
        if number == len(alike):
            alike.append(constant)
        constant.content_key = (size, number)


def _have_equal_elements(one: StoredConstant, other: StoredConstant) -> bool:
    # Compare a few elements first: they distinguish most constants.
    ones, others, few = one.array.reshape(-1), other.array.reshape(-1), slice(_LARGE // 16)
    if not np.array_equal(ones[few], others[few]) or not np.array_equal(ones, others):
        return False
    return one.rest is other.rest or np.array_equal(one.elements_at(), other.elements_at())


class Sampler:
    """Create `Value`s. Without a field, only the floats are computed.

    Attributes:
        plan: layout of the axes.
        draws: random elements.
        gf: the field; None for floats only.
        real: float type.
        work: operations of the proof.
        bits: bits of the prime; 0 without a field.
    """

    def __init__(self, plan: AxisPlan, draws: RandomDraws, gf: PrimeField | None, real: type = np.float64) -> None:
        self.plan = plan
        self.draws = draws
        self.gf = gf
        self.real = real
        self.work, self.bits = draws.work, 0 if gf is None else gf.p.bit_length()

    def constant(self, stored: Array | StoredConstant, narrow: bool = False) -> Value:
        """Evaluate a constant of the file.

        If all elements are equal, the value is this number. Otherwise the elements are variables, with random values in
        the field. A piece that repeats along an axis has its variables once.

        Args:
            narrow: float32 elements may stay float32, for a caller that multiplies them by float64.

        Returns:
            the value; without residues if an element is not finite.

        Raises:
            NotProved: the constant is empty.
        """
        if not isinstance(stored, StoredConstant):
            stored = StoredConstant(stored)
        array = stored.array
        axes: Axes = tuple(self.plan.atoms_of(self.plan.size_of_length(n)) for n in array.shape)
        atoms = [a for axis in axes for a in axis]
        if not array.size:
            raise NotProved(ProofFailure.SIZE, "one of its constants is empty")
        # A NaN or Inf has no residue, so nothing that depends on the constant can be proved.
        if not stored.finite:
            return Value(axes, None, np.full((1,) * (1 + len(atoms)), np.nan, dtype=self.real))
        if stored.uniform:
            number = stored.first_element()
            f: Array = np.full((1,) * (1 + len(atoms)), number, dtype=self.real)
            a = None if self.gf is None else self.gf.from_floats(f.astype(np.float64))
            size = Size.from_int(int(number)) if number == int(number) and abs(number) < 2**53 else None
            return Value(axes, a, f, sign=stored.sign, below=stored.below, size=size, nonzero=stored.nonzero)
        lengths = [self.plan.place_count(a) for a in atoms]
        repeats = [again for axis, n in zip(axes, stored.periods, strict=True) for again in self._repeating(axis, n)]
        chosen = [[0] if again else self._sampled_places(a) for a, again in zip(atoms, repeats, strict=True)]
        every = all(places == list(range(n)) for places, n in zip(chosen, lengths, strict=True))
        if narrow and every and stored.rest is None:
            f = array.reshape(lengths)[None]
        else:
            f = stored.elements_at(lengths, None if every else chosen).astype(self.real, copy=False)[None]
        varying = [a for a, again in zip(atoms, repeats, strict=True) if not again]
        a = None
        drawn = None
        if self.gf is not None:
            drawn = (("constant", stored.content_key, tuple(varying)), 0)
            counts = [len(places) for places, again in zip(chosen, repeats, strict=True) if not again]
            a = self.random_elements(drawn[0], (1, *counts)).reshape(f.shape)
        return Value(
            axes,
            a,
            f,
            sign=stored.sign,
            below=stored.below,
            degree=Degree.of_element(varying),
            nonzero=stored.nonzero,
            drawn=drawn,
        )

    def _repeating(self, atoms: Sequence[Size], period: int | None) -> list[bool]:
        """Return True for each atom of an axis along which a constant only repeats itself.

        An axis of 16 places with period 8, cut into atoms of 2 and 8, does not vary along the first one.
        """
        if period is None or any(atom in self.plan.joins for atom in atoms):
            return [False] * len(atoms)
        lengths = [self.plan.place_count(atom) for atom in atoms]
        return [math.prod(lengths[i + 1 :]) % period == 0 for i in range(len(atoms))]

    def make_leaf(self, key: int, shape: Sequence[Size], reals: Callable[[tuple[int, ...]], Array]) -> Value:
        """Draw a leaf.

        Args:
            key: number of the leaf.
            shape: its sizes.
            reals: function from the point counts of the axes to an array of floats.

        Returns:
            the value, with `DRAWS` random draws in the field.
        """
        labels = itertools.count()
        axes: Axes = tuple(tuple(AxisSize(a, (key, next(labels))) for a in self.plan.atoms_of(s)) for s in shape)
        counts = tuple(self.plan.point_count(a) for axis in axes for a in axis)
        if self.gf is None:
            self.work.count_floats(DRAWS * math.prod(counts))
        else:
            self.work.count_product(DRAWS * math.prod(counts), self.bits)
        f = reals(counts)
        if self.gf is None:
            a = None
        else:
            a = self.random_elements(("leaf", key, tuple(x for axis in axes for x in axis)), (DRAWS, *counts))
        return Value(
            axes, a, f.astype(self.real), data=True, degree=Degree.of_element(a for axis in axes for a in axis)
        )

    def random_elements(self, key: Any, shape: tuple[int, ...]) -> Array:
        """Return random field elements that stay the same until they are redrawn.

        Returns:
            elements in [1, p), in ``shape``.
        """
        assert self.gf is not None
        drawn = self.draws.elements.get(key)
        if drawn is None or drawn.shape != shape:
            drawn = np.empty(shape, dtype=object)
            drawn.reshape(-1)[:] = [self.draws.rng.randrange(1, self.gf.p) for _ in range(drawn.size)]
            self.draws.elements[key] = drawn
        return drawn

    def number(self, value: Fraction | int | float) -> Value:
        """Evaluate a number exactly.

        Returns:
            a value without axes.
        """
        f: Array = np.full((1,), float(value), dtype=self.real)
        if self.gf is None:
            a = None
        else:
            a = np.array([self.gf.from_fraction(Fraction(value))], dtype=object)
        if value == int(value):
            size = Size.from_int(int(value))
        else:
            size = None
        return Value(
            (), a, f, sign=_sign_of_numbers(value), below=_sign_of_numbers(-value), size=size, nonzero=value != 0
        )

    def size_value(self, size: Size) -> Value:
        """Evaluate a size as a number.

        Returns:
            a value without axes.
        """
        values = {s: self._symbol_value(s) for s in size.symbols()}
        f: Array = np.full((1,), float(size.evaluate({s: v[1] for s, v in values.items()})), dtype=self.real)
        a = None
        if self.gf is not None:
            a = np.array([size.evaluate({s: v[0] for s, v in values.items()}) % self.gf.p], dtype=object)
        return Value((), a, f, sign=sign_of_size(size), size=size, sized=bool(values), nonzero=size.is_positive)

    def _symbol_value(self, name: str) -> tuple[int, float]:
        """Return a symbol as a random square in the field, and as a float. A square ensures that sizes have roots."""
        if name not in self.draws.symbols:
            if self.gf is not None:
                q = self.draws.rng.randrange(2, self.gf.p)
            else:
                q = 2
            self.draws.symbols[name] = (q, float(7 + 4 * len(self.draws.symbols)))
        q, n = self.draws.symbols[name]
        return (q * q % self.gf.p if self.gf is not None else 0), n

    def _sampled_places(self, atom: Size) -> list[int]:
        """List the places along an axis of a constant that are used as points."""
        if atom in self.plan.joins:
            return self._sampled_joined_places(atom)
        n = self.plan.place_count(atom)
        k = self.plan.point_count(atom)
        # An axis of arbitrary length may have more than n points.
        return list(range(n)) if k == n else [round(i * (n - 1) / (k - 1)) for i in range(k)]

    def _sampled_joined_places(self, atom: Size) -> list[int]:
        joined = []
        start = 0
        for part in self.plan.joins[atom]:
            places = [0]
            for a in self.plan.atoms_of(part):
                places = [p * self.plan.place_count(a) + i for p in places for i in self._sampled_places(a)]
            joined += [start + p for p in places]
            start += self.plan.place_count(part)
        return joined

    def _point_weights(self, atom: Size) -> tuple[Array | None, Array | None]:
        """Return the weights of an atom's points, which add up to its size; None if each place has a point."""
        if not self.plan.is_sampled(atom):
            return None, None
        if atom in self.plan.joins:
            return self._joined_point_weights(atom)
        k = self.plan.point_count(atom)
        n = self.size_value(atom)
        real = np.linspace(0.5, 1.5, k).astype(self.real) * (n.f[0] / k)
        if self.gf is None or n.a is None:
            return None, real
        exact = self.random_elements(("weights", atom), (k,)).copy()
        exact[-1] = (n.a[0] - sum(exact[:-1].tolist())) % self.gf.p
        return exact, real

    def _joined_point_weights(self, atom: Size) -> tuple[Array | None, Array | None]:
        exact = []
        real = []
        for part in self.plan.joins[atom]:
            e: Array = np.ones(1, dtype=object)
            r: Array = np.ones(1, dtype=self.real)
            for a in self.plan.atoms_of(part):
                k = self.plan.point_count(a)
                own, floats = self._point_weights(a)
                e = np.multiply.outer(e, np.ones(k, dtype=object) if own is None else own).reshape(-1)
                r = np.multiply.outer(r, np.ones(k) if floats is None else floats).reshape(-1)
            exact.append(e)
            real.append(r)
        return None if self.gf is None else np.concatenate(exact) % self.gf.p, np.concatenate(real)


def _sign_of_numbers(numbers: Array | Fraction | float) -> int:
    if np.all(numbers > 0):
        return POSITIVE
    if np.all(numbers >= 0):
        return NOT_NEGATIVE
    return NEGATIVE


def sign_of_size(size: Size) -> int:
    """Return the sign of a size for all values of its symbols.

    Returns:
        POSITIVE, NOT_NEGATIVE, or NEGATIVE if the sign is negative or unknown.
    """
    if size.is_positive:
        return POSITIVE
    if size.is_nonnegative:
        return NOT_NEGATIVE
    return NEGATIVE
