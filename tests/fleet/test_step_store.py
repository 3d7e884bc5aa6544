"""The store: what appears is whole, what is read is what was written, what is claimed is claimed once."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from normdeploy.errors import StoreError
from normdeploy.fleet.file_hashes import FileHashes
from normdeploy.fleet.garbage_collection import collect_garbage
from normdeploy.fleet.step_store import DamagedObject, StepRecord, StepStore, StoredFile, json_digest
from normdeploy.fleet.store_backends import FolderBackend
from tests.fleet.toys import STEPS, run_toys, toy_fleet


@pytest.fixture
def store(tmp_path: Path) -> StepStore:
    return StepStore(FolderBackend(tmp_path / "store"))


def put(store: StepStore, folder: Path, text: str) -> StoredFile:
    (folder / "file").write_text(text)
    stored = store.put(folder / "file")
    (folder / "file").unlink()
    return stored


def record(store: StepStore, folder: Path, depends: dict[str, object], text: str = "made") -> StepRecord:
    made = put(store, folder, text)
    return StepRecord(json_digest(depends), "step", "ok", depends, {"out/file": made}, made)


def test_what_is_put_is_got(store: StepStore, tmp_path: Path) -> None:
    stored = put(store, tmp_path, "text")
    store.get(stored, tmp_path / "again")
    assert (tmp_path / "again").read_text() == "text"
    assert store.read_bytes(stored) == b"text"
    (tmp_path / "again").write_text("changed")  # a copy: nothing of the store's
    assert store.read_bytes(stored) == b"text"
    assert put(store, tmp_path, "text") == stored


@pytest.mark.parametrize("damage", [b"", b"texT", b"text and more"])
def test_a_damaged_object_is_never_served(store: StepStore, tmp_path: Path, damage: bytes) -> None:
    stored = put(store, tmp_path, "text")
    path = tmp_path / "store" / "objects" / stored.sha256[:2] / stored.sha256
    path.write_bytes(damage)
    with pytest.raises(DamagedObject, match=rf"(?s){stored.sha256}.*is damaged"):
        store.read_bytes(stored)
    with pytest.raises(DamagedObject, match=rf"(?s){stored.sha256}.*damaged.*{len(damage)} bytes"):
        store.get(stored, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    with pytest.raises(DamagedObject, match="is not in the store"):
        store.get(stored, tmp_path / "got")
    assert put(store, tmp_path, "text") == stored
    assert store.read_bytes(stored) == b"text"


def test_the_first_record_of_a_key_stays(store: StepStore, tmp_path: Path) -> None:
    first, second = (record(store, tmp_path, {"a": 1}, text) for text in ("one", "two"))
    assert store.commit(first) == first
    assert store.commit(second) == first
    assert store.read_record(first.key) == first


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "normdeploy/step/2"},
        {"outcome": "fine"},
        {"outputs": {"../out": {"sha256": "0" * 64, "bytes": 1}}},
        {"outputs": {"/etc/passwd": {"sha256": "0" * 64, "bytes": 1}}},
        {"outputs": {"a": {"sha256": "../../x", "bytes": 1}}},
        {"outputs": {"a": {"sha256": "0" * 64, "bytes": "many"}}},
        {"outputs": [1]},
        {"depends": {"a": 2}},
        {"key": "0" * 64},
        {"measures": {"error": "large"}},
        {"log": None},
    ],
)
def test_a_forged_record_is_refused(store: StepStore, tmp_path: Path, change: dict[str, object]) -> None:
    kept = store.commit(record(store, tmp_path, {"a": 1}))
    path = tmp_path / "store" / "steps" / kept.key[:2] / kept.key
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=kept.key):
        store.read_record(kept.key)


def _claims(root: str, name: str, answers: multiprocessing.Queue[bool]) -> None:
    answers.put(FolderBackend(Path(root)).claim(name) is not None)
    time.sleep(0.2)
    os._exit(0)  # without giving it back


def test_a_claim_ends_with_its_process(store: StepStore) -> None:
    spawning = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[bool] = spawning.Queue()
    release = store.place.claim("key")
    assert release is not None
    assert store.place.claim("key") is None
    release()
    holder = spawning.Process(target=_claims, args=(store.place.url, "key", answers))
    holder.start()
    assert answers.get(timeout=60)
    assert store.place.claim("key") is None
    holder.join()
    assert store.place.claim("key") is not None


def test_a_store_that_goes_away(store: StepStore, tmp_path: Path) -> None:
    stored = put(store, tmp_path, "text")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="no longer exists"):
        store.get(stored, tmp_path / "got")
    with pytest.raises(StoreError):
        store.read_record("0" * 64)


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(StoreError, match="can't be used"):
        FolderBackend(tmp_path / "store")


def test_hashes_are_remembered_only_of_files_that_look_the_same(tmp_path: Path) -> None:
    file, memory = tmp_path / "model", tmp_path / "hashes.json"
    file.write_text("one")
    young = FileHashes(memory)
    first = young.hash_path("m", file)["m"][1]
    young.save()
    assert not memory.exists()  # it changed a moment ago: a second change would not show
    os.utime(file, (1, 1))
    time.sleep(2.1)
    old = FileHashes(memory)
    assert old.hash_path("m", file)["m"][1] == first
    old.save()
    assert memory.exists()
    file.write_text("two")
    os.utime(file, (1, 1))  # size and time of change are the same; the time of status change is not
    assert FileHashes(memory).hash_path("m", file)["m"][1] != first


def test_what_no_run_uses_goes(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one", b="two")
    first = run_toys(file)
    (tmp_path / "b.pt2").unlink()
    second = run_toys(file)
    root = tmp_path / "store"
    files = sorted(root.rglob("*"))
    assert collect_garbage(root, days=0).steps == 0  # all of it is younger than a day
    long_ago = time.time() - 40 * 86_400
    for path in root.rglob("*"):
        if path.is_file() and second.id not in str(path):
            os.utime(path, (long_ago, long_ago))
    found = collect_garbage(root, days=30)
    assert (found.runs, found.steps) == (1, STEPS)
    assert found.objects > 0
    assert sorted(root.rglob("*")) == files
    assert collect_garbage(root, days=30, remove=True) == found
    assert not (root / "runs" / first.id / "run.json").exists()
    again = run_toys(file)
    assert (again.ran, again.cached) == (0, STEPS)
    assert not again.notes
    (tmp_path / "b.pt2").write_text("two")
    assert run_toys(file).ran == STEPS
