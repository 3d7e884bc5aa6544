"""End proofs that would take too long.

The limit is a count of operations instead of a time, so that every machine refuses the same proofs.

A proof evaluates both sides at several points of each axis. A tensor with k dynamic axes has points^k elements, and
each root of an element makes the prime longer (`identity_check.learn_axes`). Elements and roots are counted before they
are computed. One operation is a product of two 30-bit digits, the unit in which CPython multiplies long integers. The
other costs of an element count as `_EACH` operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from .proof_errors import NotProved, ProofFailure

# Maximum number of operations of one proof; they take about 20 seconds on a core of 2024
MOST = 2 * 10**10
# Maximum number of elements of one tensor in the field; they take half a gigabyte as Python integers
ELEMENTS = 2**22
# Maximum number of elements of one tensor in floats; they take half a gigabyte
FLOATS = 2**26
_EACH = 700
# Bits of a digit of CPython's long integers
_DIGIT = 30


@dataclass
class OperationBudget:
    """Operations that a proof has spent so far, over all its evaluations."""

    spent: int = 0

    def count_product(self, elements: int, bits: int) -> None:
        """Count a product of two tensors in the field.

        Args:
            elements: elements of the product.
            bits: bits of the prime.

        Raises:
            NotProved: the proof or this tensor is too large.
        """
        if elements > ELEMENTS:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: a tensor needs {elements:,} points; the limit is {ELEMENTS:,}",
            )
        self.count_operations(elements * (_EACH + 2 * (bits // _DIGIT + 1) ** 2))

    def count_roots(self, elements: int, bits: int) -> None:
        """Count the roots of a tensor's elements.

        Each root is computed as a power with an exponent of ``bits`` bits.

        Raises:
            NotProved: the proof is too large.
        """
        self.count_operations(elements * (_EACH + 5 * bits * (bits // _DIGIT + 1) ** 2 // 2))

    def count_floats(self, elements: int) -> None:
        """Count a tensor that is computed in floats only.

        Raises:
            NotProved: the proof or this tensor is too large.
        """
        if elements > FLOATS:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: a tensor needs {elements:,} points; the limit is {FLOATS:,}",
            )
        self.count_operations(10 * elements)

    def count_operations(self, operations: int) -> None:
        """Count operations of any kind.

        Raises:
            NotProved: the proof exceeds `MOST` operations.
        """
        self.spent += operations
        if self.spent > MOST:
            raise NotProved(
                ProofFailure.LIMIT,
                f"too large: it takes {self.spent:,} operations; the limit for a proof is {MOST:,}",
            )
