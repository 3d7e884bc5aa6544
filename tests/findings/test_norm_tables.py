"""The table of norms and its totals, as a person reads them in a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from normdeploy.findings.norm_tables import show_norms
from normdeploy.findings.records import STATUS_WORDS, Certificate, Finding, Summary

EXACT = Certificate(True, 0.0, 0.0, 48, "", 2e-6, 1e-6, 4e-6, method="exact", bits=134)
SPELLING = "ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"
FUSED = Finding(
    "LayerNorm",
    "fused",
    "y",
    "encoder.self_attention.layer_norm",
    spelling=SPELLING,
    became="LayerNormalization(axis=-1, epsilon=1e-12)",
    certificate=EXACT,
    proved=("identity", "onnxruntime run"),
    nodes_left=1,
)


def table(*findings: Finding, width: int = 80, **summary: Any) -> str:
    out = io.StringIO()
    known = {"nodes_before": 62, "nodes_after": 13, "opset": 21} | summary
    show_norms(Console(file=out, width=width), Summary(findings, **known))
    return out.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def test_table_of_fused_norm_tells_result_and_proof_in_plain_words() -> None:
    text = table(FUSED, width=200)
    assert words(text).startswith("module norm result proof ")
    for part in ("LayerNorm in 9 nodes", "LayerNormalization(axis=-1, epsilon=1e-12)", "exact, checked in onnxruntime"):
        assert part in text
    for number in ("2^-134", "48 points", "1e-06", "4e-06"):
        assert number not in text


def test_proof_by_float64_tells_its_error() -> None:
    proof = Certificate(True, 2e-9, 1e-7, 14, "constant")
    text = table(Finding("LayerNorm", "fused", "y", "m", certificate=proof, proved=("identity",)), width=120)
    assert "float64, error 2e-09" in text


def test_proof_that_onnxruntime_fails_tells_both_numbers() -> None:
    proof = Certificate(True, 0.0, 0.0, 48, "", 1e-6, 3e-3, 4e-6, method="exact", bits=134)
    finding = Finding("LayerNorm", "fused", "y", "m", certificate=proof, proved=("identity", "onnxruntime run"))
    assert "onnxruntime: error 0.003 > 4e-06" in words(table(finding, width=200))


@pytest.mark.parametrize("status", ["refused", "undone"])
def test_norm_that_was_not_rewritten_is_skipped_with_reason(status: Any) -> None:
    text = table(Finding("LayerNorm", status, "y", "m", spelling="Sub Div", reason="its root is not a deviation"))
    assert "skipped: its root is not a deviation" in words(text)
    assert "1 skipped" in text
    assert status not in text
    assert "proof" not in text


def test_statuses_are_four_words() -> None:
    assert list(dict.fromkeys(STATUS_WORDS.values())) == ["fused", "folded", "kept", "skipped"]


def test_totals_count_norm_nodes_beside_all_nodes() -> None:
    text = words(table(FUSED, Finding("BatchNorm", "kept", "z", "bn", spelling="BatchNormalization", reason="one")))
    assert "1 fused, 1 kept; norm nodes 10 → 2, all nodes 62 → 13; opset 21" in text


def test_norm_nodes_of_a_summary_have_names() -> None:
    counts = Summary((FUSED,), nodes_before=62, nodes_after=13, opset=21).norm_nodes
    assert (counts.before, counts.after, str(counts)) == (9, 1, "9 → 1")


def test_totals_of_larger_file_explain_the_growth() -> None:
    grown = {"nodes_after": 80, "ops_before": {"Add": 3}, "ops_after": {"Add": 3, "Cast": 12, "Reshape": 8}}
    text = words(table(FUSED, **grown))
    assert (
        "all nodes 62 → 80: 12 more Cast (between half precision and float32), 8 more Reshape (copies nothing);" in text
    )


def test_totals_of_reduced_norm_name_what_is_left() -> None:
    reduced = Finding(
        "BatchNorm", "folded", "z", "bn", spelling="BatchNormalization", became="x", remains="Mul Add", nodes_left=2
    )
    assert "1 folded (left: 1 × Mul and Add); norm nodes 1 → 2" in words(table(reduced))


def test_table_of_80_columns_breaks_no_name() -> None:
    lines = table(FUSED).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for name in ("self_attention.", "layer_norm", "LayerNormalization(", "onnxruntime", "epsilon=1e-12)"):
        assert name in text, name
