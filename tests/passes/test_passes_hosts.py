"""The passes in onnxsim and Olive themselves: the norm becomes one node, the numbers stay, and a model without norms
passes through."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from normdeploy.errors import CertificateError
from normdeploy.passes import NormRewriter, norm_rewrite
from normdeploy.passes.olive_packages import PASS, olive_packages
from normdeploy.storage.file_hash import hash_file
from tests.passes.graphs import model_with_norm, model_without_norm, ops, sample
from tests.support import run_onnxruntime

pytestmark = pytest.mark.hosts

_MISSING = "make test-hosts installs it"


def _require_same_numbers(found: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """A layer norm of 16 numbers and two products of 16 terms: well within 64 units of the last place."""
    (numbers,), (wanted,) = (run_onnxruntime(proto, sample()) for proto in (found, original))
    assert np.isfinite(wanted).all()
    assert np.abs(numbers - wanted).max() <= 64 * np.finfo(np.float32).eps * np.abs(wanted).max()


@pytest.fixture
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")


# ------------------------------------------------------------------ onnxsim


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt"])
def test_onnxsim_fuses_the_norm_in_its_fixed_point(runtime: str) -> None:
    onnxsim = pytest.importorskip("onnxsim", reason=_MISSING)
    rewriter = NormRewriter(runtime=runtime)
    made, checked = onnxsim.simplify(model_with_norm(), custom_rewriter=rewriter, check_n=2)
    assert checked
    assert ops(made) == ["MatMul", "LayerNormalization", "MatMul", "Twice"]
    assert [rewrite.modified for rewrite in rewriter.rewrites].count(True) == 1
    _require_same_numbers(made, model_with_norm())
    alone, _ = onnxsim.simplify(model_with_norm())
    assert "LayerNormalization" not in ops(alone), "onnxsim fuses this norm itself, so the test shows nothing"


def test_onnxsim_without_a_norm_makes_the_same_file_as_alone() -> None:
    onnxsim = pytest.importorskip("onnxsim", reason=_MISSING)
    rewriter = NormRewriter()
    made, _ = onnxsim.simplify(model_without_norm(), custom_rewriter=rewriter)
    alone, _ = onnxsim.simplify(model_without_norm())
    assert rewriter.rewrites
    assert not any(rewrite.modified for rewrite in rewriter.rewrites)
    assert made.SerializeToString(deterministic=True) == alone.SerializeToString(deterministic=True)


def test_onnxsim_passes_our_error_on(monkeypatch: pytest.MonkeyPatch) -> None:
    onnxsim = pytest.importorskip("onnxsim", reason=_MISSING)

    def fail(*_: object, **__: object) -> None:
        raise CertificateError("not proved")

    monkeypatch.setattr(norm_rewrite, "optimize", fail)
    with pytest.raises(CertificateError, match="not proved"):
        onnxsim.simplify(model_with_norm(), custom_rewriter=NormRewriter(strict=True))


# ------------------------------------------------------------------ Olive


def _workflow(model: Path, *passes: Mapping[str, Any]) -> dict[str, Any]:
    folder = model.parent
    local = {
        "type": "LocalSystem",
        "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
    }
    return {
        "input_model": {"type": "OnnxModel", "model_path": str(model)},
        "systems": {"local": local},
        "host": "local",
        "target": "local",
        "passes": {f"pass {i}": dict(each) for i, each in enumerate(passes)},
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
    }


def test_olive_run_fuses_the_norm_and_delivers_the_report(tmp_path: Path, without_telemetry: None) -> None:
    """The command line of Olive, with its own pass after ours."""
    pytest.importorskip("olive", reason=_MISSING)
    onnx.save(model_with_norm(), tmp_path / "m.onnx")
    ours = {"type": PASS, "runtime": "onnxruntime", "strict": True}
    theirs = {"type": "OnnxPeepholeOptimizer", "onnxoptimizer_optimize": False}
    (tmp_path / "workflow.json").write_text(json.dumps(_workflow(tmp_path / "m.onnx", ours, theirs)))
    listed = subprocess.run(
        [sys.executable, "-m", "normdeploy.passes.olive_packages"], capture_output=True, text=True, check=True
    )
    (tmp_path / "packages.json").write_text(listed.stdout)
    command = ["run", "--config", str(tmp_path / "workflow.json"), "--package-config", str(tmp_path / "packages.json")]
    done = subprocess.run([sys.executable, "-m", "olive", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = onnx.load(tmp_path / "out" / "model.onnx")
    assert ops(made) == ["MatMul", "LayerNormalization", "MatMul", "Add"]
    _require_same_numbers(made, model_with_norm())
    report = json.loads((tmp_path / "out" / "normdeploy_report.json").read_text())
    assert report["schema"] == "normdeploy/report/1"
    assert [(norm["status"], norm["certificate"]["identity"]) for norm in report["norms"]] == [("fused", True)]


@pytest.mark.parametrize("external", [False, True])
def test_olive_writes_the_file_that_the_report_names(tmp_path: Path, without_telemetry: None, external: bool) -> None:
    pytest.importorskip("olive", reason=_MISSING)
    from olive.workflows import run

    stored = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0} if external else {}
    onnx.save(model_with_norm(), tmp_path / "m.onnx", **stored)
    ours = {"type": PASS, "save_as_external_data": external, "size_threshold": 0}
    run(_workflow(tmp_path / "m.onnx", ours), package_config=olive_packages())
    out = tmp_path / "out"
    made = onnx.load(out / "model.onnx")
    assert ops(made) == ["MatMul", "LayerNormalization", "MatMul", "Twice"]
    assert bool(list(out.glob("*.data"))) is external
    _require_same_numbers(made, model_with_norm())
    if not external:
        report = json.loads((out / "normdeploy_report.json").read_text())
        assert report["sha256"]["output"] == hash_file(out / "model.onnx")


def test_olive_passes_a_model_without_norms_on(tmp_path: Path, without_telemetry: None) -> None:
    pytest.importorskip("olive", reason=_MISSING)
    from olive.workflows import run

    onnx.save(model_without_norm(), tmp_path / "m.onnx")
    run(_workflow(tmp_path / "m.onnx", {"type": PASS}), package_config=olive_packages())
    assert (tmp_path / "out" / "model.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
    assert not (tmp_path / "out" / "normdeploy_report.json").exists()


def test_olives_own_passes_stay_in_the_package_config() -> None:
    pytest.importorskip("olive", reason=_MISSING)
    from olive.package_config import OlivePackageConfig

    ours, theirs = olive_packages(), json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    assert set(ours["passes"]) - set(theirs["passes"]) == {PASS}
    assert {name: ours["passes"][name] for name in theirs["passes"]} == theirs["passes"]


def test_olive_stops_at_a_refused_runtime(tmp_path: Path, without_telemetry: None) -> None:
    pytest.importorskip("olive", reason=_MISSING)
    from olive.workflows import run

    onnx.save(model_with_norm(), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="unknown runtime 'ort'"):
        run(_workflow(tmp_path / "m.onnx", {"type": PASS, "runtime": "ort"}), package_config=olive_packages())
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_olive_stops_at_a_failed_proof(
    tmp_path: Path, without_telemetry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("olive", reason=_MISSING)
    from olive.workflows import run

    def fail(*_: object, **__: object) -> None:
        raise CertificateError("not proved")

    monkeypatch.setattr(norm_rewrite, "optimize", fail)
    onnx.save(model_with_norm(), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="NormdeployFuseNorms: not proved"):
        run(_workflow(tmp_path / "m.onnx", {"type": PASS, "strict": True}), package_config=olive_packages())
    assert not (tmp_path / "out" / "model.onnx").exists()
