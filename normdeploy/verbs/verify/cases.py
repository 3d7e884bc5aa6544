"""The inputs on which a model is compared with what was made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod

import numpy as np
from ml_dtypes import bfloat16

from ...errors import InputError
from ...model import Dim, InputSpec, Signature
from ...runtimes.arrays import check_feeds
from ...storage.archive import read_npz

EXTREME, NAN, INFINITE = "extreme", "nan", "infinite"  # kinds of cases
NONFINITE = frozenset({NAN, INFINITE})
HIDDEN = "hidden"  # a mask hides a whole row
DATASET = "dataset"  # kind of the samples of the user, for rules of his own
OWN_KINDS = frozenset({"given", DATASET})  # the user's own inputs, which are run whatever they take
LENIENT = NONFINITE | {EXTREME}  # where eager may leave its type's range, and what is made of the model as well
SMALL = 1e-4  # scale at which an epsilon of 1e-5 outweighs the variance
# At 1e-4 the bias of a norm is all that half precision keeps of its output. At 1e-2 the variance and an epsilon of 1e-5
# to 1e-3 are of one size, so that another epsilon moves the output itself.
SMALL_IN_HALF = 1e-2
_AFFORDABLE = 8  # times the input elements at the opt sizes
_ALWAYS = 1024  # input elements
_MOST_ALONE = 64  # dims of which each is tried at its maximum by itself


@dataclass(frozen=True)
class Case:
    """One input of the comparison.

    ``kind``: "random", "small", "zeros", HIDDEN, "given", or one of LENIENT. ``promised``: its sizes are ones that the
    model was said to take.
    ``sizes``: of the named dims, where they are known. ``labels``: of a dataset's samples, int64 [samples]; None where
    there are none.
    """

    name: str
    kind: str
    make: Callable[[], dict[str, np.ndarray]]
    promised: bool = True
    sizes: tuple[tuple[str, int], ...] = ()
    labels: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Given:
    """One of the user's inputs, and what it is called."""

    name: str
    feeds: Mapping[str, np.ndarray]


Feeds = Mapping[str, np.ndarray] | str | os.PathLike[str] | Given
Inputs = Feeds | Sequence[Feeds]


def read(inputs: Inputs) -> list[Given]:
    """The user's inputs, .npz files read.

    Raises:
        InputError: there is no such file, or it is no .npz of arrays.
    """
    cases = []
    for number, feeds in enumerate([inputs] if isinstance(inputs, Mapping | str | os.PathLike | Given) else inputs):
        if isinstance(feeds, Mapping):
            feeds = Given(f"given input {number}", feeds)
        cases.append(feeds if isinstance(feeds, Given) else Given(os.fspath(feeds), read_npz(feeds)))
    return cases


def given(inputs: Inputs) -> list[Case]:
    """The user's own inputs, as they are."""
    return [_case(one.name, dict(one.feeds)) for one in read(inputs)]


def given_to(model: Signature, inputs: Iterable[Given], also: Mapping[str, Collection[np.dtype]]) -> list[Case]:
    """The user's own inputs, checked before anything is run on them.

    Args:
        also: input -> half types in which a file takes it; such arrays are widened to the model's type, which is exact.

    Raises:
        InputError: an input is missing or unknown, or has another dtype, rank, static size, or two sizes for one dim;
            or all are empty.
    """

    def case(name: str, feeds: dict[str, np.ndarray]) -> Case:
        check_feeds(name, feeds, model.inputs)
        if feeds and not any(value.size for value in feeds.values()):
            raise InputError(f"{name}: no input has an element, so there is nothing to compare on; give larger ones")
        _one_size(name, feeds, model.inputs)
        return _case(name, feeds)

    types = {spec.name: np.dtype(bfloat16 if spec.dtype == "bfloat16" else spec.dtype) for spec in model.inputs}
    return [
        case(g.name, {n: _own(value, types.get(n), also.get(n, ())) for n, value in g.feeds.items()}) for g in inputs
    ]


def _case(name: str, feeds: dict[str, np.ndarray]) -> Case:
    return Case(name, "given", lambda: dict(feeds))


def _own(value: np.ndarray, wanted: np.dtype | None, also: Collection[np.dtype]) -> np.ndarray:
    value = np.asarray(value)
    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    if value.dtype.str[1:] == "V2" and bfloat16 in (wanted, *also):  # .npy files can't name it
        value = value.view(bfloat16)
    return value.astype(wanted) if wanted is not None and value.dtype in also else value


def _one_size(case: str, feeds: Mapping[str, np.ndarray], specs: Iterable[InputSpec]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for dim, size in zip(spec.shape, feeds[spec.name].shape, strict=True):
            if dim.name is not None and seen.setdefault(dim.name, (size, spec.name))[0] != size:
                other, first = seen[dim.name]
                raise InputError(
                    f"{case}: the dim {dim.name!r} is {other} in input {first!r} and {size} in input {spec.name!r}"
                )


def generated(model: Signature, seeds: int, most: int | None = None) -> tuple[list[Case], list[str]]:
    """Random, small and all-zero inputs at the sizes that ``model``'s dims may take, and a note for each size left out.

    Several seeds at the opt sizes; the min sizes (where a broadcast hides a wrong axis), an odd one (where a kernel's
    blocks do not divide it) and the max sizes, these as far as they cost no more than 8 times the opt sizes: all dims
    at once, or else each dim with the others at their min. ``most``: input elements of a case, in place of 8 times the
    opt sizes.
    """
    dims = model.dims
    opt = {name: d.opt for name, d in dims.items()}
    plan: list[tuple[dict[str, int], bool]] = [({name: d.min for name, d in dims.items()}, True)]
    plan.append(({name: _odd(d) for name, d in dims.items()}, False))
    largest = largest_sizes(model, most)
    plan.extend((sizes, True) for sizes in largest.kept)

    cases = [_random(model, opt, seed, True) for seed in range(seeds)]
    seen = [opt]
    for sizes, promised in plan:
        if sizes not in seen:
            seen.append(sizes)
            cases.append(_random(model, sizes, seeds + len(seen), promised))
    cases += small(model, seeds, SMALL)
    cases.append(Case(f"zeros{at_sizes(opt)}", "zeros", lambda: {spec.name: _zeros(spec) for spec in model.inputs}))
    cases.extend(_hidden(model, opt, seeds, spec.name) for spec in model.inputs if spec.mask)
    return cases, largest.left_out


def small(model: Signature, seed: int, scale: float) -> list[Case]:
    """Return the case of floating inputs around ``scale``; none where the model has no floating input."""
    if not any(is_floating(spec) for spec in model.inputs):
        return []
    opt = {name: dim.opt for name, dim in model.dims.items()}
    return [Case(f"inputs around {scale:g}{at_sizes(opt)}", "small", lambda: _scaled(model.samples(seed), scale))]


def _hidden(model: Signature, opt: Mapping[str, int], seed: int, name: str) -> Case:
    """A mask that hides whole rows, which no other case has: the first one, where there are several, as a batch filled
    up has it."""

    def make() -> dict[str, np.ndarray]:
        feeds = model.samples(seed, opt)
        feeds[name].reshape(-1, feeds[name].shape[-1])[:1] = 0
        return feeds

    return Case(f"{name} hides a whole row{at_sizes(opt)}", HIDDEN, make)


def _random(model: Signature, sizes: dict[str, int], seed: int, promised: bool) -> Case:
    return Case(
        f"seed {seed}{at_sizes(sizes)}", "random", lambda: model.samples(seed, sizes), promised, tuple(sizes.items())
    )


@dataclass(frozen=True)
class Largest:
    """``kept``: the largest sizes that are affordable, ``left_out``: what is not, in words; ``limit``: in input
    elements."""

    kept: list[dict[str, int]]
    left_out: list[str]
    limit: int


def largest_sizes(model: Signature, most: int | None = None) -> Largest:
    """The max sizes of all dims at once where that costs no more than ``most`` input elements, else of each dim, others
    at min."""
    dims = model.dims
    limit = (
        max(_ALWAYS, _AFFORDABLE * elements(model, {name: d.opt for name, d in dims.items()})) if most is None else most
    )
    every = {name: d.max for name, d in dims.items()}
    if elements(model, every) <= limit:
        return Largest([every], [], limit)
    low = {name: d.min for name, d in dims.items()}
    # A plan for each dim holds every dim: of many they would take the time and memory of their square.
    single = [low | {name: d.max} for name, d in islice(dims.items(), _MOST_ALONE)]
    kept = [sizes for sizes in single if elements(model, sizes) <= limit]
    left_out = [every, *(sizes for sizes in single if sizes not in kept and sizes != every)]
    notes = [f"not run at {listed(s)}: {elements(model, s)} input elements, more than {limit}" for s in left_out]
    if len(dims) > _MOST_ALONE:
        notes.append(f"{len(dims) - _MOST_ALONE} of {len(dims)} dims were not tried at their largest by themselves")
    return Largest(kept, notes, limit)


def elements(model: Signature, sizes: Mapping[str, int]) -> int:
    return sum(prod(spec.sizes(sizes)) for spec in model.inputs)


def _odd(dim: Dim) -> int:
    """An odd size of the dim that is none of its three, as near to the middle of its lower half as there is; its opt
    where none is."""
    middle = (dim.min + dim.opt) // 2
    span = max(middle - dim.min, dim.max - middle)
    near = (size for step in range(span + 1) for size in (middle + step, middle - step))
    return next((n for n in near if n % 2 and dim.min < n < dim.max and n != dim.opt), dim.opt)


def is_floating(spec: InputSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat"))


def _scaled(feeds: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    return {
        name: (v.astype(np.float64) * factor).astype(v.dtype) if v.dtype.kind not in "iub" else v
        for name, v in feeds.items()
    }


def _zeros(spec: InputSpec) -> np.ndarray:
    """Zeros, or the value nearest to zero that the input may take; of a mask ones."""
    sample = spec.sample(np.random.default_rng(0))
    low, high = spec.range or (0, 1)
    if spec.mask:
        return np.ones_like(sample)
    nearest = min(max(0, low), high - 1) if sample.dtype.kind in "iu" else min(max(0.0, low), high)
    return np.full_like(sample, nearest)


def at_sizes(sizes: Mapping[str, int]) -> str:
    return f", {listed(sizes)}" if sizes else ""


def listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
