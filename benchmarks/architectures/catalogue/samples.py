"""Draw example inputs of an architecture from the texts of ``--input``."""

from __future__ import annotations

import re

import torch

from .building import Architecture


def draw(architecture: Architecture) -> dict[str, torch.Tensor]:
    """Draw example inputs at the usual sizes, for the bare exporter and the census of modules.

    Returns:
        name -> tensor.
    """
    sizes = {name: int(text.split(":")[1]) for name, text in architecture.sizes.items()}
    return {spec.partition(":")[0]: _draw_one(spec, sizes) for spec in architecture.inputs}


def _draw_one(spec: str, sizes: dict[str, int]) -> torch.Tensor:
    constant = re.fullmatch(r"\w+:(\w+)\[([\d,]+)\]\{([-\d.,]+)\}", spec)
    if constant is not None:
        dtype, dims, values = constant.groups()
        numbers = [float(value) for value in values.split(",")]
        return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape([int(d) for d in dims.split(",")])
    found = re.fullmatch(r"\w+:(\w+)\[(.*?)\](?:\{(.*?):(.*?)\})?", spec)
    assert found is not None, spec
    dtype, dims, low, high = found.groups()
    shape = [sizes[d] if d in sizes else int(d) for d in dims.split(",")]
    if dtype == "bool":
        return torch.ones(shape, dtype=torch.bool)
    if dtype == "int64":
        # Without a range, the input is a mask.
        return torch.randint(int(low or 1), int(high or 2), shape)
    return torch.randn(shape) if low is None else float(low) + (float(high) - float(low)) * torch.rand(shape)
