"""Which sizes and values the inputs of an ONNX file take that others are compared with: what is said, recorded, or
guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from ...errors import GraphError, InputError
from ...graphs.stated import STRING, Stated, stated_inputs
from ...loading.inputs import DEFAULT, Wishes, parse
from ...model import Dim, InputSpec
from ...storage.record import recorded


def file_inputs(
    proto: onnx.ModelProto, inputs: Sequence[str], dims: Sequence[str], label: str
) -> tuple[tuple[InputSpec, ...], list[str], bool]:
    """The inputs, notes, and whether sizes are guessed.

    Args:
        inputs: "ids:int64[batch,seq]{0:30522}": sizes and values of an input of that name.
        dims: "batch=1:8:64": the range of a named dim.
        label: what the file is called.

    Raises:
        InputError: what is said of an input or dim fits none, or one is no tensor of numbers.
    """
    stated, known = stated_inputs(proto.graph), recorded_inputs(proto)
    every = {d for item in stated for d in item.dims or () if isinstance(d, str)}
    every |= {d.name for spec in known.values() for dim in spec.shape for d in dim.named() if d.name is not None}
    return _specs(stated, known, parse(inputs, dims, [item.name for item in stated], every), label)


def recorded_inputs(proto: onnx.ModelProto) -> dict[str, InputSpec]:
    """What ``export`` recorded; {} where it did not, or another version did."""
    try:
        return {spec.name: spec for spec in recorded(proto).get("inputs", ())}
    except GraphError:
        return {}


def _specs(
    file: Sequence[Stated], by_record: Mapping[str, InputSpec], wishes: Wishes, label: str
) -> tuple[tuple[InputSpec, ...], list[str], bool]:
    by_name = {wish.name: wish for wish in wishes.inputs}
    stated = {**wishes.single, **{name: wishes.dims[name] for name in wishes.stated}}
    specs, values, sizes = list[InputSpec](), list[str](), dict[str, None]()
    used = set[str]()
    for item in file:
        name, dtype, dims = item.name, item.dtype, item.dims
        if not dtype or dtype == STRING:
            what = "takes strings" if dtype else "is no tensor of a known type"
            raise InputError(f"{label}: the input {name!r} {what}; only tensors of numbers can be given: make it one")
        spec = by_record.get(name)
        if (wish := by_name.pop(name, None)) is not None:
            if wish.dtype not in (None, dtype):
                raise InputError(
                    f"{label}: the input {name!r} is {dtype}, and --input says {wish.dtype}; leave the type out"
                )
            if dims is not None and len(dims) != len(wish.shape):
                raise InputError(
                    f"{label}: the input {name!r} has {len(dims)} dims, and --input says {len(wish.shape)}"
                )
            old = InputSpec(name, dtype, wish.shape) if spec is None else replace(spec, dtype=dtype, shape=wish.shape)
            spec = old if wish.range is None else replace(old, range=wish.range, mask=False)
        elif spec is None or spec.dtype != dtype or (dims is not None and len(spec.shape) != len(dims)):
            if dims is None:
                raise InputError(
                    f"{label} does not say which shape the input {name!r} has; give --input '{name}:{dtype}[...]'"
                )
            shape = tuple(Dim.static(d) if isinstance(d, int) else Dim(d, *DEFAULT) for d in dims)
            sizes |= dict.fromkeys(d.name for d in shape if d.name is not None and d.name not in stated)
            spec = InputSpec(name, dtype, shape)
        used |= {d.name for dim in spec.shape for d in dim.named() if d.name is not None}
        spec = replace(spec, shape=tuple(d.among(stated) for d in spec.shape))
        if spec.range is None and np.dtype(np.float32 if dtype == "bfloat16" else dtype).kind in "iu":
            values.append(name)
        specs.append(spec)
    if by_name:
        raise InputError(f"{label} has no input {next(iter(by_name))!r}; it has {[spec.name for spec in specs]}")
    if unknown := sorted(stated.keys() - used):
        raise InputError(f"{label} has no dynamic dim {unknown[0]!r}; it has {sorted(used)}")
    notes = []
    if sizes:
        notes.append(
            f"{label} does not say which sizes {', '.join(sizes)} take: 1 to {DEFAULT[2]} were tried; --dim"
            " NAME=MIN:OPT:MAX says it"
        )
    if values:
        notes.append(
            f"{label} does not say which values {', '.join(values)} take: 0 and 1 were given; --input or --inputs"
            " says it"
        )
    return tuple(specs), notes, bool(sizes)
