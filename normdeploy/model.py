"""A loaded model in eval mode, and what its inputs look like.

``Model`` is what every loader returns and what export, verification and the demo take. It holds an ExportedProgram, never a live
module: the program is a copy, so the user's object stays untouched, and its graph can be run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dim:
    """One dimension: static (``name`` is None and the three sizes are equal) or dynamic with its range."""

    name: str | None
    min: int
    opt: int
    max: int

    @property
    def dynamic(self) -> bool:
        return self.name is not None

    @classmethod
    def static(cls, size: int) -> Dim:
        return cls(None, size, size, size)


MOST = 2**30  # random values of one input: 8 GiB while they are drawn


@dataclass(frozen=True)
class InputSpec:
    """One input tensor: its name in the ONNX file, dtype (numpy's name, or "bfloat16"), shape, and the values it may take.

    ``range`` is (low, high): half-open [low, high) for integers and bool, the interval of a uniform draw for floats; None means
    standard normal for floats.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    range: tuple[float, float] | None = None

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape where each named dim takes its value from ``dims``, or its opt size."""
        return tuple(dims.get(d.name, d.opt) if d.name is not None else d.opt for d in self.shape)

    def sample(self, rng: np.random.Generator, dims: Mapping[str, int] | None = None) -> np.ndarray:
        """Random values of this input at the given sizes.

        Raises:
            InputError: an integer range is empty, or there are too many values.
        """
        shape = self.sizes(dims or {})
        if min(shape, default=0) < 0 or len(shape) > 64 or math.prod(shape) > MOST:  # 64: numpy's
            raise InputError(
                f"input {self.name!r} has the shape {list(shape)}, of which no values are generated: sizes are not negative, and at most "
                f"{MOST} elements are made; give smaller sizes"
            )
        if self.dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        kind = np.dtype("float32" if self.dtype == "bfloat16" else self.dtype)
        if kind.kind in "iu":
            low, high = self.range or (0, 2)
            if high <= low:
                raise InputError(
                    f"input {self.name!r} takes values from {low} up to but not including {high}: there is none; "
                    "give a range such as {0:2}"
                )
            return rng.integers(int(low), int(high), shape).astype(kind)
        values = rng.standard_normal(shape) if self.range is None else rng.uniform(*self.range, shape)
        if self.dtype == "bfloat16":
            import ml_dtypes

            return values.astype(ml_dtypes.bfloat16)
        return values.astype(kind)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What is known of a model besides what it computes.

    ``outputs`` names the flattened outputs. ``sha256`` is of the file, "" for a live module. ``recorded`` holds the flags (JSON values
    only) with which ``load`` would come to the same model.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    kind: str
    sha256: str = ""
    recorded: dict[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> dict[str, Dim]:
        """Every named dynamic dim of the inputs."""
        return {d.name: d for spec in self.inputs for d in spec.shape if d.name is not None}

    def samples(self, seed: int = 0, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """One random input for each name, at the given sizes (opt where none is given)."""
        rng = np.random.default_rng(seed)
        return {spec.name: spec.sample(rng, dims) for spec in self.inputs}


@dataclass(frozen=True, kw_only=True)
class Model(Signature):
    """A PyTorch model in eval mode; ``program`` takes its tensors in the order of ``inputs`` (the flattened leaves of args and kwargs)."""

    program: torch.export.ExportedProgram

    @property
    def signature(self) -> Signature:
        """The same without the program and its weights."""
        return Signature(**{f.name: getattr(self, f.name) for f in fields(Signature)})
