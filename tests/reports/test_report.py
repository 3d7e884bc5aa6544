"""The report says the same in both forms, groups what repeats, and hides nothing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from normdeploy.findings.finding_groups import describe_proof, group_findings
from normdeploy.findings.records import Certificate, Finding, HalfConstants, NormParameter, RuntimeSupport, Summary
from normdeploy.reports.report import SCHEMA, Report
from normdeploy.verbs.arguments.export_result import ExportResult
from normdeploy.verbs.build.build_function import Engine
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.runtime_candidates import NotRun

PROOF = Certificate(True, 2e-9, 1e-7, 14, "constant", rounding_before=2e-6, rounding_after=1e-6, rounding_bound=4e-6)


def fused(module: str, **changes: object) -> Finding:
    finding = Finding(
        kind="LayerNorm",
        status="fused",
        tensor=module + ".out",
        module=module,
        spelling="ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add",
        became="LayerNormalization(axis=-1, epsilon=1e-12)",
        axes=(2,),
        epsilon=1e-12,
        dtype="float32",
        certificate=PROOF,
        proved=("identity", "onnxruntime run"),
        nodes_left=1,
    )
    return dataclasses.replace(finding, **changes)  # type: ignore[arg-type]


def refused(module: str, reason: str) -> Finding:
    return Finding("unknown", "refused", "div_20", module, reason=reason)


def shown(*findings: Finding, width: int = 160, notes: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    ExportResult(None, None, Summary(findings, 598, 130, 21), notes).show(Console(file=out, width=width))
    return out.getvalue()


def paths(*modules: str) -> list[tuple[str, int]]:
    return [(g.name, len(g.findings)) for g in group_findings(fused(m) for m in modules)]


def test_layers_become_one_line() -> None:
    modules = [f"layers.{i}.norm{j}" for i in range(12) for j in (1, 2)]
    assert paths("embeddings.norm", *modules, "final") == [
        ("embeddings.norm", 1),
        ("layers.{0..11}.norm{1..2}", 24),
        ("final", 1),
    ]


def test_only_what_is_there_is_claimed() -> None:
    assert paths("a.0.n", "a.1.n", "a.4.n") == [("a.{0,1,4}.n", 3)]
    # no product: stage 1 has another number of blocks than stages 0 and 2
    assert paths("s.0.b.0", "s.0.b.1", "s.1.b.0", "s.2.b.0", "s.2.b.1") == [("s.{0,2}.b.{0..1}", 4), ("s.1.b.0", 1)]


def test_what_differs_stands_apart() -> None:
    findings = [
        fused("layers.0.norm"),
        fused("layers.1.norm", epsilon=1e-5),
        fused("layers.2.norm", notes=("inaccurate",)),
    ]
    assert [g.name for g in group_findings(findings)] == ["layers.0.norm", "layers.1.norm", "layers.2.norm"]


def test_nothing_is_lost_by_grouping() -> None:
    findings = [
        fused("a.0"),
        fused("a.0"),
        fused("a.1"),
        refused("a.0", "why"),
        fused("", tensor="t1"),
        fused("", tensor="t2"),
    ]
    groups = group_findings(findings)
    assert sorted(f.tensor for g in groups for f in g.findings) == sorted(f.tensor for f in findings)
    assert [g.name for g in groups] == ["a.{0..1}", "a.0", "(t{1..2})"]


def test_names_of_neighbours_are_grouped() -> None:
    text = shown(
        *(fused(f"block.{i}.bn", status="folded", became=f"folded into Conv 'block.{i}.conv'") for i in range(3))
    )
    assert "block.{0..2}.bn ×3" in text
    assert "folded into Conv 'block.*.conv'" in text
    assert "folded folded" not in text


def test_table_shows_every_part() -> None:
    text = shown(fused("norm"), refused("head", "its denominator is clamped"), notes=("not simplified",), width=220)
    for part in (
        "norm",
        "LayerNorm in 9 nodes",
        "fused into LayerNormalization(axis=-1, epsilon=1e-12)",
        "float64, error 2e-09, checked in onnxruntime",
    ):
        assert part in text
    for part in ("head", "skipped: its denominator is clamped", "note: not simplified"):
        assert part in text
    assert "1 fused, 1 skipped; norm nodes 9 → 1, all nodes 598 → 130; opset 21" in text


def test_worst_certificate_of_a_group_is_shown() -> None:
    worse = dataclasses.replace(PROOF, error=5e-8, rounding_after=9e-6)
    findings = [fused("a.0"), fused("a.1", certificate=worse), fused("a.2")]
    (group,) = group_findings(findings)
    assert describe_proof(group) == ["identity 5e-08 ≤ 1e-07, 42 inputs", "onnxruntime run 9e-06 > 4e-06"]
    assert "float64, error 5e-08, onnxruntime: error 9e-06 > 4e-06" in shown(*findings, width=220)


def test_of_the_runs_of_a_group_the_one_nearest_to_its_bound_is_shown() -> None:
    """A small error beyond a small bound is worse than a larger one within its own."""
    near = dataclasses.replace(PROOF, rounding_after=3e-7, rounding_bound=2e-7)
    findings = [fused("layers.0.norm"), fused("layers.1.norm", certificate=near), fused("layers.2.norm")]
    (group,) = group_findings(findings)
    assert "onnxruntime run 3e-07 > 2e-07" in describe_proof(group)


def test_failed_certificates_stand_with_their_reason() -> None:
    failed = dataclasses.replace(PROOF, identity=False, error=math.nan)
    text = shown(
        fused("a.0", status="undone", became="", reason="its certificate failed: differs by nan", certificate=failed)
    )
    assert "its certificate failed: differs by nan" in text
    assert "1 skipped" in text


def test_twelve_layers_fit_a_screen() -> None:
    modules = ["embeddings.norm", *(f"encoder.layer.{i}.{n}.norm" for i in range(12) for n in ("attention", "output"))]
    assert len(shown(*map(fused, modules), width=100).splitlines()) <= 24


def test_markup_in_names_is_only_text() -> None:
    assert "[red]x[/red].norm" in shown(fused("[red]x[/red].norm"))


def test_json_holds_what_the_table_holds() -> None:
    never = dataclasses.replace(PROOF, error=math.inf, rounding_before=math.nan)
    findings = (fused("norm"), fused("other", certificate=never), refused("head", "why"))
    report = Report("export", {"source": "model.pt"}, Summary(findings, 9, 4, 21), notes=("a",), seconds={"load": 0.5})
    document = json.loads(report.to_json(), parse_constant=lambda name: f"bare {name}")
    assert document["schema"] == SCHEMA == "normdeploy/report/1"
    assert document["nodes"] == {"before": 9, "after": 4}
    assert document["opset"] == 21
    assert [n["module"] for n in document["norms"]] == ["norm", "other", "head"]
    assert document["norms"][0] == {
        **json.loads(json.dumps(dataclasses.asdict(findings[0]))),
        "certificate": {**dataclasses.asdict(PROOF), "rounding_ok": True},
    }
    assert document["norms"][0]["proved"] == ["identity", "onnxruntime run"]
    assert document["norms"][1]["certificate"]["error"] == "inf"
    assert document["norms"][1]["certificate"]["rounding_before"] == "nan"
    assert document["norms"][2]["certificate"] is None
    assert document["seconds"] == {"load": 0.5}


ENGINE = Engine(
    path=Path("[b]m.engine"),
    bytes=95_300_000,
    runtime="tensorrt-rtx",
    version="1.7.1.116",
    compute_capabilities=("8.6", "12.0"),
    profile={"ids": ((1, 1), (6, 16), (32, 256))},
    layers=477,
    seconds=2.5,
)


def test_engine_is_called_built_and_not_run() -> None:
    out = io.StringIO()
    ENGINE.show(Console(file=out, width=120))
    text = out.getvalue()
    for part in (
        "m.engine",
        "tensorrt-rtx 1.7.1.116",
        "95.3 MB",
        "477 layers",
        "8.6, 12.0",
        "shapes of ids: 1×1 to 32×256, fastest at 6×16",
        "built; not run",
    ):
        assert part in text


def test_engine_in_json() -> None:
    document = json.loads(Report("build", {}, sections={"engine": ENGINE.to_json()}).to_json())
    assert document["engine"]["path"] == "[b]m.engine"
    assert document["engine"]["profile"] == {"ids": [[1, 1], [6, 16], [32, 256]]}
    assert document["engine"]["proved"] == "built only"
    assert (document["opset"], document["nodes"], document["norms"], document["parity"]) == (None, None, [], None)


def parity(verdict: Literal["pass", "fail"]) -> Comparison:
    results = (
        OutputResult("logits", "eager", "float32", 3e-7, 1e-2, 1.5e-6, "pass", "seed 0"),
        OutputResult(
            "logits",
            "onnxruntime (optimizer on)",
            "float32",
            4e-3,
            math.inf,
            1.5e-6,
            verdict,
            "zeros",
            reason="its [optimizer]",
        ),
    )
    return Comparison(results, (NotRun("TensorRT", "no GPU"),), ("seed 0", "zeros"), notes=("one size left out",))


def test_parity_shows_errors_verdicts_and_what_was_not_run() -> None:
    out = io.StringIO()
    parity("fail").show(Console(file=out, width=200))
    text = out.getvalue()
    for part in (
        "logits",
        "eager",
        "3.00e-07",
        "1.50e-06",
        "pass",
        "4.00e-03",
        "fail: logits, onnxruntime (optimizer on): its [optimizer]",
        "zeros",
    ):
        assert part in text
    for part in ("not run: TensorRT: no GPU", "note: one size left out", "NOT verified on 2 inputs"):
        assert part in text
    parity("pass").show(Console(file=out, width=200))
    assert "\nverified on 2 inputs" in out.getvalue()


@pytest.mark.parametrize("files", [("", ""), ("one.onnx", "two.onnx")])
def test_parity_in_80_columns_breaks_no_word_and_no_number(files: tuple[str, str]) -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    told = parity("fail")
    far = [
        dataclasses.replace(r, case="inputs around 0.0001, d0=2", runtime=f"{r.runtime}\x1b[31m", file=file)
        for r, file in zip(told.results, files, strict=True)
    ]
    dataclasses.replace(told, results=tuple(far)).show(console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for part in ("onnxruntime", "(optimizer", "4.00e-03", "1.50e-06", "fail", "around", *files):
        assert not part or part in text.split()


def test_parity_in_json() -> None:
    document = json.loads(Report("verify", {}, sections={"parity": parity("fail").to_json()}).to_json())["parity"]
    assert document["ok"] is False
    assert [(r["runtime"], r["verdict"]) for r in document["results"]] == [
        ("eager", "pass"),
        ("onnxruntime (optimizer on)", "fail"),
    ]
    assert document["results"][1]["max_rel_error"] == "inf"
    assert document["not_run"] == [{"runtime": "TensorRT", "reason": "no GPU", "file": ""}]
    assert "float64" in document["rule"]["reference"]


# ------------------------------------------------------------------ inspect


def inspected(*findings: Finding, width: int = 160, notes: tuple[str, ...] = ()) -> str:
    out = io.StringIO()
    Summary(findings, 598, 130, 21, notes=notes).show(Console(file=out, width=width))
    return out.getvalue()


def known(module: str, **changes: object) -> Finding:
    return fused(
        module,
        **{
            "shape": ("batch", "seq", 384),
            "ddof": 1,
            "epsilon": 9.97e-6,
            "epsilon_as_written": 1e-5,
            "gamma": NormParameter(False, (2,), "w", one_plus=True),
            "beta": NormParameter(True, (2,)),
            "statistics": "float16 and float32",
            "half": (HalfConstants("float16", 0.0, "zero", ("w",)), HalfConstants("bfloat16", 1e-5, "", ())),
            "runtimes": (
                RuntimeSupport("onnxruntime 1.31.1 CPU", "now", ("A", "B"), "function", ("A",) * 9, "no kernel of B"),
                RuntimeSupport(
                    "onnxruntime 1.31.1 CPU", "optimized", ("LayerNormalization",), "kernel", ("LayerNormalization",)
                ),
                RuntimeSupport(
                    "TensorRT-RTX 1.7", "optimized", ("LayerNormalization",), "missing", (), "[red]no[/red] importer"
                ),
            ),
            **changes,
        },
    )


def test_census_tells_all_that_is_known() -> None:
    text = " ".join(inspected(known("norm"), notes=("CUDA was not asked",), width=240).split())
    for part in (
        "over axis 2 of (batch, seq, 384), ε 1e-05, variance unbiased (ddof 1), statistics in float16 and float32",
        "γ = 1 + w along axis 2 and β from data along axis 2",
        "in float16 ε 1e-05 becomes 0; these constants overflow: w",
        "would be fused into LayerNormalization(axis=-1, epsilon=1e-12)",
        "onnxruntime CPU now: function (A×9): no kernel of B optimized: kernel (LayerNormalization)",
        "TensorRT-RTX optimized: missing: [red]no[/red] importer",
        "with optimize: 1 fused; norm nodes 9 → 1, all nodes 598 → 130",
        "note: CUDA was not asked",
    ):
        assert part in text
    assert "in bfloat16" not in text


def test_census_of_many_layers_is_one_block_at_any_width() -> None:
    findings = [known(f"layers.{i}.norm", tensor=f"t{i}") for i in range(500)]
    for width in (60, 100, 200):
        text = inspected(*findings, width=width)
        assert "layers.{0..499}.norm ×500" in text
        assert len(text.splitlines()) < 30
        assert max(map(len, text.splitlines())) <= width


def test_what_runtimes_make_of_it_stands_apart() -> None:
    other = known("layers.1.norm", runtimes=())
    assert [g.name for g in group_findings([known("layers.0.norm"), other])] == ["layers.0.norm", "layers.1.norm"]


def test_numbers_of_scattered_names_are_not_all_listed() -> None:
    groups = group_findings(fused("", tensor=f"mul_{7 * i}") for i in range(100))
    assert [g.name for g in groups] == ["(mul_{0,7,14,21,…,693})"]
