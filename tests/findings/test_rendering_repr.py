"""``repr`` of results and records: one line that tells the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normdeploy.findings.precision_report import Float32Region, PrecisionReport
from normdeploy.findings.quantization_report import LayerReport, Migration, QuantizationReport
from normdeploy.findings.records import Certificate, Explanation, Finding, QuantizedLayer, Summary
from normdeploy.findings.rendering import Renderable, ShortRepr
from normdeploy.fleet.outcomes import CellOutcome, FleetRun
from normdeploy.verbs.bench.machine_info import MachineInfo
from normdeploy.verbs.bench.model_benchmark import Race, RaceEntry
from normdeploy.verbs.bisect.fault_tracing import Fault
from normdeploy.verbs.bisect.file_bisection import Bisection
from normdeploy.verbs.bisect.runtime_faults import Float32Trial
from normdeploy.verbs.build.build_function import Engine
from normdeploy.verbs.check.check_function import Check, CheckedFile
from normdeploy.verbs.check.norm_rules import Problem
from normdeploy.verbs.package.package_function import Package
from normdeploy.verbs.package.sample_judgement import Judgement
from normdeploy.verbs.package.triton_config import ServingOptions
from normdeploy.verbs.recheck.bundle_change import BundleChange
from normdeploy.verbs.recheck.recheck_function import Recheck
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.parts_comparison import PartsComparison
from normdeploy.verbs.verify.tensor_drift import DriftPoint

PROOF = Certificate(True, 0.0, 0.0, 48, "", 2e-6, 1e-6, 4e-6, method="exact", bits=134)
NORM = Finding("LayerNorm", "fused", "y", "encoder.norm", became="LayerNormalization(axis=-1)", certificate=PROOF)
PASS = OutputResult("y", "onnxruntime (optimizer on)", "float32", 1e-7, 1e-5, 4e-7, "pass", "seed 0", file="m.onnx")
FAIL = replace(PASS, verdict="fail", max_abs_error=3e-3)
GOOD, BAD = (Comparison((r,) * 40, (), ("seed 0",) * 30) for r in (PASS, FAIL))
FAULT = Fault(
    runtime="onnxruntime", case="zeros", module="layers.3", tensor="t", nodes=("Sqrt n",) * 90, kind="epsilon",
    cause="ε is 1e-5, not 1e-12", widened=Float32Trial(False), output="y", output_error=0.1, output_allowed=1e-6,
    output_reason="",
)  # fmt: skip
MACHINE = MachineInfo("cpu", 2, 0.5, "Linux", {})
ENTRY = RaceEntry("eager", median=2.0, p95=2.5, p99=3.0, samples=(2.0,) * 400, error=3e-7)
RACE = Race(1, 5, 40, 0, {"x": (4, 8)}, "the model in float64", (ENTRY,), (), MACHINE, 0.5)
CELLS = (CellOutcome("net", "fp32", "cpu", "verified"), CellOutcome("net", "fp16", "cpu", "wrong", "it is off"))
FLEET = FleetRun("1", "fleet.toml", "store", CELLS[:1], 3, 1, 2.0, "now")
PROBLEM = Problem("eps-lost", "ε becomes 0", module="norm", level="error")
JUDGED = Judgement((PASS,), (), ("sample",))
PACKAGE = Package(Path("bundle"), ("net",), ServingOptions(0, (), 1), JUDGED, True, 9, 2_000_000, (), 1.0)
RECHECK = Recheck(Path("bundle"), "net", "today", 9, (), None, (), 1.0)
ENGINE = Engine(Path("m.engine"), 95_300_000, "tensorrt-rtx", "1.7.1", ("8.6",), {}, 477, 2.5)


@pytest.mark.parametrize(
    ("value", "begins"),
    [
        (PROOF, "<Certificate: proved, exact, 48 points, error 2^-134; checked in onnxruntime>"),
        (replace(PROOF, identity=False, note="differs"), "<Certificate: NOT proved, "),
        (NORM, "<Finding: fused, LayerNorm 'encoder.norm': LayerNormalization(axis=-1)>"),
        (Explanation("norm", NORM, "x", (), ()), "<Explanation: 'norm': fused, LayerNorm"),
        (QuantizedLayer("h", "MatMul", "m", "x", "quantized", "int8"), "<QuantizedLayer: quantized, MatMul 'm': int8>"),
        (Summary((NORM,) * 500, 62, 13, 21), "<Summary: 500 fused; norm nodes "),
        (Float32Region("range", "Pow", "m", "t", "too large"), "<Float32Region: range, Pow 'm'"),
        (PrecisionReport("fp16", (), 80, 2, 4, (2, 1), "", 0, {}, {}), "<PrecisionReport: fp16: 2 of 80"),
        (LayerReport("h", "MatMul", "m", "x", "float", "it costs most"), "<LayerReport: float, MatMul 'm': it costs"),
        (Migration("smooth", "n", (), "refused", "why"), "<Migration: refused, smooth of 'n': why>"),
        (QuantizationReport("int8", "any", "minmax", 4, 4, ()), "<QuantizationReport: int8 for any: 0 of 0"),
        (PASS, "<OutputResult: pass, y, onnxruntime (optimizer on), m.onnx: error 1.00e-07, allowed 4.00e-07"),
        (FAIL, "<OutputResult: fail, y"),
        (DriftPoint("m", "t", "out of m", 1.0, 0.0, 0.5, 1.0), "<DriftPoint: fail, out of m 't'"),
        (GOOD, "<Comparison: verified on 30 inputs"),
        (BAD, "<Comparison: NOT verified on 30 inputs"),
        (PartsComparison({"a.onnx": GOOD}), "<PartsComparison: all 1 parts are verified>"),
        (PartsComparison({"a.onnx": BAD}), "<PartsComparison: 1 of 1 parts fail: a.onnx>"),
        (FAULT, "<Fault: layers.3, Sqrt n, Sqrt n: epsilon: ε is 1e-5"),
        (Bisection(GOOD), "<Bisection: no output leaves the bound>"),
        (Bisection(BAD, (FAULT,)), "<Bisection: 1 fault; layers.3"),
        (ENTRY, "<RaceEntry: eager: median 2 ms, error 3.0e-07>"),
        (RACE, "<Race: 1 of 1 timed in 40 rounds; fastest eager: median 2 ms"),
        (
            replace(RACE, entries=(RaceEntry("x", reason="no kernel"),)),
            "<Race: FAILED, x: not timed: no kernel; 0 of 1",
        ),
        (ENGINE, "<Engine: built, not run; m.engine: tensorrt-rtx 1.7.1, 95.3 MB, 477 layers, for 8.6>"),
        (PROBLEM, "<Problem: error, eps-lost at module 'norm': ε becomes 0>"),
        (Check((CheckedFile("m.onnx"),), ()), "<Check: passed; 1 file"),
        (Check((CheckedFile("m.onnx", (PROBLEM,) * 99),), ()), "<Check: FAILED; 1 file: 99 errors"),
        (RECHECK, "<Recheck: nothing got worse; bundle: net, 9 files compared, 0 changed>"),
        (replace(RECHECK, changes=(BundleChange("file", "f", "a", "b", True),)), "<Recheck: 1 got worse; "),
        (PACKAGE, "<Package: every sample is as expected; bundle: net; 9 files, 2.0 MB>"),
        (replace(PACKAGE, judgement=Judgement((FAIL,), (), ("sample",))), "<Package: NOT as expected; "),
        (FLEET, "<FleetRun: 1 cell: 1 verified"),
        (replace(FLEET, cells=CELLS), "<FleetRun: FAILED; 2 cells: 1 verified, 1 wrong"),
        (CELLS[1], "<CellOutcome: wrong, net/fp16/cpu: it is off>"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_repr_is_one_line_that_tells_the_verdict(value: Any, begins: str) -> None:
    text = repr(value)
    assert text.startswith(begins), text
    assert len(text) <= 300
    assert "\n" not in text


def test_repr_of_hostile_name_is_one_printable_line() -> None:
    text = repr(replace(NORM, module="a\x1b[31m\n" + "x" * 9000))
    assert len(text) <= 300
    assert text.isprintable()


def subclasses(kind: type) -> list[type]:
    return [kind, *(found for child in kind.__subclasses__() for found in subclasses(child))]


def test_every_result_has_the_short_repr() -> None:
    results = [kind for kind in subclasses(Renderable) if kind.__module__.startswith("normdeploy")]
    assert len(results) >= 12
    for kind in results:
        assert kind.__repr__ is ShortRepr.__repr__, kind
