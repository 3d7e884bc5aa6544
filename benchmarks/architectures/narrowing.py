"""Take the sizes that our export proposes if it refuses a dim, and run the plain file at the refused sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.utils import _pytree as pytree

from normdeploy.loading.dim_constraints import DimRangeError, FixedDimError
from normdeploy.model import Dim

from .catalogue import Architecture, samples

# Largest difference of the plain file from the module, relative to the largest element of an output
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ProposedSizes:
    """Sizes of one dim that our export accepts.

    Attributes:
        wished: the refused range.
        accepted: the proposed range; equal sizes for a fixed dim.
    """

    wished: Dim
    accepted: Dim

    @property
    def name(self) -> str:
        """Return the name of the dim."""
        return str(self.wished.name)

    @property
    def text(self) -> str:
        """Return the proposed size or range."""
        if self.accepted.min == self.accepted.max:
            return str(self.accepted.min)
        return str(self.accepted).partition("=")[2]

    @property
    def refused(self) -> list[int]:
        """Return the refused ones of the smallest, usual and largest size."""
        ends = {self.wished.min, self.wished.opt, self.wished.max}
        return sorted(ends - set(self.accepted.allowed_sizes()))

    def applied_to(self, architecture: Architecture) -> Architecture:
        """Give the inputs of an architecture the proposed sizes.

        Returns:
            the changed architecture.
        """
        if ":" in self.text:
            return replace(architecture, ranges={**architecture.ranges, self.name: self.text})
        return replace(architecture, inputs=tuple(_fix_dim(spec, self.name, self.text) for spec in architecture.inputs))


def _fix_dim(spec: str, name: str, size: str) -> str:
    head, _, rest = spec.partition("[")
    dims, _, tail = rest.partition("]")
    return f"{head}[{','.join(size if dim == name else dim for dim in dims.split(','))}]{tail}"


def proposed_sizes(refusal: Exception | None, architecture: Architecture) -> ProposedSizes | None:
    """Read the sizes that an error of our export proposes.

    Returns:
        the sizes; None if the error proposes none that differ from those of the architecture.
    """
    accepted: Dim | None = None
    if isinstance(refusal, FixedDimError) and refusal.size is not None:
        accepted = Dim(refusal.name, refusal.size, refusal.size, refusal.size)
    elif isinstance(refusal, DimRangeError):
        accepted = refusal.accepted
    text = architecture.sizes.get(str(accepted.name)) if accepted is not None else None
    if accepted is None or text is None:
        return None
    wished = Dim.from_range(str(accepted.name), text)
    return None if accepted == wished else ProposedSizes(wished, accepted)


def describe_plain_sizes(sizes: ProposedSizes, architecture: Architecture, module: nn.Module, path: Path) -> str:
    """Run the plain file at the refused sizes of a dim, beside the module.

    Returns:
        "the plain file fixes it too", or for each refused size if the plain file is right, is wrong or does not run.
    """
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.input}
    if any(shapes[name][axis] for name, axis in _axes_of(architecture, sizes.name) if name in shapes):
        return "the plain file fixes it too"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    verdicts = [f"{_run_beside(session, module, architecture, sizes.name, size)} at {size}" for size in sizes.refused]
    return f"the plain file {', '.join(verdicts)}"


def _axes_of(architecture: Architecture, dim: str) -> list[tuple[str, int]]:
    """Return the (input, axis) that have the dim."""
    found = []
    for spec in architecture.inputs:
        dims = spec.partition("[")[2].partition("]")[0].split(",")
        found += [(spec.partition(":")[0], axis) for axis, name in enumerate(dims) if name == dim]
    return found


def _run_beside(
    session: onnxruntime.InferenceSession, module: nn.Module, architecture: Architecture, dim: str, size: int
) -> str:
    ranges = {**architecture.ranges, dim: f"{size}:{size}:{size}"}
    feeds: Mapping[str, torch.Tensor] = samples.draw(replace(architecture, ranges=ranges))
    try:
        with torch.no_grad():
            expected = [v.numpy() for v in pytree.tree_leaves(module(**feeds)) if isinstance(v, torch.Tensor)]
    except Exception:
        # The module may raise any exception.
        return "was not compared, because the model does not run,"
    try:
        values = session.run(None, {value.name: feeds[value.name].numpy() for value in session.get_inputs()})
    except Exception:
        # onnxruntime's exceptions have no common base class.
        return "does not run"
    pairs = zip(values, expected, strict=False)
    return "is right" if all(_is_close(value, right) for value, right in pairs) else "is wrong"


def _is_close(value: np.ndarray, right: np.ndarray) -> bool:
    scale = np.abs(right).max(initial=0.0)
    return value.shape == right.shape and bool(np.abs(value - right).max(initial=0.0) <= _TOLERANCE * scale)
