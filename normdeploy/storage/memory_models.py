"""Convert ONNX models in memory, of each class that libraries use for such models, to a protobuf and back.

The classes are onnx.ModelProto, ``onnx_ir.Model``, torch's ``ONNXProgram``, and bytes in the format of an ONNX file.
Classes of onnx_ir and torch are recognized by their names, so this module imports neither library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from ..errors import GraphError
from .onnx_files import PROTOBUF_LIMIT, iter_tensors, parse_onnx, read_external_weights
from .shared_weights import shared_array

_BYTES = (bytes, bytearray, memoryview)
# Name of the class -> packages whose classes of this name are models.
_FOREIGN = {"Model": ("onnx_ir",), "ONNXProgram": ("torch",)}


def is_memory_model(value: object) -> bool:
    """Check whether ``value`` is an ONNX model in memory.

    Returns:
        True for an onnx.ModelProto, an ``onnx_ir.Model``, torch's ``ONNXProgram``, bytes, a bytearray or a memoryview.
    """
    return isinstance(value, (onnx.ModelProto, *_BYTES)) or bool(_foreign_class(value))


def to_model_proto(model: Any) -> onnx.ModelProto:
    """Convert an ONNX model in memory to a protobuf with all weights. ``model`` is not changed.

    Args:
        model: an object for which `is_memory_model` is True.

    Returns:
        the protobuf; ``model`` itself if it is an onnx.ModelProto.

    Raises:
        GraphError: bytes are not a valid ONNX model, the model is empty, a weight was not loaded or can't be read, or a
            library can't convert its own model.
    """
    if isinstance(model, _BYTES):
        return parse_onnx(bytes(model))
    if isinstance(model, onnx.ModelProto):
        if not model.HasField("graph") or not model.opset_import:
            raise GraphError("the onnx.ModelProto contains no graph or no opset; pass a whole model")
        _require_loaded_weights(model)
        return model
    if _foreign_class(model) == "ONNXProgram":
        return _serialize_ir(model.model)
    return _serialize_ir(model)


def convert_like(proto: onnx.ModelProto, original: object) -> Any:
    """Convert a protobuf to the class of another ONNX model in memory.

    Args:
        original: a model of the wanted class.

    Returns:
        an ``onnx_ir.Model``, an ``ONNXProgram`` with the exported program of ``original``, or bytes, as ``original``;
        ``proto`` itself if ``original`` has another type.

    Raises:
        GraphError: bytes are wanted, and the model has more than 2 GB.
    """
    if isinstance(original, _BYTES):
        return _serialize_bytes(proto)
    name = _foreign_class(original)
    if not name:
        return proto
    # The caller has imported this library, because ``original`` is an object of its class.
    import onnx_ir

    model = onnx_ir.from_proto(proto)
    if name == "ONNXProgram":
        return type(original)(model, getattr(original, "exported_program", None))  # type: ignore[call-arg]
    return model


def _foreign_class(value: object) -> str:
    """Return the name of the class of another library's model; "" for other objects."""
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] in _FOREIGN.get(base.__name__, ()):
            return base.__name__
    return ""


def _require_loaded_weights(proto: onnx.ModelProto) -> None:
    """Refuse a protobuf that refers to external weights, because it does not record their folder.

    Raises:
        GraphError: a weight is in an external file.
    """
    for tensor in iter_tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL and shared_array(tensor) is None:
            raise GraphError(
                f"the weight {tensor.name!r} is in an external file and was not loaded; load the model with its"
                " external data (onnx.load does so by default), or pass the path of the file"
            )


def _serialize_bytes(proto: onnx.ModelProto) -> bytes:
    try:
        if (size := proto.ByteSize()) <= PROTOBUF_LIMIT:
            return proto.SerializeToString()
    except EncodeError:
        size = 0
    told = f"has {size} bytes" if size else "has more than 2 GB"
    raise GraphError(
        f"the model {told}, but bytes hold an ONNX model of at most {PROTOBUF_LIMIT}; pass output=…, which writes the"
        " weights to external data"
    )


def _serialize_ir(model: Any) -> onnx.ModelProto:
    """Serialize an ``onnx_ir.Model``, and read its external weights from their folders.

    Raises:
        GraphError: a weight has no value or can't be read, or onnx_ir can't serialize the model.
    """
    import onnx_ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is None:
                raise GraphError(f"the weight {value.name!r} of the onnx_ir.Model has no value; set its const_value")
    try:
        proto = onnx_ir.to_proto(model)
    except (TypeError, ValueError, RuntimeError) as error:
        # onnx_ir wraps an error once for each level of the model. The innermost error has the reason.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise GraphError(f"onnx_ir can't serialize the model: {cause}") from error
    outside = [t for t in iter_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL]
    if outside:
        folders = _external_folders(model)
        by_folder = dict[Path, list[onnx.TensorProto]]()
        for tensor in outside:
            by_folder.setdefault(folders[_reference_key(tensor)], []).append(tensor)
        for folder, tensors in by_folder.items():
            read_external_weights(tensors, folder, model.graph.name or "the model")
    return proto


def _reference_key(tensor: onnx.TensorProto) -> tuple[str, ...]:
    """Return what identifies an external weight: its name, location, offset and length."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return tensor.name, *(entries.get(key, "") for key in ("location", "offset", "length"))


def _external_folders(model: Any) -> dict[tuple[str, ...], Path]:
    """Find the folder of each external weight of an ``onnx_ir.Model``.

    Returns:
        key of the weight (`_reference_key`) -> folder.
    """
    import onnx_ir

    folders = dict[tuple[str, ...], Path]()
    for tensor in _iter_ir_tensors(model):
        if isinstance(tensor, onnx_ir.ExternalTensor):
            folders[_reference_key(onnx_ir.to_proto(tensor))] = Path(tensor.base_dir)
    return folders


def _iter_ir_tensors(model: Any) -> Any:
    """Yield the initializers and the tensors in attributes of an ``onnx_ir.Model``."""
    import onnx_ir

    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values())
    for graph in (model.graph, *model.functions.values()):
        for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
            for attribute in node.attributes.values():
                if attribute.type == onnx_ir.AttributeType.TENSOR:
                    yield attribute.value
                elif attribute.type == onnx_ir.AttributeType.TENSORS:
                    yield from attribute.value
