"""The page of builds of quantized files keeps the rows of what is not built again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.quantization import builds, environments


def test_builds_of_one_model_leave_the_rows_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(subject: str, contender: str) -> Path:
        path = tmp_path / f"{subject} {contender}.onnx"
        if contender == "normdeploy fp8":
            path.touch()
        return path

    def built(path: Path, capability: str, profiles: list[str]) -> str:
        return "no GPU of 8.6 has fp8" if capability == "8.6" else f"{seconds} s"

    monkeypatch.setattr(environments, "written", written)
    monkeypatch.setattr(builds, "built", built)
    monkeypatch.setattr(builds, "RESULTS", tmp_path)
    monkeypatch.setattr(builds, "KEPT", tmp_path / "quantization_builds.json")
    for model, seconds in (("minilm", 1.5), ("efficientnet", 2.5), ("minilm", 99.0)):
        monkeypatch.setattr(sys, "argv", ["builds", "--only", model])
        with pytest.raises(SystemExit) as ended:
            builds.main()
        assert bool(ended.value.code) == (seconds > builds.MOST_S)
    rows = [
        line for line in (tmp_path / "quantization_builds.md").read_text().splitlines() if "normdeploy fp8 |" in line
    ]
    assert ["99.0 s" in rows[0], "2.5 s" in rows[1], len(rows)] == [True, True, 2]
