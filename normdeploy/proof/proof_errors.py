"""How a proof ends without success, and how an evaluation asks to be begun again."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from ..graphs.symbolic_sizes import Size


class ProofFailure(Enum):
    """Why nothing was proved."""

    # an op that is no algebra, and no lemma says that it does nothing there
    OP = auto()
    # sizes that are not shown to be equal, or used in a way that is no polynomial
    SIZE = auto()
    # elements are regrouped in a way that is not followed
    LAYOUT = auto()
    # a root of what may be negative, or a division by what may be zero
    SIGN = auto()
    # the two are different functions
    DIFFERS = auto()
    # a NaN or Inf that the nodes before show and those after do not
    HIDDEN = auto()
    # a parameter as stored is not the exact one rounded
    STORED = auto()
    # the prover gave up
    LIMIT = auto()


class NotProved(Exception):
    """The two are different, or nobody knows; ``culprit`` is the tensor or op that shows it."""

    def __init__(self, why: ProofFailure, reason: str, culprit: str = "") -> None:
        super().__init__(reason)
        self.why = why
        self.reason = reason
        self.culprit = culprit


class RestartEvaluation(Exception):
    """The plan has learned how an axis is cut, or that it is summed over."""


class RedrawRows(Exception):
    """Some rows have no root in this field: ``mask`` over the draws and the atoms says which.

    ``drawn``: as of a `Value`, of what has no root.
    """

    def __init__(self, mask: Any, atoms: tuple[Size, ...], drawn: tuple[Any, int] | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.atoms = atoms
        self.drawn = drawn


class NewPrimeNeeded(Exception):
    """A constant has no root in this field."""


class EpsilonMismatch(Exception):
    """The radicand before is r·(V + epsilon) for another epsilon than that of ``node``, the node after."""

    def __init__(self, node: int, residue: int, value: float) -> None:
        super().__init__()
        self.node = node
        self.residue = residue
        self.value = value
