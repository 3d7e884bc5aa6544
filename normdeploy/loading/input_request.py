"""Parse the user's inputs and dims: ``--input "ids:int64[batch,seq]{0:30522}"`` and ``--dim "batch=1:8:64"``.

    NAME[:DTYPE][ DIM, ... ][{LOW:HIGH}]      the brackets around the DIMs are literal; the default DTYPE is float32
    NAME[:DTYPE][ SIZE, ... ]{VALUE, ...}     constant values in row-major order; the file has no such input
    DIM = SIZE | NAME | NAME=MIN:OPT:MAX[:STEP] | DIM+DIM      a size is static, a name is dynamic

One name means one size everywhere. The range is half-open for integers: {0:30522} are the ids 0 to 30521.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from ..dtypes import normalize_dtype
from ..errors import InputError
from ..model import DEFAULT_SIZES, MAX_SIZE, RANGE_HOW, Dim, InputSpec, named_dims_of
from .shape_expressions import split_words

_REST = re.compile(r"\s*(:\s*(?P<dtype>\w+)\s*)?\[(?P<shape>[^\]]*)\]\s*(\{(?P<range>[^}]*)\})?\s*")
_SPEC = re.compile(r"\s*(?P<name>[A-Za-z_][\w.\-/]*)(?P<rest>.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_DTYPES = {
    **{name: name for name in split_words("float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool")},
    **{"short": "int16", "int": "int32", "long": "int64"},
}


@dataclass(frozen=True)
class InputConstant:
    """Input with constant values. It is a part of the trace, and not an input of the file.

    Attributes:
        dtype: numpy's name, or "bfloat16"; "" if the user omitted it.
        values: the elements in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class InputRequest:
    """Inputs and dims that the user stated.

    Attributes:
        inputs: the inputs in the user's order. The dtype of an input is "" if the user omitted it.
        dims: dynamic dims by name.
        stated: names of dims with a stated range.
        sources: dim name -> source of the dim's largest size, for dims without a stated range whose limit is known.
        single: dims whose range is a single size. They are static in ``inputs``.
        assumed: dims that normdeploy named in inputs that it derived itself. The user does not need them to be dynamic.
        fixed: assumed dim that the model fixes -> note for the user. Such dims are static in ``inputs``.
        constants: inputs with constant values, by name. They are not in ``inputs``.
        notes: about inputs that normdeploy derived itself.
        trusts_steps: True to limit dims to the multiples that torch derives, although the module runs at other sizes.
    """

    inputs: tuple[InputSpec, ...]
    dims: dict[str, Dim]
    stated: frozenset[str]
    sources: dict[str, str] = field(default_factory=dict)
    single: dict[str, Dim] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    fixed: dict[str, str] = field(default_factory=dict)
    constants: dict[str, InputConstant] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    trusts_steps: bool = False

    @property
    def demanded(self) -> frozenset[str]:
        """Return the dims whose range the user stated; the model must take all of it."""
        return self.stated - self.assumed

    def with_dims(self, dims: dict[str, Dim]) -> InputRequest:
        """Copy the request with other ranges of dims.

        Returns:
            The copy.
        """
        return replace(self, inputs=tuple(wish.with_ranges_of(dims) for wish in self.inputs), dims=dims)

    def with_fixed_dims(self, sizes: Mapping[str, int], note: str) -> InputRequest:
        """Make assumed dims static.

        Args:
            sizes: dim name -> its only size.
            note: for the user, about all of them.

        Returns:
            The changed copy.
        """
        static = {name: Dim.from_size(size) for name, size in sizes.items()}
        return replace(
            self,
            inputs=tuple(wish.with_ranges_of(static) for wish in self.inputs),
            dims={name: dim for name, dim in self.dims.items() if name not in sizes},
            stated=self.stated - sizes.keys(),
            assumed=self.assumed - sizes.keys(),
            fixed=self.fixed | dict.fromkeys(sizes, note),
        )


def parse_input_request(
    inputs: Sequence[str], dims: Sequence[str], names: Collection[str] = (), dim_names: Collection[str] | None = None
) -> InputRequest:
    """Parse the values of --input and --dim.

    Args:
        names: names of an ONNX file's inputs, which may be any text ("x:0").
        dim_names: names of the dims of these inputs, which may also be any text ("unk-1"). None allows only
            identifiers.

    Returns:
        The request, in which dims without a stated range have default sizes.

    Raises:
        InputError: a value can't be parsed, or two values contradict each other.
    """
    ranges: dict[str, Dim] = {}
    for text in dims:
        name, _, rest = text.partition("=") if dim_names is None else text.rpartition("=")
        if not (_NAME.fullmatch(name.strip()) if dim_names is None else name.strip()) or not rest:
            raise InputError(f"the dim {text!r} can't be read: {RANGE_HOW}")
        _record_stated_range(ranges, Dim.from_range(name.strip(), rest, text), text)
    drafts = [_parse_input(text, ranges, names, dim_names or ()) for text in inputs]
    names = [wish.name for wish in drafts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"the input {twice[0]!r} is passed {names.count(twice[0])} times: pass each input once")
    free = [wish for wish in drafts if isinstance(wish, InputSpec)]
    used = dynamic_dim_names(free)
    known = {name: Dim(name, *DEFAULT_SIZES) for name in used} | ranges
    constants = {wish.name: wish for wish in drafts if isinstance(wish, InputConstant)}
    wishes = InputRequest(tuple(free), {}, frozenset(ranges), constants=constants).with_dims(known)
    return _make_single_sizes_static(wishes)


def refuse_constants(wishes: InputRequest, model: str) -> None:
    """Refuse constant values for inputs of a model whose graph is finished.

    Args:
        model: the kind of model, for the message.

    Raises:
        InputError: the request has constants.
    """
    if wishes.constants:
        raise InputError(
            f"the input {next(iter(wishes.constants))!r} was declared with constant values, but {model} keeps all its "
            "inputs: write {LOW:HIGH} for a range of values"
        )


def dynamic_dim_names(wishes: Sequence[InputSpec]) -> list[str]:
    """List the names of the dynamic dims. A dim that is a sum contributes its terms.

    Returns:
        Names without repetition.
    """
    return list(named_dims_of(wishes))


def _make_single_sizes_static(wishes: InputRequest) -> InputRequest:
    """If the range of a dim is a single size, make the dim static."""
    single = {name: Dim.from_size(dim.opt) for name, dim in wishes.dims.items() if dim.min == dim.max}
    inputs = tuple(wish.with_ranges_of(single) for wish in wishes.inputs)
    dims = {name: dim for name, dim in wishes.dims.items() if name not in single}
    return replace(wishes, inputs=inputs, dims=dims, stated=wishes.stated - single.keys(), single=single)


def _record_stated_range(ranges: dict[str, Dim], dim: Dim, text: str) -> None:
    assert dim.name is not None
    other = ranges.setdefault(dim.name, dim)
    if other != dim:
        raise InputError(
            f"the dim {dim.name!r} is declared twice: {other}, and {dim} in {text!r}; use one range for one name"
        )


def _parse_input(
    text: str, ranges: dict[str, Dim], names: Collection[str], dim_names: Collection[str]
) -> InputSpec | InputConstant:
    name, match = _split_input_name(text, names)
    if match is None:
        raise InputError(
            f"the input {text!r} can't be read: write NAME:DTYPE[DIM,...], for example ids:int64[batch,seq]{{0:30522}} "
            "or x:float32[batch,3,224,224]"
        )
    stated = match["dtype"] or ""
    dtype = normalize_dtype(stated) or _DTYPES.get(stated.lower(), "")
    if stated and not dtype:
        if names:
            known = f"; the inputs are {[*names]}"
        else:
            known = ""
        raise InputError(
            f"the input {text!r} has the unknown dtype {stated!r}: choose one of {', '.join(_DTYPES)}{known}"
        )
    if match["shape"].strip():
        shape = tuple(_parse_dim(part.strip(), text, ranges, dim_names) for part in match["shape"].split(","))
    else:
        shape = ()
    if match["range"] is None:
        return InputSpec(name, dtype, shape)
    if ":" not in match["range"]:
        return _parse_constant(name, dtype, shape, match["range"], text)
    return InputSpec(name, dtype, shape, _parse_value_range(match["range"], text))


def _parse_constant(name: str, dtype: str, shape: tuple[Dim, ...], body: str, text: str) -> InputConstant:
    if any(dim.name for dim in shape):
        raise InputError(
            f"the input {text!r} has constant values, so its sizes must be numbers: write "
            f"{name}:int64[1,3]{{1,16,16}}, or write {{LOW:HIGH}} for a range of values"
        )
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype or "float32")
    try:
        values = tuple(_parse_element(part.strip(), kind) for part in body.split(","))
    except ValueError:
        raise InputError(
            f"the values {{{body}}} of {text!r} can't be read as {kind.name}: write a range, for example "
            "{0:30522}, or all values, for example {1,16,16}"
        ) from None
    sizes = tuple(dim.opt for dim in shape)
    if len(values) != math.prod(sizes):
        raise InputError(
            f"the input {text!r} has {len(values)} values, but its sizes {list(sizes)} take {math.prod(sizes)}: write "
            "each value"
        )
    return InputConstant(name, dtype, sizes, values)


def _parse_element(text: str, kind: np.dtype) -> float:
    """Parse a number that the dtype contains.

    Raises:
        ValueError: the text is not a number, or the number is beyond the dtype's range.
    """
    if "_" in text:
        raise ValueError(text)
    if kind.kind == "b":
        return ("0", "1").index(text)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        number = int(text)
        if not limits.min <= number <= limits.max:
            raise ValueError(text)
        return number
    value = float(text)
    if not abs(value) <= float(ml_dtypes.finfo(kind).max):
        raise ValueError(text)
    return value


def _split_input_name(text: str, names: Collection[str]) -> tuple[str, re.Match[str] | None]:
    """Split the text of an input into its name and the rest. If several of a file's names fit, the longest is taken."""
    bare = text.strip()
    for name in sorted(names, key=len, reverse=True):
        if bare.startswith(name) and (rest := _REST.fullmatch(bare[len(name) :])) is not None:
            return name, rest
    match = _SPEC.fullmatch(text)
    if match is None:
        return ("", None)
    return (match["name"], _REST.fullmatch(match["rest"]))


def _parse_dim(part: str, text: str, ranges: dict[str, Dim], dim_names: Collection[str]) -> Dim:
    # Python converts no text with thousands of digits to a number.
    if part.isdecimal() and len(part) <= len(str(MAX_SIZE)) and 1 <= int(part) <= MAX_SIZE:
        return Dim.from_size(int(part))
    terms = [term.partition("=")[0].strip() for term in part.split("+")]
    if "+" in part and all(term.isdecimal() or _NAME.fullmatch(term) or term in dim_names for term in terms):
        return Dim.sum_of(tuple(_parse_dim(term.strip(), text, ranges, dim_names) for term in part.split("+")))
    if (known := next((n for n in dim_names if part == n or part.startswith((f"{n}=", f"{n} ="))), None)) is not None:
        if rest := part[len(known) :].strip().removeprefix("=").strip():
            _record_stated_range(ranges, Dim.from_range(known, rest, text), text)
        return Dim(known, *DEFAULT_SIZES)
    name, _, rest = (piece.strip() for piece in part.partition("="))
    if not _NAME.fullmatch(name):
        raise InputError(
            f"the dim {part!r} of {text!r} can't be read: write a size of 1 or more, a name, or NAME=MIN:OPT:MAX"
        )
    if rest:
        _record_stated_range(ranges, Dim.from_range(name, rest, text), text)
    return Dim(name, *DEFAULT_SIZES)


def _parse_value_range(body: str, text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) if any(c in part for c in ".eE") else int(part) for part in body.split(":"))
    except ValueError:
        raise InputError(
            f"the range {{{body}}} of {text!r} can't be read: write {{LOW:HIGH}}, for example {{0:30522}}"
        ) from None
    if not (low < high and math.isfinite(high - low)):
        raise InputError(
            f"the range {{{body}}} of {text!r} has no valid value: it runs from {low} up to but not including {high}"
        )
    return low, high
