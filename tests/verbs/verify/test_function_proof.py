"""``verify`` with an ONNX reference tries to prove that the files are the same function."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.verbs.verify.function_proof import prove_against_reference
from normdeploy.verbs.verify.verify_tables import describe_verdict
from tests.verbs.prove.graphs import model

REFERENCE = "a = Mul(x, c) y = Exp(a)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    c = np.float32(0.5)
    files = {
        "a": model(REFERENCE, c=c),
        "equal": model("a = Mul(c, x) y = Exp(a)", c=c),
        "near": model(REFERENCE, c=np.nextafter(c, np.float32(1))),
        "wrong": model(REFERENCE, c=np.float32(0.6)),
        "quantized": model("z = QuantizeLinear(x, c) d = DequantizeLinear(z, c) a = Mul(d, c) y = Exp(a)", c=c),
        "half": model("h = Cast <to = 10> (x) w = Cast <to = 1> (h) a = Mul(w, c) y = Exp(a)", c=c),
    }
    for name, made in files.items():
        onnx.save(made, tmp_path / f"{name}.onnx")
    return tmp_path


def test_verify_equal_file_is_proved(folder: Path) -> None:
    verdict = normdeploy.verify(folder / "a.onnx", folder / "equal.onnx")
    assert verdict
    (proof,) = verdict.proofs
    assert proof.is_proved
    assert "proof: equal.onnx: proved equal" in str(verdict)
    assert json.loads(json.dumps(verdict.to_json()["proofs"]))[0]["verdict"] == "equal"


def test_verify_wrong_file_shows_the_counterexample(folder: Path) -> None:
    verdict = normdeploy.verify(folder / "a.onnx", folder / "wrong.onnx")
    assert not verdict
    assert verdict.proofs[0].is_different
    assert "in the reference and" in verdict.proofs[0].counterexample
    assert describe_verdict(verdict) == "NOT verified"


def test_verify_constant_off_by_one_ulp_passes_and_says_that_the_function_differs(folder: Path) -> None:
    verdict = normdeploy.verify(folder / "a.onnx", folder / "near.onnx")
    assert verdict
    assert "although near.onnx computes a different function" in describe_verdict(verdict)


def test_verify_wrong_tolerance_of_a_proved_file_names_rounding(folder: Path) -> None:
    verdict = normdeploy.verify(folder / "a.onnx", folder / "equal.onnx", tolerance="1e-30:0")
    assert not verdict
    assert "although proved equal in exact arithmetic" in describe_verdict(verdict)


@pytest.mark.parametrize(("name", "reason"), [("quantized", "quantized"), ("half", "half precision")])
def test_verify_other_precision_is_not_proved(folder: Path, name: str, reason: str) -> None:
    verdict = normdeploy.verify(folder / "a.onnx", folder / f"{name}.onnx", seeds=1)
    (proof,) = verdict.proofs
    assert proof.verdict == ""
    assert reason in proof.text


def test_verify_without_proof_has_none(folder: Path) -> None:
    assert normdeploy.verify(folder / "a.onnx", folder / "equal.onnx", prove=False).proofs == ()


def test_verify_maps_names_for_the_proof(folder: Path) -> None:
    renamed = onnx.load(folder / "equal.onnx")
    renamed.graph.node[-1].output[0] = "z"
    renamed.graph.output[0].name = "z"
    onnx.save(renamed, folder / "renamed.onnx")
    verdict = normdeploy.verify(folder / "a.onnx", folder / "renamed.onnx", map={"z": "y"})
    assert verdict.proofs[0].is_proved


def test_prove_against_reference_stops_at_its_limits(folder: Path) -> None:
    files = [folder / "equal.onnx"]
    (slow,) = prove_against_reference(folder / "a.onnx", files, {}, 0.0, 2**30)
    assert slow.verdict == "not known"
    assert "time limit" in slow.text
    (large,) = prove_against_reference(folder / "a.onnx", files, {}, 60.0, 1)
    assert large.verdict == ""
    assert "memory" in large.text
