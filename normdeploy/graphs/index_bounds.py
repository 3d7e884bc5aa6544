"""Bound the values of an ONNX graph's integer inputs, and its dims, by the sizes of the tables that they index.

An index into a table of n rows lies in [0, n), and a slice of a table up to a size has at most n rows. The analysis
walks forward through the graph. For each element of a small vector of sizes, the analysis tracks the dim that it
equals. For other integers, the analysis tracks an origin and an offset. The origin is an input, or a sequence of
positions that counts up to a dim. `normdeploy.loading.program_bounds` does the same for torch's programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from ..storage.onnx_domains import is_standard
from .proto_queries import value_info_type

_SAME = frozenset(
    [
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Expand",
        "Cast",
        "CastLike",
        "Identity",
        "Transpose",
        "Slice",
        "Tile",
        "Flatten",
        "Split",
        "Concat",
        "Where",
    ]
)
_FLAGS = frozenset(["Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN"])
# Element types of constants whose values are tracked. FLOAT is included because torch casts the 0 and 1 of a Range from
# float.
_COUNTS = (
    onnx.TensorProto.INT64,
    onnx.TensorProto.INT32,
    onnx.TensorProto.FLOAT,
)
# Maximum number of elements of a constant whose values are tracked.
_SMALL = 64


@dataclass(frozen=True)
class IndexLimit:
    """Half-open range [low, high) of values. For a size, ``low`` is 0 and the largest size is ``high - 1``.

    Attributes:
        source: tensor that sets the limit.
    """

    low: int
    high: int
    source: str

    def __and__(self, other: IndexLimit) -> IndexLimit:
        return IndexLimit(
            max(self.low, other.low),
            min(self.high, other.high),
            self.source if self.high <= other.high else other.source,
        )


@dataclass
class IndexBounds:
    """Bounds of a graph's inputs.

    Attributes:
        values: input → range of its values.
        sizes: name of a dim of the inputs → its largest size.
    """

    values: dict[str, IndexLimit] = field(default_factory=dict)
    sizes: dict[str, IndexLimit] = field(default_factory=dict)


@dataclass(frozen=True)
class _OffsetDim:
    """Dim plus an offset."""

    dim: str
    offset: int = 0


@dataclass(frozen=True)
class _IndexSource:
    """Origin of integers.

    Attributes:
        what: name of an input or of a dim.
        counted: the integers lie in [low, dim + high], for the dim ``what``. Otherwise they are values of the input
            ``what`` plus a number in [low, high].
    """

    what: str
    counted: bool
    low: int = 0
    high: int = 0


_Vector = tuple["int | _OffsetDim | None", ...]


def find_index_bounds(proto: onnx.ModelProto) -> IndexBounds:
    """Find the bounds that the main graph implies for its inputs.

    Returns: bounds of values and of sizes; an input or dim without a bound is missing.
    """
    return _BoundsAnalysis(proto.graph).found


class _BoundsAnalysis:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.found = IndexBounds()
        self.rows = {t.name: tuple(t.dims) for t in graph.initializer}
        self.vectors: dict[str, _Vector] = {}
        self.origins: dict[str, frozenset[_IndexSource]] = {}
        self.flags: set[str] = set()
        self.shapes: dict[str, _Vector] = {}
        for tensor in graph.initializer:
            self._record_constant(tensor.name, tensor)
        for value in graph.input:
            kind, dims = value_info_type(value)
            # An input of unknown rank is not a scalar, so nothing is derived for it.
            if value.name not in self.rows and dims is not None:
                self.shapes[value.name] = tuple(
                    d if isinstance(d, int) and d >= 0 else _OffsetDim(d) if isinstance(d, str) else None for d in dims
                )
                if kind is not None and onnx.helper.tensor_dtype_to_np_dtype(kind).kind in "iu":
                    self.origins[value.name] = frozenset({_IndexSource(value.name, False)})
        for node in graph.node:
            if is_standard(node) and node.output and (node.input or node.op_type == "Constant"):
                self._analyze_node(node)

    def _record_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        self.rows[name] = tuple(tensor.dims)
        if (
            tensor.data_type in _COUNTS
            and tensor.data_location != onnx.TensorProto.EXTERNAL
            and math.prod(tensor.dims) <= _SMALL
        ):
            values = onnx.numpy_helper.to_array(tensor).ravel().tolist()
            self.vectors[name] = tuple(int(n) if float(n).is_integer() else None for n in values)

    def _analyze_node(self, node: onnx.NodeProto) -> None:
        attributes = {a.name: a for a in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            self._record_constant(node.output[0], attributes["value"].t)
        elif node.op_type == "Constant":
            whole = [
                n
                for a in node.attribute
                for n in ([a.i] if a.name == "value_int" else a.ints if a.name == "value_ints" else ())
            ]
            if 0 < len(whole) <= _SMALL:
                self.vectors |= {node.output[0]: tuple(whole)}
        elif (vector := self._vector_result(node, attributes)) is not None and len(vector) <= _SMALL:
            self.vectors[node.output[0]] = vector
        if origins := _merge_sources(self._produced_sources(node)):
            for output in node.output:
                self.origins[output] = origins
        if node.op_type in _FLAGS or (
            node.op_type in ("Cast", "CastLike", "Identity", "Unsqueeze", "Reshape") and node.input[0] in self.flags
        ):
            self.flags.update(node.output)
        if node.op_type == "Gather" and len(node.input) == 2:
            self._limit_indices(node, attributes["axis"].i if "axis" in attributes else 0)
        elif node.op_type == "Slice" and len(node.input) >= 3:
            self._limit_by_slice(node)

    # -------------------------------------------------------------- sizes

    def _vector_result(self, node: onnx.NodeProto, attributes: dict[str, onnx.AttributeProto]) -> _Vector | None:
        op = node.op_type
        vectors = [self.vectors.get(name) for name in node.input]
        if op == "Shape" and node.input[0] in self.shapes:
            start, end = (attributes[n].i if n in attributes else None for n in ("start", "end"))
            return self.shapes[node.input[0]][start:end]
        if not vectors or any(v is None for v in vectors[:1]):
            return None
        first = vectors[0] or ()
        if op in ("Unsqueeze", "Squeeze", "Cast", "CastLike", "Identity", "Reshape"):
            return first
        if op == "Concat" and all(v is not None for v in vectors):
            return tuple(entry for v in vectors for entry in v or ())
        if op == "Gather" and len(vectors) == 2 and vectors[1] is not None:
            picked = [n if isinstance(n, int) and -len(first) <= n < len(first) else None for n in vectors[1]]
            return tuple(None if n is None else first[n] for n in picked)
        if op == "Slice" and all(v is not None and len(v) == 1 and isinstance(v[0], int) for v in vectors[1:]):
            # The inputs are data, starts, ends, axes, steps.
            start, end, _, step = (*(v[0] for v in vectors[1:] if v), None, None)[:4]
            return first[start : end : step or 1]  # type: ignore[index]
        if op in ("Add", "Sub") and len(vectors) == 2 and vectors[1] is not None and len(first) == len(vectors[1]) == 1:
            return (_add_sizes(first[0], vectors[1][0], 1 if op == "Add" else -1),)
        return None

    # -------------------------------------------------------------- whole numbers

    def _sources_of(self, name: str) -> frozenset[_IndexSource]:
        return self.origins.get(name, frozenset())

    def _produced_sources(self, node: onnx.NodeProto) -> Iterable[_IndexSource]:
        op = node.op_type
        names = node.input
        if op == "Range" and len(names) == 3:
            start, end, step = (self._single_value(name) for name in names)
            if isinstance(start, int) and isinstance(end, _OffsetDim) and step == 1:
                yield _IndexSource(end.dim, True, start, end.offset - 1)
        elif op == "CumSum" and names[0] in self.flags:
            yield from self._running_sum_sources()
        elif op in _SAME or op == "Gather":
            if op == "Concat":
                data = names
            elif op == "Where":
                data = names[1:]
            else:
                data = names[:1]
            for name in data:
                yield from self._sources_of(name)
        elif op in ("Add", "Sub") and len(names) == 2:
            left, right = (names[1], names[0]) if op == "Add" and not self._sources_of(names[0]) else names[:2]
            span = self._value_span(right)
            if span is not None:
                low, high = span if op == "Add" else (-span[1], -span[0])
                for origin in self._sources_of(left):
                    yield replace(origin, low=origin.low + low, high=origin.high + high)
        elif op == "Mul" and len(names) == 2 and (names[0] in self.flags or names[1] in self.flags):
            for origin in self._sources_of(names[0]) | self._sources_of(names[1]):
                yield replace(
                    origin, low=min(origin.low, 0), high=origin.high if origin.counted else max(origin.high, 0)
                )

    def _running_sum_sources(self) -> Iterable[_IndexSource]:
        """Yield the origin of a running sum of flags. The sum counts up to the size of the summed axis.

        Language models compute token positions this way. The dim is known only if all inputs share one second dim.
        """
        dims = {shape[1].dim for shape in self.shapes.values() if len(shape) > 1 and isinstance(shape[1], _OffsetDim)}
        if len(dims) == 1:
            yield _IndexSource(dims.pop(), True)

    def _single_value(self, name: str) -> int | _OffsetDim | None:
        vector = self.vectors.get(name)
        if vector is not None and len(vector) == 1:
            return vector[0]
        return None

    def _value_span(self, name: str) -> tuple[int, int] | None:
        vector = self.vectors.get(name)
        whole = [n for n in vector or () if isinstance(n, int)]
        if vector and len(whole) == len(vector):
            return (min(whole), max(whole))
        return None

    # -------------------------------------------------------------- tables

    def _limit_indices(self, node: onnx.NodeProto, axis: int) -> None:
        table, index = node.input
        dims = self.rows.get(table, ())
        if len(dims) < 2 or not -len(dims) <= axis < len(dims):
            return
        rows = dims[axis]
        for origin in self._sources_of(index):
            if origin.counted:
                self._tighten_limit(self.found.sizes, origin.what, IndexLimit(0, rows - origin.high, table))
            else:
                self._tighten_limit(self.found.values, origin.what, IndexLimit(-origin.low, rows - origin.high, table))

    def _limit_by_slice(self, node: onnx.NodeProto) -> None:
        """Limit a size up to which a stored table is sliced to the table's rows."""
        dims = self.rows.get(node.input[0], ())
        starts, ends = (self.vectors.get(name) for name in node.input[1:3])
        axes: Sequence[Any] | None
        if len(node.input) > 3 and node.input[3]:
            axes = self.vectors.get(node.input[3])
        else:
            axes = range(len(ends or ()))
        if not dims or starts is None or ends is None or axes is None:
            return
        for start, end, axis in zip(starts, ends, axes, strict=False):
            if (
                isinstance(start, int)
                and start >= 0
                and isinstance(end, _OffsetDim)
                and isinstance(axis, int)
                and -len(dims) <= axis < len(dims)
            ):
                self._tighten_limit(
                    self.found.sizes, end.dim, IndexLimit(0, dims[axis] - end.offset + 1, node.input[0])
                )

    @staticmethod
    def _tighten_limit(limits: dict[str, IndexLimit], name: str, most: IndexLimit) -> None:
        limits[name] = limits.get(name, most) & most


def _merge_sources(origins: Iterable[_IndexSource]) -> frozenset[_IndexSource]:
    """Merge the origins of each input or dim into a single origin that covers them. If too many origins remain, return
    no origin.
    """
    merged: dict[tuple[str, bool], _IndexSource] = {}
    for origin in origins:
        other = merged.get((origin.what, origin.counted), origin)
        merged[origin.what, origin.counted] = replace(
            origin, low=min(origin.low, other.low), high=max(origin.high, other.high)
        )
    return frozenset(merged.values() if len(merged) <= _SMALL else ())


def _add_sizes(a: int | _OffsetDim | None, b: int | _OffsetDim | None, sign: int) -> int | _OffsetDim | None:
    if isinstance(a, int) and isinstance(b, int):
        return a + sign * b
    if isinstance(a, _OffsetDim) and isinstance(b, int):
        return _OffsetDim(a.dim, a.offset + sign * b)
    if isinstance(b, _OffsetDim) and isinstance(a, int) and sign == 1:
        return _OffsetDim(b.dim, b.offset + a)
    return None
