"""Writes what stands for a foreign norm node: standard primitives, all of them in the file's own opset.

The statistics of a 16-bit tensor are taken in float32, as the runtimes that own these ops take them; a wider one keeps
its type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..graphs.dims import Dims
from ..graphs.region import Refused
from ..norms.ops import NormOp, Owner

Attrs = Mapping[str, Any]
Types = Mapping[str, tuple[int | None, Dims | None]]  # of each tensor its element type and shape, None where unknown

_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_FLOATING = (*_NARROW, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
OLDEST = 7  # the first opset in which Add and Mul broadcast by themselves


@dataclass(frozen=True)
class Normalized:
    """x̂ and the statistics that made it, in the type that they were computed in."""

    value: str
    mean: str
    deviation: str  # sqrt(variance + epsilon), or sqrt(mean(x²) + epsilon)


class Writer:
    """Strings nodes together by the names of their tensors; what it wrote is in ``nodes`` and ``initializers``."""

    def __init__(self, node: onnx.NodeProto, opset: int, types: Types, taken: set[str]) -> None:
        """``taken``: names that no new tensor may bear; those that are made are added."""
        self.node, self.opset = node, opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.notes: tuple[str, ...] = ()
        self.alike: list[str] = []  # tensors with the shape of the node's first output
        self._types, self._taken = types, taken
        self._kinds: dict[str, int] = {}
        self._ints: dict[tuple[int, ...], str] = {}

    def input(self, index: int) -> str:
        """The name of an input, "" where it is left out."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def kind(self, t: str, *alike: str) -> int:
        """The floating element type of a tensor; ``alike``: others of the same type, asked where its own is not known.

        Raises:
            Refused: it is not known, or not floating.
        """
        kind = next((k for n in (t, *alike) if (k := self._kinds.get(n) or self._types.get(n, (None, None))[0])), None)
        if kind is None or kind not in _FLOATING:
            raise Refused(
                f"the type of {t!r} is {'not known' if not kind else onnx.TensorProto.DataType.Name(kind)}: it must be"
                " floating"
            )
        return kind

    @staticmethod
    def wide(kind: int) -> int:
        """The type that statistics of a tensor of type ``kind`` are taken in."""
        return onnx.TensorProto.FLOAT if kind in _NARROW else kind

    def shape(self, t: str) -> Dims:
        """
        Raises:
            Refused: not even the rank is known.
        """
        shape = self._types.get(t, (None, None))[1]
        if shape is None:
            raise Refused(f"the rank of {t!r} is not known")
        return shape

    def from_axis(self, x: str, axis: int) -> list[int]:
        """The axes of ``x`` from ``axis`` to the last, counted from the end."""
        return list(range(axis if axis < 0 else axis - len(self.shape(x)), 0))

    def length(self, t: str) -> int | None:
        """How many elements a vector has, None where the file does not say."""
        shape = self._types.get(t, (None, None))[1]
        return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None

    def then(self, op: str, *inputs: str, kind: int | None = None, **attrs: Any) -> str:
        """One node more; its result is of ``kind``, by default of the type of its first input."""
        name = self._fresh(op)
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [name], name=name, **attrs))
        own = kind or self._kinds.get(inputs[0]) or self._types.get(inputs[0], (None, None))[0]
        if own:
            self._kinds[name] = own
        return name

    def constant(self, values: object, kind: int, hint: str) -> str:
        name = self._fresh(hint)
        array = np.asarray(values).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        self._kinds[name] = kind
        return name

    def ints(self, values: Sequence[int], hint: str) -> str:
        key = tuple(values)
        if key not in self._ints:
            self._ints[key] = self.constant(np.array(values, dtype=np.int64), onnx.TensorProto.INT64, hint)
        return self._ints[key]

    def cast(self, t: str, kind: int) -> str:
        return (
            t
            if self._kinds.get(t, self._types.get(t, (None, None))[0]) == kind
            else self.then("Cast", t, kind=kind, to=kind)
        )

    def reshape(self, t: str, shape: Sequence[int]) -> str:
        return self.then("Reshape", t, self.ints(shape, "shape"))

    def mean(self, t: str, axes: Sequence[int]) -> str:
        """ReduceMean, its axes an attribute up to opset 17."""
        if self.opset < 18:
            return self.then("ReduceMean", t, axes=list(axes))
        return self.then("ReduceMean", t, self.ints(axes, "axes"))

    def normalized(self, x: str, axes: Sequence[int], epsilon: float, centered: bool = True) -> Normalized:
        """x̂ = (x − mean)/sqrt(variance + epsilon) over ``axes``, or x/sqrt(mean(x²) + epsilon)."""
        wide = self.wide(self.kind(x))
        x = self.cast(x, wide)
        mean = self.mean(x, axes) if centered else ""
        d = self.then("Sub", x, mean) if centered else x
        power = self.mean(self.then("Mul", d, d), axes)
        stored = np.float64(np.float32(epsilon))  # attributes are float32
        deviation = self.then("Sqrt", self.then("Add", power, self.constant(stored, wide, "epsilon")))
        return Normalized(self.then("Div", d, deviation), mean, deviation)

    def scaled(self, t: str, gamma: str, beta: str, shape: Sequence[int] = ()) -> str:
        """t · gamma + beta in gamma's type; ``shape``: what the two vectors are reshaped to."""
        kind = self.kind(gamma)
        t = self.then("Mul", self.cast(t, kind), self.reshape(gamma, shape) if shape else gamma)
        if not beta:
            return t
        beta = self.cast(beta, kind)
        return self.then("Add", t, self.reshape(beta, shape) if shape else beta)

    def check_groups(self, x: str, axis: int, groups: int) -> None:
        """
        Raises:
            Refused: the groups don't divide the channels along ``axis``.
        """
        channels = self.shape(x)[axis]
        if groups < 1 or (isinstance(channels, int) and channels % groups):
            raise Refused(f"{channels} channels can't be divided into {groups} groups")

    def grouped(self, x: str, groups: int, epsilon: float, rank: int, gamma: str = "", beta: str = "") -> str:
        """Group norm of (N, C, …) in gamma's type; gamma and beta (by default the inputs 1 and 2) have one value for
        each channel."""
        view = self.then("Reshape", x, self.ints([0, groups, -1], "groups"))
        back = self.then(
            "Reshape", self.normalized(view, [-1], epsilon).value, self.then("Shape", x, kind=onnx.TensorProto.INT64)
        )
        return self.scaled(back, gamma or self.input(1), beta or self.input(2), shape=[-1, *(1,) * (rank - 2)])

    def silu(self, y: str) -> str:
        return self.then("Mul", y, self.then("Sigmoid", y))

    def give(self, index: int, t: str) -> None:
        """Let ``t`` be the output ``index`` of the foreign node, where that is wanted."""
        if index >= len(self.node.output) or not self.node.output[index]:
            return
        name = self.node.output[index]
        for node in self.nodes:
            node.input[:] = [name if i == t else i for i in node.input]
            node.output[:] = [name if o == t else o for o in node.output]

    def _fresh(self, hint: str) -> str:
        stem = f"{self.node.output[0]}_{hint}"
        name, n = stem, 1
        while name in self._taken:
            n += 1
            name = f"{stem}_{n}"
        self._taken.add(name)
        return name


@dataclass(frozen=True)
class Op:
    """A foreign op. ``attributes``: those whose meaning is known."""

    owner: Owner
    kind: str
    write: Callable[[Writer, Attrs], None]
    attributes: frozenset[str]
    inputs: tuple[int, int]  # the fewest and the most
    optional: tuple[int, ...] = ()  # of the fewest, those that may be left out by an empty name


def written_by(row: NormOp, write: Callable[[Writer, Attrs], None], ignored: Collection[str] = ()) -> Op:
    """The op of a row and what writes it. ``ignored``: attributes that a node may have and that mean nothing."""
    return Op(
        row.owner, row.kind, write, frozenset((*row.attributes, *ignored)), (row.fewest, len(row.inputs)), row.skippable
    )
