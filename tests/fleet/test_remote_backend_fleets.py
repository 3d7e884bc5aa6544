"""Fleets in a bucket, on servers that stand for S3, Google Cloud Storage and Azure: two drivers, damage, what is
collected, a server that goes away."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normdeploy.fleet import garbage_collection
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.outcomes import FleetRun
from normdeploy.fleet.remote_backend import RemoteBackend, open_backend
from normdeploy.fleet.run_history import list_runs
from normdeploy.fleet.step_store import StepStore

from .buckets import KINDS, At, names, started
from .clusters import ROOT
from .toys import CPU, CPU_STEPS, run_toys, toy_fleet


def manifest_of(url: str) -> bytes:
    store = StepStore(open_backend(url))
    data = store.place.read(f"runs/{list_runs(store)[-1]['id']}/manifest.jsonl")
    assert data is not None
    return data


@pytest.mark.clusters
def test_a_second_run_runs_nothing_and_the_manifest_is_a_folders(bucket: At, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a", b="wrong")
    run = run_toys(file, store=StepStore(open_backend(bucket.url)))
    assert (run.ran, run.cached) == (2 * CPU_STEPS - 2, 0)
    run = run_toys(file, store=StepStore(open_backend(bucket.url)))
    assert (run.ran, run.cached) == (0, 2 * CPU_STEPS - 2)
    here = StepStore(open_backend(str(tmp_path / "folder")))
    run_toys(file, store=here)
    assert manifest_of(bucket.url) == manifest_of(str(tmp_path / "folder"))
    assert names(bucket.url, "claims/") == []
    assert garbage_collection.collect_garbage(bucket.url).objects == 0


@pytest.mark.clusters
def test_what_no_run_uses_is_collected(bucket: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    run_toys(file, store=StepStore(open_backend(bucket.url)))
    later = time.time() + 40 * 86_400
    monkeypatch.setattr(garbage_collection, "time", SimpleNamespace(time=lambda: later))
    parts = ("objects/", "steps/", "runs/")
    before = {part: names(bucket.url, part) for part in parts}
    found = garbage_collection.collect_garbage(bucket.url, days=60)
    assert (found.runs, found.steps, found.objects, found.kept) == (0, 0, 0, len(before["objects/"]))
    found = garbage_collection.collect_garbage(bucket.url, days=30)
    assert (found.runs, found.steps, found.objects) == (1, CPU_STEPS, len(before["objects/"]))
    assert {part: names(bucket.url, part) for part in parts} == before  # only told
    assert garbage_collection.collect_garbage(bucket.url, days=30, remove=True) == found
    assert {part: names(bucket.url, part) for part in parts} == {part: [] for part in parts}


@pytest.mark.clusters
@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damage_is_noticed_and_made_again(bucket: At, tmp_path: Path, damage: str) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    store = StepStore(open_backend(bucket.url))
    run_toys(file, store=store)
    before = manifest_of(bucket.url)
    (export,) = [r for r in records(store) if r.step.endswith("/export")]
    model = export.outputs["model.onnx"]
    name = f"objects/{model.sha256[:2]}/{model.sha256}"
    for key in [r.key for r in records(store) if not r.step.endswith("/export")]:
        store.void_record(key)  # the export is believed, and what comes after it has to read the file
    raw = RemoteBackend(bucket.url)
    whole = raw.read(name)
    assert whole is not None
    if damage == "removed":
        raw.delete(name)
    else:
        raw.overwrite(name, b"x" * len(whole) if damage == "changed" else whole[:-1])
    run = run_toys(file, store=StepStore(open_backend(bucket.url)))
    assert run
    assert any(model.sha256 in note for note in run.notes)
    assert manifest_of(bucket.url) == before
    assert raw.read(name) == whole


@pytest.mark.clusters
def test_a_malformed_record_is_made_again(bucket: At, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, a="a")
    store = StepStore(open_backend(bucket.url))
    run_toys(file, store=store)
    before = manifest_of(bucket.url)
    key = records(store)[0].key
    RemoteBackend(bucket.url).overwrite(f"steps/{key[:2]}/{key}", b"{")
    run = run_toys(file, store=StepStore(open_backend(bucket.url)))
    assert run.ran == 1
    assert any("malformed" in note for note in run.notes)
    assert manifest_of(bucket.url) == before


@pytest.mark.clusters
def test_two_drivers_on_one_bucket_run_each_step_once(bucket: At, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(6)})
    runs: list[FleetRun] = []
    threads = [
        threading.Thread(target=lambda: runs.append(run_toys(file, store=StepStore(open_backend(bucket.url)))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.ran for run in runs) == 6 * CPU_STEPS
    assert all(run.ran for run in runs)  # both took a part
    store = StepStore(open_backend(bucket.url))
    first, second = (store.place.read(f"runs/{run['id']}/manifest.jsonl") for run in list_runs(store))
    assert first == second


def driver(file: Path, url: str, hurry: str = "") -> list[str]:
    """The command line that runs a fleet of toys."""
    program = (
        f"{hurry}import sys; from pathlib import Path; from normdeploy.cli import app;"
        " from tests.fleet import toys; from normdeploy.fleet import fleet_commands; from normdeploy.fleet.local_pool "
        "import LocalPool;"
        " from normdeploy.fleet.fork_client import ForkClient;"
        " fleet_commands.pool_factory = lambda on, jobs, wait: lambda store: LocalPool(store, 2, "
        "ForkClient('tests.fleet.toy', ()));"
        f" sys.argv = ['normdeploy', 'fleet', 'run', {str(file)!r}, '--store', {url!r}]; app.main()"
    )
    return [sys.executable, "-c", program]


def begun(words: list[str], url: str) -> subprocess.Popen[str]:
    """It runs, and has written a record."""
    started = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = RemoteBackend(url, {"skip_instance_cache": True})
    for _ in range(300):
        time.sleep(0.1)
        if any(seen.list_entries("steps/")):
            break
    return started


@pytest.mark.clusters
def test_ctrl_c_leaves_no_claim(bucket: At, tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(20)})
    running = begun(driver(file, bucket.url), bucket.url)
    assert names(bucket.url, "claims/") != []
    running.send_signal(signal.SIGINT)
    said = "".join(running.communicate(timeout=120))
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert names(bucket.url, "claims/") == []
    run = run_toys(file, store=StepStore(open_backend(bucket.url)))
    assert 0 < run.cached < 20 * CPU_STEPS
    assert run.ran + run.cached == 20 * CPU_STEPS


@pytest.mark.clusters
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_goes_away_is_an_error_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bucket = started(KINDS[kind]())
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    try:
        words = driver(toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(20)}), bucket.url, bucket.hurry)
        running = begun(words, bucket.url)
        bucket.stop()
        _, said = running.communicate(timeout=120)
        assert running.returncode == 1, said
        assert f"the store {bucket.url!r} can't be used" in said
        assert "the next run resumes from them" in said
        assert "Traceback" not in said
        bucket.start()
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        bucket.stop()


def records(store: StepStore) -> list[Any]:
    found = [store.read_record(e.name.rpartition("/")[2]) for e in store.place.list_entries("steps/")]
    return [r for r in found if r is not None]


def test_the_toy_fleet_has_as_many_steps_as_is_said_here(tmp_path: Path) -> None:
    from normdeploy.fleet.scheduler import count_steps

    assert count_steps(read_fleet(toy_fleet(tmp_path, CPU, a="a")).iter_jobs()) == CPU_STEPS
