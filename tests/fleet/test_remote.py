"""A store in a bucket: one writer for each name, leases, damage, a server that goes away, two drivers, questions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normdeploy.errors import StoreError
from normdeploy.fleet import collect, remote
from normdeploy.fleet.description import read
from normdeploy.fleet.ends import FleetRun
from normdeploy.fleet.remote import Remote, place
from normdeploy.fleet.runs import runs_of
from normdeploy.fleet.store import Store

from .clusters import ROOT, Bucket
from .toys import run_toys, toy_fleet

CPU = """
[defaults]
steps = ["verify", "package"]
[targets.cpu]
runtime = "onnxruntime"
[models.all]
source = "*.pt2"
"""
STEPS = 4  # of one model


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    bucket = Bucket()
    bucket.start()
    yield bucket
    bucket.stop()


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.url = f"s3://fleet-bucket/{tmp_path.name}"
    return server


def names(url: str, prefix: str) -> list[str]:
    return sorted(e.name for e in Remote(url).entries(prefix))


def manifest_of(url: str) -> bytes:
    store = Store(place(url))
    data = store.place.read(f"runs/{runs_of(store)[-1]['id']}/manifest.jsonl")
    assert data is not None
    return data


@pytest.mark.parametrize("url", ["memory://store", "sftp://host/store", "https://host/store", "ftp://host/store"])
def test_a_file_system_without_conditional_writes_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="does not refuse the second of two objects"):
        place(url)


@pytest.mark.clusters
def test_of_many_writers_one_creates_a_name(bucket: Bucket) -> None:
    wins: Counter[int] = Counter()

    def write(number: int) -> None:
        own = Remote(bucket.url, {"skip_instance_cache": True})
        wins.update(n for n in range(20) if own.create(f"steps/{n}", str(number).encode()))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins == Counter(range(20))


@pytest.mark.clusters
def test_a_server_that_ignores_the_condition_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Remote(bucket.url)
    asked.prepare()
    assert names(bucket.url, "claims/") == []
    write = asked.files.pipe_file
    monkeypatch.setattr(asked.files, "pipe_file", lambda path, data, mode="": write(path, data))
    with pytest.raises(StoreError, match="takes a second object of one name"):
        asked.prepare()
    assert names(bucket.url, "claims/") == []


@pytest.mark.clusters
def test_a_claim_is_one_drivers_until_it_is_released_or_its_lease_has_run_out(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Remote(bucket.url), Remote(bucket.url)
    release = first.claim("key")
    assert release is not None
    assert second.claim("key") is None
    assert first.claim("key") is None  # another cell of the same driver
    release()
    again = second.claim("key")
    assert again is not None
    again()
    monkeypatch.setattr(remote, "LEASE", -1.0)
    assert first.claim("dead") is not None  # a driver that is gone: nobody renews it
    monkeypatch.setattr(remote, "LEASE", 60.0)
    taken = []
    threads = [threading.Thread(target=lambda: taken.append(Remote(bucket.url).claim("dead"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(t is not None for t in taken) == 1
    assert names(bucket.url, "claims/") == ["claims/dead"]


@pytest.mark.clusters
def test_a_lease_is_renewed_while_it_is_held(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE", 1.0)
    release = Remote(bucket.url).claim("key")
    assert release is not None
    for _ in range(12):
        time.sleep(0.2)
        assert Remote(bucket.url).claim("key") is None
    release()
    time.sleep(0.6)
    assert names(bucket.url, "claims/") == []  # it is not written again after its release


@pytest.mark.clusters
def test_a_second_run_runs_nothing_and_the_manifest_is_a_folders(bucket: Bucket, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a", b="wrong")
    run = run_toys(file, store=Store(place(bucket.url)))
    assert (run.ran, run.cached) == (2 * STEPS - 2, 0)
    run = run_toys(file, store=Store(place(bucket.url)))
    assert (run.ran, run.cached) == (0, 2 * STEPS - 2)
    here = Store(place(str(tmp_path / "folder")))
    run_toys(file, store=here)
    assert manifest_of(bucket.url) == manifest_of(str(tmp_path / "folder"))
    assert names(bucket.url, "claims/") == []
    assert collect.collect(bucket.url).objects == 0


@pytest.mark.clusters
@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damage_is_noticed_and_made_again(bucket: Bucket, tmp_path: Path, damage: str) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    store = Store(place(bucket.url))
    run_toys(file, store=store)
    before = manifest_of(bucket.url)
    (export,) = [r for r in records(store) if r.step.endswith("/export")]
    model = export.outputs["model.onnx"]
    name = f"objects/{model.sha256[:2]}/{model.sha256}"
    for key in [r.key for r in records(store) if not r.step.endswith("/export")]:
        store.void(key)  # the export is believed, and what comes after it has to read the file
    raw = Remote(bucket.url)
    whole = raw.read(name)
    assert whole is not None
    if damage == "removed":
        raw.delete(name)
    else:
        raw.overwrite(name, b"x" * len(whole) if damage == "changed" else whole[:-1])
    run = run_toys(file, store=Store(place(bucket.url)))
    assert run
    assert any(model.sha256 in note for note in run.notes)
    assert manifest_of(bucket.url) == before
    assert raw.read(name) == whole


@pytest.mark.clusters
def test_a_malformed_record_is_made_again(bucket: Bucket, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    store = Store(place(bucket.url))
    run_toys(file, store=store)
    before = manifest_of(bucket.url)
    key = records(store)[0].key
    Remote(bucket.url).overwrite(f"steps/{key[:2]}/{key}", b"{")
    run = run_toys(file, store=Store(place(bucket.url)))
    assert run.ran == 1
    assert any("malformed" in note for note in run.notes)
    assert manifest_of(bucket.url) == before


@pytest.mark.clusters
def test_two_drivers_on_one_bucket_run_each_step_once(bucket: Bucket, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(6)})
    runs: list[FleetRun] = []
    threads = [
        threading.Thread(target=lambda: runs.append(run_toys(file, store=Store(place(bucket.url))))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.ran for run in runs) == 6 * STEPS
    assert all(run.ran for run in runs)  # both took a part
    store = Store(place(bucket.url))
    first, second = (store.place.read(f"runs/{run['id']}/manifest.jsonl") for run in runs_of(store))
    assert first == second


def test_a_store_that_is_far_away_is_asked_about_many_steps_at_a_time(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": str(n) for n in range(40)})
    assert run_toys(file, store=Store(place(str(tmp_path / "folder")))).ran == 40 * STEPS
    far = _Far(tmp_path / "folder")
    run = run_toys(file, store=Store(far))  # type: ignore[arg-type]
    assert (run.ran, run.cached) == (0, 40 * STEPS)
    assert far.most == 16
    assert far.questions < 1.1 * 40 * STEPS  # one for each step, and a few for the account of the run


class _Far:
    """A folder that answers like a store which is far away."""

    local = False

    def __init__(self, root: Path) -> None:
        self._place, self._lock = place(str(root)), threading.Lock()
        self.questions = self.most = self._now = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def read(self, name: str) -> bytes | None:
        with self._lock:
            self.questions += 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.02)
        with self._lock:
            self._now -= 1
        return self._place.read(name)


@pytest.mark.clusters
def test_a_store_that_goes_away_is_an_error_and_the_next_run_goes_on(tmp_path: Path) -> None:
    bucket = Bucket()
    bucket.start()
    try:
        file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(20)})
        program = (
            "import sys; from pathlib import Path; from normdeploy.cli import app; from tests.fleet import toys;"
            " from normdeploy.fleet import fleet; from normdeploy.fleet.pool import Local;"
            " from normdeploy.fleet.workers import Warm;"
            " fleet.pool_of = lambda on, jobs, wait: lambda store: Local(store, 2, Warm('tests.fleet.toy', ()));"
            f" sys.argv = ['normdeploy', 'fleet', 'run', {str(file)!r}, '--store', {bucket.url!r}]; app.main()"
        )
        words = [sys.executable, "-c", program]
        environment = os.environ | bucket.environment | {"PYTHONPATH": str(ROOT)}
        driver = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(300):
            time.sleep(0.1)
            if b"<Key>" in bucket.request("GET", "/fleet-bucket?list-type=2&prefix=store/steps/"):
                break
        bucket.stop()
        _, said = driver.communicate(timeout=120)
        assert driver.returncode == 1, said
        assert "the store 's3://fleet-bucket/store' can't be used" in said
        assert "the next run goes on from there" in said
        assert "Traceback" not in said
        bucket.start()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        bucket.stop()


def records(store: Store) -> list[Any]:
    found = [store.record(e.name.rpartition("/")[2]) for e in store.place.entries("steps/")]
    return [r for r in found if r is not None]


def test_the_toy_fleet_has_as_many_steps_as_is_said_here(tmp_path: Path) -> None:
    from normdeploy.fleet.drive import steps_in

    assert steps_in(read(toy_fleet(tmp_path, CPU, a="a")).jobs()) == STEPS
