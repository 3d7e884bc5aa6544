"""Describe the inputs of an exported program: names, dtypes, dims with their ranges, and allowed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import InputError
from ..graphs.index_bounds import IndexLimit
from ..model import DEFAULT_SIZES, Dim, InputSpec
from .attention_masks import find_attention_masks
from .config_limits import OPEN
from .dim_constraints import FixedDimError
from .input_request import InputRequest
from .program_bounds import find_program_bounds
from .program_signature import InputPlaceholder, dtype_name, find_placeholders
from .shape_expressions import SizeGuard, split_words

_DTYPES = split_words("float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool")
# Largest size of a dim in ONNX.
_LARGEST = 2**63 - 1
# Maximum number of sizes to try when a min or max must change to satisfy the program's conditions.
_SEARCH = 4096
# Number of sizes at which the program's conditions are tried to find a step.
_STEPS_SEARCHED = 128


def build_input_specs(
    program: torch.export.ExportedProgram,
    guards: Sequence[SizeGuard],
    matched: Sequence[InputSpec | None],
    wishes: InputRequest,
    *,
    fresh: bool,
    names: Sequence[Mapping[int, str]] = (),
) -> tuple[tuple[InputSpec, ...], dict[str, str]]:
    """Describe the program's tensor inputs, with the user's names and ranges as far as the program allows them.

    Args:
        matched: stated input or None, for each tensor input.
        fresh: True if the program was just exported for this request. Then the request's dims apply even if their
            ranges are not stated. Otherwise the sizes of the program's own export apply.
        names: known names of dims, for inputs that the user did not state.

    Returns:
        The inputs, and dim name -> source of the largest size. A dim is missing from this mapping if the user or a
        saved program states its largest size.

    Raises:
        InputError: the request contradicts the program.
    """
    tensors, constants = find_placeholders(program)
    shapes = [
        _name_shape(tensor, wish, hints)
        for tensor, wish, hints in zip(tensors, matched, names or [{}] * len(tensors), strict=True)
    ]
    named = _group_symbols_by_name(tensors, shapes)
    sums = {dim.name: dim for wish in wishes.inputs for dim in wish.shape if dim.name and dim.terms}
    terms = {term.name: term for dim in sums.values() for term in dim.named_dims() if term.name}
    if unknown := sorted(wishes.dims.keys() - set(named) - set(terms)):
        if named:
            raise InputError(f"the dim {unknown[0]!r} is not in any input: the dynamic dims are {', '.join(named)}")
        raise InputError(
            f"the dim {unknown[0]!r} is not in any input: the program fixes all sizes, so no option can change them;"
            " export the module again with dynamic_shapes of torch.export.export"
        )
    limits = find_program_bounds(program)
    hiding = find_attention_masks(program)
    singles = {name: symbols for name, symbols in named.items() if name not in sums}
    ranged = {
        name: _derive_range(name, symbols, program, wishes, fresh, limits.sizes) for name, symbols in singles.items()
    }
    # A term that is not a size itself, as in height+height, has the range of the request.
    dims = terms | {name: dim for name, (dim, _) in ranged.items()}
    dims = _fit_ranges_to_guards(dims, _guard_finder(guards, tensors, shapes, constants, sums), wishes.demanded)
    dims |= {name: dim.with_ranges_of(dims) for name, dim in sums.items()}
    specs = tuple(
        _build_input_spec(
            tensor,
            wish,
            tuple(dims[size] if isinstance(size, str) else Dim.from_size(size) for size in shape),
            limits.values.get(tensor.name),
            tensor.name in limits.masks,
            tensor.name in hiding,
        )
        for tensor, wish, shape in zip(tensors, matched, shapes, strict=True)
    )
    return specs, {name: source for name, (_, source) in ranged.items() if source}


# Size of each static dim, name of each dynamic dim.
Shape = list[str | int]


def _name_shape(tensor: InputPlaceholder, wish: InputSpec | None, hints: Mapping[int, str]) -> Shape:
    """Name the dims of an input. A dim without a name is written as "?" and its expression, and gets its name later."""
    shape = [tensor.dim_size(index) for index in range(tensor.value.dim())]
    sizes: Shape = [size if isinstance(size, int) else str(size) for size in shape]
    if wish is None:
        return [hints.get(index, f"?{size}") if isinstance(size, str) else size for index, size in enumerate(sizes)]
    if wish.dtype and wish.dtype != dtype_name(tensor.value):
        raise InputError(
            f"the input {wish.name!r} was declared as {wish.dtype}, but the program expects "
            f"{dtype_name(tensor.value)}: change one of them"
        )
    if len(wish.shape) != len(sizes):
        raise InputError(
            f"the input {wish.name!r} was declared with {len(wish.shape)} dims, but the program expects "
            f"{len(sizes)}: {_format_sizes(sizes)}"
        )
    return [
        _match_dim(tensor, wish, index, dim, size)
        for index, (dim, size) in enumerate(zip(wish.shape, sizes, strict=True))
    ]


def _match_dim(tensor: InputPlaceholder, wish: InputSpec, index: int, dim: Dim, size: str | int) -> str | int:
    where = f"dim {index} of the input {wish.name!r}"
    if dim.name is not None and isinstance(size, int):
        raise FixedDimError(
            f"the dim {dim.name!r} ({where}) was requested as dynamic ({dim}), but the program has the fixed size "
            f"{size}: write {size} instead, or export the program again with that dim dynamic",
            dim.name,
        )
    if dim.name is None and isinstance(size, str):
        raise InputError(
            f"{where} was declared with the fixed size {dim.opt}, but it is dynamic in the program: give it a name "
            f"and a range, such as n=1:{dim.opt}:{dim.opt}"
        )
    if dim.name is None and size != dim.opt:
        raise InputError(f"{where} was declared with the size {dim.opt}, but the program expects {size}: write {size}")
    return dim.name or size


def _format_sizes(sizes: Shape) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _group_symbols_by_name(tensors: list[InputPlaceholder], shapes: list[Shape]) -> dict[str, dict[Any, int | None]]:
    """Map each dim name to its sizes as sympy expressions and to its example sizes. Unnamed dims get the names d0, d1,
    ..., also in ``shapes``.
    """
    named: dict[str, dict[Any, int | None]] = {}
    bearers: dict[Any, str] = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        for index, name in enumerate(shape):
            if isinstance(name, str) and not name.startswith("?"):
                expr = tensor.dim_size(index)
                if (other := bearers.setdefault(expr, name)) != name:
                    raise InputError(
                        f"the dims {other!r} and {name!r} are always equal in the model (dim {index} of "
                        f"{tensor.name!r}): use one name for both"
                    )
    taken = set(bearers.values())
    fresh = (name for name in (f"d{count}" for count in range(10_000)) if name not in taken)
    for tensor, shape in zip(tensors, shapes, strict=True):
        for index, name in enumerate(shape):
            if isinstance(name, str):
                expr = tensor.dim_size(index)
                if expr not in bearers:
                    bearers[expr] = next(fresh)
                shape[index] = bearers[expr]
                named.setdefault(bearers[expr], {})[expr] = tensor.example[index] if tensor.example else None
    _refuse_dependent_dims({expr: name for expr, name in bearers.items() if "+" not in name})
    return named


def _refuse_dependent_dims(bearers: dict[Any, str]) -> None:
    for expr, name in bearers.items():
        for other, its_name in bearers.items():
            if other != expr and other.free_symbols & expr.free_symbols:
                raise InputError(
                    f"the dims {name!r} ({expr}) and {its_name!r} ({other}) of the program depend on each other, "
                    "which an ONNX input can't express: export it with one of them fixed"
                )


def _derive_range(
    name: str,
    symbols: Mapping[Any, int | None],
    program: torch.export.ExportedProgram,
    wishes: InputRequest,
    fresh: bool,
    limits: Mapping[Any, IndexLimit],
) -> tuple[Dim, str]:
    """Derive a dim's range. A stated range is checked against the program and its tables; otherwise the range is as
    wide as the program and its tables allow.

    Returns:
        The dim, and the source of its largest size; "" if the user or a saved program states that size.
    """
    low = 0
    high = None
    limit = ""
    source = ""
    for expr in symbols:
        step, symbol = _split_step(expr)
        constraint = program.range_constraints.get(expr)
        scale = 1
        if constraint is None:
            constraint = program.range_constraints.get(symbol)
            scale = step
        if constraint is not None:
            low = max(low, int(constraint.lower) * scale)
            upper = int(constraint.upper) * scale if constraint.upper.is_Integer else None
            # No size exceeds `_LARGEST`, so a larger upper bound has no effect.
            upper = None if upper is not None and upper > _LARGEST else upper
            if upper is not None and (high is None or upper < high) and not (fresh and upper >= OPEN):
                high = upper
                limit = "the program's own range"
                if fresh:
                    source = wishes.sources.get(name, "the model's own code")
                else:
                    source = ""
        bound = limits.get(symbol)
        if bound is not None and (high is None or (bound.high - 1) * step < high):
            high = (bound.high - 1) * step
            limit = f"the table {bound.source!r} has {high} usable rows"
            source = f"the rows of {bound.source!r}"
    example = next((size for size in symbols.values() if size is not None), None)
    if name in wishes.stated:
        wished = wishes.dims[name]
        source = ""
    else:
        if fresh and name in wishes.dims:
            best = wishes.dims[name].opt
        else:
            best = example or max(low, DEFAULT_SIZES[1])
        wished = Dim(name, 1, best, high if high is not None else max(DEFAULT_SIZES[2], best))
        source = source if high is not None else "no known limit"
    if name in wishes.demanded and (wished.min < low or (high is not None and wished.max > high)):
        raise InputError(
            f"the dim {wished} exceeds the model's range {low} to "
            f"{high or 'any size'}{f' ({limit})' if high is not None and wished.max > high else ''}: narrow it"
        )
    top = max(low, wished.max if high is None else min(high, wished.max))
    dim = Dim(name, max(low, wished.min), min(max(low, wished.opt), top), top)
    step = math.lcm(*(_split_step(expr)[0] for expr in symbols))
    if name in wishes.dims:
        step = math.lcm(step, wishes.dims[name].step)
    if name in wishes.demanded:
        return dim.with_step(step), source
    sizes = replace(dim, step=step).allowed_sizes()
    if not sizes:
        raise InputError(f"the dim {dim} contains no multiple of {step}, which the model needs: pass a range with one")
    return Dim(name, sizes[0], replace(dim, step=step).nearest_size(dim.opt), sizes[-1], step=step), source


def _split_step(expr: Any) -> tuple[int, Any]:
    """Split a size into its constant factor and the rest: 32·s gives (32, s)."""
    factor, rest = expr.as_coeff_Mul()
    if factor.is_Integer and factor > 1 and rest.is_Symbol:
        return int(factor), rest
    return 1, expr


def _guard_finder(
    guards: Sequence[SizeGuard],
    tensors: list[InputPlaceholder],
    shapes: list[Shape],
    constants: dict[tuple[str, int], Any],
    sums: Mapping[str, Dim],
) -> Callable[[dict[str, int]], SizeGuard | None]:
    """Make a function that finds the first condition that fails at given sizes of the dims.

    Conditions that two sizes differ are ignored. torch records such a condition only because the example sizes differ.
    """
    owners: dict[tuple[str, int], str | int] = {
        (path, i): name
        for tensor, shape in zip(tensors, shapes, strict=True)
        for path in tensor.paths
        for i, name in enumerate(shape)
    }
    sound = [guard for guard in guards if "!=" not in guard.text]

    def find_broken_guard(sizes: dict[str, int]) -> SizeGuard | None:
        every = sizes | {name: dim.size(sizes) for name, dim in sums.items()}
        known = constants | {key: every[owner] if isinstance(owner, str) else owner for key, owner in owners.items()}
        return next((guard for guard in sound if guard.holds(known) is False), None)

    return find_broken_guard


def _fit_ranges_to_guards(
    dims: dict[str, Dim], find_broken_guard: Callable[[dict[str, int]], SizeGuard | None], stated: Container[str]
) -> dict[str, Dim]:
    """Move the ends of unstated ranges to sizes that satisfy the program's conditions. A stated range must satisfy them
    already.
    """
    best = {name: dim.opt for name, dim in dims.items()}
    for name, dim in dims.items():

        def guard_broken_at(size: int, name: str = name) -> SizeGuard | None:
            return find_broken_guard(best | {name: size})

        if name in stated:
            for size in (dim.opt, dim.min, dim.max):
                if guard := guard_broken_at(size):
                    raise InputError(
                        f"the dim {dim} contains the size {size}, at which the program's condition {guard.text} "
                        "fails: choose another"
                    )
            dims = dims | {name: replace(dim, step=_find_guarded_step(dim, guard_broken_at))}
            continue
        opt = _first_valid_size(range(dim.opt, dim.max + 1, dim.step), guard_broken_at)
        if opt is None:
            opt = _first_valid_size(range(dim.opt, dim.min - 1, -dim.step), guard_broken_at)
        if opt is None:
            guard = guard_broken_at(dim.opt)
            if guard:
                condition = guard.text
            else:
                condition = "of its other dims"
            raise InputError(
                f"no size of the dim {dim} meets the program's condition {condition}: pass its range with --dim"
            )
        best[name] = opt
        low = _first_valid_size(range(dim.min, opt + 1, dim.step), guard_broken_at)
        high = _first_valid_size(range(dim.max, opt - 1, -dim.step), guard_broken_at)
        # A smallest size of 0 is valid, for example for the past of a decoder.
        fitted = replace(dim, min=opt if low is None else low, opt=opt, max=opt if high is None else high)
        dims = dims | {name: replace(fitted, step=_find_guarded_step(fitted, guard_broken_at))}
    return dims


def _find_guarded_step(dim: Dim, fails: Callable[[int], SizeGuard | None]) -> int:
    """Find the step that the program's conditions state: they hold at its multiples, and fail at all other sizes.

    Returns:
        The step, a multiple of the dim's own step; the dim's own step if the conditions state none.
    """
    valid = {size: fails(size) is None for size in dim.allowed_sizes()[:_STEPS_SEARCHED]}
    if all(valid.values()):
        return dim.step
    for step in range(2 * dim.step, _STEPS_SEARCHED * dim.step // 2 + 1, dim.step):
        ends_fit = not any(size % step for size in (dim.min, dim.opt, dim.max))
        if ends_fit and all(holds == (size % step == 0) for size, holds in valid.items()):
            return step
    return dim.step


def _first_valid_size(sizes: range, fails: Callable[[int], SizeGuard | None]) -> int | None:
    return next((size for size in sizes[:_SEARCH] if fails(size) is None), None)


def _build_input_spec(
    tensor: InputPlaceholder,
    wish: InputSpec | None,
    shape: tuple[Dim, ...],
    bound: IndexLimit | None,
    mask: bool,
    hides: bool,
) -> InputSpec:
    if wish:
        name = wish.name
    else:
        name = tensor.name
    dtype = dtype_name(tensor.value)
    if dtype not in _DTYPES:
        raise InputError(f"the input {name!r} has the dtype {dtype}, which can't be exported: cast it inside the model")
    if wish:
        wished = wish.range
    else:
        wished = None
    if wished is not None and bound is not None and (wished[0] < bound.low or wished[1] > bound.high):
        raise InputError(
            f"the input {name!r} was declared with the values {{{wished[0]}:{wished[1]}}}, but it indexes "
            f"{bound.source!r}, which accepts {{{bound.low}:{bound.high}}}"
        )
    if dtype == "bool":
        return InputSpec(name, dtype, shape, mask=hides)
    if tensor.value.is_floating_point():
        return InputSpec(name, dtype, shape, wished or ((0.0, 1.0) if mask else None))
    values = wished or ((bound.low, bound.high) if bound else (0, 2))
    if not values[0] < values[1]:
        raise InputError(
            f"no value of the input {name!r} fits all the tables that it indexes (the smallest is "
            f"{bound.source if bound else ''!r}): pass its values with {name}[...]{{LOW:HIGH}}"
        )
    return InputSpec(name, dtype, shape, values, mask=hides and wished is None and bound is None)
