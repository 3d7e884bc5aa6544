"""Ends a proof that would take too long: by a count of operations, so that every machine refuses the same proofs.

A proof evaluates both sides at a number of points of each axis, so a tensor with k axes of which nothing but a name is
known has points^k elements; and each root in it makes the prime longer (`identity_test.learn_axes`). Both are counted
before they are computed. One operation is a product of two digits of 30 bits, as CPython multiplies long integers; what
an element costs besides counts as `_EACH` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .proof_errors import NotProved, ProofFailure

# operations of one proof: a third of a minute on a core of 2024
MOST = 2 * 10**10
# of one tensor in the field: half a gigabyte of Python's integers
ELEMENTS = 2**22
# of one tensor in floats: half a gigabyte
FLOATS = 2**26
_EACH = 700
# bits
_DIGIT = 30


@dataclass
class OperationBudget:
    """The operations that a proof has taken so far, over all its evaluations."""

    spent: int = 0

    def count_product(self, elements: int, bits: int) -> None:
        """Count a product of two tensors in the field.

        Raises:
            NotProved: the proof, or this tensor, is too large.
        """
        if elements > ELEMENTS:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: a tensor needs {elements:,} points, and {ELEMENTS:,} are looked at at most",
            )
        self.count_operations(elements * (_EACH + 2 * (bits // _DIGIT + 1) ** 2))

    def count_roots(self, elements: int, bits: int) -> None:
        """Count the roots of a tensor's elements, each of which is a power with an exponent of so many ``bits``.

        Raises:
            NotProved: the proof is too large.
        """
        self.count_operations(elements * (_EACH + 5 * bits * (bits // _DIGIT + 1) ** 2 // 2))

    def count_floats(self, elements: int) -> None:
        """Count a tensor that is computed in floats alone.

        Raises:
            NotProved: the proof, or this tensor, is too large.
        """
        if elements > FLOATS:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: a tensor needs {elements:,} points, and {FLOATS:,} are looked at at most",
            )
        self.count_operations(10 * elements)

    def count_operations(self, operations: int) -> None:
        """Count operations of any kind.

        Raises:
            NotProved: they are more than one proof may take.
        """
        self.spent += operations
        if self.spent > MOST:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: it takes {self.spent:,} operations, and {MOST:,} are spent on a proof at most",
            )
