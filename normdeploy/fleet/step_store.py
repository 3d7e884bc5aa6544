"""A content-addressed store of what steps made.

    objects/ab/<sha256>    a file that a step read or wrote, by the hash of its bytes
    steps/ab/<key>         the record of a step that was run, by the hash of all that it depended on
    runs/<id>/...          what a run was asked for and found (`normdeploy.fleet.run_history`)
    claims/<key>           who works on a step at this moment

A record appears after all the objects that it names, and only one for a key: whoever comes second reads the first.
Whatever is read is compared with its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import StoreError
from ..evidence.signed_envelope import unverified_payload
from ..storage.onnx_files import hash_file
from .store_backends import StoreBackend

RECORD = "normdeploy/step/1"
# that are read
_RECORD_BYTES = 64 * 2**20
Outcome = Literal["ok", "wrong"]


class DamagedObject(StoreError):
    """An object is missing or is not what its name says; ``digest`` is its name."""

    def __init__(self, message: str, digest: str) -> None:
        super().__init__(message)
        self.digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.digest)


@dataclass(frozen=True)
class StoredFile:
    """A file in the store: the SHA-256 of its bytes, and how many there are."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class StepRecord:
    """What a step that ran to its end depended on and made.

    ``outcome`` is "wrong" where the verb did its work and found the numbers wrong. ``depends`` is what ``key`` is the
    hash of; ``outputs`` are its files, path -> content; ``measures`` numbers for the page: errors, milliseconds.
    ``machine`` and the times say where and when it was made, and are no part of the key.
    """

    key: str
    # the name under which it was run first
    step: str
    outcome: Outcome
    depends: Mapping[str, Any]
    outputs: Mapping[str, StoredFile]
    log: StoredFile
    measures: Mapping[str, float] = field(default_factory=dict)
    # why it is wrong
    reason: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    # UTC, ISO 8601
    started: str = ""
    seconds: float = 0.0
    # bytes of memory of the largest process
    peak: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"schema": RECORD} | asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> StepRecord:
        """
        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        if told["schema"] != RECORD:
            raise ValueError(f"schema {told['schema']!r}")
        values = {name: told[name] for name in cls.__dataclass_fields__}
        if values["outcome"] not in ("ok", "wrong"):
            raise ValueError(f"outcome {values['outcome']!r}")
        outputs = {_require_inner_path(path): _parse_stored(entry) for path, entry in values["outputs"].items()}
        measures = {str(name): float(value) for name, value in values["measures"].items()}
        return cls(**values | {"outputs": outputs, "log": _parse_stored(values["log"]), "measures": measures})


def json_digest(value: Any) -> str:
    """The SHA-256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class StepStore:
    """The objects and records of a place.

    Args:
        seal: what is written in the place of a record's JSON, such as an envelope with a signature.
        opened: the JSON of what ``seal`` wrote; raises StoreError where it is not to be believed. Without it every
            record is, signed or not.
    """

    def __init__(
        self,
        place: StoreBackend,
        seal: Callable[[bytes], bytes] | None = None,
        opened: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.place = place
        self.seal = seal or bytes
        self.opened = opened or unverified_payload

    def read_record(self, key: str) -> StepRecord | None:
        """The record of a key; None where there is none.

        Raises:
            StoreError: it is malformed, of another key, or not to be believed.
        """
        if self.place.local and (size := self.place.size(_step_path(key)) or 0) > _RECORD_BYTES:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} has {size} bytes, more than the {_RECORD_BYTES} of"
                " one"
            )
        data = self.place.read(_step_path(key))
        if data is None:
            return None
        try:
            record = StepRecord.from_json(json.loads(self.opened(data)))
        except StoreError as error:
            raise StoreError(f"the record {key} in the store {self.place.url!r} is refused: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} is malformed ({type(error).__name__}: {error})"
            ) from error
        if record.key != key or json_digest(record.depends) != key:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} is not what its name says: it is of"
                f" {json_digest(record.depends)}"
            )
        return record

    def has_record(self, key: str) -> bool:
        """Whether there is a record of a key, good or not."""
        return self.place.size(_step_path(key)) is not None

    def has_all_outputs(self, record: StepRecord) -> bool:
        """Whether every file that the record names is there, of the right size. Of a place that is far away it is
        believed until one is read."""
        return not self.place.local or all(
            self.place.size(_object_path(f.sha256)) == f.bytes for f in (*record.outputs.values(), record.log)
        )

    def commit(self, record: StepRecord) -> StepRecord:
        """Write a record whose objects are kept; the one that stands there already goes before it."""
        data = self.seal(json.dumps(record.to_json(), sort_keys=True, indent=1).encode())
        for _ in range(3):
            if self.place.create(_step_path(record.key), data):
                return record
            try:
                found = self.read_record(record.key)
            except StoreError:
                self.void_record(record.key)
                continue
            if found is not None:
                return found
        raise StoreError(f"the record {record.key} can't be written to the store {self.place.url!r}: another is there")

    def void_record(self, key: str) -> None:
        """Forget what a step made: its record is damaged, or an object of it."""
        self.place.delete(_step_path(key))

    def put(self, file: Path) -> StoredFile:
        """Keep a file by the hash of its bytes. It must not be changed afterwards."""
        stored = StoredFile(hash_file(file), file.stat().st_size)
        name = _object_path(stored.sha256)
        size = self.place.size(name)
        # cut short by whoever else writes here
        if size not in (None, stored.bytes):
            self.place.delete(name)
        if size != stored.bytes:
            self.place.store_file(name, file)
        return stored

    def get(self, stored: StoredFile, target: Path) -> None:
        """Copy an object into a new file.

        Raises:
            Damaged: it is missing or of other bytes; it is then removed from the store, and ``target`` too.
        """
        name = _object_path(stored.sha256)
        if not self.place.fetch(name, target):
            raise DamagedObject(f"the object {stored.sha256} is not in the store {self.place.url!r}", stored.sha256)
        if (found := hash_file(target)) != stored.sha256:
            size = target.stat().st_size
            target.unlink()
            self.place.delete(name)
            raise DamagedObject(
                f"the object {stored.sha256} in the store {self.place.url!r} is damaged: it has {size} bytes of hash"
                f" {found}, and {stored.bytes} are recorded; it was removed, and what made it is run again",
                stored.sha256,
            )

    def read_bytes(self, stored: StoredFile) -> bytes:
        """A small object.

        Raises:
            Damaged: as ``get``.
        """
        data = self.place.read(_object_path(stored.sha256))
        if data is None or hashlib.sha256(data).hexdigest() != stored.sha256:
            raise DamagedObject(
                f"the object {stored.sha256} in the store {self.place.url!r} is"
                f" {'missing' if data is None else 'damaged'}",
                stored.sha256,
            )
        return data


def _step_path(key: str) -> str:
    return f"steps/{key[:2]}/{key}"


def _object_path(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _parse_stored(entry: Any) -> StoredFile:
    if isinstance(entry, StoredFile):
        stored = entry
    else:
        stored = StoredFile(str(entry["sha256"]), int(entry["bytes"]))
    if len(stored.sha256) != 64 or not set(stored.sha256) <= set("0123456789abcdef"):
        raise ValueError(f"{stored.sha256!r} is no SHA-256")
    return stored


def _require_inner_path(path: Any) -> str:
    """A path that leads out of no folder: a record may have been written by anybody."""
    text = str(path)
    if text.startswith("/") or "\\" in text or os.path.splitdrive(text)[0] or {"", ".", ".."} & set(text.split("/")):
        raise ValueError(f"the path {text!r}")
    return text
