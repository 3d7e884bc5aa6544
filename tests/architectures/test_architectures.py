"""No decomposed norm is left that is expressible, nothing is worse than the exporter's own file, parity at two batch
sizes and more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.architectures.catalogue import Architecture

from .expected import JOINED, TESTED, tested
from .measure import Result, Row, measured

pytestmark = pytest.mark.architectures


@pytest.mark.parametrize("architecture", tested(), ids=lambda a: a.name)
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    try:
        row = measured(architecture, tmp_path)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed; make test-architectures installs it")
    assert row.norm_calls > 0
    assert row.ours.accounted == row.norm_calls, row.ours.norms  # from the module every one is seen
    for result in (row.ours, row.rewritten, row.portable):
        _holds(architecture, row, result)
    assert row.portable.own == JOINED.get(architecture.name, {})
    for engine in (row.engine, row.portable_engine):
        assert engine.startswith(("built", "not tried")), engine


def test_the_tested_are_in_the_catalogue() -> None:
    assert [a.name for a in tested()] == sorted(TESTED, key=[a.name for a in tested()].index)


def _holds(architecture: Architecture, row: Row, result: Result) -> None:
    assert not result.failed
    assert not result.checked
    assert result.nodes <= row.exporter_nodes
    assert not any(what.endswith("undone") for what in result.norms), result.refused
    refused = [f["reason"] for f in result.refused if f["status"] == "refused"]
    unexpected = [reason for reason in refused if not any(part in reason for part in architecture.left)]
    assert not unexpected
    for part, count in architecture.left.items():
        assert sum(part in reason for reason in refused) == count
    assert len(result.left) == sum(architecture.left.values()), result.left
    assert result.parity
    assert all(p["ok"] for p in result.parity) or result.excused, result.parity
