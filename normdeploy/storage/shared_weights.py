"""Share large weights between the copies of a model, as arrays of this process.

Protobuf copies a weight each time the weight is read, and each time a message is built from other messages. So while a
model is rewritten, its large floating-point weights are kept as arrays, and its initializers contain only the keys of
these arrays. The owner of such a model must keep its `Weights`, because the arrays are freed with them. The external
location that marks such an initializer contains a random number, so that no file can refer to an array.

The array of a linear layer's weight is torch's own memory, read in column-major order. Row-major copies of the weights
of all layers would double the memory. Instead, the weight of one layer at a time is copied when it is written.
"""

from __future__ import annotations

import itertools
import math
import secrets
from weakref import WeakValueDictionary

import numpy as np
import onnx

from ..errors import GraphError

# Minimum size in bytes of a weight that is shared. Smaller weights stay in the initializer.
SMALLEST = 2**14
# Types of weights that are shared: numpy's own types, which raw_data stores in the same layout.
_TYPES = frozenset({"float16", "float32", "float64"})
_LOCATION = f"held by the process {secrets.token_hex(16)}"
_arrays: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
_numbers = itertools.count()

Weights = dict[str, np.ndarray]


def share_array(tensor: onnx.TensorProto, array: np.ndarray, weights: Weights) -> None:
    """Make ``tensor`` refer to ``array``. The tensor's name, type and dims must be set.

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
    """Return True for a matrix that is stored by columns, such as the transpose of a row-major matrix.

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
        the read-only array; None if the tensor does not refer to a shared array.

    Raises:
        GraphError: the array was freed, because the model's owner did not keep its `Weights`.
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
        an array in the tensor's shape. The array of a shared weight is read-only.
    """
    own = shared_array(tensor)
    if own is None:
        return onnx.numpy_helper.to_array(tensor)
    return own


def embed_shared_array(tensor: onnx.TensorProto) -> None:
    """Store the elements of a shared weight in ``tensor`` itself. A tensor that is not shared stays unchanged."""
    if (own := shared_array(tensor)) is not None:
        tensor.raw_data = own.tobytes()
        tensor.ClearField("data_location")
        del tensor.external_data[:]
