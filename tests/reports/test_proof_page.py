"""The page of a proof: verdict, counterexample, places, rounded constants and Casts."""

from __future__ import annotations

from typing import Any

import pytest

from normdeploy.errors import NormdeployError
from normdeploy.reports.proof_page import SCHEMA, render_proof_page

DOCUMENT: dict[str, Any] = {
    "schema": SCHEMA,
    "verdict": "different",
    "first": "a.onnx",
    "second": "<b>.onnx",
    "outputs": 1,
    "error_bits": 0,
    "sizes": "",
    "rounded": [],
    "casts": [],
    "reason": "the output 'y' differs",
    "places": [{"op": "Exp", "tensor": "e", "inputs": ["x"]}, None],
    "counterexample": {"output": "y", "index": [1, 2], "first": 0.25, "second": "nan", "inputs": "zeros"},
    "notes": ["a note"],
    "seconds": 1.0,
}


def test_render_proof_page_shows_counterexample_and_place() -> None:
    page = render_proof_page(DOCUMENT, "different: the output 'y' differs")
    assert "y[1, 2]" in page
    assert "0.25" in page
    assert "nan" in page
    assert "Exp" in page
    assert "a note" in page
    assert "&lt;b&gt;.onnx" in page
    assert "<b>.onnx" not in page


def test_render_proof_page_lists_the_worst_roundings_first_and_counts_the_rest() -> None:
    rounded = [{"name": f"c{i}", "ulps": i / 1000, "bound": 1.0} for i in range(250)]
    casts = [{"tensor": "h", "type": "float16"}]
    proved = DOCUMENT | {"verdict": "equal up to rounding", "counterexample": None, "places": [None, None]}
    page = render_proof_page(proved | {"rounded": rounded, "casts": casts, "error_bits": 144}, "proved equal")
    assert page.index("c249") < page.index("c248")
    assert "50 more rows" in page
    assert "float16" in page
    assert "144" in page
    assert "Counterexample" not in page


def test_render_proof_page_refuses_another_schema() -> None:
    with pytest.raises(NormdeployError, match="schema"):
        render_proof_page(DOCUMENT | {"schema": "normdeploy/report/1"}, "")
