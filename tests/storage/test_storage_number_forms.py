"""Files whose numbers are stored in every form that ONNX allows are read as files with dense weights are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.attack import files


def test_weights_in_drawn_forms_are_read_as_dense_ones(tmp_path: Path) -> None:
    for seed in range(1, 51):
        folder = tmp_path / str(seed)
        folder.mkdir()
        verdict = files.judge(seed, folder, rewritten=seed % 10 == 0)
        assert verdict.kind not in ("false", "failed"), (seed, verdict)
