"""Record in an exported file how it was made: the model, its inputs and the flags, as JSON in the file's metadata.

With the record, ``verify model.pt model.onnx`` does not need the flags of the export again. The record is plain text
that anybody can write. It is the same for everybody who exports the same model, because it contains no key, no folder
and no date. Flags that run no code (``DATA``) are followed no matter who wrote them. Flags that may run code (``CODE``)
are followed only if somebody trusted has signed the record, outside of the file (`normdeploy.storage.record_signing`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx

from ..errors import GraphError
from ..model import Dim, InputSpec, ModelSignature
from .proto_traversal import set_metadata

SCHEMA = 2
# Number of the older schema, {"record": ..., "hmac": ...}. This schema has the same content, plus a user's signature
# inside the file.
_OLDER = 1
_PROPERTY = "normdeploy"

# Loading flags that run no code.
DATA = ("key", "inputs", "dims", "eval", "task", "part")
# Loading flags that import code, and loading flags with arguments for this code. The flag ``trust`` is missing because
# it is not a loading flag but a flag of the export.
CODE = (
    "model",
    "model_args",
    "imports",
)
# Export flag of a decoder: the SHA-256 of its tokenizer's vocabulary (`normdeploy.storage.tokenizer_files`).
TOKENIZER_FLAG = "tokenizer_sha256"
# Largest size of a dim in ONNX.
_LARGEST = 2**63 - 1
# Largest absolute limit of a range, so that the difference of two limits is still a float.
_FARTHEST = 2.0**1022
# Maximum number of characters of one text flag.
_LONGEST = 4096


def write_record(proto: onnx.ModelProto, model: ModelSignature, flags: Mapping[str, Any]) -> None:
    """Write the record of an export into ``proto``'s metadata.

    Args:
        model: description of the model, with its hash, kind, inputs, outputs and loading flags.
        flags: the export's own flags as JSON values. Absolute paths in ``flags`` and in ``model.recorded`` are cut to
            their last part.
    """
    content = {
        "schema": SCHEMA,
        "model": {"sha256": model.sha256, "kind": model.kind} | _describe_tracer(model),
        "inputs": [_spec_to_json(spec) for spec in model.inputs],
        "outputs": list(model.outputs),
        "load": _to_portable_json(model.recorded),
        "export": _to_portable_json(dict(flags)),
        "versions": {name: version(name) for name in ("torch", "onnx", "normdeploy")},
    }
    set_metadata(proto, _PROPERTY, content)


def _describe_tracer(model: ModelSignature) -> dict[str, str]:
    """Name the exporter that traced the model, if torch.export alone did not."""
    if not model.traced_by:
        return {}
    return {"traced_by": model.traced_by}


def update_record(proto: onnx.ModelProto, inputs: Sequence[InputSpec], flags: Mapping[str, Any] | None = None) -> None:
    """Update the record of a file after a change.

    A file of another tool has no record. It gets a record that states only its inputs. If the inputs are unknown, it
    gets no record.

    Args:
        inputs: the file's inputs after the change.
        flags: the export flags that changed.
    """
    content = raw_record(proto)
    if not content:
        if inputs:
            write_record(
                proto,
                ModelSignature(inputs=tuple(inputs), outputs=tuple(o.name for o in proto.graph.output), kind="onnx"),
                flags or {},
            )
        return
    content["schema"] = SCHEMA
    content["inputs"] = [_spec_to_json(spec) for spec in inputs]
    content["export"] |= _to_portable_json(dict(flags or {}))
    prop = next(p for p in proto.metadata_props if p.key == _PROPERTY)
    prop.value = json.dumps(content, sort_keys=True)


def read_record(proto: onnx.ModelProto) -> dict[str, Any]:
    """Read and check the record that ``write_record`` wrote.

    The file's author may have written anything into the record. Follow the loading flags of ``CODE`` and the export
    flag ``trust`` only after further checks (`normdeploy.verbs.arguments.model_source.recall_loading`).

    Returns:
        the record, with ``inputs`` as InputSpecs and ``load`` and ``export`` as flags; {} if there is none.

    Raises:
        GraphError: the record is malformed, or has a schema that this version does not support.
    """
    content = raw_record(proto)
    if not content:
        return {}
    try:
        parts = {part: dict(content[part]) for part in ("model", "load", "export", "versions")}
        _require_valid_flags(parts["load"])
        inputs = tuple(_parse_input_spec(entry) for entry in content["inputs"])
        return {**parts, "schema": content["schema"], "inputs": inputs, "outputs": [str(o) for o in content["outputs"]]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _make_record_error(error) from error


def raw_record(proto: onnx.ModelProto) -> dict[str, Any]:
    """Read the record of a file without checking its content.

    Returns:
        the JSON object; {} if there is none.

    Raises:
        GraphError: as ``read_record``.
    """
    text = next((p.value for p in proto.metadata_props if p.key == _PROPERTY), None)
    if text is None:
        return {}
    try:
        value = json.loads(text)
        content: dict[str, Any] = dict(value["record"] if "hmac" in value else value)
        schema = content["schema"]
        if schema == _OLDER and "eval_mode" in content["load"]:
            content["load"]["eval"] = content["load"].pop("eval_mode")
        # encode() fails for text that is not valid Unicode. Such text can be neither signed nor written again.
        json.dumps(content).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _make_record_error(error) from error
    if schema not in (SCHEMA, _OLDER):
        raise GraphError(
            f"the file's record of its export has schema {schema!r}, but this version reads {SCHEMA}; export again, "
            "or pass the flags"
        )
    return content


def runs_code(record_of_export: Mapping[str, Any]) -> bool:
    """Return True if loading the model by this record would import or run code that the flags name.

    Args:
        record_of_export: a record from ``read_record``.

    Returns:
        False for an empty record.
    """
    return bool(record_of_export) and (
        any(record_of_export["load"].get(name) for name in CODE) or bool(record_of_export["export"].get("trust"))
    )


def _make_record_error(error: Exception) -> GraphError:
    return GraphError(
        f"the file's record of its export is malformed ({type(error).__name__}: {error}); export again, or pass the "
        "flags"
    )


def _require_valid_flags(load: Mapping[str, Any]) -> None:
    """Check types and lengths of the loading flags, because some flags are followed no matter who wrote them."""
    for name in ("inputs", "dims", "imports"):
        texts = load.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= _LONGEST for text in texts):
            raise ValueError(f"{name} is not a list of short texts")
    for name in ("key", "model", "task", "part"):
        if not isinstance(load.get(name, ""), str) or len(load.get(name, "")) > _LONGEST:
            raise ValueError(f"{name} is not a short text")
    if not isinstance(load.get("model_args", {}), dict):
        raise ValueError("model_args is not a mapping of names to values")
    if not isinstance(load.get("eval", False), bool):
        raise ValueError("eval is neither true nor false")


def _parse_input_spec(entry: Mapping[str, Any]) -> InputSpec:
    shape = tuple(_parse_dim(dim) for dim in entry["shape"])
    for dim in (part for whole in shape for part in (whole, *whole.terms)):
        if not (
            isinstance(dim.name, str | None)
            and all(type(n) is int for n in (dim.min, dim.opt, dim.max))
            and 0 <= dim.min <= dim.opt <= dim.max <= _LARGEST
            and type(dim.step) is int
            and dim.step >= 1
            and not any(size % dim.step for size in (dim.min, dim.opt, dim.max))
        ):
            raise ValueError(f"the dim {dim} of input {entry['name']!r} is invalid")
    limits = entry["range"]
    if limits is not None:
        low, high = (float(limit) if not isinstance(limit, int) else limit for limit in limits)
        # The comparisons also refuse NaN. numpy can't draw from a range that is wider than the largest float.
        if not (low <= high and max(abs(low), abs(high)) <= _FARTHEST):
            raise ValueError(f"the range {str(limits)[:80]} of input {str(entry['name'])[:80]!r} is invalid")
        limits = (low, high)
    dtype = str(entry["dtype"])
    if dtype != "bfloat16" and np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"the dtype {dtype!r} of input {entry['name']!r} is not a tensor dtype")
    return InputSpec(str(entry["name"]), dtype, shape, limits, entry.get("mask") is True)


def _spec_to_json(spec: InputSpec) -> dict[str, Any]:
    """Convert a spec to JSON types. The step of a dim is left out if it is 1, as in files of older versions."""
    content = dataclasses.asdict(spec)
    for dim in content["shape"]:
        for each in (dim, *dim["terms"]):
            if each["step"] == 1:
                del each["step"]
    return content


def _parse_dim(entry: Mapping[str, Any]) -> Dim:
    return Dim(**{**entry, "terms": tuple(Dim(**{**term, "terms": ()}) for term in entry.get("terms", ()))})


def _to_portable_json(value: Any) -> Any:
    """Convert ``value`` to JSON types, without folders of this machine."""
    if isinstance(value, Mapping):
        return {str(k): _to_portable_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_portable_json(v) for v in value]
    if isinstance(value, str | PurePath):
        text = str(value)
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
        if absolute:
            return PureWindowsPath(text).name
        return text
    return value
