"""Loaded models and the description of their inputs.

Every loader returns a ``LoadedModel``. Export, verification and the demo take a ``LoadedModel``. A ``LoadedModel``
holds an ExportedProgram, never a live module. The program is a copy, so the user's object does not change, and the
program's graph can run in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import InputError
from .image_input import ImageInput

if TYPE_CHECKING:
    import torch

# Default min, opt and max of a dynamic dim, if neither the model nor the user states its range.
DEFAULT_SIZES = (1, 8, 64)
# Largest size of a dim.
MAX_SIZE = 2**31 - 1
# Size in the text of a range. Longer texts are larger than MAX_SIZE.
_SIZE = re.compile(r"\s*[0-9]{1,10}\s*")
# Usual form of a range, for messages.
RANGE_HOW = "write NAME=MIN:OPT:MAX, for example batch=1:8:64"


@dataclass(frozen=True)
class Dim:
    """One dimension: static or dynamic with a range.

    A static dim has no name, and its three sizes are equal.

    Attributes:
        name: name of a dynamic dim; None for a static dim.
        min: smallest size.
        opt: usual size, which engines are tuned for.
        max: largest size.
        terms: dims whose sizes add up to the size of this dim; () if this dim is not a sum. For example, a decoder's
            mask is as long as its past and its new tokens together.
        step: all sizes are multiples of this number.
    """

    name: str | None
    min: int
    opt: int
    max: int
    terms: tuple[Dim, ...] = ()
    step: int = 1

    def __str__(self) -> str:
        if not self.name:
            return str(self.opt)
        if self.step > 1:
            return f"{self.name}={self.min}:{self.opt}:{self.max}:{self.step}"
        return f"{self.name}={self.min}:{self.opt}:{self.max}"

    @property
    def is_dynamic(self) -> bool:
        """Return whether the size can vary."""
        return self.name is not None

    @classmethod
    def from_size(cls, size: int) -> Dim:
        """Build a static dim.

        Returns: a dim without a name, with ``size`` as min, opt and max.
        """
        return cls(None, size, size, size)

    @classmethod
    def from_range(cls, name: str, text: str, stated_in: str = "") -> Dim:
        """Parse a range "min:opt:max" or "min:opt:max:step".

        Args:
            stated_in: text that contains the range, for messages; "" if the range stands alone.

        Returns: a dynamic dim.

        Raises:
            InputError: the text is not a range, or its sizes do not fit together.
        """
        place = f" in {stated_in!r}" if stated_in else ""
        parts = text.split(":")
        if len(parts) not in (3, 4) or not all(map(_SIZE.fullmatch, parts)):
            raise InputError(
                f"the dim {name}={text}{place} can't be read: write {name}=MIN:OPT:MAX in whole numbers, for example"
                f" {name}=1:8:64, or {name}=MIN:OPT:MAX:STEP for multiples of STEP"
            )
        low, best, high, step = map(int, (*parts, "1")[:4])
        if not (0 <= low <= best <= high <= MAX_SIZE and high):
            raise InputError(
                f"the dim {name}={text}{place} must have 0 <= min <= opt <= max and max >= 1, for example {name}=1:8:64"
            )
        if not 1 <= step <= high:
            raise InputError(f"the dim {name}={text}{place} has the step {step}: write a step from 1 to {high}")
        return cls(name, low, best, high).with_step(step)

    @classmethod
    def sum_of(cls, terms: tuple[Dim, ...]) -> Dim:
        """Build the dim that is as long as ``terms`` together.

        Returns: a dim named after its terms, such as "past + seq"; a static dim if all terms are static.
        """
        low, best, high = (sum(getattr(term, which) for term in terms) for which in ("min", "opt", "max"))
        if not any(term.is_dynamic for term in terms):
            return cls.from_size(best)
        return cls(" + ".join(term.name or str(term.opt) for term in terms), low, best, high, terms)

    def allowed_sizes(self, start: int | None = None) -> range:
        """List the sizes of this dim: the multiples of its step within its range.

        Args:
            start: smallest size to list; None for min.

        Returns: the sizes in increasing order.
        """
        low = max(self.min, self.min if start is None else start)
        return range(-(-low // self.step) * self.step, self.max + 1, self.step)

    def nearest_size(self, size: int) -> int:
        """Return the size of this dim that is nearest to ``size``; opt if the dim has no size."""
        sizes = self.allowed_sizes()
        if not sizes:
            return self.opt
        return min(sizes[-1], max(sizes[0], round(size / self.step) * self.step))

    def with_step(self, step: int) -> Dim:
        """Restrict this dim to multiples of ``step``.

        Returns: this dim with the step.

        Raises:
            InputError: min, opt or max is not a multiple; the message names the nearest multiples.
        """
        require_multiples(f"the dim {self}", (self.min, self.opt, self.max), step)
        return replace(self, step=step)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Compute the size of this dim.

        Args:
            sizes: sizes of named dims; opt for a name that is missing.

        Returns: the size; for a sum, the sum of its terms' sizes.
        """
        if self.terms:
            return sum(term.size(sizes) for term in self.terms)
        if self.name is None:
            return self.opt
        return sizes.get(self.name, self.opt)

    def with_ranges_of(self, dims: Mapping[str, Dim]) -> Dim:
        """Replace this dim's range. If the dim is a sum, replace the ranges of its terms.

        Args:
            dims: named dims with their new ranges.

        Returns: the dim of ``dims`` with this name; this dim if it is static or ``dims`` lacks its name.
        """
        if self.terms:
            return Dim.sum_of(tuple(term.with_ranges_of(dims) for term in self.terms))
        if self.name is None:
            return self
        return dims.get(self.name, self)

    def named_dims(self) -> tuple[Dim, ...]:
        """List the dynamic dims that determine this dim's size.

        Returns: this dim if it is dynamic, the dynamic terms if it is a sum, () if it is static.
        """
        if self.terms:
            return tuple(d for term in self.terms for d in term.named_dims())
        if self.is_dynamic:
            return (self,)
        return ()


def require_multiples(subject: str, sizes: Iterable[int], step: int) -> None:
    """Refuse sizes that are not multiples of ``step``.

    Args:
        subject: description of the sizes for the message.

    Raises:
        InputError: a size is not a multiple; the message names the nearest multiples.
    """
    for size in sizes:
        if size % step:
            below = size // step * step
            near = " or ".join(str(n) for n in (below, below + step) if n)
            raise InputError(f"{subject} has the size {size}, but its sizes must be multiples of {step}: use {near}")


# min, opt and max of a whole input.
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorSpec:
    """Input or output of a model.

    Attributes:
        dtype: numpy's name, or "bfloat16".
        shape: size or name of each dim; None for a dynamic dim without a name. Engines keep no names.
        profiles: (min, opt, max) shapes of each optimization profile of an engine's input; empty otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    profiles: tuple[Shapes, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"

    def accepts_shape(self, shape: Sequence[int], profile: int) -> bool:
        """Return whether every size of ``shape`` lies within a profile's range.

        Args:
            profile: index of the optimization profile.

        Returns: True if min ≤ size ≤ max for every dim.
        """
        low, _, high = self.profiles[profile]
        return all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))


# Maximum number of random values of one input. This many values take 8 GiB in float64.
MOST = 2**30


@dataclass(frozen=True)
class InputSpec:
    """Name, dtype, shape and values of one input.

    Attributes:
        name: name in the ONNX file.
        dtype: numpy's name, or "bfloat16".
        range: (low, high). Integers are drawn from the half-open interval [low, high), floats uniformly from the same
            interval. For None, floats are drawn from a standard normal distribution, integers from 0 and 1. bool inputs
            ignore the range.
        mask: True if the input is an attention mask, whose zeros hide keys. Each row drawn along the last axis then
            contains a 1.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    range: tuple[float, float] | None = None
    mask: bool = False

    def with_ranges_of(self, dims: Mapping[str, Dim]) -> InputSpec:
        """Replace the ranges of this input's dims.

        Args:
            dims: named dims with their new ranges.

        Returns: a copy, in which dims that are missing in ``dims`` keep their ranges.
        """
        return replace(self, shape=tuple(dim.with_ranges_of(dims) for dim in self.shape))

    def concrete_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Compute the shape at given sizes.

        Args:
            dims: sizes of named dims; opt for a name that is missing.

        Returns: one size per dim.
        """
        return tuple(d.size(dims) for d in self.shape)

    def sample(self, rng: np.random.Generator, dims: Mapping[str, int] | None = None) -> np.ndarray:
        """Draw random values of this input.

        Args:
            dims: sizes of named dims; opt for a name that is missing.

        Returns:
            An array of this input's dtype.

        Raises:
            InputError: an integer range is empty, or the shape has a negative size, over 64 dims or over 2**30
                elements.
        """
        shape = self.concrete_shape(dims or {})
        # numpy allows at most 64 dims.
        if min(shape, default=0) < 0 or len(shape) > 64 or math.prod(shape) > MOST:
            raise InputError(
                f"input {self.name!r} has the shape {list(shape)}, for which no values can be generated: sizes can't "
                f"be negative, and at most {MOST} elements are generated; pass smaller sizes"
            )
        if self.dtype == "bool":
            return self._unmask_each_row(rng.integers(0, 2, shape), rng).astype(bool)
        kind = np.dtype("float32" if self.dtype == "bfloat16" else self.dtype)
        if kind.kind in "iu":
            low, high = self.range or (0, 2)
            if high <= low:
                raise InputError(
                    f"input {self.name!r} has an empty range, from {low} up to but not including {high}; pass a "
                    "range such as {0:2}"
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
                f"input {self.name!r} has values from {low} to {high}, which can't be drawn ({error}); pass a "
                "narrower range"
            ) from error

    def _unmask_each_row(self, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Set one random element of each all-zero row to 1, if this input is a mask.

        A row without a 1 would be a text of padding only, which real batches do not contain. ``values`` is changed in
        place.
        """
        if self.mask and values.size:
            rows = values.reshape(-1, values.shape[-1])
            dark = np.flatnonzero(~rows.any(1))
            rows[dark, rng.integers(0, rows.shape[1], dark.size)] = 1
        return values


def named_dims_of(inputs: Iterable[InputSpec]) -> dict[str, Dim]:
    """Collect the named dynamic dims of the inputs.

    Returns: name -> dim, in the order of the inputs. A dim that is a sum contributes its terms.
    """
    return {dim.name: dim for spec in inputs for size in spec.shape for dim in size.named_dims() if dim.name}


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """Inputs, outputs and origin of a model, without its graph and weights.

    Attributes:
        outputs: names of the flattened outputs.
        kind: form in which the loader received the model.
        sha256: hash of the model's file; "" for a live module.
        recorded: flags, as JSON values, with which ``load`` would return the same model.
        taken: dim name -> source of the assumed maximum, for each dim whose maximum the user does not state.
        claimed: the inputs as the tested file declares them, in the same order; () unless the file's ranges are
            narrower than those of ``inputs``.
        word: name of the file or record that ``inputs`` come from; "" if ``inputs`` come from the model itself or from
            the user.
        traced_by: exporter that made the trace, with its version; "" for torch.export.
        images: images that the model takes and prepares itself, although the user's model does not.
        image_claim: name of the file that states ``images``; "" if the user states them.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    kind: str
    sha256: str = ""
    recorded: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    claimed: tuple[InputSpec, ...] = ()
    word: str = ""
    traced_by: str = ""
    images: tuple[ImageInput, ...] = ()
    image_claim: str = ""

    @property
    def named_dims(self) -> dict[str, Dim]:
        """Return every named dynamic dim of the inputs by its name. A dim that is a sum contributes its terms."""
        return named_dims_of(self.inputs)

    @property
    def usual_sizes(self) -> dict[str, int]:
        """Return the opt size of every named dynamic dim by its name."""
        return {name: dim.opt for name, dim in self.named_dims.items()}

    def samples(self, seed: int = 0, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """Draw random values for every input.

        Args:
            seed: seed of the one generator that draws all inputs.
            dims: sizes of named dims; opt for a name that is missing.

        Returns: input name -> array.
        """
        rng = np.random.default_rng(seed)
        return {spec.name: spec.sample(rng, dims) for spec in self.inputs}


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """Run of a traced program on a random sample, whose outputs agree with the module's.

    Attributes:
        program: the program that ran.
        feeds: inputs by name.
        outputs: the program's flattened results.
        seconds: seconds of the run.
        processor_seconds: processor seconds of the run.
    """

    program: torch.export.ExportedProgram
    feeds: Mapping[str, np.ndarray]
    outputs: Sequence[Any]
    seconds: float
    processor_seconds: float


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelSignature):
    """PyTorch model in eval mode.

    Attributes:
        program: the traced model. It takes its tensors in the order of ``inputs``: the flattened leaves of args and
            kwargs.
        written: module paths of the buffers that ``forward`` changes.
        notes: remarks for the user on how the model was loaded.
        constants: parameters of forward that are constants of the program, by name.
        unprepared: the user's model, which takes prepared images; None if ``images`` is empty.
        trace_runs: runs of the program in the comparison with the module.
    """

    program: torch.export.ExportedProgram
    written: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unprepared: LoadedModel | None = None
    trace_runs: tuple[TraceRun, ...] = field(default=(), repr=False, compare=False)

    @property
    def as_signature(self) -> ModelSignature:
        """Return a copy that has only the fields of the signature, without the program and its weights."""
        return ModelSignature(**{f.name: getattr(self, f.name) for f in fields(ModelSignature)})
