"""Certificates are found by the hash of the file, and a report of another file is never used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

import normdeploy
from normdeploy.errors import InputError
from normdeploy.storage.file_hash import hash_file
from normdeploy.verbs.package.package_options import FoundReport
from tests.packaged import ADD, given, written


@pytest.fixture
def exported(made: Path, tmp_path: Path) -> Path:
    """A folder with an exported file, and its report under another name."""
    folder = tmp_path / "exported"
    folder.mkdir()
    shutil.copy(made / "model.onnx", folder / "net.onnx")
    shutil.copy(made / "export.json", folder / "x.json")
    return folder


def packaged(folder: Path, **options: object) -> tuple[list[str], str]:
    """Names of the certificates in the bundle, and the note about them."""
    bundle = folder.parent / "bundle"
    result = normdeploy.package(folder / "net.onnx", bundle, replace=True, **options)  # type: ignore[arg-type]
    notes = [note for note in result.notes if "certificate" in note]
    assert len(notes) == 1
    return sorted(os.listdir(bundle / "certificates")) if (bundle / "certificates").exists() else [], notes[0]


def test_report_of_export_records_hash_of_its_file(made: Path) -> None:
    digest = hashlib.sha256((made / "model.onnx").read_bytes()).hexdigest()
    assert json.loads((made / "export.json").read_text())["sha256"] == {"output": digest}


def test_report_beside_the_file_is_found_by_hash(exported: Path) -> None:
    # JSON files that are no reports must not matter, not even one that contains the hash.
    digest = hash_file(exported / "net.onnx")
    (exported / "config.json").write_text('{"hidden_size": 8}')
    (exported / "broken.json").write_text(f'{{"sha256": {{"output": "{digest}"')
    (exported / "list.json").write_text(f'["{digest}"]')
    assert packaged(exported) == (["000.json"], "1 certificate from x.json")


def test_report_beside_a_linked_file_is_found(exported: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "links"
    elsewhere.mkdir()
    (elsewhere / "net.onnx").symlink_to(exported / "net.onnx")
    assert packaged(elsewhere)[0] == ["000.json"]


def test_report_of_another_file_beside_it_is_not_used(exported: Path) -> None:
    written(exported, ADD, "net.onnx")
    names, note = packaged(exported, feeds=given())
    assert names == []
    assert note.startswith("no certificates: no report beside the file records its SHA-256")
    assert hash_file(exported / "net.onnx")[:16] in note
    assert "--report-from" in note


def test_given_report_of_changed_file_is_refused(exported: Path) -> None:
    """The norm has its name still, and the file is another."""
    import onnx

    proto = onnx.load(exported / "net.onnx")
    proto.producer_version = "2"
    onnx.save(proto, exported / "net.onnx")
    with pytest.raises(InputError, match=r"records the SHA-256 [0-9a-f]{16}…, but the packaged file has [0-9a-f]{16}…"):
        packaged(exported, report_from=exported / "x.json")


def test_given_report_of_older_version_is_used_if_its_norms_are_in_the_file(exported: Path) -> None:
    document = json.loads((exported / "x.json").read_text())
    del document["sha256"]
    (exported / "x.json").write_text(json.dumps(document))
    assert packaged(exported, report_from=exported / "x.json")[0] == ["000.json"]


def test_other_places_are_asked_only_if_no_report_lies_beside_the_file(exported: Path) -> None:
    data = (exported / "x.json").read_bytes()
    asked = []

    def find_report(digest: str) -> FoundReport:
        asked.append(digest)
        return FoundReport(data, "the store")

    packaged(exported, find_report=find_report)
    assert asked == []
    (exported / "x.json").unlink()
    assert packaged(exported, find_report=find_report) == (["000.json"], "1 certificate from the store")
    assert asked == [hash_file(exported / "net.onnx")]
