"""The store gives the report of a file that a step wrote, by the file's hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet.fleet_commands import STORE
from normdeploy.fleet.step_store import StepRecord, StepStore, json_digest
from normdeploy.fleet.store_backends import FolderBackend
from normdeploy.fleet.stored_reports import find_stored_report

MODEL = b"the exported file"
DIGEST = hashlib.sha256(MODEL).hexdigest()


def report_of(digest: str) -> bytes:
    return json.dumps({"schema": "normdeploy/report/1", "sha256": {"output": digest}, "norms": []}).encode()


def committed(folder: Path, name: str, **files: bytes) -> StepRecord:
    """A record whose step wrote these files, with "." for "_" in their names."""
    store = StepStore(FolderBackend(folder / "store"))
    outputs = {}
    for number, (file, data) in enumerate(files.items()):
        path = folder / f"{name}{number}"
        path.write_bytes(data)
        outputs[file.replace("_", ".")] = store.put(path)
    log = folder / f"{name}.log"
    log.write_bytes(b"")
    depends = {"argv": [name]}
    return store.commit(StepRecord(json_digest(depends), name, "ok", depends, outputs, store.put(log)))


def test_report_of_the_step_that_wrote_the_file(tmp_path: Path) -> None:
    committed(tmp_path, "other", model_onnx=b"another file", report_json=report_of("0" * 64))
    committed(tmp_path, "bundle", model_onnx=MODEL)
    committed(tmp_path, "export", model_onnx=MODEL, report_json=report_of(DIGEST))
    found = find_stored_report(DIGEST, tmp_path / "store")
    assert found is not None
    assert found.data == report_of(DIGEST)
    assert find_stored_report("1" * 64, tmp_path / "store") is None


def test_report_that_records_another_hash_is_not_used(tmp_path: Path) -> None:
    committed(tmp_path, "export", model_onnx=MODEL, report_json=report_of("0" * 64))
    assert find_stored_report(DIGEST, tmp_path / "store") is None


def test_damaged_records_and_reports_are_passed_over(tmp_path: Path) -> None:
    damaged = committed(tmp_path, "cut", model_onnx=MODEL, report_json=report_of(DIGEST))
    for path in (tmp_path / "store" / "steps").rglob(damaged.key):
        path.unlink()
        path.write_bytes(b"{")
    assert find_stored_report(DIGEST, tmp_path / "store") is None
    changed = committed(tmp_path, "changed", model_onnx=MODEL, report_json=report_of(DIGEST))
    for path in (tmp_path / "store" / "objects").rglob(changed.outputs["report.json"].sha256):
        path.unlink()
        path.write_bytes(report_of(DIGEST) + b" ")
    assert find_stored_report(DIGEST, tmp_path / "store") is None


def test_missing_store_is_an_error_only_if_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    assert find_stored_report(DIGEST) is None
    with pytest.raises(InputError, match="store not found"):
        find_stored_report(DIGEST, tmp_path / "store")
    committed(tmp_path, "export", model_onnx=MODEL, report_json=report_of(DIGEST))
    assert find_stored_report(DIGEST) is not None
