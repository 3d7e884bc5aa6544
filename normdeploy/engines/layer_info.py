"""Read the layers of a TensorRT or TensorRT-RTX engine from the engine inspector's JSON.

trtexec writes this JSON with ``--exportLayerInfo=FILE``. ``EngineInspector.get_engine_information`` returns it:

    {"Layers": [...], "Bindings": [name, ...]}                      TensorRT 8.2 to 10
    {"Layers": [...], "I/O Tensors": [{"Name": ..., ...}, ...]}     TensorRT 11

With ``--profilingVerbosity=detailed``, a layer is an object. Otherwise a layer is only its name. These keys are read:

    Name              name of the layer; with " [profile N]" at the end for a further optimization profile
    LayerType         "CaskConvolution", "PluginV3", "kgen" (a kernel that the compiler Myelin generated), ...
    PluginType        name of the plugin
    TacticName        name of the kernel
    Inputs, Outputs   tensors: Name, Dimensions, "Format/Datatype" (to TensorRT 10) or "Format" and "Datatype" (11)
    Metadata          names of the ONNX nodes that the layer computes (from TensorRT 8.6)

The ONNX parser writes the metadata as ``[ONNX Layer: NAME | CALL (FUNCTION)]``, with a call for each function around
the node. A node without a name is called "node_of_" and the name of its first output. Metadata of fused nodes are
joined by the characters 1E or 1F. The parser cuts the middle of long metadata, which then contain " ... ".

Sources: NVIDIA's pages "Engine Inspector" and "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x", and the
ONNX parser's ``processMetadata`` in onnx-tensorrt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..types import PathLike
from .engine_json import EXPORT_LAYERS, describe_document, is_layer_info, is_profile, read_json
from .layer_kinds import LayerKind, classify_layer, names_in_layer_name, split_profile

_NODE = "[ONNX Layer: "
_SEPARATORS = re.compile("[\x1e\x1f]")
_TRAILING = "+,; \n"
# What the parser writes in place of the middle of long metadata
_CUT = " ... "
# Words for types in the inspector's texts, in capital letters -> dtype
_DTYPES = {
    "FP64": "float64",
    "DOUBLE": "float64",
    "FP32": "float32",
    "FLOAT": "float32",
    "TF32": "float32",
    "FP16": "float16",
    "HALF": "float16",
    "BF16": "bfloat16",
    "BFLOAT16": "bfloat16",
    "FP8": "float8",
    "E4M3": "float8",
    "FP4": "float4",
    "INT4": "int4",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
_WORD = re.compile(r"[A-Za-z]+\d*(?:M\d+)?")
FLOATS = frozenset(dtype for dtype in _DTYPES.values() if "float" in dtype)


@dataclass(frozen=True)
class LayerTensor:
    """Input or output of a layer.

    Attributes:
        dtype: "float16", for example; "" if the file does not state it.
        layout: memory layout in TensorRT's words, such as "Row major linear"; "" if the file does not state it.
    """

    name: str
    dtype: str = ""
    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineLayer:
    """Layer of an engine.

    Attributes:
        name: name of the layer, without the suffix of an optimization profile.
        type: the inspector's ``LayerType``; "" if the file has only names.
        plugin: name of the plugin; "" if the layer is none.
        tactic: name of the kernel; "" if the file does not state it.
        nodes: names of the ONNX nodes that the layer computes.
        callers: names of the nodes that call the functions around ``nodes``.
        profile: index of the optimization profile.
        ms: mean time of one run in milliseconds; None if it was not measured.
    """

    name: str
    type: str = ""
    kind: LayerKind = LayerKind.UNKNOWN
    plugin: str = ""
    tactic: str = ""
    nodes: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    inputs: tuple[LayerTensor, ...] = ()
    outputs: tuple[LayerTensor, ...] = ()
    profile: int = 0
    ms: float | None = None


@dataclass(frozen=True)
class LayerInfo:
    """Layers of an engine, in the order of the file.

    Attributes:
        io_tensors: names of the engine's inputs and outputs; empty if the file does not list them.
        detailed: False if the engine was built without detailed verbosity, so that the file has only names.
        cut: number of layers whose metadata were cut, so that some names of nodes are missing.
    """

    layers: tuple[EngineLayer, ...]
    io_tensors: frozenset[str]
    detailed: bool
    cut: int


def read_layer_info(path: PathLike) -> LayerInfo:
    """Read a file that trtexec wrote with ``--exportLayerInfo``, or an inspector's text saved to a file.

    Returns:
        the layers.

    Raises:
        InputError: the file can't be read, is not JSON, or has another form; or it lists no layers.
    """
    return parse_layer_info(read_json(path), os.fspath(path))


def parse_layer_info(document: Any, shown: str) -> LayerInfo:
    """Parse the engine inspector's JSON.

    Args:
        document: parsed JSON.
        shown: name of the file, for errors.

    Returns:
        the layers.

    Raises:
        InputError: the document has another form, or lists no layers.
    """
    if is_profile(document):
        raise InputError(
            f"{shown!r} contains {describe_document(document)}; pass it with --profile-json, and pass the file of "
            "--exportLayerInfo as FILE"
        )
    if not is_layer_info(document):
        raise InputError(
            f"{shown!r} contains {describe_document(document)}, not the layers of an engine; write it with "
            f"`{EXPORT_LAYERS}`"
        )
    raw = document["Layers"] if isinstance(document, Mapping) else document
    tensors = _io_tensors(document) if isinstance(document, Mapping) else frozenset()
    layers: list[EngineLayer] = []
    cut = 0
    for index, each in enumerate(raw):
        if isinstance(each, str):
            layers.append(_named_layer(each))
        elif isinstance(each, Mapping) and isinstance(each.get("Name"), str):
            layer, whole = _parse_layer(each)
            layers.append(layer)
            cut += not whole
        else:
            raise InputError(f"{shown!r}: layer {index} has no name; write the file with `{EXPORT_LAYERS}`")
    if not layers:
        raise InputError(
            f"{shown!r} lists no layers: the engine was built with the verbosity none; build it with "
            "--profilingVerbosity=detailed"
        )
    return LayerInfo(tuple(layers), tensors, detailed=any(layer.type for layer in layers), cut=cut)


def _io_tensors(document: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the engine's inputs and outputs."""
    listed = document.get("I/O Tensors", document.get("Bindings"))
    if not isinstance(listed, list):
        return frozenset()
    names = (each.get("Name") if isinstance(each, Mapping) else each for each in listed)
    return frozenset(split_profile(name)[0] for name in names if isinstance(name, str))


def _named_layer(text: str) -> EngineLayer:
    name, profile = split_profile(text)
    return EngineLayer(name=name, kind=classify_layer("", name), nodes=names_in_layer_name(name), profile=profile)


def _parse_layer(raw: Mapping[str, Any]) -> tuple[EngineLayer, bool]:
    """Parse one layer. Also return False if its metadata were cut."""
    name, profile = split_profile(raw["Name"])
    layer_type = _text(raw, "LayerType")
    nodes, callers, whole = parse_metadata(_text(raw, "Metadata"))
    kind = classify_layer(layer_type, name)
    layer = EngineLayer(
        name=name,
        type=layer_type,
        kind=kind,
        plugin=_text(raw, "PluginType"),
        tactic=_text(raw, "TacticName"),
        nodes=nodes or names_in_layer_name(name),
        callers=callers,
        inputs=_parse_tensors(raw.get("Inputs")),
        outputs=_parse_tensors(raw.get("Outputs")),
        profile=profile,
    )
    return layer, whole


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def parse_metadata(text: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Read the names of ONNX nodes from a layer's metadata.

    Returns:
        names of the nodes, names of the nodes that call functions around them, and False if the metadata were cut.
    """
    nodes: dict[str, None] = {}
    callers: dict[str, None] = {}
    whole = True
    for part in _SEPARATORS.split(text):
        start, *pieces = part.split(_NODE)
        entries = [piece.rstrip(_TRAILING) for piece in pieces]
        kept = [entry[:-1] for entry in entries if entry.endswith("]") and _CUT not in entry]
        whole = whole and len(kept) == len(entries) and _CUT not in start
        for entry in kept:
            name, *properties = entry.split(" | ")
            nodes[name] = None
            for each in properties:
                caller, parenthesis, _ = each.rpartition(" (")
                if parenthesis:
                    callers[caller] = None
    return tuple(nodes), tuple(callers), whole


def _parse_tensors(raw: Any) -> tuple[LayerTensor, ...]:
    if not isinstance(raw, list):
        return ()
    return tuple(_parse_tensor(each) for each in raw if isinstance(each, Mapping))


def _parse_tensor(raw: Mapping[str, Any]) -> LayerTensor:
    name = split_profile(_text(raw, "Name"))[0]
    dtype, layout = parse_format(_text(raw, "Format/Datatype"))
    if "Format/Datatype" not in raw:
        stated = _text(raw, "Datatype") or _text(raw, "DataType")
        layout = parse_format(_text(raw, "Format"))[1]
        dtype = parse_format(stated)[0]
    return LayerTensor(name, dtype, layout)


def parse_format(text: str) -> tuple[str, str]:
    """Split an inspector's format, such as "Row major linear FP16 format", into a dtype and a layout.

    Returns:
        dtype and layout, for example ("float16", "Row major linear"); "" for a part that the text does not state. The
        text "N/A due to dynamic shapes" states neither.
    """
    if text.startswith(("N/A", "Unknown")):
        return "", ""
    dtype = ""
    kept: list[str] = []
    for word in text.replace(".", "").split():
        found = _WORD.match(word)
        stated = _DTYPES.get(found[0].upper()) if found else None
        if stated and not dtype:
            dtype = stated
        elif word != "format":
            kept.append(word)
    return dtype, " ".join(kept)


def select_profile(layers: Sequence[EngineLayer], profile: int) -> tuple[EngineLayer, ...]:
    """Return the layers of one optimization profile."""
    return tuple(layer for layer in layers if layer.profile == profile)


def list_float_types(tensors: Iterable[LayerTensor]) -> tuple[str, ...]:
    """List the floating and quantized types of tensors, each once."""
    return tuple(dict.fromkeys(t.dtype for t in tensors if t.dtype in FLOATS or t.dtype in ("int8", "int4", "uint8")))
