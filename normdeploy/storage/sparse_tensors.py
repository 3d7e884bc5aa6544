"""Convert sparse tensors to dense tensors when a model is opened.

ONNX stores a sparse tensor as its nonzero values and their indices, in ``GraphProto.sparse_initializer`` and in the
attribute ``sparse_value`` of Constant. Libraries read sparse tensors differently: graphsurgeon reads only typed fields
and treats values in ``raw_data`` as zeros. After this step no other module sees a sparse tensor.

Source of the formats: ``SparseTensorProto`` in onnx.proto. Indices are int64, of shape [NNZ] (positions in the
flattened tensor) or [NNZ, rank] (coordinates), in ascending order and without duplicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx

from ..errors import GraphError
from .proto_traversal import iter_bodies

# Maximum number of elements of one dense tensor. It is needed because a few bytes of a file can state any shape.
MOST_ELEMENTS = 2**28
# Maximum ratio of dense elements to stored values, over all tensors together. Pruned weights keep more than 1 % of
# their elements.
_MOST_PER_VALUE = 128


def has_sparse(proto: onnx.ModelProto) -> bool:
    """Return True if a graph, body or function of ``proto`` contains a sparse tensor.

    Returns:
        False if there is nothing to densify.
    """
    return next(_iter_sparse_tensors(proto), None) is not None


def densify_model(proto: onnx.ModelProto) -> None:
    """Replace every sparse tensor of ``proto``, in place, by a dense tensor of the same name, shape and type.

    Tensors whose values or indices are in a file that was not read stay sparse.

    Raises:
        GraphError: a sparse tensor is too large, or its indices do not fit its shape.
    """
    for body in iter_bodies(proto):
        if isinstance(body, onnx.GraphProto):
            _densify_initializers(body)
        for node in body.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor") and _is_loaded(attribute.sparse_tensor):
                    if node.output:
                        title = node.output[0]
                    else:
                        title = node.name
                    _densify_constant(attribute, title)


def require_small_sparse_tensors(proto: onnx.ModelProto) -> None:
    """Refuse sparse tensors that are too large to be densified.

    Raises:
        GraphError: a tensor has a negative size or more than `MOST_ELEMENTS` elements. Or all tensors together have
            more than `MOST_ELEMENTS` elements and store too few values.
    """
    elements = 0
    stored = 0
    for sparse in _iter_sparse_tensors(proto):
        _require_small_size(sparse, sparse.values.name)
        elements += math.prod(sparse.dims)
        stored += math.prod(sparse.values.dims)
    if elements > max(MOST_ELEMENTS, _MOST_PER_VALUE * stored):
        raise GraphError(
            f"the sparse tensors of the file have {elements} elements in dense form and {stored} values; at most "
            f"{MOST_ELEMENTS} elements, or {_MOST_PER_VALUE} for each value, are supported"
        )


def _iter_sparse_tensors(proto: onnx.ModelProto) -> Iterator[onnx.SparseTensorProto]:
    for body in iter_bodies(proto):
        if isinstance(body, onnx.GraphProto):
            yield from body.sparse_initializer
        for node in body.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    yield attribute.sparse_tensor
                yield from attribute.sparse_tensors


def _densify_initializers(graph: onnx.GraphProto) -> None:
    dense_names = {tensor.name for tensor in graph.initializer}
    unread = []
    for sparse in graph.sparse_initializer:
        if not _is_loaded(sparse):
            unread.append(sparse)
            continue
        if sparse.values.name in dense_names:
            raise GraphError(f"the weight {sparse.values.name!r} is stored twice, sparse and dense; keep one of them")
        graph.initializer.append(densify_tensor(sparse, sparse.values.name))
    # Copy the members first, because clearing a protobuf list invalidates them.
    kept = [onnx.SparseTensorProto.FromString(sparse.SerializeToString()) for sparse in unread]
    graph.ClearField("sparse_initializer")
    graph.sparse_initializer.extend(kept)


def _densify_constant(attribute: onnx.AttributeProto, title: str) -> None:
    """Replace the attribute ``sparse_value`` of Constant by ``value``; no other standard op takes a sparse tensor."""
    dense = densify_tensor(attribute.sparse_tensor, title)
    attribute.ClearField("sparse_tensor")
    attribute.name = "value"
    attribute.type = onnx.AttributeProto.TENSOR
    attribute.t.CopyFrom(dense)


def _is_loaded(sparse: onnx.SparseTensorProto) -> bool:
    parts = (sparse.values, sparse.indices)
    return all(part.data_location != onnx.TensorProto.EXTERNAL for part in parts)


def densify_tensor(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    """Convert one sparse tensor to a dense tensor.

    Args:
        sparse: values of shape [NNZ], indices of shape [NNZ] or [NNZ, rank], and ``dims``, the shape of the dense
            tensor.
        name: name of the result, also used in messages.

    Returns:
        a tensor of shape ``dims`` and of the values' type, zero wherever no value is stored.

    Raises:
        GraphError: the tensor is too large, or the indices do not fit its shape.
    """
    _require_small_size(sparse, name)
    shape = tuple(sparse.dims)
    if sparse.values.data_type == onnx.TensorProto.STRING:
        raise GraphError(f"the sparse tensor {name!r} holds strings; only numbers are read: store it dense")
    if sparse.indices.data_type != onnx.TensorProto.INT64 and math.prod(sparse.indices.dims):
        kind = onnx.TensorProto.DataType.Name(sparse.indices.data_type)
        raise GraphError(f"the indices of the sparse tensor {name!r} are {kind}; ONNX requires INT64")
    values = onnx.numpy_helper.to_array(sparse.values).reshape(-1)
    positions = _flat_positions(sparse, shape, values.size, name)
    dense = np.zeros(math.prod(shape), values.dtype)
    dense[positions] = values
    tensor = onnx.numpy_helper.from_array(dense.reshape(shape), name)
    # One numpy type represents several ONNX types, so the original ONNX type is set again.
    tensor.data_type = sparse.values.data_type
    return tensor


def _flat_positions(sparse: onnx.SparseTensorProto, shape: tuple[int, ...], count: int, name: str) -> np.ndarray:
    """Return the positions of the values in the flattened tensor, int64 of shape [NNZ]."""
    stored = tuple(sparse.indices.dims)
    if stored not in ((count,), (count, len(shape))) and not (count == 0 and math.prod(stored) == 0):
        raise GraphError(
            f"the sparse tensor {name!r} has {count} values and indices of shape {list(stored)}; ONNX requires "
            f"[{count}] or [{count}, {len(shape)}]"
        )
    if count == 0:
        return np.zeros(0, np.int64)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    if indices.ndim == 1:
        positions = indices
        limit = np.int64(math.prod(shape))
        outside = (indices < 0) | (indices >= limit)
        if outside.any():
            raise GraphError(
                f"the sparse tensor {name!r} has the index {indices[outside][0]}, and its shape {list(shape)} holds"
                f" {limit} elements"
            )
    else:
        outside = (indices < 0) | (indices >= np.array(shape, np.int64))
        if outside.any():
            place = indices[outside.any(1)][0].tolist()
            raise GraphError(f"the sparse tensor {name!r} has the index {place}, outside its shape {list(shape)}")
        positions = np.ravel_multi_index(tuple(indices.T), shape)
    steps = np.diff(positions)
    if (steps <= 0).any():
        at = int(np.argmax(steps <= 0))
        raise GraphError(
            f"the indices of the sparse tensor {name!r} are not in ascending order: position {positions[at]} comes"
            f" before {positions[at + 1]}"
        )
    return positions


def _require_small_size(sparse: onnx.SparseTensorProto, name: str) -> None:
    if min(sparse.dims, default=0) < 0 or math.prod(sparse.dims) > MOST_ELEMENTS:
        raise GraphError(
            f"the sparse weight {name!r} has the shape {list(sparse.dims)}; at most {MOST_ELEMENTS} elements are read"
        )
