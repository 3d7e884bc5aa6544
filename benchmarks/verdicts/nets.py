"""Nets that represent the models of users, with their inputs.

The nets of `benchmarks.verify_alarms` are the plain ones; `vision` and `sequences` add larger mixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from models.case import Input

from .. import verify_alarms
from ..architectures.catalogue.building import randomised

BATCH = ("batch", 1, 2, 4)
LENGTH = ("seq", 2, 6, 40)


@dataclass(frozen=True)
class Net:
    """Module and its inputs. ``routes`` limits the exporters that can write it ("" is any)."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    routes: str = ""

    @property
    def dims(self) -> dict[str, tuple[str, int, int, int]]:
        """Return the dynamic dims by name."""
        return {size[0]: size for i in self.inputs for size in i.shape if not isinstance(size, int)}

    @property
    def specs(self) -> list[str]:
        """Return the inputs as ``--input`` takes them."""
        return [_spec(i) for i in self.inputs]

    def build(self) -> nn.Module:
        """Build the module in eval mode with scales, shifts and statistics like trained ones.

        Returns:
            the module.
        """
        torch.manual_seed(0)
        return randomised(self.make())

    def args(self, seed: int = 0, dims: Mapping[str, int] | None = None) -> tuple[torch.Tensor, ...]:
        """Draw inputs.

        Returns:
            tensors.
        """
        generator = torch.Generator().manual_seed(seed)
        return tuple(i.sample(generator, dims) for i in self.inputs)

    def other_dims(self) -> dict[str, int]:
        """Pick for each dim a size other than the example's.

        Returns:
            name -> size.
        """
        return {name: low if low > 1 else min(opt + 1, high) for name, low, opt, high in self.dims.values()}


def _spec(given: Input) -> str:
    sizes = [str(s) if isinstance(s, int) else f"{s[0]}={s[1]}:{s[2]}:{s[3]}" for s in given.shape]
    values = "" if given.dtype.startswith("float") else f"{{0:{given.high}}}"
    return f"{given.name}:{given.dtype}[{','.join(sizes)}]{values}"


def floats(*shape: int | tuple[str, int, int, int], name: str = "x") -> tuple[Input, ...]:
    """Describe a float32 input.

    Returns:
        a tuple of one input.
    """
    return (Input(name, "float32", shape),)


def ids(*shape: int | tuple[str, int, int, int], high: int, name: str = "ids") -> tuple[Input, ...]:
    """Describe an int64 input.

    Returns:
        a tuple of one input.
    """
    return (Input(name, "int64", shape, high),)


_INPUTS = {
    verify_alarms.LARGE: floats(1, 3, 96, 96),
    verify_alarms.IMAGE: floats(BATCH, 3, 8, 8),
    verify_alarms.TOKENS: floats(BATCH, LENGTH, 16),
    verify_alarms.ROWS: floats(("batch", 1, 3, 8), 16),
    verify_alarms.FIXED: floats(BATCH, 6, 16),
    verify_alarms.IDS: ids(BATCH, LENGTH, high=50),
}


class OneInput(nn.Module):
    """Net whose input has a name; for ``*args`` torch.export takes dims in another form."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x)
        return made


PLAIN = tuple(
    Net(name, lambda make=make: OneInput(make()), _INPUTS[spec])  # type: ignore[misc]
    for name, (make, spec) in verify_alarms.NETS.items()
)
