"""A store's place in a bucket, on servers that stand for S3, Google Cloud Storage and Azure: objects, one writer for
each name, leases, what is refused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from normdeploy.errors import StoreError
from normdeploy.fleet import remote_backend
from normdeploy.fleet.remote_backend import RemoteBackend, open_backend

from .buckets import BUCKET, At, IgnorantGoogleBucket, names, started


@pytest.mark.parametrize("url", ["memory://store", "sftp://host/store", "https://host/store", "ftp://host/store"])
def test_a_file_system_without_conditional_writes_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="can't reject a second object"):
        open_backend(url)


@pytest.mark.clusters
def test_of_many_writers_one_creates_a_name(bucket: At) -> None:
    wins: Counter[int] = Counter()

    def write(number: int) -> None:
        own = RemoteBackend(bucket.url, {"skip_instance_cache": True})
        wins.update(n for n in range(20) if own.create(f"steps/{n}", str(number).encode()))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins == Counter(range(20))


@pytest.mark.clusters
def test_a_server_that_ignores_the_condition_is_refused(bucket: At, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = RemoteBackend(bucket.url)
    asked.check_writable()
    assert names(bucket.url, "claims/") == []
    write = asked.files.pipe_file
    monkeypatch.setattr(asked.files, "pipe_file", lambda path, data, mode="": write(path, data))
    with pytest.raises(StoreError, match="ignores the condition"):
        asked.check_writable()
    assert names(bucket.url, "claims/") == []


@pytest.mark.clusters
def test_an_emulator_that_ignores_the_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(IgnorantGoogleBucket())
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match="ignores the condition"):
            RemoteBackend(server.url, {"skip_instance_cache": True}).check_writable()
    finally:
        server.stop()


@pytest.mark.clusters
def test_a_bucket_that_is_not_there_is_an_error(bucket: At) -> None:
    with pytest.raises(StoreError, match="can't be used"):
        RemoteBackend(bucket.url.replace(BUCKET, "no-such-bucket")).check_writable()


@pytest.mark.clusters
def test_objects_are_read_as_they_were_written(bucket: At, tmp_path: Path) -> None:
    there = RemoteBackend(bucket.url)
    assert (there.read("a/b"), there.size("a/b"), there.fetch("a/b", tmp_path / "none")) == (None, None, False)
    assert not (tmp_path / "none").exists()
    assert list(there.list_entries("a/")) == []
    there.delete("a/b")
    begun = time.time()
    assert there.create("a/empty", b"")
    assert there.read("a/empty") == b""
    (tmp_path / "large").write_bytes(b"0123456789abcdef" * 2**20 * 5)  # 80 MiB, which is sent in parts
    there.store_file("a/large", tmp_path / "large")
    there.store_file("a/large", tmp_path / "nothing")  # it is there: nothing is read
    assert there.fetch("a/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    told = {e.name: e for e in there.list_entries("a/")}
    assert {name: e.bytes for name, e in told.items()} == {"a/empty": 0, "a/large": 80 * 2**20}
    assert all(begun - 5 < e.written < time.time() + 5 for e in told.values())
    there.overwrite("a/empty", b"more")
    assert (there.read("a/empty"), there.create("a/empty", b"")) == (b"more", False)
    there.delete("a/empty")
    assert names(bucket.url, "a/") == ["a/large"]


@pytest.mark.clusters
def test_a_claim_is_one_drivers_until_it_is_released_or_its_lease_has_run_out(
    bucket: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RemoteBackend(bucket.url), RemoteBackend(bucket.url)
    release = first.claim("key")
    assert release is not None
    assert second.claim("key") is None
    assert first.claim("key") is None  # another cell of the same driver
    release()
    again = second.claim("key")
    assert again is not None
    again()
    monkeypatch.setattr(remote_backend, "LEASE", -1.0)
    assert first.claim("dead") is not None  # a driver that is gone: nobody renews it
    monkeypatch.setattr(remote_backend, "LEASE", 60.0)
    taken = []
    threads = [threading.Thread(target=lambda: taken.append(RemoteBackend(bucket.url).claim("dead"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(t is not None for t in taken) == 1
    assert names(bucket.url, "claims/") == ["claims/dead"]


@pytest.mark.clusters
def test_a_lease_is_renewed_while_it_is_held(bucket: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_backend, "LEASE", 1.0)
    release = RemoteBackend(bucket.url).claim("key")
    assert release is not None
    for _ in range(12):
        time.sleep(0.2)
        assert RemoteBackend(bucket.url).claim("key") is None
    release()
    time.sleep(0.6)
    assert names(bucket.url, "claims/") == []  # it is not written again after its release
