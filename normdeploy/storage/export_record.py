"""What an exported file says about its own making: the model, its inputs and the flags, as one JSON value in the file's
metadata.

With it ``verify model.pt model.onnx`` needs no flag repeated. It is plain text that anybody can write, and the same for
everybody who exports the same model: no key, no folder and no date is in it. So what runs no code is followed whoever
wrote it (``DATA``), and what may run code (``CODE``) only where somebody who is trusted has signed the record
(`normdeploy.storage.record_signing`), outside of the file.
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
# {"record": ..., "hmac": ...}: the same content, signed in its own bytes with a user's key
_OLDER = 1
_PROPERTY = "normdeploy"

# flags of loading that run no code
DATA = ("key", "inputs", "dims", "eval", "task", "part")
# what is imported, and what it is called with; ``trust`` stands with the export's flags
CODE = (
    "model",
    "model_args",
    "imports",
)
# size of a dim in ONNX
_LARGEST = 2**63 - 1
# of a limit; the difference of two is a float
_FARTHEST = 2.0**1022
# characters of one text that is followed
_LONGEST = 4096


def write_record(proto: onnx.ModelProto, model: ModelSignature, flags: Mapping[str, Any]) -> None:
    """Write into ``proto``'s metadata how it came about.

    Args:
        flags: the export's own flags, JSON values. Absolute paths, here and in ``model.recorded``, are cut to their
        last part.
    """
    content = {
        "schema": SCHEMA,
        "model": {"sha256": model.sha256, "kind": model.kind},
        "inputs": [dataclasses.asdict(spec) for spec in model.inputs],
        "outputs": list(model.outputs),
        "load": _to_portable_json(model.recorded),
        "export": _to_portable_json(dict(flags)),
        "versions": {name: version(name) for name in ("torch", "onnx", "normdeploy")},
    }
    set_metadata(proto, _PROPERTY, content)


def update_record(proto: onnx.ModelProto, inputs: Sequence[InputSpec], flags: Mapping[str, Any] | None = None) -> None:
    """Bring the record of a file up to what became of it; one without a record, of another tool, gets one that tells
    its inputs alone.

    Args:
        inputs: as the file takes them now.
        flags: those of the export that changed.
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
    content["inputs"] = [dataclasses.asdict(spec) for spec in inputs]
    content["export"] |= _to_portable_json(dict(flags or {}))
    prop = next(p for p in proto.metadata_props if p.key == _PROPERTY)
    prop.value = json.dumps(content, sort_keys=True)


def read_record(proto: onnx.ModelProto) -> dict[str, Any]:
    """What ``write_record`` wrote, {} where nothing was.

    ``inputs`` are InputSpecs; ``load`` and ``export`` the flags. Whoever wrote the file may have written anything here:
    of ``load``, what ``CODE`` names, and the ``trust`` of ``export``, are not to be followed for that alone
    (`normdeploy.verbs.arguments.model_source.recall_loading`).

    Raises:
        GraphError: the record is malformed, or of a schema that this version does not know.
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
    """The record as it stands in the file, not looked into; {} where there is none.

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
        # texts that are no Unicode can be neither signed nor written again
        json.dumps(content).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _make_record_error(error) from error
    if schema not in (SCHEMA, _OLDER):
        raise GraphError(
            f"the file's record of its export has schema {schema!r}, this version reads {SCHEMA}; export again, or give"
            " the flags"
        )
    return content


def runs_code(record_of_export: Mapping[str, Any]) -> bool:
    """Whether loading the model as ``read_record`` says imports or runs what the flags name."""
    return bool(record_of_export) and (
        any(record_of_export["load"].get(name) for name in CODE) or bool(record_of_export["export"].get("trust"))
    )


def _make_record_error(error: Exception) -> GraphError:
    return GraphError(
        f"the file's record of its export is malformed ({type(error).__name__}: {error}); export again, or give the"
        " flags"
    )


def _require_valid_flags(load: Mapping[str, Any]) -> None:
    """The flags have the types that the loader takes, and are no texts without end: some are followed whoever wrote
    them."""
    for name in ("inputs", "dims", "imports"):
        texts = load.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= _LONGEST for text in texts):
            raise ValueError(f"{name} is no list of short texts")
    for name in ("key", "model", "task", "part"):
        if not isinstance(load.get(name, ""), str) or len(load.get(name, "")) > _LONGEST:
            raise ValueError(f"{name} is no short text")
    if not isinstance(load.get("model_args", {}), dict):
        raise ValueError("model_args are no names with values")
    if not isinstance(load.get("eval", False), bool):
        raise ValueError("eval is neither true nor false")


def _parse_input_spec(entry: Mapping[str, Any]) -> InputSpec:
    shape = tuple(_parse_dim(dim) for dim in entry["shape"])
    for dim in (part for whole in shape for part in (whole, *whole.terms)):
        if not (
            isinstance(dim.name, str | None)
            and all(type(n) is int for n in (dim.min, dim.opt, dim.max))
            and 0 <= dim.min <= dim.opt <= dim.max <= _LARGEST
        ):
            raise ValueError(f"the dim {dim} of input {entry['name']!r} makes no sense")
    limits = entry["range"]
    if limits is not None:
        low, high = (float(limit) if not isinstance(limit, int) else limit for limit in limits)
        # NaN is below nothing, and numpy draws from no range that is wider than a float.
        if not (low <= high and max(abs(low), abs(high)) <= _FARTHEST):
            raise ValueError(f"the range {str(limits)[:80]} of input {str(entry['name'])[:80]!r} makes no sense")
        limits = (low, high)
    dtype = str(entry["dtype"])
    if dtype != "bfloat16" and np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"the dtype {dtype!r} of input {entry['name']!r} is no tensor's")
    return InputSpec(str(entry["name"]), dtype, shape, limits, entry.get("mask") is True)


def _parse_dim(entry: Mapping[str, Any]) -> Dim:
    return Dim(**{**entry, "terms": tuple(Dim(**{**term, "terms": ()}) for term in entry.get("terms", ()))})


def _to_portable_json(value: Any) -> Any:
    """``value`` as JSON holds it, without a folder of this machine."""
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
