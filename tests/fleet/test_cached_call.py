"""One verb with a store: what is damaged or forged there is told and made again at once, and never served."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normdeploy.cli.app import app
from normdeploy.fleet import cached_call
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.signed_store import SIGN, TRUST, open_signed_store
from normdeploy.fleet.step_store import StepRecord, StepStore, StoredFile
from normdeploy.fleet.store_backends import FolderBackend
from tests.keys import key_pair


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cached_call, "LocalPool", lambda store, size: LocalPool(store, size, ForkClient("tests.fleet.toy", ()))
    )
    for name in (SIGN, TRUST):
        monkeypatch.delenv(name, raising=False)


def export(folder: Path, model: str = "a.pt2") -> tuple[cached_call.CachedResult, bytes]:
    """What the call says, and the file that it wrote."""
    (folder / "out.onnx").unlink(missing_ok=True)
    kept = cached_call.call_with_cache("export", {model: folder / model}, {}, folder / "store", folder / "out.onnx")
    return kept, (folder / "out.onnx").read_bytes()


def record_file(folder: Path, record: StepRecord) -> Path:
    return folder / "store/steps" / record.key[:2] / record.key


def object_file(folder: Path, stored: StoredFile) -> Path:
    return folder / "store/objects" / stored.sha256[:2] / stored.sha256


def written(path: Path, data: bytes) -> None:
    """A new file in its place: the old one may be a link to what somebody else reads."""
    path.unlink()
    path.write_bytes(data)


def record_cut(folder: Path, record: StepRecord) -> None:
    path = record_file(folder, record)
    written(path, path.read_bytes()[:100])


def record_empty(folder: Path, record: StepRecord) -> None:
    written(record_file(folder, record), b"")


def record_of_another(folder: Path, record: StepRecord) -> None:
    other, _ = export(folder, "b.pt2")
    written(record_file(folder, record), record_file(folder, other.record).read_bytes())


def record_of_other_outputs(folder: Path, record: StepRecord) -> None:
    """Its objects are not there."""
    stored = StoredFile("0" * 64, 5)
    told = replace(record, outputs={**record.outputs, "model.onnx": stored}).to_json()
    written(record_file(folder, record), json.dumps(told).encode())


def record_without(name: str) -> Callable[[Path, StepRecord], None]:
    def damage(folder: Path, record: StepRecord) -> None:
        outputs = {n: stored for n, stored in record.outputs.items() if n != name}
        written(record_file(folder, record), json.dumps(replace(record, outputs=outputs).to_json()).encode())

    return damage


def flipped(name: str) -> Callable[[Path, StepRecord], None]:
    def damage(folder: Path, record: StepRecord) -> None:
        path = object_file(folder, record.outputs[name] if name != "log" else record.log)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        written(path, bytes(data))

    return damage


def cut(folder: Path, record: StepRecord) -> None:
    path = object_file(folder, record.outputs["model.onnx"])
    written(path, path.read_bytes()[:-1])


def gone(folder: Path, record: StepRecord) -> None:
    object_file(folder, record.outputs["model.onnx"]).unlink()


def several(folder: Path, record: StepRecord) -> None:
    for name in ("model.onnx", "log", "report.json"):
        flipped(name)(folder, record)


DAMAGES = {
    "record cut": (record_cut, "is malformed"),
    "record empty": (record_empty, "is malformed"),
    "record of another": (record_of_another, "does not match its name"),
    "record of other outputs": (record_of_other_outputs, "the store lacks files"),
    "record without the file": (record_without("model.onnx"), "lacks model.onnx"),
    "record without the report": (record_without("report.json"), "lacks report.json"),
    "file flipped": (flipped("model.onnx"), "is damaged"),
    "report flipped": (flipped("report.json"), "is damaged"),
    "log flipped": (flipped("log"), "is damaged"),
    "file cut": (cut, "the store lacks files"),
    "file gone": (gone, "the store lacks files"),
    "all flipped": (several, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_told_and_made_again_at_once(tmp_path: Path, name: str) -> None:
    damage, said = DAMAGES[name]
    (tmp_path / "a.pt2").write_text("one")
    (tmp_path / "b.pt2").write_text("two")
    first, right = export(tmp_path)
    assert (first.cached, first.notes) == (False, ())
    damage(tmp_path, first.record)
    again, made = export(tmp_path)
    assert made == right
    assert (again.cached, again.report, again.log) == (False, first.report, first.log)
    assert said in again.notes[0]
    assert all("rerunning" in note and "\n" not in note for note in again.notes)
    third, made = export(tmp_path)
    assert (third.cached, third.notes, made) == (True, (), right)
    assert third.record.outputs == first.record.outputs


def test_the_command_line_tells_it_in_a_line_and_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt2").write_text("one")
    monkeypatch.chdir(tmp_path)
    words = ["export", "a.pt2", "-o", "out.onnx", "--store", "store"]

    def call(*more: str) -> str:
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        return done.stderr

    assert call() == ""
    right = Path("out.onnx").read_bytes()
    digest = hashlib.sha256(right).hexdigest()
    for more in ((), ("-q",)):
        written(tmp_path / "store/objects" / digest[:2] / digest, b"x" * len(right))
        told = call(*more)
        assert told.count("\n") == (not more)
        assert more or told.startswith(f"note: rerunning export: the object {digest} in the store ")
        assert Path("out.onnx").read_bytes() == right
        assert call() == ""


@pytest.mark.parametrize("signer", ["nobody", "another key"])
def test_a_forged_record_is_not_served_where_keys_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signer: str
) -> None:
    private, _ = key_pair(tmp_path)
    other, _ = key_pair(tmp_path, "other")
    monkeypatch.setenv(SIGN, str(private))
    (tmp_path / "a.pt2").write_text("one")
    first, right = export(tmp_path)
    evil = tmp_path / "evil"
    evil.write_bytes(b"evil")
    place = FolderBackend(tmp_path / "store")
    forging = StepStore(place) if signer == "nobody" else open_signed_store(place, other)
    outputs = {**first.record.outputs, "model.onnx": forging.put(evil)}
    forging.void_record(first.record.key)
    forging.commit(replace(first.record, outputs=outputs))
    again, made = export(tmp_path)
    assert made == right
    assert "is rejected" in again.notes[0]
    assert export(tmp_path)[0].cached


def test_a_failure_is_an_error_after_damage_too(tmp_path: Path) -> None:
    """Nothing is written where what stood in the store can't be made again."""
    (tmp_path / "a.pt2").write_text("one")
    first, _ = export(tmp_path)
    gone(tmp_path, first.record)
    (tmp_path / "out.onnx").write_text("mine")
    (tmp_path / "a.pt2").write_text("fails")
    with pytest.raises(cached_call.NormdeployError, match="the toy can't export this"):
        cached_call.call_with_cache(
            "export", {"a.pt2": tmp_path / "a.pt2"}, {}, tmp_path / "store", tmp_path / "out.onnx"
        )
    assert (tmp_path / "out.onnx").read_text() == "mine"


def test_a_place_that_can_not_be_written_is_an_error_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_text("one")
    with pytest.raises(cached_call.NormdeployError, match="nowhere"):
        cached_call.call_with_cache(
            "export", {"a.pt2": tmp_path / "a.pt2"}, {}, tmp_path / "store", tmp_path / "nowhere/out.onnx"
        )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"x": 1}', b"\xff", b'{"payload": "e30="}'])
def test_hashes_that_are_damaged_are_taken_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt2").write_text("one")
    _, right = export(tmp_path)
    (tmp_path / "store/hashes.json").write_bytes(content)
    again, made = export(tmp_path)
    assert (again.cached, made) == (True, right)


def test_remembered_hashes_are_signed_where_records_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to a store could else say that a model has the hash of another one of its name, such as that of
    yesterday, and have that one's genuine record served for it."""
    private, _ = key_pair(tmp_path)
    monkeypatch.setenv(SIGN, str(private))
    (tmp_path / "old").mkdir()
    old, new = tmp_path / "old/a.pt2", tmp_path / "a.pt2"
    old.write_text("one")
    new.write_text("two")
    out, files = tmp_path / "out.onnx", dict[Path, bytes]()
    for seconds in (0.0, 2.1):  # of files that changed, or were linked, a moment ago nothing is remembered
        time.sleep(seconds)
        for path in (old, new):
            cached_call.call_with_cache("export", {"a.pt2": path}, {}, tmp_path / "store", out)
            files[path] = out.read_bytes()
    assert files[old] != files[new]
    memory = tmp_path / "store/hashes.json"
    told = json.loads(StepStore(FolderBackend(tmp_path / "store")).opened(memory.read_bytes()))
    told[str(new)][-1] = told[str(old)][-1]
    memory.write_text(json.dumps(told))
    assert export(tmp_path)[1] == files[new]
