"""Whether onnxruntime's optimizer is to blame, asked of verdicts alone, and of its reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.verbs.verify import optimizer_bisect
from normdeploy.verbs.verify.compute_budget import BudgetClock
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.runtime_candidates import ON, STEPWISE, RuntimeCandidate


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

    monkeypatch.setattr(optimizer_bisect, "blame_optimizer", searched)
    candidates = [RuntimeCandidate(name, lambda: None, provider="cpu", optimize=name == "on") for name in ("off", "on")]  # type: ignore[arg-type, return-value]
    verdicts = {"off": [result(off, "")], "on": [result(on, "")]}
    trial = SimpleNamespace(candidates=candidates, candidate_results=lambda candidate: verdicts[candidate.name])
    optimizer_bisect.blame_optimizers(trial, lambda *args: None, BudgetClock(60.0))  # type: ignore[arg-type]
    assert bool(candidates[1].advice) == accused
    assert not candidates[0].advice


@pytest.mark.parametrize(("epsilon", "right"), [(1e-5, True), (1.1e-5, False)])
def test_runtime_that_is_off_on_the_reference_too_is_not_the_files_fault(
    epsilon: float, right: bool, tmp_path: Path
) -> None:
    """onnxruntime fuses an RMS norm in double with an epsilon in float32."""

    def write(value: float, name: str) -> Path:
        proto = onnx.parser.parse_model("""<ir_version: 11, opset_import: ["" : 24]>
            g (double[N, 12, 8] x) => (double[N, 12, 8] y) <int64[1] axes = {2}, double two = {2.0}> {
              s = Pow(x, two) m = ReduceMean(s, axes) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, gamma)
            }""")
        gamma = np.random.default_rng(0).standard_normal(8) + 1
        for weight, numbers in (("gamma", gamma), ("eps", np.array(value))):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers, weight))
        onnx.save(proto, tmp_path / name)
        return tmp_path / name

    comparison = normdeploy.verify(write(1e-5, "reference.onnx"), write(epsilon, "file.onnx"), seeds=1)
    assert bool(comparison) == right, str(comparison)
    told = [missed.reason for missed in comparison.not_run if missed.runtime == ON]
    assert bool(told) == right
    assert all("the runtime is wrong, not the file: reference.onnx itself is off" in reason for reason in told)


def test_no_optimizer_is_blamed_for_a_layer_that_the_file_has_in_half(tmp_path: Path) -> None:
    """With the optimizer off, onnxruntime's CPU provider drops the Casts; with it on, it folds the weight's."""
    head = '<ir_version: 8, opset_import: ["": 17]> net (float[n,16] x) => (float[n,16] y)'
    narrow = """a = Cast <to = 10> (x)  b = Cast <to = 10> (weight)  product = MatMul (a, b)
      wide = Cast <to = 1> (product)"""
    for name, body in {"wide": "wide = MatMul (x, weight)", "half": narrow}.items():
        proto = onnx.parser.parse_model(f"{head} {{ {body}  up = MatMul (wide, weight)  y = MatMul (up, weight) }}")
        weight = np.random.default_rng(0).standard_normal((16, 16), np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
        onnx.save(proto, tmp_path / f"{name}.onnx")
    comparison = normdeploy.verify(tmp_path / "wide.onnx", tmp_path / "half.onnx", seeds=2)
    failed = {result.runtime for result in comparison.results if not result}
    assert failed == {ON, STEPWISE}
    assert not any(result.culprit or "optimizer is the cause" in result.reason for result in comparison.results)
