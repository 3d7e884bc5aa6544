"""The measured page says what the numbers beside it and today's tactics say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from normdeploy_plugins.ops import BY_NAME

from benchmarks.kernels import RESULTS, page, tile_name, trials

MEASURED = json.loads((RESULTS / "kernels.json").read_text())
ROWS = {(r["op"], r["dtype"], r["size"], r["channels_last"]): r for r in MEASURED["rows"]}


@pytest.mark.parametrize("name", ["kernels", "kernels_h100"])
def test_the_page_is_made_of_the_numbers(name: str) -> None:
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == page(measured, name)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_first_tactic_was_measured_as_the_default(dtype: str) -> None:
    """A change of the tactics makes the page old: it has to be measured again, or its numbers looked up again."""
    for trial in trials(list(BY_NAME), [dtype], 128):
        row: dict[str, Any] = ROWS[trial.op, dtype, trial.size, trial.attributes.get("channels_last")]
        names = [tile_name(tile) for tile in BY_NAME[trial.op].tiles(trial.tensors()[0], trial.attributes)]
        assert set(names) == set(row["tactics"])
        assert row["tactics"][names[0]] == row["microseconds"]["default"]
