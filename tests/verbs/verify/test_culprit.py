"""Whether onnxruntime's optimizer is to blame, asked of verdicts alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from normdeploy.verbs.verify import culprit
from normdeploy.verbs.verify.candidates import Candidate
from normdeploy.verbs.verify.results import OutputResult
from normdeploy.verbs.verify.spending import Clock


def result(passes: bool, by_default: str) -> OutputResult:
    verdict = "pass" if passes else "fail"
    return OutputResult("y", "onnxruntime", "float32", 0.0, 0.0, 0.0, verdict, "a case", by_default=by_default)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("off", "on", "accused"), [(True, False, True), (True, True, False), (False, False, False), (False, True, False)]
)
def test_where_rules_decide_on_a_quantized_file_the_whole_optimizer_is_accused(
    off: bool, on: bool, accused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default rule says nothing there, and no search for a part of the optimizer could be judged by it."""

    def searched(*args: object) -> None:
        raise AssertionError("a part was searched for")

    monkeypatch.setattr(culprit, "_blame", searched)
    candidates = [Candidate(name, lambda: None, provider="cpu", optimize=name == "on") for name in ("off", "on")]  # type: ignore[arg-type, return-value]
    verdicts = {"off": [result(off, "")], "on": [result(on, "")]}
    trial = SimpleNamespace(candidates=candidates, results=lambda candidate: verdicts[candidate.name])
    culprit.accuse(trial, lambda *args: None, Clock(60.0))  # type: ignore[arg-type]
    assert bool(candidates[1].advice) == accused
    assert not candidates[0].advice
