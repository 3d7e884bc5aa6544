"""Describe a listed model: how to make it, its inputs, and the result that deployment must have."""

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
    """One positional input of ``forward``.

    Integers are drawn from [0, high), floats from the standard normal distribution.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    high: int = 2

    def sizes(self, dims: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the concrete shape.

        Args:
            dims: size of each dim by name; a missing dim has its opt size.

        Returns:
            the sizes.
        """
        chosen = dims or {}
        return tuple(size if isinstance(size, int) else chosen.get(size[0], size[2]) for size in self.shape)

    def sample(self, generator: torch.Generator, dims: Mapping[str, int] | None = None) -> torch.Tensor:
        """Draw random values in the dtype of this input.

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
        make: returns the module in eval mode, with parameters and running statistics that are random but the same at
            each call.
        expect: for each norm, in the order of the graph, the ONNX op type that it must become. "folded" means that no
            norm node remains. "A|B" means that either op is right. Empty for a lookalike.
        reason: for a lookalike, the property that distinguishes it from a norm; "" for a norm.
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
        """Return True if some dimension may be dynamic."""
        return any(not isinstance(size, int) for spec in self.inputs for size in spec.shape)

    @property
    def nodes(self) -> int:
        """Return the number of norm nodes that the optimized model must have."""
        return len(self.expect) - self.expect.count("folded")

    def accepts(self, ops: Sequence[str]) -> bool:
        """Check if the op types of the output's norm nodes are the expected types, in any order.

        Returns:
            True if each expected op type matches exactly one op in ``ops``, and no op remains.
        """
        found = sorted(ops)
        wanted = sorted(entry for entry in self.expect if entry != "folded")
        if len(found) != len(wanted):
            return False
        left = list(found)
        # Match the entries without alternatives first.
        for entry in sorted(wanted, key=lambda e: e.count("|")):
            match = next((op for op in left if op in entry.split("|")), None)
            if match is None:
                return False
            left.remove(match)
        return True


def norm_ops(nodes: Sequence[onnx.NodeProto], grouped: bool) -> list[str]:
    """List the op types of the norm nodes.

    Args:
        grouped: True if a group norm is expected. It may be written as nodes for which onnxruntime has kernels: a
            Reshape, an InstanceNormalization or LayerNormalization, a Reshape, and a BatchNormalization for gamma and
            beta. These count as one GroupNormalization.

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
    """Build a module in eval mode with random parameters and running statistics.

    The state of torch's global random generator does not change.

    Constructors set the parameters of norms to ones and zeros. With such parameters, a rewrite that loses gamma or beta
    would not be noticed. So these parameters are drawn at random.

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
    """Draw random inputs for ``case``. Floating-point inputs have the type ``dtype``.

    Returns:
        one tensor per input.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = (spec.sample(generator, dims) for spec in case.inputs)
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in drawn)
