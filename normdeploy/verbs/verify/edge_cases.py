"""What ``verify`` runs besides the usual cases: extreme values, numbers that are not finite, every row of small tables,
more sizes.

What an input is declared to take is kept to: an integer stays in its range, and so does a floating input for which one
is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .reference_models import Original, count_flops

# times a usual value
_OUTLIER = 1e3
# floating inputs into which a NaN or Inf is placed, each by itself
_PLACED = 3
# to reach every row of a table
_ROW_CASES = 8
# sizes up to here are run one by one, above it those around powers of two
_EVERY = 16
# the largest magnitude of an integer of which nothing is known
_SMALL = 100
# bits
_BYTE = 8
# of the elements of an integer input, where one is tried that a file names
_KEPT = 0.5
# floating-point operations of one run of a quantized file: some two seconds in float64
_QUANTIZED_WORK = 1e10
# floating-point operations of one run, spent on more sizes; each is run about seven times
_WORK = 2e9


@dataclass(frozen=True)
class EdgeCases:
    """``left_out``: sizes that cost too much, each with the reason; ``most``: the input elements up to which sizes were
    run."""

    cases: tuple[InputCase, ...]
    left_out: tuple[str, ...]
    most: int


@dataclass(frozen=True)
class IntegerHints:
    """What is known of integer inputs whose range nobody states, beside 0 and 1.

    ``named``: by input, the integers that a file compares it with. ``examples``: the example call of the model, of all
    its inputs; {} where there is none. ``free``: the inputs that no file takes for a size or for rows of a table.
    """

    named: Mapping[str, Sequence[int]] = field(default_factory=dict)
    examples: Mapping[str, np.ndarray] = field(default_factory=dict)
    free: Collection[str] = ()


def make_edge_cases(
    model: ModelSignature,
    seeds: int,
    *,
    most: int | None = None,
    work: float = 0.0,
    integers: IntegerHints | None = None,
) -> EdgeCases:
    """Every generated case of ``verify``.

    Args:
        seeds: random inputs at the opt sizes.
        most: input elements of the largest case, None: 8 times those at the opt sizes.
        work: floating-point operations of one run at the opt sizes, as far as known; what decides how many more sizes
        are run.
        integers: what is tried of integer inputs beside the random ones.
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
        seed = 1000 + number
        cases.append(
            InputCase(
                f"seed {seed}{describe_sizes(sizes)}",
                "random",
                _sample_maker(model, seed, sizes),
                promised=False,
                sizes=key,
            )
        )
    return EdgeCases(tuple(cases), tuple(left_out), limit)


def _claimed_cases(model: ModelSignature, seeds: int) -> Iterator[InputCase]:
    """Random inputs of the values and sizes that the file under test claims, beside those that the model takes."""
    if not model.claimed:
        return
    claim = ModelSignature(inputs=model.claimed, outputs=model.outputs, kind=model.kind)
    sizes = claim.usual_sizes
    for seed in range(seeds):
        name = f"seed {seed}{describe_sizes(sizes)}, as the file claims its inputs"
        yield InputCase(name, "random", _sample_maker(claim, seed, sizes), promised=False)


def has_unknown_range(spec: InputSpec) -> bool:
    """Return whether nothing is known of the values of an integer input: 0 and 1 are drawn then."""
    return spec.dtype.startswith(("int", "uint")) and spec.range in (None, (0, 2)) and not spec.mask


def _compared_integer_cases(
    model: ModelSignature, opt: Mapping[str, int], seed: int, named: Mapping[str, Sequence[int]]
) -> Iterator[InputCase]:
    """Each integer that a file compares an input with, and the next one: a branch that no other input takes may hang
    on it."""
    specs = {spec.name: spec for spec in model.inputs}
    for name, values in named.items():
        kind = np.iinfo(specs[name].dtype)
        drawn = range(2) if has_unknown_range(specs[name]) else range(0)
        low, high = (kind.min, kind.max + 1) if drawn else specs[name].range or (0, 0)
        for value in dict.fromkeys(n for v in values for n in (v, v + 1 if v >= 0 else v - 1)):
            if low <= value < high and value not in drawn:
                yield InputCase(
                    f"{name} around {value}{describe_sizes(opt)}",
                    "random",
                    _feeds_with_value(model, opt, seed, name, value),
                    promised=False,
                    sizes=tuple(opt.items()),
                )


def _feeds_with_value(
    model: ModelSignature, opt: Mapping[str, int], seed: int, name: str, value: int
) -> Callable[[], dict[str, np.ndarray]]:
    def make_feeds() -> dict[str, np.ndarray]:
        feeds = model.samples(seed, opt)
        kept = np.random.default_rng(seed).random(feeds[name].shape) < _KEPT if feeds[name].size > 1 else False
        feeds[name] = np.where(kept, feeds[name], np.asarray(value, feeds[name].dtype))
        return feeds

    return make_feeds


def _small_integer_cases(
    model: ModelSignature, opt: Mapping[str, int], seeds: int, free: Collection[str]
) -> Iterator[InputCase]:
    """Random inputs in which the free integers are small numbers of both signs: a division or a comparison does with
    them what it does not do with 0 and 1. Those of 8 bits take all values of their type, as the pixels of an image
    do. A wider one that is no flag may take a half model beyond its range."""
    whole = all(
        np.iinfo(spec.dtype).bits == _BYTE for spec in model.inputs if spec.name in free and has_unknown_range(spec)
    )
    kind = "random" if whole else EXTREME
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
        yield InputCase(name, kind, _sample_maker(widened, seed, opt), promised=False, sizes=tuple(opt.items()))


def _widen_range(spec: InputSpec) -> InputSpec:
    kind = np.iinfo(spec.dtype)
    if kind.bits == _BYTE:
        return replace(spec, range=(int(kind.min), int(kind.max) + 1))
    return replace(spec, range=(max(int(kind.min), -_SMALL), _SMALL + 1))


def _example_size_cases(model: ModelSignature, seeds: int, examples: Mapping[str, np.ndarray]) -> Iterator[InputCase]:
    """Random inputs at the sizes of the example call, in which each open integer is one up to its largest there, and
    the example itself."""
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
        yield InputCase(f"seed {seed}, {told}", "random", _sample_maker(called, seed, {}), promised=False)


def make_affordable_cases(
    model: Original,
    seeds: int,
    most: int | None = None,
    *,
    quantized: bool = False,
    integers: IntegerHints | None = None,
) -> EdgeCases:
    """``make_edge_cases``, more sizes being run the cheaper the model is.

    ``quantized``: all files are, and run a dozen times in float64 on each input: not above the opt sizes where one run
    costs more than `_QUANTIZED_WORK`, unless ``most`` says so.
    """
    work = count_flops(model)
    if quantized and most is None and work:
        most = find_largest_sizes(model, None).limit
        opt = count_elements(model, model.usual_sizes)
        most = min(most, max(opt, int(opt * _QUANTIZED_WORK / work)))
    return make_edge_cases(model, seeds, most=most, work=work, integers=integers)


def _sample_maker(model: ModelSignature, seed: int, sizes: Mapping[str, int]) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: model.samples(seed, sizes)


# ------------------------------------------------------------------ values


def _is_unbounded_float(spec: InputSpec) -> bool:
    return is_floating_input(spec) and spec.range is None


def _extreme_cases(model: ModelSignature, opt: Mapping[str, int], seed: int) -> Iterator[InputCase]:
    """All negative, all positive, constant, times 100, one outlier: in every floating input without a stated range."""
    free = {spec.name for spec in model.inputs if _is_unbounded_float(spec)}
    if not free:
        return

    def add_outlier(v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return _insert_in_first_row(v, rng, _OUTLIER)

    changes: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
        "all negative": lambda v, rng: -np.abs(v),
        "all positive": lambda v, rng: np.abs(v),
        "constant": lambda v, rng: np.full_like(v, rng.standard_normal()),
        "times 100": lambda v, rng: v * 100,
        "one outlier": add_outlier,
    }
    for name, change in changes.items():
        yield InputCase(
            f"{name}{describe_sizes(opt)}",
            EXTREME,
            _changed_feeds(model, opt, seed, free, change),
            sizes=tuple(opt.items()),
        )


def _non_finite_cases(model: ModelSignature, opt: Mapping[str, int], seed: int) -> Iterator[InputCase]:
    """A NaN, an Inf and a −Inf in one element of one input."""
    for name in [spec.name for spec in model.inputs if _is_unbounded_float(spec)][:_PLACED]:
        for value in (np.nan, np.inf, -np.inf):

            def insert_value(v: np.ndarray, rng: np.random.Generator, value: float = value) -> np.ndarray:
                return _insert_in_first_row(v, rng, value)

            kind = NAN if np.isnan(value) else INFINITE
            yield InputCase(
                f"one {value} in {name}{describe_sizes(opt)}",
                kind,
                _changed_feeds(model, opt, seed, {name}, insert_value),
                sizes=tuple(opt.items()),
            )


def _insert_in_first_row(values: np.ndarray, rng: np.random.Generator, value: float) -> np.ndarray:
    """``value`` in an element of the first row: the others show whether it spreads."""
    changed = values.copy()
    if changed.size:
        if changed.ndim:
            first = changed.reshape(len(changed), -1)[0]
        else:
            first = changed.reshape(-1)
        first[rng.integers(first.size)] = value
    return changed


def _changed_feeds(
    model: ModelSignature,
    opt: Mapping[str, int],
    seed: int,
    names: set[str],
    change: Callable[[np.ndarray, np.random.Generator], np.ndarray],
) -> Callable[[], dict[str, np.ndarray]]:
    def make_feeds() -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        feeds = model.samples(seed, opt)
        # in half precision times 100 may leave the range
        with np.errstate(all="ignore"):
            return {n: change(v.astype(np.float64), rng).astype(v.dtype) if n in names else v for n, v in feeds.items()}

    return make_feeds


# ------------------------------------------------------------------ tables


def _table_row_cases(model: ModelSignature, seed: int, most: int | None) -> Iterator[InputCase]:
    """Every value that each integer input may take, where a few inputs of an affordable size hold them all; flags are
    random already."""
    plans = [model.usual_sizes, *find_largest_sizes(model, most).kept]
    tables = {spec.name: spec for spec in model.inputs if _is_index_input(spec)}
    for name, spec in tables.items():
        assert spec.range is not None
        low, span = int(spec.range[0]), int(spec.range[1]) - int(spec.range[0])
        sizes = next((p for p in plans if -(-span // max(prod(spec.concrete_shape(p)), 1)) <= _ROW_CASES), None)
        if sizes is None:
            continue
        count = max(prod(spec.concrete_shape(sizes)), 1)
        for start in range(0, span, count):

            def make_feeds(
                name: str = name, low: int = low, span: int = span, start: int = start, sizes: Mapping[str, int] = sizes
            ) -> dict[str, np.ndarray]:
                feeds = model.samples(seed, sizes)
                values = feeds[name]
                feeds[name] = (low + (start + np.arange(values.size)) % span).reshape(values.shape).astype(values.dtype)
                return feeds

            rows = f"rows {low + start} to {low + min(start + count, span) - 1} of {name}{describe_sizes(sizes)}"
            yield InputCase(rows, "random", make_feeds, sizes=tuple(sizes.items()))


def _is_index_input(spec: InputSpec) -> bool:
    """Not a flag, of which both values are in every random draw."""
    return spec.dtype.startswith(("int", "uint")) and spec.range is not None and spec.range[1] - spec.range[0] > 2


# ------------------------------------------------------------------ sizes


def _iter_sizes(model: ModelSignature, opt: Mapping[str, int], limit: int) -> Iterator[dict[str, int]]:
    """All dims at 2, then each dim at more sizes, the others at their opt size or, where that costs too much, at their
    smallest."""
    dims = model.named_dims
    yield {name: min(max(2, dim.min), dim.max) for name, dim in dims.items()}
    low = {name: dim.min for name, dim in dims.items()}
    for step in range(max((len(_sizes_of_dim(dim)) for dim in dims.values()), default=0)):
        for name, dim in dims.items():
            if step < len(more := _sizes_of_dim(dim)):
                plans = ({**opt, name: more[step]}, {**low, name: more[step]})
                yield from [p for p in plans if count_elements(model, p) <= limit][:1]


def _sizes_of_dim(dim: Dim) -> list[int]:
    """1, 2 and all others up to 16, and around each power of two above; the largest first."""
    powers = [2**k + d for k in range(5, 31) for d in (1, 0, -1)]
    wanted = [dim.max, *range(1, _EVERY + 1), _EVERY + 1, *powers]
    return list(dict.fromkeys(size for size in wanted if dim.min <= size <= dim.max))
