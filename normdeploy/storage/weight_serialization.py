"""A model's weights apart from the rest of it: held once in memory, and written one after the other."""

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

# bytes; lets a runtime map each weight straight from the file
_ALIGNMENT = 4096
# types of 4 and 8 bits that numpy has not, of which onnxruntime makes no value
_UNFED = frozenset(
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name.startswith(("INT4", "UINT4", "INT2", "UINT2", "FLOAT4", "FLOAT8"))
)
# bytes that are turned at once: they stay in the processor's cache
_PIECE = 2**18


def detach_weights(
    proto: onnx.ModelProto, smallest: int = 1024, fed: bool = False
) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy whose initializers of at least ``smallest`` bytes are references without a location, and those
    initializers.

    ``fed``: those alone that a session can be given, which are those of numpy's types and bfloat16.

    The copy costs no more than the nodes do; the initializers are the ones of ``proto``, by name, not copies.
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


def share_large_weights(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, shared_weights.Weights]:
    """A copy that refers to the large weights of the main graph, and these (`normdeploy.storage.shared_weights`).
    What ``proto``
    takes is given back with it: a protobuf keeps the memory of what is cleared."""
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
    """Give each detached initializer its (location, offset, length)."""
    for tensor in light.graph.initializer:
        if tensor.name in places:
            for key, value in zip(("location", "offset", "length"), places[tensor.name], strict=True):
                tensor.external_data.add(key=key, value=str(value))


def _fields_except(message: onnx.ModelProto | onnx.GraphProto, without: str) -> dict[str, object]:
    return {field.name: value for field, value in message.ListFields() if field.name != without}


def tensor_nbytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's data, from its shape (reading ``raw_data`` would copy it)."""
    return math.ceil(math.prod(tensor.dims) * element_bits(tensor.data_type) / 8)


@cache
def element_bits(data_type: int) -> int:
    """Bits of one element as ``raw_data`` holds it, below 8 where several share a byte; 8 of a string, which
    ``raw_data`` never holds.

    onnx_ir tells them too, and imports sympy: 0.4 s before a file is opened.
    """
    if data_type == onnx.TensorProto.STRING:
        return 8
    kind = onnx.helper.tensor_dtype_to_np_dtype(data_type)
    if kind.kind == "c" or kind.name == "bool":
        return kind.itemsize * 8
    return (ml_dtypes.iinfo if "int" in kind.name else ml_dtypes.finfo)(kind).bits


def iter_weight_chunks(tensor: onnx.TensorProto) -> Iterator[bytes | memoryview]:
    """The bytes of a weight; those of a held one where they lie, or copied by some rows where it lies by columns."""
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
            f"the weight {tensor.name!r} of shape {list(tensor.dims)} needs {tensor_nbytes(tensor)} bytes and holds"
            f" {len(data)}"
        )
    yield data


def write_inline(light: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], temporary: Path) -> None:
    """Write what ``SerializeToString`` of the whole would give, but for the order of fields, without ever holding the
    whole.

    The wire format is protobuf's: each embedded message stands behind its field's tag and its length.
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
    """``content`` as the beginning of a length-delimited field, of which ``follows`` bytes come later."""
    tag = message.DESCRIPTOR.fields_by_name[field].number << 3 | 2
    return bytes([tag]) + _encode_varint(len(content) + follows) + content


def _encode_varint(number: int) -> bytes:
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def write_weights(light: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto], temporary: Path, name: str) -> str:
    """Write ``tensors``, make ``light`` refer to them and return the name that the file has to get."""
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
    location = f"{name}.{digest.hexdigest()[:16]}.data"
    set_weight_locations(light, {key: (location, *place) for key, place in places.items()})
    return location
