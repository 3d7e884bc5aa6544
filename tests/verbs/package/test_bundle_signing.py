"""Signed bundles: what the statement and the bill of materials say, by their published schemas, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import EvidenceError, InputError
from normdeploy.verbs.package.evidence_bundle import PROVENANCE, SBOM, scan_folder
from tests.keys import key_pair
from tests.packaged import ADD, edited, given, written


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a signed bundle and its keys."""
    folder = tmp_path_factory.mktemp("signed")
    private, _ = key_pair(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        normdeploy.package(written(folder, ADD), folder / "bundle", feeds=given(), sign=private)
    return folder


def statement(bundle: Path) -> dict[str, Any]:
    lines = (bundle / PROVENANCE).read_text().splitlines()
    assert len(lines) == 1
    told: dict[str, Any] = json.loads(base64.b64decode(json.loads(lines[0])["payload"]))
    return told


def test_the_statement_is_one_of_in_toto_and_slsa(signed: Path) -> None:
    """By the protobufs of in-toto's own package, which know every field and refuse others."""
    told = statement(signed / "bundle")
    predicate = told.pop("predicate")
    parsed = json_format.ParseDict(
        {"type" if k == "_type" else k: v for k, v in told.items()}, statement_pb2.Statement()
    )
    assert (parsed.type, parsed.predicate_type) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    provenance = json_format.ParseDict(predicate, provenance_pb2.Provenance())
    subjects = {s.name: s.digest["sha256"] for s in parsed.subject}
    files = {
        path: hashlib.sha256((signed / "bundle" / path).read_bytes()).hexdigest()
        for path in scan_folder(signed / "bundle")[0]
    }
    assert subjects == {path: digest for path, digest in files.items() if path != PROVENANCE}
    source = hashlib.sha256((signed / "model.onnx").read_bytes()).hexdigest()
    definition = provenance.build_definition
    assert {d.name: d.digest["sha256"] for d in definition.resolved_dependencies} == {"model.onnx": source}
    assert "normdeploy package model.onnx -o bundle" in str(definition.external_parameters["commands"])
    assert definition.internal_parameters["versions"]["numpy"]
    key = json.loads((signed / "bundle" / PROVENANCE).read_text())["signatures"][0]["keyid"]
    assert provenance.run_details.builder.id == f"urn:normdeploy:key:{key}"
    assert not provenance.run_details.metadata.HasField("started_on")  # SOURCE_DATE_EPOCH


def test_the_bill_of_materials_is_one_of_cyclonedx(signed: Path) -> None:
    text = (signed / "bundle" / SBOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = json.loads(text)
    model = told["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "model")
    manifest = (signed / "bundle/manifest.json").read_bytes()
    assert model["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(manifest).hexdigest()}]
    onnx = hashlib.sha256((signed / "model.onnx").read_bytes()).hexdigest()
    assert onnx in {c["hashes"][0]["content"] for c in model["components"]}
    versions = json.loads(manifest)["versions"]
    libraries = {c["name"]: c for c in told["components"] if c["type"] == "library"}
    assert libraries["numpy"]["purl"] == f"pkg:pypi/numpy@{versions['numpy']}"
    assert {"torch", "onnx", "typing-extensions"} <= libraries.keys()  # the last is needed by others alone
    needs = {d["ref"]: d.get("dependsOn", []) for d in told["dependencies"]}
    assert f"numpy=={versions['numpy']}" in needs[f"onnx=={versions['onnx']}"]


def test_the_same_is_the_same_byte_for_byte(signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    normdeploy.package(signed / "model.onnx", tmp_path / "bundle", feeds=given(), sign=signed / "key.pem")
    for path in scan_folder(signed / "bundle")[0]:
        if path != "report.html":
            assert (tmp_path / "bundle" / path).read_bytes() == (signed / "bundle" / path).read_bytes(), path


def test_times_are_told_where_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    private, _ = key_pair(tmp_path, ecdsa=True)
    normdeploy.package(written(tmp_path, ADD), tmp_path / "bundle", feeds=given(), sign=private)
    times = statement(tmp_path / "bundle")["predicate"]["runDetails"]["metadata"]
    assert datetime.fromisoformat(times["startedOn"]) <= datetime.fromisoformat(times["finishedOn"])


def test_recheck_verifies_before_anything_runs(signed: Path) -> None:
    done = CliRunner().invoke(app, ["recheck", str(signed / "bundle"), "--trust-key", str(signed / "key.pub.pem")])
    assert done.exit_code == 0, done.output
    assert "nothing changed" in done.output
    assert "a trusted key signed every file, and none changed since" in done.output
    without = normdeploy.recheck(signed / "bundle")
    assert without
    assert not [c for c in without.changes if c.what == "file"]
    assert "not verified; verify it with --trust" in without.notes[0]


def rewrite(path: str, content: bytes) -> Callable[[Path], None]:
    def spoil(bundle: Path) -> None:
        (bundle / path).unlink()
        (bundle / path).write_bytes(content)

    return spoil


def resigned(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """The statement is changed and its signature is kept."""

    def spoil(bundle: Path) -> None:
        told, inside = json.loads((bundle / PROVENANCE).read_text()), statement(bundle)
        change(inside)
        told["payload"] = base64.b64encode(json.dumps(inside).encode()).decode()
        rewrite(PROVENANCE, json.dumps(told).encode())(bundle)

    return spoil


def in_step(bundle: Path) -> None:
    """A file and its hash in the manifest are changed together."""
    rewrite("README.md", b"other")(bundle)
    told = {"sha256": hashlib.sha256(b"other").hexdigest(), "bytes": 5}
    edited(bundle, lambda manifest: manifest["files"].update({"README.md": told}))


def linked(bundle: Path) -> None:
    (bundle / "README.md").rename(bundle.parent / "outside")
    (bundle / "README.md").symlink_to(bundle.parent / "outside")


SPOILT = {
    "a file": (rewrite("README.md", b"x"), r"README.md was sha256 \w{64}, and is sha256 \w{64}"),
    "a file and its hash": (in_step, "README.md was sha256|manifest.json was sha256"),
    "the bill of materials": (rewrite(SBOM, b"{}"), f"{SBOM} was sha256"),
    "no bill of materials": (lambda b: (b / SBOM).unlink(), f"{SBOM} was .* and is gone"),
    "no signature": (lambda b: (b / PROVENANCE).unlink(), "is not signed: provenance.intoto.jsonl not found"),
    "the statement": (resigned(lambda s: s["subject"].pop()), "was changed afterwards"),
    "a new file": (lambda b: (b / "new").write_text(""), "new was not signed"),
    "a new folder": (lambda b: (b / "new").mkdir(), "new/ was not signed, and is a link or special file"),
    "a link": (linked, "README.md was sha256 .* and is a link"),
    "a linked signature": (
        lambda b: (b / PROVENANCE).rename(b.parent / "p") and (b / PROVENANCE).symlink_to(b.parent / "p"),
        "is not signed",
    ),
    "a pipe for the signature": (lambda b: (b / PROVENANCE).unlink() or os.mkfifo(b / PROVENANCE), "is not signed"),
    "two lines": (lambda b: (b / PROVENANCE).write_bytes((b / PROVENANCE).read_bytes() * 2), "not a signed text"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_not_as_it_was_signed_is_refused(
    signed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spoil, said = SPOILT[name]
    bundle = tmp_path / "bundle"
    shutil.copytree(signed / "bundle", bundle)
    spoil(bundle)
    monkeypatch.setattr(
        "normdeploy.verbs.package.sample_judgement.judge_samples", lambda *a, **k: pytest.fail("it was run")
    )
    with pytest.raises(EvidenceError, match=said):
        normdeploy.recheck(bundle, trust=[signed / "key.pub.pem"])


def test_another_key_is_named_with_the_trusted_one(signed: Path, tmp_path: Path) -> None:
    _, other = key_pair(tmp_path, "other")
    with pytest.raises(EvidenceError, match=r"is signed by \w{16}, but the trusted key is \w{16}"):
        normdeploy.recheck(signed / "bundle", trust=[other])
    assert normdeploy.recheck(signed / "bundle", trust=[other, signed / "key.pub.pem"])


def test_the_signature_of_another_bundle_says_nothing_of_this_one(signed: Path, tmp_path: Path) -> None:
    shutil.copy(signed / "model.onnx", tmp_path / "model.onnx")
    normdeploy.package(tmp_path / "model.onnx", tmp_path / "bundle", feeds=given(5), sign=signed / "key.pem")
    for path in (PROVENANCE, SBOM):
        shutil.copy(signed / "bundle" / path, tmp_path / "bundle" / path)
    with pytest.raises(EvidenceError, match="changed after it was signed"):
        normdeploy.recheck(tmp_path / "bundle", trust=[signed / "key.pub.pem"])


def test_nothing_is_written_with_a_key_that_others_can_read(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    private.chmod(0o644)
    with pytest.raises(InputError, match="can be read or changed by others"):
        normdeploy.package(written(tmp_path, ADD), tmp_path / "bundle", feeds=given(), sign=private)
    assert not (tmp_path / "bundle").exists()


def test_a_signed_bundle_is_replaced_by_an_unsigned_one(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "bundle", tmp_path / "bundle")
    normdeploy.package(signed / "model.onnx", tmp_path / "bundle", feeds=given(), replace=True)
    assert not (tmp_path / "bundle" / PROVENANCE).exists()
    assert not (tmp_path / "bundle" / SBOM).exists()
