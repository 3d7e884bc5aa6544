"""The progress bar says which stage runs, and why loading takes its time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from normdeploy.verbs.stage_progress import StageTimer, describe_loading


def test_a_large_file_is_loaded_with_its_size_after_the_import_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "model.pt2").open("wb") as file:
        # A sparse file takes no disk.
        file.truncate(2_100_000_000)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert describe_loading(tmp_path / "model.pt2") == "model.pt2, 2.1 GB, after the import of torch"


def test_an_onnx_file_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert describe_loading(tmp_path / "small.onnx") == "small.onnx"


def test_a_model_in_memory_is_not_described() -> None:
    assert not describe_loading(object())


def test_the_bar_shows_the_details_and_the_seconds_keep_the_name() -> None:
    shown = []
    stages = StageTimer(lambda stage, done, total: shown.append(stage))
    with stages("load", "model.pt2, 2.1 GB"):
        pass
    with stages("export"):
        pass
    assert shown == ["load model.pt2, 2.1 GB", "export"]
    assert [*stages.seconds] == ["load", "export"]
