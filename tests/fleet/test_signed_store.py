"""A store of signed records, and what somebody who may write to it can not make a fleet believe."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normdeploy.errors import InputError, StoreError
from normdeploy.evidence import signed_envelope
from normdeploy.evidence.signing_keys import Signer
from normdeploy.fleet import fleet_commands, garbage_collection, run_history, step_details
from normdeploy.fleet.signed_store import KIND, open_signed_store
from normdeploy.fleet.step_store import StepRecord, StepStore, StoredFile, json_digest
from normdeploy.fleet.store_backends import FolderBackend
from tests.fleet.toys import STEPS, cells, manifest, run_toys, toy_fleet
from tests.keys import key_pair


class Signed:
    """A fleet of one model whose store was signed, and the ways to look at it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.private, self.public = key_pair(folder)
        self.file = toy_fleet(folder, a="one")
        self.first = run_toys(self.file, store=self.store)

    @property
    def store(self) -> StepStore:
        return open_signed_store(FolderBackend(self.folder / "store"), self.private)

    def keys(self) -> dict[str, str]:
        """Step -> key."""
        return {line["step"]: line["key"] for line in manifest(self.store) if line["key"]}

    def path(self, step: str) -> Path:
        key = self.keys()[step]
        return self.folder / "store/steps" / key[:2] / key

    def object(self, step: str, name: str) -> Path:
        record = self.store.read_record(self.keys()[step])
        assert record is not None
        digest = record.outputs[name].sha256
        return self.folder / "store/objects" / digest[:2] / digest


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Signed(tmp_path_factory.mktemp("sealed") / "fleet").folder


@pytest.fixture
def signed(untouched: Path, tmp_path: Path) -> Signed:
    copy = Signed.__new__(Signed)
    copy.folder = tmp_path / "fleet"
    shutil.copytree(untouched, copy.folder)
    copy.private, copy.public, copy.file = (copy.folder / n for n in ("key.pem", "key.pub.pem", "fleet.toml"))
    return copy


BUILD, PACKAGE = "all.a/fp32/ada/build", "all.a/fp32/ada/package"


def test_what_is_signed_is_taken_as_it_is(signed: Signed) -> None:
    again = run_toys(signed.file, store=signed.store)
    assert (again.ran, again.cached, again.notes) == (0, STEPS, ())
    believing = run_toys(signed.file)  # without keys everything is believed, signed or not
    assert (believing.ran, believing.cached) == (0, STEPS)
    seen = fleet_commands.fleet_status(signed.file, trust=[signed.public])
    assert seen.count_by_status() == {"verified": 2, "built": 2}


def test_an_unsigned_store_is_run_again_once(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    assert fleet_commands.fleet_status(file, trust=[public]).count_by_status() == {"stale": 4}
    signing = run_toys(file, store=open_signed_store(FolderBackend(tmp_path / "store"), private))
    assert (signing.ran, signing.cached) == (STEPS, 0)
    assert all("is not signed, but must be signed by the key" in note for note in signing.notes)
    assert run_toys(file, store=open_signed_store(FolderBackend(tmp_path / "store"), private)).ran == 0


def test_of_another_key_nothing_is_believed_but_where_it_is_trusted(signed: Signed, tmp_path: Path) -> None:
    other, theirs = key_pair(tmp_path, "other")
    place = FolderBackend(signed.folder / "store")
    assert run_toys(signed.file, store=open_signed_store(place, other, [signed.public])).ran == 0
    seen = fleet_commands.fleet_status(signed.file, trust=[theirs])
    assert seen.count_by_status() == {"stale": 4}
    assert all("is signed by" in note and "but the trusted key is" in note for note in seen.notes)
    assert run_toys(signed.file, store=open_signed_store(place, other)).ran == STEPS


def forged(signed: Signed, step: str, content: bytes) -> tuple[StepRecord, bytes]:
    """The record of a step with another output, which is in the store, and its JSON."""
    record = signed.store.read_record(signed.keys()[step])
    assert record is not None
    digest = hashlib.sha256(content).hexdigest()
    path = signed.folder / "store/objects" / digest[:2] / digest
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    fake = replace(record, outputs={**record.outputs, "model.engine": StoredFile(digest, len(content))})
    return fake, json.dumps(fake.to_json()).encode()


def unsigned_forgery(signed: Signed, folder: Path) -> None:
    signed.path(BUILD).write_bytes(forged(signed, BUILD, b"evil")[1])


def foreign_forgery(signed: Signed, folder: Path) -> None:
    other, _ = key_pair(folder, "other")
    signed.path(BUILD).write_bytes(signed_envelope.seal_payload(forged(signed, BUILD, b"evil")[1], KIND, Signer(other)))


def altered(signed: Signed, folder: Path) -> None:
    import base64

    told = json.loads(signed.path(BUILD).read_bytes())
    told["payload"] = base64.b64encode(forged(signed, BUILD, b"evil")[1]).decode()
    signed.path(BUILD).write_text(json.dumps(told))


def stripped(signed: Signed, folder: Path) -> None:
    told = json.loads(signed.path(BUILD).read_bytes())
    signed.path(BUILD).write_text(json.dumps(told | {"signatures": []}))


def swapped_with_a_neighbour(signed: Signed, folder: Path) -> None:
    other = signed.path("all.a/fp16/ada/build").read_bytes()
    signed.path(BUILD).write_bytes(other)


def other_kind(signed: Signed, folder: Path) -> None:
    """A genuine signature of the same key, made for something else."""
    data = forged(signed, BUILD, b"evil")[1]
    signed.path(BUILD).write_bytes(
        signed_envelope.seal_payload(data, "application/vnd.in-toto+json", Signer(signed.private))
    )


def a_link_to_another(signed: Signed, folder: Path) -> None:
    signed.path(BUILD).unlink()
    signed.path(BUILD).symlink_to(signed.path("all.a/fp16/ada/build"))


def a_pipe(signed: Signed, folder: Path) -> None:
    signed.path(BUILD).unlink()
    os.mkfifo(signed.path(BUILD))


def a_folder(signed: Signed, folder: Path) -> None:
    signed.path(BUILD).unlink()
    signed.path(BUILD).mkdir()


def endless(signed: Signed, folder: Path) -> None:
    """A file of 100 GB that takes no room."""
    os.truncate(signed.path(BUILD), 100 * 2**30)


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (unsigned_forgery, "is not signed"),
        (foreign_forgery, "is signed by"),
        (altered, "was changed afterwards"),
        (stripped, "is signed by nobody"),
        (swapped_with_a_neighbour, "does not match its name"),
        (other_kind, "is signed as"),
        (a_link_to_another, "does not match its name|not a regular file"),
        (a_pipe, "not a regular file"),
        (endless, "the limit is"),
    ],
)
def test_a_record_that_is_not_to_be_believed_is_never_served(
    signed: Signed, tmp_path: Path, attack: Callable[[Signed, Path], None], said: str
) -> None:
    key, right = signed.keys()[BUILD], hashlib.sha256(signed.object(BUILD, "model.engine").read_bytes()).hexdigest()
    attack(signed, tmp_path)
    seen = fleet_commands.fleet_status(signed.file, trust=[signed.public])
    assert cells(seen)["all.a/fp32/ada"].status == "stale"
    assert any(key in note for note in seen.notes)
    with pytest.raises(StoreError, match=said):
        step_details.find_steps(signed.file, BUILD, trust=[signed.public])
    again = run_toys(signed.file, store=signed.store)
    assert again.ran == 1  # it made the same engine, so what came of that is as it was
    assert any(key in note for note in again.notes)
    packaged = signed.store.read_record(signed.keys()[PACKAGE])
    assert packaged is not None
    assert packaged.depends["inputs"]["build/model.engine"] == right
    assert run_toys(signed.file, store=signed.store).notes == ()


def test_a_folder_in_the_place_of_a_record_ends_the_run_with_an_error(signed: Signed, tmp_path: Path) -> None:
    a_folder(signed, tmp_path)
    with pytest.raises(StoreError, match=r"can't be used|no regular file"):
        run_toys(signed.file, store=signed.store)


def test_two_engines_that_are_swapped_are_made_again(signed: Signed) -> None:
    one, other = signed.object(BUILD, "model.engine"), signed.object("all.a/fp16/ada/build", "model.engine")
    engines = one.read_bytes(), other.read_bytes()
    for path, data in ((one, engines[1]), (other, engines[0])):
        path.unlink()
        path.write_bytes(data)
    for variant in ("fp32", "fp16"):  # as if the bundles had not been made
        signed.store.void_record(signed.keys()[f"all.a/{variant}/ada/package"])
    run_toys(signed.file, store=signed.store)
    assert (one.read_bytes(), other.read_bytes()) == engines


def test_an_old_record_says_nothing_of_a_changed_model(signed: Signed) -> None:
    """Its key is of the old model: under the new one's it is refused, and under its own it is not asked for."""
    old = signed.path("all.a/fp32/export").read_bytes()
    before = signed.keys()
    (signed.folder / "a.pt2").write_text("two")
    assert run_toys(signed.file, store=signed.store).ran == STEPS
    assert not set(before.values()) & set(signed.keys().values())
    signed.path("all.a/fp32/export").write_bytes(old)
    again = run_toys(signed.file, store=signed.store)
    assert again.ran == 1
    assert "does not match its name" in again.notes[0]


def test_paths_that_lead_out_are_refused_though_they_are_signed(signed: Signed) -> None:
    record = signed.store.read_record(signed.keys()[BUILD])
    assert record is not None
    for path in ("../../out", "/etc/x", "a//b", "a\\b"):
        told = record.to_json() | {"outputs": {path: {"sha256": "0" * 64, "bytes": 1}}}
        signed.path(BUILD).write_bytes(signed.store.seal(json.dumps(told).encode()))
        with pytest.raises(StoreError, match="malformed"):
            signed.store.read_record(record.key)


def test_an_account_of_a_run_that_is_not_signed_is_not_read(signed: Signed) -> None:
    (run,) = run_history.list_runs(signed.store)
    path = signed.folder / "store/runs" / run["id"] / "run.json"
    newer = path.parent.with_name("99990101T000000-00000000")
    shutil.copytree(path.parent, newer)  # a genuine one under another name
    assert run_history.list_runs(signed.store) == [run]
    told = json.loads(StepStore(FolderBackend(signed.folder / "store")).opened(path.read_bytes()))
    (newer / "run.json").write_text(json.dumps(told | {"id": newer.name}))
    assert run_history.list_runs(signed.store) == [run]
    assert len(run_history.list_runs(StepStore(FolderBackend(signed.folder / "store")))) == 2
    lines = (path.parent / "manifest.jsonl").read_text()
    (path.parent / "manifest.jsonl").unlink()
    (path.parent / "manifest.jsonl").write_text(lines.replace('"ok"', '"wrong"', 1))
    with pytest.raises(StoreError, match="damaged: its hash is"):
        list(run_history.iter_run_steps(signed.store, run["id"]))


def test_what_signed_records_name_is_not_collected(signed: Signed) -> None:
    """Whoever collects needs no key."""
    for path in (signed.folder / "store").rglob("*"):
        os.utime(path, (1, 1))
    (run,) = (signed.folder / "store/runs").iterdir()
    os.utime(run / "run.json")
    found = garbage_collection.collect_garbage(signed.folder / "store", remove=True)
    assert (found.runs, found.steps, found.objects) == (0, 0, 0)
    assert found.kept


def test_the_statement_in_a_bundle_names_all_that_it_came_from(signed: Signed) -> None:
    import base64

    told = json.loads(
        base64.b64decode(json.loads(signed.object(PACKAGE, "bundle/provenance.intoto.jsonl").read_bytes())["payload"])
    )
    definition, details = told["predicate"]["buildDefinition"], told["predicate"]["runDetails"]
    names = {d["name"]: d["digest"]["sha256"] for d in definition["resolvedDependencies"]}
    assert names["a.pt2"] == hashlib.sha256(b"one").hexdigest()
    assert names["build/model.engine"] == hashlib.sha256(signed.object(BUILD, "model.engine").read_bytes()).hexdigest()
    keys = signed.keys()
    before = {
        f"all.a/fp32/{s}": f"urn:normdeploy:step:{keys[f'all.a/fp32/{s}']}" for s in ("export", "verify", "ada/build")
    }
    assert {b["name"]: b["uri"] for b in details["byproducts"]} == before
    assert details["metadata"] == {"invocationId": f"urn:normdeploy:step:{keys[PACKAGE]}"}
    assert definition["externalParameters"]["before"][BUILD][0] == "build"


def test_equal_fleets_give_equal_bytes(signed: Signed, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    file = toy_fleet(tmp_path / "other", a="one")
    store = open_signed_store(FolderBackend(tmp_path / "other/store"), signed.private)
    run_toys(file, store=store, jobs=1)
    assert manifest(store) == manifest(signed.store)


def test_trust_without_a_key_that_signs_is_for_looking_alone(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="new records would be unsigned; pass --sign"):
        fleet_commands.run_fleet(signed.file, trust=[signed.public])
    monkeypatch.setenv("NORMDEPLOY_TRUST", str(signed.public))
    with pytest.raises(InputError, match="new records would be unsigned; pass --sign"):
        fleet_commands.run_fleet(signed.file)


def test_the_environment_names_keys(signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = key_pair(tmp_path, "other")
    monkeypatch.setenv("NORMDEPLOY_TRUST", str(theirs))
    assert fleet_commands.fleet_status(signed.file).count_by_status() == {"stale": 4}
    monkeypatch.setenv("NORMDEPLOY_TRUST", os.pathsep.join(map(str, (theirs, signed.public))))
    assert fleet_commands.fleet_status(signed.file).count_by_status() == {"verified": 2, "built": 2}


def test_a_store_travels_to_another_process_without_its_key(signed: Signed) -> None:
    sent = pickle.dumps(signed.store)
    assert signed.private.read_bytes().splitlines()[1] not in sent
    assert pickle.loads(sent).read_record(signed.keys()[BUILD]) == signed.store.read_record(signed.keys()[BUILD])


def test_the_key_covers_what_it_is_the_hash_of(signed: Signed) -> None:
    """A signed record whose ``depends`` were exchanged is of another key: a signature for one step is for no other."""
    record = signed.store.read_record(signed.keys()[BUILD])
    assert record is not None
    depends = {**record.depends, "inputs": {}}
    assert json_digest(depends) != record.key
    signed.path(BUILD).write_bytes(signed.store.seal(json.dumps(replace(record, depends=depends).to_json()).encode()))
    with pytest.raises(StoreError, match="does not match its name"):
        signed.store.read_record(record.key)
