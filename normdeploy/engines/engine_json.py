"""Read the JSON files that TensorRT's tools write about an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..storage.regular_file import read_regular
from ..types import PathLike

# Largest accepted file in bytes. The layers of a model with 10,000 nodes take about 20 MB.
LARGEST = 256 << 20

EXPORT_LAYERS = "trtexec --loadEngine=ENGINE --exportLayerInfo=FILE"
EXPORT_TIMES = "trtexec --loadEngine=ENGINE --exportProfile=FILE"


def read_json(path: PathLike) -> Any:
    """Read a JSON file of a tool of TensorRT.

    TensorRT separates names by control characters. Some versions write them unescaped, which JSON forbids, so they are
    accepted here.

    Returns:
        the parsed value.

    Raises:
        InputError: the file does not exist, is too large, or is not JSON.
    """
    shown = os.fspath(path)
    try:
        data = read_regular(path, most=LARGEST)
    except OSError as error:
        raise InputError(f"can't read {shown!r}: {error.strerror or error}; check the path") from error
    if not data.strip():
        raise InputError(f"{shown!r} is empty; write it again with `{EXPORT_LAYERS}`")
    text = data.decode(json.detect_encoding(data), errors="replace")
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise InputError(f"{shown!r} is nested too deeply to be a file of TensorRT's tools") from error
    except ValueError as error:
        raise InputError(f"{shown!r} is not JSON: {error}; it may be cut off, so write it again") from error


def is_profile(document: Any) -> bool:
    """Check if a document is what trtexec writes with ``--exportProfile``: a list of records with times."""
    return isinstance(document, list) and any(
        isinstance(record, Mapping) and "name" in record and ("averageMs" in record or "timeMs" in record)
        for record in document
    )


def is_layer_info(document: Any) -> bool:
    """Check if a document is what trtexec writes with ``--exportLayerInfo``, or a list of such layers."""
    if isinstance(document, Mapping):
        return isinstance(document.get("Layers"), list)
    return isinstance(document, list) and any(isinstance(each, Mapping) and "LayerType" in each for each in document)


def describe_document(document: Any) -> str:
    """Describe a document of another form in a few words, for errors."""
    if is_profile(document):
        return "the times of layers (--exportProfile)"
    if is_layer_info(document):
        return "the layers of an engine (--exportLayerInfo)"
    if isinstance(document, list) and any(isinstance(r, Mapping) and "latencyMs" in r for r in document):
        return "the times of whole runs (--exportTimes)"
    if isinstance(document, Mapping):
        keys = ", ".join(repr(str(key)[:40]) for key in list(document)[:4])
        return f"an object with the keys {keys}" if keys else "an empty object"
    return f"a JSON {'list' if isinstance(document, list) else type(document).__name__}"


# Characters of byte order marks and white space, which may stand before a document
_BEFORE = b"\xef\xbb\xbf\xff\xfe \t\r\n"
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Index of a checkpoint's shards: a JSON file, but a model
_MODEL_INDEX = ".safetensors.index.json"


def is_json_file(path: PathLike) -> bool:
    """Check if a file is JSON by its first bytes; by its suffix if the file does not exist or is empty.

    Returns:
        False for the index of a safetensors checkpoint, which is a model.
    """
    name = os.fspath(path)
    if name.endswith((_MODEL_INDEX, ".safetensors")):
        return False
    if name.endswith(".json"):
        return not os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(64)
    # Binary formats have zeros near their start, and so has UTF-16, which begins with a mark.
    if b"\0" in head and not head.startswith(_BYTE_ORDER_MARKS):
        return False
    return head.lstrip(_BEFORE).startswith((b"{", b"["))
