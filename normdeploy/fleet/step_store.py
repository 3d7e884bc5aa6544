"""Store the results of steps by content.

    objects/ab/<sha256>: a file that a step read or wrote, by the hash of its bytes
    steps/ab/<key>:      the record of a step, by the hash of everything that it depended on
    runs/<id>/...:       the request and results of a run (`normdeploy.fleet.run_history`)
    claims/<key>:        the driver that is working on a step

A record is written after all objects that it names. There is only one record for each key: a second writer gets the
record that the first writer stored. All objects are compared with their hashes when they are read.
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
from ..storage.file_hash import hash_file
from .store_backends import StoreBackend

RECORD = "normdeploy/step/1"
# Maximum size of a record in bytes.
_RECORD_BYTES = 64 * 2**20
Outcome = Literal["ok", "wrong"]


class DamagedObject(StoreError):
    """Error for an object that is missing or whose content does not match its name. ``digest`` is the object's name."""

    def __init__(self, message: str, digest: str) -> None:
        super().__init__(message)
        self.digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.digest)


@dataclass(frozen=True)
class StoredFile:
    """File in the store: the SHA-256 of its bytes, and its size in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class StepRecord:
    """Dependencies and outputs of a step that ran to its end.

    Attributes:
        key: hash of ``depends``.
        step: name under which the step ran first.
        outcome: "ok", or "wrong" if the verb did its work and found wrong numbers.
        depends: content of the key: everything that the step depends on.
        outputs: path → stored file.
        log: stored text that the verb printed.
        measures: numbers for the page: errors, milliseconds.
        reason: reason why the outcome is "wrong".
        machine: description of the machine that ran the step; not part of the key.
        started: time of the start in UTC, as ISO 8601.
        seconds: duration of the run.
        peak: memory of the largest process in bytes.
    """

    key: str
    step: str
    outcome: Outcome
    depends: Mapping[str, Any]
    outputs: Mapping[str, StoredFile]
    log: StoredFile
    measures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    seconds: float = 0.0
    peak: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert the record to a JSON object.

        Returns:
            the object, with its schema.
        """
        return {"schema": RECORD} | asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> StepRecord:
        """Read a record from a JSON object.

        Returns:
            the record.

        Raises:
            KeyError, TypeError, ValueError: the object is not a valid record.
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
    """Hash a JSON value in its canonical form.

    Returns:
        SHA-256 in hexadecimal.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class StepStore:
    """Manage the objects and records in a backend.

    Args:
        seal: function that converts a record's JSON to the stored bytes, such as an envelope with a signature. None
            stores the JSON.
        opened: function that returns the JSON from the bytes that ``seal`` made, and raises StoreError for a record
            that is not trusted. None trusts every record, signed or not.
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
        """Read the record of a key.

        Returns:
            the record; None if there is none.

        Raises:
            StoreError: the record is malformed, belongs to another key, or is not trusted.
        """
        if self.place.local and (size := self.place.size(_step_path(key)) or 0) > _RECORD_BYTES:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} has {size} bytes; the limit is {_RECORD_BYTES}"
            )
        data = self.place.read(_step_path(key))
        if data is None:
            return None
        try:
            record = StepRecord.from_json(json.loads(self.opened(data)))
        except StoreError as error:
            raise StoreError(f"the record {key} in the store {self.place.url!r} is rejected: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} is malformed ({type(error).__name__}: {error})"
            ) from error
        if record.key != key or json_digest(record.depends) != key:
            raise StoreError(
                f"the record {key} in the store {self.place.url!r} does not match its name: its key is "
                f"{json_digest(record.depends)}"
            )
        return record

    def has_record(self, key: str) -> bool:
        """Return True if a key has a record, valid or not.

        Returns:
            False if nothing is stored under the key.
        """
        return self.place.size(_step_path(key)) is not None

    def has_all_outputs(self, record: StepRecord) -> bool:
        """Return True if every file that the record names exists with the right size.

        Returns:
            for a remote store always True, because its files are checked when they are read.
        """
        return not self.place.local or all(
            self.place.size(_object_path(f.sha256)) == f.bytes for f in (*record.outputs.values(), record.log)
        )

    def commit(self, record: StepRecord) -> StepRecord:
        """Write a record whose objects are already stored. An existing valid record is not replaced.

        Returns:
            the record that is in the store.

        Raises:
            StoreError: the record can't be written.
        """
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
        raise StoreError(
            f"can't write the record {record.key} to the store {self.place.url!r}: another record with this name exists"
        )

    def void_record(self, key: str) -> None:
        """Delete the record of a step, because the record or an object of it is damaged."""
        self.place.delete(_step_path(key))

    def put(self, file: Path) -> StoredFile:
        """Store a file under the hash of its bytes. The file must not be changed afterwards.

        Returns:
            hash and size.
        """
        stored = StoredFile(hash_file(file), file.stat().st_size)
        name = _object_path(stored.sha256)
        size = self.place.size(name)
        # If the object has another size, it is incomplete, because another writer may have been killed.
        if size not in (None, stored.bytes):
            self.place.delete(name)
        if size != stored.bytes:
            self.place.store_file(name, file)
        return stored

    def get(self, stored: StoredFile, target: Path) -> None:
        """Copy an object into a new file.

        Raises:
            DamagedObject: the object is missing or does not match its hash. If it does not match, the object and
                ``target`` are removed.
        """
        name = _object_path(stored.sha256)
        if not self.place.fetch(name, target):
            raise DamagedObject(f"the object {stored.sha256} is not in the store {self.place.url!r}", stored.sha256)
        if (found := hash_file(target)) != stored.sha256:
            size = target.stat().st_size
            target.unlink()
            self.place.delete(name)
            raise DamagedObject(
                f"the object {stored.sha256} in the store {self.place.url!r} is damaged: it has {size} "
                f"bytes and hash {found}, but {stored.bytes} bytes are recorded; it was removed, and its "
                "step will be rerun",
                stored.sha256,
            )

    def read_bytes(self, stored: StoredFile) -> bytes:
        """Read a small object.

        Returns:
            its bytes.

        Raises:
            DamagedObject: the object is missing or does not match its hash.
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
        raise ValueError(f"{stored.sha256!r} is not a SHA-256 hash")
    return stored


def _require_inner_path(path: Any) -> str:
    """Check that a path of a record stays inside its folder, because anybody may have written the record."""
    text = str(path)
    if text.startswith("/") or "\\" in text or os.path.splitdrive(text)[0] or {"", ".", ".."} & set(text.split("/")):
        raise ValueError(f"the path {text!r} leaves its folder")
    return text
