"""`fleet recheck`: the bundles of the last run, with what is installed now."""

from __future__ import annotations

from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet import fleet_recheck
from normdeploy.fleet.fork_client import ForkClient
from normdeploy.fleet.local_pool import LocalPool
from normdeploy.fleet.step_keys import FleetMachine
from normdeploy.fleet.step_store import StepStore
from tests.fleet.toys import FLEET, run_toys, toy_fleet


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool_of(on: str, jobs: int | None):  # type: ignore[no-untyped-def]
        return lambda store: LocalPool(store, 2, ForkClient("tests.fleet.toy", ()))

    monkeypatch.setattr(fleet_recheck, "pool_factory", pool_of)


def test_each_bundle_is_asked_once_for_each_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toy_fleet(tmp_path, a="one", wrong="wrong")
    run_toys(file)
    first = fleet_recheck.recheck_fleet(file)
    assert [end.step for end in first] == [f"all.a/{v}/{t}/recheck" for v in ("fp32", "fp16") for t in ("cpu", "ada")]
    assert all(end.outcome == "ok" and end.cached for end in first)  # the run has asked them
    here = FleetMachine.this_machine()
    monkeypatch.setattr(
        FleetMachine, "this_machine", classmethod(lambda cls: here.with_updates({"onnxruntime": "99.0"}))
    )
    records = len(list((tmp_path / "store" / "steps").rglob("*")))
    updated = fleet_recheck.recheck_fleet(file)
    assert not any(end.cached for end in updated)
    assert len([p for p in (tmp_path / "store" / "steps").rglob("*") if p.is_file()]) > 0
    assert len(list((tmp_path / "store" / "steps").rglob("*"))) > records  # of recheck alone: no bundle was made
    assert all(end.cached for end in fleet_recheck.recheck_fleet(file, only=["all.a/fp32"]))


def test_a_bundle_that_is_gone_is_told(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    store: StepStore = fleet_recheck.open_fleet_store(fleet_recheck.read_fleet_file(file), None)
    last = fleet_recheck.run_history.find_last_run(store, "fleet.toml")
    assert last is not None
    key = next(
        t["key"]
        for t in fleet_recheck.run_history.iter_run_steps(store, last["id"])
        if t["step"] == "all.a/fp32/cpu/package"
    )
    store.void_record(key)
    told = {end.step: (end.outcome, end.reason) for end in fleet_recheck.recheck_fleet(file)}
    assert told["all.a/fp32/cpu/recheck"] == ("not run", "its bundle is not in the store")
    assert told["all.a/fp16/cpu/recheck"] == ("ok", "")


def test_a_fleet_without_bundles(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, FLEET.replace(', "package"', ""), a="one")
    run_toys(file)
    with pytest.raises(InputError, match="made no matching bundle"):
        fleet_recheck.recheck_fleet(file)
