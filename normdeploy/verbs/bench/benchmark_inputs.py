"""Check the sizes that the user gave for a benchmark, and generate its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...model import Dim, LoadedModel, TensorSpec, require_multiples
from ...types import Array, PathLike
from ..run.run_function import generate_feeds, recorded_pixels, recorded_specs


def check_counts(threads: int, rounds: int) -> None:
    """Check the numbers of threads and rounds.

    Raises:
        InputError: a number is below 1, or there are more threads than cores. Surplus threads would only wait for a
            core.
    """
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} is {value}; pass 1 or more")
    if threads > (cores := os.cpu_count() or threads):
        raise InputError(f"threads is {threads}, but this machine has {cores} cores; pass at most {cores}")


def check_sizes(sizes: Mapping[str, int], dims: set[str], ranges: Iterable[Dim] = ()) -> None:
    """Check the sizes that the user gave for dynamic dims.

    Args:
        sizes: name of a dim -> size.
        dims: names of all dynamic dims.
        ranges: the dynamic dims that have a range.

    Raises:
        InputError: a dim is unknown, or a size is outside the dim's range.
    """
    for dim in ranges:
        size = sizes.get(dim.name or "")
        if size is not None and not dim.min <= size <= dim.max:
            raise InputError(f"the size of dim {dim.name!r} is {size}; the model accepts {dim.min} to {dim.max}")
        if size is not None:
            require_multiples(f"the dim {dim.name!r}", [size], dim.step)
    if unknown := sorted(set(sizes) - dims):
        raise InputError(f"unknown dynamic dim {unknown[0]!r}; choose from: {', '.join(sorted(dims)) or 'none'}")


def make_benchmark_inputs(
    model: LoadedModel | None,
    files: Sequence[PathLike],
    specs: tuple[TensorSpec, ...],
    sizes: Mapping[str, int],
    seed: int,
    runs: Callable[[Mapping[str, Any]], bool] = lambda feeds: True,
) -> tuple[dict[str, Array], list[str]]:
    """Generate inputs for the model, or for the first file if there is no model.

    Args:
        specs: inputs of the first file.
        sizes: name of a dynamic dim -> size.
        runs: returns whether a contestant runs the given inputs.

    Returns:
        Input name -> array, and notes.

    Raises:
        InputError: a dim is unknown, or a size is outside the dim's range.
    """
    if model is not None:
        check_sizes(sizes, {*model.named_dims}, model.named_dims.values())
        return model.samples(seed, sizes), []
    recipes = {name: spec for file in reversed(files) for name, spec in recorded_specs(file).items()}
    dims = {d for spec in specs for d in spec.shape if isinstance(d, str)}
    ranges = [d for spec in recipes.values() for d in spec.shape if d.name is not None]
    check_sizes(sizes, dims | {d.name for d in ranges if d.name is not None}, ranges)
    pixels = {name: values for file in reversed(files) for name, values in recorded_pixels(file).items()}
    return generate_feeds(specs, recipes, seed, 0, sizes, runs, pixels)
