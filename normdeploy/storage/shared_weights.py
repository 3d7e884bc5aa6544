"""Share large weights between the copies of a model, as arrays of this process.

A protobuf copies a weight each time it is read, and each time a message is assembled from others. So while a model is
rewritten, its large floating-point weights are arrays, and its initializers hold only their keys. The owner of such a
model must keep its `Weights`; the arrays live as long as they do. The location is random, so that no file can name one.

The weight of a linear layer is torch's own memory, read in column-major order. A row-major copy would take as much
memory again, for all layers at once. Instead it is copied one layer at a time, when the weight is written.
"""

from __future__ import annotations

import itertools
import math
import secrets
from weakref import WeakValueDictionary

import numpy as np
import onnx

from ..errors import GraphError

# Smallest weight, in bytes, that is worth sharing.
SMALLEST = 2**14
# numpy's own types, which raw_data stores in the same layout.
_TYPES = frozenset({"float16", "float32", "float64"})
_LOCATION = f"held by the process {secrets.token_hex(16)}"
_arrays: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
_numbers = itertools.count()

Weights = dict[str, np.ndarray]


def share_array(tensor: onnx.TensorProto, array: np.ndarray, weights: Weights) -> None:
    """Make ``tensor``, whose name, type and dims are set, refer to ``array``.

    The array is added to ``weights`` and must not be written to afterwards.
    """
    if is_column_major(array):
        laid = array
    else:
        laid = np.ascontiguousarray(array)
    # A view has its own writeable flag, so the caller's array keeps its flag.
    kept = laid.reshape(tuple(tensor.dims)).view()
    kept.flags.writeable = False
    key = str(next(_numbers))
    _arrays[key] = weights[key] = kept
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=_LOCATION)
    tensor.external_data.add(key="key", value=key)


def is_column_major(array: np.ndarray) -> bool:
    """Return True for a matrix that is stored by columns: the transpose of a row-major one.

    Returns:
        False for contiguous row-major arrays, and for arrays that are not matrices.
    """
    return array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous


def is_shareable_weight(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    """Return True for a weight that should be shared.

    Returns:
        True if it has at least `SMALLEST` bytes and is float16, float32 or float64.
    """
    return dtype.name in _TYPES and math.prod(shape) * dtype.itemsize >= SMALLEST


def shared_array(tensor: onnx.TensorProto) -> np.ndarray | None:
    """Return the shared array that ``tensor`` refers to.

    Returns:
        the read-only array; None if the tensor refers to none.

    Raises:
        GraphError: the model was kept, but its `Weights` were not.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL or len(tensor.external_data) != 2:
        return None
    location, key = (entry.value for entry in tensor.external_data)
    if location != _LOCATION:
        return None
    own = _arrays.get(key)
    if own is None:
        raise GraphError(
            f"the weight {tensor.name!r} is no longer in memory: keep the weights of a model as long as the model"
        )
    return own


def tensor_array(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the elements of a tensor, inline or shared.

    Returns:
        an array in the tensor's shape; that of a shared weight is read-only.
    """
    own = shared_array(tensor)
    if own is None:
        return onnx.numpy_helper.to_array(tensor)
    return own


def embed_shared_array(tensor: onnx.TensorProto) -> None:
    """Store the elements of a shared weight in ``tensor`` itself; other tensors stay unchanged."""
    if (own := shared_array(tensor)) is not None:
        tensor.raw_data = own.tobytes()
        tensor.ClearField("data_location")
        del tensor.external_data[:]
