"""Constants that a rewrite computed, as the prover sees them.

Whoever computes constants says, by a `ComputedConstants`, what each of them is before it is rounded: an expression of
the file's own constants. The proof that before and after agree then holds for these, and each stored number is compared
with its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from .interpreter import ProofInterpreter
from .value import Value

Side = Callable[[ProofInterpreter, Sequence[Value]], list[Value]]
"""What one side of a rewrite makes of the values of its leaves."""


class ComputedConstants(ABC):
    """The constants of one rewrite, and the expressions that they are the values of."""

    # Whether taps of convolutions are told apart by what they read (`proof.convolutions`).
    displaced: ClassVar[bool] = False

    @abstractmethod
    def computed_constants(self) -> list[gs.Constant]:
        """Return all that was computed."""

    @abstractmethod
    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        """Compute the constants from the file's own.

        Args:
            absolute: in floats alone, sum the magnitudes of their terms instead.

        Returns:
            values by the ids of the constants.

        Raises:
            NotProved: they can't be worked out, or depend on a size.
        """

    @abstractmethod
    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Return what is equal for rewrites that differ in the elements of larger constants alone.

        Args:
            names: as for `Region.template_of`.
        """

    @property
    def nodes(self) -> Sequence[gs.Node]:
        """Nodes whose constants they are made of, besides those of the regions."""
        return ()

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        """Tensors that these nodes read as data."""
        return ()

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """Float64 arrays that they are made of and that no node of `nodes` reads."""
        return ()

    def expected_side(self, before: Side, graph: Graph) -> Side:
        """Return what the nodes after have to compute: by default what those before do."""
        return before
