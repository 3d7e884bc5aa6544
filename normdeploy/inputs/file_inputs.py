"""Determine sizes and values of an ONNX file's inputs: stated by the user, recorded, or guessed.

    NAME[:DTYPE][ DIM, ... ][{LOW:HIGH}]    sizes and values, as `normdeploy.loading.input_request` reads them
    NAME=LOW:HIGH                           only values; the interval is half-open for integers
    NAME=VALUE                              one value
    NAME=FILE.npy, NAME=FILE.npz            the range of the values in the file

An .npz file must contain a single array, or an array with the input's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx

from ..compare.number_text import format_number
from ..errors import GraphError, InputError
from ..graphs.declared_inputs import STRING, DeclaredInput, declared_inputs
from ..model import DEFAULT_SIZES, Dim, InputSpec, named_dims_of
from ..storage.export_record import read_record
from ..storage.image_metadata import image_ranges
from ..storage.npz_files import read_npy, read_npz

if TYPE_CHECKING:
    from ..loading.input_request import InputRequest

_FILES = (".npy", ".npz")
# Matches a text that begins with NAME=. A dim with a range also contains =, but only inside brackets.
_VALUED = re.compile(r"\s*(?P<name>[^\[\]{}=]+)=[^\[\]{}]*")
_HOW = "NAME=LOW:HIGH, NAME=VALUE, or NAME=FILE.npy"


@dataclass(frozen=True)
class InputValueRange:
    """Values of one input, without its sizes.

    Attributes:
        range: (low, high), as in `InputSpec`.
        array: contents of the file that the range was read from; None if the range was given as text.
    """

    name: str
    range: tuple[float, float]
    array: np.ndarray | None = None


def parse_input_values(texts: Sequence[str], names: Collection[str]) -> tuple[dict[str, InputValueRange], list[str]]:
    """Read the texts that state only values, such as ``sr=16000``. Return all other texts unread.

    Args:
        names: names of the file's inputs. A name may contain any character, even ``=``.

    Returns:
        Input name -> its values, and the texts that state sizes.

    Raises:
        InputError: a value can't be read, an input is unknown or stated twice, or a text states neither sizes nor
            values.
    """
    values: dict[str, InputValueRange] = {}
    others = []
    for text in texts:
        name = next((n for n in sorted(names, key=len, reverse=True) if text.strip().startswith(f"{n}=")), None)
        if name is None:
            if (foreign := _VALUED.fullmatch(text)) is not None:
                raise InputError(f"the file has no input {foreign['name']!r}; it has {sorted(names)}")
            if "[" not in text:
                raise InputError(f"the input {text!r} states neither sizes nor values; write NAME[DIM,...], {_HOW}")
            others.append(text)
            continue
        if name in values:
            raise InputError(f"the input {name!r} is passed twice; pass each input once")
        values[name] = _parse_values(name, text.strip().removeprefix(f"{name}=").strip(), text)
    return values, others


def _parse_values(name: str, rest: str, text: str) -> InputValueRange:
    if rest.lower().endswith(_FILES):
        array = _load_array(name, rest)
        return InputValueRange(name, _finite_range(array, rest), array)
    try:
        numbers = [float(part) if any(c in part for c in ".eE") else int(part) for part in rest.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(number) for number in numbers):
        raise InputError(f"the values of the input {text!r} can't be read; write {_HOW}")
    if len(numbers) == 1:
        return InputValueRange(name, _single_value_range(numbers[0]))
    low, high = numbers
    if low >= high:
        raise InputError(f"the range {low}:{high} of the input {name!r} is empty; its first number is the lowest")
    return InputValueRange(name, (low, high))


def _single_value_range(value: float) -> tuple[float, float]:
    """Return the range that contains one value: a half-open interval for integers, a single point for floats."""
    if isinstance(value, int):
        return (value, value + 1)
    return (value, value)


def _load_array(name: str, path: str) -> np.ndarray:
    if path.lower().endswith(".npy"):
        return read_npy(path)
    arrays = read_npz(path)
    if name not in arrays and len(arrays) != 1:
        raise InputError(f"{path!r} holds {sorted(arrays)}, but no array is named {name!r}; rename one")
    return arrays.get(name, next(iter(arrays.values())))


def _finite_range(array: np.ndarray, path: str) -> tuple[float, float]:
    if array.dtype.kind not in "biuf" or not array.size:
        raise InputError(f"{path!r} holds {array.dtype}{list(array.shape)}; a numeric array is required")
    low = array.min().item()
    high = array.max().item()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(
            f"{path!r} holds values from {format_number(low)} to {format_number(high)}; a range needs finite ends"
        )
    if array.dtype.kind == "f":
        return (low, high)
    return (int(low), int(high) + 1)


@dataclass(frozen=True)
class FileInputs:
    """Inputs of a file, and the names of dims and inputs whose sizes or values are not known.

    Attributes:
        guessed: names of dims whose sizes are guessed.
        open: names of integer inputs without a stated or recorded range.
    """

    specs: tuple[InputSpec, ...]
    guessed: tuple[str, ...]
    open: tuple[str, ...]


def describe_file_inputs(
    proto: onnx.ModelProto,
    inputs: Sequence[str],
    dims: Sequence[str],
    label: str,
    known: Sequence[InputSpec] | None = None,
) -> FileInputs:
    """Describe the inputs of a file.

    Args:
        inputs: "ids:int64[batch,seq]{0:30522}" states sizes and values of the input ids; "ids=0:30522" states only its
            values.
        dims: "batch=1:8:64" states the range of a named dim.
        label: the file's name in messages.
        known: description of the inputs that is already known. None reads the description that `normdeploy.export`
            recorded in the file.

    Returns: the inputs in the file's order, with the guessed dims and the integer inputs of unknown range.

    Raises:
        InputError: a stated input or dim does not exist or does not fit, or an input is not a tensor of numbers.
    """
    stated = declared_inputs(proto.graph)
    if known is None:
        described = read_recorded_inputs(proto)
    else:
        described = {spec.name: spec for spec in known}
    every = {d for item in stated for d in item.dims or () if isinstance(d, str)}
    every |= named_dims_of(described.values()).keys()
    names = [item.name for item in stated]
    values, others = parse_input_values(inputs, names)
    # The package ``loading`` imports torch, which verbs on ONNX files do not need otherwise.
    from ..loading.input_request import parse_input_request, refuse_constants

    wishes = parse_input_request(others, dims, names, every)
    refuse_constants(wishes, "an ONNX file")
    if twice := next((wish.name for wish in wishes.inputs if wish.name in values), None):
        raise InputError(f"the input {twice!r} is passed twice; write its values after its shape, {twice}[...]{{0:10}}")
    return _build_input_specs(stated, described, wishes, values, label, image_ranges(proto))


def _fit_to_dtype(values: InputValueRange, dtype: str, label: str) -> tuple[float, float]:
    """Return the range of ``values`` for an input of type ``dtype``.

    Raises:
        InputError: the input holds integers, and the values are not integers or are out of the range of ``dtype``.
    """
    kind = np.dtype(np.float32 if dtype == "bfloat16" else dtype)
    if kind.kind not in "iu":
        return values.range
    if values.array is not None and values.array.dtype.kind == "f":
        raise InputError(
            f"{label}: the input {values.name!r} is {dtype}, but the file of its values holds {values.array.dtype}; "
            f"store them as {dtype}"
        )
    low, high = values.range
    if not (isinstance(low, int) and isinstance(high, int)):
        raise InputError(
            f"{label}: the input {values.name!r} is {dtype}, but its values are stated as {low:g}:{high:g}; write "
            "integers"
        )
    limits = np.iinfo(kind)
    if low < limits.min or high - 1 > limits.max:
        raise InputError(
            f"{label}: the input {values.name!r} is {dtype}, which holds {limits.min} to {limits.max}, but its "
            f"values are stated as {low} to {high - 1}"
        )
    return values.range


def read_recorded_inputs(proto: onnx.ModelProto) -> dict[str, InputSpec]:
    """Read the inputs that ``export`` recorded in the file.

    Returns: input name -> its description; {} if the file has no record, or a record of an incompatible version.
    """
    try:
        return {spec.name: spec for spec in read_record(proto).get("inputs", ())}
    except GraphError:
        return {}


def _keep_steps(stated: tuple[Dim, ...], recorded: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Apply the recorded steps to the dims that the user states, because a step is a condition of the model.

    Raises:
        InputError: a stated size is not a multiple of the step; the message names the nearest multiples.
    """
    kept = [
        dim.with_step(math.lcm(dim.step, own.step)) if own.step > 1 and not dim.terms else dim
        for dim, own in zip(stated, recorded, strict=False)
    ]
    return (*kept, *stated[len(kept) :])


def _build_input_specs(
    file: Sequence[DeclaredInput],
    by_record: Mapping[str, InputSpec],
    wishes: InputRequest,
    valued: Mapping[str, InputValueRange],
    label: str,
    pixels: Mapping[str, tuple[float, float]],
) -> FileInputs:
    by_name = {wish.name: wish for wish in wishes.inputs}
    recorded_dims = named_dims_of(by_record.values())
    stated = {**wishes.single, **{name: wishes.dims[name] for name in wishes.stated}}
    # The recorded step is a condition of the model, so it also applies to the user's range.
    stated = {
        name: dim.with_step(math.lcm(dim.step, recorded_dims[name].step)) if name in recorded_dims else dim
        for name, dim in stated.items()
    }
    specs = list[InputSpec]()
    values = list[str]()
    sizes = dict[str, None]()
    used = set[str]()
    for item in file:
        name = item.name
        dtype = item.dtype
        dims = item.dims
        if not dtype or dtype == STRING:
            if dtype:
                what = "takes strings"
            else:
                what = "is not a tensor of a known type"
            raise InputError(f"{label}: the input {name!r} {what}; only numeric tensors can be passed: change its type")
        spec = by_record.get(name)
        if (wish := by_name.pop(name, None)) is not None:
            if wish.dtype not in ("", dtype):
                raise InputError(
                    f"{label}: the input {name!r} is {dtype}, but --input says {wish.dtype}; omit the type"
                )
            if dims is not None and len(dims) != len(wish.shape):
                raise InputError(
                    f"{label}: the input {name!r} has {len(dims)} dims, but --input says {len(wish.shape)}"
                )
            for place, (own, wished) in enumerate(zip(dims or (), wish.shape, strict=False)):
                if isinstance(own, int) and wished.name is None and wished.opt != own:
                    raise InputError(
                        f"{label}: dim {place} of the input {name!r} is {own}, but --input says {wished.opt}"
                    )
            if spec is None:
                old = InputSpec(name, dtype, wish.shape, pixels.get(name))
            else:
                shape = _keep_steps(wish.shape, spec.shape)
                old = replace(spec, dtype=dtype, shape=shape)
            if wish.range is None:
                spec = old
            else:
                spec = replace(old, range=wish.range, mask=False)
        elif spec is None or spec.dtype != dtype or (dims is not None and len(spec.shape) != len(dims)):
            if dims is None:
                raise InputError(
                    f"{label} does not state the shape of the input {name!r}; pass --input '{name}:{dtype}[...]'"
                )
            shape = tuple(Dim.from_size(d) if isinstance(d, int) else Dim(d, *DEFAULT_SIZES) for d in dims)
            sizes |= dict.fromkeys(d.name for d in shape if d.name is not None and d.name not in stated)
            spec = InputSpec(name, dtype, shape, pixels.get(name))
        if name in valued:
            spec = replace(spec, range=_fit_to_dtype(valued[name], dtype, label), mask=False)
        used |= named_dims_of([spec]).keys()
        spec = spec.with_ranges_of(stated)
        if spec.range is None and np.dtype(np.float32 if dtype == "bfloat16" else dtype).kind in "iu":
            values.append(name)
        specs.append(spec)
    if by_name:
        raise InputError(f"{label} has no input {next(iter(by_name))!r}; it has {[spec.name for spec in specs]}")
    if unknown := sorted(stated.keys() - used):
        raise InputError(f"{label} has no dynamic dim {unknown[0]!r}; it has {sorted(used)}")
    return FileInputs(tuple(specs), tuple(sizes), tuple(values))
