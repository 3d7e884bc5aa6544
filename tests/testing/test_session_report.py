"""The report of a session as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from normdeploy.errors import NormdeployError
from normdeploy.testing.session_report import make_document, write_session_report
from normdeploy.testing.verdicts import Verdict

GOOD = asdict(Verdict(assertion="assert_norms_fused", ok=True, text="fine", versions={"onnx": "1"})) | {"test": "b"}
BAD = asdict(
    Verdict(
        assertion="assert_parity",
        ok=False,
        text="<script>",
        output="y",
        runtime="onnxruntime",
        case="seed 0",
        error=float("nan"),
        allowed=1e-7,
        details=("output 'y'",),
        culprit="the weight",
    )
) | {"test": "a"}


@pytest.fixture(scope="module")
def schema() -> Any:
    return json.loads(resources.files("normdeploy.reports").joinpath("schemas", "tests.json").read_text("utf-8"))


@pytest.mark.parametrize(("verdicts", "ok"), [([], True), ([GOOD], True), ([GOOD, BAD], False)])
def test_json_fits_its_schema_and_is_sorted_by_test(verdicts: Any, ok: bool, schema: Any, tmp_path: Path) -> None:
    write_session_report(tmp_path / "r.json", verdicts)
    document = json.loads((tmp_path / "r.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["ok"] is ok
    assert [verdict["test"] for verdict in document["verdicts"]] == sorted(verdict["test"] for verdict in verdicts)


def test_schema_refuses_a_verdict_without_one_of_its_keys(schema: Any) -> None:
    for key in GOOD:
        document = make_document([GOOD, BAD])
        del document["verdicts"][0][key]
        assert not jsonschema.Draft202012Validator(schema).is_valid(document)


def test_page_names_failures_first_and_escapes_texts(tmp_path: Path) -> None:
    write_session_report(tmp_path / "r.html", [GOOD, BAD])
    page = (tmp_path / "r.html").read_text()
    assert "1 failed, 1 passed" in page
    assert page.index("culprit: the weight") < page.index("assert_norms_fused")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NormdeployError, match="does not exist"):
        write_session_report(tmp_path / "gone" / "r.json", [])
