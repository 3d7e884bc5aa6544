"""Separate a model's weights from its graph, to keep only one copy of them in memory and write them one after the
other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from ..errors import GraphError
from . import shared_weights

# Alignment in bytes of each weight in its file. With this alignment, a runtime can map weights directly from the file.
_ALIGNMENT = 4096
# Types of 2, 4 and 8 bits that numpy lacks. onnxruntime can't make an OrtValue of such an array, so the array can't be
# passed to a session.
_UNFED = frozenset(
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name.startswith(("INT4", "UINT4", "INT2", "UINT2", "FLOAT4", "FLOAT8"))
)
# Number of bytes that are transposed at a time, so that they fit in the processor's cache.
_PIECE = 2**18


def detach_weights(
    proto: onnx.ModelProto, smallest: int = 1024, fed: bool = False
) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Copy a model, with references instead of its large initializers.

    The copy takes no more memory than the nodes. The references have no location yet (`set_weight_locations`).

    Args:
        smallest: detach initializers of at least this many bytes; shared arrays are always detached.
        fed: detach only initializers that can be passed to a session, which have one of numpy's types or bfloat16.

    Returns:
        the copy, and the detached initializers by name. They are the initializers of ``proto`` itself, not copies.
    """
    initializers = proto.graph.initializer
    large = {
        t.name: t
        for t in initializers
        if (t.HasField("raw_data") and tensor_nbytes(t) >= smallest and not (fed and t.data_type in _UNFED))
        or shared_weights.shared_array(t) is not None
    }
    graph = onnx.GraphProto(**_fields_except(proto.graph, "initializer"))
    for tensor in initializers:
        if tensor.name in large:
            reference = graph.initializer.add(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            reference.metadata_props.extend(tensor.metadata_props)
            reference.data_location = onnx.TensorProto.EXTERNAL
            if tensor.doc_string:
                reference.doc_string = tensor.doc_string
        else:
            graph.initializer.append(tensor)
    return onnx.ModelProto(graph=graph, **_fields_except(proto, "graph")), large


def is_detached(tensor: onnx.TensorProto) -> bool:
    """Return True for an initializer whose elements `detach_weights` left out."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL and not tensor.external_data


def share_large_weights(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, shared_weights.Weights]:
    """Copy a model, with its large weights as shared arrays (`normdeploy.storage.shared_weights`).

    Release ``proto`` afterwards to free its memory: a protobuf keeps the memory of cleared fields.

    Returns:
        the copy, whose main graph refers to the large weights, and these weights.
    """
    light, large = detach_weights(proto, shared_weights.SMALLEST)
    weights: shared_weights.Weights = {}
    for tensor in light.graph.initializer:
        whole = large.get(tensor.name)
        if whole is None:
            continue
        if shared_weights.shared_array(whole) is None and shared_weights.is_shareable_weight(
            onnx.helper.tensor_dtype_to_np_dtype(whole.data_type), tuple(whole.dims)
        ):
            shared_weights.share_array(tensor, onnx.numpy_helper.to_array(whole), weights)
        else:
            tensor.CopyFrom(whole)
    return light, weights


def set_weight_locations(light: onnx.ModelProto, places: Mapping[str, tuple[str, int, int]]) -> None:
    """Write the external location of each detached initializer.

    Args:
        places: initializer name → (location, offset, length), with offset and length in bytes.
    """
    for tensor in light.graph.initializer:
        if tensor.name in places:
            for key, value in zip(("location", "offset", "length"), places[tensor.name], strict=True):
                tensor.external_data.add(key=key, value=str(value))


def _fields_except(message: onnx.ModelProto | onnx.GraphProto, without: str) -> dict[str, object]:
    return {field.name: value for field, value in message.ListFields() if field.name != without}


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes of a tensor's data. It is computed from the shape, because reading ``raw_data`` would
    copy the data.

    Returns:
        the size rounded up to whole bytes.
    """
    return math.ceil(math.prod(tensor.dims) * element_bits(tensor.data_type) / 8)


@cache
def element_bits(data_type: int) -> int:
    """Return the number of bits of one element in ``raw_data``.

    onnx_ir has such a table too, but its import loads sympy, which takes 0.4 s.

    Returns:
        a number below 8 if several elements share a byte; 8 for strings, which ``raw_data`` never contains.
    """
    if data_type == onnx.TensorProto.STRING:
        return 8
    kind = onnx.helper.tensor_dtype_to_np_dtype(data_type)
    if kind.kind == "c" or kind.name == "bool":
        return kind.itemsize * 8
    return (ml_dtypes.iinfo if "int" in kind.name else ml_dtypes.finfo)(kind).bits


def iter_weight_chunks(tensor: onnx.TensorProto) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a weight without copying it as a whole.

    A row-major shared array is read in place. A column-major array is copied a few rows at a time.

    Raises:
        GraphError: the weight does not have as many bytes as its shape needs.
    """
    array = shared_weights.shared_array(tensor)
    if array is not None:
        if shared_weights.is_column_major(array):
            rows = _PIECE // array[:1].nbytes + 1
        else:
            rows = 0
        parts = (array[i : i + rows] for i in range(0, len(array), rows)) if rows else (array,)
        yield from (np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in parts)
        return
    data = tensor.raw_data
    if len(data) != tensor_nbytes(tensor):
        raise GraphError(
            f"the weight {tensor.name!r} of shape {list(tensor.dims)} needs {tensor_nbytes(tensor)} bytes but holds "
            f"{len(data)}"
        )
    yield data


def write_inline(light: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], temporary: Path) -> None:
    """Write a model with its weights inside. The whole file is never in memory.

    The file equals ``SerializeToString`` of the whole model except for the order of fields. It follows protobuf's wire
    format: the field's tag and the length come before each embedded message.

    Args:
        light: the model with detached weights. It is emptied.
        weights: the detached weights by name.
    """
    pieces: list[tuple[bytes, onnx.TensorProto | None]] = []
    for tensor in light.graph.initializer:
        weight = weights.get(tensor.name)
        if weight is None:
            pieces.append((_encode_field(onnx.GraphProto, "initializer", tensor.SerializeToString()), None))
            continue
        tensor.ClearField("data_location")
        head = tensor.SerializeToString() + _encode_field(onnx.TensorProto, "raw_data", b"", tensor_nbytes(weight))
        pieces.append((_encode_field(onnx.GraphProto, "initializer", head, tensor_nbytes(weight)), weight))
    light.graph.ClearField("initializer")
    nodes = light.graph.SerializeToString()
    light.ClearField("graph")
    follows = sum(len(piece) + (0 if weight is None else tensor_nbytes(weight)) for piece, weight in pieces)
    with open(temporary, "wb") as file:
        file.write(light.SerializeToString())
        file.write(_encode_field(onnx.ModelProto, "graph", nodes, follows))
        for piece, weight in pieces:
            file.write(piece)
            if weight is not None:
                file.writelines(iter_weight_chunks(weight))


def _encode_field(
    message: type[onnx.ModelProto | onnx.GraphProto | onnx.TensorProto], field: str, content: bytes, follows: int = 0
) -> bytes:
    """Encode the start of a length-delimited field: tag, length and ``content``. The length also counts ``follows``
    more bytes, which the caller writes later.
    """
    tag = message.DESCRIPTOR.fields_by_name[field].number << 3 | 2
    return bytes([tag]) + _encode_varint(len(content) + follows) + content


def _encode_varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def write_weights(
    light: onnx.ModelProto,
    tensors: Mapping[str, onnx.TensorProto],
    temporary: Path,
    name: str,
    data_name: str | None = None,
) -> str:
    """Write ``tensors`` to ``temporary`` and make ``light`` refer to them.

    Args:
        name: name of the model's file.
        data_name: name of the file of weights; None for a name with the hash of its content.

    Returns:
        the name that the file must get: ``data_name``, or ``name``, 16 digits of the content's SHA-256 and ".data".
    """
    digest = hashlib.sha256()
    places = {}
    with open(temporary, "wb") as file:
        for tensor in tensors.values():
            gap = bytes(-file.tell() % _ALIGNMENT)
            digest.update(gap)
            file.write(gap)
            places[tensor.name] = (file.tell(), tensor_nbytes(tensor))
            for data in iter_weight_chunks(tensor):
                digest.update(data)
                file.write(data)
    location = data_name or f"{name}.{digest.hexdigest()[:16]}.data"
    set_weight_locations(light, {key: (location, *place) for key, place in places.items()})
    return location
