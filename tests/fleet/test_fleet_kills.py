"""A handful of the kills of benchmarks/fleet/kills.py, and that their checks see what they look for."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from benchmarks.fleet.counted import RUNS
from benchmarks.fleet.kills import LOCAL, Driven, faults, series


@pytest.mark.parametrize("kind", LOCAL)
def test_what_is_killed_leaves_whole_objects_and_an_equal_end(tmp_path: Path, kind: str) -> None:
    tally = series((kind,), 2, tmp_path, "local", None, random.Random(kind))[kind]
    assert tally.kills >= 2
    assert tally.broken == []


def test_a_damaged_object_a_lost_one_and_a_second_execution_are_seen(tmp_path: Path) -> None:
    driven = Driven(tmp_path / "fleet")
    driven.make()
    driver = driven.start()
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert faults(driven) == []
    line = (driven.folder / RUNS).read_text().splitlines()[0]
    with open(driven.folder / RUNS, "a") as file:
        file.write(f"{time.time() + 1} {line.split()[1]}\n")
    (again,) = faults(driven)
    assert "was run though it was complete" in again
    cut, lost = sorted((driven.store / "objects").glob("*/*"), key=lambda p: p.stat().st_size)[:2]
    cut.write_bytes(cut.read_bytes()[:-1])
    lost.unlink()
    found = "\n".join(faults(driven))
    assert f"the object {cut.name} is not what its name says" in found
    assert "names objects that are not there" in found
