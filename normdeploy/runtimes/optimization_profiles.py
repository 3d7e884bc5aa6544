"""Resolve optimization profiles: the shapes (min, opt, max) that an engine must accept for each dynamic input."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..model import InputSpec, Shapes, TensorSpec, named_dims_of, require_multiples
from ..types import ProfileRanges

# min, opt and max of one dim.
Range = tuple[int, int, int]
_HOW = "write name=min:opt:max, for a dim batch=1:8:64, for an input ids=1x8:8x128:64x512"


def resolve_profile(
    inputs: Sequence[TensorSpec], recorded: Sequence[InputSpec], given: ProfileRanges = ()
) -> dict[str, Shapes]:
    """Resolve the shapes of every dynamic input.

    The range of a dim comes from the first source that has one: ``given`` for the input, ``given`` for the dim,
    ``recorded`` at export. A dim's name means the same size everywhere, so a range given for one input also applies to
    every other input with that dim.

    Args:
        given: input name -> (min, opt, max) shapes, or dim name -> (min, opt, max) sizes. Texts such as
            "ids=1x8:8x128:64x512" are accepted too.

    Returns:
        Input name -> (min, opt, max) shapes; {} if all inputs are static.

    Raises:
        InputError: a range can't be read, belongs to no input or dim, contradicts the input or another range, or is
            missing.
    """
    shapes, ranges = _split_inputs_and_dims(inputs, parse_ranges(given))
    for item in inputs:
        if item.name in shapes:
            _check_shapes(item, shapes[item.name])
            for axis, dim in enumerate(item.shape):
                if isinstance(dim, str):
                    _set_dim_range(ranges, dim, tuple(s[axis] for s in shapes[item.name]), item)  # type: ignore[arg-type]
    specs = {spec.name: spec for spec in recorded}
    steps = {name: dim.step for name, dim in named_dims_of(recorded).items()}
    for name, (sizes, _) in ranges.items():
        require_multiples(f"the profile of the dim {name!r}", sizes, steps.get(name, 1))
    return {
        item.name: _input_shapes(item, shapes, ranges, specs)
        for item in inputs
        if any(not isinstance(d, int) for d in item.shape)
    }


def parse_ranges(given: ProfileRanges) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Parse ranges from a mapping or from texts.

    Returns:
        Name -> min, opt and max, each a tuple of sizes (of length 1 for a dim).

    Raises:
        InputError: a range can't be read, is given twice, mixes ranks, or violates 1 <= min <= opt <= max.
    """
    if isinstance(given, Mapping):
        return {
            str(name): _require_triple(str(name), tuple(_parse_sizes(v) for v in values))
            for name, values in given.items()
        }
    parsed: dict[str, tuple[tuple[int, ...], ...]] = {}
    for text in [given] if isinstance(given, str) else given:
        name, _, rest = text.rpartition("=")
        if not name or not re.fullmatch(r"\d+(x\d+)*(:\d+(x\d+)*)*", rest):
            raise InputError(f"the profile {text!r} can't be read; {_HOW}")
        if name in parsed:
            raise InputError(f"the profile contains {name!r} twice; pass it once")
        parsed[name] = _require_triple(name, tuple(tuple(int(n) for n in part.split("x")) for part in rest.split(":")))
    return parsed


def _parse_sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (int(value),)
    return tuple(int(n) for n in value)


def _require_triple(name: str, values: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if len(values) != 3:
        raise InputError(f"the profile of {name!r} has {len(values)} parts instead of min, opt and max; {_HOW}")
    low, best, high = values
    if not len(low) == len(best) == len(high):
        raise InputError(
            f"the profile of {name!r} mixes ranks: {_format_range(values)}; use the same number of sizes for min, "
            "opt and max"
        )
    if not all(1 <= a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
        raise InputError(
            f"the profile of {name!r} is {_format_range(values)}, but every size must have 1 <= min <= opt <= max"
        )
    return values


def _format_range(values: Sequence[Sequence[int]]) -> str:
    return ":".join("x".join(map(str, v)) for v in values)


def _split_inputs_and_dims(
    inputs: Sequence[TensorSpec], given: Mapping[str, tuple[tuple[int, ...], ...]]
) -> tuple[dict[str, Shapes], dict[str, tuple[Range, str]]]:
    """Split the given ranges into ranges of whole inputs and ranges of dims.

    Returns:
        Input name -> shapes, and dim name -> (range, its source for error messages).
    """
    by_name = {item.name: item for item in inputs}
    dims = {d for item in inputs for d in item.shape if isinstance(d, str)}
    shapes: dict[str, Shapes] = {}
    ranges: dict[str, tuple[Range, str]] = {}
    for name, values in given.items():
        scalar = len(values[0]) == 1
        if name in by_name and not (scalar and name in dims and len(by_name[name].shape) != 1):
            shapes[name] = values  # type: ignore[assignment]
        elif name in dims and scalar:
            ranges[name] = (values[0][0], values[1][0], values[2][0]), "its own profile"
        elif name in dims:
            raise InputError(f"the profile of dim {name!r} is {_format_range(values)}, but a dim has one size; {_HOW}")
        else:
            raise InputError(
                f"the profile names {name!r}, which is neither an input nor a dynamic dim; the file's inputs are "
                f"{', '.join(map(str, inputs)) or 'none'}"
            )
    return shapes, ranges


def _check_shapes(item: TensorSpec, shapes: Shapes) -> None:
    if len(shapes[0]) != len(item.shape):
        raise InputError(
            f"the profile of {item.name!r} is {_format_range(shapes)}, of rank {len(shapes[0])}, but {item} has rank"
            f" {len(item.shape)}"
        )
    for axis, dim in enumerate(item.shape):
        sizes = tuple(shape[axis] for shape in shapes)
        if isinstance(dim, int) and set(sizes) != {dim}:
            raise InputError(
                f"the profile of {item.name!r} is {_format_range(shapes)}, but dim {axis} of {item} is fixed at "
                f"{dim}; use {dim} there, or export the model with that dim dynamic"
            )


def _set_dim_range(ranges: dict[str, tuple[Range, str]], dim: str, sizes: Range, item: TensorSpec) -> None:
    known, source = ranges.setdefault(dim, (sizes, f"the profile of input {item.name!r}"))
    if known != sizes:
        one = ":".join(map(str, known))
        other = ":".join(map(str, sizes))
        raise InputError(
            f"the dim {dim!r} has the range {one} by {source}, but {other} by the profile of input {item.name!r}; "
            "use one range for one dim"
        )


def _input_shapes(
    item: TensorSpec,
    shapes: Mapping[str, Shapes],
    ranges: Mapping[str, tuple[Range, str]],
    recorded: Mapping[str, InputSpec],
) -> Shapes:
    if item.name in shapes:
        return shapes[item.name]
    spec = recorded.get(item.name)
    of_input: list[Range] = []
    for axis, dim in enumerate(item.shape):
        if isinstance(dim, int):
            of_input.append((dim, dim, dim))
        elif dim is not None and dim in ranges:
            of_input.append(ranges[dim][0])
        elif spec is not None and len(spec.shape) == len(item.shape) and spec.shape[axis].name == dim:
            of_input.append((spec.shape[axis].min, spec.shape[axis].opt, spec.shape[axis].max))
        else:
            if dim is not None:
                known = f"dim {dim!r}"
            else:
                known = f"dim {axis}"
            raise InputError(f"{known} of input {item} is dynamic and has no known range; pass a profile: {_HOW}")
    low, best, high = zip(*of_input, strict=True)
    return low, best, high
