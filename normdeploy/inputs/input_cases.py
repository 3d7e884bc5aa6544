"""Build the input cases on which a model is compared with the file that was made from the model."""

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

# Kinds of cases with very large values, with NaN and with Inf.
EXTREME, NAN, INFINITE = "extreme", "nan", "infinite"
NONFINITE = frozenset({NAN, INFINITE})
# Kind of the case in which an attention mask hides whole rows.
HIDDEN = "hidden"
# Kind of the cases from a user's dataset. The user's own rules decide whether their outputs are acceptable.
DATASET = "dataset"
# Kinds of a user's own inputs. These cases are run even if they are large.
OWN_KINDS = frozenset({"given", DATASET})
# Kinds of cases in which values may exceed the range of their type, in PyTorch and in the file.
LENIENT = NONFINITE | {EXTREME}
# Factor by which random inputs are multiplied for the kind "small". An epsilon of 1e-5 is then larger than the
# variance.
SMALL = 1e-4
# The same factor for half precision. With a factor of 1e-4, a norm's half-precision output would consist of the norm's
# bias alone. With 1e-2, the variance is about as large as an epsilon of 1e-5 to 1e-3, so a wrong epsilon changes the
# output.
SMALL_IN_HALF = 1e-2
# Maximum number of input elements of a case at max sizes, as a multiple of the number at the opt sizes.
_AFFORDABLE = 8
# Number of input elements that a case may always have, even if this number exceeds the limit above.
_ALWAYS = 1024
# Maximum number of dims that are tried at their max size one by one.
_MOST_ALONE = 64


@dataclass(frozen=True)
class InputCase:
    """One input case of the comparison.

    Attributes:
        kind: "random", "small", "zeros", HIDDEN, "given", DATASET, or one of LENIENT.
        make: function that returns input name -> array.
        promised: True if the model was stated to accept these sizes.
        sizes: (name, size) of each named dim; () if they are not known.
        labels: labels of a dataset's samples, int64 [samples]; None if there are no labels.
    """

    name: str
    kind: str
    make: Callable[[], dict[str, np.ndarray]]
    promised: bool = True
    sizes: tuple[tuple[str, int], ...] = ()
    labels: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class NamedInputs:
    """One set of the user's inputs, with a name for messages."""

    name: str
    feeds: Mapping[str, np.ndarray]


Feeds = Mapping[str, np.ndarray] | str | os.PathLike[str] | NamedInputs
Inputs = Feeds | Sequence[Feeds]


def read_inputs(inputs: Inputs) -> list[NamedInputs]:
    """Read the user's inputs, including .npz files.

    Args:
        inputs: one set of inputs or several, each as arrays by input name or as the path of an .npz file.

    Returns: each set with its name: the path, or "given input" and its position.

    Raises:
        InputError: a file is missing or is not an .npz of arrays.
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
    """Build one case for each set of the user's inputs, without checks.

    Returns: cases of the kind "given".
    """
    return [_make_case(one.name, dict(one.feeds)) for one in read_inputs(inputs)]


def check_user_cases(
    model: ModelSignature, inputs: Iterable[NamedInputs], also: Mapping[str, Collection[np.dtype]]
) -> list[InputCase]:
    """Build one case for each set of the user's inputs, and check each set before any model is run on it.

    Args:
        also: input name -> half-precision types that the file accepts for this input. Arrays of these types are
            converted to the model's type, which is exact.

    Returns: cases of the kind "given".

    Raises:
        InputError: an input is missing or unknown, has another dtype, rank or static size, or gives one dim two sizes;
            or all inputs are empty.
    """

    def make_checked_case(name: str, feeds: dict[str, np.ndarray]) -> InputCase:
        """Check one set of inputs and return its case."""
        check_feeds(name, feeds, model.inputs)
        if feeds and not any(value.size for value in feeds.values()):
            raise InputError(f"{name}: no input has an element, so there is nothing to compare; pass larger ones")
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
    # .npy files store bfloat16 as raw bytes, "V2".
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
    """Build random, small, all-zero and hidden-row cases for the sizes that the model's dims may take.

    Random cases at the opt sizes have several seeds. One case has the min sizes, at which a broadcast can hide a wrong
    axis. One case has odd sizes, which are not multiples of a kernel's blocks. One case has the max sizes of all dims,
    if its inputs have no more than 8 times the elements of the opt sizes. Otherwise, there is a case for each dim: this
    dim has its max size, and all other dims have their min sizes.

    Args:
        seeds: number of random cases at the opt sizes.
        most: maximum number of input elements of a case with max sizes; None for 8 times the opt sizes.

    Returns: the cases, and a note for each combination of sizes that is left out.
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
    """Build the case whose floating inputs are scaled by ``scale``.

    Returns: one case; [] if the model has no floating input.
    """
    if not any(is_floating_input(spec) for spec in model.inputs):
        return []
    opt = model.usual_sizes
    return [
        InputCase(
            f"inputs around {scale:g}{describe_sizes(opt)}", "small", lambda: _scale_feeds(model.samples(seed), scale)
        )
    ]


def _hidden_row_case(model: ModelSignature, opt: Mapping[str, int], seed: int, name: str) -> InputCase:
    """Build the case in which a mask hides the whole first row, as in a batch that was padded with empty texts.

    No other case hides a whole row.
    """

    def make_feeds() -> dict[str, np.ndarray]:
        """Draw the inputs and clear the first row of the mask."""
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
    """Largest sizes that a comparison can afford.

    Attributes:
        kept: largest affordable sizes of the named dims, one dict per case.
        left_out: notes for the user on the sizes that are not run.
        limit: maximum number of input elements of a case.
    """

    kept: list[dict[str, int]]
    left_out: list[str]
    limit: int


def find_largest_sizes(model: ModelSignature, most: int | None = None) -> AffordableSizes:
    """Find the largest sizes at which the comparison is affordable.

    Args:
        most: maximum number of input elements of a case; None for 8 times the opt sizes, and at least 1024.

    Returns:
        The max sizes of all dims at once if they are affordable. Otherwise one set of sizes for each of the first 64
        dims: this dim at its max, the others at their min.
    """
    dims = model.named_dims
    if most is None:
        limit = max(_ALWAYS, _AFFORDABLE * count_elements(model, {name: d.opt for name, d in dims.items()}))
    else:
        limit = most
    every = {name: d.max for name, d in dims.items()}
    if count_elements(model, every) <= limit:
        return AffordableSizes([every], [], limit)
    low = {name: d.min for name, d in dims.items()}
    # Each dict contains every dim, so one dict per dim would take quadratic time and memory for many dims.
    single = [low | {name: d.max} for name, d in islice(dims.items(), _MOST_ALONE)]
    kept = [sizes for sizes in single if count_elements(model, sizes) <= limit]
    left_out = [every, *(sizes for sizes in single if sizes not in kept and sizes != every)]
    notes = [
        f"not run at {join_sizes(s)}: {count_elements(model, s)} input elements, more than {limit}" for s in left_out
    ]
    if len(dims) > _MOST_ALONE:
        notes.append(f"{len(dims) - _MOST_ALONE} of {len(dims)} dims were not tried at their largest size individually")
    return AffordableSizes(kept, notes, limit)


def count_elements(model: ModelSignature, sizes: Mapping[str, int]) -> int:
    """Count the elements of all inputs at these sizes.

    Returns: the sum over the inputs.
    """
    return sum(prod(spec.concrete_shape(sizes)) for spec in model.inputs)


def _odd_size(dim: Dim) -> int:
    """Return an odd size near the middle between min and opt that differs from min, opt and max. If the dim has a step,
    the size is an odd multiple of the step.

    Returns: opt if none exists.
    """
    middle = (dim.min + dim.opt) // 2
    span = max(middle - dim.min, dim.max - middle)
    near = (size for step in range(span + 1) for size in (middle + step, middle - step))
    return next(
        (n for n in near if n % dim.step == 0 and n // dim.step % 2 and dim.min < n < dim.max and n != dim.opt),
        dim.opt,
    )


def is_floating_input(spec: InputSpec) -> bool:
    """Return whether the input's dtype is floating, including bfloat16."""
    return spec.dtype.startswith(("float", "bfloat"))


def _scale_feeds(feeds: dict[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    return {
        name: (v.astype(np.float64) * factor).astype(v.dtype) if v.dtype.kind not in "iub" else v
        for name, v in feeds.items()
    }


def zero_values(spec: InputSpec) -> np.ndarray:
    """Return the values of an input that are nearest to zero.

    Returns: zeros, or the number nearest to zero in the input's range; ones for a mask.
    """
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
    """Format sizes as the end of a case's name.

    Returns: ", batch=8, seq=16", for example; "" if there are none.
    """
    if sizes:
        return f", {join_sizes(sizes)}"
    return ""


def join_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes as a list.

    Returns: "batch=8, seq=16", for example.
    """
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
