"""The runner of mutants (`benchmarks.mutants`): its lists and its table; no mutant is run here."""

from dataclasses import replace

import pytest

from benchmarks.mutants.__main__ import ROOT, USUAL, Mutant, Outcome, listed, occurrences, page, run_again

LISTS = (USUAL, "strangers")


@pytest.mark.parametrize("name", LISTS)
def test_every_mutant_can_be_run(name):
    mutants = listed(name)
    assert len({m.key for m in mutants}) == len(mutants)
    for m in mutants:
        assert m.old != m.new, m.key
        assert m.breaks, m.key
        assert m.tests, m.key
    assert [f"there is no {t}" for m in mutants for t in m.tests if not is_test(t)] == []
    # the line of a redundant one has been deleted
    counts = {m.key: occurrences(ROOT, m) for m in mutants if not m.redundant}
    assert {key: n for key, n in counts.items() if n != 1} == {}


def is_test(name: str) -> bool:
    """Whether a file of tests, or a folder of them, is there and has the function that is named."""
    file, _, function = name.partition("::")
    if not function:
        return (ROOT / file).exists()
    return (ROOT / file).is_file() and f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_mutant_is_stale_where_its_text_is_gone(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    mutant = Mutant("a.py", "x = 1", "x = 2", "x", ("tests",))
    assert occurrences(tmp_path, mutant) == 1
    assert occurrences(tmp_path, replace(mutant, old="= 1")) == 2
    assert occurrences(tmp_path, replace(mutant, old="x = 3")) == 0
    assert occurrences(tmp_path, replace(mutant, file="b.py")) == 0


def test_the_first_verdict_is_kept():
    survived, killed = Outcome("survived", "", 1.0), Outcome("killed", "tests/test_x.py::test_y", 1.0)
    stale = run_again(None, Outcome("stale", "its old text stands there 0 times", 0.0))
    first = run_again(None, survived)
    assert not first.since
    assert run_again(first, killed).since
    assert run_again(run_again(first, killed), killed).since
    assert not run_again(None, killed).since
    assert not run_again(stale, killed).since  # it had not been run before
    assert not Outcome("killed", "", 1.0).since  # of a table that was written without first verdicts


def test_the_table_counts_what_was_killed_since():
    mutants = [Mutant(f"normdeploy/{n}.py", "a", "b", f"breaks {n}", ("tests",)) for n in "abc"]
    outcomes = {
        mutants[0].key: Outcome("killed", "tests/test_x.py::test_a", 1.0, "killed"),
        mutants[1].key: Outcome("killed", "tests/test_x.py::test_b", 1.0, "survived"),
        mutants[2].key: Outcome("equivalent", "no input differs", 1.0, "survived"),
    }
    text = page(mutants, outcomes, "strangers")
    assert "3 mutants: 2 killed, 1 equivalent. Of those killed 1 survived at first" in text
    assert "| `normdeploy/b.py` | breaks b | killed since | `tests/test_x.py::test_b` |" in text
    assert "| `normdeploy/a.py` | breaks a | killed | `tests/test_x.py::test_a` |" in text
    assert "benchmarks.mutants --list strangers" in text
    assert "survived at first" not in page(mutants[:1], outcomes)
    assert "not run yet" not in text
    assert "1 mutants: 1 killed. 2 more in the list were not run yet." in page(
        mutants, {mutants[0].key: outcomes[mutants[0].key]}
    )
