"""Write a copy of an ExportedProgram's archive that can't run code when torch loads it.

``torch.export.load`` runs code from a crafted file in many places. It unpickles ``data/sample_inputs/model.pt``,
weights with the flag ``use_pickle``, TorchBind constants and opaque constants. It evaluates every ``expr_str``
(``sympy.sympify``) and executes ``guards_code`` on the first call. It imports any module that a tree spec names. It
takes any attribute of torch as a node's target (``torch.os.system``), and it loads the libraries under
``data/aotinductor``. The copy contains only parts that this module has checked. A file with a part that can't be
checked requires trust.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema

from ..errors import LoadError
from .composite_file import PartCollector
from .file_kinds import PROGRAM_JSON, archive_root, read_entry
from .operator_allowlist import OperatorAllowlist
from .schema_check import require_schema
from .shape_expressions import DisallowedExpression, SizeGuard, require_allowed_expression, split_words
from .torch_pickles import find_foreign_globals, join_names

_SAMPLES = "data/sample_inputs/model.pt"
_WEIGHTS = "data/weights"
_CONSTANTS = "data/constants"
_CONFIGS = {_WEIGHTS: f"{_WEIGHTS}/model_weights_config.json", _CONSTANTS: f"{_CONSTANTS}/model_constants_config.json"}
_CARRIED = ("archive_format", "archive_version", ".data/version", "byteorder")
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")

# Matches the name of a class in a tree spec.
_CLASS = re.compile(r'"type": *"(\w+(?:\.\w+)+)"')
# Builtins that are allowed as the default_factory of a defaultdict in the inputs.
_FACTORIES = split_words("list dict set int float str bool tuple")


class ArchiveFindings:
    """Checked parts of one archive, and the reasons why it can't be loaded without trust.

    Attributes:
        reasons: one sentence for each refused part.
        guards: checked size guards.
        classes: qualified names of the classes of inputs and outputs, without Python's own classes.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.guards: list[SizeGuard] = []
        # Qualified names of the classes of inputs and outputs.
        self.classes: set[str] = set()

    def add_refusal(self, part: str, does: str) -> None:
        """Record that ``part`` requires trust. ``does`` describes the effect of the part, for the message."""
        self.reasons.append(f"{part} {does}")


def sanitize_archive(
    path: Path, archive: zipfile.ZipFile, copy: PartCollector, operators: OperatorAllowlist
) -> ArchiveFindings:
    """Write the checked parts of ``archive`` to ``copy``. Nothing is written if a part is refused.

    Weights are views of the mapped file, which must not be truncated while the copy is in use.

    Returns:
        The findings. Their ``reasons`` are empty if the copy was written.

    Raises:
        LoadError: a part is missing, damaged, or does not match torch's schema.
    """
    findings = ArchiveFindings()
    root = archive_root(archive)
    names = set(archive.namelist())
    program = _read_json_entry(archive, root, PROGRAM_JSON, path)
    require_schema(schema.ExportedProgram, program, PROGRAM_JSON, path)
    _check_program_json(program, operators, findings)
    written: dict[str, bytes] = {}
    payloads: set[str] = set()
    for folder, config_name in _CONFIGS.items():
        if f"{root}/{folder}/model.pt" in names:
            raise LoadError(
                f"{path} keeps its weights in an older torch's format ({folder}/model.pt): load it with "
                "torch.export.load and save it again with torch.export.save, in a newer torch"
            )
        config = _read_json_entry(archive, root, config_name, path)
        require_schema(schema.PayloadConfig, config, config_name, path)
        payloads |= {f"{folder}/{name}" for name in _check_payload_config(config, folder, findings)}
        _require_payload_bytes(
            config, folder, {name: info.file_size for name, info in archive.NameToInfo.items()}, root, path
        )
        written[config_name] = json.dumps(config).encode()
    written[_SAMPLES] = _rewrite_example_inputs(read_entry(archive, f"{root}/{_SAMPLES}", path), findings)
    if findings.reasons:
        return findings
    written[PROGRAM_JSON] = json.dumps(program | {"guards_code": []}).encode()
    written |= {name: read_entry(archive, f"{root}/{name}", path) for name in _CARRIED if f"{root}/{name}" in names}
    assert archive.fp is not None
    mapped = memoryview(mmap.mmap(archive.fp.fileno(), 0, access=mmap.ACCESS_READ))
    # ``copy`` is not a complete file object, but ZipFile needs only write and flush.
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as out:  # type: ignore[call-overload]
        for name, data in written.items():
            out.writestr(f"model/{name}", data)
        for name in sorted(payloads):
            _copy_entry(archive, mapped, f"{root}/{name}", out, f"model/{name}", path)
    return findings


def _copy_entry(
    archive: zipfile.ZipFile, mapped: memoryview, name: str, out: zipfile.ZipFile, target: str, path: Path
) -> None:
    """Copy an entry's bytes as a view of the file. A compressed entry is unpacked into memory."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise LoadError(
            f"{path} lacks {name.partition('/')[2]!r}, which its configuration names: it is incomplete; save it again"
        ) from None
    try:
        if info.compress_type != zipfile.ZIP_STORED:
            data = memoryview(archive.read(name))
        else:
            data = _uncompressed_data(archive, mapped, info)
        with out.open(target, "w", force_zip64=True) as sink:
            sink.write(data)
        if out.getinfo(target).CRC != info.CRC:
            raise zipfile.BadZipFile("its checksum does not match")
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
        raise LoadError(
            f"{path}: the entry {name!r} can't be read ({error}): the file is damaged; copy or save it again"
        ) from error


def _uncompressed_data(archive: zipfile.ZipFile, mapped: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """Return a view of an uncompressed entry's data, after its local header.

    The header consists of 30 bytes, the name and the extra field (APPNOTE.TXT 4.3.7).
    """
    # Opening the entry makes zipfile check that its local header matches the table of contents.
    with archive.open(info):
        pass
    lengths = struct.unpack_from("<HH", mapped, info.header_offset + 26)
    start = info.header_offset + 30 + sum(lengths)
    if start + info.file_size > mapped.nbytes:
        raise EOFError(f"it ends at byte {start + info.file_size} of {mapped.nbytes}")
    return mapped[start : start + info.file_size]


def _read_json_entry(archive: zipfile.ZipFile, root: str, name: str, path: Path) -> dict[str, Any]:
    try:
        value = _with_cpu_devices(json.loads(read_entry(archive, f"{root}/{name}", path)))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: {name} is not JSON ({error}): the file is damaged; save it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: {name} holds a {type(value).__name__} instead of an object: the file is damaged")
    return value


def _check_program_json(program: dict[str, Any], operators: OperatorAllowlist, findings: ArchiveFindings) -> None:
    for key, value in _iter_strings(program):
        if key == "expr_str":
            try:
                require_allowed_expression(value)
            except DisallowedExpression as error:
                findings.add_refusal(
                    f"the shape expression {value[:100]!r} in {PROGRAM_JSON}",
                    f"would be evaluated as code: it contains {error}",
                )
        elif key in ("target", "as_operator") and not operators.is_allowed(value):
            findings.add_refusal(
                f"the node target {value[:100]!r} in {PROGRAM_JSON}",
                "is not a torch operator on tensors: running the graph would call it. If one of your modules "
                "registers it, pass --import with that module",
            )
        elif key in ("in_spec", "out_spec"):
            for name in _find_pytree_imports(value):
                findings.add_refusal(f"the tree spec {key} in {PROGRAM_JSON}", f"would import {name}")
            findings.classes |= set(_CLASS.findall(value))
    for text in program.get("guards_code", []):
        try:
            findings.guards.append(SizeGuard(text))
        except DisallowedExpression as error:
            findings.add_refusal(
                f"the guard {text[:100]!r} in guards_code of {PROGRAM_JSON}",
                f"would be executed as code: it contains {error}",
            )


def _with_cpu_devices(value: Any) -> Any:
    """Replace every device in the JSON by the CPU, so that a program exported on a GPU loads on any machine."""
    if isinstance(value, dict):
        if value.keys() == {"type", "index"}:
            return {"type": "cpu", "index": None}
        return {key: _with_cpu_devices(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_cpu_devices(item) for item in value]
    return value


def _iter_strings(value: Any) -> Iterator[tuple[str, str]]:
    """Yield every (key, string) in nested JSON."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from ((key, text) for key, text in item.items() if isinstance(text, str))
        stack.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())


def _find_pytree_imports(spec: str) -> list[str]:
    """Find the names that loading a pytree spec would import: a defaultdict's factory, or the class of an enum key."""
    imports: list[str] = []
    stack: list[Any] = [spec]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            with contextlib.suppress(ValueError, RecursionError):
                # Most strings are plain names. Only a context is a string that itself contains JSON.
                parsed = json.loads(item)
                stack.extend([parsed] if isinstance(parsed, dict | list) else [])
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            if "__enum__" in item:
                imports.append(str(item.get("fqn")))
            factory = item.get("default_factory_module"), item.get("default_factory_name")
            if factory != (None, None) and not (factory[0] == "builtins" and factory[1] in _FACTORIES):
                imports.append(f"{factory[0]}.{factory[1]}")
            stack.extend(item.values())
    return imports


def _check_payload_config(config: dict[str, Any], folder: str, findings: ArchiveFindings) -> set[str]:
    for name, meta in config["config"].items():
        part = f"{name!r} ({folder}/{meta['path_name']})"
        if meta["use_pickle"]:
            findings.add_refusal(part, "is marked use_pickle: it would be unpickled, which runs any code in the pickle")
        elif not _PAYLOAD.fullmatch(meta["path_name"]):
            findings.add_refusal(
                part,
                "is a custom object (TorchBind or opaque): it would be unpickled, which runs any code in the pickle",
            )
    return {meta["path_name"] for meta in config["config"].values()}


def _require_payload_bytes(config: dict[str, Any], folder: str, sizes: dict[str, int], root: str, path: Path) -> None:
    """Require that each tensor has bytes. For an empty entry, torch would make zeros of the stated size, which may be
    huge.
    """
    for name, meta in config["config"].items():
        shape = [size.get("as_int", 1) for size in (meta.get("tensor_meta") or {"sizes": [{"as_int": 0}]})["sizes"]]
        if sizes.get(f"{root}/{folder}/{meta['path_name']}") == 0 and 0 not in shape:
            raise LoadError(
                f"{path} holds {name!r} of the shape {shape}, but its {folder}/{meta['path_name']} has 0 bytes: it was "
                "saved without its weights"
            )


def _rewrite_example_inputs(data: bytes, findings: ArchiveFindings) -> bytes:
    """Read the example inputs as data, without unpickling code, and write them again."""
    if not data:
        return data
    try:
        samples = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:
        # torch raises UnpicklingError, RuntimeError, EOFError and other errors for such bytes. After such an error,
        # torch.export.load would unpickle the same bytes in full.
        named = _find_sample_globals(data)
        if named:
            what = f"it would import {join_names(named)}"
        else:
            what = "it can't be read as tensors"
        findings.add_refusal(
            f"the example inputs ({_SAMPLES})", f"are a pickle that contains more than tensors: {what}"
        )
        return b""
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return buffer.getvalue()


def _find_sample_globals(data: bytes) -> list[str]:
    """Find the globals of a torch.save file in memory, which may be crafted.

    The function never raises, because the refusal must be reported even if the bytes are damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
            if entry.file_size <= len(data):
                return find_foreign_globals(io.BytesIO(archive.read(entry)))
            return []
    except Exception:
        return find_foreign_globals(io.BytesIO(data))
