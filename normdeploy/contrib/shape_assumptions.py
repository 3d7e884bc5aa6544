"""Determine the sizes of a foreign node's inputs from the file, or else from the op's definition.

The definition of an op requires that its inputs' shapes fit each other. Gamma is as long as the axis along which gamma
varies, and the number of groups divides the number of channels. A second summand has the shape of the first summand or
broadcasts to it. A gate has the shape of its norm's input, and the length of that norm's gamma may divide the axis. A
certificate holds for inputs that fit in this sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..graphs.dims import Dims, dim_size
from ..graphs.symbolic_sizes import ONE, Size, product_of_sizes
from ..norms.norm_table import ROWS, OpOwner
from ..norms.tensorrt_norms import PLUGIN_GROUPS
from .expansion_writer import ForeignOp, Types

Shape = tuple[Size, ...]

# Op → index of its residual input or gate, which has the shape of the first input.
SKIPS = {
    row.op: row.inputs.index(name)
    for row in ROWS
    for name in ("residual", "gate")
    if name in row.inputs and row.owner is not OpOwner.OURS
}
# Kinds of norms whose vectors (gamma, beta) vary along the last axes.
_TRAILING = ("LayerNorm", "RMSNorm")
# Number of ranks for which the expansion is proved if the file does not state the rank.
RANKS = 4


@dataclass(frozen=True)
class _ForeignInput:
    name: str
    dims: Dims | None


def assume_shapes(
    op: ForeignOp, node: onnx.NodeProto, attrs: Mapping[str, Any], types: Types, rank: int
) -> dict[str, Shape]:
    """Determine the shape of each input.

    Args:
        rank: rank of the first input if the file states no shape.

    Returns:
        input name -> shape. For a table of EmbedLayerNormalization, this is the shape of one row.

    Raises:
        IndexError, TypeError, ValueError: the node does not fit its op.
    """
    given = [_ForeignInput(name, types[name][1]) for name in node.input]
    if node.op_type == "EmbedLayerNormalization":
        return _embedding_shapes(given)
    first = given[0]
    x = [dim_size(d, f"{first.name}:{i}") for i, d in enumerate((None,) * rank if first.dims is None else first.dims)]
    summand = SKIPS.get(node.op_type)
    along = _vector_axes(op, attrs, len(x))
    vectors = [t for i, t in enumerate(given) if i and i != summand and t.name]
    if "gate" in op.row.inputs:
        # The vector is as long as one of the norms that lie side by side in a row.
        if x[-1].constant_value is None and isinstance(length := (vectors[0].dims or (None,))[-1], int):
            x[-1] = length * Size.opaque("a head", first.name)
    elif op.row.owner is not OpOwner.ONNX_18:
        _infer_sizes(op, x, along, vectors, attrs)
    if summand is not None and given[summand].dims is not None:
        for axis, d in _align_summand_dims(given[summand].dims or (), len(x)):
            _set_dim(x, axis, d)
    if op.row.kind == "GroupNorm":
        groups = attrs.get("groups", attrs.get("num_groups", PLUGIN_GROUPS if node.op_type == "GroupNorm" else 1))
    else:
        groups = 1
    if groups > 1 and x[along[0]].constant_value is None:
        x[along[0]] = groups * Size.opaque("a group", first.name)
    known = {first.name: tuple(x)}
    for i, t in enumerate(given):
        if t.name and t.name not in known:
            broadcast = (
                op.row.owner in (OpOwner.ONNXRUNTIME, OpOwner.ONNX)
                and op.row.kind in _TRAILING
                and len(t.dims or ()) > len(along)
            )
            known[t.name] = (
                _summand_shape(t, x)
                if i == summand or broadcast
                else _vector_shape(op, t, [x[a] for a in along], groups)
            )
    return known


def _vector_axes(op: ForeignOp, attrs: Mapping[str, Any], rank: int) -> list[int]:
    """Return the axes of the first input along which the vectors (gamma, beta) vary."""
    if op.row.kind not in _TRAILING:
        return [rank - 1 if op.row.owner is OpOwner.ONNXRUNTIME and attrs.get("channels_last", 1) else 1]
    if op.row.owner is OpOwner.TENSORRT and "gamma" in attrs:
        return [2 if rank == 5 else rank - 1]
    axis = int(attrs.get("axis", -1))
    if not -rank <= axis < rank:
        raise ValueError(f"its axis {axis} is out of range for an input of rank {rank}")
    return list(range(axis % rank, rank))


def _infer_sizes(
    op: ForeignOp, x: list[Size], along: Sequence[int], vectors: Sequence[_ForeignInput], attrs: Mapping[str, Any]
) -> None:
    """Set the sizes of ``x`` that follow from lengths of vectors, in inputs and in attributes."""
    for name in ("gamma", "scales"):
        if op.row.owner is OpOwner.TENSORRT and name in attrs:
            _set_dim(x, along[0], int(np.size(attrs[name])))
    for t in vectors:
        dims = t.dims or ()
        if len(dims) <= len(along) and (op.row.owner is not OpOwner.TENSORRT or len(along) == 1):
            for axis, d in zip(reversed(along), reversed(dims), strict=False):
                _set_dim(x, axis, d)


def _set_dim(x: list[Size], axis: int, d: int | str | None) -> None:
    if isinstance(d, int) and d != 1 and x[axis].constant_value is None:
        x[axis] = Size.from_int(d)


def _align_summand_dims(dims: Dims, rank: int) -> list[tuple[int, int | str | None]]:
    """Pair the dims of a summand with the axes of a tensor of ``rank``."""
    if rank == 4 and len(dims) == 2:
        # The summand of SkipGroupNorm has the shape (N, C).
        return [(0, dims[0]), (3, dims[1])]
    start = rank - len(dims)
    return [(start + i, d) for i, d in enumerate(dims) if start + i >= 0]


def _summand_shape(t: _ForeignInput, x: Sequence[Size]) -> Shape:
    """Determine the shape of a second summand from the file's dims, or else from those of ``x``."""
    dims = (None,) * len(x) if t.dims is None else t.dims
    in_front = [dim_size(d, f"{t.name}:{i}") for i, d in enumerate(dims[: max(len(dims) - len(x), 0)])]
    return (
        *in_front,
        *(Size.from_int(d) if isinstance(d, int) else x[axis] for axis, d in _align_summand_dims(dims, len(x))),
    )


def _vector_shape(op: ForeignOp, t: _ForeignInput, row: Sequence[Size], groups: int) -> Shape:
    """Determine the shape of a vector.

    Args:
        row: sizes of the axes along which the vector varies.
    """
    if op.row.owner is OpOwner.ONNX_18:
        row = [Size.from_int(groups)]
    if op.row.owner is OpOwner.TENSORRT and (t.dims is None or len(t.dims) == 1):
        row = [product_of_sizes(tuple(row))]
    dims = (None,) * len(row) if t.dims is None else t.dims
    if len(dims) != len(row):
        raise ValueError(f"{t.name!r} has rank {len(dims)}, but {len(row)} axes are expected")
    return tuple(Size.from_int(d) if isinstance(d, int) else size for d, size in zip(dims, row, strict=True))


def _embedding_shapes(given: Sequence[_ForeignInput]) -> dict[str, Shape]:
    """Determine the shapes for EmbedLayerNormalization; for a table, the shape of one row.

    The inputs are ids, segments, three tables, gamma, beta, mask, position ids.
    """
    by_place = {i: t for i, t in enumerate(given) if t.name}
    for i, t in by_place.items():
        if t.dims is not None and len(t.dims) != (1 if i in (5, 6) else 2):
            raise ValueError(f"its input {i} has unexpected rank {len(t.dims)}")
    ids = by_place[0]
    tables = [by_place[i] for i in (2, 3, 4) if i in by_place]
    dims = (None, None) if ids.dims is None else ids.dims
    batch, length = (dim_size(d, f"{ids.name}:{i}") for i, d in enumerate(dims))
    width: list[Size] = [dim_size((tables[0].dims or (None, None))[1], f"{tables[0].name}:1")]
    for t in (*tables, by_place[5], by_place[6]):
        _set_dim(width, 0, (t.dims or (None,))[-1])
    known = {ids.name: (batch, length), **{t.name: (width[0],) for t in tables}}
    for i, t in by_place.items():
        if i in (5, 6):
            known[t.name] = tuple(width)
        elif t.name not in known:
            rows = batch if t.dims is None or t.dims[0] != 1 else ONE
            known[t.name] = (rows, length)
    return known
