"""Define the ways in which a proof fails, and the requests to restart an evaluation."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from ..graphs.symbolic_sizes import Size


class ProofFailure(Enum):
    """Reason why nothing was proved."""

    # An op is not algebraic, and no lemma shows that it does nothing there
    OP = auto()
    # Sizes are not shown to be equal, or their use is not polynomial
    SIZE = auto()
    # Elements are regrouped in an unsupported way
    LAYOUT = auto()
    # The root of a value that may be negative, or a division by one that may be zero
    SIGN = auto()
    # The sides are different functions
    DIFFERS = auto()
    # The nodes before the rewrite give a NaN or Inf that the nodes after do not
    HIDDEN = auto()
    # a stored parameter is not the exact one, rounded
    STORED = auto()
    # The prover gave up
    LIMIT = auto()


class NotProved(Exception):
    """Raised if the sides differ, or if that cannot be decided.

    Attributes:
        why: kind of failure.
        reason: message for the report.
        culprit: tensor or op that shows the failure; "" if unknown.
    """

    def __init__(self, why: ProofFailure, reason: str, culprit: str = "") -> None:
        super().__init__(reason)
        self.why = why
        self.reason = reason
        self.culprit = culprit


class RestartEvaluation(Exception):
    """Raised after the plan learned that an axis is cut, joined or summed over."""


class RedrawRows(Exception):
    """Raised if some rows have no root in this field.

    Attributes:
        mask: True for these rows, over the draws and ``atoms``; None for all.
        atoms: atoms of the mask's axes after the first.
        drawn: `Value.drawn` of the radicand.
    """

    def __init__(self, mask: Any, atoms: tuple[Size, ...], drawn: tuple[Any, int] | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.atoms = atoms
        self.drawn = drawn


class NewPrimeNeeded(Exception):
    """Raised if a constant has no root in this field."""


class EpsilonMismatch(Exception):
    """Raised if the radicand before the rewrite is r·(V + epsilon) with another epsilon than ``node``, a node after it.

    Attributes:
        node: id of the node after the rewrite.
        residue: the epsilon in the field.
        value: the epsilon as a float.
    """

    def __init__(self, node: int, residue: int, value: float) -> None:
        super().__init__()
        self.node = node
        self.residue = residue
        self.value = value
