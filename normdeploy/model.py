"""A loaded model in eval mode, and what its inputs look like.

``LoadedModel`` is what every loader returns and what export, verification and the demo take. It holds an
ExportedProgram, never a live
module: the program is a copy, so the user's object stays untouched, and its graph can be run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import InputError

if TYPE_CHECKING:
    import torch

# min, opt and max of a dim of which nothing is said
DEFAULT_SIZES = (1, 8, 64)


@dataclass(frozen=True)
class Dim:
    """One dimension: static (``name`` is None and the three sizes are equal) or dynamic with its range.

    ``terms``: the dims that it is the sum of, as the mask of a decoder is as long as its past and its new tokens
    together; () is none.
    """

    name: str | None
    min: int
    opt: int
    max: int
    terms: tuple[Dim, ...] = ()

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}={self.min}:{self.opt}:{self.max}"
        return str(self.opt)

    @property
    def is_dynamic(self) -> bool:
        return self.name is not None

    @classmethod
    def from_size(cls, size: int) -> Dim:
        return cls(None, size, size, size)

    @classmethod
    def sum_of(cls, terms: tuple[Dim, ...]) -> Dim:
        """The dim that is as long as ``terms`` together; its name tells them, "past + seq"."""
        low, best, high = (sum(getattr(term, which) for term in terms) for which in ("min", "opt", "max"))
        if not any(term.is_dynamic for term in terms):
            return cls.from_size(best)
        return cls(" + ".join(term.name or str(term.opt) for term in terms), low, best, high, terms)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Its size where the named dims have these, or their opt size."""
        if self.terms:
            return sum(term.size(sizes) for term in self.terms)
        if self.name is None:
            return self.opt
        return sizes.get(self.name, self.opt)

    def with_ranges_of(self, dims: Mapping[str, Dim]) -> Dim:
        """This dim with its range, or those of its terms, as ``dims`` have it by name."""
        if self.terms:
            return Dim.sum_of(tuple(term.with_ranges_of(dims) for term in self.terms))
        if self.name is None:
            return self
        return dims.get(self.name, self)

    def named_dims(self) -> tuple[Dim, ...]:
        """The dynamic dims that decide its size: itself, or those of its terms."""
        if self.terms:
            return tuple(d for term in self.terms for d in term.named_dims())
        if self.is_dynamic:
            return (self,)
        return ()


# min, opt, max of a whole input
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: its name, dtype (numpy's name, or "bfloat16") and shape.

    A dim of ``shape`` is its size, its name, or None where it is dynamic and the file keeps no name (engines keep
    none). ``profiles`` holds the (min, opt, max) shapes of each optimization profile of an engine's input; it is empty
    otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    profiles: tuple[Shapes, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"

    def accepts_shape(self, shape: Sequence[int], profile: int) -> bool:
        """Whether ``shape`` lies within the profile."""
        low, _, high = self.profiles[profile]
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))


# random values of one input: 8 GiB while they are drawn
MOST = 2**30


@dataclass(frozen=True)
class InputSpec:
    """One input tensor: its name in the ONNX file, dtype (numpy's name, or "bfloat16"), shape, and the values it may
    take.

    ``range`` is (low, high): half-open [low, high) for integers and bool, the interval of a uniform draw for floats;
    None means standard normal for floats. ``mask``: it hides keys of an attention where it is 0; each row along the
    last axis has a 1 then.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    range: tuple[float, float] | None = None
    mask: bool = False

    def with_ranges_of(self, dims: Mapping[str, Dim]) -> InputSpec:
        """This input with the ranges of its dims as ``dims`` have them by name."""
        return replace(self, shape=tuple(dim.with_ranges_of(dims) for dim in self.shape))

    def concrete_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape where each named dim takes its value from ``dims``, or its opt size."""
        return tuple(d.size(dims) for d in self.shape)

    def sample(self, rng: np.random.Generator, dims: Mapping[str, int] | None = None) -> np.ndarray:
        """Random values of this input at the given sizes.

        Raises:
            InputError: an integer range is empty, or there are too many values.
        """
        shape = self.concrete_shape(dims or {})
        # 64: numpy's
        if min(shape, default=0) < 0 or len(shape) > 64 or math.prod(shape) > MOST:
            raise InputError(
                f"input {self.name!r} has the shape {list(shape)}, of which no values are generated: sizes are not"
                f" negative, and at most {MOST} elements are made; give smaller sizes"
            )
        if self.dtype == "bool":
            return self._unmask_each_row(rng.integers(0, 2, shape), rng).astype(bool)
        kind = np.dtype("float32" if self.dtype == "bfloat16" else self.dtype)
        if kind.kind in "iu":
            low, high = self.range or (0, 2)
            if high <= low:
                raise InputError(
                    f"input {self.name!r} takes values from {low} up to but not including {high}: there is none; "
                    "give a range such as {0:2}"
                )
            return self._unmask_each_row(self._draw_values(rng.integers, int(low), int(high), shape), rng).astype(kind)
        if self.range is None:
            values = rng.standard_normal(shape)
        else:
            values = self._draw_values(rng.uniform, *self.range, shape)
        if self.dtype == "bfloat16":
            return values.astype(ml_dtypes.bfloat16)
        return values.astype(kind)

    def _draw_values(self, draw: Callable[..., Any], low: float, high: float, shape: Sequence[int]) -> np.ndarray:
        try:
            return np.asarray(draw(low, high, shape))
        except (ValueError, OverflowError) as error:
            raise InputError(
                f"input {self.name!r} takes values from {low} to {high}, of which none are drawn ({error}); give a"
                " narrower range"
            ) from error

    def _unmask_each_row(self, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Of a mask: each row with at least one 1, at a place of its own; nobody sends a text of padding alone."""
        if self.mask and values.size:
            rows = values.reshape(-1, values.shape[-1])
            dark = np.flatnonzero(~rows.any(1))
            rows[dark, rng.integers(0, rows.shape[1], dark.size)] = 1
        return values


def named_dims_of(inputs: Iterable[InputSpec]) -> dict[str, Dim]:
    """Every named dynamic dim of the inputs, in their order; of a sum its terms."""
    return {dim.name: dim for spec in inputs for size in spec.shape for dim in size.named_dims() if dim.name}


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """What is known of a model besides what it computes.

    ``outputs`` names the flattened outputs. ``sha256`` is of the file, "" for a live module. ``recorded`` holds the
    flags (JSON values only) with which ``load`` would come to the same model. ``taken`` tells of each dim whose largest
    size nobody stated what it was taken from.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    kind: str
    sha256: str = ""
    recorded: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    # What a file under test claims of the inputs where that is narrower than ``inputs``, in their order.
    claimed: tuple[InputSpec, ...] = ()
    # Whose word ``inputs`` are; "" stands for the model's own or the user's.
    word: str = ""

    @property
    def named_dims(self) -> dict[str, Dim]:
        """Every named dynamic dim of the inputs; of a sum its terms."""
        return named_dims_of(self.inputs)

    @property
    def usual_sizes(self) -> dict[str, int]:
        """The opt size of every named dynamic dim."""
        return {name: dim.opt for name, dim in self.named_dims.items()}

    def samples(self, seed: int = 0, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """One random input for each name, at the given sizes (opt where none is given)."""
        rng = np.random.default_rng(seed)
        return {spec.name: spec.sample(rng, dims) for spec in self.inputs}


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelSignature):
    """A PyTorch model in eval mode; ``program`` takes its tensors in the order of ``inputs`` (the flattened leaves of
    args and kwargs). ``written``: the paths of the buffers that forward writes. ``notes``: what a user should know of
    its loading."""

    program: torch.export.ExportedProgram
    written: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def as_signature(self) -> ModelSignature:
        """The same without the program and its weights."""
        return ModelSignature(**{f.name: getattr(self, f.name) for f in fields(ModelSignature)})
