"""What a listed model is: how to make it, what it takes, and what deployment should make of it."""

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
        """The concrete shape; a named dim takes its value from ``dims``, or its opt size."""
        chosen = dims or {}
        return tuple(size if isinstance(size, int) else chosen.get(size[0], size[2]) for size in self.shape)

    def sample(self, generator: torch.Generator, dims: Mapping[str, int] | None = None) -> torch.Tensor:
        """Random values of this input's own dtype."""
        shape, dtype = self.sizes(dims), getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, self.high, shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Case:
    """One model of the list.

    ``make`` is seeded and returns the module in eval mode with random parameters and running statistics. ``expect``
    holds, for each norm core in the order of the graph, the ONNX op type that it should become in the default output,
    "folded" where no norm node is left, and "A|B" where the standard has two equal nodes. ``reason`` is empty, or for a
    lookalike the name of what sets it apart; then ``expect`` is empty.
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
        """Whether any dimension may be dynamic."""
        return any(not isinstance(size, int) for spec in self.inputs for size in spec.shape)

    @property
    def nodes(self) -> int:
        """Number of norm nodes that the default output holds."""
        return len(self.expect) - self.expect.count("folded")

    def accepts(self, ops: Sequence[str]) -> bool:
        """Whether the norm nodes' op types found in the output, in any order, are the expected ones."""
        found = sorted(ops)
        wanted = sorted(entry for entry in self.expect if entry != "folded")
        if len(found) != len(wanted):
            return False
        left = list(found)
        for entry in sorted(wanted, key=lambda e: e.count("|")):  # the strict ones choose first
            match = next((op for op in left if op in entry.split("|")), None)
            if match is None:
                return False
            left.remove(match)
        return True


def norm_ops(nodes: Sequence[onnx.NodeProto], grouped: bool) -> list[str]:
    """The op types of the norm nodes.

    ``grouped``: a group norm is expected. It may be written as Reshape, InstanceNormalization or LayerNormalization,
    Reshape and a BatchNormalization for its gamma and beta, which onnxruntime has kernels for, and counts as the one
    node that it stands for.
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
    """Build a module with every parameter and running statistic random, in eval mode; torch's global generator is left
    alone.

    Constructors set norm parameters to constants (ones, zeros), which hide a lost gamma or beta: those are drawn anew.
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
    """Random inputs for ``case``; floating inputs in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (spec.sample(generator, dims) for spec in case.inputs)
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in drawn)
