"""``--certificate``: refused combinations, and a certificate that belongs to the written file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError, NormdeployError
from normdeploy.storage.file_hash import hash_file
from tests.packaged import given, written

RMS = """g (float[n, 3] x) => (float[n, 3] y)
    <int64[1] axes = {-1}, float eps = {0.00001}, float[3] w = {1.5, 2.5, -3.5}>
    { s = Mul(x, x) m = ReduceMean(s, axes) v = Add(m, eps) r = Sqrt(v) n = Div(x, r) y = Mul(n, w) }"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path, RMS)


def run_optimize(source: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["optimize", str(source), "-o", str(source.parent / "out.onnx"), *options])
    if done.exception is not None:
        assert isinstance(done.exception, NormdeployError)
    return done.exit_code, str(done.exception)


@pytest.mark.parametrize("option", ["precision", "quantize"])
def test_other_number_types_are_refused_before_any_work(source: Path, option: str) -> None:
    value = {"precision": "fp16", "quantize": "int8"}[option]
    certificate = source.parent / "c.json"
    code, said = run_optimize(source, "--certificate", str(certificate), f"--{option}", value)
    assert code == 1
    assert f"--certificate can't be combined with --{option} {value}" in said
    assert sorted(os.listdir(source.parent)) == ["model.onnx"]


@pytest.mark.parametrize("name", ["out.onnx", "model.onnx", "report.json"])
def test_certificate_never_replaces_another_file(source: Path, name: str) -> None:
    report = source.parent / "report.json"
    code, said = run_optimize(source, "--certificate", str(source.parent / name), "--report", str(report))
    assert code == 1
    assert said.startswith(f"the certificate {str(source.parent / name)!r} would replace")
    assert sorted(os.listdir(source.parent)) == ["model.onnx"]


def test_certificate_never_replaces_weights_or_the_source_in_python(source: Path) -> None:
    before = source.read_bytes()
    output = source.parent / "out.onnx"
    with pytest.raises(NormdeployError, match="is not a certificate"):
        normdeploy.optimize(source, output, certificate=source)
    with pytest.raises(NormdeployError, match="would replace the external data"):
        normdeploy.optimize(source, output, certificate=source.parent / "w.data", external_data_name="w.data")
    assert source.read_bytes() == before
    assert sorted(os.listdir(source.parent)) == ["model.onnx"]
    certificate = source.parent / "c.json"
    normdeploy.optimize(source, output, certificate=certificate)
    normdeploy.optimize(source, output, certificate=certificate)


def test_certificate_in_missing_folder_is_refused_before_any_work(source: Path) -> None:
    code, said = run_optimize(source, "--certificate", str(source.parent / "none" / "c.json"))
    assert code == 1
    assert "the folder 'none' does not exist" in said
    assert not (source.parent / "out.onnx").exists()


def test_certificate_without_output_is_refused(source: Path) -> None:
    with pytest.raises(InputError, match="no output was given; pass output="):
        normdeploy.optimize(source, certificate=source.parent / "c.json")


def test_python_refuses_to_replace_the_model(source: Path) -> None:
    output = source.parent / "out.onnx"
    with pytest.raises(NormdeployError, match="would replace the model"):
        normdeploy.optimize(source, output, certificate=output)


def test_folders_are_refused(source: Path) -> None:
    folder = source.parent
    arguments = ["export", str(folder), "-o", str(folder / "out"), "--part", "all"]
    done = CliRunner().invoke(app, [*arguments, "--certificate", str(folder / "c.json")])
    assert done.exit_code == 1
    assert "--certificate writes the certificate of one file" in str(done.exception)


def test_certificate_names_hashes_of_model_source_and_data(source: Path) -> None:
    folder = source.parent
    proto = onnx.load(source)
    onnx.save(proto, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert run_optimize(source, "--certificate", str(folder / "c.json"))[0] == 0
    document = json.loads((folder / "c.json").read_text())
    assert document["model"]["sha256"] == hash_file(folder / "out.onnx")
    assert document["source"]["sha256"] == hash_file(source)


def test_certificate_is_same_with_and_without_report(source: Path) -> None:
    folder = source.parent
    run_optimize(source, "--certificate", str(folder / "c.json"))
    run_optimize(source, "--certificate", str(folder / "d.json"), "--report", str(folder / "r.json"), "-q")
    assert (folder / "c.json").read_bytes() == (folder / "d.json").read_bytes()
    assert str(folder) not in (folder / "c.json").read_text()


def test_certificate_of_file_without_norms_has_no_rewrites(tmp_path: Path) -> None:
    source = written(tmp_path, "g (float[n, 3] x) => (float[n, 3] y) { y = Neg(x) }")
    assert run_optimize(source, "--certificate", str(tmp_path / "c.json"))[0] == 0
    assert json.loads((tmp_path / "c.json").read_text())["rewrites"] == []


def test_bundle_has_certificate_and_recheck_compares_its_hash(source: Path) -> None:
    folder = source.parent
    run_optimize(source, "--certificate", str(folder / "c.json"), "--report", str(folder / "r.json"))
    bundle = folder / "bundle"
    made = normdeploy.package(folder / "out.onnx", bundle, feeds=given())
    assert "certificate.json holds the nodes before each rewrite, from c.json" in made.notes
    copied = bundle / "certificate.json"
    assert copied.read_bytes() == (folder / "c.json").read_bytes()
    copied.write_text(copied.read_text().replace("exact", "EXACT", 1))
    (change,) = normdeploy.recheck(bundle).changes
    assert (change.name, change.worse) == ("certificate.json", True)


def test_certificate_of_another_file_is_not_packaged(source: Path) -> None:
    folder = source.parent
    run_optimize(source, "--certificate", str(folder / "c.json"))
    proto = onnx.load(folder / "out.onnx")
    proto.producer_version = "2"
    onnx.save(proto, folder / "out.onnx")
    normdeploy.package(folder / "out.onnx", folder / "bundle", feeds=given())
    assert not (folder / "bundle" / "certificate.json").exists()
