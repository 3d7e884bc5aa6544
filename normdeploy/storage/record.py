"""What an exported file says about its own making: the model, its inputs and the flags, as one JSON value in the file's metadata.

With it ``verify model.pt model.onnx`` needs no flag repeated. A file may come from a stranger, and some flags make the loader run
code, so the record is signed with a key that never leaves the user's machine; only what is signed may be followed there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx

from ..errors import GraphError
from ..model import Dim, InputSpec, Signature
from .atomic import locked

SCHEMA = 1
_PROPERTY = "normdeploy"
_KEY_BYTES = 32


def record(proto: onnx.ModelProto, model: Signature, flags: Mapping[str, Any]) -> None:
    """Write into ``proto``'s metadata how it came about, signed with this user's key.

    Args:
        flags: the export's own flags, JSON values. Absolute paths, here and in ``model.recorded``, are cut to their last part.
    """
    content = {
        "schema": SCHEMA,
        "model": {"sha256": model.sha256, "kind": model.kind},
        "inputs": [dataclasses.asdict(spec) for spec in model.inputs],
        "outputs": list(model.outputs),
        "load": _portable(model.recorded),
        "export": _portable(dict(flags)),
        "versions": {name: version(name) for name in ("torch", "onnx", "normdeploy")},
    }
    key = _key(create=True)
    value = {"record": content, "hmac": _hmac(key, content) if key is not None else ""}
    kept = [p for p in proto.metadata_props if p.key != _PROPERTY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=_PROPERTY, value=json.dumps(value, sort_keys=True))


def amend(proto: onnx.ModelProto, inputs: Sequence[InputSpec], flags: Mapping[str, Any]) -> None:
    """Bring the record of a file up to what became of it; nothing where it has none. It is signed anew where this user had signed it.

    Args:
        inputs: as the file takes them now.
        flags: those of the export that changed.
    """
    known = recorded(proto)
    if not known:
        return
    prop = next(p for p in proto.metadata_props if p.key == _PROPERTY)
    value = json.loads(prop.value)
    content = value["record"]
    content["inputs"] = [dataclasses.asdict(spec) for spec in inputs]
    content["export"] |= _portable(dict(flags))
    key = _key(create=False) if known["signed"] else None
    prop.value = json.dumps({"record": content, "hmac": _hmac(key, content) if key is not None else ""}, sort_keys=True)


def recorded(proto: onnx.ModelProto) -> dict[str, Any]:
    """What ``record`` wrote, {} where nothing was.

    ``inputs`` are InputSpecs; ``load`` and ``export`` the flags. ``signed`` is True where this user, on this machine, exported the file
    with exactly this record. Flags that make the loader run code (a model factory, imports, trust) may be followed only where
    ``signed`` is True and the model file at hand has the recorded ``model["sha256"]``: the signature vouches for that file, not for
    whatever bears its name.

    Raises:
        GraphError: the record is malformed, or of a schema that this version does not know.
    """
    text = next((p.value for p in proto.metadata_props if p.key == _PROPERTY), None)
    if text is None:
        return {}
    try:
        value = json.loads(text)
        content, signature = value["record"], value["hmac"]
        schema = content["schema"]
        if schema != SCHEMA:
            raise GraphError(
                f"the file's record of its export has schema {schema!r}, this version reads {SCHEMA}; export again, or give the flags"
            )
        key = _key(create=False)
        signed = key is not None and hmac.compare_digest(signature.encode(), _hmac(key, content).encode())
        inputs = tuple(_input(entry) for entry in content["inputs"])
        found = {part: dict(content[part]) for part in ("model", "load", "export", "versions")}
        return {**found, "schema": schema, "inputs": inputs, "outputs": [str(o) for o in content["outputs"]], "signed": signed}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise GraphError(
            f"the file's record of its export is malformed ({type(error).__name__}: {error}); export again, or give the flags"
        ) from error


def _input(entry: Mapping[str, Any]) -> InputSpec:
    shape = tuple(Dim(**dim) for dim in entry["shape"])
    for dim in shape:
        if not (
            isinstance(dim.name, str | None)
            and all(type(n) is int for n in (dim.min, dim.opt, dim.max))
            and 0 <= dim.min <= dim.opt <= dim.max
        ):
            raise ValueError(f"the dim {dim} of input {entry['name']!r} makes no sense")
    limits = entry["range"]
    if limits is not None:
        low, high = (float(limit) if not isinstance(limit, int) else limit for limit in limits)
        limits = (low, high)
    dtype = str(entry["dtype"])
    if dtype != "bfloat16" and np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"the dtype {dtype!r} of input {entry['name']!r} is no tensor's")
    return InputSpec(str(entry["name"]), dtype, shape, limits)


def _portable(value: Any) -> Any:
    """``value`` as JSON holds it, without a folder of this machine."""
    if isinstance(value, Mapping):
        return {str(k): _portable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(v) for v in value]
    if isinstance(value, str | PurePath):
        text = str(value)
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
        return PureWindowsPath(text).name if absolute else text
    return value


def _hmac(key: bytes, content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, f"normdeploy record\n{canonical}".encode(), hashlib.sha256).hexdigest()


# ------------------------------------------------------------------ the key


def _key(*, create: bool) -> bytes | None:
    """This user's key; None where there is none (and none could be made): a file is then not signed, or not known to be."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "normdeploy"  # a relative one is to be ignored
    path = folder / "key"
    with suppress(OSError):
        if (key := _usable(path)) is not None or not create:
            return key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder):  # of several processes that find no key, one makes it
            if (key := _usable(path)) is None:
                fresh = folder / f".key.{secrets.token_hex(8)}.tmp"
                with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(key := secrets.token_bytes(_KEY_BYTES))
                os.replace(fresh, path)
        return key
    return None


def _usable(path: Path) -> bytes | None:
    """The key, unless it is missing, cut short, or was open to others, who may know it."""
    try:
        status = path.stat()
        key = path.read_bytes()
    except OSError:
        return None
    private = os.name != "posix" or (not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and status.st_uid == os.getuid())
    return key if private and len(key) == _KEY_BYTES else None
