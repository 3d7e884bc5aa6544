"""The inputs on which a model is compared with what was made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from .model import Dim, InputSpec, Model

SMALL = 1e-4  # scale at which an epsilon of 1e-5 outweighs the variance, so that a changed one shows in every type
_AFFORDABLE = 8  # times the input elements at the opt sizes
_ALWAYS = 1024  # input elements


@dataclass(frozen=True)
class Case:
    """One input of the comparison.

    ``kind``: "random", "small", "zeros" or "given". Errors are compared among the cases of one kind, whose values have one magnitude.
    ``promised``: its sizes are ones that the model was said to take.
    """

    name: str
    kind: str
    make: Callable[[], dict[str, np.ndarray]]
    promised: bool = True


def given(inputs: Iterable[Mapping[str, np.ndarray]]) -> list[Case]:
    """The user's own inputs."""

    def case(number: int, feeds: Mapping[str, np.ndarray]) -> Case:
        return Case(f"given input {number}", "given", lambda: dict(feeds))

    return [case(number, feeds) for number, feeds in enumerate(inputs)]


def generated(model: Model, seeds: int) -> tuple[list[Case], list[str]]:
    """Random, small and all-zero inputs at the sizes that ``model``'s dims may take, and a note for each size left out.

    Several seeds at the opt sizes; the min sizes (where a broadcast hides a wrong axis), an odd one (where a kernel's blocks do not
    divide it) and the max sizes, these as far as they cost no more than 8 times the opt sizes: all dims at once, or else each dim
    with the others at their min.
    """
    dims = model.dims
    opt = {name: d.opt for name, d in dims.items()}
    plan: list[tuple[dict[str, int], bool]] = [({name: d.min for name, d in dims.items()}, True)]
    plan.append(({name: _odd(d) for name, d in dims.items()}, False))
    largest, notes = _largest(model)
    plan.extend((sizes, True) for sizes in largest)

    cases = [_random(model, opt, seed, True) for seed in range(seeds)]
    seen = [opt]
    for sizes, promised in plan:
        if sizes not in seen:
            seen.append(sizes)
            cases.append(_random(model, sizes, seeds + len(seen), promised))
    if any(_floating(spec) for spec in model.inputs):
        cases.append(Case(f"inputs around {SMALL:g}{_said(opt)}", "small", lambda: _scaled(model.samples(seeds), SMALL)))
    cases.append(Case(f"zeros{_said(opt)}", "zeros", lambda: {spec.name: _zeros(spec) for spec in model.inputs}))
    return cases, notes


def _random(model: Model, sizes: dict[str, int], seed: int, promised: bool) -> Case:
    return Case(f"seed {seed}{_said(sizes)}", "random", lambda: model.samples(seed, sizes), promised)


def _largest(model: Model) -> tuple[list[dict[str, int]], list[str]]:
    dims = model.dims
    limit = max(_ALWAYS, _AFFORDABLE * _elements(model, {name: d.opt for name, d in dims.items()}))
    every = {name: d.max for name, d in dims.items()}
    if _elements(model, every) <= limit:
        return [every], []
    low = {name: d.min for name, d in dims.items()}
    single = [low | {name: d.max} for name, d in dims.items()]
    kept = [sizes for sizes in single if _elements(model, sizes) <= limit]
    left_out = [every, *(sizes for sizes in single if sizes not in kept)]
    return kept, [f"not run at {_listed(sizes)}: {_elements(model, sizes)} input elements, more than {limit}" for sizes in left_out]


def _elements(model: Model, sizes: Mapping[str, int]) -> int:
    return sum(prod(spec.sizes(sizes)) for spec in model.inputs)


def _odd(dim: Dim) -> int:
    """An odd size of the dim that is none of its three, as near to the middle of its lower half as there is; its opt where none is."""
    middle = (dim.min + dim.opt) // 2
    span = max(middle - dim.min, dim.max - middle)
    near = (size for step in range(span + 1) for size in (middle + step, middle - step))
    return next((n for n in near if n % 2 and dim.min < n < dim.max and n != dim.opt), dim.opt)


def _floating(spec: InputSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat"))


def _scaled(feeds: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    return {name: (v.astype(np.float64) * factor).astype(v.dtype) if v.dtype.kind not in "iub" else v for name, v in feeds.items()}


def _zeros(spec: InputSpec) -> np.ndarray:
    """Zeros, or the value nearest to zero that the input may take."""
    sample = spec.sample(np.random.default_rng(0))
    low, high = spec.range or (0, 1)
    nearest = min(max(0, low), high - 1) if sample.dtype.kind in "iu" else min(max(0.0, low), high)
    return np.full_like(sample, nearest)


def _said(sizes: Mapping[str, int]) -> str:
    return f", {_listed(sizes)}" if sizes else ""


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
