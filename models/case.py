"""Description of a listed model: how to make it, its inputs, and the expected result of deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch
from torch import nn

NORMS = {
    *("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"),
    *("BatchNormalization", "MeanVarianceNormalization", "LpNormalization"),
}

Size = int | tuple[str, int, int, int]
"""A fixed size, or a dimension that may be dynamic: (name, min, opt, max)."""


@dataclass(frozen=True)
class Input:
    """One positional input of ``forward``; integers are drawn from [0, high), floats from the standard normal."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    high: int = 2

    def sizes(self, dims: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the concrete shape.

        Args:
            dims: name -> size; a missing dim has its opt size.

        Returns:
            sizes.
        """
        chosen = dims or {}
        return tuple(size if isinstance(size, int) else chosen.get(size[0], size[2]) for size in self.shape)

    def sample(self, generator: torch.Generator, dims: Mapping[str, int] | None = None) -> torch.Tensor:
        """Draw random values in this input's own dtype.

        Returns:
            tensor of the concrete shape.
        """
        shape, dtype = self.sizes(dims), getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, self.high, shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Case:
    """One model of the list.

    Attributes:
        make: seeded; returns the module in eval mode with random parameters and running statistics.
        expect: for each norm core in the order of the graph, the ONNX op type that it should become in the default
            output: "folded" if no norm node is left, "A|B" if the standard has two equal nodes. Empty for a lookalike.
        reason: for a lookalike the property that distinguishes it from a norm; else "".
    """

    name: str
    row: str
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    expect: tuple[str, ...]
    handwritten: bool = True
    reason: str = ""

    @property
    def dynamic(self) -> bool:
        """Return whether any dimension may be dynamic."""
        return any(not isinstance(size, int) for spec in self.inputs for size in spec.shape)

    @property
    def nodes(self) -> int:
        """Return the number of norm nodes in the default output."""
        return len(self.expect) - self.expect.count("folded")

    def accepts(self, ops: Sequence[str]) -> bool:
        """Check if the norm nodes' op types found in the output, in any order, are the expected ones.

        Returns:
            true if each expected node is matched by exactly one found op.
        """
        found = sorted(ops)
        wanted = sorted(entry for entry in self.expect if entry != "folded")
        if len(found) != len(wanted):
            return False
        left = list(found)
        # Entries without alternatives choose first.
        for entry in sorted(wanted, key=lambda e: e.count("|")):
            match = next((op for op in left if op in entry.split("|")), None)
            if match is None:
                return False
            left.remove(match)
        return True


def norm_ops(nodes: Sequence[onnx.NodeProto], grouped: bool) -> list[str]:
    """List the op types of the norm nodes.

    Args:
        grouped: a group norm is expected. It may be written as Reshape, InstanceNormalization or LayerNormalization,
            Reshape, and a BatchNormalization for gamma and beta, for which onnxruntime has kernels. That counts as one
            GroupNormalization.

    Returns:
        op types in the order of the nodes.
    """
    reshaped = {n.output[0] for n in nodes if n.op_type == "Reshape"} if grouped else set()
    found = []
    for n in nodes:
        if n.op_type in ("InstanceNormalization", "LayerNormalization") and n.input[0] in reshaped:
            found.append("GroupNormalization")
        elif n.op_type in NORMS and not (n.op_type == "BatchNormalization" and n.input[0] in reshaped and _neutral(n)):
            found.append(n.op_type)
    return found


def _neutral(node: onnx.NodeProto) -> bool:
    return any(a.name == "epsilon" and a.f == 0.0 for a in node.attribute)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a module in eval mode with random parameters and running statistics; torch's global generator stays
    unchanged.

    Constructors set norm parameters to constants (ones, zeros), which would hide a lost gamma or beta, so these are
    drawn again.

    Returns:
        the module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build().eval()
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if (
                    not tensor.is_floating_point()
                    or tensor.numel() == 0
                    or not bool((tensor == tensor.flatten()[0]).all())
                ):
                    continue
                if name.endswith("running_var"):
                    tensor.uniform_(0.5, 2.0)
                else:
                    tensor.add_(torch.randn_like(tensor), alpha=0.4)
    return module


def samples(
    case: Case, dtype: torch.dtype = torch.float32, dims: Mapping[str, int] | None = None, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Draw random inputs for ``case``; floating inputs have the type ``dtype``.

    Returns:
        one tensor for each input.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = (spec.sample(generator, dims) for spec in case.inputs)
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in drawn)
