"""Make the edge cases of ``verify``: extreme and non-finite values, all rows of small tables, and more sizes.

Declared ranges are respected, for integers and for floating-point inputs with a given range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np

from ...inputs.input_cases import (
    EXTREME,
    INFINITE,
    NAN,
    InputCase,
    count_elements,
    describe_sizes,
    find_largest_sizes,
    generate_cases,
    is_floating_input,
)
from ...model import Dim, InputSpec, ModelSignature
from ...types import Array, Arrays
from .reference_models import Original, count_flops

# Factor by which an outlier is larger than the other elements.
_OUTLIER = 1e3
# Maximum number of floating-point inputs that get a NaN or Inf, one input at a time.
_PLACED = 3
# Maximum number of cases that together index every row of a table.
_ROW_CASES = 8
# All sizes up to this one are run. Of larger sizes, only those around powers of two are run.
_EVERY = 16
# Maximum magnitude of the integers that are tried for an input with an unknown range.
_SMALL = 100
# Number of bits in a byte.
_BYTE = 8
# Share of the elements of an integer input that keep their values when an integer from the file is tried.
_KEPT = 0.5
# Maximum floating-point operations of one run of a quantized file at more sizes: about two seconds in float64.
_QUANTIZED_WORK = 1e10
# Floating-point operations to spend on more sizes, counted as one run for each size. Each size is really run about
# seven times.
_WORK = 2e9


@dataclass(frozen=True)
class InputPlan:
    """Input cases of a comparison.

    Attributes:
        left_out: sizes that are not run because they cost too much, each with the reason.
        most: limit on the input elements of a case.
        too_large: sizes whose inner tensors take too much memory.
    """

    cases: tuple[InputCase, ...]
    left_out: tuple[str, ...] = ()
    most: int = 0
    too_large: tuple[str, ...] = ()


@dataclass(frozen=True)
class IntegerHints:
    """Values to try for integer inputs with unknown range, in addition to 0 and 1.

    Attributes:
        named: input -> integers with which a file compares the input.
        examples: input -> array in the model's example call; {} without an example call.
        free: inputs that no file uses as a size or as an index of a table.
    """

    named: Mapping[str, Sequence[int]] = field(default_factory=dict)
    examples: Arrays = field(default_factory=dict)
    free: Collection[str] = ()


def make_edge_cases(
    model: ModelSignature,
    seeds: int,
    *,
    most: int | None = None,
    work: float = 0.0,
    integers: IntegerHints | None = None,
) -> InputPlan:
    """Make every generated case of ``verify``.

    Args:
        seeds: number of random inputs at the opt sizes.
        most: limit on the input elements of a case; None: 8 times those at the opt sizes.
        work: floating-point operations of one run at the opt sizes, as far as known. They determine how many more sizes
            are run.
        integers: values to try for integer inputs in addition to random values.

    Returns:
        the cases, and the sizes that are left out.
    """
    cases, left_out = generate_cases(model, seeds, most)
    opt = model.usual_sizes
    cases += _extreme_cases(model, opt, seeds)
    cases += _non_finite_cases(model, opt, seeds)
    cases += _table_row_cases(model, seeds, most)
    cases += _claimed_cases(model, seeds)
    integers = integers or IntegerHints()
    cases += _compared_integer_cases(model, opt, seeds, integers.named)
    cases += _example_size_cases(model, seeds, integers.examples)
    cases += _small_integer_cases(model, opt, seeds, integers.free)
    ran = {case.sizes for case in cases}
    limit = find_largest_sizes(model, most).limit
    spent = 0.0
    each = max(work, 100.0 * count_elements(model, opt))
    for number, sizes in enumerate(_iter_sizes(model, opt, limit)):
        key = tuple(sizes.items())
        cost = each * count_elements(model, sizes) / max(count_elements(model, opt), 1)
        if key in ran or (spent and spent + cost > _WORK):
            continue
        ran.add(key)
        spent += cost
        maker = CaseMaker(model, sizes, 1000 + number)
        cases.append(maker.changed_case(f"seed {maker.seed}", "random", _leave_as_drawn, promised=False))
    return InputPlan(tuple(cases), tuple(left_out), limit)


def _claimed_cases(model: ModelSignature, seeds: int) -> Iterator[InputCase]:
    """Yield random inputs with the values and sizes that the tested file claims, in addition to the model's own."""
    if not model.claimed:
        return
    claim = ModelSignature(inputs=model.claimed, outputs=model.outputs, kind=model.kind)
    sizes = claim.usual_sizes
    for seed in range(seeds):
        name = f"seed {seed}{describe_sizes(sizes)}, as the file claims its inputs"
        yield InputCase(name, "random", partial(claim.samples, seed, sizes), promised=False)


def has_unknown_range(spec: InputSpec) -> bool:
    """Check whether the range of an integer input is unknown, so that 0 and 1 are drawn.

    Returns:
        True for an integer input without a range or with the default (0, 2), unless it is a mask.
    """
    return spec.dtype.startswith(("int", "uint")) and spec.range in (None, (0, 2)) and not spec.mask


def _compared_integer_cases(
    model: ModelSignature, opt: Mapping[str, int], seed: int, named: Mapping[str, Sequence[int]]
) -> Iterator[InputCase]:
    """Yield cases for each integer with which a file compares an input, and for the next integer.

    The file may have a branch that runs only for this integer.
    """
    specs = {spec.name: spec for spec in model.inputs}
    maker = CaseMaker(model, opt, seed)
    for name, values in named.items():
        kind = np.iinfo(specs[name].dtype)
        if has_unknown_range(specs[name]):
            drawn = range(2)
        else:
            drawn = range(0)
        low, high = (kind.min, kind.max + 1) if drawn else specs[name].range or (0, 0)
        for value in dict.fromkeys(n for v in values for n in (v, v + 1 if v >= 0 else v - 1)):
            if low <= value < high and value not in drawn:
                change = partial(_set_half_to, name=name, value=value)
                yield maker.changed_case(f"{name} around {value}", "random", change, promised=False)


def _set_half_to(feeds: dict[str, Array], rng: np.random.Generator, name: str, value: int) -> None:
    x = feeds[name]
    if x.size > 1:
        kept = rng.random(x.shape) < _KEPT
    else:
        kept = False
    feeds[name] = np.where(kept, x, np.asarray(value, x.dtype))


def _small_integer_cases(
    model: ModelSignature, opt: Mapping[str, int], seeds: int, free: Collection[str]
) -> Iterator[InputCase]:
    """Yield random inputs whose free integers are small numbers of both signs.

    A division or a comparison treats them differently from 0 and 1. 8-bit integers take all values of their type, like
    the pixels of an image. Wider integers are cases of the kind "extreme", because they may exceed the range of a
    half-precision model.
    """
    whole = all(
        np.iinfo(spec.dtype).bits == _BYTE for spec in model.inputs if spec.name in free and has_unknown_range(spec)
    )
    if whole:
        kind = "random"
    else:
        kind = EXTREME
    wide = tuple(_widen_range(spec) if spec.name in free and has_unknown_range(spec) else spec for spec in model.inputs)
    if wide == model.inputs:
        return
    told = ", ".join(
        f"{spec.name} from {spec.range[0]} to {spec.range[1] - 1}"
        for spec, old in zip(wide, model.inputs, strict=True)
        if spec is not old and spec.range is not None
    )
    widened = ModelSignature(inputs=wide, outputs=model.outputs, kind=model.kind)
    for seed in range(seeds):
        name = f"seed {seed}{describe_sizes(opt)}, {told}"
        yield InputCase(name, kind, partial(widened.samples, seed, opt), promised=False, sizes=tuple(opt.items()))


def _widen_range(spec: InputSpec) -> InputSpec:
    kind = np.iinfo(spec.dtype)
    if kind.bits == _BYTE:
        return replace(spec, range=(int(kind.min), int(kind.max) + 1))
    return replace(spec, range=(max(int(kind.min), -_SMALL), _SMALL + 1))


def _example_size_cases(model: ModelSignature, seeds: int, examples: Arrays) -> Iterator[InputCase]:
    """Yield the example call, and random inputs at its sizes.

    In the random inputs, integers of unknown range are drawn from 1 to their maximum in the example call.
    """
    tops = {
        spec.name: int(examples[spec.name].max(initial=0))
        for spec in model.inputs
        if has_unknown_range(spec) and spec.name in examples
    }
    tops = {name: top for name, top in tops.items() if top > 1}
    if not tops:
        return
    yield InputCase("the example call", "random", lambda: {n: v.copy() for n, v in examples.items()}, promised=False)
    inputs = tuple(
        replace(
            spec,
            shape=tuple(map(Dim.from_size, examples[spec.name].shape)),
            range=(1, tops[spec.name] + 1) if spec.name in tops else spec.range,
        )
        for spec in model.inputs
    )
    called = ModelSignature(inputs=inputs, outputs=model.outputs, kind=model.kind)
    for seed in range(seeds):
        told = ", ".join(f"{name} up to {top}" for name, top in tops.items())
        yield InputCase(f"seed {seed}, {told}", "random", partial(called.samples, seed, {}), promised=False)


def make_affordable_cases(
    model: Original,
    seeds: int,
    most: int | None = None,
    *,
    quantized: bool = False,
    integers: IntegerHints | None = None,
) -> InputPlan:
    """Make cases as `make_edge_cases` does. The cheaper the model is, the more sizes are run.

    Args:
        quantized: True if all files are quantized. They then run a dozen times in float64 on each input. So sizes above
            the opt sizes are left out if one run costs more than `_QUANTIZED_WORK`, unless ``most`` is given.

    Returns:
        the cases, and the sizes that are left out.
    """
    work = count_flops(model)
    if quantized and most is None and work:
        most = find_largest_sizes(model, None).limit
        opt = count_elements(model, model.usual_sizes)
        most = min(most, max(opt, int(opt * _QUANTIZED_WORK / work)))
    return make_edge_cases(model, seeds, most=most, work=work, integers=integers)


# Function that changes random inputs in place.
Change = Callable[[dict[str, Array], np.random.Generator], None]


@dataclass(frozen=True)
class CaseMaker:
    """Make cases of random inputs at given sizes of the dims."""

    model: ModelSignature
    sizes: Mapping[str, int]
    seed: int

    def changed_case(self, name: str, kind: str, change: Change, *, promised: bool = True) -> InputCase:
        """Make a case with changed random inputs.

        Args:
            name: name of the case; its sizes are appended.
            change: changes the inputs in place.
            promised: True if the model must run on the case.

        Returns:
            the case. It draws its inputs when they are needed.
        """

        def make_feeds() -> dict[str, Array]:
            feeds = self.model.samples(self.seed, self.sizes)
            change(feeds, np.random.default_rng(self.seed))
            return feeds

        return InputCase(f"{name}{describe_sizes(self.sizes)}", kind, make_feeds, promised, tuple(self.sizes.items()))


def _leave_as_drawn(feeds: dict[str, Array], rng: np.random.Generator) -> None:
    pass


# ------------------------------------------------------------------ values


def _is_unbounded_float(spec: InputSpec) -> bool:
    return is_floating_input(spec) and spec.range is None


Edit = Callable[[Array, np.random.Generator], Array]


def _extreme_cases(model: ModelSignature, opt: Mapping[str, int], seed: int) -> Iterator[InputCase]:
    """Yield cases with extreme values in every floating-point input without a given range.

    The values are all negative, all positive, constant, or 100 times larger, or one of them is an outlier.
    """
    free = {spec.name for spec in model.inputs if _is_unbounded_float(spec)}
    edits: dict[str, Edit] = {
        "all negative": lambda v, rng: -np.abs(v),
        "all positive": lambda v, rng: np.abs(v),
        "constant": lambda v, rng: np.full_like(v, rng.standard_normal()),
        "times 100": lambda v, rng: v * 100,
        "one outlier": partial(_insert_in_first_row, value=_OUTLIER),
    }
    for name, edit in edits.items() if free else ():
        yield CaseMaker(model, opt, seed).changed_case(name, EXTREME, partial(_edit_inputs, names=free, edit=edit))


def _non_finite_cases(model: ModelSignature, opt: Mapping[str, int], seed: int) -> Iterator[InputCase]:
    """Yield cases with a NaN, an Inf or a −Inf in one element of one input."""
    for name in [spec.name for spec in model.inputs if _is_unbounded_float(spec)][:_PLACED]:
        for value, kind in ((np.nan, NAN), (np.inf, INFINITE), (-np.inf, INFINITE)):
            change = partial(_edit_inputs, names={name}, edit=partial(_insert_in_first_row, value=value))
            yield CaseMaker(model, opt, seed).changed_case(f"one {value} in {name}", kind, change)


def _insert_in_first_row(values: Array, rng: np.random.Generator, value: float) -> Array:
    """Return a copy with ``value`` in one element of the first row. The outputs of other rows show whether ``value``
    spreads to them.
    """
    changed = values.copy()
    if changed.size:
        first = changed.reshape(len(changed) if changed.ndim else 1, -1)[0]
        first[rng.integers(first.size)] = value
    return changed


def _edit_inputs(feeds: dict[str, Array], rng: np.random.Generator, names: Collection[str], edit: Edit) -> None:
    # In half precision, values times 100 may exceed the range, which numpy would warn about.
    with np.errstate(all="ignore"):
        for name in [name for name in feeds if name in names]:
            feeds[name] = edit(feeds[name].astype(np.float64), rng).astype(feeds[name].dtype)


# ------------------------------------------------------------------ tables


def _table_row_cases(model: ModelSignature, seed: int, most: int | None) -> Iterator[InputCase]:
    """Yield cases that cover every value of an integer input, if a few inputs of an affordable size are enough.

    Inputs with two values are skipped, because random draws cover both values.
    """
    plans = [model.usual_sizes, *find_largest_sizes(model, most).kept]
    for spec in model.inputs:
        if spec.range is None or not _is_index_input(spec):
            continue
        low = int(spec.range[0])
        span = int(spec.range[1]) - low
        sizes = next((p for p in plans if -(-span // max(prod(spec.concrete_shape(p)), 1)) <= _ROW_CASES), None)
        if sizes is None:
            continue
        count = max(prod(spec.concrete_shape(sizes)), 1)
        for start in range(0, span, count):
            rows = f"rows {low + start} to {low + min(start + count, span) - 1} of {spec.name}"
            change = partial(_set_rows, name=spec.name, low=low, span=span, start=start)
            yield CaseMaker(model, sizes, seed).changed_case(rows, "random", change)


def _set_rows(feeds: dict[str, Array], rng: np.random.Generator, name: str, low: int, span: int, start: int) -> None:
    x = feeds[name]
    feeds[name] = (low + (start + np.arange(x.size)) % span).reshape(x.shape).astype(x.dtype)


def _is_index_input(spec: InputSpec) -> bool:
    """Return whether the input has integers with more than two values."""
    return spec.dtype.startswith(("int", "uint")) and spec.range is not None and spec.range[1] - spec.range[0] > 2


# ------------------------------------------------------------------ sizes


def _iter_sizes(model: ModelSignature, opt: Mapping[str, int], limit: int) -> Iterator[dict[str, int]]:
    """Yield sizes: first all dims at 2, then more sizes of one dim at a time.

    The other dims keep their opt size, or their smallest size if the opt size costs too much.
    """
    dims = model.named_dims
    yield {name: next(iter(dim.allowed_sizes(2)), dim.max) for name, dim in dims.items()}
    low = {name: dim.min for name, dim in dims.items()}
    for step in range(max((len(_sizes_of_dim(dim)) for dim in dims.values()), default=0)):
        for name, dim in dims.items():
            if step < len(more := _sizes_of_dim(dim)):
                plans = ({**opt, name: more[step]}, {**low, name: more[step]})
                yield from [p for p in plans if count_elements(model, p) <= limit][:1]


def _sizes_of_dim(dim: Dim) -> list[int]:
    """Return the maximum, all sizes up to 17, and sizes around each power of two above, within the dim's range."""
    powers = [2**k + d for k in range(5, 31) for d in (1, 0, -1)]
    wanted = [dim.max, *range(1, _EVERY + 1), _EVERY + 1, *powers]
    allowed = dim.allowed_sizes()
    sizes = [size for size in wanted if size in allowed]
    # Few of these sizes are multiples of a step.
    if dim.step > 1:
        sizes += allowed[:_EVERY]
    return list(dict.fromkeys(sizes))
