"""The record in a file: how it was made, nothing of the machine, and nothing is followed that is malformed."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from normdeploy.errors import GraphError
from normdeploy.exporting.exporter import export_to_proto, read_record, write_record
from normdeploy.graphs.simplification import simplify
from normdeploy.model import Dim, InputSpec, LoadedModel
from tests.test_export import BATCH, SEQ, Net, model, spec


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def written(**load: object) -> onnx.ModelProto:
    proto = onnx.helper.make_model(onnx.GraphProto(name="g"))
    onnx.helper.set_model_props(proto, {"other": "kept"})
    inputs = (
        spec("ids", BATCH, SEQ, dtype="int64"),
        InputSpec("x", "bfloat16", (BATCH, Dim.from_size(3)), (-0.5, 0.1)),
    )
    write_record(
        proto,
        LoadedModel(program=None, inputs=inputs, outputs=("y",), kind="state_dict", sha256="12ab", recorded=dict(load)),
        {"opset": 21},
    )  # type: ignore[arg-type]
    return proto


def altered(proto: onnx.ModelProto, change: dict[str, object]) -> onnx.ModelProto:
    entry = next(p for p in proto.metadata_props if p.key == "normdeploy")
    value = json.loads(entry.value)
    value.update(change)
    entry.value = json.dumps(value)
    return proto


def test_record_says_how_the_file_was_made(state: Path) -> None:
    found = read_record(written(model="pkg:build", imports=["pkg"], trust=True))
    assert found["inputs"] == (
        spec("ids", BATCH, SEQ, dtype="int64"),
        InputSpec("x", "bfloat16", (BATCH, Dim.from_size(3)), (-0.5, 0.1)),
    )
    assert found["outputs"] == ["y"]
    assert found["model"] == {"sha256": "12ab", "kind": "state_dict"}
    assert found["load"] == {"model": "pkg:build", "imports": ["pkg"], "trust": True}
    assert found["export"] == {"opset": 21}
    assert found["versions"].keys() == {"torch", "onnx", "normdeploy"}


def test_record_is_replaced_and_survives_simplification(state: Path) -> None:
    made = model(Net(), spec("x", BATCH, SEQ, 8))
    proto = export_to_proto(made)
    assert read_record(proto) == {}
    write_record(proto, made, {"opset": 20})
    write_record(proto, made, {"opset": 21})
    found = read_record(simplify(proto).proto)
    assert found["export"] == {"opset": 21}
    assert len([p for p in proto.metadata_props if p.key == "normdeploy"]) == 1


def test_record_holds_no_folder_of_this_machine(state: Path) -> None:
    proto = written(state={"file": "/home/me/w.pt", "list": ["C:\\Users\\me\\x", Path("/a/b")]}, model="pkg.sub:build")
    assert read_record(proto)["load"] == {"state": {"file": "w.pt", "list": ["x", "b"]}, "model": "pkg.sub:build"}
    assert {p.key: p.value for p in proto.metadata_props}["other"] == "kept"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "malformed"),
        ("[]", "malformed"),
        ("{}", "malformed"),
        ('{"record": {}, "hmac": ""}', "malformed"),
        ('{"record": 5, "hmac": ""}', "malformed"),
        ("[" * 100_000, "malformed"),
        ('{"schema": 3}', "schema 3, but this version reads 2"),
        ('{"schema": 2, "load": "\\ud800"}', "malformed"),
    ],
)
def test_malformed_records(state: Path, text: str, said: str) -> None:
    proto = onnx.ModelProto()
    onnx.helper.set_model_props(proto, {"normdeploy": text})
    with pytest.raises(GraphError, match=said):
        read_record(proto)


@pytest.mark.parametrize(
    "load",
    [
        {"inputs": "x[3]"},
        {"inputs": [3]},
        {"dims": ["a" * 5000]},
        {"dims": {"a": 1}},
        {"key": ["a"]},
        {"model": 5},
        {"model_args": [1]},
        {"imports": "os"},
        {"key": "a" * 5000},
        {"eval": "yes"},
    ],
)
def test_what_is_followed_whoever_wrote_it_is_checked(state: Path, load: dict[str, object]) -> None:
    with pytest.raises(GraphError, match="malformed"):
        read_record(altered(written(), {"load": load}))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x", "dtype": "O", "shape": [], "range": None},
        {"name": "x", "dtype": "float32", "shape": [{"name": "a", "min": 3, "opt": 2, "max": 4}], "range": None},
        {"name": "x", "dtype": "float32", "shape": [{"name": "a", "min": -1, "opt": 2, "max": 4}], "range": None},
        {"name": "x", "dtype": "float32", "shape": [{"name": ["a"], "min": 1, "opt": 2, "max": 4}], "range": None},
        {"name": "x", "dtype": "float32", "shape": [{"nome": "a", "min": 1, "opt": 2, "max": 4}], "range": None},
        {"name": "x", "dtype": "float32", "shape": [], "range": ["a", "b"]},
        {"name": "x", "dtype": "float32", "shape": [], "range": [1]},
    ],
)
def test_records_with_impossible_inputs(state: Path, change: dict[str, object]) -> None:
    with pytest.raises(GraphError, match="malformed"):
        read_record(altered(written(), {"inputs": [change]}))


def test_record_names_the_exporter_only_if_it_is_not_torch(state: Path) -> None:
    proto = written()
    assert "traced_by" not in read_record(proto)["model"]
    traced = LoadedModel(program=None, inputs=(), outputs=("y",), kind="live module", traced_by="other 1.0")  # type: ignore[arg-type]
    write_record(proto, traced, {})
    assert read_record(proto)["model"]["traced_by"] == "other 1.0"
