"""List all models, and make their arguments for torch.export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .case import Case, Input, samples, seeded
from .lookalikes import LOOKALIKES
from .rms import rms_norms
from .rows import CASES, FIXED, TRAINING
from .small import SMALL
from .spellings import batches, groups, layers
from .streams import streams, torch_layers

__all__ = [
    "CASES",
    "FIXED",
    "LOOKALIKES",
    "SMALL",
    "SPELLINGS",
    "TRAINING",
    "Bank",
    "Case",
    "Input",
    "export_args",
    "samples",
    "seeded",
]

SPELLINGS: tuple[Case, ...] = (*streams(), *torch_layers(), *rms_norms(), *layers(), *groups(), *batches())
"""The rows in other words, and torch's own layers; a new spelling is tested by being listed."""


def export_args(
    case: Case, dtype: torch.dtype = torch.float32, dynamic: bool = False
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...] | None]:
    """Make arguments for ``torch.export.export(module, args, dynamic_shapes=dynamic_shapes)``.

    Returns:
        random inputs at the opt sizes, with floats in ``dtype``. For each input, its dynamic axes as named Dims with
        their ranges, or None if it is static.

    Raises:
        ValueError: ``dynamic`` is set, but the case has no dynamic dimension.
    """
    if not dynamic:
        return samples(case, dtype), None
    if not case.dynamic:
        raise ValueError(f"case {case.name!r} has no dynamic dimension: ask for dynamic=False")
    dims: dict[str, Any] = {}
    shapes = []
    for spec in case.inputs:
        axes = {}
        for axis, size in enumerate(spec.shape):
            if not isinstance(size, int):
                name, low, _, high = size
                axes[axis] = dims.setdefault(name, torch.export.Dim(name, min=low, max=high))
        shapes.append(axes)
    return samples(case, dtype), tuple(shapes)


class Bank(nn.Module):
    """Module with many cases, so that a single export covers them.

    Its inputs and outputs are the inputs and outputs of the cases, one after another.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = tuple(cases)
        self.members = nn.ModuleList(case.make() for case in cases)

    def samples(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """Draw random inputs at the opt sizes.

        Returns:
            inputs of all cases.
        """
        return tuple(value for seed, case in enumerate(self.cases) for value in samples(case, dtype, seed=seed))

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        rest = iter(inputs)
        for case, member in zip(self.cases, self.members, strict=True):
            found = member(*(next(rest) for _ in case.inputs))
            outputs += found if isinstance(found, tuple) else [found]
        return outputs
