"""What a cell that is wrong says, from the report that its verb wrote."""

from __future__ import annotations

from typing import Any

import pytest

from normdeploy.fleet.step_execution import describe_wrong_result

ROW = {"runtime": "toy", "output": "y", "max_abs_error": 2.0, "allowed": 1.0, "verdict": "fail", "reason": ""}
VOID = (
    "its quantization steps by themselves may move this output by 29% of its size, so the default rule can't tell"
    " right from wrong: pass a metric (--metric)"
)
ALTERED = {"origin": "altered", "name": "w", "reason": "3 of 8 elements differ from w"}


@pytest.mark.parametrize(
    ("results", "weights", "said"),
    [
        ([ROW], [], "toy: output 'y' differs by 2; the allowed error is 1"),
        ([ROW, ROW], [ALTERED], "toy: output 'y' differs by 2; the allowed error is 1 (2 rows fail)"),
        ([ROW | {"max_abs_error": 0.1, "reason": VOID}], [], f"toy: output 'y': {VOID}"),
        ([ROW | {"verdict": "pass"}], [{"origin": "folded"}, ALTERED], "weight w: 3 of 8 elements differ from w"),
        ([ROW | {"verdict": "pass"}], [], "the verb ended with exit code 1; see its log"),
    ],
)
def test_a_wrong_cell_says_why(results: list[Any], weights: list[Any], said: str) -> None:
    assert describe_wrong_result({"parity": {"results": results, "weights": weights}}) == said
