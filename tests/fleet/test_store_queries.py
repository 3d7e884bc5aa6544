"""What the driver asks of a store that is far away: records and claims at the same time, and no claim is kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normdeploy.errors import StoreError
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.outcomes import FleetRun, JobEnd
from normdeploy.fleet.remote_backend import open_backend
from normdeploy.fleet.run_history import RunWriter
from normdeploy.fleet.scheduler import Scheduler
from normdeploy.fleet.step_inputs import StepInput, StepTask
from normdeploy.fleet.step_store import StepRecord, StepStore, StoredFile

from .toys import CPU, CPU_STEPS, run_toys, toy_fleet

JOBS = 4


class Far:
    """A folder that is asked for claims like a store which is far away: each takes a while, and so does a release."""

    local = False

    def __init__(self, root: Path, seconds: float = 0.02, fails: int = 0) -> None:
        self._place, self._lock, self._seconds, self._fails = open_backend(str(root)), threading.Lock(), seconds, fails
        self.taken, self.refused = Counter[str](), 0
        self.held: set[str] = set()
        self.most = self._now = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def claim(self, name: str) -> Callable[[], None] | None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self._seconds)
        release = self._place.claim(name)
        with self._lock:
            self._now -= 1
            if release is None:
                self.refused += 1
                return None
            self.taken[name] += 1
            if self.taken.total() == self._fails:
                release()
                raise StoreError("the store is gone")
            self.held.add(name)

        def released() -> None:
            time.sleep(self._seconds)
            release()
            with self._lock:
                self.held.remove(name)

        return released


def driven(file: Path, far: Far, progress: Callable[[str, int, int], None] | None = None) -> FleetRun:
    store = StepStore(far)  # type: ignore[arg-type]
    pool = LocalPool(store, JOBS, ForkClient("tests.fleet.toy", ()))
    try:
        return fleet_commands.schedule_fleet(read_fleet(file), store, pool, progress=progress)
    finally:
        pool.close()


def test_claims_are_asked_at_the_same_time_each_once_and_are_released(tmp_path: Path) -> None:
    file, far = toy_fleet(tmp_path, CPU, **{f"m{n}": str(n) for n in range(10)}), Far(tmp_path / "store")
    run = driven(file, far)
    assert (run.ran, run.cached) == (10 * CPU_STEPS, 0)
    assert far.most > 1
    assert far.most <= 2 * JOBS  # what the pool can't take is left to other drivers
    assert set(far.taken.values()) == {1}
    assert len(far.taken) == 10 * CPU_STEPS
    assert far.held == set()
    here = run_toys(file, store=StepStore(open_backend(str(tmp_path / "folder"))))
    manifests = [tmp_path / name / "runs" / r.id / "manifest.jsonl" for name, r in (("store", run), ("folder", here))]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()


def test_two_drivers_that_are_far_away_run_each_step_once(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n:02}": f"slow {n}" for n in range(12)})  # more than one of them can claim
    drivers, runs = [Far(tmp_path / "store") for _ in range(2)], list[FleetRun]()
    threads = [threading.Thread(target=lambda far=far: runs.append(driven(file, far))) for far in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.ran for run in runs) == 12 * CPU_STEPS
    assert all(run.ran for run in runs)
    assert sum(far.refused for far in drivers) > 0
    assert [far.held for far in drivers] == [set(), set()]


@pytest.mark.parametrize("ends", [1, 5])
def test_ctrl_c_releases_claims_that_are_held_and_that_are_asked_for(tmp_path: Path, ends: int) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(8)})
    far = Far(tmp_path / "store", seconds=0.1)

    def stop(step: str, done: int, total: int) -> None:
        if done == ends:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driven(file, far, stop)
    assert far.taken.total() > ends
    assert far.held == set()
    assert list((tmp_path / "store" / "claims").iterdir()) == []


def test_ctrl_c_outside_of_the_driver_releases_claims_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, far = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(8)}), Far(tmp_path / "store")

    def stop(self: RunWriter, end: JobEnd) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunWriter, "add", stop)
    with pytest.raises(KeyboardInterrupt) as kept:  # whose traceback holds the driver
        driven(file, far)
    assert kept.traceback
    assert far.held == set()


def test_a_claim_that_can_not_be_asked_for_ends_the_run_and_keeps_none(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": f"slow {n}" for n in range(8)})
    far = Far(tmp_path / "store", fails=6)
    with pytest.raises(StoreError, match="the store is gone"):
        driven(file, far)
    assert far.held == set()
    assert driven(file, Far(tmp_path / "store"))


@pytest.mark.parametrize("told", ["task", "record"])
def test_a_claim_whose_inputs_were_damaged_meanwhile_is_given_back(tmp_path: Path, told: str) -> None:
    """A sibling found what the step reads damaged while its claim was asked for: it is made again, under another
    key."""
    driver = Scheduler(
        StepStore(open_backend(str(tmp_path))),
        LocalPool(StepStore(open_backend(str(tmp_path))), 1, ForkClient("tests.fleet.toy", ())),
    )
    step = SimpleNamespace(name="B")
    run = SimpleNamespace(can_begin=lambda step: False, is_current=lambda task: False, busy={"B"}, ends={})
    task = SimpleNamespace(step=step)
    driver._claiming = 1
    assert driver._questions.claim("key")
    answer = task if told == "task" else StepRecord.__new__(StepRecord)
    driver._handle_claim(run, task, SimpleNamespace(), "key", answer)  # type: ignore[arg-type]
    assert (run.busy, run.ends, driver._futures, driver._claiming) == (set(), {}, {}, 0)
    assert list((tmp_path / "claims").iterdir()) == []


def test_a_source_that_variants_share_goes_into_a_far_store_once(tmp_path: Path) -> None:
    source, sent = tmp_path / "model.pt2", list[Path]()
    source.write_bytes(b"weights")
    stored = StepStore(open_backend(str(tmp_path / "store"))).put(source)

    def put(path: Path) -> StoredFile:
        sent.append(path)
        time.sleep(0.05)
        return stored

    driver = Scheduler(SimpleNamespace(put=put, place=open_backend(str(tmp_path / "store"))), None)  # type: ignore[arg-type]
    task = StepTask(SimpleNamespace(name="export"), {"source": StepInput(stored, source)})  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as threads:
        uploaded = list(threads.map(driver._upload_inputs, [task] * 8))
    assert sent == [source]
    assert all(t.inputs["source"] == StepInput(stored) for t in uploaded)


class Slow:
    """A folder that answers like a store which is far away."""

    local = False

    def __init__(self, root: Path) -> None:
        self._place, self._lock = open_backend(str(root)), threading.Lock()
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


def test_a_store_that_is_far_away_is_asked_about_many_steps_at_a_time(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, CPU, **{f"m{n}": str(n) for n in range(40)})
    assert run_toys(file, store=StepStore(open_backend(str(tmp_path / "folder")))).ran == 40 * CPU_STEPS
    far = Slow(tmp_path / "folder")
    run = run_toys(file, store=StepStore(far))  # type: ignore[arg-type]
    assert (run.ran, run.cached) == (0, 40 * CPU_STEPS)
    assert far.most == 16
    assert far.questions < 1.1 * 40 * CPU_STEPS  # one for each step, and a few for the account of the run
