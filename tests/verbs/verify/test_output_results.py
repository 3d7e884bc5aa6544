"""The numbers of a result are those of the rule that decided."""

from __future__ import annotations

from typing import Literal

import pytest

from normdeploy.verbs.verify.output_results import TOLERANCE, OutputResult
from normdeploy.verbs.verify.rule_measures import RuleVerdict


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_given_tolerance_gives_error_bound_and_case_whether_it_holds_or_not(verdict: Literal["pass", "fail"]) -> None:
    rule = RuleVerdict("tolerance 0.5:0", TOLERANCE, 0.25, 0.5, verdict, "seed 2")
    result = OutputResult("y", "onnxruntime", "float32", 1e-9, 1e-9, 2e-9, verdict, "seed 0", rules=(rule,))
    assert (result.error_text, result.allowed_text) == ("2.50e-01", "5.00e-01")
    assert result.row()[-1] == "seed 2"


def test_default_rule_gives_error_and_bound_without_given_rules() -> None:
    result = OutputResult("y", "onnxruntime", "float32", 1e-9, 1e-9, 2e-9, "pass", "seed 0")
    assert (result.error_text, result.allowed_text) == ("1.00e-09", "2.00e-09")
