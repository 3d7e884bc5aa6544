"""Describe constants that a rewrite computed, for the prover.

A `ComputedConstants` gives each constant's exact value before rounding, as an expression of constants of the original
file. The proof that both sides agree holds for these exact values. Each stored number is then compared with its exact
value.
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
"""Function that computes the results of one side of a rewrite from the values of its leaves."""


class ComputedConstants(ABC):
    """Constants of one rewrite, with the expressions that define their exact values."""

    # True if taps of convolutions are identified by the input that they read (`normdeploy.proof.convolutions`)
    displaced: ClassVar[bool] = False

    @abstractmethod
    def computed_constants(self) -> list[gs.Constant]:
        """Return all constants that the rewrite computed.

        Returns:
            the constants, in no fixed order.
        """

    @abstractmethod
    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        """Compute the exact values from the constants of the original file.

        Args:
            absolute: replace each term of a sum by its magnitude, and compute in floats only. The result bounds
                rounding errors.

        Returns:
            values by the ids of the constants.

        Raises:
            NotProved: a constant cannot be computed, or depends on a size.
        """

    @abstractmethod
    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Return a key that is equal for rewrites that differ only in the elements of larger constants.

        Args:
            names: as for `Region.template_of`.

        Returns:
            a hashable tuple.
        """

    @property
    def nodes(self) -> Sequence[gs.Node]:
        """Return the nodes outside the regions that hold the original constants."""
        return ()

    @property
    def leaves(self) -> Sequence[gs.Tensor]:
        """Return the tensors that the nodes of `nodes` read as data."""
        return ()

    @property
    def weights(self) -> Sequence[np.ndarray]:
        """Return the float64 arrays that enter the computed constants and that no node of `nodes` reads."""
        return ()

    def expected_side(self, before: Side, graph: Graph) -> Side:
        """Return the function that the nodes after the rewrite must compute.

        Returns:
            by default ``before``, the function of the nodes before the rewrite.
        """
        return before
