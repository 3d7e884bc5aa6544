"""`benchmarks.migration_lookalikes` in small: its judge sees planted faults, and nothing drawn is migrated wrongly."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.migration_lookalikes import planted
from benchmarks.migration_lookalikes.__main__ import Tally, judged, tells
from benchmarks.migration_lookalikes.graphs import Drawn, drawn
from benchmarks.migration_lookalikes.judge import fault, runs


@pytest.fixture(scope="module")
def plain() -> list[Drawn]:
    """Three graphs in which every fault changes an answer."""
    graphs = (drawn(seed) for seed in itertools.count())
    return list(itertools.islice((g for g in graphs if g.plain and tells(g.proto)), 3))


def test_a_right_migration_is_none_to_complain_of(plain: list[Drawn]) -> None:
    assert [fault(g.proto, planted.right(g.proto)) for g in plain] == ["", "", ""]


@pytest.mark.parametrize("name", planted.FAULTS)
def test_planted_faults_are_seen(name: str, plain: list[Drawn]) -> None:
    assert all(fault(g.proto, planted.FAULTS[name](g.proto)) for g in plain)


def test_no_lookalike_is_migrated_wrongly() -> None:
    tally = Tally()
    for seed in range(20_000, 20_080):
        graph = drawn(seed)
        if runs(graph.proto):
            judged(seed, graph, tally)
    assert not tally.false
    assert tally.moves > 10  # or nothing was tried
    assert not tally.plain_left
