"""Large weights that a model refers to and does not hold: arrays of this process, which all of its copies share.

A protobuf copies a weight each time that it is read, and each time that a message is put together from others. So while
a model is rewritten, its large floating weights are arrays, of which the initializers name the key. Whoever makes a
model so keeps its `Weights`: with them the arrays are gone. A key is random, so that no file can name one.

The weight of a linear layer is torch's own memory, read by columns: a copy by rows would take as much again, for all
layers at once. It is made of one layer at a time, where the weight is written.
"""

from __future__ import annotations

import itertools
import math
import secrets
from weakref import WeakValueDictionary

import numpy as np
import onnx

from ..errors import GraphError

# bytes of a weight that is worth it
SMALLEST = 2**14
# numpy's own, which raw_data holds as they lie
_TYPES = frozenset({"float16", "float32", "float64"})
_LOCATION = f"held by the process {secrets.token_hex(16)}"
_arrays: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
_numbers = itertools.count()

Weights = dict[str, np.ndarray]


def share_array(tensor: onnx.TensorProto, array: np.ndarray, weights: Weights) -> None:
    """Let ``tensor``, whose name, type and dims are set, refer to ``array``, which ``weights`` keeps and nobody may
    write to any more."""
    if is_column_major(array):
        laid = array
    else:
        laid = np.ascontiguousarray(array)
    # a view of our own, so that the flag is its own, too
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
    """Whether it is a matrix that lies in memory by columns: the transpose of one that lies there as usual."""
    return array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous


def is_shareable_weight(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a weight is to be held so: large, and of a type that numpy has."""
    return dtype.name in _TYPES and math.prod(shape) * dtype.itemsize >= SMALLEST


def shared_array(tensor: onnx.TensorProto) -> np.ndarray | None:
    """The array that ``tensor`` refers to; None where it refers to none.

    Raises:
        GraphError: the model was kept, and its `Weights` were not.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL or len(tensor.external_data) != 2:
        return None
    location, key = (entry.value for entry in tensor.external_data)
    if location != _LOCATION:
        return None
    own = _arrays.get(key)
    if own is None:
        raise GraphError(
            f"the weight {tensor.name!r} is held no more: keep the weights of a model as long as the model"
        )
    return own


def tensor_array(tensor: onnx.TensorProto) -> np.ndarray:
    """The elements, wherever they are; those of a held weight can't be written to."""
    own = shared_array(tensor)
    if own is None:
        return onnx.numpy_helper.to_array(tensor)
    return own


def embed_shared_array(tensor: onnx.TensorProto) -> None:
    """Let ``tensor`` hold the elements that it refers to, where it refers to any."""
    if (own := shared_array(tensor)) is not None:
        tensor.raw_data = own.tobytes()
        tensor.ClearField("data_location")
        del tensor.external_data[:]
