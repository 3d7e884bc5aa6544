"""Draw single nodes of ONNX's operators, with optional inputs, attributes and outputs present or absent.

``onnx.defs`` gives the attributes, types, inputs and outputs of an operator at an opset; callers provide values worth
trying.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

TYPES = {
    f"tensor({name})": np.dtype(dtype)
    for name, dtype in (
        *(("float", "f4"), ("double", "f8"), ("float16", "f2"), ("bool", "?")),
        *(("int8", "i1"), ("int16", "i2"), ("int32", "i4"), ("int64", "i8")),
        *(("uint8", "u1"), ("uint16", "u2"), ("uint32", "u4"), ("uint64", "u8")),
    )
}
PRESENT = 0.6


@dataclass
class Draw:
    """Node as it grows.

    Attributes:
        inputs: arrays; None for an absent input.
        kinds: type variable -> type.
    """

    rng: np.random.Generator
    op: str
    opset: int
    inputs: list[np.ndarray | None] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, np.dtype] = field(default_factory=dict)

    @property
    def schema(self) -> onnx.defs.OpSchema:
        """Return the operator's schema at the opset."""
        return onnx.defs.get_schema(self.op, self.opset)

    def pick(self, *values: Any) -> Any:
        """Pick one of the values.

        Returns:
            the value.
        """
        return values[int(self.rng.integers(len(values)))]

    def coin(self, chance: float = 0.5) -> bool:
        """Toss a coin.

        Returns:
            true with the given chance.
        """
        return bool(self.rng.random() < chance)

    def kind(self, place: int) -> np.dtype:
        """Return the type of an input, the same for all that share a type variable; mostly float32.

        Returns:
            numpy's type.
        """
        formals = self.schema.inputs
        formal = formals[min(place, len(formals) - 1)]
        if formal.type_str not in self.kinds:
            allowed = {formal.type_str, *formal.types}
            numpy_types = [dtype for name, dtype in TYPES.items() if name in allowed]
            floats = [dtype for dtype in numpy_types if dtype == np.float32]
            choice = floats if floats and self.coin(0.6) else numpy_types or [np.dtype("f4")]
            self.kinds[formal.type_str] = choice[int(self.rng.integers(len(choice)))]
        return self.kinds[formal.type_str]

    def tensor(self, *shape: int, low: float = -3, high: float = 3) -> np.ndarray:
        """Add an input of its schema's type.

        Returns:
            the array.
        """
        dtype = self.kind(len(self.inputs))
        values: np.ndarray = self.rng.uniform(low, high, shape)
        if dtype.kind == "f" and self.coin(0.2):
            mask = self.rng.random(shape) < 0.2
            values = np.where(mask, self.rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], shape), values)
        if dtype.kind == "u":
            values = np.abs(values)
        if dtype.kind == "b":
            values = values > 0
        if dtype.kind in "iu":
            values = np.round(values * 3)
        made = np.asarray(values).astype(dtype)
        self.inputs.append(made)
        return made

    def given(self, values: object, dtype: object = np.int64) -> None:
        """Add an input with these values."""
        self.inputs.append(np.array(values, dtype))

    def shape(self, low: int = 1, high: int = 4, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> tuple[int, ...]:
        """Draw a shape with ``low`` to ``high`` dims.

        Returns:
            sizes.
        """
        return tuple(int(n) for n in self.rng.choice(sizes, int(self.rng.integers(low, high + 1))))

    def set(self, name: str, *values: Any, needed: bool = False) -> Any:
        """Set an attribute to one of the values, or leave it out, if the opset has it.

        Returns:
            the value, or None.
        """
        if name not in self.schema.attributes or not (needed or self.coin(PRESENT)):
            return None
        value = self.pick(*values)
        self.attributes[name] = value
        return value

    def axis(self, rank: int, name: str = "axis", *, needed: bool = False) -> int | None:
        """Set an axis attribute.

        Returns:
            the axis, or None.
        """
        return self.set(name, *range(-rank, rank), needed=needed)

    def some_axes(self, rank: int) -> list[int]:
        """Draw axes.

        Returns:
            axes, some of them negative.
        """
        count = int(self.rng.integers(0 if self.coin(0.15) else 1, rank + 1))
        axes = [int(a) for a in self.rng.permutation(rank)[:count]]
        return [a - rank if self.coin(0.3) else a for a in axes]
