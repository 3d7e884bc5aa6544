"""Detect the kind of a file from its bytes alone. Nothing in the file is executed, imported or unpickled.

| kind | marker |
|---|---|
| ExportedProgram | zip with one root folder; ``archive_format`` reads ``pt2``; ``models/model.json`` |
| TorchScript | zip with ``constants.pkl`` or ``code/`` |
| torch.save | zip with ``data.pkl``; the legacy format is a series of bare pickles, the first with a magic number |
| safetensors | a little-endian u64 length, then ``{``; for several shards, a JSON named ``*.safetensors.index.json`` |
| Hugging Face folder | ``config.json`` |
| diffusers pipeline | ``model_index.json`` |
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from enum import StrEnum
from pathlib import Path, PurePosixPath

from ..errors import LFS_POINTER, LoadError
from ..zoo_sources import ZOO_PACKAGES, hash_zoo_model, parse_zoo_source
from .foreign_folders import describe_foreign_folder

# The pickle of torch.serialization.MAGIC_NUMBER, protocol 2.
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
PROGRAM_JSON = "models/model.json"
# The safetensors library's own limit for its header, in bytes.
_HEADER_LIMIT = 100 << 20
_CHUNK = 1 << 20
# Suffix of an index of shards, which is a JSON file {"weight_map": {tensor: file}}.
INDEX = ".safetensors.index.json"
_OF_MODELS = (".pt2", ".pt", ".pth", ".ckpt", ".bin", ".safetensors")
BOOKKEEPING = (".git", ".cache")
# File of a diffusers pipeline that names its components.
PIPELINE_INDEX = "model_index.json"


class FileKind(StrEnum):
    """Kinds of files that can be loaded. The values appear in messages."""

    PROGRAM = "ExportedProgram"
    TORCHSCRIPT = "TorchScript"
    PICKLE = "torch.save"
    LEGACY_PICKLE = "torch.save (legacy)"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "Hugging Face folder"
    PIPELINE = "diffusers pipeline"
    PYTHON = "Python file"
    ZOO = "model of a package"


def detect_kind(path: Path) -> FileKind:
    """Detect the kind of the file or folder at ``path``.

    Returns:
        The kind.

    Raises:
        LoadError: the path does not exist, or the file is broken, truncated or of an unsupported kind.
    """
    if parse_zoo_source(path) is not None:
        return FileKind.ZOO
    if path.is_dir():
        if (path / PIPELINE_INDEX).is_file():
            return FileKind.PIPELINE
        if foreign := describe_foreign_folder(path):
            raise LoadError(foreign)
        if (path / "config.json").is_file():
            return FileKind.HUGGINGFACE
        raise LoadError(_describe_plain_folder(path))
    if not path.is_file():
        raise LoadError(
            f"file not found: {path}; check the path (relative to {Path.cwd()}){_suggest_zoo_factory(path)}"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise LoadError(f"{path} is empty (0 bytes): copy or save it again")
    if head.startswith(b"PK\x03\x04"):
        with open_torch_archive(path) as archive:
            return _classify_archive(path, archive)
    if head.startswith(LEGACY_MAGIC[:4]):
        if not head.startswith(LEGACY_MAGIC):
            raise LoadError(
                f"{path} starts like a file of torch.save's legacy format, but its magic number is not torch's: it "
                "is damaged, or another program wrote it"
            )
        return FileKind.LEGACY_PICKLE
    if path.name.endswith(INDEX) and head.lstrip().startswith(b"{"):
        return FileKind.SAFETENSORS
    if head[8:9] == b"{":
        return _check_safetensors(path, head, size)
    raise LoadError(_describe_unknown_file(path, head))


def _describe_plain_folder(path: Path) -> str:
    files = sorted(path.iterdir())
    models = [file for file in files if file.name.endswith(INDEX)] or [f for f in files if f.suffix in _OF_MODELS]
    if not files:
        return f"{path} is an empty folder without a config.json: pass a model file, or a Hugging Face model folder"
    if models:
        advice = f"pass {' or '.join(map(str, models[:3]))}"
    else:
        advice = "pass a model file"
    return f"{path} is a folder without a config.json: {advice}, or a Hugging Face model folder"


def _suggest_zoo_factory(path: Path) -> str:
    """Return advice if ``path`` may be the name of a model in a package, such as resnet50; "" otherwise."""
    if path.suffix or path.name != str(path):
        return ""
    return (
        f". For a model of a package, pass {' or '.join(f'{package}:{path.name}' for package in ZOO_PACKAGES)}, or a "
        "Python file that makes the model"
    )


_OF_ENGINES = (
    "pass the model that it was built from. `inspect` reads the engine's layers from the file that `trtexec"
    " --loadEngine=ENGINE --exportLayerInfo=FILE.json` writes"
)
# Files of other tools that can't be loaded: first bytes, description, advice.
_FOREIGN = (
    (LFS_POINTER, "a Git LFS pointer, not the file itself", "fetch the file with `git lfs pull`"),
    (b"GGUF", "a llama.cpp GGUF file", "pass the Hugging Face folder or the weights that it was made from"),
    (b"\x89HDF", "an HDF5 file, as Keras writes it", "convert it with tf2onnx, and pass the ONNX file to `optimize`"),
    (b"ftrt", "a TensorRT engine, which no longer contains the model", _OF_ENGINES),
    (b"vtrt", "a TensorRT-RTX engine, which no longer contains the model", _OF_ENGINES),
    (b"\x93NUMPY", "a NumPy array", "pass the model"),
    (b"<", "an HTML or XML page, as from a failed download", "download the file again"),
    (b"\x80", "a bare pickle", "save the model with torch.save or torch.export.save"),
    (b"\x1f\x8b", "a gzip archive", "unpack it"),
)
_SUFFIXES = {
    ".onnx": ("an ONNX file", "use `normdeploy optimize` or `inspect`"),
    ".tflite": ("a TensorFlow Lite file", "convert it with tf2onnx, and pass the ONNX file to `optimize`"),
    ".pb": ("a TensorFlow graph", "convert it with tf2onnx, and pass the ONNX file to `optimize`"),
    ".mlmodel": ("a Core ML file", "pass the model that it was made from"),
}
_WANTED = (
    "expected a file from torch.export.save or torch.save, safetensors, a Hugging Face folder, net.py:Net or timm:NAME"
)


def _describe_unknown_file(path: Path, head: bytes) -> str:
    """Describe a file that can't be loaded. Its first bytes or its name identify its kind."""
    for magic, kind, advice in _FOREIGN:
        if head.startswith(magic):
            return f"{path} is {kind}: {advice}"
    start = f"it begins with the bytes {head[:8].hex(' ')}"
    if path.suffix in _SUFFIXES:
        kind, advice = _SUFFIXES[path.suffix]
        return f"{path} is not a PyTorch model; its name suggests {kind}: {advice} ({start})"
    return f"{path} has an unrecognized model format, {start}; {_WANTED}"


def _check_safetensors(path: Path, head: bytes, size: int) -> FileKind:
    (length,) = struct.unpack("<Q", head[:8])
    if length > _HEADER_LIMIT:
        raise LoadError(
            f"{path} looks like safetensors, but declares a header of {length} bytes (the format allows "
            f"{_HEADER_LIMIT}): it is damaged"
        )
    if 8 + length > size:
        raise LoadError(
            f"{path} is a truncated safetensors file: its header has {length} bytes, but the file has {size}; copy "
            "it again"
        )
    return FileKind.SAFETENSORS


def _classify_archive(path: Path, archive: zipfile.ZipFile) -> FileKind:
    names = archive.namelist()
    root = archive_root(archive)
    inner = {name.removeprefix(f"{root}/") for name in names}
    if "serialized_exported_program.json" in names:
        raise LoadError(
            f"{path} is an ExportedProgram in the format of torch 2.7 and older: load it with torch.export.load and "
            "save it again with torch.export.save, in a newer torch"
        )
    if "archive_format" in inner and read_entry(archive, f"{root}/archive_format", path) == b"pt2":
        models = sorted(name for name in inner if name.startswith("models/") and name.endswith(".json"))
        if PROGRAM_JSON in models:
            return FileKind.PROGRAM
        if models:
            holds = f"only {', '.join(models)}"
        else:
            holds = "none, only compiled code"
        raise LoadError(
            f"{path} is a .pt2 archive without {PROGRAM_JSON} (models in it: {holds}): save the program with"
            " torch.export.save"
        )
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return FileKind.TORCHSCRIPT
    if "data.pkl" in inner:
        return FileKind.PICKLE
    raise LoadError(f"{path} is a zip file, but not one that torch writes: it contains {', '.join(sorted(inner)[:5])}")


def archive_root(archive: zipfile.ZipFile) -> str:
    """Return the name of the only folder at the root of a torch archive.

    Returns:
        Its name.
    """
    return PurePosixPath(archive.namelist()[0]).parts[0]


def open_torch_archive(path: Path) -> zipfile.ZipFile:
    """Open a torch zip file with a checked table of contents.

    torch stores entries uncompressed, so the sum of the declared sizes can't be much larger than the file. A file with
    larger declared sizes is a zip bomb. It is refused before a byte is unpacked.

    Returns:
        The open archive.

    Raises:
        LoadError: the file is broken, truncated or empty; an entry points outside the archive, occurs twice, is
            encrypted or is a zip bomb.
    """
    try:
        archive = zipfile.ZipFile(path)
        entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, EOFError, struct.error, ValueError, NotImplementedError) as error:
        raise LoadError(
            f"{path} starts like a zip file but can't be read as one: it is truncated or broken ({error}); copy or save"
            " it again"
        ) from error
    try:
        _require_sound_entries(path, entries)
    except LoadError:
        archive.close()
        raise
    return archive


def _require_sound_entries(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if not entries:
        raise LoadError(f"{path} is a zip file without entries: save it again")
    seen: set[str] = set()
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        if not parts or entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename or ":" in parts[0]:
            raise LoadError(
                f"{path} contains an entry outside the archive, {entry.filename!r}: torch never writes such a file"
            )
        if entry.filename in seen:
            raise LoadError(
                f"{path} holds {entry.filename!r} twice, and readers disagree on which one counts; torch never "
                "writes such a file"
            )
        if entry.flag_bits & 1:
            raise LoadError(f"{path} is encrypted (entry {entry.filename!r}): decrypt it first")
        seen.add(entry.filename)
    declared = sum(entry.file_size for entry in entries)
    size = path.stat().st_size
    if declared > 2 * size + _CHUNK:
        largest = max(entries, key=lambda entry: entry.file_size)
        raise LoadError(
            f"{path} has {size} bytes but declares contents of {declared} ({largest.filename!r} has "
            f"{largest.file_size}): torch does not compress, so this is a zip bomb"
        )


def read_entry(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Read one whole entry.

    Returns:
        Its bytes.

    Raises:
        LoadError: the entry is missing or damaged.
    """
    try:
        return archive.read(name)
    except KeyError:
        raise LoadError(
            f"{path} lacks {name.partition('/')[2]!r}, which such a file must contain: it is incomplete; save it again"
        ) from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError, zlib.error) as error:
        raise LoadError(
            f"{path}: the entry {name!r} can't be read ({error}): the file is damaged; copy or save it again"
        ) from error


def hash_model_files(path: Path) -> str:
    """Hash a model: a file, an index with the shards in its folder, a folder, or the name of a package's model.

    The hash of a folder covers names and bytes of its files in the order of their names. The top-level folders of git
    and huggingface_hub differ between copies of the same model, so they are left out.

    Returns:
        SHA-256 as hex digits.
    """
    digest = hashlib.sha256()
    if (zoo := parse_zoo_source(path)) is not None:
        return hash_zoo_model(zoo)
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file())
    if path.name.endswith(INDEX):
        files += sorted(path.parent.glob("*.safetensors"))
    files = [file for file in files if path.is_file() or file.relative_to(path).parts[0] not in BOOKKEEPING]
    for file in files:
        if file != path:
            name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
