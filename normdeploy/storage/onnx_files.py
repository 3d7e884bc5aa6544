"""Read and write ONNX files. Every written file is replaced atomically (see ``replace_atomically``)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from ..errors import LFS_POINTER, GraphError, InputError
from ..log import log
from ..types import PathLike
from .compiled_models import require_model
from .file_replacement import (
    commit_temporary,
    lock_folder,
    matching_siblings,
    replace_atomically,
    resolve_writable_path,
    temporary_beside,
    write_bytes,
)
from .node_order import sort_nodes
from .nonstandard_norms import is_nonstandard_norm
from .onnx_domains import is_standard
from .proto_traversal import copy_model, is_meaningless_dim, iter_bodies, nodes_with_opsets
from .shared_weights import embed_shared_array, shared_array
from .sparse_tensors import densify_model, has_sparse
from .weight_serialization import detach_weights, tensor_nbytes, write_inline, write_weights
from .wellformedness import require_termination, require_wellformed

__all__ = [
    "iter_tensors",
    "load_onnx",
    "normalize_model",
    "parse_onnx",
    "read_external_weights",
    "replace_atomically",
    "save_onnx",
    "write_bytes",
]

# Largest size of a protobuf message in bytes.
PROTOBUF_LIMIT = 2**31 - 1
# Maximum number of characters that an error quotes from the message of ONNX's checker.
_TOLD = 400
# Maximum size in bytes of an external weight that is always read. Larger weights contain no sizes and no thresholds.
_SMALL = 2**12
# Maximum total size of external weights, in bytes beyond twice the size of their files.
_SHARED = 64 << 20
# Domain that ONNX's checker does not know, so that the checker skips nodes of this domain.
_APART = "normdeploy.contrib"


def save_onnx(proto: onnx.ModelProto, path: PathLike, *, external: bool = False, data_name: str | None = None) -> None:
    """Write ``proto``, which is not changed, to ``path``.

    With ``external``, or if the model is too long for protobuf (2 GB), its weights go to ``<name>.<hash>.data`` in the
    same folder. The file's name contains the hash of its content, so the old model and its old weights stay valid until
    the new model replaces the old one. After that, weight files that the model no longer refers to are removed.

    Args:
        data_name: name of a file in the same folder that gets the weights, of any size. An old model with this file of
            weights is removed before the file changes, because it would otherwise read wrong weights after an
            interruption.

    Raises:
        InputError: ``data_name`` can't be used (`require_data_name`).
        GraphError: more than 2 GB would remain without the weights, or a weight is in an external file that was not
            loaded.
        NormdeployError: as ``replace_atomically``.
    """
    target = resolve_writable_path(path)
    if data_name is not None:
        require_data_name(data_name, target)
    foreign = next(
        (
            t.name
            for t in iter_tensors(proto)
            if t.data_location == onnx.TensorProto.EXTERNAL and shared_array(t) is None
        ),
        None,
    )
    if foreign is not None:
        raise GraphError(
            f"the weight {foreign!r} is in an external file and was not loaded; load the model with its external "
            "data before saving it"
        )
    light, weights = detach_weights(proto)
    # Shared weights in bodies can't be written separately, because they are not initializers of the main graph. So they
    # are embedded.
    fill_shared_weights(light)
    try:
        rest = light.ByteSize()
    except EncodeError as error:
        raise GraphError(
            f"{target.name} is larger than 2 GB even without its weights, which protobuf can't store; turn its "
            "constants into initializers"
        ) from error
    with temporary_beside(target) as model, temporary_beside(target) as data:
        location = None
        requested = external or (data_name is not None and bool(weights))
        if requested or rest + sum(tensor_nbytes(t) for t in weights.values()) > PROTOBUF_LIMIT:
            location = write_weights(light, weights, data, target.name, data_name)
            model.write_bytes(light.SerializeToString())
        else:
            write_inline(light, weights, model)
        with lock_folder(target.parent):
            replaced = None if data_name is None else target.with_name(data_name)
            if replaced is not None and replaced.exists():
                target.unlink(missing_ok=True)
                replaced.unlink()
            if location is not None:
                commit_temporary(data, target.with_name(location))
            commit_temporary(model, target)
            log.info("wrote %s", target)
            for old in matching_siblings(target, rf"{re.escape(target.name)}\.[0-9a-f]{{16}}\.data"):
                if old.name != location:
                    old.unlink(missing_ok=True)


# Maximum number of bytes of a file's name on common file systems.
_LONGEST_NAME = 255


def require_data_name(name: str, path: PathLike) -> None:
    """Check that a file beside an ONNX file may get its weights.

    Args:
        name: name of the file of weights.
        path: the ONNX file, which may exist.

    Raises:
        InputError: the name contains folders or is the ONNX file's own, or the file exists and does not belong to the
            ONNX file alone.
    """
    target = Path(os.path.realpath(path))
    if not isinstance(name, str) or name != os.path.basename(name) or "\\" in name or name in ("", ".", ".."):
        raise InputError(
            f"the name of the external data is {name!r}; pass a file name without folders, such as"
            f" {target.name + '.data'!r}: ONNX files refer to weights in their own folder"
        )
    if (
        any(not character.isprintable() for character in name)
        or name.isspace()
        or len(os.fsencode(name)) > _LONGEST_NAME
    ):
        raise InputError(
            f"the name of the external data is {name[:80]!r}; use printable characters, at most {_LONGEST_NAME} bytes"
        )
    if name == target.name:
        raise InputError(f"the external data and the ONNX file are both {name!r}; use another name for one of them")
    if os.path.lexists(target.with_name(name)) and name not in _data_files_of(target):
        raise InputError(
            f"the external data would replace {name!r}, which is not the external data of {target.name}; choose another"
            " name, or delete that file"
        )
    if not os.path.lexists(target.with_name(name)):
        return
    for other in sorted(target.parent.glob("*.onnx")):
        if other != target and name in _data_files_of(other):
            raise InputError(
                f"the external data would replace {name!r}, which is the external data of {other.name} too; choose"
                " another name"
            )


def _data_files_of(path: Path) -> set[str]:
    """Return the names of the files of weights that an ONNX file refers to; empty if it can't be read."""
    try:
        proto = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError):
        return set()
    return {
        entry.value
        for tensor in iter_tensors(proto)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }


def require_terminating_file(path: PathLike) -> None:
    """Refuse an ONNX file that would keep a runtime busy without end, or that contains a compiled model.

    Other faults, even an unreadable file, are left to the runtime, which reports them.

    Raises:
        GraphError: as ``wellformedness.require_termination`` and ``compiled_models.require_model``.
    """
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(Path(path).read_bytes())
    except (OSError, DecodeError):
        return
    require_termination(proto)
    require_model(proto, Path(path).name)


def _flatten_checker_message(message: str) -> str:
    """Join the lines of a message of onnx's checker, and shorten it."""
    text = " ".join(message.replace("==> Context: ", "").split())
    if len(text) <= _TOLD:
        return text
    return f"{text[:_TOLD]} …"


def load_onnx(path: PathLike, external_data: bool = True) -> onnx.ModelProto:
    """Read and check an ONNX file.

    Nodes that are not in topological order are sorted, sizes of -1 become open sizes (`open_unknown_sizes`), and sparse
    tensors are densified.

    Args:
        external_data: True to also read the external weights.

    Returns:
        the model.

    Raises:
        GraphError: the file does not exist, is truncated or not ONNX, breaks the specification, or holds a compiled
            model. Or its external data is missing, too short or outside the model's folder.
    """
    return _read_and_check(Path(path), largest=None if external_data else 0)


def load_small_weights(path: PathLike) -> onnx.ModelProto:
    """Read and check an ONNX file as `load_onnx` does, but read only the small external weights.

    The small weights include the sizes, thresholds and scales that nodes read.

    Returns:
        the model; external weights of more than 4096 bytes stay references.

    Raises:
        GraphError: as for `load_onnx`.
    """
    return _read_and_check(Path(path), largest=_SMALL)


def _read_and_check(source: Path, largest: int | None) -> onnx.ModelProto:
    """Read and check a file and its external weights of at most ``largest`` bytes each. None reads all external
    weights.
    """
    if not source.is_file():
        raise GraphError(
            f"file not found: {str(source)!r}" if not source.exists() else f"{str(source)!r} is not a file"
        )
    try:
        str(source).encode()
    except UnicodeEncodeError as error:
        raise GraphError(f"the path {str(source)!r} is not UTF-8, which onnx requires; rename it") from error
    if (size := source.stat().st_size) > PROTOBUF_LIMIT:
        raise GraphError(
            f"{source.name} has {size} bytes, but an ONNX file has at most {PROTOBUF_LIMIT}; larger models keep "
            "their weights in external data"
        )
    try:
        content = source.read_bytes()
    except OSError as error:
        raise GraphError(f"can't read {str(source)!r}: {error.strerror}") from error
    proto, outside = _parse_checked(content, source.name)
    del content
    places = _locate_weights(outside, source.parent, source.name)
    moved = sort_nodes(proto)
    readable = _copy_for_checker(proto, moved)
    # The checker accepts a model of more than 2 GB only by its path.
    _run_checker(str(source) if readable is None else readable, source.name)
    _read_weights(outside, places, largest)
    if has_sparse(proto):
        densify_model(proto)
    return proto


def parse_onnx(content: bytes, name: str = "the model") -> onnx.ModelProto:
    """Parse and check the bytes of an ONNX file, as `load_onnx` does for a file.

    Args:
        name: name of the model for errors.

    Returns:
        the model.

    Raises:
        GraphError: the bytes are not ONNX, break the specification, or hold a compiled model; or a weight is in
            external data, whose folder the bytes do not record.
    """
    if len(content) > PROTOBUF_LIMIT:
        raise GraphError(
            f"{name} has {len(content)} bytes, but an ONNX model in bytes has at most {PROTOBUF_LIMIT}; write it to a"
            " file with external data, and pass the path"
        )
    proto, outside = _parse_checked(content, name)
    if outside:
        raise GraphError(
            f"the weight {outside[0].name!r} of {name} is in external data, whose folder the bytes do not record; pass"
            " the path of the file"
        )
    moved = sort_nodes(proto)
    readable = _copy_for_checker(proto, moved)
    _run_checker(content if readable is None else readable, name)
    if has_sparse(proto):
        densify_model(proto)
    return proto


def _parse_checked(content: bytes, name: str) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Parse the bytes of an ONNX file, and check the parts that ONNX's checker and runtimes do not check.

    Returns:
        the model without unknown sizes, and its external tensors.

    Raises:
        GraphError: the bytes are not an ONNX file, or the model is malformed.
    """
    if content.startswith(LFS_POINTER):
        raise GraphError(f"{name} is a Git LFS pointer, not the file itself: fetch the file with `git lfs pull`")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise GraphError(f"{name} ({len(content)} bytes) is not an ONNX file, or is truncated: {error}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise GraphError(f"{name} ({len(content)} bytes) is not an ONNX file: it contains no graph or no opset")
    require_wellformed(proto, list(iter_bodies(proto)), iter_tensors(proto))
    require_model(proto, name)
    proto = open_unknown_sizes(proto)
    return proto, [t for t in iter_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL]


def _run_checker(model: onnx.ModelProto | bytes | str, name: str) -> None:
    """Run ONNX's checker on a model, its bytes or its path.

    Raises:
        GraphError: the model violates the specification.
    """
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise GraphError(f"{name} violates the ONNX specification: {_flatten_checker_message(str(error))}") from error


def read_external_weights(tensors: Sequence[onnx.TensorProto], folder: Path, name: str) -> None:
    """Read external weights from ``folder`` into ``tensors`` in place, with the checks of `load_onnx`.

    Args:
        name: name of the model for errors.

    Raises:
        GraphError: external data is missing, too short or outside the folder.
    """
    _read_weights(tensors, _locate_weights(tensors, folder, name), None)


def _locate_weights(tensors: Sequence[onnx.TensorProto], folder: Path, name: str) -> list[tuple[Path, int, int]]:
    """Locate external weights, and check their files.

    Returns:
        (file, offset, length) of each weight.

    Raises:
        GraphError: as for `_locate_external_data` and `_require_backing_files`.
    """
    try:
        places = [_locate_external_data(t, folder) for t in tensors]
    except GraphError as error:
        # Several files may be open, so the message names the file that failed.
        raise GraphError(f"{name}: {error}") from error
    _require_backing_files(name, places)
    return places


def _read_weights(
    tensors: Sequence[onnx.TensorProto], places: Sequence[tuple[Path, int, int]], largest: int | None
) -> None:
    """Read external weights of at most ``largest`` bytes into ``tensors`` in place. None reads all weights.

    Raises:
        GraphError: a file can't be read.
    """
    for tensor, (file, offset, length) in zip(tensors, places, strict=True):
        if largest is not None and length > largest:
            continue
        try:
            with open(file, "rb") as stream:
                stream.seek(offset)
                tensor.raw_data = stream.read(length)
        except (OSError, MemoryError, OverflowError) as error:
            message = f"can't read the {length} bytes of the weight {tensor.name!r} from {file.name!r}"
            raise GraphError(f"{message}: {_describe_read_error(error)}") from error
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _describe_read_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "they do not fit into memory"


def _copy_for_checker(proto: onnx.ModelProto, moved: bool) -> onnx.ModelProto | None:
    """Copy a model into a form that ONNX's checker accepts. Return None if the checker can read the file itself.

    The checker can read the file itself if its nodes are in order and the checker knows all of them. The checker
    refuses norms that other tools left in ONNX's own domain (`nonstandard_norms`), so the copy moves them to a separate
    domain. The copy also has no external weights, because the checker would look for their files in the working
    directory. `_locate_external_data` has already checked these weights.
    """

    def find_nonstandard_norms(model: onnx.ModelProto) -> list[onnx.NodeProto]:
        return [n for n, opset in nodes_with_opsets(model) if is_standard(n) and is_nonstandard_norm(n.op_type, opset)]

    apart = find_nonstandard_norms(proto)
    if not apart and not moved:
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in find_nonstandard_norms(copy):
        node.domain = _APART
    for holder in (copy, *copy.functions) if apart else ():
        holder.opset_import.add(domain=_APART, version=1)
    for tensor in iter_tensors(copy):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    return copy


def normalize_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Normalize a model in memory as `load_onnx` normalizes a file.

    Returns:
        a model in which unknown sizes are open (`open_unknown_sizes`) and no tensor is sparse. It is ``proto`` itself
        if nothing had to change.

    Raises:
        GraphError: a sparse tensor is broken or too large.
    """
    proto = open_unknown_sizes(proto)
    if has_sparse(proto):
        proto = copy_model(proto)
        densify_model(proto)
    return proto


def open_unknown_sizes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove negative sizes and meaningless dim names, such as "?", from a model.

    PaddlePaddle writes -1 or "?" for a dynamic size. onnxruntime and TensorRT also read -1 as a dynamic size, but ONNX
    itself allows no size below 0. The name "?" is removed, because two dims with this name need not have the same size.

    Returns:
        ``proto`` itself if it has neither negative sizes nor such names, else a changed copy.
    """

    def iter_unknown_dims(model: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
        for body in iter_bodies(model):
            if isinstance(body, onnx.FunctionProto):
                stated = body.value_info
            else:
                stated = (*body.input, *body.output, *body.value_info)
            yield from (
                d
                for v in stated
                for d in v.type.tensor_type.shape.dim
                if d.dim_value < 0 or is_meaningless_dim(d.dim_param)
            )

    if next(iter_unknown_dims(proto), None) is None:
        return proto
    proto = copy_model(proto)
    for dim in iter_unknown_dims(proto):
        dim.ClearField("value")
    return proto


def iter_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model, from initializers and attributes. For a sparse tensor, yield its values and its
    indices.
    """
    for body in iter_bodies(proto):
        if isinstance(body, onnx.GraphProto):
            yield from body.initializer
            for sparse in body.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for node in body.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("sparse_tensor"):
                    yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def fill_shared_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Embed the shared weights of a model in place (`normdeploy.storage.shared_weights`).

    Returns:
        ``proto`` itself.
    """
    for tensor in iter_tensors(proto):
        embed_shared_array(tensor)
    return proto


def _require_backing_files(model: str, places: Sequence[tuple[Path, int, int]]) -> None:
    """Check that the external weights do not take much more memory than their files.

    Many weights that refer to one short file could take any amount of memory. A total of up to twice the files' size is
    accepted, which is more than models with tied weights need. `_SHARED` bytes more are also accepted, so that small
    models may refer to the same bytes any number of times.

    Args:
        places: (file, offset, length) of each external weight.

    Raises:
        GraphError: the weights are too large for their files.
    """
    asked = sum(length for _, _, length in places)
    sizes = dict[tuple[int, int], int]()
    for file in {file for file, _, _ in places}:
        status = file.stat()
        sizes[status.st_dev, status.st_ino] = status.st_size
    there = sum(sizes.values())
    if asked > max(2 * there, there + _SHARED):
        raise GraphError(
            f"the weights of {model} are {asked} bytes, but the files that contain them have {there}: many refer to "
            "the same place; store each weight once, and let its nodes share it"
        )


def _locate_external_data(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int]:
    """Locate an external tensor and check that it is inside the folder and the file.

    Returns:
        file, offset and length in bytes.

    Raises:
        GraphError: the reference is broken, points outside the folder or exceeds the file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    root = folder.resolve()
    try:
        file = (root / location).resolve()
        if file.is_file():
            size = file.stat().st_size
        else:
            size = None
        needed = tensor_nbytes(tensor)
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length", needed))
    # pathlib raises RuntimeError for cyclic links before Python 3.13.
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise GraphError(f"the weight {tensor.name!r} has a broken reference to {location!r}: {error}") from error
    if not location or os.path.isabs(location) or ".." in Path(location).parts or not file.is_relative_to(root):
        raise GraphError(
            f"the weight {tensor.name!r} refers to {location!r}, which is outside the model's folder; only files in "
            "that folder are read"
        )
    if size is None:
        raise GraphError(
            f"the weight {tensor.name!r} is in {location!r}, which is missing from the model's folder; copy it there"
        )
    if length != needed or min(length, offset) < 0 or offset + length > size:
        raise GraphError(
            f"the weight {tensor.name!r} needs {needed} bytes but refers to {length} bytes at {offset} of "
            f"{location!r}, which has {size}; the file is truncated or is another file"
        )
    return file, offset, length
