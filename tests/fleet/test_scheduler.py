"""What is run, what is taken from the store, and what becomes of what fails: with a stand-in for the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from normdeploy.errors import InputError
from normdeploy.fleet import fleet_commands
from normdeploy.fleet.fleet_file import read_fleet
from normdeploy.fleet.fleet_tables import summarize_counts
from normdeploy.fleet.run_history import RunWriter
from normdeploy.fleet.step_details import find_steps
from normdeploy.fleet.step_store import StepStore
from tests.fleet.toys import FLEET, STEPS, cells, manifest, run_toys, toy_fleet


def store_of(file: Path) -> StepStore:
    return fleet_commands.open_fleet_store(read_fleet(file), None)


def test_a_second_run_runs_nothing(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one", b="two")
    first = run_toys(file)
    assert (first.ran, first.cached) == (2 * STEPS, 0)
    assert {c.status for n, c in cells(first).items() if n.endswith("cpu")} == {"verified"}
    assert {c.status for n, c in cells(first).items() if n.endswith("ada")} == {"built"}
    before = manifest(store_of(file))
    second = run_toys(file)
    assert (second.ran, second.cached) == (0, 2 * STEPS)
    assert manifest(store_of(file)) == before


def test_closing_line_counts_the_steps_that_the_bar_counts(tmp_path: Path) -> None:
    """Steps that no machine can run, and steps that are blocked, end too."""
    file = toy_fleet(tmp_path, good="one", fails="fails")
    shown: list[tuple[int, int]] = []
    run = run_toys(file, progress=lambda step, done, total: shown.append((done, total)))
    # The target ada has a verify and a bench step that need its GPU.
    every = 2 * (STEPS + 2 * 2)
    assert shown[-1] == (every, every)
    assert [done for done, _ in shown] == list(range(1, every + 1))
    assert run.unrun == every - run.ran > 0
    assert f"; {run.ran} of {every} steps run, 0 from the store, {run.unrun} not run; " in summarize_counts(run)
    status = fleet_commands.fleet_status(file)
    assert f" of {every} steps in the store; " in summarize_counts(status)


def test_of_a_model_that_changed_exactly_its_steps_run(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one", b="two", c="three")
    run_toys(file)
    (tmp_path / "b.pt2").write_text("two again")
    again = run_toys(file)
    assert (again.ran, again.cached) == (STEPS, 2 * STEPS)
    assert {c.model for c in again.cells if c.ran} == {"all.b"}


def test_a_file_that_is_touched_is_the_same_file(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    os.utime(tmp_path / "a.pt2", (1, 1))
    assert run_toys(file).ran == 0


def test_an_option_of_one_variant_makes_that_stale(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    file.write_text(FLEET.replace('precision = "fp16"', 'precision = "bf16"'))
    assert run_toys(file).ran == STEPS // 2


def ran_again(file: Path, before: dict[str, str]) -> set[str]:
    """The steps whose keys have changed, and which therefore ran: once for each key."""
    found = run_toys(file)
    changed = {
        line["step"]: line["key"] for line in manifest(store_of(file)) if before.get(line["step"]) != line["key"]
    }
    assert found.ran == len(set(changed.values()))
    return {step.removeprefix("all.") for step in changed}


def test_an_export_that_gives_the_same_file_leaves_what_comes_of_it(tmp_path: Path) -> None:
    """Keys hold what a step reads by its content, and not by how that was made."""
    file = toy_fleet(tmp_path, a="steady one", b="moving")
    run_toys(file)
    before = {line["step"]: line["key"] for line in manifest(store_of(file))}
    engines = {line["step"]: line["outputs"] for line in manifest(store_of(file)) if line["step"].endswith("/build")}
    file.write_text(FLEET.replace('precision = "fp16"', 'precision = "bf16"'))
    again = ran_again(file, before)
    assert {step for step in again if step.startswith("a/")} == {"a/fp16/export"}  # and nothing behind it
    assert len(again) == 1 + STEPS // 2  # of the other model all of the variant
    # another model that gives the same file: it is verified again, and packaged as its source; no engine is built
    before = {line["step"]: line["key"] for line in manifest(store_of(file))}
    (tmp_path / "a.pt2").write_text("steady two")
    again = ran_again(file, before)
    assert {step.rpartition("/")[2] for step in again} == {"export", "verify", "package", "recheck"}
    assert not [step for step in again if step.endswith("/build")]
    after = {line["step"]: line["outputs"] for line in manifest(store_of(file)) if line["step"].endswith("/build")}
    assert {s: o for s, o in after.items() if ".a/" in s} == {s: o for s, o in engines.items() if ".a/" in s}


def test_what_fails_ends_what_comes_of_it_and_nothing_else(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, good="one", fails="fails", crashes="crashes", wrong="wrong")
    found = run_toys(file)
    assert not found
    told = {name: (cell.status, cell.step, cell.reason) for name, cell in cells(found).items()}
    assert told["all.good/fp32/cpu"] == ("verified", "", "")
    assert told["all.fails/fp32/cpu"] == ("failed", "all.fails/fp32/export", "the toy can't export this")
    assert told["all.crashes/fp16/ada"][2] == "export crashed (signal 11); see its log"
    assert told["all.wrong/fp32/cpu"][:2] == ("wrong", "all.wrong/fp32/verify")
    assert "differs by 2; the allowed error is 1" in told["all.wrong/fp32/ada"][2]
    again = run_toys(file)  # what is wrong stays so; what failed is tried again
    assert again.ran == 4
    ends = {line["step"]: line["outcome"] for line in manifest(store_of(file))}
    assert ends["all.wrong/fp32/cpu/package"] == ends["all.wrong/fp32/ada/build"] == "blocked"


def test_limits(tmp_path: Path) -> None:
    text = FLEET.replace("[defaults]", '[defaults]\nseconds = 0.5\nmemory = "100M"')
    file = toy_fleet(tmp_path, text, endless="endless", large="large", good="one")
    found = cells(run_toys(file, only=["*/fp32"]))
    assert found["all.endless/fp32/cpu"].reason == "it exceeded its limit of 0.5 s; raise seconds"
    assert found["all.large/fp32/cpu"].reason == "it exceeded its limit of 100 MB; raise memory"
    assert found["all.good/fp32/cpu"].status == "verified"


def test_a_damaged_object_is_made_again(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    store, before = store_of(file), manifest(store_of(file))
    engine = next(line for line in before if line["step"] == "all.a/fp32/ada/build")["outputs"]["model.engine"][0]
    path = tmp_path / "store" / "objects" / engine[:2] / engine
    path.write_bytes(b"x" * path.stat().st_size)
    for line in before:  # package has to read the engine again
        if line["step"] == "all.a/fp32/ada/package":
            store.void_record(line["key"])
    found = run_toys(file)
    assert found.ran == 2
    assert "is damaged" in "".join(found.notes)
    assert manifest(store) == before


@pytest.mark.parametrize("damage", ["cut", "gone", "other size"])
def test_a_damaged_record_is_no_record(tmp_path: Path, damage: str) -> None:
    file = toy_fleet(tmp_path, a="one")
    run_toys(file)
    before = manifest(store_of(file))
    line = next(line for line in before if line["step"] == "all.a/fp16/export")
    record = tmp_path / "store" / "steps" / line["key"][:2] / line["key"]
    made = line["outputs"]["model.onnx"][0]
    if damage == "cut":
        record.write_bytes(record.read_bytes()[:100])
    elif damage == "gone":
        (tmp_path / "store" / "objects" / made[:2] / made).unlink()
    else:
        (tmp_path / "store" / "objects" / made[:2] / made).write_bytes(b"")
    found = run_toys(file)
    assert found.ran == 1
    assert found.notes
    assert manifest(store_of(file)) == before


def test_a_record_under_another_key_is_refused(tmp_path: Path) -> None:
    """Somebody puts the record of one model in the place of another's."""
    file = toy_fleet(tmp_path, a="one", b="two")
    run_toys(file)
    before = manifest(store_of(file))
    one, other = (
        tmp_path / "store" / "steps" / line["key"][:2] / line["key"]
        for line in before
        if line["step"] in ("all.a/fp32/export", "all.b/fp32/export")
    )
    one.write_bytes(other.read_bytes())
    found = run_toys(file)
    assert found.ran == 1
    assert "does not match its name" in found.notes[0]
    assert manifest(store_of(file)) == before


def test_two_drivers_share_the_work(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, **{f"m{n}": f"slow {n}" for n in range(4)})
    runs = []
    threads = [threading.Thread(target=lambda: runs.append(run_toys(file, jobs=1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.ran for run in runs) == 4 * STEPS
    assert all(run.ran for run in runs)
    kept = [tmp_path / "store" / "runs" / run.id / "manifest.jsonl" for run in runs]
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, **{f"m{n}": f"slow {n}" for n in range(3)})
    code = "import sys, pathlib; from tests.fleet.toys import run_toys; run_toys(pathlib.Path(sys.argv[1]))"
    driver = subprocess.Popen([sys.executable, "-c", code, str(file)])
    records = tmp_path / "store" / "steps"
    while not (records.is_dir() and len([p for p in records.rglob("*") if p.is_file()]) > 5):
        assert driver.poll() is None
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = len([p for p in records.rglob("*") if p.is_file()])
    found = run_toys(file)
    assert found
    assert found.ran <= 3 * STEPS - kept
    other = tmp_path / "undisturbed"
    other.mkdir()
    whole = toy_fleet(other, **{f"m{n}": f"slow {n}" for n in range(3)})
    run_toys(whole)
    assert manifest(store_of(file)) == manifest(store_of(whole))
    assert not list((tmp_path / "store" / "work").iterdir())
    assert not list((tmp_path / "store" / "claims").iterdir())


def test_status_and_diff_write_nothing(tmp_path: Path) -> None:
    """The stand-in's keys are those of the real command line: only the process that runs them differs."""
    file = toy_fleet(tmp_path, a="one", fails="fails")
    run_toys(file)
    files = sorted(str(p) for p in (tmp_path / "store").rglob("*"))
    now = fleet_commands.fleet_status(file)
    assert {c.status for c in now.cells} == {"verified", "built", "failed"}
    assert cells(now)["all.fails/fp32/cpu"].reason == "the toy can't export this"
    later = fleet_commands.preview_update(file, against={"tensorrt-rtx": "99.0"})
    told = cells(later)
    assert told["all.a/fp32/cpu"].status == "verified"
    assert told["all.a/fp32/ada"].status == "stale"
    assert told["all.a/fp32/ada"].step == "all.a/fp32/ada/build"
    assert told["all.a/fp32/ada"].reason.endswith("→ 99.0")
    every = fleet_commands.preview_update(file, against={"torch": "9.9"})
    assert {c.status for c in every.cells} == {"stale"}
    with pytest.raises(InputError, match="no step depends on 'nothing'"):
        fleet_commands.preview_update(file, against={"nothing": "1"})
    assert sorted(str(p) for p in (tmp_path / "store").rglob("*")) == files


def test_nothing_is_waited_for_where_no_machine_can_join(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one")
    words = [sys.executable, "-m", "normdeploy", "fleet", "run", str(file), "--wait", "60"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: --wait 60 applies only to Ray clusters, but --on is 'local'; omit --wait, or pass --on"
        " ray://HEAD:10001\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt2", "fleet.toml"]  # no store was made


def test_only_some_models(tmp_path: Path) -> None:
    file = toy_fleet(tmp_path, a="one", b="two")
    assert {c.model for c in run_toys(file, only=["all.a"]).cells} == {"all.a"}
    whole = run_toys(file)
    (tmp_path / "a.pt2").write_text("wrong")
    assert run_toys(file, only=["all.a/fp32"]).only == ("all.a/fp32",)
    # a run of some is not the one with which the next is compared, and is found by who asks for its cells
    again = run_toys(file, only=["all.b"])
    assert set(again.before) == {cell.name for cell in whole.cells}
    assert len(again.trend) == 2
    assert [outcome for _, outcome, _ in find_steps(file, "all.a/fp32/cpu").steps][:2] == ["ok", "wrong"]
    assert [outcome for _, outcome, _ in find_steps(file, "all.a/fp16/cpu").steps][:2] == ["ok", "ok"]
    with pytest.raises(InputError, match="matches 'nobody'"):
        run_toys(file, only=["nobody"])


def test_a_manifest_says_nothing_of_when_and_where(tmp_path: Path) -> None:
    ends = []
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        file = toy_fleet(folder, a="model")
        run_toys(file, jobs=len(ends) + 1)
        ends.append(json.dumps(manifest(store_of(file))))
    assert ends[0] == ends[1]
    assert str(tmp_path) not in ends[0]


@pytest.mark.parametrize("name", ["out", "export", "-x", "files"])
def test_a_folder_of_any_name_is_a_source(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.txt").write_text("one")
    (tmp_path / "fleet.toml").write_text(f'[models.m]\nsource = "{name}"\n')
    found = run_toys(tmp_path / "fleet.toml")
    assert cells(found)["m/default/onnxruntime"].status == "verified"
    assert run_toys(tmp_path / "fleet.toml").ran == 0
    (source / "deep" / "a.txt").write_text("two")
    assert run_toys(tmp_path / "fleet.toml").ran == 2


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "pipe")
    (tmp_path / "fleet.toml").write_text('[models.m]\nsource = "model"\n')
    with pytest.raises(InputError, match="is not a regular file"):
        run_toys(tmp_path / "fleet.toml")
    (tmp_path / "model" / "pipe").unlink()
    (tmp_path / "model" / "loop").symlink_to(tmp_path / "model")
    with pytest.raises(InputError, match="links to a folder that contains it"):
        run_toys(tmp_path / "fleet.toml")


def test_runs_of_one_second_are_in_their_order(tmp_path: Path) -> None:
    """What was compared with the last run was compared with another one of that second."""
    store = store_of(toy_fleet(tmp_path, a="one"))
    begun = [RunWriter(store).id for _ in range(20)]
    assert begun == sorted(begun)
