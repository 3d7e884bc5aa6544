"""Determine sizes and values to record for an ONNX file's inputs.

The sizes and values come from the user, from the file's record, and from the tables that the inputs index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx

from ..errors import InputError
from ..graphs.declared_inputs import STRING, declared_inputs
from ..graphs.index_bounds import IndexBounds, find_index_bounds
from ..model import RANGE_HOW, Dim, InputSpec, named_dims_of

_USUAL = 8


def resolve_input_ranges(
    proto: onnx.ModelProto, recorded: Sequence[InputSpec], dims: Sequence[str]
) -> tuple[tuple[InputSpec, ...], list[str]]:
    """Combine the user's ranges with the recorded ranges and with the bounds that the file's tables imply.

    A dim without a name is named after its input and axis, such as ``x_0``. ``name_dynamic_dims`` writes these names
    into the file.

    Args:
        recorded: inputs as the file's record describes them; returned unchanged if ``dims`` is empty.
        dims: ranges such as ``batch=1:8:64`` (min:opt:max).

    Returns:
        The inputs in the file's order, and notes for the user.

    Raises:
        InputError: a range can't be read, belongs to no dim or exceeds a table; or a dim without a stated range has no
            recorded range either.
    """
    stated = _parse_dims(dims)
    limits = find_index_bounds(proto)
    if not stated:
        return tuple(recorded), list(_table_hints(proto, recorded, limits))
    # Dims that are sums need no range: their sizes follow from the sizes of their terms.
    sums = {d.name for spec in recorded for d in spec.shape if d.terms}
    known = named_dims_of(recorded)
    terms = [
        d.name for spec in recorded for dim in spec.shape if dim.terms for d in dim.named_dims() if d.name is not None
    ]
    names = list(
        dict.fromkeys(
            [d for _, _, shape in _iter_inputs(proto) for d in shape if isinstance(d, str) and d not in sums] + terms
        )
    )
    if unknown := sorted(stated.keys() - set(names)):
        raise InputError(_describe_unknown_dim(proto, unknown[0], names))
    for name, dim in stated.items():
        most = limits.sizes.get(name)
        if most is not None and dim.max >= most.high:
            raise InputError(
                f"the dim {dim} exceeds the table {most.source!r}, which has rows for {most.high - 1}: narrow it"
            )
    taken: dict[str, Dim] = {}
    notes: list[str] = []
    for name in names:
        most = limits.sizes.get(name)
        if name in stated:
            taken[name] = stated[name]
            # The recorded step is a condition of the model.
            if name in known and stated[name].step % known[name].step:
                taken[name] = stated[name].with_step(math.lcm(stated[name].step, known[name].step))
            if name in known and stated[name].max > known[name].max:
                notes.append(f"{stated[name]} exceeds {known[name]}, the range recorded in the file: verify it there")
        elif name in known:
            taken[name] = known[name]
        elif most is not None and most.high > 1:
            taken[name] = Dim(name, 1, min(_USUAL, most.high - 1), most.high - 1)
            notes.append(
                f"sizes assumed because none were stated: {taken[name]} (the rows of {most.source!r}); state others "
                "with --dim"
            )
        else:
            raise InputError(
                f"the range of the dim {name!r} is unknown: also pass --dim {name}=1:8:64 or another range"
            )
    specs = {spec.name: spec for spec in recorded}
    made = []
    for name, dtype, shape in _iter_inputs(proto):
        old = specs.get(name)
        if old is not None and old.dtype == dtype and len(old.shape) == len(shape):
            sizes = tuple(
                was.with_ranges_of(taken) if was.terms else _dim_from_size(d, taken)
                for d, was in zip(shape, old.shape, strict=True)
            )
            made.append(replace(old, shape=sizes))
            continue
        sizes = tuple(_dim_from_size(d, taken) for d in shape)
        values = limits.values.get(name)
        made.append(
            InputSpec(
                name,
                dtype,
                sizes,
                (max(values.low, 0), values.high) if values and values.high > max(values.low, 0) else None,
            )
        )
        if values is None and dtype.startswith(("int", "uint")):
            notes.append(f"the range of the input {name!r} is unknown: 0 and 1 are recorded")
    return tuple(made), notes


def _dim_from_size(d: int | str, taken: Mapping[str, Dim]) -> Dim:
    if isinstance(d, int):
        return Dim.from_size(d)
    if d not in taken:
        raise InputError(
            f"the file's record says that the dim {d!r} is the sum of others, but not for every input: export it again"
        )
    return taken[d]


def name_dynamic_dims(proto: onnx.ModelProto) -> None:
    """Name the inputs' unnamed dynamic dims in place, as ``resolve_input_ranges`` does: ``x_0``."""
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.dim_param and (not dim.HasField("dim_value") or dim.dim_value < 0):
                dim.dim_param = f"{value.name}_{axis}"


def _describe_unknown_dim(proto: onnx.ModelProto, name: str, names: Sequence[str]) -> str:
    """Say why a dim has no range: it is unknown, or the file fixes all sizes, which only a new export changes."""
    if names:
        return f"the dim {name!r} is not in any input: the dynamic dims are {', '.join(names)}"
    fixed = ", ".join(f"{i}[{','.join(map(str, shape))}]" for i, _, shape in _iter_inputs(proto))
    return (
        f"the dim {name!r} is not in any input: the file fixes all sizes ({fixed}), and its nodes may hold them too, so"
        " no option can change them; export the model again with a dynamic dim, by normdeploy export --dim"
        f" {name}=1:8:64 or by dynamic_shapes of torch.onnx.export"
    )


def _iter_inputs(proto: onnx.ModelProto) -> Iterator[tuple[str, str, tuple[int | str, ...]]]:
    for stated in declared_inputs(proto.graph):
        if stated.dtype in ("", STRING) or stated.dims is None:
            raise InputError(
                f"the input {stated.name!r} is not a numeric tensor of known type and rank: its sizes can't be recorded"
            )
        yield stated.name, stated.dtype, stated.dims


def _table_hints(proto: onnx.ModelProto, recorded: Sequence[InputSpec], limits: IndexBounds) -> Iterator[str]:
    """Yield a note for each dim whose recorded maximum is smaller than the number of rows of the dim's table."""
    sums = {d.name for spec in recorded for d in spec.shape if d.terms}
    known = named_dims_of(recorded)
    for name, most in limits.sizes.items():
        if name not in sums and most.high > 1 and (name not in known or known[name].max < most.high - 1):
            if name in known:
                now = f"recorded as {known[name]}"
            else:
                now = "not recorded"
            yield (
                f"the sizes of {name!r} are {now}, but {most.source!r} has rows for {most.high - 1}: --dim "
                f"{name}=1:{min(_USUAL, most.high - 1)}:{most.high - 1} records the range"
            )


def _parse_dims(dims: Sequence[str]) -> dict[str, Dim]:
    parsed: dict[str, Dim] = {}
    for text in dims:
        name, _, rest = text.rpartition("=")
        if not name.strip():
            raise InputError(f"the dim {text!r} can't be read: {RANGE_HOW}")
        dim = Dim.from_range(name.strip(), rest)
        if parsed.setdefault(name.strip(), dim) != dim:
            raise InputError(
                f"the dim {name.strip()!r} is passed twice: {parsed[name.strip()]} and {dim}; pass it once"
            )
    return parsed
