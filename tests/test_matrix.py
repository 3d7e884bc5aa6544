"""The table of versions (``benchmarks.matrix``): what was run, what failed and what was not run. The runs themselves
take an hour."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.matrix.__main__ import RESULTS, page, read
from benchmarks.matrix.cells import CORE, PYTHON, TORCH, Cell, lock_of, python_of, run
from tests.forked import ROOT

VERSIONS = {"torch": "2.15.0", "numpy": "2.5.5", "python": "3.13.0"}
PASSED = Cell("2.15", "3.13", passed=3, skipped=1, seconds=12.0, versions=VERSIONS, day="2026-11-22")
FAILED = Cell("2.15", "3.12", passed=2, failed=("tests.test_export::test_a",), versions=VERSIONS)
MISSING = Cell("2.15", "3.11", "there is no Python 3.11 on this machine")


def test_page_tells_every_cell() -> None:
    text = page([PASSED, FAILED, MISSING])
    assert (
        "| 2.15 | not run | **1 failed**, 2 passed, 0 skipped; 0 s () | 3 passed, 1 skipped; 12 s (2026-11-22) |"
        in text
    )
    assert "- torch 2.15, Python 3.12: `tests.test_export::test_a` failed" in text
    assert "- torch 2.15, Python 3.11 was not run: there is no Python 3.11 on this machine" in text


def test_a_cell_fails_where_a_test_does_or_none_was_run() -> None:
    assert PASSED
    assert MISSING
    assert not FAILED
    assert not Cell("2.15", "3.13")


def test_a_python_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert python_of("9.9") is None
    assert "no Python 9.9" in run("no uv is needed", "2.15", "9.9").reason
    own = "{}.{}".format(*sys.version_info[:2])
    assert python_of(own) is not None


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    assert read(file) == []
    file.write_text(json.dumps([asdict(PASSED), asdict(FAILED)]))
    assert read(file) == [PASSED, FAILED]


def test_core_tests_and_locks_are_there() -> None:
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in CORE)
    assert all(lock_of(torch).is_file() for torch in TORCH)


def test_results_are_of_these_versions_and_the_page_is_theirs() -> None:
    cells = read(RESULTS / "matrix.json")
    assert {(c.torch, c.python) for c in cells} <= {(torch, python) for torch in TORCH for python in PYTHON}
    assert (RESULTS / "matrix.md").read_text() == page(cells)
