"""`fleet recheck`: the bundles of the last run, with what is installed now."""

from __future__ import annotations

from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet import rechecks
from normdeploy.fleet.keys import Machine
from normdeploy.fleet.pool import Local
from normdeploy.fleet.store import Store
from normdeploy.fleet.workers import Warm
from tests.fleet.toys import FLEET, run_toys, toy_fleet


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool_of(on: str, jobs: int | None):  # type: ignore[no-untyped-def]
        return lambda store: Local(store, 2, Warm("tests.fleet.toy", ()))

    monkeypatch.setattr(rechecks, "pool_of", pool_of)


def test_each_bundle_is_asked_once_for_each_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toy_fleet(tmp_path, a="one", wrong="wrong")
    run_toys(file)
    first = rechecks.recheck(file)
    assert [end.step for end in first] == [f"all.a/{v}/{t}/recheck" for v in ("fp32", "fp16") for t in ("cpu", "ada")]
    assert all(end.outcome == "ok" and end.cached for end in first)  # the run has asked them
    here = Machine.here()
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: here.after({"onnxruntime": "99.0"})))
    records = len(list((tmp_path / "store" / "steps").rglob("*")))
    updated = rechecks.recheck(file)
    assert not any(end.cached for end in updated)
    assert len([p for p in (tmp_path / "store" / "steps").rglob("*") if p.is_file()]) > 0
    assert len(list((tmp_path / "store" / "steps").rglob("*"))) > records  # of recheck alone: no bundle was made
    assert all(end.cached for end in rechecks.recheck(file, only=["all.a/fp32"]))


def test_a_bundle_that_is_gone_is_told(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    store: Store = rechecks.open_store(rechecks.read(file), None)
    last = rechecks.runs.last_of(store, "fleet.toml")
    assert last is not None
    key = next(t["key"] for t in rechecks.runs.steps_of_run(store, last["id"]) if t["step"] == "all.a/fp32/cpu/package")
    store.void(key)
    told = {end.step: (end.outcome, end.reason) for end in rechecks.recheck(file)}
    assert told["all.a/fp32/cpu/recheck"] == ("not run", "its bundle is not in the store")
    assert told["all.a/fp16/cpu/recheck"] == ("ok", "")


def test_a_fleet_without_bundles(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, FLEET.replace(', "package"', ""), a="one")
    run_toys(file)
    with pytest.raises(InputError, match="made no bundle"):
        rechecks.recheck(file)
