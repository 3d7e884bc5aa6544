"""Evaluate a region once in the field and, in parallel, in floats; compute the roots.

`normdeploy.proof.op_definitions` defines the ops as combinations of three kinds of steps: arithmetic and sums
(`normdeploy.proof.arithmetic`), and the roots in this module. The theorem in docs/explanation/certificates.md has a
premise for each kind of step, and each step checks it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from . import rational_reconstruction
from .arithmetic import Arithmetic, Radicand
from .axis_plan import Atoms, Axes, AxisPlan
from .prime_field import PrimeField
from .proof_errors import EpsilonMismatch, NewPrimeNeeded, NotProved, ProofFailure, RedrawRows
from .quadratic_residues import ResidueCharacters
from .sampler import DRAWS, RandomDraws, StoredConstant
from .value import NEGATIVE, NOT_NEGATIVE, POSITIVE, Array, Value

__all__ = ["DRAWS", "ProofInterpreter", "RandomDraws", "StoredConstant"]


class ProofInterpreter(Arithmetic):
    """Evaluate ops on `Value`s. Without a field, only floats are computed, and no premise of the theorem is checked.

    Attributes:
        generators: rational constants with irrational roots, each with its root in the field.
        unknown: constants whose fraction has too many digits for `PrimeField.to_rational`, each with its root.
        others: mismatches of radicands that differ from known radicands only in epsilon.
        gathered: gathered inputs of convolutions (`normdeploy.proof.convolutions`).
        node: id of the node under evaluation.
        given: exact values of the constants after a fold, by their ids.
        epsilons: epsilons by the ids of their nodes.
        rooted: atoms along which radicands vary, each with True if one of these radicands contains sums.
        divisors: divisors of the form √V + ε.
    """

    def __init__(self, plan: AxisPlan, draws: RandomDraws, gf: PrimeField | None, real: type = np.float64) -> None:
        super().__init__(plan, draws, gf, real)
        self.generators: list[tuple[Fraction, int]] = []
        self.unknown: dict[int, int] = {}
        self.others: list[EpsilonMismatch] = []
        self.gathered: dict[Any, tuple[Value, int, Value]] = {}
        self.node = 0
        self.given: dict[int, Value] = {}
        self.epsilons: dict[int, Value] = {}
        self.rooted: dict[Atoms, bool] = {}
        self.divisors: list[Radicand] = []

    def constant(self, stored: Array | StoredConstant, narrow: bool = False) -> Value:
        """Evaluate a constant as `Sampler.constant` does, but read a rounded fraction as the exact fraction.

        If ``draws.counts`` is set, a number that is a rounded fraction of these element counts is read as the fraction.

        Returns:
            the value.
        """
        if not isinstance(stored, StoredConstant):
            stored = StoredConstant(stored)
        if self.draws.counts and stored.finite and stored.uniform and stored.array.size <= rational_reconstruction.FEW:
            number = stored.first_element()
            reading = rational_reconstruction.read_rational(number, self.draws.counts, stored.half)
            if reading is not None:
                return self._read_rational(
                    tuple(self.plan.atoms_of(self.plan.size_of_length(n)) for n in stored.array.shape), number, reading
                )
        return super().constant(stored, narrow)

    def _read_rational(self, axes: Axes, number: float, reading: rational_reconstruction.RationalReading) -> Value:
        """Build the value of a constant that is a rounded fraction, or the rounded root of a fraction."""
        self.draws.read[number] = str(reading)
        one = self.number(reading.square if reading.root else reading.fraction)
        if reading.root:
            one = self.root(one)
        if number < 0 and reading.root:
            one = self.neg(one)
        flat = (1,) * (1 + sum(len(axis) for axis in axes))
        return Value(
            axes,
            None if one.a is None else one.a.reshape(flat),
            one.f.reshape(flat),
            sign=POSITIVE if number > 0 else NEGATIVE,
            below=POSITIVE if number < 0 else NEGATIVE,
            nonzero=True,
        )

    def exact_epsilon(self, given: float) -> Value:
        """Evaluate the epsilon of the current node.

        Returns:
            ``given``, or the exact epsilon that an earlier evaluation found in the nodes before the rewrite.
        """
        residue, value = self.draws.epsilons.get(self.node, (None, given))
        e = self.number(value)
        if residue is not None and self.gf is not None:
            e.a = np.array([residue], dtype=object)
        self.epsilons[self.node] = e
        return e

    def inverse(self, y: Value) -> Value:
        """Invert as `Arithmetic.inverse` does, and find the exact epsilon of a divisor √V + ε.

        Returns:
            1/y.

        Raises:
            EpsilonMismatch: the divisor differs from an earlier one only in epsilon.
        """
        if y.data and y.roots is None and y.a is not None:
            for known in self.divisors:
                other = self._find_other_epsilon(y, known)
                if other is not None and other.residue not in (0, _residue_of(known.epsilon)):
                    raise other
            if self.node in self.epsilons:
                self.divisors.append(Radicand(y, y, self.node, self.epsilons[self.node]))
        return super().inverse(y)

    def root(self, t: Value) -> Value:
        """Compute √t of a constant, of a multiple of a known radicand, or of a new radicand that cannot be negative.

        Returns:
            √t.

        Raises:
            NotProved: ``t`` may be negative.
            EpsilonMismatch: ``t`` differs from a known radicand only in epsilon.
            RedrawRows: some elements have no root in the field.
        """
        with np.errstate(all="ignore"):
            f = np.sqrt(t.f)
        sign = POSITIVE if t.sign == POSITIVE else NOT_NEGATIVE
        degree = t.degree.root().with_places_in(t.varying_atoms())
        made = Value(t.axes, None, f, t.data, sign, degree, sized=t.sized, sums=t.sums)
        made.nonzero, made.fixed = t.sign == POSITIVE, t.fixed | (t.varying_axes() if t.sums else frozenset())
        self.rooted[t.varying_atoms()] = t.degree.has_sums or self.rooted.get(t.varying_atoms(), False)
        if self.gf is None or t.a is None:
            return made
        if not t.data and t.a.size == 1:
            if not t.sign and self._require_positive(int(t.a.reshape(-1)[0]), float(t.f.reshape(-1)[0]), t, t) is None:
                raise NotProved(ProofFailure.SIGN, "it takes the root of a number that may be negative")
            made.a = np.full(
                t.a.shape, self._root_of_constant(int(t.a.reshape(-1)[0]), float(t.f.reshape(-1)[0])), dtype=object
            )
            return made
        if not t.data and t.sign != POSITIVE:
            raise NotProved(ProofFailure.SIGN, "it takes the root of a constant that is negative or zero")
        for i, radicand in enumerate(self.radicands):
            ratio = self.positive_ratio(t, radicand.w)
            if ratio is not None:
                r, value = ratio
                made.roots = frozenset({i})
                if value <= 0:
                    raise NotProved(ProofFailure.SIGN, "it takes the root of a negative value")
                factor = self._root_of_constant(r, value)
                made.a = self._layout_like(radicand.root, t) * factor % self.gf.p
                return made
        # One side may take the root of a whole, and the other side that of its parts after a Split.
        for i, radicand in enumerate(self.radicands):
            for w, root in self._parts_of_radicand(radicand):
                ratio = self.positive_ratio(t, w)
                if ratio is not None and ratio[1] > 0:
                    made.roots = frozenset({i})
                    made.a = self._layout_like(root, t) * self._root_of_constant(*ratio) % self.gf.p
                    return made
        # t may be 1/(V + ε) or, more generally, r/W with a number r.
        for radicand in self.radicands:
            ratio = self.constant_product(t, radicand.w)
            if ratio is not None and ratio[1] > 0:
                factor = self._root_of_constant(*ratio)
                made.a = self._layout_like(self.inverse(radicand.root), t) * factor % self.gf.p
                return made
        # In √(1/(V + ε)), epsilon may differ as well, so 1/t is compared too.
        turned = [t, super().inverse(t)] if t.data and t.sign == POSITIVE else [t]
        other = next(
            (e for r in self.radicands for u in turned if (e := self._find_other_epsilon(u, r)) is not None), None
        )
        if other is not None and other.residue:
            raise other
        # The radicand is the variance without an epsilon. Either the rewrite has several steps and a later step adds
        # the epsilon, or the rewrite lost the epsilon.
        if other is not None:
            self.others.append(other)
        if t.data and not t.sign:
            raise other or NotProved(ProofFailure.SIGN, "it takes the root of a value that may be negative")
        made.a, made.roots = self._new_root(t), frozenset({len(self.radicands)})
        self.radicands.append(Radicand(t, made, self.node, self.epsilons.get(self.node)))
        return made

    def _parts_of_radicand(self, radicand: Radicand) -> Iterator[tuple[Value, Value]]:
        """Yield the parts of a radicand and their roots along each joined axis on which it varies."""
        for axis, atoms in enumerate(radicand.w.axes):
            if len(atoms) == 1 and atoms[0] in self.plan.joins and radicand.w.varies_along(axis):
                parts = self.split_joined_axis(radicand.w, axis)
                yield from zip(parts, self.split_joined_axis(radicand.root, axis), strict=True)

    def _new_root(self, t: Value) -> Array:
        assert self.gf is not None
        assert t.a is not None
        self.work.count_roots(self.gf.count_rootless(t.a), self.bits)
        root = self.gf.root(t.a)
        bad = root == -1
        seen = self.draws.seen.setdefault(len(self.radicands), ResidueCharacters())
        if self.radicands or t.drawn is None:
            # Skip the record if the radicand is a drawn element v + c and no other root reads these variables. Then no
            # product of radicands is a square.
            seen.record_nonsquares(t.a, bad)
        if bad.any():
            raise RedrawRows(bad, t.atoms, t.drawn)
        return root

    def _layout_like(self, x: Value, like: Value) -> Array:
        """Lay out the elements of ``x`` like those of ``like``; both vary along the same axes."""
        assert x.a is not None
        assert like.a is not None
        return x.drop_constant_axes(x.a)[1].reshape(x.a.shape[0], *like.a.shape[1:])

    def _find_other_epsilon(self, t: Value, radicand: Radicand) -> EpsilonMismatch | None:
        """Solve t = r·(W − ε) + e for e.

        Returns:
            the mismatch with epsilon e/r in place of ε; None if ``t`` does not have this form.

        Raises:
            NotProved: r ≤ 0, or the epsilon is too small relative to the variance to be measured.
        """
        if (
            radicand.epsilon is None
            or radicand.epsilon.a is None
            or self.gf is None
            or not t.data
            or t.a is None
            or radicand.w.a is None
        ):
            return None
        (mine, a), (theirs, b) = t.drop_constant_axes(t.a), radicand.w.drop_constant_axes(radicand.w.a)
        if mine != theirs or a.shape != b.shape or a.size < 4:
            return None
        p = self.gf.p
        a = a.reshape(-1)
        b = (b.reshape(-1) - _residue_of(radicand.epsilon)) % p
        if (b[0] - b[1]) % p == 0:
            return None
        r = int(a[0] - a[1]) * pow(int(b[0] - b[1]), -1, p) % p
        e = int(a[0] - r * b[0]) % p
        if not r or ((a - r * b - e) % p != 0).any():
            return None
        f = t.f.reshape(-1)
        g = radicand.w.f.reshape(-1) - radicand.epsilon.f.reshape(-1)[0]
        if f.size != g.size:
            return None
        i = int(np.argmax(g))
        j = int(np.argmin(g))
        slope = float((f[i] - f[j]) / (g[i] - g[j]))
        value = float(f[j] - slope * g[j]) / slope
        if slope <= 0:
            raise NotProved(ProofFailure.SIGN, "it takes the root of a value that may be negative")
        if abs(g[j]) > 2.0**18 * abs(value) and e:
            raise NotProved(ProofFailure.LIMIT, "its epsilon is too small relative to its variance to be measured")
        return EpsilonMismatch(radicand.node, e * pow(r, -1, p) % p, value)

    def _root_of_constant(self, v: int, value: float) -> int:
        """Compute √v of a positive rational, times powers of sizes.

        Roots of rationals satisfy only the relations that follow from multiplying positive roots (Besicovitch, 1940):
        √a·√b is rational if a·b is a square. So there are three cases. A rational root is returned as this rational. A
        root that is related to a known root is computed from the known root. Any other root may have either sign.
        """
        assert self.gf is not None
        if value < 0:
            raise NotProved(ProofFailure.SIGN, "it takes the root of a negative constant")
        if v == 0:
            return 0
        for factor, number, root in self._size_powers():
            q = self.gf.to_rational(v * factor % self.gf.p)
            if q is None or q <= 0 or not math.isclose(float(q), value * number, rel_tol=1e-9):
                continue
            return self._root_of_rational(q) * pow(root, -1, self.gf.p) % self.gf.p
        return self._root_of_unknown(v)

    def _root_of_unknown(self, v: int) -> int:
        """Compute √v of a constant whose fraction has too many digits to be recovered from the residue.

        The sign of the root is unknown, so the proof has to hold for both roots.
        """
        assert self.gf is not None
        if not self.unknown.keys() <= {v}:
            raise NotProved(ProofFailure.LIMIT, "it takes the roots of several constants that are not simple fractions")
        if not self.gf.is_square(v):
            raise NewPrimeNeeded
        root = pow(v, (self.gf.p + 1) // 4, self.gf.p)
        self.unknown[v] = self.gf.p - root if self.draws.flipped else root
        return self.unknown[v]

    def _size_powers(self) -> list[tuple[int, float, int]]:
        """List (n^e in the field, n^e as a float, its root in the field), 1 first.

        n^e stands for each product of powers of up to two of the sizes in use.
        """
        assert self.gf is not None
        p = self.gf.p
        powers = [(1, 1.0, 1)]
        for q, n in self.draws.symbols.values():
            powers += [
                (c * pow(q, 2 * e, p) % p, x * n**e, s * pow(q, e, p) % p)
                for c, x, s in powers[:64]
                for e in (-1, 1, -2, 2)
            ]
        return powers[:4096]

    def _root_of_rational(self, q: Fraction) -> int:
        assert self.gf is not None
        p = self.gf.p
        subsets: list[tuple[Fraction, int]] = [(Fraction(1), 1)]
        for known, root in self.generators:
            subsets += [(q0 * known, r0 * root % p) for q0, r0 in subsets]
        for known, root in subsets:
            product = q * known
            a = math.isqrt(product.numerator)
            b = math.isqrt(product.denominator)
            # √q = √(q·known)/√known.
            if a * a == product.numerator and b * b == product.denominator:
                return self.gf.from_fraction(Fraction(a, b)) * pow(root, -1, self.gf.p) % self.gf.p
        if len(self.generators) >= 3:
            raise NotProved(ProofFailure.LIMIT, "it takes the roots of more than three constants")
        residue = self.gf.from_fraction(q)
        if not self.gf.is_square(residue):
            raise NewPrimeNeeded
        root = pow(residue, (self.gf.p + 1) // 4, self.gf.p)
        self.generators.append((q, root))
        return root

    def power(self, x: Value, q: Fraction) -> Value:
        """Compute x^q for integers and half-integers q.

        Returns:
            the power. Its floats are computed by one call of numpy's power.

        Raises:
            NotProved: q is 0, beyond ±16, or neither an integer nor a half-integer.
        """
        if q.denominator not in (1, 2) or abs(q) > 16:
            raise NotProved(
                ProofFailure.OP,
                f"Pow with exponent {float(q):g}: only integers and half-integers up to 16 are supported",
            )
        if q == 0:
            raise NotProved(ProofFailure.OP, "Pow with exponent 0")
        base = x
        if q.denominator == 2:
            base = self.root(x)
        n = int(q * q.denominator)
        made = base
        for _ in range(abs(n) - 1):
            made = self.mul(made, base)
        if n < 0:
            made = self.inverse(made)
        with np.errstate(all="ignore"):
            made = replace(made, f=np.power(x.f, np.asarray(float(q), dtype=self.real)))
        return made


def _residue_of(number: Value | None) -> int:
    assert number is not None
    assert number.a is not None
    return int(number.a.reshape(-1)[0])
