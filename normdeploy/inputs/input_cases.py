"""The inputs on which a model is compared with what was made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod

import numpy as np
from ml_dtypes import bfloat16

from ..errors import InputError
from ..model import Dim, InputSpec, ModelSignature
from ..storage.npz_files import read_npz
from .array_conversion import check_feeds

# kinds of cases
EXTREME, NAN, INFINITE = "extreme", "nan", "infinite"
NONFINITE = frozenset({NAN, INFINITE})
# a mask hides a whole row
HIDDEN = "hidden"
# kind of the samples of the user, for rules of his own
DATASET = "dataset"
# the user's own inputs, which are run whatever they take
OWN_KINDS = frozenset({"given", DATASET})
# where eager may leave its type's range, and what is made of the model as well
LENIENT = NONFINITE | {EXTREME}
# scale at which an epsilon of 1e-5 outweighs the variance
SMALL = 1e-4
# At 1e-4 the bias of a norm is all that half precision keeps of its output. At 1e-2 the variance and an epsilon of 1e-5
# to 1e-3 are of one size, so that another epsilon moves the output itself.
SMALL_IN_HALF = 1e-2
# times the input elements at the opt sizes
_AFFORDABLE = 8
# input elements
_ALWAYS = 1024
# dims of which each is tried at its maximum by itself
_MOST_ALONE = 64


@dataclass(frozen=True)
class InputCase:
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
class NamedInputs:
    """One of the user's inputs, and what it is called."""

    name: str
    feeds: Mapping[str, np.ndarray]


Feeds = Mapping[str, np.ndarray] | str | os.PathLike[str] | NamedInputs
Inputs = Feeds | Sequence[Feeds]


def read_inputs(inputs: Inputs) -> list[NamedInputs]:
    """The user's inputs, .npz files read.

    Raises:
        InputError: there is no such file, or it is no .npz of arrays.
    """
    cases = []
    for number, feeds in enumerate(
        [inputs] if isinstance(inputs, Mapping | str | os.PathLike | NamedInputs) else inputs
    ):
        if isinstance(feeds, Mapping):
            feeds = NamedInputs(f"given input {number}", feeds)
        cases.append(feeds if isinstance(feeds, NamedInputs) else NamedInputs(os.fspath(feeds), read_npz(feeds)))
    return cases


def cases_from_inputs(inputs: Inputs) -> list[InputCase]:
    """The user's own inputs, as they are."""
    return [_make_case(one.name, dict(one.feeds)) for one in read_inputs(inputs)]


def check_user_cases(
    model: ModelSignature, inputs: Iterable[NamedInputs], also: Mapping[str, Collection[np.dtype]]
) -> list[InputCase]:
    """The user's own inputs, checked before anything is run on them.

    Args:
        also: input -> half types in which a file takes it; such arrays are widened to the model's type, which is exact.

    Raises:
        InputError: an input is missing or unknown, or has another dtype, rank, static size, or two sizes for one dim;
            or all are empty.
    """

    def make_checked_case(name: str, feeds: dict[str, np.ndarray]) -> InputCase:
        check_feeds(name, feeds, model.inputs)
        if feeds and not any(value.size for value in feeds.values()):
            raise InputError(f"{name}: no input has an element, so there is nothing to compare on; give larger ones")
        _require_consistent_dims(name, feeds, model.inputs)
        return _make_case(name, feeds)

    types = {spec.name: np.dtype(bfloat16 if spec.dtype == "bfloat16" else spec.dtype) for spec in model.inputs}
    return [
        make_checked_case(
            g.name, {n: _convert_input(value, types.get(n), also.get(n, ())) for n, value in g.feeds.items()}
        )
        for g in inputs
    ]


def _make_case(name: str, feeds: dict[str, np.ndarray]) -> InputCase:
    return InputCase(name, "given", lambda: dict(feeds))


def _convert_input(value: np.ndarray, wanted: np.dtype | None, also: Collection[np.dtype]) -> np.ndarray:
    value = np.asarray(value)
    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    # .npy files can't name it
    if value.dtype.str[1:] == "V2" and bfloat16 in (wanted, *also):
        value = value.view(bfloat16)
    if wanted is not None and value.dtype in also:
        return value.astype(wanted)
    return value


def _require_consistent_dims(case: str, feeds: Mapping[str, np.ndarray], specs: Iterable[InputSpec]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for dim, size in zip(spec.shape, feeds[spec.name].shape, strict=True):
            if dim.name is not None and seen.setdefault(dim.name, (size, spec.name))[0] != size:
                other, first = seen[dim.name]
                raise InputError(
                    f"{case}: the dim {dim.name!r} is {other} in input {first!r} and {size} in input {spec.name!r}"
                )


def generate_cases(model: ModelSignature, seeds: int, most: int | None = None) -> tuple[list[InputCase], list[str]]:
    """Random, small and all-zero inputs at the sizes that ``model``'s dims may take, and a note for each size left out.

    Several seeds at the opt sizes; the min sizes (where a broadcast hides a wrong axis), an odd one (where a kernel's
    blocks do not divide it) and the max sizes, these as far as they cost no more than 8 times the opt sizes: all dims
    at once, or else each dim with the others at their min. ``most``: input elements of a case, in place of 8 times the
    opt sizes.
    """
    dims = model.named_dims
    opt = {name: d.opt for name, d in dims.items()}
    plan: list[tuple[dict[str, int], bool]] = [({name: d.min for name, d in dims.items()}, True)]
    plan.append(({name: _odd_size(d) for name, d in dims.items()}, False))
    largest = find_largest_sizes(model, most)
    plan.extend((sizes, True) for sizes in largest.kept)

    cases = [_random_case(model, opt, seed, True) for seed in range(seeds)]
    seen = [opt]
    for sizes, promised in plan:
        if sizes not in seen:
            seen.append(sizes)
            cases.append(_random_case(model, sizes, seeds + len(seen), promised))
    cases += small_value_cases(model, seeds, SMALL)
    cases.append(
        InputCase(
            f"zeros{describe_sizes(opt)}", "zeros", lambda: {spec.name: zero_values(spec) for spec in model.inputs}
        )
    )
    cases.extend(_hidden_row_case(model, opt, seeds, spec.name) for spec in model.inputs if spec.mask)
    return cases, largest.left_out


def small_value_cases(model: ModelSignature, seed: int, scale: float) -> list[InputCase]:
    """Return the case of floating inputs around ``scale``; none where the model has no floating input."""
    if not any(is_floating_input(spec) for spec in model.inputs):
        return []
    opt = model.usual_sizes
    return [
        InputCase(
            f"inputs around {scale:g}{describe_sizes(opt)}", "small", lambda: _scale_feeds(model.samples(seed), scale)
        )
    ]


def _hidden_row_case(model: ModelSignature, opt: Mapping[str, int], seed: int, name: str) -> InputCase:
    """A mask that hides whole rows, which no other case has: the first one, where there are several, as a batch filled
    up has it."""

    def make_feeds() -> dict[str, np.ndarray]:
        feeds = model.samples(seed, opt)
        feeds[name].reshape(-1, feeds[name].shape[-1])[:1] = 0
        return feeds

    return InputCase(f"{name} hides a whole row{describe_sizes(opt)}", HIDDEN, make_feeds)


def _random_case(model: ModelSignature, sizes: dict[str, int], seed: int, promised: bool) -> InputCase:
    return InputCase(
        f"seed {seed}{describe_sizes(sizes)}",
        "random",
        lambda: model.samples(seed, sizes),
        promised,
        tuple(sizes.items()),
    )


@dataclass(frozen=True)
class AffordableSizes:
    """``kept``: the largest sizes that are affordable, ``left_out``: what is not, in words; ``limit``: in input
    elements."""

    kept: list[dict[str, int]]
    left_out: list[str]
    limit: int


def find_largest_sizes(model: ModelSignature, most: int | None = None) -> AffordableSizes:
    """The max sizes of all dims at once where that costs no more than ``most`` input elements, else of each dim, others
    at min."""
    dims = model.named_dims
    if most is None:
        limit = max(_ALWAYS, _AFFORDABLE * count_elements(model, {name: d.opt for name, d in dims.items()}))
    else:
        limit = most
    every = {name: d.max for name, d in dims.items()}
    if count_elements(model, every) <= limit:
        return AffordableSizes([every], [], limit)
    low = {name: d.min for name, d in dims.items()}
    # A plan for each dim holds every dim: of many they would take the time and memory of their square.
    single = [low | {name: d.max} for name, d in islice(dims.items(), _MOST_ALONE)]
    kept = [sizes for sizes in single if count_elements(model, sizes) <= limit]
    left_out = [every, *(sizes for sizes in single if sizes not in kept and sizes != every)]
    notes = [
        f"not run at {join_sizes(s)}: {count_elements(model, s)} input elements, more than {limit}" for s in left_out
    ]
    if len(dims) > _MOST_ALONE:
        notes.append(f"{len(dims) - _MOST_ALONE} of {len(dims)} dims were not tried at their largest by themselves")
    return AffordableSizes(kept, notes, limit)


def count_elements(model: ModelSignature, sizes: Mapping[str, int]) -> int:
    return sum(prod(spec.concrete_shape(sizes)) for spec in model.inputs)


def _odd_size(dim: Dim) -> int:
    """An odd size of the dim that is none of its three, as near to the middle of its lower half as there is; its opt
    where none is."""
    middle = (dim.min + dim.opt) // 2
    span = max(middle - dim.min, dim.max - middle)
    near = (size for step in range(span + 1) for size in (middle + step, middle - step))
    return next((n for n in near if n % 2 and dim.min < n < dim.max and n != dim.opt), dim.opt)


def is_floating_input(spec: InputSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat"))


def _scale_feeds(feeds: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    return {
        name: (v.astype(np.float64) * factor).astype(v.dtype) if v.dtype.kind not in "iub" else v
        for name, v in feeds.items()
    }


def zero_values(spec: InputSpec) -> np.ndarray:
    """Zeros, or the value nearest to zero that the input may take; of a mask ones."""
    sample = spec.sample(np.random.default_rng(0))
    low, high = spec.range or (0, 1)
    if spec.mask:
        return np.ones_like(sample)
    if sample.dtype.kind in "iu":
        nearest = min(max(0, low), high - 1)
    else:
        nearest = min(max(0.0, low), high)
    return np.full_like(sample, nearest)


def describe_sizes(sizes: Mapping[str, int]) -> str:
    if sizes:
        return f", {join_sizes(sizes)}"
    return ""


def join_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
