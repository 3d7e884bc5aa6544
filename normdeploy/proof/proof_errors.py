"""Define the ways in which a proof fails, and the requests to restart an evaluation."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from ..graphs.symbolic_sizes import Size


class ProofFailure(Enum):
    """Reason why nothing was proved."""

    # An op is not algebraic, and no lemma admits it in this region
    OP = auto()
    # Sizes could not be shown to be equal, or a size is not a polynomial of the dims
    SIZE = auto()
    # Elements are regrouped in an unsupported way
    LAYOUT = auto()
    # A root of a value that may be negative, or a division by a value that may be zero
    SIGN = auto()
    # The sides are different functions
    DIFFERS = auto()
    # The nodes before the rewrite give a NaN or Inf that the nodes after do not
    HIDDEN = auto()
    # A stored parameter is not the exact parameter rounded once
    STORED = auto()
    # The prover gave up
    LIMIT = auto()


class NotProved(Exception):
    """Raised if the sides differ, or if the prover cannot decide whether they differ.

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
    """Raised if some radicands have no root in this field. Their rows are redrawn.

    Attributes:
        mask: True for the rows without a root. Its axes are the draw and ``atoms``. None means all rows.
        atoms: atoms of the axes of ``mask`` after the first axis.
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
    """Raised if the two sides have the same radicand except for its epsilon.

    The radicand before the rewrite is r·(V + epsilon), and the node after the rewrite has another epsilon.

    Attributes:
        node: id of the node after the rewrite that has the radicand.
        residue: the epsilon before the rewrite, in the field.
        value: the same epsilon as a float.
    """

    def __init__(self, node: int, residue: int, value: float) -> None:
        super().__init__()
        self.node = node
        self.residue = residue
        self.value = value
