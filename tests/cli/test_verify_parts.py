"""The exit code of ``verify`` on a folder of parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

import normdeploy
from normdeploy.cli.options import ReportingOptions
from normdeploy.cli.verify import verify_parts
from normdeploy.errors import RuntimeUnavailable
from normdeploy.verb_options import LoadingOptions
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.output_results import OutputResult
from normdeploy.verbs.verify.parts_comparison import PartsComparison
from normdeploy.verbs.verify.runtime_candidates import NotRun
from normdeploy.verbs.verify.verify_options import StrictOption, VerifyOptions

OPTIONS = (VerifyOptions(), LoadingOptions(), ReportingOptions(quiet=True), StrictOption())
MISSED = Comparison((), (NotRun("cuda", "no GPU", "a.onnx"),), (), (), 0.0)
WRONG = Comparison(
    (OutputResult("y", "ort", "float32", 1.0, 1.0, 1e-6, "fail", "seed 0", file="a.onnx", by_default="fail"),),
    (),
    ("seed 0",),
    (),
    0.0,
)


@pytest.mark.parametrize(
    ("parts", "end", "said"),
    [
        ((MISSED, MISSED), RuntimeUnavailable, "^cuda: no GPU; cuda: no GPU$"),
        ((MISSED, WRONG), typer.Exit, "^1$"),
        ((WRONG, WRONG), typer.Exit, "^1$"),
    ],
)
def test_parts_exit_with_3_only_where_none_is_wrong(
    parts: tuple[Comparison, ...],
    end: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = PartsComparison({f"{place}.onnx": part for place, part in enumerate(parts)}, ())
    monkeypatch.setattr(normdeploy, "verify_parts", lambda *args, **kwargs: verdict)
    for file in verdict.comparisons:
        (tmp_path / file).write_bytes(b"not looked at")
    with pytest.raises(end, match=said):
        verify_parts(tmp_path / "model", tmp_path, *OPTIONS)
